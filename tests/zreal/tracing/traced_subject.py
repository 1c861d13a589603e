"""The real module of a user under torch's own strategies, measured as `zreal.observer.observer`
measures models of ours."""

from __future__ import annotations

from typing import Any

from tests.zreal.tracing.user_modules import Case
from zreal import torch_private
from zreal.meters.collectives import CollectiveRecorder
from zreal.meters.held_memory import held_bytes
from zreal.meters.memory import MemoryMeter, memory_record
from zreal.meters.mesh_groups import device_mesh
from zreal.observer.subjects.table import SUBJECTS
from zsim.ir.run import PhaseRecord
from zsim.scenario.scenario import Scenario


class Subject:
    """The real module of a case under the real strategy on this rank, as `zreal.observer.observer`
    runs models of ours."""

    def __init__(self, user: Case, case: Scenario, *, log: bool = False) -> None:
        self.case, self.user = case, user
        mesh, groups = device_mesh(case, device="cpu")
        self.meter = MemoryMeter(log=log)
        self.recorder = CollectiveRecorder(
            groups, world_size=case.world_size, progress=lambda _: None
        )
        module: Any = self.user.make()
        module.module_at = module.get_submodule
        with self.meter, self.recorder:
            with self.meter.span() as span:
                with self.meter.uncounted():
                    self.meter.watch(*module.buffers(), torch_private.rank_map(mesh))
                self.subject = SUBJECTS[case.strategy](
                    case, module, mesh,
                    lambda fqns: self.meter.watch(*map(module.get_parameter, fqns)),
                )
            self.construction = PhaseRecord(
                collectives=self.recorder.take(), memory=memory_record(span)
            )

    def step(self) -> PhaseRecord:
        """One step of training."""
        subject = self.subject
        with self.meter, self.recorder:
            with self.meter.uncounted():
                batches = [self.user.data() for _ in range(self.case.batch.accumulation)]
            if self.meter.events is not None:
                self.meter.events.clear()
            with self.meter.span() as span:
                for micro_batch, given in enumerate(batches):
                    self.meter.begin_part("forward", micro_batch=micro_batch)
                    with subject.micro_batch(micro_batch == len(batches) - 1):
                        loss = self.user.run(subject.module, given)
                        self.meter.begin_part("backward", micro_batch=micro_batch)
                        loss.backward()
                        del loss
                self.meter.begin_part("optimizer")
                subject.optimizer.step()
                with self.meter.uncounted():
                    parameters = list(subject.module.parameters())
                    gradients = [
                        parameter.grad for parameter in parameters if subject.owns_gradients
                    ]
                    holds = held_bytes(
                        parameters=parameters, gradients=gradients, states=subject.states()
                    )
                    del gradients, parameters
                self.meter.begin_part("zero_grad")
                subject.optimizer.zero_grad(set_to_none=True)
        return PhaseRecord(collectives=self.recorder.take(), memory=memory_record(span, holds))
