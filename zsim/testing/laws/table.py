"""The table of laws, the decorator that adds one of a user's own, and `check_laws`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import overload

from zsim.errors import ArgumentError, listed
from zsim.io.arguments import described
from zsim.ir.laws.run_laws import LawError
from zsim.runs.run import Run
from zsim.testing.laws import equivalences, monotonicities, of_runs, zero_table

__tracebackhide__ = True  # reports of pytest end at the user's own line
AskRun = Callable[[Run], Iterator[str]]
"""A law: a function that yields each breach in a Run as text, with rank, op and numbers."""
MOST_TOLD = 8


@dataclass(frozen=True, slots=True)
class LawOfRuns:
    """A law by its function; one that `simulates` plans or simulates other scenarios, so it takes
    longer, and is asked of simulated Runs alone."""

    ask: AskRun
    simulates: bool = False

    @property
    def name(self) -> str:
        """The function's name, as words."""
        return self.ask.__name__.replace("_", " ")


CHEAP: tuple[AskRun, ...] = (
    of_runs.records_are_possible, of_runs.bytes_sent_are_received,
    of_runs.steps_return_the_memory_they_take, of_runs.members_issue_alike,
    of_runs.spans_are_what_was_issued, of_runs.streams_keep_the_order_of_issue,
    of_runs.links_carry_no_more_than_they_can, of_runs.steps_are_as_long_as_their_streams,
    zero_table.states_follow_zeros_table,
)
SIMULATING: tuple[AskRun, ...] = (
    equivalences.programs_obey_their_laws, of_runs.kernels_are_no_faster_than_the_peak,
    of_runs.utilization_has_its_bounds,
    equivalences.folding_changes_nothing, equivalences.ddp_of_one_rank_adds_buckets_alone,
    equivalences.hsdp_of_one_replica_is_fsdp2, equivalences.hsdp_without_shards_reduces_as_ddp,
    equivalences.zero_of_one_replica_is_flat, equivalences.zero_without_shards_reduces_as_ddp,
    equivalences.endless_lookahead_gathers_all, equivalences.zero2_sends_what_zero1_does,
    equivalences.zero3_that_stays_whole_is_zero2,
    monotonicities.faster_links_slow_no_step, monotonicities.twice_the_durations_are_twice_the_step,
    monotonicities.more_ranks_hold_no_more, monotonicities.more_lookahead_holds_no_less,
    monotonicities.thresholds_send_no_more_and_hold_no_less,
    monotonicities.larger_micro_batches_hold_no_less,
    monotonicities.resharding_sends_no_less_and_holds_no_more,
    monotonicities.fewer_reductions_send_no_more, monotonicities.recomputing_holds_no_more,
    monotonicities.more_memory_is_never_too_little,
)
LAWS: dict[str, LawOfRuns] = {
    law.name: law for law in (
        *(LawOfRuns(ask) for ask in CHEAP), *(LawOfRuns(ask, simulates=True) for ask in SIMULATING)
    )
}
"""Every law by its name, those that users add included."""


@overload
def law(ask: AskRun, /) -> AskRun: ...
@overload
def law(*, simulates: bool) -> Callable[[AskRun], AskRun]: ...
def law(
    ask: AskRun | None = None, /, *, simulates: bool = False
) -> AskRun | Callable[[AskRun], AskRun]:
    """Decorator that adds a function of a Run to the laws; its name is the law's.

    >>> import zsim
    >>> from zsim.testing.laws import LAWS, check_laws, law
    >>> @law
    ... def nothing_is_all_reduced(run):
    ...     for rank in run.ranks:
    ...         for record in rank.phases["steady"].collectives:
    ...             if record.op == "all_reduce":
    ...                 yield f"rank {rank.rank}: an all_reduce of {record.nbytes:,} B"
    >>> check_laws(zsim.simulate(zsim.load("scenarios/parity/fsdp2-mlp-4.toml")))
    32
    >>> check_laws(zsim.simulate(zsim.load("scenarios/parity/ddp-mlp-2.toml")))
    Traceback (most recent call last):
    zsim.ir.laws.run_laws.LawError: ddp-mlp-2: expected a run that obeys the laws of \
zsim.testing.laws, found nothing is all reduced: rank 0: an all_reduce of 101,544 B
    >>> del LAWS["nothing is all reduced"]
    """
    if ask is None:
        return lambda function: _added(function, simulates=simulates)
    return _added(ask, simulates=simulates)


def _added(ask: AskRun, *, simulates: bool) -> AskRun:
    if not callable(ask) or not hasattr(ask, "__name__"):
        raise ArgumentError(
            where="law", expected="a function of a Run", found=described(ask),
            remedy="@law, or @law(simulates=True), above a def",
        )
    made = LawOfRuns(ask, simulates)
    if made.name in LAWS and LAWS[made.name].ask is not ask:
        raise ArgumentError(
            where="law", expected="a function whose name no law has", found=made.name
        )
    LAWS[made.name] = made
    return ask


def breaches(
    run: Run, *, without: Collection[str] = (), simulating: bool = True
) -> Iterator[str]:
    """Every breach of a law in `run`, as "law: rank: numbers"; arguments as of `check_laws`."""
    for name in _asked(run, without, simulating=simulating):
        ask = LAWS[name].ask
        own = ask is of_runs.records_are_possible  # they name their laws
        yield from (breach if own else f"{name}: {breach}" for breach in _told(name, ask, run))


def _told(name: str, ask: AskRun, run: Run) -> Iterator[str]:
    """The breaches that a law yields; ArgumentError where it gives something else."""
    try:
        answer = ask(run)
        if isinstance(answer, str) or not isinstance(answer, Iterable):
            raise _no_breaches(name, answer)
        for breach in answer:
            if not isinstance(breach, str):
                raise _no_breaches(name, breach)
            yield breach
    except Exception as error:
        error.add_note(f"in the law {name}, of the run {run.record.scenario}")
        raise


def _no_breaches(name: str, answer: object) -> ArgumentError:
    return ArgumentError(
        where=f"law {name}", expected="each breach as text, or none", found=described(answer),
        remedy="write yield before the text of each breach, in place of return or assert",
    )


def check_laws(run: Run, *, without: Collection[str] = (), simulating: bool = True) -> int:
    """The number of laws that `run` obeys; LawError names each that it breaks, with rank, op and
    numbers.

    `without`: names of laws that do not hold by intent. `simulating`: also ask those that simulate
    other scenarios, where the Run is simulated.
    """
    if not isinstance(run, Run):
        raise ArgumentError(where="run", expected="a Run", found=described(run))
    broken = list(breaches(run, without=without, simulating=simulating))
    if broken:
        more = len(broken) - MOST_TOLD
        raise LawError(
            where=run.record.scenario,
            expected="a run that obeys the laws of zsim.testing.laws",
            found="; ".join([*broken[:MOST_TOLD], *([f"and {more} more"] if more > 0 else [])]),
        )
    return len(_asked(run, without, simulating=simulating))


def _asked(run: Run, without: Collection[str], *, simulating: bool) -> list[str]:
    unknown = [name for name in without if name not in LAWS]
    if unknown:
        raise ArgumentError(where="without", expected=listed(LAWS), found=repr(unknown[0]))
    predicted = run.record.interpreter == "simulator" and run.record.complete
    return [
        name for name, law in LAWS.items()
        if name not in without and (not law.simulates or (simulating and predicted))
    ]
