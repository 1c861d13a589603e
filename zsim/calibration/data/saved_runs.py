"""Saved Runs as measured steps. A Run names its scenario and has its fingerprint; the file of the
scenario says all that was run."""

from __future__ import annotations

import re
from pathlib import Path

from zsim.calibration.records import MeasurementError, Skipped, Step
from zsim.cluster.devices import is_called
from zsim.errors import ZsimError
from zsim.ir.run import RunRecord
from zsim.runs import saved
from zsim.scenario import scenario
from zsim.scenario.scenario import Scenario

MAX_SCENARIOS = 2000


def is_run(data: bytes) -> bool:
    """True where the file begins as a saved Run does."""
    return re.match(rb'\s*\{\s*"(run|schema_version)"', data) is not None


def step(path: Path, *, name: str, scenarios: Path | None) -> Step | Skipped:
    """The step of the Run at `path`, called `name` in messages, or the reason why it is none.

    Its scenario is looked for below `scenarios`. MeasurementError for a file that is no Run.
    """
    if scenarios is None:
        reason = "a saved Run: --scenarios FOLDER is where its scenario is looked for"
        return Skipped(source=name, line=1, reason=reason)
    try:
        run = saved.load(path)
    except saved.SavedRunError as error:
        raise MeasurementError(
            where=error.where, expected=error.expected, found=error.found, remedy=error.remedy
        ) from None
    simulated = _scenario_of(run, scenarios)
    reason = _why_not(run, simulated)
    if reason or simulated is None:
        return Skipped(source=name, line=1, reason=reason)
    return Step(
        source=name, line=1, scenario=simulated, seconds=(run.step_time_ns or 0) / 1e9,
        simulated=run.backend == "sim",
    )


def _scenario_of(run: RunRecord, folder: Path) -> Scenario | None:
    """The scenario of that name and fingerprint, anywhere below `folder`."""
    for path in sorted(folder.rglob("*.toml"))[:MAX_SCENARIOS]:
        if path.stem != run.scenario:
            continue
        try:
            loaded = scenario.load(path)
        except ZsimError:
            continue
        if loaded.fingerprint == run.provenance.get("fingerprint"):
            return loaded
    return None


def _why_not(run: RunRecord, simulated: Scenario | None) -> str:
    if simulated is None:
        return f"no scenario {run.scenario[:60]} with the Run's fingerprint below --scenarios"
    if not run.complete or not run.step_time_ns:
        return "no step time: the Run is not complete, or its backend sees no time"
    ran_on, cluster = run.provenance.get("device", "an unknown device"), simulated.cluster
    if ran_on != cluster.kind and not is_called(cluster.device.name, ran_on):
        return (
            f"ran on {ran_on[:40]}, and the scenario's cluster is of "
            f"{cluster.device.name if ran_on != 'cpu' else cluster.kind}"
        )
    return ""
