"""The executor: trains by our own Programs, with real buffers, autograd and collectives.

It has no prefetch logic: the Program says what is gathered, freed or reduced, and when. A Program
that computes on a resharded unit, or that does not fit the model's modules, is a ProgramError.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from zreal.executor.flat_rank import FlatRank
from zreal.executor.replicated_rank import ReplicatedRank
from zreal.executor.trainer import ExecutedRank, ParityStep, ProgramTrainer
from zreal.meters.measured_step import MeasuredRank, TrainedRank
from zreal.meters.mesh_groups import shard_groups
from zreal.meters.recording import units_of
from zreal.modules import modules
from zreal.modules.host.host_saving import HostSaving
from zreal.modules.initial_values import Initialiser, move_buffers
from zreal.modules.numerics import batches as batching
from zsim.ir.program import Program, RankProgram
from zsim.ir.run import RankRun
from zsim.scenario.scenario import Scenario

RANKS: dict[str, Callable[..., ExecutedRank]] = {
    "ddp": ReplicatedRank,
    "zero1": partial(FlatRank, keeps_whole_gradients=True),
    "zero2": FlatRank,
    "zero3": FlatRank,
}
"""The class that carries out a strategy's ops, by strategy."""


def execute(
    scenario: Scenario, program: Program, *, rank: int, steps: int = 3, samples: int = 1,
    device: str = "cpu", progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[RankRun], None] = lambda _: None, parity: bool = False,
) -> TrainedRank:
    """Train `steps` steps (at least 2) by `program` on this rank of an existing process group.

    The steady step is the one of the last `samples` with the lowest peak. Each collective is
    announced to `progress` before torch issues it; each phase ends with the record so far to
    `keep`. With `parity` one more,
    unmetered step fills in gradients and the check of the optimizer.
    """
    ops = program.of_rank(rank)
    measured = MeasuredRank(scenario, rank=rank, device=device, progress=progress, keep=keep)
    inputs = batching.inputs_by_step(
        scenario, rank=rank, dtype=scenario.precision.parameters, device=device
    )
    model = modules.empty(
        scenario.model, seed=scenario.seed, checkpointing=scenario.checkpointing
    )
    move_buffers(model, device)
    make = Initialiser(
        model=model, spec=scenario.model, seed=scenario.seed, device=device, meter=measured.meter
    )
    with measured.metering():
        with measured.construction(model):
            made = _construct(scenario, model, ops, measured, make)
            saving = HostSaving(
                model=model, hook=scenario.offload.saving,
                uncounted=measured.meter.uncounted,
            )
            trainer = ProgramTrainer(scenario, ops, made, saving)
        with measured.meter.uncounted():
            stepped = trainer.rank.optimizer.copies() if parity else {}
        losses = measured.train(
            trainer.train_step, inputs=inputs, steps=steps, samples=samples,
            prepare=trainer.prepare,
        )
    parameters: dict[str, Tensor] = {}
    batches, last = inputs(steps), ParityStep()
    if parity:
        parameters = trainer.rank.parameters()
        with measured.recorder:
            last = trainer.parity_step(batches)
    return TrainedRank(
        run=measured.run, module=model, losses=losses,
        plain_step=partial(trainer.plain_step, batches),
        recorder=measured.recorder, model=model, units=units_of(model, scenario.model),
        parameters=parameters, gradients=last.gradients,
        initial=trainer.rank.parameters(stepped) if parity else {},
        step_difference=last.difference,
    )


def _construct(
    scenario: Scenario, model: modules.Model, ops: RankProgram, measured: MeasuredRank,
    make: Initialiser,
) -> ExecutedRank:
    """The rank after the Program's construction phase."""
    (group, replicas), kind = shard_groups(measured.mesh), RANKS[scenario.strategy]
    if replicas is not None:
        kind = partial(kind, replicas=replicas)
    rank = kind(
        scenario, model, group, uncounted=measured.meter.uncounted, make=make, device=make.device
    )
    with torch.no_grad():
        for op in ops.construction:
            rank.construct(op)
    return rank
