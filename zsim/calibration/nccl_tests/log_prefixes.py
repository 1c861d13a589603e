"""Prefixes before every line of an nccl-tests log: a launcher's tag, a time, a host's or a
container's name, colours of a terminal.

No list of them is complete. But nccl-tests begins its own lines with `#`, and the prefixes of those
are the prefixes of all. A prefix is removed wherever a line begins with its shape. Only figures may
differ from line to line, as those of times and ranks do. Other lines stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice

LONGEST = 200
"""Characters before a line, beyond which they are no prefix."""
MOST = 16
"""Most shapes of prefixes in one log, the most frequent ones first."""
MOST_LINES = 100_000
"""Most lines of nccl-tests' own that are read: those of a thousand runs."""
_OWN = re.compile(
    r"#[ \t]{0,20}(?:nccl-tests version|nThread\b|Using devices"
    r"|Collective test (?:starting|concluded)|Rank[ \t]{1,8}\d{1,7}[ \t]"
    r"|size[ \t]+count\b|\(B\)[ \t]|Out of bounds values|Avg bus bandwidth)"
)
"""Beginnings of lines that nccl-tests alone writes."""
_COLOURS = re.compile(r"\x1b(?:\[[0-?]*+[ -/]*+[@-~]|[()][0-9A-B])")
_PARTS = re.compile(r"\d+|[ \t]+|[^\d \t]+")


def plain(text: str) -> str:
    """The text without prefixes and colours; any other text than a log of nccl-tests unchanged."""
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    shapes = _shapes(text)
    if not shapes:
        return text
    patterns = sorted((shape for shape, _ in shapes.most_common(MOST)), key=len, reverse=True)
    return re.sub(rf"(?<![^\r\n])(?:{'|'.join(patterns)})", "", text)


def holds_log(text: str) -> bool:
    """True where a line of the text, which is `plain`, begins as nccl-tests alone begins lines."""
    return re.search(rf"^(?:{_OWN.pattern})", text, re.MULTILINE) is not None


def _shapes(text: str) -> Counter[str]:
    """Shapes of the prefixes of nccl-tests' own lines, with the number of their lines.

    A prefix of lines of one kind alone is left out: it may be a note that cites one.
    """
    kinds, counts = dict[str, str](), Counter[str]()
    of_several = set[str]()
    for own in islice(_OWN.finditer(text), MOST_LINES):
        begin = (
            max(text.rfind(end, max(0, own.start() - LONGEST - 1), own.start()) for end in "\r\n")
            + 1
        )
        if own.start() - begin <= LONGEST and (shape := _shape(text[begin : own.start()])):
            counts[shape] += 1
            if kinds.setdefault(shape, kind := own[0][1:].split()[0]) != kind:
                of_several.add(shape)
    return Counter({shape: counts[shape] for shape in of_several})


def _shape(before: str) -> str:
    """The pattern of all prefixes of the shape of `before`, "" where it is none.

    A letter or a figure would run into the row behind it, so the last one is a blank or a sign.
    Each run of figures, and of blanks, is taken whole: nothing is tried twice.
    """
    if not before or before[-1].isalnum():
        return ""
    return "[ \\t]*+" + "".join(_as_pattern(part) for part in _PARTS.findall(before.lstrip(" \t")))


def _as_pattern(part: str) -> str:
    if part[0].isdecimal():
        return r"\d++"
    return r"[ \t]++" if part[0] in " \t" else re.escape(part)
