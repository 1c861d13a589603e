"""Rules on units: too large, too small, padded, or held by few ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zsim.analysis.lint.case import LintCase
from zsim.analysis.lint.finding import LintFinding, compared
from zsim.io.units import counted, format_bytes
from zsim.ir.ledger import Ledger
from zsim.ir.program import Program
from zsim.ir.sharding import num_filled
from zsim.models.spec import ROOT

LEAST_SAVED = 0.02
"""Share of a step from which larger units are worth a finding."""
LARGER = (2, 4)
"""Factors by which blocks in a unit are multiplied, to see if units are too small."""
MOST_PADDING = 0.1
"""Share of gathered bytes that may be padding."""
MOST_IN_ROOT = 1 / 3
"""Share of the parameters that the root may hold."""


def one_unit(case: LintCase) -> Iterator[LintFinding]:
    """A model of which no part is wrapped by itself, where parameters are gathered: all at once,
    before anything computes."""
    model = case.scenario.model
    if len(model.units) > 1 or not (case.is_traced or model.blocks):
        return
    gathered = most_gathered(case.program)
    if gathered < model.num_parameters * case.element_nbytes:
        return  # nothing is gathered, or buckets are
    fact = (
        f"the whole model is one param group: {gathered:,} B of parameters are gathered before "
        "anything computes, and nothing hides that or the reduction of gradients"
    )
    if case.is_traced:
        yield LintFinding(fact=fact, remedy="trace it again with units", gathered_bytes=gathered)
        return
    by_block = case.with_wrapping(every=1)
    if by_block is None:
        return
    least = most_gathered(by_block.program)
    if least < gathered:  # with such a lookahead blocks may all be gathered too
        remedy = (
            f"with wrapping.every = 1, one group per block, at most {least:,} B are gathered at a "
            "time, while others compute"
        )
        yield compared(case, by_block, fact=fact, remedy=remedy)


def tiny_units(case: LintCase) -> Iterator[LintFinding]:
    """Units so small that larger ones make the step faster: collectives cost their latency."""
    every = case.scenario.wrapping.every
    if case.is_traced or every == "all" or len(case.scenario.model.units) < 3:
        return
    larger = [case.with_wrapping(every=factor * every) for factor in LARGER]
    fastest = min((other for other in larger if other), key=lambda o: o.step_ns, default=None)
    if fastest is None or fastest.step_ns > (1 - LEAST_SAVED) * case.step_ns:
        return
    units = [unit.numel * case.element_nbytes for unit in case.scenario.model.units
             if unit.fqn != ROOT]
    yield compared(
        case, fastest,
        fact=f"{counted(len(units), 'unit')} of {format_bytes(max(units))} at most: collectives of "
             "so few bytes take their latency, and their hooks the host",
        remedy=f"use wrapping.every = {fastest.scenario.wrapping.every}",
    )


def padded_shards(case: LintCase) -> Iterator[LintFinding]:
    """Shards of which much is padding, as ranks outnumber rows; the last ranks hold nothing else.
    """
    numels = {unit.fqn: unit.numel for unit in case.scenario.model.units}
    gathers = case.gathers_of_units()
    gathered = sum(op.nbytes for op in gathers)
    padding = gathered - sum(numels[op.unit] * case.element_nbytes for op in gathers)
    if not gathered or padding <= MOST_PADDING * gathered:
        return
    ranks = case.scenario.mesh.dp_shard
    yield LintFinding(
        fact=f"{padding / gathered:.0%} of what is gathered is padding, as first dimensions are no "
             f"multiples of {ranks}",
        remedy=f"{fewer_ranks(case)}, or make first dimensions multiples of the ranks",
        gathered_bytes=padding,
    )


def empty_shards(case: LintCase) -> Iterator[LintFinding]:
    """Units of which some rank holds nothing but padding, gathered all the same."""
    ranks = case.scenario.mesh.dp_shard
    gathers = case.gathers_of_units()
    gathered = {op.unit for op in gathers}
    filled = dict[str, int]()
    for unit in case.scenario.model.units:
        rows = (  # fully_shard cuts each parameter, the others a flat buffer
            [p.shape[0] if p.shape else 1 for p in unit.parameters]
            if case.strategy.dtensors else [unit.numel]
        )
        if unit.fqn in gathered:
            filled[unit.fqn] = max((num_filled(n, ranks) for n in rows), default=ranks)
    nbytes = {
        unit.fqn: unit.numel * case.element_nbytes for unit in case.scenario.model.units
        if filled.get(unit.fqn, ranks) < ranks
    }
    if nbytes:
        padding = sum(op.nbytes - nbytes[op.unit] for op in gathers if op.unit in nbytes)
        yield LintFinding(
            fact=told_of_empty(filled, nbytes, ranks),
            remedy=f"{fewer_ranks(case)}, or wrap it together with a block",
            gathered_bytes=padding,
        )


def fewer_ranks(case: LintCase) -> str:
    """Remedy that shards over fewer ranks, by the strategy itself where it keeps replicas."""
    by = "a smaller dp_shard" if case.strategy.over_all_ranks else "hsdp"
    return f"shard over fewer ranks ({by})"


def told_of_empty(filled: Mapping[str, int], nbytes: Mapping[str, int], ranks: int) -> str:
    """Ranks that hold nothing of the unit that fewest hold, and the number of other such units.

    >>> told_of_empty({"head": 3, "norm": 7}, {"head": 6156, "norm": 28}, 8)
    'ranks 3 to 7 of 8 hold nothing of unit head (6,156 B); some hold nothing of 1 other unit'
    """
    unit = min(nbytes, key=lambda fqn: filled[fqn])
    first, last = filled[unit], ranks - 1
    idle = f"rank {last} of {ranks} holds" if first == last else (
        f"ranks {first} to {last} of {ranks} hold"
    )
    others = len(nbytes) - 1
    more = f"; some hold nothing of {counted(others, 'other unit')}" if others else ""
    return f"{idle} nothing of unit {unit} ({format_bytes(nbytes[unit])}){more}"


def large_root(case: LintCase) -> Iterator[LintFinding]:
    """A root that holds more than a third of the parameters: it stays gathered from forward to
    backward, and its reduction comes last."""
    model = case.scenario.model
    root = sum(unit.numel for unit in model.units if unit.fqn == ROOT)
    if len(model.units) < 2 or root <= MOST_IN_ROOT * model.num_parameters:
        return
    if not any(op.unit == ROOT for op in case.gathers_of_units()):
        return  # the strategy gathers no root
    if not most_gathered(case.program):
        return  # all parameters are whole at all times
    share = root / model.num_parameters
    fact = (
        f"the root holds {share:.0%} of the parameters, {format_bytes(root * case.element_nbytes)},"
        " gathered from the first forward to the last backward"
    )
    apart = case.with_wrapping(ends="apart")
    if apart is not None:
        yield compared(
            case, apart, fact=fact,
            remedy='use wrapping.ends = "apart", which wraps embedding and head by themselves',
        )
        return
    remedy = "wrap the embedding or the head by itself; tied weights must stay in one unit"
    yield LintFinding(fact=fact, remedy=remedy, gathered_bytes=root * case.element_nbytes)


def most_gathered(program: Program) -> int:
    """The most bytes of unsharded parameters that rank 0 holds at once in a steady step, without
    buffers of all-gathers."""
    ledger, most = Ledger(), 0
    rank = program.of_rank(0)
    for op in (*rank.construction, *rank.first, *rank.second):
        ledger.apply(op)
    for op in rank.steady:
        ledger.apply(op)
        most = max(most, ledger.by_kind["unsharded_parameters"])
    return most
