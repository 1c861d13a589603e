"""Whether a unit's parameters are freed after forward, as columns and names of techniques say it.

People write reshard_after_forward = True, "FSDP, no reshard", "never" (torchtitan's option),
"ZeRO-2" or a number of ranks.
"""

from __future__ import annotations

import re

from zsim.calibration.rows.checks import Assumed
from zsim.calibration.rows.records import FALSE, TRUE, Record, RowError

COLUMNS = ("reshard_after_forward", "fsdp_reshard_after_forward")
_SAID = re.compile(
    r"(?:fsdp_)?reshard(?:[-_ ]after[-_ ]forward)?\s*(?:[=:]\s*)?(true|false|always|never|default|auto|none|yes|no|\d+)\b"  # noqa: E501
)
_KEPT = re.compile(
    r"\b(?:no|without|not|never)[-_ ]reshard(?:ing|ed)?(?:[-_ ]after[-_ ]forward)?\b|(?:\b|_)zero[-_ ]?2\b"  # noqa: E501
    r"|\b(?:_?hybrid_)?shard[-_ ]grad[-_ ]op\b"
    r"|\bgrad_op\b|\bnever\b"
)
_FREED = re.compile(r"\bzero[-_ ]?3\b|\breshard(?:[-_ ]after[-_ ]forward)?\b")


def value_of(word: str) -> bool | int | None:
    """True, False, or a number of ranks that parameters stay sharded over; None for the default.
    RowError for another word."""
    said = word.strip().lower()
    if said in ("", "default", "auto", "none"):
        return None
    if said in (*TRUE, *FALSE, "always", "never"):
        return said in TRUE or said == "always"
    if re.fullmatch(r"\d{1,6}(?:\.0)?", said):
        return int(float(said))
    raise RowError(f"reshard_after_forward: expected True, False or a number of ranks, found "
                   f"{word[:40]!r}")


def resharding(record: Record, words: str = "") -> bool | int | None:
    """What the row's columns and `words` of its technique say; None where neither does. RowError
    where they contradict each other."""
    columns = [value_of(record.text(name, "")) for name in COLUMNS]
    found = {repr(value): value for value in (*columns, said_in(words)[0]) if value is not None}
    if len(found) > 1:
        raise RowError(f"reshard_after_forward: {' contradicts '.join(found)}")
    return next(iter(found.values()), None)


def of_fsdp1(record: Record, *, sharding: str, form: str, assumed: Assumed) -> str:
    """FSDP1's form, "full" or "grad_op", where the row's word `sharding` means `form`; RowError
    where its columns contradict that."""
    asked = resharding(record)
    if not isinstance(asked, bool | None):
        raise RowError(f"reshard_after_forward: expected True or False of FSDP1, found {asked}")
    if asked and form == "grad_op":
        raise RowError(f"reshard_after_forward: True contradicts sharding = {sharding}")
    if asked is False and form == "full":
        assumed.add(f"{sharding} that does not reshard after forward as FSDP1's SHARD_GRAD_OP")
    return "grad_op" if asked is False else form


def said_in(words: str) -> tuple[bool | int | None, str]:
    """What words of a technique say of it, and the words without that."""
    text, found = words.lower(), list[bool | int | None]()
    for said in _SAID.finditer(text):
        found.append(value_of(said[1]))
    text = _SAID.sub(" ", text)
    for pattern, value in ((_KEPT, False), (_FREED, True)):
        if pattern.search(text):
            found.append(value)
            text = pattern.sub(" ", text)
    told = [value for value in found if value is not None]
    if len({repr(value) for value in told}) > 1:
        raise RowError(f"technique: {words[:60]!r} says two things of reshard_after_forward")
    return told[0] if told else None, text
