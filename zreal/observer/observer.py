"""The observer: trains with torch's own strategies and records their steps.

A subject is a real fully_shard, FullyShardedDataParallel, DistributedDataParallel or
ZeroRedundancyOptimizer, or a plain module. The recorder sees its collectives at the dispatcher, the
meter its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from zreal.meters.held_memory import held_bytes
from zreal.meters.measured_step import BeginPart, MeasuredRank, TrainedRank
from zreal.meters.recording import units_of
from zreal.modules import modules
from zreal.modules.host.host_saving import HostSaving
from zreal.modules.initial_values import Initialiser, copies_of_buffers, move_buffers
from zreal.modules.numerics import batches as batching
from zreal.observer.subjects import Subject
from zreal.observer.subjects.table import SUBJECTS
from zreal.observer.whole_tensors import whole_gradients, whole_parameters
from zsim.errors import ZsimError
from zsim.ir.run import RankRun
from zsim.scenario.scenario import Scenario


@dataclass(slots=True, kw_only=True)
class Observation(TrainedRank):
    """One observed rank after its last step, with its subject."""

    subject: Subject


def observe(
    scenario: Scenario, *, rank: int, steps: int = 3, samples: int = 1, device: str = "cpu",
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[RankRun], None] = lambda _: None, parity: bool = False,
) -> Observation:
    """Train `steps` steps (at least 3) of the real subject on this rank of an existing process
    group.

    The steady step is the one of the last `samples` with the lowest peak. Each collective is
    announced to `progress` before torch issues it; each phase ends with the record so far to
    `keep`. With `parity` one more,
    unmetered backward makes gradients; they and the parameters are then gathered whole.
    """
    measured = MeasuredRank(scenario, rank=rank, device=device, progress=progress, keep=keep)
    model = modules.empty(
        scenario.model, seed=scenario.seed, checkpointing=scenario.checkpointing
    )
    modules.cast_buffers(model, scenario)
    move_buffers(model, device)
    make = Initialiser(
        model=model, spec=scenario.model, seed=scenario.seed, device=device, meter=measured.meter,
        value=modules.own_values(model),
    )
    units = units_of(model, scenario.model)
    with measured.metering():
        with measured.construction(model):
            if scenario.model.made_whole:
                make(parameter.fqn for parameter in scenario.model.parameters)
            subject = SUBJECTS[scenario.strategy](scenario, model, measured.mesh, make)
        saving = HostSaving(
            model=model, hook=scenario.offload.saving, uncounted=measured.meter.uncounted
        )
        trainer = SubjectTrainer(scenario, subject, measured.recorder.settle, device, saving)
        inputs = batching.inputs_by_step(scenario, rank=rank, dtype=subject.dtype, device=device)
        losses = measured.train(trainer.train_step, inputs=inputs, steps=steps, samples=samples)
    if scenario.world_size > 1 and not measured.run.phases["steady"].collectives:
        raise ZsimError(
            where=f"rank {rank}", expected="collectives in the steady step", found="none",
            remedy="report this",
        )
    batches = inputs(steps)
    observation = Observation(
        run=measured.run, module=subject.module, losses=losses,
        plain_step=partial(trainer.plain_step, batches), subject=subject,
        recorder=measured.recorder, model=model, units=units,
    )
    if parity:
        observation.buffers = copies_of_buffers(model)
        with measured.recorder:
            trainer.backward(batches)
        observation.parameters = whole_parameters(subject)
        observation.gradients = whole_gradients(subject)
    return observation


@dataclass(slots=True)
class SubjectTrainer:
    """The training loop that a user of `subject` would write."""

    scenario: Scenario
    subject: Subject
    settle: Callable[[], None]
    """Waits until gloo's threads hold no tensor any longer."""
    device: str
    saving: HostSaving
    owned: list[Parameter] = field(init=False)
    """The module's parameters, before torch puts unsharded ones in their place."""

    def __post_init__(self) -> None:
        self.owned = list(self.subject.module.parameters())

    def train_step(
        self, step: int, batches: list[batching.MicroBatch], begin_part: BeginPart
    ) -> tuple[float, Mapping[str, int]]:
        """Micro-batches, the optimizer's step, gradients to None. Returns this rank's mean loss and
        its held bytes by kind."""
        loss = self.backward(batches, begin_part=begin_part)
        self.settle()
        self.subject.optimizer.step()
        held = self._held()
        begin_part("zero_grad")
        self.subject.optimizer.zero_grad(set_to_none=True)
        return loss, held

    def plain_step(self, batches: list[batching.MicroBatch]) -> None:
        """A step without a look at held bytes or at losses, for which the host would wait."""
        self.backward(batches, reads_losses=False)
        self.subject.optimizer.step()
        self.subject.optimizer.zero_grad(set_to_none=True)

    def backward(
        self, batches: list[batching.MicroBatch], *,
        begin_part: BeginPart = lambda part, micro_batch=0: None, reads_losses: bool = True,
    ) -> float:
        """Forward and backward of the micro-batches, and clipping. Returns their mean loss, 0 where
        losses are not read."""
        scenario, subject, total = self.scenario, self.subject, 0.0
        micro_batches = batching.forwards_of(scenario, batches)
        for i, forwards in enumerate(micro_batches):
            begin_part("forward", micro_batch=i)
            with subject.micro_batch(i == len(micro_batches) - 1):
                inputs = (tensor for batch in forwards for tensor in batch)
                with (
                    batching.autocast(scenario.precision, device=batches[0][0].device.type),
                    self.saving.around_forward(inputs),
                ):
                    loss = batching.summed_loss(
                        subject.module, forwards, spec=scenario.model
                    )
                begin_part("backward", micro_batch=i)
                subject.backward(loss)
                total += loss.detach().item() if reads_losses else 0.0
                del loss
        begin_part("optimizer")
        if scenario.optimizer.clip_norm:
            clip = subject.clip or partial(clip_grad_norm_, subject.module.parameters())
            clip(scenario.optimizer.clip_norm)
        return total / len(micro_batches)

    def _held(self) -> Mapping[str, int]:
        parameters = [*self.owned, *self.subject.flat()]
        own = [parameter.grad for parameter in parameters if self.subject.owns_gradients]
        gradients = [*own, *self.subject.gradients()]
        states = self.subject.states()
        held = held_bytes(
            parameters=parameters, gradients=gradients, states=states, device=self.device
        )
        return {**held, **self.saving.held()}
