"""Calibration of the machine that this process runs on: measured once, kept in the user's cache."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zsim.calibration.fitting import fit_steps
from zsim.calibration.machine import device_file, device_fit, machine_file
from zsim.calibration.machine.device_fit import FittedDevice
from zsim.calibration.machine.device_request import device_request
from zsim.calibration.machine.fit import FittedMachine, MachineError, fit
from zsim.calibration.machine.request import request
from zsim.runs.backend import Backend, DeviceBackend, Gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A machine that was measured: its constants, its file as text, the seconds it took."""

    fitted: FittedMachine
    text: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedGpus:
    """A node of GPUs that was measured: its constants, its file as text, the seconds it took."""

    fitted: FittedDevice
    text: str
    seconds: float


def gpus_calibrated(
    backend: DeviceBackend, gpus: Gpus, *, world_size: int, quick: bool, preset: str
) -> CalibratedGpus:
    """The present machine's GPUs, measured by `backend` with a rank on each of `world_size`;
    `preset` is the node's cluster, "" for the one that they are sold in."""
    if not hasattr(backend, "measure_device"):
        raise MachineError(
            where=f"backend {backend.name}", expected="one that measures its GPUs",
            found="none of that", remedy="use --backend nccl",
        )
    base = device_file.base_of(gpus, preset)
    if not 1 <= world_size <= gpus.count:
        raise MachineError(
            where="--world-size", expected=f"1 to {gpus.count}, a rank on each GPU",
            found=str(world_size),
        )
    if world_size > 1:
        fit_steps.solver()  # a missing scipy is said before anything is measured
    node = base.with_ranks(world_size)
    requested, began = device_request(node.device, world_size, quick=quick), time.monotonic()
    source = device_file.source_of(gpus, world_size, time.strftime("%Y-%m-%d"))
    fitted = device_fit.fit(requested, backend.measure_device(requested), node, source=source)
    seconds = time.monotonic() - began
    text = device_file.text(fitted, base, source=source, seconds=seconds)
    return CalibratedGpus(fitted=fitted, text=text, seconds=seconds)


def calibrated(backend: Backend, *, world_size: int, quick: bool) -> Calibrated:
    """The present machine with `world_size` ranks at work, measured by `backend`; MachineError
    where it cannot measure."""
    measure = getattr(backend, "measure", None)
    if measure is None:
        raise MachineError(
            where=f"backend {backend.name}", expected="one that measures its machine",
            found="none of that", remedy="use --backend gloo",
        )
    requested, began = request(world_size, quick=quick), time.monotonic()
    fitted = fit(requested, measure(requested))
    seconds = time.monotonic() - began
    text = machine_file.text(
        fitted, world_size=world_size, date=time.strftime("%Y-%m-%d"), seconds=seconds
    )
    return Calibrated(fitted=fitted, text=text, seconds=seconds)
