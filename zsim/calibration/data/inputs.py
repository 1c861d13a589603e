"""Files to calibrate on: tables of steps or of collectives, nccl-tests' text and JSON, and saved
Runs. What is not used is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zsim.calibration.data import measurements
from zsim.calibration.records import CalibrationError, Collective, Skipped, Step
from zsim.cluster.cluster_presets import clusters


@dataclass(slots=True, kw_only=True)
class Material:
    """Measurements of the files."""

    steps: list[Step] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    names: tuple[str, ...] = ()
    """Names of the files, each content once."""

    @property
    def simulated(self) -> list[str]:
        """Names of the Runs that a simulator made."""
        return [step.source for step in self.steps if step.simulated]

    @property
    def cluster(self) -> str:
        """The preset that all steps were on, where there is nothing else; "" otherwise."""
        on = {step.scenario.cluster.name for step in self.steps if not self.collectives}
        return on.pop() if len(on) == 1 and on <= set(clusters()) else ""


def read(files: Sequence[Path], *, scenarios: Path | None, cluster: str = "") -> Material:
    """Everything in `files`; `cluster` is that of logs of nccl-tests, which do not name theirs.

    A file that holds what another does is counted once and named. CalibrationError for any other
    without a usable row.
    """
    material = Material()
    used: dict[bytes, str] = {}
    for path in files:
        digest = measurements.digest(path)
        if digest in used:
            material.skipped.append(measurements.copy_of(used[digest], name=path.name))
            continue
        used[digest] = path.name
        rows = measurements.rows(path, cluster=cluster, scenarios=scenarios)
        material.steps += (row for row in rows if isinstance(row, Step))
        material.collectives += (row for row in rows if isinstance(row, Collective))
        skipped = [row for row in rows if isinstance(row, Skipped)]
        material.skipped += skipped
        if len(skipped) == len(rows):
            raise _nothing(path, skipped)
    material.names = tuple(dict.fromkeys(used.values()))
    return material


def _nothing(path: Path, skipped: Sequence[Skipped]) -> CalibrationError:
    expected = "measured steps or collectives: a table, nccl-tests' text or JSON, or a saved Run"
    return CalibrationError(
        where=str(path), expected=expected, found=skipped[-1].reason if skipped else "no rows"
    )
