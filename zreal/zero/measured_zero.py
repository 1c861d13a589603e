"""A user's own module trained under `ZeRO` and measured, as the executor measures models of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

from torch import Tensor

from zreal.meters.measured_step import BeginPart, MeasuredRank, TrainedRank
from zreal.meters.recording import units_of
from zreal.modules import modules
from zreal.modules.initial_values import Initialiser, copies_of_buffers, move_buffers
from zreal.modules.numerics import batches as batching
from zreal.modules.optimizers import make_optimizer, trained
from zreal.modules.own.own_module import OwnModel
from zreal.zero.zero import STAGES, ZeRO
from zsim.errors import ArgumentError, listed
from zsim.ir.run import RankRun
from zsim.scenario.scenario import Scenario


def train_own(
    scenario: Scenario, *, rank: int, steps: int = 3, samples: int = 1,
    device: str = "cpu", progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[RankRun], None] = lambda _: None, parity: bool = False,
) -> TrainedRank:
    """Train `steps` steps of the user's module on this rank; arguments as those of the executor.

    ArgumentError for strategies that `ZeRO` does not have.
    """
    if scenario.strategy not in STAGES:
        raise ArgumentError(
            where="interpreter", expected=f"{listed(STAGES)} for an own module",
            found=f"the executor of {scenario.strategy}", remedy="leave interpreter out",
        )
    measured = MeasuredRank(scenario, rank=rank, device=device, progress=progress, keep=keep)
    inputs = batching.inputs_by_step(
        scenario, rank=rank, dtype=scenario.precision.parameters, device=device
    )
    module = modules.empty(scenario.model, seed=scenario.seed)
    modules.cast_buffers(module, scenario)
    move_buffers(module, device)
    zero = ZeRO(
        module, make_optimizer(scenario.optimizer, trained(module)),
        stage=STAGES[scenario.strategy], accumulation=scenario.batch.accumulation,
        clip_norm=scenario.optimizer.clip_norm, reduce=scenario.precision.reduce,
        master=scenario.precision.master, sync=scenario.sync, device=device, mesh=measured.mesh,
    )
    zero.make = Initialiser(
        model=module, spec=scenario.model, seed=scenario.seed, device=device, meter=measured.meter,
        value=modules.own_values(module),
    )
    loop = OwnLoop(scenario, zero)
    with measured.metering():
        with measured.construction(module):
            zero.shard(cast(OwnModel, scenario.model), options=scenario.options)
        losses = measured.train(loop.train_step, inputs=inputs, steps=steps, samples=samples)
    parameters, gradients, batches = dict[str, Tensor](), dict[str, Tensor](), inputs(steps)
    buffers = copies_of_buffers(module) if parity else []
    if parity:
        parameters = zero.rank.parameters()
        with measured.recorder:
            gradients = loop.gradients(batches)
    return TrainedRank(
        run=measured.run, module=module, losses=losses,
        plain_step=partial(loop.plain_step, batches),
        recorder=measured.recorder, model=module, units=units_of(module, scenario.model),
        parameters=parameters, gradients=gradients, buffers=buffers,
    )


@dataclass(frozen=True, slots=True)
class OwnLoop:
    """The training loop that a user of `zero` would write."""

    scenario: Scenario
    zero: ZeRO

    def train_step(
        self, step: int, batches: list[batching.MicroBatch], begin_part: BeginPart
    ) -> tuple[float, Mapping[str, int]]:
        """One step. Returns this rank's mean loss and its held bytes by kind."""
        loss = self._backward(batches, begin_part=begin_part)
        begin_part("optimizer")
        self.zero.step()
        held = self.zero.rank.held()
        begin_part("zero_grad")
        self.zero.zero_grad()
        return loss, held

    def plain_step(self, batches: list[batching.MicroBatch]) -> None:
        """A step in which the host does not wait for losses."""
        self._backward(batches, reads_losses=False)
        self.zero.step()
        self.zero.zero_grad()

    def gradients(self, batches: list[batching.MicroBatch]) -> dict[str, Tensor]:
        """Whole gradients of one more step, as the optimizer receives them."""
        whole: dict[str, Tensor] = {}
        handle = self.zero.optimizer.register_step_pre_hook(
            lambda *_: whole.update(self.zero.rank.gradients())
        )
        self.plain_step(batches)
        handle.remove()
        return whole

    def _backward(
        self, batches: list[batching.MicroBatch], *,
        begin_part: BeginPart = lambda part, micro_batch=0: None, reads_losses: bool = True,
    ) -> float:
        """Forward and backward of the micro-batches. Returns their mean loss."""
        scenario, total = self.scenario, 0.0
        for i, batch in enumerate(batches):
            begin_part("forward", micro_batch=i)
            with batching.autocast(scenario.precision, device=batch[0].device.type):
                loss = batching.summed_loss(self.zero.module, [batch], spec=scenario.model)
            begin_part("backward", micro_batch=i)
            loss.backward()
            total += loss.detach().item() if reads_losses else 0.0
            del loss
        return total / len(batches)
