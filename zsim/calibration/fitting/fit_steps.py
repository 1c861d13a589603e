"""Constants from measured steps: the factor of each on its preset, and the held-out errors.

Every constant has a prior, its preset with a width of what published kernels leave open, so few
rows move it little. Errors count by their logarithm, in units of what identical runs differ by, and
outliers count less (soft L1). Held-out errors are of rows that the fit did not see: each group, one
GPU with one model, is left out in turn and predicted. The fit needs scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log
from typing import Any

from zsim.calibration.fitting.planned_steps import OF_ATTENTION, Case, predicted, tuned
from zsim.calibration.records import CalibrationError
from zsim.cluster.devices import Device
from zsim.io.extras import library

NOISE = 0.013
"""Robust standard deviation of the times of identical llm-foundry runs, as a share."""
STEP = 0.02
"""Share by which a constant is moved for the slope of a prediction."""
ROUNDS = 2
"""Rounds of a fit. Predictions are nearly linear in the logarithms of constants: the second moves
little."""
HALVINGS = 4
"""Most times that a step of the fit is halved while it makes predictions worse."""
HEARD = 0.1
"""Share of the noise by which a constant, moved by its prior's width, must move some row.

No row speaks of a constant that moves none by as much.
"""


@dataclass(frozen=True, slots=True)
class Knob:
    """A constant of a device that is fitted, and the width of its prior as a logarithm. `shared` by
    all devices, else by generation."""

    name: str
    width: float
    shared: bool


KNOBS = (
    Knob("matmul_efficiency", 0.05, False),
    Knob("elementwise_efficiency", 0.15, True),
    Knob("memory_efficiency", 0.05, False),
    Knob("attention.rate", 0.15, False),
    Knob("attention.half_length", 0.4, True),
    Knob("attention.backward", 0.1, True),
    Knob("straggler", 0.5, True),
)
"""Widths: what published micro-benchmarks of one generation differ by. Whatever is a matter of the
machine's build is shared.

Constants that single kernels or source code tell are no matter of steps: of tiles, of what NCCL
takes. Nor is one whose figure was published. Fitted too, they made the median error of
llm-foundry's rows larger. With the generation left out it was 3.6 % in place of 2.8, with the model
size 1.7 in place of 0.8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Factors on the preset by (generation, constant); errors of each row, fitted and held out.

    `heard` are the constants that some row's time depends on, those of attention under the kernels
    that such a row ran: "attention.flash2.rate". The factor of a constant that no row speaks of is
    1.
    """

    factors: dict[tuple[str, str], float]
    errors: tuple[float, ...]
    left_out: tuple[float, ...]
    cases: tuple[Case, ...]
    heard: frozenset[str] = frozenset()

    @property
    def width(self) -> float:
        """The half-width of a band around predictions in which nine of ten rows lie, fitted or left
        out, whichever is further off.

        A band of half-width w reaches from 1 - w to 1 / (1 - w) of the prediction. Of fewer than
        ten rows all lie in it.
        """
        return max(_nine_of_ten(self.errors), _nine_of_ten(self.left_out))

    def device(self, device: Device) -> Device:
        """`device` with the fitted constants of its generation and the shared ones."""
        return tuned(
            device,
            {
                name: factor
                for (kind, name), factor in self.factors.items()
                if kind in ("", device.name.split()[0])
            },
        )


def _nine_of_ten(errors: Sequence[float]) -> float:
    """The half-width of a band that holds nine of ten: by how far the larger of prediction and
    measurement exceeds the other."""
    widths = sorted(1 - exp(-abs(log(1 + error))) for error in errors)
    return widths[min(len(widths) - 1, int(0.9 * len(widths)))] if widths else 0.0


def fit(
    cases: Sequence[Case], *, wider: float = 1.0, rounds: int = ROUNDS,
    group_of: Callable[[Case], object] = lambda case: case.group,
    say: Callable[[str], None] = lambda _: None,
) -> Fitted:
    """The constants that meet `cases` best; CalibrationError for fewer than two groups.

    `wider` multiplies the widths of all priors: where presets have seen the very rows that are left
    out, theirs say too much. Rows of one group are left out together.
    """
    if len({group_of(case) for case in cases}) < 2:
        expected = "rows of at least two groups (GPU and model), so that one can be left out"
        raise CalibrationError(where="calibration", expected=expected, found=f"{len(cases)} rows")
    constants = _constants(cases, wider)
    at, silent, heard = [0.0] * len(constants), set(range(len(constants))), set[str]()
    for turn in range(rounds):
        errors, slopes = _linear(cases, constants, at, say=_in_round(say, turn + 1, rounds))
        # a share that has come to 100 % is quiet too, but was heard before
        silent &= quiet(slopes, constants)
        slopes = [
            [0.0 if column in silent else slope for column, slope in enumerate(row)]
            for row in slopes
        ]
        heard |= set(_heard(cases, slopes, constants))
        at = _reached(
            cases, constants, at, _best(errors, slopes, constants, start=at),
            before=_cost(errors, at, constants),
        )
    factors = _factors(constants, at)
    final = [log(predicted(case, factors) / case.seconds) for case in cases]
    left_out = list(final)
    for group in {group_of(case) for case in cases}:
        kept = [row for row, case in enumerate(cases) if group_of(case) != group]
        other = _best(
            [final[row] for row in kept], [slopes[row] for row in kept], constants, start=at
        )
        for row, case in enumerate(cases):
            if group_of(case) == group:
                moved = sum(
                    slope * (there - here)
                    for slope, there, here in zip(slopes[row], other, at, strict=True)
                )
                left_out[row] = final[row] + moved
    shares = [tuple(exp(value) - 1 for value in values) for values in (final, left_out)]
    return Fitted(
        factors=factors, errors=shares[0], left_out=shares[1], cases=tuple(cases),
        heard=frozenset(heard),
    )


def quiet(slopes: Sequence[Sequence[float]], constants: Sequence[tuple[str, Knob]]) -> set[int]:
    """Indices of the constants that move no row's time by as much as `HEARD` of the noise."""
    return {
        column
        for column, (_, knob) in enumerate(constants)
        if max(abs(row[column]) for row in slopes) * knob.width < HEARD * NOISE
    }


