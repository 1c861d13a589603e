"""Files to calibrate on: tables of steps or of collectives, nccl-tests' text and JSON, and saved
Runs. What is not used is named.

A saved Run names its scenario and has its fingerprint, and the scenario's file says all that was
run; its step time is the measurement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zsim.calibration.data import measurements
from zsim.calibration.data.records import Collective, Skipped, Step, content
from zsim.calibration.fitting.fit_steps import CalibrationError, Case
from zsim.cluster.cluster import clusters
from zsim.cluster.devices import is_called
from zsim.errors import ZsimError
from zsim.ir.run import RunRecord
from zsim.runs import saved
from zsim.scenario import scenario
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

MAX_SCENARIOS = 2000


@dataclass(slots=True, kw_only=True)
class Material:
    """Measurements of the files: steps as rows, steps of saved Runs planned already, collectives.

    `simulated` are the names of Runs that a simulator made.
    """

    steps: list[Step] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    simulated: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ()
    """Names of the files, each content once."""

    @property
    def cluster(self) -> str:
        """The preset that all saved Runs were on, where there is nothing else; "" otherwise."""
        named = (
            {case.scenario.cluster.name for case in self.cases}
            if not self.steps and not self.collectives
            else set()
        )
        return named.pop() if len(named) == 1 and named <= set(clusters()) else ""


def read(files: Sequence[Path], *, scenarios: Path | None, cluster: str = "") -> Material:
    """Everything in `files`; `cluster` is that of logs of nccl-tests, which do not name theirs.

    A file that holds what another does is counted once and named. CalibrationError for any other
    without a usable row, and for a Run without a folder of scenarios.
    """
    material = Material()
    used: dict[bytes, str] = {}
    for path in files:
        digest = measurements.digest(path)
        if digest in used:
            material.skipped.append(measurements.copy_of(used[digest], name=path.name))
            continue
        used[digest] = path.name
        before, skipped = _count(material), len(material.skipped)
        _read(path, scenarios, cluster, material)
        if before == _count(material):
            raise _nothing(path, material.skipped[skipped:])
    material.names = tuple(dict.fromkeys(used.values()))
    return material


def _count(material: Material) -> int:
    return len(material.steps) + len(material.cases) + len(material.collectives)


def _nothing(path: Path, skipped: Sequence[Skipped]) -> CalibrationError:
    expected = "measured steps or collectives: a table, nccl-tests' text or JSON, or a saved Run"
    return CalibrationError(
        where=str(path), expected=expected, found=skipped[-1].reason if skipped else "no rows"
    )


def _read(path: Path, scenarios: Path | None, cluster: str, material: Material) -> None:
    """Adds what the file holds to `material`."""
    if is_run(path):
        made = _case(path, scenarios, material)
        (material.cases if isinstance(made, Case) else material.skipped).append(made)  # type: ignore[arg-type]
        return
    for row in measurements.rows(path, cluster=cluster):
        if isinstance(row, Step):
            material.steps.append(row)
        elif isinstance(row, Collective):
            material.collectives.append(row)
        else:
            material.skipped.append(row)


def is_run(path: Path) -> bool:
    """True where the file begins as a saved Run does."""
    return re.match(rb'\s*\{\s*"(run|schema_version)"', content(path, only=256)) is not None


def _case(path: Path, scenarios: Path | None, material: Material) -> Case | Skipped:
    run = saved.load(path)
    if scenarios is None:
        expected = f"--scenarios FOLDER, in which {run.scenario[:60]}.toml says what the Run ran"
        raise CalibrationError(where=str(path), expected=expected, found="no folder")
    asked = _scenario_of(run, scenarios)
    reason = _why_not(run, asked)
    if reason or asked is None:
        return Skipped(source=path.name, line=1, reason=reason)
    if run.backend == "sim":
        material.simulated.append(path.name)
    step = Step(
        source=path.name, line=1, scenario=asked, seconds=(run.step_time_ns or 0) / 1e9
    )
    return Case(step=step, program=plan(asked, device=asked.cluster.kind))


def _scenario_of(run: RunRecord, folder: Path) -> Scenario | None:
    """The scenario of that name and fingerprint, anywhere below `folder`."""
    for path in sorted(folder.rglob("*.toml"))[:MAX_SCENARIOS]:
        if path.stem != run.scenario:
            continue
        try:
            asked = scenario.load(path)
        except ZsimError:
            continue
        if asked.fingerprint == run.provenance.get("fingerprint"):
            return asked
    return None


def _why_not(run: RunRecord, asked: Scenario | None) -> str:
    if asked is None:
        return f"no scenario {run.scenario[:60]} with the Run's fingerprint below --scenarios"
    if not run.complete or not run.step_time_ns:
        return "no step time: the Run is not complete, or its backend sees no time"
    ran_on, cluster = run.provenance.get("device", "an unknown device"), asked.cluster
    if ran_on != cluster.kind and not is_called(cluster.device.name, ran_on):
        return (
            f"ran on {ran_on[:40]}, and the scenario's cluster is of "
            f"{cluster.device.name if ran_on != 'cpu' else cluster.kind}"
        )
    return ""
