"""Steps of llm-foundry that constants have not seen: by model size, and by generation of GPUs.

Of a generation that is left out published kernels are known. What training makes of them is that of
the other generation: shares of the best single product, of FlashAttention 2 and of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tests.published.convert import TABLES
from zsim.calibration.data import table
from zsim.calibration.data.model_identity import model_of
from zsim.calibration.data.records import Step
from zsim.calibration.fitting import fit_steps
from zsim.calibration.fitting.fit_steps import Case
from zsim.cluster.devices import Device

FITTED = "mpt_llm_foundry.csv"
WIDER, ROUNDS = 3.0, 4
"""Width of the priors, and rounds of the fit. The presets have seen these rows, so as they are they
would tell what is left out."""


def cases() -> list[Case]:
    """Every step of the table, planned."""
    rows = table.read(TABLES / FITTED)
    planned, _ = fit_steps.prepared(row for row in rows if isinstance(row, Step))
    return planned


def by_model_size() -> list[float]:
    """Errors of each row by constants that no row of its model has moved."""
    fitted = fit_steps.fit(
        cases(), wider=WIDER, rounds=ROUNDS, group_of=lambda case: model_of(case.scenario)
    )
    return list(fitted.left_out)


def by_generation() -> list[float]:
    """Errors of each row by constants that no row of its generation has moved."""
    planned = cases()
    errors: list[float] = []
    for generation in sorted({case.generation for case in planned}):
        others = [case for case in planned if case.generation != generation]
        fitted = fit_steps.fit(others, wider=WIDER, rounds=ROUNDS)
        seen = fitted.device(others[0].scenario.cluster.device)
        shared = {name: factor for (kind, name), factor in fitted.factors.items() if not kind}
        on = partial(carried, others=others, seen=seen, shared=shared)
        errors += [
            fit_steps.seconds_on(case, on) / case.seconds - 1
            for case in planned if case.generation == generation
        ]
    return errors


def carried(
    device: Device, *, others: Sequence[Case], seen: Device, shared: dict[str, float]
) -> Device:
    """`device` with what training makes of single kernels on the device `seen` of `others`.

    The factors of constants that all generations share are `shared`.
    """
    before = others[0].scenario.cluster.device
    alone = device.matmul_efficiency / device.products_alone
    in_training = before.products_alone * seen.matmul_efficiency / before.matmul_efficiency
    slower = seen.attention["triton"].rate / before.attention["flash2"].rate
    triton = replace(
        device.attention["triton"], rate=round(slower * device.attention["flash2"].rate)
    )
    own = replace(
        device, matmul_efficiency=alone * in_training,
        float8_efficiency=device.float8_efficiency / device.matmul_efficiency * alone * in_training,
        elementwise_efficiency=seen.elementwise_efficiency,
        attention={**device.attention, "triton": triton},
    )
    return fit_steps.tuned(own, shared)
