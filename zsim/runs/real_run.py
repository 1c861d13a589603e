"""Backends opened and asked for Runs that are held to the laws of Runs."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from zsim.engine.faults.fault import SlowLink
from zsim.errors import ArgumentError
from zsim.ir.laws import run_laws
from zsim.ir.run import IncompleteRunError, RunRecord, UnendedRunError
from zsim.models.training_options import Device
from zsim.runs import fault_support, registry, unended
from zsim.runs.backend import Backend, Capabilities, DeviceChoice, ModuleBackend, RunOptions
from zsim.runs.simulator import SimBackend, require_lawful
from zsim.scenario.scenario import Scenario

REAL_BACKENDS: dict[Device, str] = {"cpu": "gloo", "cuda": "nccl"}
"""The backend that validates by default, by the device of its ranks."""


def open_backend(
    name: str, options: RunOptions, *, simulator: SimBackend | None = None, where: str = "backend"
) -> tuple[Backend, Capabilities]:
    """The backend called `name` and its senses; ZsimError where it cannot run with `options`.

    `simulator` takes the place of the plain one.
    """
    backend = registry.find(name, where=where)
    if isinstance(backend, SimBackend):
        backend = simulator or backend
    for argument in ("interpreter", "device"):
        if backend.name == SimBackend.name and getattr(options, argument):
            raise ArgumentError(where=argument, expected="a real backend", found=backend.name)
    if options.device is not None:
        if not hasattr(backend, "on"):
            raise ArgumentError(
                where="device", expected="a backend whose devices can be chosen",
                found=backend.name, remedy="leave device out",
            )
        backend = cast(DeviceChoice, backend).on(options.device)
    return backend, registry.capabilities(backend)


def open_real_backend(name: str, options: RunOptions) -> tuple[Backend, Capabilities]:
    """Backend and its capabilities, as `open_backend`; ArgumentError for the simulator,
    which would be compared with itself."""
    if name == SimBackend.name:
        raise ArgumentError(where="against", expected="a backend that runs for real", found=name)
    return open_backend(name, options, where="against")


def observe(
    backend: Backend, capabilities: Capabilities, scenario: Scenario, options: RunOptions
) -> RunRecord:
    """The record that `backend` makes of `scenario`, held to the laws of Runs; its provenance says
    what the backend can see."""
    outside = [rank for rank in options.ranks or () if not 0 <= rank < scenario.world_size]
    if outside:
        expected = f"ranks 0 to {scenario.world_size - 1} of {scenario.name}"
        raise ArgumentError(where="ranks", expected=expected, found=str(outside[0]))
    kinds = (*capabilities.faults, *((SlowLink.kind,) if options.testbed else ()))
    fault_support.require(scenario, kinds, backend=backend.name)
    try:
        record = registry.ask(backend, scenario, options=options)
    except (IncompleteRunError, UnendedRunError) as error:
        error.run = _seen(error.run, capabilities, scenario)
        raise
    run_laws.require_lawful(record, where=scenario.name)
    return _seen(record, capabilities, scenario)


def _seen(record: RunRecord, capabilities: Capabilities, scenario: Scenario) -> RunRecord:
    """The record with what its backend can see, and with the scenario's faults."""
    senses = {
        "memory": capabilities.memory, "numerics": capabilities.numerics, "time": capabilities.time
    }
    sees = " ".join(sense for sense, there in senses.items() if there)
    faults = record.faults or tuple(map(str, scenario.faults))
    return replace(record, provenance={**record.provenance, "sees": sees}, faults=faults)


def observe_until_meant_end(
    backend: Backend, capabilities: Capabilities, scenario: Scenario, options: RunOptions
) -> RunRecord:
    """The record as of `observe`, also that of a step which is meant not to end."""
    try:
        return observe(backend, capabilities, scenario, options)
    except (IncompleteRunError, UnendedRunError) as error:
        if unended.expected(scenario, error, backend=backend.name) is None:
            raise
        return error.run


def with_module(backend: Backend, scenario: Scenario, options: RunOptions) -> Scenario:
    """The scenario with the module that `options` name, if any, in place of its model.

    The simulator has no torch: the fake backend traces, for the scenario's own device.
    """
    if options.module is None:
        return scenario
    device = None
    if isinstance(backend, SimBackend):
        backend, device = registry.find("fake"), scenario.cluster.kind
    if not hasattr(backend, "with_module"):
        raise ArgumentError(
            where="module", expected="a backend that can run a user's own module",
            found=backend.name, remedy="fake, gloo and nccl can",
        )
    return cast(ModuleBackend, backend).with_module(
        scenario, options.module, timeout_s=options.timeout_s, device=device
    )


def measure(
    backend: Backend, capabilities: Capabilities, scenario: Scenario, options: RunOptions
) -> RunRecord:
    """The record that a real `backend` makes of `scenario`, incomplete where its step is meant not
    to end.

    ZsimError if the backend simulates all the same, or if the Program breaks a law: ranks might
    hang.
    """
    require_lawful(scenario, device=capabilities.device)
    record = observe_until_meant_end(backend, capabilities, scenario, options)
    if record.interpreter == "simulator":
        defect = "one of the simulator, which would be compared with itself"
        raise registry.BackendError(
            where=f"backend {backend.name}", expected="a Run that was measured", found=defect
        )
    return record

