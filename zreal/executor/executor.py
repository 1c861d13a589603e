"""Trains with our own Programs: real buffers, real autograd, and real collectives in exactly the
Program's order.

It has no prefetch logic: what is gathered, freed or reduced, and when, stands in the Program. A
Program that computes on a unit which is not there, or that does not fit the model's modules, is a
ProgramError. Each module's backward is entered from a hook on its output, so autograd runs whole
and frees as it does in eager training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zreal.executor.flat_rank import FlatRank
from zreal.executor.replicated_rank import ReplicatedRank
from zreal.meters.collectives import CollectiveRecorder
from zreal.meters.measured_step import Begin, beginning, device_mesh, lower
from zreal.meters.memory import MemoryMeter, as_record
from zreal.modules import batches as batching
from zreal.modules import modules
from zreal.modules.optimizers import largest_difference
from zsim.errors import ProgramError
from zsim.ir.ops import Op
from zsim.ir.program import Part, PhaseName, Program, RankProgram
from zsim.ir.run import PhaseRecord, RankRun
from zsim.models.spec import ROOT
from zsim.scenario.scenario import Scenario

Rank = FlatRank | ReplicatedRank
RANKS: dict[str, Callable[..., Rank]] = {
    "ddp": ReplicatedRank,
    "zero1": partial(FlatRank, keeps_whole_gradients=True),
    "zero2": FlatRank,
    "zero3": FlatRank,
}
"""What holds a rank's memory, by strategy."""


@dataclass(slots=True)
class Execution:
    """What one rank did: its record, its mean loss of each step, and every whole parameter after
    the last."""

    run: RankRun
    losses: list[float]
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    """What the optimizer was handed in one step more, if that was asked for."""
    initial: dict[str, Tensor]
    """Every whole parameter before the first step, as the optimizer has it, if that was asked for.
    """
    step_difference: float | None
    """How far that step more took any element from where a new optimizer takes it from the same
    state, if that was asked for."""
    plain_step: Callable[[], object]
    """One step more, which nothing watches, on inputs that are there already."""


def execute(
    scenario: Scenario,
    program: Program,
    *,
    rank: int,
    steps: int = 3,
    samples: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[RankRun], None] = lambda _: None,
    gradients: bool = False,
) -> Execution:
    """Train `steps` steps (at least 2) by `program` on this rank. The process group must exist.

    The steady step is the one of the last `samples` whose peak is lowest. `progress` hears of each
    collective before it is entered, `keep` of the record so far after each phase. With `gradients`,
    one more step is taken, which nothing measures, for what the optimizer is handed in it and makes
    of it.
    """
    mesh, groups = device_mesh(scenario, device=device)
    recorder = CollectiveRecorder(groups, world_size=scenario.world_size, progress=progress)
    meter = MemoryMeter()
    ops, dtype = program.of_rank(rank), scenario.precision.parameters
    phases: dict[str, PhaseRecord] = {}
    losses: list[float] = []
    # Built out of the meter's sight: the random numbers of initial values are not the strategy's.
    model = modules.build(
        scenario.model, seed=scenario.seed, checkpointing=scenario.checkpointing
    ).to(device)
    with meter, recorder:
        with meter.looking_away():
            meter.watch(*model.buffers())  # no strategy counts them
        with meter.span() as span:
            trainer = _construct(scenario, model, ops, mesh.get_group(), meter)
            recorder.settle()
        with meter.looking_away():
            began = trainer.rank.stepped() if gradients else {}
        phases["construction"] = PhaseRecord(collectives=recorder.take(), memory=as_record(span))
        keep(RankRun(rank=rank, phases=dict(phases), groups=dict(recorder.group_ranks)))
        for step in range(steps):
            with meter.looking_away():
                batches = batching.micro_batches(
                    scenario, rank=rank, step=step, dtype=dtype, device=device
                )
            trainer.begin(ops, first=step == 0)
            recorder.settle()
            recorder.take()  # what the second step does once is none of a steady one's
            with meter.span() as span:
                name: PhaseName = "first" if step == 0 else "steady"
                losses.append(
                    trainer.step(
                        ops.phase(name), batches, parts=ops.parts(name),
                        begin=beginning(meter, recorder, phases),
                    )
                )
                recorder.settle()
            phase = PhaseRecord(collectives=recorder.take(), memory=as_record(span, trainer.holds))
            if step == 0:
                phases["first"] = phase
            elif step >= steps - samples:
                phases["steady"] = lower(phases.get("steady"), phase)
            keep(RankRun(rank=rank, phases=dict(phases), groups=dict(recorder.group_ranks)))
    parameters = trainer.rank.parameters()
    if gradients:
        batches = batching.micro_batches(
            scenario, rank=rank, step=steps, dtype=dtype, device=device
        )
        trainer.gradients = {}
        with recorder:
            trainer.begin(ops, first=False)
            trainer.step(ops.steady, batches)
    return Execution(
        run=RankRun(rank=rank, phases=phases, groups=recorder.group_ranks),
        losses=losses,
        parameters=parameters,
        gradients=trainer.gradients or {},
        initial=trainer.rank.parameters(began) if gradients else {},
        step_difference=trainer.step_difference,
        plain_step=partial(_plain_step, trainer, ops, batches),
    )


