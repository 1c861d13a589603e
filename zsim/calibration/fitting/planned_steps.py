"""Measured steps, planned once, and their times as the constants of their devices change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from zsim.calibration.data.model_identity import model_of
from zsim.calibration.records import Skipped, Step, middle
from zsim.cluster.devices import AttentionRate, Device
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step
from zsim.errors import ZsimError
from zsim.ir.program import Program
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

PRODUCTS = "matmul_efficiency"
MOVED = ("float8_efficiency", "tf32_efficiency")
"""Constants that move with products: training reaches as much of the best single product in 8 bits
and in TF32, as presets have it."""
SUMS = "a sum of profiled kernels, which are faster than in training, is no step to calibrate on"
OF_ATTENTION = "attention."
"""Prefix of the knobs that every kind of attention kernels has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A measured step that is planned: only its times depend on constants.

    `others` are the Programs of the further scenarios that its row may have been.
    """

    step: Step
    program: Program
    others: tuple[Program, ...] = ()

    @property
    def scenario(self) -> Scenario:
        """Scenario of the step."""
        return self.step.scenario

    @property
    def seconds(self) -> float:
        """Measured seconds of the step."""
        assert self.step.seconds is not None
        return self.step.seconds

    @property
    def generation(self) -> str:
        """Generation of the device: "A100"."""
        return self.scenario.cluster.device.name.split()[0]

    @property
    def group(self) -> tuple[str, str]:
        """GPU and `group`, else GPU and model: rows that share them are left out together."""
        name = self.scenario.cluster.device.name
        return name, self.step.group or model_of(self.scenario)


def prepared(
    rows: Iterable[Step], *, say: Callable[[str], None] = lambda _: None
) -> tuple[list[Case], list[Skipped]]:
    """Each row planned; those that cannot be are skipped by name."""
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for row in rows:
        scenario, reason = row.scenario, ""
        if row.seconds is None:
            reason = "peaks of memory, and no time to calibrate on"
        elif scenario.executed.products == "alone":
            reason = SUMS
        else:
            try:
                first, *others = [plan(each, device=each.cluster.kind) for each in row.readings]
                cases.append(Case(step=row, program=first, others=tuple(others)))
            except ZsimError as error:
                reason = str(error)
        if reason:
            skipped.append(Skipped(source=row.source, line=row.line, reason=reason))
        elif len(cases) % 20 == 0:
            say(f"planned {len(cases)} steps")
    return cases, skipped


def tuned(device: Device, factors: dict[str, float]) -> Device:
    """`device` with constants multiplied; shares stay below one."""
    changed: dict[str, Any] = {}
    for name, factor in factors.items():
        if name.startswith(OF_ATTENTION):
            part = name.removeprefix(OF_ATTENTION)
            known = changed.get("attention", device.attention)
            changed["attention"] = {
                kind: _scaled(rate, part, factor) for kind, rate in known.items()
            }
        else:
            changed[name] = _number(getattr(device, name), factor)
        if name == PRODUCTS:
            own = {moved: getattr(device, moved) for moved in MOVED}
            changed |= {moved: each and _number(each, factor) for moved, each in own.items()}
    return replace(device, **changed)


def _scaled(rate: AttentionRate, part: str, factor: float) -> AttentionRate:
    values: dict[str, Any] = {part: _number(getattr(rate, part), factor)}
    return replace(rate, **values)


def _number(value: float, factor: float) -> float:
    return round(value * factor) if isinstance(value, int) else min(1.0, value * factor)


def predicted(case: Case, factors: dict[tuple[str, str], float]) -> float:
    """Seconds of the step with the device's constants multiplied."""
    own = {
        name: factor for (kind, name), factor in factors.items() if kind in ("", case.generation)
    }
    return seconds_on(case, lambda device: tuned(device, own))


def seconds_on(case: Case, changed: Callable[[Device], Device]) -> float:
    """Seconds of the step on its `changed` device; of several readings the middle."""
    readings = zip(case.step.readings, (case.program, *case.others), strict=True)
    return middle(
        simulate_step(
            program,
            costs=Costs(
                cluster=replace(scenario.cluster, device=changed(scenario.cluster.device)),
                execution=scenario.executed,
            ),
        ).step_time_ns / 1e9
        for scenario, program in readings
    )
