"""What the words of an nccl row say of its units: bytes of the whole message and microseconds,
unless they say otherwise.

A size of each rank's part is converted, since it says of which message it is the part; whatever
leaves more than one reading is refused.
"""

from __future__ import annotations

import re

_WHAT = r"(?:bytes?|sizes?|messages?|shards?|chunks?|buffers?|parts?)"
_WHO = r"(?:rank|gpu|device|process)"
_PER_RANK = re.compile(
    rf"\bper[-_ ]?{_WHO}[-_ ]+{_WHAT}\b|\b{_WHAT}[-_ ]+(?:(?:is|are|given|counted)\s+)?per[-_ ]{_WHO}\b"  # noqa: E501
    rf"|\b{_WHAT}\s+of\s+(?:one|each)\s+{_WHO}\b|\beach\s+{_WHO}(?:'s|s')?\s+{_WHAT}\b",
    re.IGNORECASE,
)
_ANOTHER = re.compile(
    r"\b(?:sizes?|size_bytes|messages?)\s*(?:is|are|=|:)?\s*(?:given\s+)?in\s+(?!bytes?\b|b\b)[a-z]+"
    r"|\b(?:wire|bus|sent|received|transferred)[-_ ]bytes\b|\bbytes\s+(?:sent|received|on\s+the\s+wire)\b"  # noqa: E501
    r"|\bper[-_ ]?node[-_ ]+(?:bytes|sizes?)\b"
    r"|\btimes?(?:_us)?\s*(?:is|are|=|:)?\s*(?:given\s+)?in\s+(?!us\b|µs\b|microseconds?\b)[a-z]+",
    re.IGNORECASE,
)
SHARED_OUT = ("all_gather", "reduce_scatter")
"""Of whose message each rank has a part; of the others' it has all."""


def another_unit(words: str) -> str:
    """The words by which a size or a time is in another unit than bytes and microseconds, and which
    nobody can convert; "" for none."""
    found = _ANOTHER.search(words)
    return found[0] if found else ""


def without(words: str) -> str:
    """The words without those that say of which part of a message a size is, which `whole_message`
    reads."""
    return _PER_RANK.sub(" ", words)


def whole_message(collective: str, nbytes: int, *, ranks: int, words: str) -> int:
    """Bytes of the whole message, of which `words` may say that `nbytes` are each rank's part."""
    return nbytes * ranks if collective in SHARED_OUT and _PER_RANK.search(words) else nbytes


def size_unit(header: str) -> str:
    """The unit of an nccl-tests table's sizes, the first on the line of units under its columns; ""
    for a line without one."""
    found = re.search(r"\(([^)]*)\)", header)
    return found[1].strip() if found else ""
