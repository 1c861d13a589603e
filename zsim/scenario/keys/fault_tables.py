"""The schema of a scenario's `faults`: one table for each kind of fault."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Literal

from zsim.engine.faults.fault import Distribution, Each, Jitter
from zsim.ir.ops import COLLECTIVES, OP_KINDS
from zsim.records import dataclass
from zsim.scenario.keys.table import MAX_NAME, Delay, Table, ValueBounds, key, table_of

Rank = Annotated[int, ValueBounds(ge=0, le=1_000_000, description="The rank, from 0.")]
Node = Annotated[int, ValueBounds(ge=0, le=100_000, description="The node, from 0.")]
Nic = Annotated[int, ValueBounds(ge=0, le=1024, description="The NIC in the node, from 0.")]


def _op_of(kinds: Collection[str], example: str) -> Callable[[str], str]:
    """The check that text has the kind of an op among `kinds`, and a unit."""

    def check(written: str) -> str:
        kind, _, unit = written.partition(" ")
        if kind not in kinds or not unit:
            raise ValueError(f'expected the kind and unit of an op, as "{example}"')
        return written

    return check


AnyOp = Annotated[
    str,
    _op_of(OP_KINDS, "backward blocks.1"),
    ValueBounds(
        max_length=MAX_NAME,
        description="The op in whose place it ends, by kind and unit in `zsim show --program`: the "
                    'first "backward blocks.1" of the steady step.',
    ),
]
Collective = Annotated[
    str,
    _op_of(COLLECTIVES, "all_gather blocks.1"),
    ValueBounds(
        max_length=MAX_NAME,
        description="The collective, by kind and unit in `zsim show --program`: the first "
                    '"all_gather blocks.1" of the steady step.',
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankTable:
    """A rank whose kernels take longer, as those of a throttled GPU."""

    kind: Literal["slow_rank"]
    rank: Rank
    factor: float = key(gt=1, le=1000, meaning="Kernels' time over the others', above 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class JitterTable:
    """Random delays of every rank, independent of one another."""

    kind: Literal["jitter"]
    mean: Delay = key(meaning='Mean of the delays, as "200 us".')
    distribution: Distribution = key(
        default=Jitter(mean_ns=0).distribution,
        meaning="exponential: P(delay > t) = exp(-t / mean); uniform: from 0 to twice the "
                    "mean.",
    )
    each: Each = key(
        default=Jitter(mean_ns=0).each,
        meaning="Each rank's step begins a delay later, or each of its ops with kernels takes "
                    "one longer.",
    )
    seed: int = key(
        default=0, ge=0, le=2**31,
        meaning="Seed of the draws; `zsim run --seeds` takes one after another from it on.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStartTable:
    """A rank that begins each step late, as one that waits for its data does."""

    kind: Literal["late_start"]
    rank: Rank
    by: Delay = key(meaning='Time by which it is late, as "5 ms".')


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureTable:
    """A rank that ends in the middle of a step, and answers nobody from then on."""

    kind: Literal["failure"]
    rank: Rank
    at: AnyOp


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCollectiveTable:
    """A rank that does not issue a collective, as under a condition that holds there alone."""

    kind: Literal["skipped_collective"]
    rank: Rank
    at: Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderedCollectiveTable:
    """A rank that issues a collective and its next one in each other's place, as by the order of a
    set."""

    kind: Literal["reordered_collective"]
    rank: Rank
    at: Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkTable:
    """One NIC of one node whose link to the network carries less than the others', as a damaged
    cable does."""

    kind: Literal["slow_link"]
    node: Node
    nic: Nic
    bandwidth: str = key(meaning='Bandwidth of its link, as "100 Gbit/s".')


@dataclass(frozen=True, slots=True, kw_only=True)
class LostLinkTable:
    """One NIC of one node whose link carries nothing."""

    kind: Literal["lost_link"]
    node: Node
    nic: Nic


FAULT_TABLES: Mapping[str, Table] = {
    "slow_rank": table_of(SlowRankTable),
    "jitter": table_of(JitterTable),
    "late_start": table_of(LateStartTable),
    "failure": table_of(FailureTable),
    "skipped_collective": table_of(SkippedCollectiveTable),
    "reordered_collective": table_of(ReorderedCollectiveTable),
    "slow_link": table_of(SlowLinkTable),
    "lost_link": table_of(LostLinkTable),
}
"""Each kind of fault and its schema."""
