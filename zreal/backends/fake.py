"""The backend fake: any rank of any world in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from zreal.backends.own_module import traced_with_module
from zreal.backends.progress import on_rank
from zreal.backends.requirements import require_cuda, require_torch, require_transformers
from zsim.ir.gc_pause import uncollected
from zsim.ir.run import RunRecord, observed_ranks
from zsim.models.training_options import Device, Dtype
from zsim.runs.backend import (
    Capabilities,
    RunOptions,
)
from zsim.runs.compare.memory.by_part import EXACT
from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zsim.autograd.traced.model import TracedModel


@dataclass(frozen=True)
class FakeBackend:
    """Any rank of any world in this process: real memory and order, collectives that move nothing.

    Memory and compute are those of `device`.
    """

    name: ClassVar[str] = "fake"
    device: Device = "cpu"

    def on(self, device: Device) -> FakeBackend:
        """The backend on this CPU, or on this machine's GPU."""
        return FakeBackend(device)

    def capabilities(self) -> Capabilities:
        """Memory of the device; no numerics and no time."""
        require_torch(self.name)
        if self.device == "cuda":
            require_cuda(self.name, remedy="leave out the device, or make it cpu")
        return Capabilities(memory=True, numerics=False, time=False, device=self.device)

    def with_module(
        self, scenario: Scenario, module: str, *, timeout_s: float, device: Device | None = None
    ) -> Scenario:
        """The scenario with the user's own module, traced for the device."""
        return traced_with_module(
            scenario, module, backend=self.name, device=device or self.device, timeout_s=timeout_s
        )

    def trace(
        self, name: str, inputs: Sequence[str], *, dtype: Dtype | None,
        autocast: Dtype | Literal["none"] = "none", device: Device,
        recomputed: bool, micro_batches: Sequence[int] = (), lengths: Sequence[int] = (),
        units: Sequence[str] | None = None,
    ) -> tuple[TracedModel, ...]:
        """The module called `name`, traced; of `zreal.tracing.named_module`."""
        require_torch(self.name)
        from zreal.tracing.named_module import trace_named

        return trace_named(
            name, inputs, dtype=dtype, autocast=autocast, device=device, recomputed=recomputed,
            micro_batches=micro_batches, lengths=lengths, units=units,
        )

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """The Run of `options.ranks`, first and last by default."""
        require_torch(self.name)
        with uncollected():
            from zreal.processes.host_memory import require_device_memory, require_host_memory
            from zreal.processes.rank_device import present_nbytes, take_device
            from zreal.rank import run as rank_run

        interpreter = rank_run.interpreter_of(scenario, options.interpreter)
        require_transformers(scenario, self.name)
        require_host_memory(scenario, backend=self.name, processes=1, device=self.device)
        if self.device == "cuda":
            present = present_nbytes(take_device("cuda", local_rank=0))
            require_device_memory(scenario, backend=self.name, present_nbytes=present)
        ranks = options.ranks or tuple(dict.fromkeys((0, scenario.world_size - 1)))
        if options.all_ranks:
            ranks = tuple(range(scenario.world_size))
        return RunRecord(
            scenario=scenario.name, backend=self.name, interpreter=interpreter,
            world_size=scenario.world_size, mesh=scenario.mesh,
            ranks=tuple(
                rank_run.fake_rank(
                    scenario, rank=rank, interpreter=interpreter, device=self.device,
                    progress=on_rank(rank, scenario.name, options.progress),
                )
                for rank in ranks
            ),
            provenance=rank_run.provenance(scenario, device=self.device)
            | {"memory": EXACT}  # no thread but the host's frees memory
            | ({} if len(ranks) == scenario.world_size else observed_ranks(ranks)),
        )
