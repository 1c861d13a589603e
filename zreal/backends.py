"""The real backends behind the entry-point group `zsim.backends`: fake, gloo and nccl.

Importing this module loads no torch. A backend loads it, or says how to install it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zsim.calibration.machine.machine_load import others_share
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.testbed import Layout
from zsim.engine.faults.arrivals import late_real_ranks
from zsim.engine.faults.fault import FailingRank, LateStart, SkippedCollective, SlowRank
from zsim.engine.faults.faulty_program import faulty_program
from zsim.errors import ArgumentError, BackendUnavailableError
from zsim.ir.run import IncompleteRunError, InterruptedRunError, RankRun, RunRecord, observed_ranks
from zsim.models.families.transformers import TransformersModel
from zsim.models.training_options import Device, Dtype
from zsim.runs.backend import (
    Capabilities,
    DeviceMeasurements,
    DeviceRequest,
    Gpus,
    MachineMeasurements,
    MachineRequest,
    RepeatedCall,
    RunOptions,
)
from zsim.runs.compare.memory_by_part import EXACT
from zsim.runs.launch.planned_collectives import planned_collectives
from zsim.runs.saved import from_table
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

if TYPE_CHECKING:
    from zreal.processes.rank_status import RankStatus
    from zsim.autograd.traced.model import TracedModel

MAX_PROCESSES = 64
"""Ranks that gloo and nccl start on one machine at most."""
MAX_ERROR_CHARS = 300
FAULTS = tuple(kind.kind for kind in (SlowRank, LateStart, FailingRank, SkippedCollective))
"""Kinds of faults that `zreal.rank_faults` gives a rank over gloo."""
INTERRUPTED = "its controller was ended, by SIGTERM or Ctrl-C"
EMULATED = "emulated in timed steps: forward, backward and optimizer last as predicted"


def _require_torch(backend: str) -> None:
    """BackendUnavailableError where torch is missing, or does not load because it is half installed
    or lacks a library."""
    spec = find_spec("torch")
    if spec is None:
        raise BackendUnavailableError(
            where=f"backend {backend}",
            expected="torch >=2.11,<2.14",
            found="no torch",
            remedy="pip install 'zsim[real]'",
        )
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken installation raises anything
        first_line = str(error).strip().partition("\n")[0][:MAX_ERROR_CHARS]
        raise BackendUnavailableError(
            where=f"backend {backend}",
            expected="a torch that can be imported",
            found=f"one at {spec.origin} that cannot: {type(error).__name__}: {first_line}",
            remedy="install it anew, pip install --force-reinstall 'zsim[real]', or take what "
                   "shadows it off the path",
        ) from error


def _require_cuda(backend: str, *, remedy: str) -> None:
    """BackendUnavailableError where torch has no CUDA, or sees no device."""
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailableError(
            where=f"backend {backend}", expected="a CUDA device and a CUDA build of torch",
            found=f"torch {torch.__version__} without a device", remedy=remedy,
        )


def _require_transformers(scenario: Scenario, backend: str) -> None:
    """BackendUnavailableError for a model of a config.json where transformers is missing, or is not
    the major version whose memory zsim knows."""
    if not isinstance(scenario.model, TransformersModel):
        return
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = ""
    if not installed.startswith("5."):
        raise BackendUnavailableError(
            where=f"backend {backend}, model.huggingface",
            expected="transformers >=5,<6, whose modules are trained",
            found=f"transformers {installed}" if installed else "no transformers",
            remedy="pip install 'zsim[real,huggingface]'",
        )


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
        _require_torch(self.name)
        if self.device == "cuda":
            _require_cuda(self.name, remedy="leave out the device, or make it cpu")
        return Capabilities(memory=True, numerics=False, time=False, device=self.device)

    def with_module(
        self, scenario: Scenario, module: str, *, timeout_s: float, device: Device | None = None
    ) -> Scenario:
        """The scenario with the user's own module, traced for the device."""
        return _with_module(
            scenario, module, backend=self.name, device=device or self.device, timeout_s=timeout_s
        )

    def trace(
        self, name: str, inputs: Sequence[str], *, dtype: Dtype | None, device: Device,
        recomputed: bool, micro_batches: Sequence[int] = (), lengths: Sequence[int] = (),
    ) -> tuple[TracedModel, ...]:
        """The module called `name`, traced; of `zreal.tracing.named_module`."""
        _require_torch(self.name)
        from zreal.tracing.named_module import trace_named

        return trace_named(
            name, inputs, dtype=dtype, device=device, recomputed=recomputed,
            micro_batches=micro_batches, lengths=lengths,
        )

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """The Run of `options.ranks`, first and last by default."""
        _require_torch(self.name)
        from zreal import rank_run
        from zreal.processes.host_memory import require_device_memory, require_host_memory
        from zreal.processes.rank_device import present_nbytes, take_device

        interpreter = rank_run.interpreter_of(scenario, options.interpreter)
        _require_transformers(scenario, self.name)
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
                    progress=_on_rank(rank, scenario.name, options.progress),
                )
                for rank in ranks
            ),
            provenance=rank_run.provenance(scenario, device=self.device)
            | {"memory": EXACT}  # no thread but the host's frees memory
            | ({} if len(ranks) == scenario.world_size else observed_ranks(ranks)),
        )