def _heard(
    cases: Sequence[Case], slopes: Sequence[Sequence[float]], constants: Sequence[tuple[str, Knob]]
) -> Iterator[str]:
    """Constants that some row's time depends on; for attention, those of the row's own kernels."""
    for case, row in zip(cases, slopes, strict=True):
        for slope, (_, knob) in zip(row, constants, strict=True):
            if slope and knob.name.startswith(OF_ATTENTION):
                part = knob.name.removeprefix(OF_ATTENTION)
                for each in case.step.readings:
                    yield f"{OF_ATTENTION}{each.executed.attention_kernels}.{part}"
            elif slope:
                yield knob.name


def _reached(
    cases: Sequence[Case], constants: Sequence[tuple[str, Knob]], here: list[float],
    there: list[float], *, before: float,
) -> list[float]:
    """`there`, or as far on the way to it as predictions really get better: their slopes hold only
    near `here`."""
    for _ in range(HALVINGS):
        factors = _factors(constants, there)
        if (
            _cost(
                [log(predicted(case, factors) / case.seconds) for case in cases], there, constants
            )
            <= before
        ):
            return there
        there = [(first + second) / 2 for first, second in zip(here, there, strict=True)]
    return here


def _cost(
    errors: Sequence[float], at: Sequence[float], constants: Sequence[tuple[str, Knob]]
) -> float:
    """Objective of the solver: soft L1 of errors in units of noise, and of constants in widths of
    their priors."""
    parts = [error / NOISE for error in errors] + [
        value / knob.width for value, (_, knob) in zip(at, constants, strict=True)
    ]
    return 2 * sum(hypot(1, part) - 1 for part in parts)


def _constants(cases: Sequence[Case], wider: float) -> list[tuple[str, Knob]]:
    generations = sorted({case.generation for case in cases})
    knobs = [replace(knob, width=knob.width * wider) for knob in KNOBS]
    own = [
        (generation, knob) for knob in knobs if not knob.shared for generation in generations
        if not any(
            figure.key == f"device.{knob.name}" and figure.provenance == "published"
            for case in cases if case.generation == generation
            for figure in case.scenario.cluster.device.figures
        )
    ]
    return own + [("", knob) for knob in knobs if knob.shared]


def _factors(
    constants: Sequence[tuple[str, Knob]], at: Sequence[float]
) -> dict[tuple[str, str], float]:
    return {
        (generation, knob.name): exp(value)
        for (generation, knob), value in zip(constants, at, strict=True)
    }


def _linear(
    cases: Sequence[Case], constants: Sequence[tuple[str, Knob]], at: Sequence[float], *,
    say: Callable[[str], None],
) -> tuple[list[float], list[list[float]]]:
    """Logarithms of predicted over measured, and their slopes along each constant's logarithm."""
    factors = _factors(constants, at)
    here = [log(predicted(case, factors)) for case in cases]
    slopes = [[0.0] * len(constants) for _ in cases]
    for column, (generation, knob) in enumerate(constants):
        say(f"{knob.name} {generation}".strip())
        moved = {**factors, (generation, knob.name): factors[generation, knob.name] * exp(STEP)}
        for row, case in enumerate(cases):
            if generation in ("", case.generation):
                slopes[row][column] = (log(predicted(case, moved)) - here[row]) / STEP
    return [value - log(case.seconds) for value, case in zip(here, cases, strict=True)], slopes


def _best(
    errors: Sequence[float], slopes: Sequence[Sequence[float]],
    constants: Sequence[tuple[str, Knob]], *, start: Sequence[float],
) -> list[float]:
    """The logarithms that make the linear model's errors, and the distances from the priors, least.
    """

    def residuals(at: Any) -> list[float]:
        moves = [float(value) - begin for value, begin in zip(at, start, strict=True)]
        of_rows = [
            (error + sum(map(_product, row, moves))) / NOISE
            for error, row in zip(errors, slopes, strict=True)
        ]
        return of_rows + [
            float(value) / knob.width for value, (_, knob) in zip(at, constants, strict=True)
        ]

    return [float(value) for value in solver()(residuals, list(start), loss="soft_l1").x]


def solver() -> Any:
    """scipy's least_squares; CalibrationError where there is no scipy."""
    return library(
        "scipy.optimize", error=CalibrationError, where="zsim calibrate",
        expected="scipy, which fits the constants", remedy="pip install 'zsim[calibrate]'",
    ).least_squares


def _product(first: float, second: float) -> float:
    return first * second


def _in_round(say: Callable[[str], None], number: int, rounds: int) -> Callable[[str], None]:
    """`say` with the number of the round in front."""
    return lambda text: say(f"round {number} of {rounds}: {text}")
