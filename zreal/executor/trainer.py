"""The trainer: walks the ops of a Program in their order, and autograd with it.

Each module's backward is entered from a hook on its output. One call of autograd thus runs the
backward of a whole micro-batch, and frees as in eager training.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from zreal.executor.flat_rank import FlatRank
from zreal.executor.replicated_rank import ReplicatedRank
from zreal.meters.measured_step import BeginPart
from zreal.modules.host.host_saving import HostSaving
from zreal.modules.modules import Model
from zreal.modules.numerics import batches as batching
from zreal.modules.optimizers import largest_difference
from zsim.errors import ProgramError
from zsim.ir.ops import Op, OpKind
from zsim.ir.program import PhaseName, RankProgram, StepPart
from zsim.models.spec import Module
from zsim.scenario.scenario import Scenario
from zsim.strategies.building import clipping
from zsim.strategies.building.step_builder import saves_tensors

ExecutedRank = FlatRank | ReplicatedRank
REDUCING: tuple[OpKind, ...] = ("copy", "all_reduce", "reduce_scatter", "free")
"""Kinds of the ops between the last module's backward and the end of `loss.backward()`."""


@dataclass(slots=True)
class MicroBatchPass:
    """State of autograd between the first forward of a micro-batch and the end of its backward."""

    num_forwards_run: int = 0
    output: Tensor | None = None
    """Output of the last module, until the next module takes it."""
    loss: Tensor | None = None
    """Sum over the forwards so far."""
    awaiting_backward: list[int] = field(default_factory=list)
    """Indices of the modules with a backward, in forward order; backward takes them from the end.
    """
    arrived: set[str] = field(default_factory=set)
    """Parameters whose gradient is accumulated."""
    around_forward: ExitStack = field(default_factory=ExitStack)
    """Entered at the first module's forward, closed after the last's."""

    def take_output(self, x: Tensor) -> Tensor:
        """The input of the next module, which is `x` for the first; it becomes that module's alone.
        """
        output, self.output = self.output, None
        return x if output is None else output


@dataclass(slots=True)
class ParityStep:
    """Whole gradients of one step, and what the optimizer makes of them."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients as the optimizer receives them, by fqn."""
    difference: float | None = None
    """Largest difference of any stepped element to the step of a new optimizer from the same state.
    """


