"""Words of ZeRO's stages: 0 to 3, "ZeRO-1", "zero stage 2", "none" and "DDP" for 0, as columns and
names of frameworks have them."""

from __future__ import annotations

import re

from zsim.calibration.rows.records import Record, RowError
from zsim.calibration.vocabulary.sharding import sharding

COLUMNS = ("zero_stage", "zero", "zero_optimization_stage")
UNSTAGED = ("none", "off", "ddp", "no", "no_shard", "disabled", "false")
_IN_WORDS = re.compile(
    r"\bzero[-_ ]*(?:dp[-_ ]*)?(?:stage[-_ ]*)?([0-9]+|\+\+|inf\w*|offload)", re.IGNORECASE
)
_WITHOUT_ZERO = (
    (re.compile(r"\b(?:use[-_ ])?dist(?:ributed)?[-_ ]opt(?:im(?:izer)?)?\b", re.IGNORECASE), 1),
    (re.compile(r"\bfsdp[12]?\b", re.IGNORECASE), 3),
)
"""What Megatron and torch call the stages that shard optimizer states alone, and everything."""
STAGES = {"": 0, "grad_op": 2, "full": 3}
"""Of torch's words for what is sharded."""


def stage_of(words: str, *, name: str) -> int:
    """The stage that the words of the column `name` are; RowError for other words."""
    said = words.strip().lower()
    if found := re.fullmatch(r"(?:zero[-_ ]*)?(?:stage[-_ ]*)?([0-3])(?:\.0)?", said):
        return int(found[1])
    if re.sub(r"[\s-]+", "_", said) in UNSTAGED:
        return 0
    raise RowError(f"{name}: expected 0, 1, 2 or 3, found {words[:20]!r}")


def stage_in(words: str, *, name: str) -> int | None:
    """The stage that is named among other words of the column `name`, None where none is; RowError
    for two, and for one that is none."""
    found = set(_IN_WORDS.findall(words))
    if not found:
        named = {stage for pattern, stage in _WITHOUT_ZERO if pattern.search(words)}
        return max(named) if named else None
    if found - set("0123") or len(found) > 1:
        raise RowError(f"{name}: expected one stage of ZeRO, 0 to 3, found {words[:40]!r}")
    return int(found.pop())


def stage_said(record: Record) -> int | None:
    """The stage by all of the row's columns, None where none says it; RowError where two contradict
    each other."""
    said: dict[str, int] = {
        name: stage_of(words, name=name) for name in COLUMNS if (words := record.text(name, ""))
    }
    if words := record.text("sharding", ""):
        said["sharding"] = _of_sharding(words)
    for name in ("framework", "technique"):
        if (stage := stage_in(record.text(name, ""), name=name)) is not None:
            said[name] = stage
    if len(set(said.values())) > 1:
        names = " and ".join(said)
        raise RowError(f"{names}: expected one stage of ZeRO, found "
                       f"{' and '.join(str(stage) for stage in said.values())}")
    return next(iter(said.values()), None)


def _of_sharding(words: str) -> int:
    """The stage that a word of torch's, or of ZeRO's, means; RowError for a hybrid, which no stage
    is."""
    try:
        return stage_of(words, name="sharding")
    except RowError:
        asked = sharding(words)
    if asked.hybrid:
        raise RowError(f"sharding: expected a stage of ZeRO, found {words[:40]!r}")
    return STAGES[asked.form]
