"""Steps by constants that have not seen them: `python -m tests.published.steps_left_out` records
them in minutes (`left_out.json`), and `errors` reads the record.

llm-foundry is left out by model size, and by generation of GPUs. Of a generation that is left out
published kernels are known, and products that are held at its limit of power. What training makes
of them is that of the other generation: shares of such products, of FlashAttention 2 and of the
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

from tests.published.convert import TABLES
from zsim.calibration.data import table
from zsim.calibration.data.model_identity import model_of
from zsim.calibration.fitting import fit_steps, planned_steps
from zsim.calibration.fitting.planned_steps import Case
from zsim.calibration.records import Step
from zsim.cluster.devices import Device, load_device
from zsim.engine.bands.error_bands import step_shares
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import simulate_step

FITTED = "mpt_llm_foundry.csv"
HELD: Mapping[str, float] = {"A100": 257 / 312, "H100": 0.7077}
"""Share of the peak that large products of random numbers hold once power limits their clocks.

A100: thonking.ai's "Strangely, Matrix Multiplications on GPUs Run Faster". H100: as an H200, which
has its multiprocessors and its 700 W, over four seconds (TileOPs pull request 1980). In shorter
bursts that one has 0.768, as the H200 that was measured here. An H100 held 0.703 to 0.718 here for
43 s (tests/measured/sustained.json)."""
RECORD = Path(__file__).parent / "left_out.json"
WIDER, ROUNDS = 3.0, 4
"""Width of the priors, and rounds of the fit. The presets have seen these rows, so as they are they
would tell what is left out."""


def cases() -> list[Case]:
    """Every step of the table, planned."""
    rows = table.read(TABLES / FITTED)
    planned, _ = planned_steps.prepared(row for row in rows if isinstance(row, Step))
    return planned


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A row in `line` of its table: predicted over measured less 1, and the band as factors of the
    prediction."""

    line: int
    error: float
    band: tuple[float, float]

    @property
    def distance(self) -> float:
        """Distance of the measurement to the prediction, over that to the end of the band."""
        measured = 1 / (1 + self.error) - 1
        return measured / ((self.band[1] if measured > 0 else self.band[0]) - 1)


def by_model_size() -> Iterator[Unseen]:
    """Each row by constants that no row of its model has moved."""
    fitted = fit_steps.fit(
        cases(), wider=WIDER, rounds=ROUNDS, group_of=lambda case: model_of(case.scenario)
    )
    for case, error in zip(fitted.cases, fitted.left_out, strict=True):
        yield _unseen(case, error, case.scenario.cluster.device)


def by_generation() -> Iterator[Unseen]:
    """Each row by constants that no row of its generation has moved."""
    planned = cases()
    for generation in sorted({case.generation for case in planned}):
        others = [case for case in planned if case.generation != generation]
        fitted = fit_steps.fit(others, wider=WIDER, rounds=ROUNDS)
        seen = fitted.device(others[0].scenario.cluster.device)
        shared = {name: factor for (kind, name), factor in fitted.factors.items() if not kind}
        on = partial(carried, others=others, seen=seen, shared=shared)
        for case in planned:
            if case.generation == generation:
                error = planned_steps.seconds_on(case, on) / case.seconds - 1
                yield _unseen(case, error, on(case.scenario.cluster.device))


def _unseen(case: Case, error: float, device: Device) -> Unseen:
    scenario = case.scenario
    costs = Costs(
        cluster=replace(scenario.cluster, device=device), execution=scenario.executed
    )
    shares = step_shares(case.program, simulate_step(case.program, costs=costs), costs=costs)
    return Unseen(line=case.step.line, error=error, band=shares.factors)


def carried(
    device: Device, *, others: Sequence[Case], seen: Device, shared: dict[str, float]
) -> Device:
    """`device` with what training makes of single kernels on the device `seen` of `others`.

    The factors of constants that all generations share are `shared`.
    """
    before = others[0].scenario.cluster.device
    products = _held(device) * seen.matmul_efficiency / _held(before)
    slower = seen.attention["triton"].rate / _held_attention(before)
    triton = replace(device.attention["triton"], rate=round(slower * _held_attention(device)))
    own = replace(
        device, matmul_efficiency=products,
        float8_efficiency=device.float8_efficiency / device.matmul_efficiency * products,
        elementwise_efficiency=seen.elementwise_efficiency,
        attention={**device.attention, "triton": triton},
        figures=tuple(
            replace(each, provenance="published") if each.provenance == "calibrated" else each
            for each in device.figures
        ),
    )
    return planned_steps.tuned(own, shared)


def _held(device: Device) -> float:
    """Share of the peak that products of `device` hold."""
    return HELD[device.name.split()[0]]


def _held_attention(device: Device) -> float:
    """FLOP/s of FlashAttention 2 at the clocks that products of `device` hold. What rows say of
    training is taken out of the preset's."""
    return device.attention["flash2"].rate * _held(device) / device.matmul_efficiency


LEFT_OUT = {"generation": by_generation, "model size": by_model_size}


def fingerprint() -> str:
    """Digest of the rows and of the constants of both generations that a record was made with."""
    known = [(TABLES / FITTED).read_text(encoding="utf-8")]
    known += [repr(load_device(name)) for name in ("a100-40", "a100-80", "h100-80")]
    return sha256("\n".join(known).encode()).hexdigest()


def recorded() -> dict[str, list[Unseen]]:
    """The rows of the record by what was left out."""
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    return {
        what: [
            Unseen(line=row["line"], error=row["error"], band=tuple(row["band"])) for row in rows
        ]
        for what, rows in kept["left out"].items()
    }


def record() -> None:
    """Write the record anew."""
    rows = {
        what: [
            {
                "line": each.line, "error": round(each.error, 4),
                "band": [round(end, 4) for end in each.band],
            }
            for each in predict()
        ]
        for what, predict in LEFT_OUT.items()
    }
    command = "python -m tests.published.steps_left_out"
    made = {"command": command, "of": fingerprint(), "left out": rows}
    RECORD.write_text(json.dumps(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
