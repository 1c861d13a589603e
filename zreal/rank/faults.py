"""Faults of a scenario on a real rank over gloo: it is slow or late, fails, or skips a collective.

A rank fails, or skips a collective, where the Program does. That is in the second step, the first
that is as all later ones. It is slow and late in steps that are timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zreal import torch_private
from zreal.meters.collectives import C10D_OPS
from zsim.engine.faults.fault import AtOp, FailingRank, LateStart, SkippedCollective, SlowRank
from zsim.engine.faults.faulty_program import index_of
from zsim.ir.ops import COLLECTIVES, Op
from zsim.ir.program import Program
from zsim.models.training_options import Device
from zsim.runs.launch.planned_collectives import number_of
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

EXIT_CODE = 86
"""Exit code of a rank that fails because its scenario says so."""
WITHOUT_TENSORS = ("coalesced_",)
"""Ends of the names of c10d operators that return a Work alone."""
Progress = Callable[[str], None]


class RankFaults:
    """The faults of `rank` in `scenario`; none for another rank."""

    def __init__(self, scenario: Scenario, *, rank: int, device: Device) -> None:
        own = [fault for fault in scenario.faults if getattr(fault, "rank", None) == rank]
        self.late_s = sum(fault.by_ns for fault in own if isinstance(fault, LateStart)) / 1e9
        self.factor = 1.0
        for fault in own:
            self.factor *= fault.factor if isinstance(fault, SlowRank) else 1.0
        self._skips = False
        """True between the announcement of a collective that is skipped and its call."""
        self._due: dict[int, AtOp] = {}
        """Faults at a collective, by its number in the run."""
        for number, fault in enumerate(scenario.faults):
            if isinstance(fault, FailingRank | SkippedCollective) and fault.rank == rank:
                program = plan(scenario, device=device)
                key = f"{scenario.name}: faults[{number}].at"
                self._due[number_in_run(program, fault, key=key)] = fault

    def announced(self, progress: Progress) -> Progress:
        """`progress` with this rank's faults: its call fails, or skips the collective, when due."""

        skipped = 0

        def announce(text: str) -> None:
            nonlocal skipped
            number = number_of(text)
            fault = self._due.pop(number, None)
            if isinstance(fault, FailingRank):
                os._exit(EXIT_CODE)
            self._skips = fault is not None
            if self._skips:  # a collective that is not issued counts for nobody
                skipped += 1
            else:
                progress(text.replace(f"#{number}", f"#{number - skipped}", 1))

        return announce if self._due else progress

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager around training, in which collectives are skipped."""
        if not self._due:
            yield
            return
        with torch_private.c10d_calls(C10D_OPS, self._unless_skipped):
            yield
        if self._due:  # no collective came after the op at which it fails
            os._exit(EXIT_CODE)

    def _unless_skipped(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]
    ) -> Any:
        if not self._skips:
            return call()
        self._skips = False
        # DDP takes its sums from the Work
        work = done(arguments[0] if name == "c10d::allreduce_" else [torch.zeros(1)]).boxed()
        return work if name.endswith(WITHOUT_TENSORS) else (arguments[0], work)

    def slowed(self, step: Callable[[], object]) -> Callable[[], object]:
        """`step` as this rank takes it: it begins late, and computes as slowly as it should.

        A slow rank sleeps before each collective and at the end, for as long as its own work since
        then would have taken longer.
        """
        if self.factor == 1.0 and not self.late_s:
            return step
        worked = [0.0]

        def catch_up() -> None:
            time.sleep((self.factor - 1) * (time.thread_time() - worked[0]))
            worked[0] = time.thread_time()

        def before(name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
            catch_up()
            return call()

        def slow() -> None:
            time.sleep(self.late_s)
            worked[0] = time.thread_time()
            with torch_private.c10d_calls(C10D_OPS, before):
                step()
            catch_up()

        return slow


def number_in_run(program: Program, fault: AtOp, *, key: str) -> int:
    """The number in a real run of the collective that `fault` is at, or that follows its op in the
    second step."""
    own = program.of_rank(fault.rank)
    index = index_of(program, fault, key=key)
    before = (*own.construction, *own.first, *own.second, *own.steady[:index])
    return sum(_joins(op, program) for op in before)


def _joins(op: Op, program: Program) -> bool:
    return op.kind in COLLECTIVES and program.mesh.size(op.group) > 1


def done(tensors: list[torch.Tensor]) -> dist.Work:
    """The Work of a collective of one rank alone: an all-reduce, which leaves `tensors` as they
    are."""
    alone: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    work: dist.Work = alone.allreduce(tensors)
    work.wait()
    return work