def _on_rank(
    rank: int, scenario: str, progress: Callable[[str], None]
) -> Callable[[str], None]:
    """`progress` that names scenario and rank, at most twice a second."""
    last = [0.0]

    def told(text: str) -> None:
        now = time.monotonic()
        if now - last[0] > 0.5:
            last[0] = now
            progress(f"{scenario}: rank {rank}, {text}")

    return told


def _at_phase(
    scenario: Scenario, progress: Callable[[str], None]
) -> Callable[[list[RankStatus]], None]:
    """`progress` that names scenario and phase, whenever ranks have come to another."""
    from zreal.processes.rank_status import phase
    from zreal.reference_cost import num_steps

    last = [""]

    def told(ranks: list[RankStatus]) -> None:
        text = phase(ranks, num_steps(scenario))
        if text not in ("", last[0]):
            last[0] = text
            progress(f"{scenario.name}: {text}")

    return told


def _with_module(
    scenario: Scenario, module: str, *, backend: str, device: Device, timeout_s: float
) -> Scenario:
    _require_torch(backend)
    from zreal.modules.own.user_code import within
    from zreal.tracing.own_scenario import with_module

    with within(timeout_s, module):
        return with_module(scenario, module, device=device)


class GlooBackend:
    """One process per rank on this machine, with gloo collectives between them."""

    name = "gloo"
    device: Device = "cpu"

    def on(self, device: Device) -> GlooBackend:
        """This backend; ArgumentError for other devices than its own."""
        if device != self.device:
            others = {"cpu": "gloo", "cuda": "nccl"}
            raise ArgumentError(
                where="device", expected=f"{self.device}, where {self.name} runs", found=device,
                remedy=f"the backend {others[device]} or fake",
            )
        return self

    def capabilities(self) -> Capabilities:
        """Memory, numerics and spans of a recorded step.

        A Run's step time is one of this machine, which is no prediction for the scenario's.
        """
        _require_torch(self.name)
        return Capabilities(
            memory=True, numerics=True, time=False, spans=True, device=self.device,
            faults=FAULTS,
        )

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """The Run of every rank; IncompleteRunError with the phases that had ended when one fails.
        """
        _require_torch(self.name)
        if scenario.world_size > MAX_PROCESSES:
            raise BackendUnavailableError(
                where=f"backend {self.name}",
                expected=f"at most {MAX_PROCESSES} ranks on one machine",
                found=f"{scenario.world_size}",
                remedy="use the backend fake, or torchrun -m zreal.worker on a cluster",
            )
        from zreal import rank_run
        from zreal.numerics_choice import choose_numerics
        from zreal.processes import launch
        from zreal.processes.reports.failure_report import LaunchError

        interpreter = rank_run.interpreter_of(scenario, options.interpreter)
        _require_transformers(scenario, self.name)
        if scenario.faults:  # at ops that are there
            faulty_program(plan(scenario, device=self.device), scenario.faults)
        numerics = choose_numerics(
            scenario,
            asked=options.numerics,
            backend=self.name,
            processes=scenario.world_size,
            timeout_s=options.timeout_s,
            device=self.device,
        )
        failure: LaunchError | None = None
        interrupt: KeyboardInterrupt | None = None
        kept: dict[int, Any] = {}
        arguments = self._rank_arguments(scenario, interpreter, options)
        arguments["numerics"] = numerics.mode
        try:
            with self._hosts(options.testbed, scenario.world_size) as hosts:
                tables = launch.launch(
                    "zreal.rank_run:launched_rank", arguments, world_size=scenario.world_size,
                    timeout_s=options.timeout_s, hosts=hosts,
                    program=planned_collectives(scenario, self.device), kept=kept,
                    look=_at_phase(scenario, options.progress),
                )
        except LaunchError as error:
            failure = error
        except KeyboardInterrupt as stop:
            interrupt = stop
        whole = failure is None and interrupt is None
        if not whole:
            tables = [table for _, table in sorted(kept.items())]
        ranks = tuple(from_table(RankRun, table) for table in tables)
        step_time_ns, method = (
            rank_run.slowest_step_time(ranks) if whole else (None, {})
        )
        run = RunRecord(
            scenario=scenario.name, backend=self.name, interpreter=interpreter,
            world_size=scenario.world_size, mesh=scenario.mesh, ranks=ranks,
            step_time_ns=step_time_ns,
            complete=whole,
            failure="" if whole else str(failure or INTERRUPTED),
            faults=tuple(map(str, scenario.faults)),
            late=late_real_ranks(ranks, scenario.mesh) if whole and scenario.faults else (),
            provenance=rank_run.provenance(scenario, device=self.device) | method
            | ({"testbed": options.testbed.text} if options.testbed else {})
            | ({"compute": EMULATED} if options.emulated_on else {})
            | numerics.provenance,
        )
        if interrupt is not None:
            raise InterruptedRunError(run) from interrupt
        if failure is not None:
            if scenario.faults:
                failure.remedy = f"the scenario's faults are {'; '.join(run.faults)}"
            raise IncompleteRunError(failure, run) from None
        return run

    def measure(self, request: MachineRequest) -> MachineMeasurements:
        """Steps without communication and collectives alone, on all ranks at once."""
        _require_torch(self.name)
        import torch

        from zreal.processes import launch

        arguments = {
            "scenarios": [scenario.to_toml() for scenario in request.scenarios],
            "collectives": [
                [
                    each.kind, each.nbytes, each.ranks, each.stride, each.repeats,
                    each.computed_ns, each.beside, each.apart_ns,
                ]
                for each in request.collectives
            ],
            "products": [list(shape) for shape in request.products],
            "attentions": [list(shape) for shape in request.attentions],
            "repeats": request.repeats, "timeout_s": request.timeout_s, "backend": self.name,
            "budget_s": request.budget_s, "begun": time.monotonic(),
        }
        with self._hosts(request.testbed, request.world_size) as hosts:
            ranks = launch.launch(
                "zreal.machine.rank_measurements:measured_rank", arguments,
                world_size=request.world_size, timeout_s=request.timeout_s, hosts=hosts,
            )
        return MachineMeasurements(
            steps=_slowest([rank["steps"] for rank in ranks]),
            collectives=tuple(
                _durations([times for times in each if times], apart=asked.apart_ns > 0)
                for asked, each in zip(
                    request.collectives, zip(*(rank["collectives"] for rank in ranks), strict=True),
                    strict=True,
                )
            ),
            products=_slowest([rank["products"] for rank in ranks]),
            attentions=_slowest([rank["attentions"] for rank in ranks]),
            others_share=_others_share([rank["load"] for rank in ranks]),
            provenance={"torch": torch.__version__, "backend": self.name},
        )

    def measure_device(self, request: DeviceRequest) -> DeviceMeasurements:
        """Single kernels on each rank's device, and collectives over all ranks."""
        _require_torch(self.name)
        from zreal.processes import launch

        arguments = {
            "kernels": [asdict(kernel) for kernel in request.kernels],
            "collectives": [list(each) for each in request.collectives],
            "budget_s": request.budget_s, "timeout_s": request.timeout_s, "backend": self.name,
            "device": self.device,
        }
        ranks = launch.launch(
            "zreal.machine.device_measurements:measured_device", arguments,
            world_size=request.world_size, timeout_s=request.timeout_s,
        )
        return DeviceMeasurements(
            kernels=_timed([rank["kernels"] for rank in ranks]),
            collectives=_timed([rank["collectives"] for rank in ranks]),
        )

    def _rank_arguments(
        self, scenario: Scenario, interpreter: str, options: RunOptions
    ) -> dict[str, Any]:
        """Arguments of zreal.rank_run.launched_rank; the scenario travels as its own text."""
        return {
            "text": scenario.to_toml(),
            "where": f"{scenario.name}.toml",
            "folder": str(Path(scenario.folder).resolve()),
            "device": self.device,
            "interpreter": interpreter,
            "timeout_s": options.timeout_s,
            "emulated": _emulated(scenario, options.emulated_on),
            "module": options.module,
            "fingerprint": scenario.fingerprint,
        }

    def with_module(
        self, scenario: Scenario, module: str, *, timeout_s: float, device: Device | None = None
    ) -> Scenario:
        """The scenario with the user's own module, traced for this backend's device."""
        return _with_module(
            scenario, module, backend=self.name, device=device or self.device, timeout_s=timeout_s
        )

    @contextmanager
    def _hosts(
        self, testbed: Layout | None, world_size: int
    ) -> Iterator[list[tuple[int, int]]]:
        """The hosts that ranks run in, by rank; none without a testbed."""
        if testbed is None:
            yield []
            return
        if self.device != "cpu" or testbed.hosts != world_size:
            raise BackendUnavailableError(
                where=f"backend {self.name}, testbed {testbed.text}",
                expected="gloo, with a host for each rank", found=f"{world_size} ranks",
                remedy=f"use a layout of {world_size} hosts, as {world_size}x1gbit",
            )
        from zreal.testbed.network import network

        with network(testbed) as hosts:
            yield hosts.places