@dataclass(slots=True)
class ProgramTrainer:
    """Carries out the steps of `program` on `rank`. Hooks in autograd move the cursor through
    backward."""

    scenario: Scenario
    program: RankProgram
    rank: ExecutedRank
    saving: HostSaving
    held: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the rank held by kind after the optimizer's last step."""
    _parity: ParityStep | None = None
    _expected: Mapping[str, Tensor] = field(default_factory=dict)
    """The result of the step that is under way, as a new optimizer makes it, for parity."""
    _reads_losses: bool = True
    """True where the host waits for each micro-batch's loss."""
    _ops: tuple[Op, ...] = ()
    _cursor: int = 0
    """Index in `_ops` of the op that is carried out."""
    _begins: frozenset[int] = frozenset()
    """Indices at which parts of the step begin, where they are announced."""
    _losses: list[float] = field(default_factory=list)
    _pass: MicroBatchPass = field(default_factory=MicroBatchPass)

    def __post_init__(self) -> None:
        if isinstance(self.rank, ReplicatedRank):
            self.rank.watch(self._gradient_arrived)

    def prepare(self, step: int) -> None:
        """Before the second step (1), carry out the ops that it has once, as DDP rebuilds buckets.
        """
        if step == 1:
            for op in self.program.second:
                self._perform(op)

    def train_step(
        self, step: int, batches: list[batching.MicroBatch], begin_part: BeginPart
    ) -> tuple[float, Mapping[str, int]]:
        """Carry out the ops of one step. Returns this rank's mean loss and its held bytes by kind.
        """
        phase: PhaseName = "first" if step == 0 else "steady"
        parts = {part.start: part for part in self.program.parts(phase)}
        return self._run(self.program.phase(phase), batches, parts, begin_part), self.held

    def parity_step(self, batches: list[batching.MicroBatch]) -> ParityStep:
        """A steady step with whole gradients kept and its optimizer's step checked."""
        self._parity = parity = ParityStep()
        self._run(self.program.steady, batches)
        self._parity = None
        return parity

    def plain_step(self, batches: list[batching.MicroBatch]) -> None:
        """A steady step in which the host does not wait for losses."""
        self._reads_losses = False
        self._run(self.program.steady, batches)

    def _run(
        self, ops: tuple[Op, ...], batches: list[batching.MicroBatch],
        parts: Mapping[int, StepPart] | None = None,
        begin_part: BeginPart = lambda part, micro_batch=0: None,
    ) -> float:
        """Carry out `ops` and announce `parts`, which start at their keys. Returns the mean loss.
        """
        self._ops, self._cursor, self._losses, self._begins = ops, 0, [], frozenset(parts or ())
        while True:
            part = (parts or {}).get(self._cursor)
            if part is not None:
                begin_part(part.name, micro_batch=part.micro_batch)
            if self._cursor >= len(ops):
                self.rank.streams.join()
                return sum(self._losses) / len(self._losses)
            op = ops[self._cursor]
            if op.kind == "forward":
                self._forward(op, batches)
            elif op.kind == "backward":
                self._backward(op)
            else:
                self._perform(op)
            self._cursor += 1

    @torch.no_grad()
    def _perform(self, op: Op) -> None:
        """Carry out one op that is neither forward nor backward."""
        if op.kind == "recompute":  # torch does when backward needs a tensor that was not kept
            self.rank.streams.wait(op)
            return
        if saves_tensors(op):  # the hook does
            return
        if not _steps(op):
            self.rank.perform(op)
            return
        parity = self._parity
        if parity is not None and not self._expected:
            self.rank.streams.wait(op)
            parity.gradients, self._expected = self.rank.gradients(), self.rank.expected_step()
        self.rank.perform(op)
        if any(map(_steps, self._ops[op.index + 1 :])):  # offloaded, group by group
            return
        if parity is not None:
            copies = self.rank.optimizer.copies()
            parity.difference = largest_difference(copies, self._expected)
            self._expected = {}
        self.held = {**self.rank.held(), **self.saving.held()}

    def _forward(self, op: Op, batches: list[batching.MicroBatch]) -> None:
        """Run the model's next module; a hook on its output enters the backward of the one before.
        """
        specs, current = self.scenario.model.modules, self._pass
        forward, index = divmod(current.num_forwards_run, len(specs))
        enter(self.rank, op, specs[index], backward=False)
        x, targets, *_ = batches[op.micro_batch * self.scenario.batch.forwards + forward]
        if current.num_forwards_run == 0:
            autocast = batching.autocast(self.scenario.precision, device=x.device.type)
            current.around_forward.enter_context(autocast)
            inputs = (tensor for batch in batches for tensor in batch)
            current.around_forward.enter_context(self.saving.around_forward(inputs))
        model = cast(Model, self.rank.model)
        current.output = model.run(specs[index], current.take_output(x), targets)
        current.num_forwards_run += 1
        is_last = current.num_forwards_run == len(specs) * self.scenario.batch.forwards
        if current.output.requires_grad:
            current.awaiting_backward.append(index)
            if not is_last:
                current.output.register_hook(self._between_backwards)
        if index == len(specs) - 1:
            loss = current.output
            current.loss = loss if current.loss is None else current.loss + loss
            current.output = None
        if is_last:
            current.num_forwards_run = 0
            current.around_forward.close()

    def _backward(self, op: Op) -> None:
        """Run the backward of a micro-batch, from its first backward op to its last."""
        current = self._pass
        loss, current.loss = current.loss, None
        if loss is None or current.num_forwards_run:
            raise ProgramError(
                where=f"op {op.index}", expected="every module's forward first", found="a backward"
            )
        current.arrived.clear()
        self._enter_backward(op)
        seed = torch.full_like(loss, self.rank.gradient_scale)
        torch.autograd.backward(loss, seed)
        self._perform_following()  # beside the loss and its gradient
        self._losses.append(loss.item() if self._reads_losses else 0.0)
        if current.awaiting_backward:
            raise ProgramError(
                where="backward", expected="every module's backward",
                found=f"{len(current.awaiting_backward)} missing",
            )

    def _perform_following(self) -> None:
        """Carry out the ops that follow at once and reduce the last gradients."""
        following = self._cursor + 1
        while following < len(self._ops) and self._ops[following].kind in REDUCING:
            if following in self._begins:  # what the next forward needs is copied first
                return
            self._perform(self._ops[following])
            self._cursor, following = following, following + 1

    def _gradient_arrived(self, fqn: str) -> None:
        """Reduce the buckets that are full by now, which DDP does inside a module's backward."""
        rank, arrived = cast(ReplicatedRank, self.rank), self._pass.arrived
        arrived.add(fqn)
        following = self._cursor + 1
        while following < len(self._ops) and rank.is_ready(self._ops[following], arrived):
            self._perform(self._ops[following])
            self._cursor, following = following, following + 1

    def _between_backwards(self, _: Tensor) -> None:
        """Carry out the ops up to the next backward op, and enter that module's backward."""
        self._cursor += 1
        while self._cursor < len(self._ops) and self._ops[self._cursor].kind != "backward":
            self._perform(self._ops[self._cursor])
            self._cursor += 1
        if self._cursor == len(self._ops):
            num_missing = len(self._pass.awaiting_backward)
            raise ProgramError(
                where="backward", expected=f"{num_missing} more backward ops", found="none"
            )
        self._enter_backward(self._ops[self._cursor])

    def _enter_backward(self, op: Op) -> None:
        spec = self.scenario.model.modules[self._pass.awaiting_backward.pop()]
        enter(self.rank, op, spec, backward=True)


def enter(rank: ExecutedRank, op: Op, module: Module, *, backward: bool) -> None:
    """Enter the forward or backward of `module` at its `op`; ProgramError at another unit's."""
    if op.unit != module.unit:
        raise ProgramError(
            where=f"op {op.index}: {op.kind}", expected=f"unit {module.unit}", found=op.unit
        )
    rank.streams.wait(op)
    rank.enter(module, backward=backward)


def _steps(op: Op) -> bool:
    """True for a step of the optimizer, and not for the clipping before it."""
    return op.kind == "optimizer" and op.unit not in (clipping.NORMS, clipping.CLIP)
