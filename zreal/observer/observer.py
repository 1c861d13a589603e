"""Runs what torch itself has (fully_shard, DistributedDataParallel, ZeroRedundancyOptimizer) and
records what it does.

The subject issues, holds and frees as it likes; the observer only watches: collectives at the
dispatcher, bytes with the meter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from zreal.meters.collectives import CollectiveRecorder
from zreal.meters.held import held
from zreal.meters.measured_step import Begin, beginning, device_mesh, lower
from zreal.meters.memory import MemoryMeter, as_record
from zreal.modules import batches as batching
from zreal.modules import modules
from zreal.observer.subjects import Subject
from zreal.observer.subjects.table import SUBJECTS
from zsim.errors import ZsimError
from zsim.ir.run import PhaseRecord, RankRun
from zsim.scenario.scenario import Scenario


@dataclass(slots=True)
class Observation:
    """What one rank did: its record, and for parity its losses and whole parameters."""

    run: RankRun
    losses: list[float] = field(default_factory=list)
    subject: Subject | None = None
    plain_step: Callable[[], object] | None = None
    """One step more, which nothing watches, on inputs that are there already."""


def observe(
    scenario: Scenario,
    *,
    rank: int,
    steps: int = 3,
    samples: int = 1,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[RankRun], None] = lambda _: None,
    gradients: bool = False,
) -> Observation:
    """Train `steps` steps (at least 3) of the real subject on this rank. The process group must
    exist.

    The steady step is the one of the last `samples` whose peak is lowest. `progress` hears of each
    collective before it is entered, `keep` of the record so far after each phase. With `gradients`,
    the module is left with those that the optimizer would be handed in the next step; nothing
    measures them.
    """
    mesh, groups = device_mesh(scenario, device=device)
    recorder = CollectiveRecorder(groups, world_size=scenario.world_size, progress=progress)
    meter = MemoryMeter()
    phases: dict[str, PhaseRecord] = {}
    losses: list[float] = []
    model = modules.build(
        scenario.model, seed=scenario.seed, checkpointing=scenario.checkpointing
    ).to(device)
    with meter, recorder:
        with meter.looking_away():
            meter.watch(*model.buffers())  # no strategy counts them
        with meter.span() as span:
            meter.watch(*model.parameters())
            subject = SUBJECTS[scenario.strategy](scenario, model, mesh)
            # later the module may have a unit's gathered ones in their place
            owned = list(subject.module.parameters())
            recorder.settle()
        phases["construction"] = PhaseRecord(collectives=recorder.take(), memory=as_record(span))
        keep(RankRun(rank=rank, phases=dict(phases), groups=dict(recorder.group_ranks)))
        for step in range(steps):
            with meter.looking_away():  # inputs are the user's, not the strategy's
                batches = batching.micro_batches(
                    scenario, rank=rank, step=step, dtype=subject.dtype, device=device
                )
            with meter.span() as span:
                begin = beginning(meter, recorder, phases)
                loss, holds = _train_step(
                    scenario, subject, batches, owned=owned, settle=recorder.settle, begin=begin
                )
                recorder.settle()
            losses.append(loss)
            phase = PhaseRecord(collectives=recorder.take(), memory=as_record(span, holds))
            if step == 0:
                phases["first"] = phase
            elif step >= steps - samples:
                phases["steady"] = lower(phases.get("steady"), phase)
            keep(RankRun(rank=rank, phases=dict(phases), groups=dict(recorder.group_ranks)))
    if scenario.world_size > 1 and not phases["steady"].collectives:
        raise ZsimError(
            where=f"rank {rank}", expected="collectives in the steady step", found="none",
            remedy="report this",
        )
    if gradients:
        batches = batching.micro_batches(
            scenario, rank=rank, step=steps, dtype=subject.dtype, device=device
        )
        with recorder:
            _gradients(scenario, subject, batches)
    return Observation(
        run=RankRun(rank=rank, phases=phases, groups=recorder.group_ranks),
        losses=losses,
        subject=subject,
        plain_step=partial(_plain_step, scenario, subject, batches),
    )


def _train_step(
    scenario: Scenario,
    subject: Subject,
    batches: list[batching.MicroBatch],
    *,
    owned: list[Parameter],
    settle: Callable[[], None],
    begin: Begin,
) -> tuple[float, Mapping[str, int]]:
    """Micro-batches, the optimizer's step, gradients to None. Returns this rank's mean loss of
    them, and what it held after the step.

    `owned`: the module's parameters as they were before anything was gathered.
    """
    loss = _gradients(scenario, subject, batches, begin=begin)
    settle()
    subject.optimizer.step()
    parameters = [*owned, *subject.flat()]
    gradients = [parameter.grad for parameter in parameters if subject.owns_gradients]
    holds = held(parameters=parameters, gradients=gradients, states=subject.states())
    del gradients
    begin("zero_grad")
    subject.optimizer.zero_grad(set_to_none=True)
    return loss, holds


def _plain_step(scenario: Scenario, subject: Subject, batches: list[batching.MicroBatch]) -> None:
    """As `_train_step`, but it looks at nothing: not at what is held, and not at losses, for which
    the host waits for the device."""
    _gradients(scenario, subject, batches, reads_losses=False)
    subject.optimizer.step()
    subject.optimizer.zero_grad(set_to_none=True)


def _gradients(
    scenario: Scenario,
    subject: Subject,
    batches: list[batching.MicroBatch],
    *,
    begin: Begin = lambda part, micro_batch=0: None,
    reads_losses: bool = True,
) -> float:
    """Forward and backward of the micro-batches, and clipping; returns their mean loss, which is 0
    where nobody reads it."""
    total = 0.0
    of_micro_batch = batching.forwards_of(scenario, batches)
    for i, forwards in enumerate(of_micro_batch):
        begin("forward", micro_batch=i)
        with subject.micro_batch(i == len(of_micro_batch) - 1):
            with batching.autocast(scenario.precision, device=batches[0][0].device.type):
                loss = batching.summed_loss(subject.module, forwards)
            begin("backward", micro_batch=i)
            loss.backward()
            total += loss.detach().item() if reads_losses else 0.0
            del loss
    begin("optimizer")
    if scenario.optimizer.clip_norm:
        clip = subject.clip or (lambda norm: clip_grad_norm_(subject.module.parameters(), norm))
        clip(scenario.optimizer.clip_norm)
    return total / len(of_micro_batch)