def _emulated(scenario: Scenario, cluster: ClusterSpec | None) -> dict[str, list[int]]:
    if cluster is None:
        return {}
    from zreal.modules import emulation

    return emulation.durations(scenario, cluster)


def _slowest(ranks: list[list[list[int]]]) -> tuple[tuple[int, ...], ...]:
    """The largest of all ranks, measurement by measurement and repetition by repetition; ranks
    without a measurement have none of it."""
    return tuple(
        tuple(max(turn) for turn in zip(*(times for times in each if times), strict=True))
        for each in zip(*ranks, strict=True)
    )


def _others_share(loads: list[list[int] | None]) -> float:
    """The share of the machine's cores that others took while ranks measured it."""
    known = [load for load in loads if load]
    if len(known) < len(loads):
        return 0.0
    wall, own, machine = zip(*known, strict=True)
    return others_share(max(wall), sum(own), max(machine))


def _durations(ranks: list[list[tuple[int, int]]], *, apart: bool) -> tuple[int, ...]:
    """Nanoseconds of each repetition on the slowest rank, from its own start. Where ranks arrive
    `apart`, they are from the last start to the last end, on the machine's one clock."""
    turns = zip(*ranks, strict=True)
    if apart:
        return tuple(max(end for _, end in turn) - max(turn)[0] for turn in turns)
    return tuple(max(end - start for start, end in turn) for turn in turns)


