"""The two modes of faults, asked of a user's path: a scenario with `faults`, its Run or its error.

Safety: with faults at any time nothing wrong is said. Liveness: where faults only delay, the step
ends, and is delayed by no more than the ranks are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import zsim
from zsim.engine.costs.op_costs import Costs
from zsim.engine.faults.fault import AT_OPS, FailingRank, LostLink, ReorderedCollective
from zsim.engine.faults.fault_delays import fault_delays
from zsim.engine.faults.faulty_program import faulty_program
from zsim.engine.faulty_step import UNNOTICED
from zsim.errors import DeadlockError
from zsim.ir.ops import COLLECTIVES, Op
from zsim.models.training_options import Offload
from zsim.scenario.plan import planned
from zsim.testing import check_laws

FATAL = (*AT_OPS, LostLink)
"""Faults after which a step may not end."""


def simulated(scenario: zsim.Scenario) -> zsim.Run | DeadlockError:
    """The Run of `scenario`, or the error of one whose step cannot end."""
    try:
        return zsim.simulate(scenario)
    except DeadlockError as error:
        return error


def safe(scenario: zsim.Scenario, clean: zsim.Run) -> zsim.Run | DeadlockError:
    """The Run of a scenario with faults, or its error, of which nothing is wrong; `clean` is the
    Run without them."""
    result = simulated(scenario)
    if isinstance(result, DeadlockError):
        _require_named(scenario, result)
        return result
    faults = scenario.faults
    assert not any(isinstance(fault, FailingRank) for fault in faults), "it ended all the same"
    assert [told.removesuffix(f" ({UNNOTICED})") for told in result.faults] == [*map(str, faults)]
    for fault, told in zip(faults, result.faults, strict=True):
        assert told.endswith(f"({UNNOTICED})") == isinstance(fault, ReorderedCollective), told
    for number, fault in enumerate(faults):  # a link that is needed would not have let it end
        idle = any(text.startswith(f"faults[{number}] ") for text in result.warnings)
        assert idle or not isinstance(fault, LostLink), result.warnings
    assert "WITH FAULTS" in repr(result)
    for other in (clean, result):
        comparison = zsim.compare(result, other)
        assert not comparison.agrees
        assert "agrees" not in str(comparison.agreement)
    assert not zsim.compare(clean, result).ok
    assert all(late.held_up_ns <= (result.step_time or 0) * late.last_at for late in result.late)
    check_laws(result, simulating=False)
    return result


def _require_named(scenario: zsim.Scenario, error: DeadlockError) -> None:
    """AssertionError unless `error` names every fault, and in front a lost link, or no rank but one
    of a fatal fault."""
    fatal = [fault for fault in scenario.faults if isinstance(fault, FATAL)]
    assert fatal, f"nothing is missing, and yet {error}"
    assert all(str(fault) in error.remedy for fault in scenario.faults), error.remedy
    links = [fault for fault in fatal if isinstance(fault, LostLink)]
    if any(error.where.startswith(f"{link} (of rank") for link in links):
        return
    ranks = {fault.rank for fault in fatal if isinstance(fault, AT_OPS)}
    named = {int(number) for number in re.findall(r"\d+", error.where.partition(", op ")[0])}
    assert named, error.where
    assert named <= ranks or not ranks, f"{error.where} blamed, of {ranks}"


def live(scenario: zsim.Scenario) -> None:
    """AssertionError unless the step of a scenario with faults that only delay ends in time.

    It may take as much longer as they delay all ranks, and as kernels of several streams then lose.
    The second is asked without interference, of meshes of one axis, and without offload. Beside
    other collectives or copies to the host than in a clean step, an op may be longer by more than
    its delay. Deepspeed2 with its optimizer offloaded is so by 2 % of it, on cards whose copies and
    collectives share a PCIe link. On cards with NVLink it is not.
    """
    faulty = scenario.with_(execution={"interference": False})
    clean = faulty.with_(faults=None)
    before, after = (zsim.simulate(each).step_time or 0 for each in (clean, faulty))
    if min(clean.mesh.shape) > 1 or clean.offload != Offload():
        return
    program = faulty_program(planned(clean).program, faulty.faults)
    costs = Costs(cluster=clean.cluster, execution=clean.executed)
    delays = [*fault_delays(program, faulty.faults, costs=costs)]
    most = 0
    for kind in program.assignment:
        longer = delays[kind].longer
        most += delays[kind].start + sum(longer.values())
        most += _most_lost_beside(program.ranks[kind].steady, longer, costs)
    assert before <= after <= before + most, f"{before} ns, delayed by {most} ns to {after} ns"


def _most_lost_beside(ops: tuple[Op, ...], longer: Mapping[int, int], costs: Costs) -> int:
    """The most ns that all kernels of a rank lose while kernels of other streams run.

    While `n` of them run, all but one are copies off the compute stream. In the time that `n`
    kernels lose together, these copies do at least the `n`-th part of it as work. A gradient that
    is cast beside the backward is such a copy. A rank that waits for a late one has its casts meet
    kernels of which a clean step keeps them apart.
    """
    computing = [op for op in ops if op.kernels and op.kind not in COLLECTIVES]
    return len({op.stream for op in computing}) * sum(
        costs.compute_ns(op.kernels) + longer.get(op.index, 0)
        for op in computing
        if op.stream != "compute"
    )
