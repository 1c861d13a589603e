"""Calibration of the machine that this process runs on: measured once, kept in the user's cache."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zsim.calibration.machine import machine_file
from zsim.calibration.machine.fit import FittedMachine, MachineError, fit
from zsim.calibration.machine.request import request
from zsim.runs.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A machine that was measured: its constants, its file as text, the seconds it took."""

    fitted: FittedMachine
    text: str
    seconds: float


def calibrated(backend: Backend, *, world_size: int, quick: bool) -> Calibrated:
    """The present machine with `world_size` ranks at work, measured by `backend`; MachineError
    where it cannot measure."""
    measure = getattr(backend, "measure", None)
    if measure is None:
        raise MachineError(
            where=f"backend {backend.name}", expected="one that measures its machine",
            found="none of that", remedy="use --backend gloo",
        )
    asked, began = request(world_size, quick=quick), time.monotonic()
    fitted = fit(asked, measure(asked))
    seconds = time.monotonic() - began
    text = machine_file.text(
        fitted, world_size=world_size, date=time.strftime("%Y-%m-%d"), seconds=seconds
    )
    return Calibrated(fitted=fitted, text=text, seconds=seconds)
