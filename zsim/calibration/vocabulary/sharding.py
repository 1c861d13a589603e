"""Words of torch's FullyShardedDataParallel for what it shards: FULL_SHARD, "SHARD_GRAD_OP
(ZeRO-2)", hybrid, NO_SHARD; and FSDP2.

The stages of ZeRO are those that torch's documentation says its strategies are. What stands beside
a word, in brackets or behind a comma, has to mean the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zsim.calibration.rows.checks import UNREAD, Assumed
from zsim.calibration.rows.records import Record, RowError
from zsim.calibration.vocabulary.resharding import resharding


@dataclass(frozen=True, slots=True)
class Sharding:
    """What is sharded, "full", "grad_op" for what stays gathered after forward, or "" for nothing,
    whether nodes are replicas, and whether each parameter is sharded by itself, as FSDP2 does."""

    form: str
    hybrid: bool = False
    per_parameter: bool = False


NONE, FULL, GRAD_OP = Sharding(""), Sharding("full"), Sharding("grad_op")
HYBRID, HYBRID_GRAD_OP = Sharding("full", hybrid=True), Sharding("grad_op", hybrid=True)
WORDS: dict[str, Sharding] = {
    **dict.fromkeys(
        ("fsdp", "fsdp1", "full_shard", "fully_sharded", "fully_shard", "zero_3"), FULL
    ),
    "fsdp2": Sharding("full", per_parameter=True),
    **dict.fromkeys(("shard_grad_op", "grad_op", "zero_2"), GRAD_OP),
    **dict.fromkeys(("hsdp", "hybrid_shard", "hybrid", "hybrid_sharded"), HYBRID),
    **dict.fromkeys(
        ("hybrid_shard_zero_2", "hybrid_zero_2", "hybrid_shard_grad_op"), HYBRID_GRAD_OP
    ),
    **dict.fromkeys(("no_shard", "ddp"), NONE),
}
"""By the words joined by underscores, without one at the front."""
BROADER = {("fsdp", FULL), ("fsdp1", FULL)}
"""Words of every strategy, which say nothing beside another one."""


def sharding(words: str) -> Sharding:
    """What a row's `words` mean; RowError where they are not known, or mean two things."""
    text = re.sub(r"shardingstrategy\.", "", words.lower())
    said = [found for part in re.split(r"[(),;/+]", text) if (found := _joined(part))]
    unknown = [part for part in said if part not in WORDS]
    if unknown or not said:
        expected = (
            "FSDP, FSDP2, FULL_SHARD, SHARD_GRAD_OP, HSDP, HYBRID_SHARD, _HYBRID_SHARD_ZERO2, "
            "DDP, NO_SHARD, ZeRO-2 or 3"
        )
        raise RowError(f"sharding: expected {expected}, found {words[:40]!r}")
    exact = {WORDS[part] for part in said if (part, WORDS[part]) not in BROADER} or {FULL}
    if len(exact) > 1:
        raise RowError(f"sharding: expected one answer, found {words[:40]!r}")
    return exact.pop()


def _joined(part: str) -> str:
    """Words joined by underscores, without an "FSDP" before them."""
    words = re.sub(r"[\s_.-]+", "_", part).strip("_")
    return re.sub(r"^fsdp1?_(?=.)", "", re.sub(r"zero_stage_?|zero(?=\d)", "zero_", words))


def unsharded(record: Record, ranks: int, assumed: Assumed) -> dict[str, object]:
    """The strategy of a row whose GPUs are all replicas; RowError where it says that parameters are
    freed, or kept, after forward."""
    if resharding(record) is not None:
        raise RowError(f"reshard_after_forward: contradicts sharding = "
                       f"{record.text('sharding')[:40]}, where nothing is sharded")
    assumed.add("FSDP without shards taken as DDP")
    return {"name": "ddp", "dp_replicate": ranks}


def one_replica(shards: int, assumed: Assumed) -> None:
    """Names that words of a hybrid over as many GPUs as there are mean nothing but shards over all
    of them."""
    assumed.add(f"a hybrid of one replica as {shards} shards over all GPUs, for there is nothing "
                f"that it replicates")


def of_fsdp2(record: Record, ranks: int, assumed: Assumed) -> dict[str, object]:
    """The strategy of a row that names FSDP2 where its source's own rows are FSDP1: over all GPUs,
    resharding as the row says."""
    assumed.add("FSDP2, which none of the source's own rows is", widens=UNREAD)
    asked = resharding(record)
    return {
        "name": "fsdp2", "dp_shard": ranks,
        **({} if asked is None else {"reshard_after_forward": asked}),
    }
