"""The schema of a scenario's `faults`: one table for each kind of fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from zsim.engine.faults.fault import Distribution, Each, Jitter
from zsim.ir.ops import COLLECTIVES, OP_KINDS
from zsim.scenario.keys.table import MAX_NAME, Delay, Table

Rank = Annotated[int, Field(ge=0, le=1_000_000, description="The rank, from 0.")]
Node = Annotated[int, Field(ge=0, le=100_000, description="The node, from 0.")]
Nic = Annotated[int, Field(ge=0, le=1024, description="The NIC in the node, from 0.")]


def _op_of(kinds: Collection[str], example: str) -> AfterValidator:
    """The check that text has the kind of an op among `kinds`, and a unit."""

    def check(written: str) -> str:
        kind, _, unit = written.partition(" ")
        if kind not in kinds or not unit:
            raise ValueError(f'expected the kind and unit of an op, as "{example}"')
        return written

    return AfterValidator(check)


AnyOp = Annotated[
    str,
    _op_of(OP_KINDS, "backward blocks.1"),
    Field(
        max_length=MAX_NAME,
        description="The op in whose place it ends, by kind and unit in `zsim show --program`: the "
                    'first "backward blocks.1" of the steady step.',
    ),
]
Collective = Annotated[
    str,
    _op_of(COLLECTIVES, "all_gather blocks.1"),
    Field(
        max_length=MAX_NAME,
        description="The collective, by kind and unit in `zsim show --program`: the first "
                    '"all_gather blocks.1" of the steady step.',
    ),
]


class SlowRankTable(Table):
    """A rank whose kernels take longer, as those of a throttled GPU."""

    kind: Literal["slow_rank"]
    rank: Rank
    factor: float = Field(gt=1, le=1000, description="Kernels' time over the others', above 1.")


class JitterTable(Table):
    """Random delays of every rank, independent of one another."""

    kind: Literal["jitter"]
    mean: Delay = Field(description='Mean of the delays, as "200 us".')
    distribution: Distribution = Field(
        default=Jitter(mean_ns=0).distribution,
        description="exponential: P(delay > t) = exp(-t / mean); uniform: from 0 to twice the "
                    "mean.",
    )
    each: Each = Field(
        default=Jitter(mean_ns=0).each,
        description="Each rank's step begins a delay later, or each of its ops with kernels takes "
                    "one longer.",
    )
    seed: int = Field(
        default=0, ge=0, le=2**31,
        description="Seed of the draws; `zsim run --seeds` takes one after another from it on.",
    )


class LateStartTable(Table):
    """A rank that begins each step late, as one that waits for its data does."""

    kind: Literal["late_start"]
    rank: Rank
    by: Delay = Field(description='Time by which it is late, as "5 ms".')


class FailureTable(Table):
    """A rank that ends in the middle of a step, and answers nobody from then on."""

    kind: Literal["failure"]
    rank: Rank
    at: AnyOp


class SkippedCollectiveTable(Table):
    """A rank that does not issue a collective, as under a condition that holds there alone."""

    kind: Literal["skipped_collective"]
    rank: Rank
    at: Collective


class ReorderedCollectiveTable(Table):
    """A rank that issues a collective and its next one in each other's place, as by the order of a
    set."""

    kind: Literal["reordered_collective"]
    rank: Rank
    at: Collective


class SlowLinkTable(Table):
    """One NIC of one node whose link to the network carries less than the others', as a damaged
    cable does."""

    kind: Literal["slow_link"]
    node: Node
    nic: Nic
    bandwidth: str = Field(description='Bandwidth of its link, as "100 Gbit/s".')


class LostLinkTable(Table):
    """One NIC of one node whose link carries nothing."""

    kind: Literal["lost_link"]
    node: Node
    nic: Nic


FAULT_TABLES: Mapping[str, type[Table]] = {
    "slow_rank": SlowRankTable,
    "jitter": JitterTable,
    "late_start": LateStartTable,
    "failure": FailureTable,
    "skipped_collective": SkippedCollectiveTable,
    "reordered_collective": ReorderedCollectiveTable,
    "slow_link": SlowLinkTable,
    "lost_link": LostLinkTable,
}
"""Each kind of fault and its schema."""