def _timed(ranks: list[dict[str, list[list[int]]]]) -> tuple[RepeatedCall, ...]:
    device, issue = (_slowest([rank[part] for rank in ranks]) for part in ("device", "issue"))
    return tuple(
        RepeatedCall(device=lasted, issue=issued)
        for lasted, issued in zip(device, issue, strict=True)
    )


class NcclBackend(GlooBackend):
    """One process per rank on this machine's CUDA devices, with NCCL collectives between them."""

    name = "nccl"
    device: Device = "cuda"

    def capabilities(self) -> Capabilities:
        """Capabilities of gloo; BackendUnavailableError where there is no CUDA device."""
        _require_torch(self.name)
        _require_cuda(self.name, remedy="use the backend gloo or fake here")
        import torch

        return replace(
            super().capabilities(), faults=(),
            gpus=Gpus(
                name=torch.cuda.get_device_name(0), count=torch.cuda.device_count(),
                driver=_driver(), nccl=".".join(map(str, torch.cuda.nccl.version())),
            ),
        )

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """Run as gloo does; BackendUnavailableError for more ranks than devices.

        NCCL refuses two ranks on one device unless their NCCL_HOSTID differ.
        """
        import torch

        from zreal.processes.host_memory import require_device_memory
        from zreal.processes.rank_device import HOST_ID, present_nbytes

        devices = torch.cuda.device_count()
        if scenario.world_size > devices and HOST_ID not in os.environ:
            raise BackendUnavailableError(
                where="backend nccl",
                expected=f"{scenario.world_size} CUDA devices, one per rank",
                found=f"{devices} on this machine",
                remedy="start it on a cluster: torchrun … -m zreal.worker SCENARIO --save RUN.json",
            )
        on_each = -(-scenario.world_size // devices)
        present = present_nbytes(torch.device("cuda", 0)) // on_each
        require_device_memory(scenario, backend=self.name, present_nbytes=present)
        return super().run(scenario, options=options)


def _driver() -> str:
    """The first line of what NVIDIA's driver says of its version; "" where it says nothing."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(errors="replace").partition("\n")[0]
    except OSError:
        return ""