def _plain_step(trainer: Trainer, ops: RankProgram, batches: list[batching.MicroBatch]) -> None:
    """A step that keeps nothing, and in which the host does not wait for losses."""
    trainer.gradients, trainer.reads_losses = None, False
    trainer.begin(ops, first=False)
    trainer.step(ops.steady, batches)


def _construct(
    scenario: Scenario, model: modules.Model, ops: RankProgram, group: dist.ProcessGroup,
    meter: MemoryMeter,
) -> Trainer:
    meter.watch(*model.parameters())
    rank = RANKS[scenario.strategy](scenario, model, group, meter.looking_away)
    with torch.no_grad():
        for op in ops.construction:
            rank.construct(op)
    return Trainer(scenario, rank)


@dataclass(slots=True)
class Trainer:
    """Walks the ops of a step. `_cursor` is the op that is carried out; hooks in autograd move it
    through backward."""

    scenario: Scenario
    rank: Rank
    holds: Mapping[str, int] = field(default_factory=dict)
    """What the rank held when the optimizer had stepped, by kind."""
    gradients: dict[str, Tensor] | None = None
    """Whole gradients as the optimizer is handed them, kept where this is not None."""
    step_difference: float | None = None
    """Where gradients are kept: how far the optimizer took any element from where a new one takes
    it from the same state."""
    reads_losses: bool = True
    """Whether the host waits for each micro-batch's loss."""
    _is_second: bool = True
    """Whether the next step after the first one is the second."""
    _ops: tuple[Op, ...] = ()
    _cursor: int = 0
    _forwards: int = 0
    _backwards: int = 0
    _trained: list[int] = field(default_factory=list)
    """The places of this micro-batch's modules that have a backward: in each forward those from the
    first trained parameter on."""
    _value: Tensor | None = None
    _loss: Tensor | None = None
    _losses: list[float] = field(default_factory=list)
    _scope: ExitStack = field(default_factory=ExitStack)
    """Autocast, where it is asked for, from the first module's forward to the last's."""

    def begin(self, ops: RankProgram, *, first: bool) -> None:
        """A step comes, the first or a later one: before the second what that does once is carried
        out."""
        self.rank.begin(first=first)
        if not first and self._is_second:
            self._is_second = False
            for op in ops.second:
                self._perform(op)

    def step(
        self,
        ops: tuple[Op, ...],
        batches: list[batching.MicroBatch],
        *,
        parts: tuple[Part, ...] = (),
        begin: Begin = lambda part, micro_batch=0: None,
    ) -> float:
        """Carry out every op of one step; `begin` hears of each of its `parts`. Returns this rank's
        mean loss."""
        self._ops, self._cursor, self._losses = ops, 0, []
        begins = {part.start: part for part in parts}
        while self._cursor < len(ops):
            self._tell(begins, begin)
            op = ops[self._cursor]
            if op.kind == "forward":
                self._forward(op, batches)
            elif op.kind == "backward":
                self._backward(op)
            elif op.kind == "recompute":
                pass  # torch recomputes when backward asks for what is not there
            else:
                self._perform(op)
            self._cursor += 1
        self._tell(begins, begin)
        return sum(self._losses) / len(self._losses)

    def _tell(self, begins: Mapping[int, Part], begin: Begin) -> None:
        """Between the ops of a step: the part that begins here, if one does."""
        part = begins.get(self._cursor)
        if part is not None:
            begin(part.name, micro_batch=part.micro_batch)

    def _perform(self, op: Op) -> None:
        steps = (
            op.kind == "optimizer" and op.unit == ROOT
        )  # not those of clipping, which come before
        with torch.no_grad():
            if steps and self.gradients is not None:
                self.gradients, expected = self.rank.gradients(), self.rank.stepped_again()
            self.rank.perform(op)
            if steps and self.gradients is not None:
                self.step_difference = largest_difference(self.rank.stepped(), expected)
            if steps:
                self.holds = self.rank.held()

    def _forward(self, op: Op, batches: list[batching.MicroBatch]) -> None:
        """Run the next module of the model; all but the last hand over to its backward by a hook on
        its output."""
        specs = self.scenario.model.modules
        forward, place = divmod(self._forwards, len(specs))
        spec = specs[place]
        self._check(op, spec.unit)
        self.rank.enter(spec, backward=False)
        x, targets = batches[op.micro_batch * self.scenario.batch.forwards + forward]
        if self._value is None:
            self._scope.enter_context(
                batching.autocast(self.scenario.precision, device=x.device.type)
            )
        self._value = self.rank.model.run(spec, self._taken(x), targets)
        self._forwards += 1
        last = self._forwards == self._num_modules
        if self._value.requires_grad:
            self._trained.append(place)
            if not last:
                self._value.register_hook(self._between)
        if place == len(specs) - 1:
            self._loss = self._value if self._loss is None else self._loss + self._value
            self._value = None
        if last:
            self._forwards = 0
            self._scope.close()

    def _taken(self, x: Tensor) -> Tensor:
        """What the next module reads, `x` if it is the first: that module's alone from now on."""
        value, self._value = self._value, None
        return x if value is None else value

    @property
    def _num_modules(self) -> int:
        """Of all forwards before a backward."""
        return len(self.scenario.model.modules) * self.scenario.batch.forwards

    def _backward(self, op: Op) -> None:
        """Backward of the whole micro-batch, from its first backward op to its last; ranks' losses
        are averaged."""
        loss, self._loss = self._loss, None
        if loss is None or self._forwards:
            raise ProgramError(
                where=f"op {op.index}", expected="every module's forward first", found="a backward"
            )
        self._backwards = len(self._trained)
        self._enter_backward(op)
        torch.autograd.backward(loss, torch.full_like(loss, self.rank.gradient_scale))
        self._losses.append(loss.item() if self.reads_losses else 0.0)
        if self._backwards:
            raise ProgramError(
                where="backward", expected="every module's backward",
                found=f"{self._backwards} missing",
            )
        self._trained = []

    def _between(self, _: Tensor) -> None:
        """Between two modules' backwards: carry out the Program's ops up to the next backward, and
        enter it."""
        self._cursor += 1
        while self._cursor < len(self._ops) and self._ops[self._cursor].kind != "backward":
            if self._ops[self._cursor].kind != "recompute":
                self._perform(self._ops[self._cursor])
            self._cursor += 1
        if self._cursor == len(self._ops):
            raise ProgramError(
                where="backward", expected=f"{self._backwards} more backward ops", found="none"
            )
        self._enter_backward(self._ops[self._cursor])

    def _enter_backward(self, op: Op) -> None:
        self._backwards -= 1
        spec = self.scenario.model.modules[self._trained[self._backwards]]
        self._check(op, spec.unit)
        self.rank.enter(spec, backward=True)

    def _check(self, op: Op, unit: str) -> None:
        if op.unit != unit:
            raise ProgramError(
                where=f"op {op.index}: {op.kind}", expected=f"unit {unit}", found=op.unit
            )
