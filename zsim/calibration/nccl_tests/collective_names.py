"""The collective of an nccl-tests log: its own statement, checked against `--collective` and the
file's name.

A contradiction skips the log. All-gathers and sends of many ranks have nearly one bandwidth factor,
so that nothing else would show the mistake.
"""

from __future__ import annotations

import re
from collections.abc import Collection

PROGRAMS = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
    *("alltoall", "sendrecv", "scatter", "gather", "hypercube"),
)
"""Collectives of nccl-tests' programs, whose names add `_perf` (its src/Makefile)."""
LONGEST = 60
"""Characters of a program's name that are read."""
UNNAMED = "no collective named: `--collective` says it, or the file's name, as all_gather.txt"
_WORDS = re.compile(
    r"(all)[-_ ]?(reduce|gather)(?![a-z])|(reduce)[-_ ]?(scatter)|(broadcast)"
    r"|(all)[-_ ]?to[-_ ]?(all)|(send)[-_ ]?(recv)|(hypercube)"
)
_GLUED = ("alltoall", "sendrecv")
_DECLARED = re.compile(
    rf"^#\s*Collective test (?:starting|concluded):[ \t]*(\S{{1,{LONGEST}}})", re.MULTILINE
)


def collectives_of(text: str) -> tuple[str, ...]:
    """The collectives that `text` names in any spelling, as `AllReduce`, all-gather or
    reduce_scatter_perf, in its order."""
    spellings = (
        tuple(part for part in match.groups() if part)
        for match in _WORDS.finditer(re.sub(r"_perf\b", "", text.lower()))
    )
    return tuple(
        dict.fromkeys(
            glued if (glued := _to(parts)) in _GLUED else "_".join(parts) for parts in spellings
        )
    )


def _to(parts: tuple[str, ...]) -> str:
    return "alltoall" if parts == ("all", "all") else "".join(parts)


def programs(text: str) -> tuple[str, ...]:
    """Collectives of the nccl-tests programs that `text` names, in its order, with or without a
    path."""
    collectives = dict[str, None]()
    for match in re.finditer(r"_perf(?![A-Za-z0-9])", text):
        before = text[max(0, match.start() - LONGEST) : match.start()]
        named = [name for name in PROGRAMS if re.search(rf"(?<![A-Za-z0-9]){name}$", before)]
        if named:
            collectives[max(named, key=len)] = None
    return tuple(collectives)


def said_by(log: str) -> tuple[str, ...]:
    """The collectives that the text of one run declares, by nccl-tests' own lines, else by the
    programs that it names."""
    declared = dict.fromkeys(name for word in _DECLARED.findall(log) for name in _declared(word))
    return tuple(declared) or programs(log)


def _declared(word: str) -> tuple[str, ...]:
    """Collectives of one word of such a line; an unknown program runs what its name says."""
    own = word.rpartition("/")[2]
    other = (
        (own.partition("_perf")[0],)
        if re.search(r"._perf(?![A-Za-z0-9])", own)
        else collectives_of(own)
    )
    return programs(own) or other


def said_by_name(source: str) -> tuple[str, ...]:
    """The collectives in a file's own name, else those in the names of its folders."""
    return collectives_of(source.rpartition("/")[2]) or collectives_of(source)


def agreed(
    log: Collection[str], *, option: str, source: str, modelled: Collection[str]
) -> tuple[str, str]:
    """The collective on which log, option and file name agree, and "" as its problem; else "" and
    the problem.

    The log comes first. `option` is the value of `--collective`, "" for none.
    """
    sources = {
        "the log": tuple(log), "--collective": (option,) if option else (),
        "the file's name": said_by_name(source),
    }
    sources = {who: names for who, names in sources.items() if names}
    if not sources:
        return "", UNNAMED
    first, *others = sources.items()
    left = [name for name in first[1] if all(name in names for _, names in others)]
    lacking = [name for name in first[1] if name not in modelled] if len(first[1]) == 1 else []
    behind = f"{lacking[0][:40]} has no model" if lacking else ""
    if not left:
        apart = "; ".join(
            f"{who} says {' and '.join(names)[:80]}" for who, names in sources.items()
        )
        return "", f"collectives contradict each other: {apart}" + (f"; {behind}" if behind else "")
    if len(left) > 1:
        return "", f"{first[0]} names several collectives: {', '.join(left)[:120]}"
    return ("", behind or f"{left[0]} has no model") if left[0] not in modelled else (left[0], "")
