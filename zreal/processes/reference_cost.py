"""Cost of the single-process reference, before it runs: bytes and seconds, as far as the scenario
tells."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zsim.autograd.traced.model import TracedModel
from zsim.models.training_options import Device
from zsim.runs.modes import NumericsMode
from zsim.scenario.flops import model_flops
from zsim.scenario.scenario import Scenario

SAMPLES = 3
"""Last steps, of which the one with the lowest peak is the steady one. Threads of gloo may hold a
buffer a moment too long in some of them."""
GATHERED_NBYTES = 12
"""Bytes per parameter that each rank gathers: parameters after the last step and before the first,
and gradients, in float32."""
REFERENCE_NBYTES = {"sgd": 28, "adam": 48, "adamw": 48}
"""Bytes per parameter of the reference, by optimizer: measured on 61 million parameters of GPT-2
(27 with sgd, 46 with adamw, whose rounding is compared with float64)."""
ROUNDED_NBYTES = 12
"""Bytes per parameter of the rounded copy and its gradients: 59 measured with adamw in bfloat16."""
BUFFER_COPIES = 4
"""Copies of each rank's buffers of a user's own module: the reference's, twice as many bytes in
float64, and those gathered."""
FLOPS = {"cpu": 20e9, "cuda": 5e12}
"""FLOP/s of the reference on one core, or on a GPU in float32: assumed, for the order of magnitude.
"""
PARAMETER_S = 0.5e-6
"""Seconds per parameter for initial values, optimizer and comparison on one core; measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceCost:
    """Cost of one reference, beside what its rank holds anyway."""

    gathered_nbytes: int
    """Bytes of the whole parameters and gradients, which each rank gathers for the comparison."""
    nbytes: int
    """Bytes of the reference itself."""
    seconds: float


def num_steps(scenario: Scenario) -> int:
    """Steps that a real run with numerics trains and that the reference repeats."""
    return max(3, scenario.steps, 2 + SAMPLES)


def reference_cost(scenario: Scenario, *, cores: float = 1.0, device: Device) -> ReferenceCost:
    """Cost of one reference of `scenario` on `device`, or on `cores` of a CPU."""
    parameters, precision = scenario.model.num_parameters, scenario.precision
    is_rounded = precision.parameters != "float32"
    adaptive = scenario.optimizer.name != "sgd"
    # one more step makes gradients; in two bytes each is repeated in float64, at half the pace
    passes = (num_steps(scenario) + 1) * (3 if is_rounded and adaptive else 1)
    flops = model_flops(scenario) * scenario.world_size * passes
    rate = FLOPS[device] * (cores if device == "cpu" else 1.0)
    per_parameter = REFERENCE_NBYTES.get(scenario.optimizer.name, 48)
    buffers = scenario.model.buffer_nbytes if isinstance(scenario.model, TracedModel) else 0
    return ReferenceCost(
        gathered_nbytes=GATHERED_NBYTES * parameters,
        nbytes=(per_parameter + (ROUNDED_NBYTES if is_rounded else 0)) * parameters
        + BUFFER_COPIES * buffers * scenario.world_size,
        seconds=flops / rate + PARAMETER_S * parameters / min(cores, 1.0),
    )


def num_references(mode: NumericsMode, processes: int) -> int:
    """References that `processes` ranks train at once."""
    return {"full": processes, "sampled": min(1, processes), "none": 0}[mode]


def available_cores() -> int:
    """Cores that this process may use; a job on a cluster often has a part of its machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
