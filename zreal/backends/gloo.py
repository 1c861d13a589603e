"""The backend gloo: one process per rank on this machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zreal.backends import measurements
from zreal.backends.own_module import traced_with_module
from zreal.backends.progress import at_phase
from zreal.backends.requirements import require_torch, require_transformers
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.testbed import Layout
from zsim.engine.faults.arrivals import late_real_ranks
from zsim.engine.faults.fault import FailingRank, LateStart, SkippedCollective, SlowRank
from zsim.engine.faults.faulty_program import faulty_program
from zsim.errors import ArgumentError, BackendUnavailableError
from zsim.ir.gc_pause import uncollected
from zsim.ir.run import IncompleteRunError, InterruptedRunError, RankRun, RunRecord
from zsim.models.training_options import Device
from zsim.runs.backend import (
    Capabilities,
    DeviceMeasurements,
    DeviceRequest,
    MachineMeasurements,
    MachineRequest,
    RunOptions,
)
from zsim.runs.launch.planned_collectives import planned_collectives
from zsim.runs.saved import from_table
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

MAX_PROCESSES = 64
"""Ranks that gloo and nccl start on one machine at most."""
FAULTS = tuple(kind.kind for kind in (SlowRank, LateStart, FailingRank, SkippedCollective))
"""Kinds of faults that `zreal.rank.faults` gives a rank over gloo."""
INTERRUPTED = "controller ended, by SIGTERM or Ctrl-C"
EMULATED = "emulated in timed steps: forward, backward and optimizer last as predicted"


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
        require_torch(self.name)
        return Capabilities(
            memory=True, numerics=True, time=False, spans=True, device=self.device,
            faults=FAULTS,
        )

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """The Run of every rank; IncompleteRunError with the phases that had ended when one fails.
        """
        require_torch(self.name)
        if scenario.world_size > MAX_PROCESSES:
            raise BackendUnavailableError(
                where=f"backend {self.name}",
                expected=f"at most {MAX_PROCESSES} ranks on one machine",
                found=f"{scenario.world_size}",
                remedy="use the backend fake, or torchrun -m zreal.worker on a cluster",
            )
        with uncollected():
            from zreal.observer.subjects.deepspeed_ops import require_compiled
            from zreal.processes import launch
            from zreal.processes.reports.failure_report import LaunchError
            from zreal.rank import run as rank_run
            from zreal.rank.choice import choose_numerics

        interpreter = rank_run.interpreter_of(scenario, options.interpreter)
        require_compiled(scenario, device_type=self.device)
        require_transformers(scenario, self.name)
        if scenario.faults:  # at ops that are there
            faulty_program(plan(scenario, device=self.device), scenario.faults)
        numerics = choose_numerics(
            scenario,
            requested=options.numerics,
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
                    "zreal.rank.run:launched_rank", arguments, world_size=scenario.world_size,
                    timeout_s=options.timeout_s, hosts=hosts,
                    program=planned_collectives(scenario, self.device), kept=kept,
                    look=at_phase(scenario, options.progress),
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
        require_torch(self.name)
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
            steps=measurements.slowest([rank["steps"] for rank in ranks]),
            collectives=tuple(
                measurements.durations([times for times in each if times], apart=timed.apart_ns > 0)
                for timed, each in zip(
                    request.collectives, zip(*(rank["collectives"] for rank in ranks), strict=True),
                    strict=True,
                )
            ),
            products=measurements.slowest([rank["products"] for rank in ranks]),
            attentions=measurements.slowest([rank["attentions"] for rank in ranks]),
            others_share=measurements.others_share([rank["load"] for rank in ranks]),
            provenance={"torch": torch.__version__, "backend": self.name},
        )

    def measure_device(self, request: DeviceRequest) -> DeviceMeasurements:
        """Single kernels on each rank's device, and collectives over all ranks."""
        require_torch(self.name)
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
            kernels=measurements.timed([rank["kernels"] for rank in ranks]),
            collectives=measurements.timed([rank["collectives"] for rank in ranks]),
        )

    def _rank_arguments(
        self, scenario: Scenario, interpreter: str, options: RunOptions
    ) -> dict[str, Any]:
        """Arguments of zreal.rank.run.launched_rank; the scenario travels as its own text."""
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
        return traced_with_module(
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
