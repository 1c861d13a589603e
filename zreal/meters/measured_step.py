"""The measured training loop of both interpreters: meter and recorder around every phase.

It must not know how a step is carried out: an interpreter hands in its construction and its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zreal.meters.collectives import CollectiveRecorder
from zreal.meters.memory import MemoryMeter, memory_record
from zreal.meters.mesh_groups import device_mesh
from zsim.ir.program import PartName
from zsim.ir.run import PhaseRecord, RankRun
from zsim.scenario.scenario import Scenario

Inputs = TypeVar("Inputs")


class BeginPart(Protocol):
    """Announces that a part of the step begins."""

    def __call__(self, part: PartName, /, *, micro_batch: int = 0) -> None: ...


TrainStep = Callable[[int, Inputs, BeginPart], tuple[float, Mapping[str, int]]]
"""One step from its number and inputs: this rank's mean loss, and the bytes that it holds after the
optimizer's step, by kind."""


@dataclass(slots=True, kw_only=True)
class TrainedRank:
    """One rank after its last step. Tensors are whole, by fqn, and filled in for parity only."""

    run: RankRun
    module: nn.Module
    """The model as it is trained, wrapped or not."""
    losses: list[float]
    """Mean loss of this rank in each step."""
    plain_step: Callable[[], object]
    """Takes one more step without meter and recorder, on inputs that exist already."""
    recorder: CollectiveRecorder
    model: nn.Module
    """The model in its wrapper, if it has one."""
    units: Mapping[str, Sequence[nn.Module]]
    """The modules of each unit but the root's, in their wrappers likewise."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients as the optimizer receives them in the step after the last."""
    buffers: list[Tensor] = field(default_factory=list)
    """Copies of this rank's buffers before that step, in the order of the module."""
    initial: dict[str, Tensor] = field(default_factory=dict)
    """Before the first step, as the optimizer has them; empty where the interpreter has none."""
    step_difference: float | None = None
    """Largest difference between the optimizer's next step and that of a new optimizer from the
    same state; None where the interpreter does not check."""


class MeasuredRank:
    """Meter, recorder and phase records of one rank's run.

    `progress` receives each collective before it is issued, `keep` the record after each phase.
    """

    def __init__(
        self, scenario: Scenario, *, rank: int, device: str, progress: Callable[[str], None],
        keep: Callable[[RankRun], None],
    ) -> None:
        self.mesh, groups = device_mesh(scenario, device=device)
        self.meter = MemoryMeter(device=device)
        self.recorder = CollectiveRecorder(
            groups, world_size=scenario.world_size, progress=progress
        )
        self._rank, self._keep = rank, keep
        self._phases: dict[str, PhaseRecord] = {}

    @property
    def run(self) -> RankRun:
        """The phases recorded so far."""
        groups = dict(self.recorder.group_ranks)
        return RankRun(rank=self._rank, phases=dict(self._phases), groups=groups)

    @contextmanager
    def metering(self) -> Iterator[None]:
        """Around construction and all steps: the meter and the recorder are active."""
        with self.meter, self.recorder:
            yield

    @contextmanager
    def construction(self, model: nn.Module) -> Iterator[None]:
        """The phase "construction": all that is allocated inside, where the parameters of `model`
        are made.

        Buffers of the model count nothing, as no strategy models them, nor do tensors that it keeps
        in plain attributes.
        """
        with self.meter.uncounted():
            self.meter.watch(*model.buffers(), *_attributes(model))
        with self.meter.span() as span:
            yield
            self.recorder.settle()
        collectives = self.recorder.take()
        self._phases["construction"] = PhaseRecord(
            collectives=collectives, memory=memory_record(span)
        )
        self._keep(self.run)

    def train(
        self, train_step: TrainStep[Inputs], *, inputs: Callable[[int], Inputs], steps: int,
        samples: int, prepare: Callable[[int], None] | None = None,
    ) -> list[float]:
        """Take `steps` steps; return the mean loss of each.

        The phase "steady" is the step with the lowest peak among the last `samples`. What `prepare`
        does before a step belongs to no phase.
        """
        losses = []
        for step in range(steps):
            with self.meter.uncounted():  # inputs are the user's, not the strategy's
                batches = inputs(step)
            if prepare is not None:
                prepare(step)
                self.recorder.settle()
                self.recorder.take()
            with self.meter.span() as span:
                loss, held = train_step(step, batches, self._begin_part)
                self.recorder.settle()
            losses.append(loss)
            phase = PhaseRecord(
                collectives=self.recorder.take(), memory=memory_record(span, held)
            )
            if step == 0:
                self._phases["first"] = phase
            elif step >= steps - samples:
                self._phases["steady"] = lower_peak(self._phases.get("steady"), phase)
            self._keep(self.run)
        return losses

    def _begin_part(self, part: PartName, /, *, micro_batch: int = 0) -> None:
        """Begin a part. Nothing is in flight where a part of the first step, which is measured
        once, or an optimizer's step begins."""
        if part == "optimizer" or "first" not in self._phases:
            self.recorder.settle()
        self.meter.begin_part(part, micro_batch=micro_batch)


def _attributes(model: nn.Module) -> list[Tensor]:
    """Tensors that modules hold as attributes, or in lists and dicts of theirs, without being
    parameters or buffers."""
    own = ("_parameters", "_buffers", "_modules")
    return [
        leaf
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in own and isinstance(value, Tensor | list | tuple | dict)
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)
    ]


def lower_peak(earlier: PhaseRecord | None, later: PhaseRecord) -> PhaseRecord:
    """The record with the lower peak; its ends and parts are the lower of both.

    The later one if their collectives differ.
    """
    if earlier is None or earlier.collectives != later.collectives:
        return later
    lowest = min(earlier, later, key=lambda phase: phase.memory.peak_bytes)
    parts = tuple(
        replace(
            part, start_bytes=min(part.start_bytes, other.start_bytes),
            peak_bytes=min(part.peak_bytes, other.peak_bytes),
        )
        for part, other in zip(earlier.memory.parts, later.memory.parts, strict=True)
    )
    start = min(earlier.memory.start_bytes, later.memory.start_bytes)
    end = min(earlier.memory.end_bytes, later.memory.end_bytes)
    return replace(
        lowest, memory=replace(lowest.memory, parts=parts, start_bytes=start, end_bytes=end)
    )
