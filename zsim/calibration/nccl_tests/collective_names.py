"""Which collective a log of nccl-tests is of: what the log says of itself, held to what it is given
and to the file's name.

Two that contradict each other are why the log is skipped: bandwidths of one collective are taken
for those of another without a sign where both have one factor, as all-gathers and sends of many
ranks nearly do.
"""

from __future__ import annotations

import re
from collections.abc import Collection

PROGRAMS = (
    *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"),
    *("alltoall", "sendrecv", "scatter", "gather", "hypercube"),
)
"""What nccl-tests' programs run, each called so with `_perf` behind (its src/Makefile)."""
LONGEST = 60
"""Characters of a program's name that are read."""
UNNAMED = "no collective named: `--collective` says it, or the file's name, as all_gather.txt"
_WORDS = re.compile(
    r"(all)[-_ ]?(reduce|gather)(?![a-z])|(reduce)[-_ ]?(scatter)|(broadcast)|(all)[-_ ]?to[-_ ]?(all)|(send)[-_ ]?(recv)|(hypercube)"  # noqa: E501
)
_GLUED = ("alltoall", "sendrecv")
_DECLARED = re.compile(
    rf"^#\s*Collective test (?:starting|concluded):[ \t]*(\S{{1,{LONGEST}}})", re.MULTILINE
)


def collectives_of(text: str) -> tuple[str, ...]:
    """The collectives that `text` names however they are spelled, as AllReduce, all-gather or
    reduce_scatter_perf, in its order."""
    found = (
        tuple(part for part in match.groups() if part)
        for match in _WORDS.finditer(re.sub(r"_perf\b", "", text.lower()))
    )
    return tuple(
        dict.fromkeys(
            glued if (glued := _to(parts)) in _GLUED else "_".join(parts) for parts in found
        )
    )


def _to(parts: tuple[str, ...]) -> str:
    return "alltoall" if parts == ("all", "all") else "".join(parts)


def programs(text: str) -> tuple[str, ...]:
    """What the programs of nccl-tests that `text` names run, in its order, whatever stands before
    their names."""
    found = dict[str, None]()
    for match in re.finditer(r"_perf(?![A-Za-z0-9])", text):
        before = text[max(0, match.start() - LONGEST) : match.start()]
        named = [name for name in PROGRAMS if re.search(rf"(?<![A-Za-z0-9]){name}$", before)]
        if named:
            found[max(named, key=len)] = None
    return tuple(found)


def said_by(log: str) -> tuple[str, ...]:
    """The collectives that the text of one run says it ran: by the lines in which nccl-tests does,
    else by the programs it names."""
    declared = dict.fromkeys(name for word in _DECLARED.findall(log) for name in _declared(word))
    return tuple(declared) or programs(log)


def _declared(word: str) -> tuple[str, ...]:
    """What one word of such a line says; a program that nobody knows runs what it is called by."""
    own = word.rpartition("/")[2]
    other = (
        (own.partition("_perf")[0],)
        if re.search(r"._perf(?![A-Za-z0-9])", own)
        else collectives_of(own)
    )
    return programs(own) or other


def said_by_name(source: str) -> tuple[str, ...]:
    """The collectives that a file's own name says, or where it says none those that its folders
    say."""
    return collectives_of(source.rpartition("/")[2]) or collectives_of(source)


def agreed(
    log: Collection[str], *, given: str, source: str, modelled: Collection[str]
) -> tuple[str, str]:
    """The one collective that all agree on, or why there is none, naming each that says another;
    the log is what is believed.

    `given` is what the option says, "" for nothing.
    """
    said = {
        "the log": tuple(log), "--collective": (given,) if given else (),
        "the file's name": said_by_name(source),
    }
    said = {who: names for who, names in said.items() if names}
    if not said:
        return "", UNNAMED
    first, *others = said.items()
    left = [name for name in first[1] if all(name in names for _, names in others)]
    lacking = [name for name in first[1] if name not in modelled] if len(first[1]) == 1 else []
    behind = f"{lacking[0][:40]} has no model" if lacking else ""
    if not left:
        apart = "; ".join(f"{who} says {' and '.join(names)[:80]}" for who, names in said.items())
        return "", f"collectives contradict each other: {apart}" + (f"; {behind}" if behind else "")
    if len(left) > 1:
        return "", f"{first[0]} names several collectives: {', '.join(left)[:120]}"
    return ("", behind or f"{left[0]} has no model") if left[0] not in modelled else (left[0], "")
