"""How far off a predicted time may be, from where the constants that it used come from.

A band is a pair of factors around the prediction in which we expect nine of ten measurements. Calibrated constants earn a narrow band by
their error on rows that were left out of the fit; anything that is assumed widens it, and hardware that nobody has measured widens it most.
"""

from __future__ import annotations

from zsim.devices import Figure
from zsim.scenario import Scenario

COMPUTE: dict[str, float] = {
    "measured": 0.05,
    "calibrated": 0.08,
    "published": 0.15,
    "source code": 0.2,
    "vendor sheet": 0.3,
    "assumed": 0.3,
}
"""Half-width by the weakest provenance among the device's constants that decide. Calibrated: the 95th percentile of errors on left-out
groups of llm-foundry, 5 to 7 %, rounded up; published: what llm-foundry's steps miss by with published priors alone, 9 %, and a
source's own software on top; assumed: carrying a fraction from one generation to the next was 18 % off, doubled for the 95th percentile."""
DECIDING = ("device.matmul_efficiency", "device.elementwise_efficiency", "device.memory_efficiency")
CPU = (0.6, 1.65)
"""On CPUs everything is assumed: published steps run up to 65 % longer than a roofline of such figures says."""
MANY_NODES = 0.05
"""Wider for a step over several nodes: public fabrics differ by 30 % in bandwidth, of which a sixth is usually exposed."""


def band(scenario: Scenario) -> tuple[float, float]:
    """(low, high) as factors of the predicted step time."""
    cluster = scenario.cluster
    if cluster.kind == "cpu":
        return CPU
    width = max(COMPUTE[figure.provenance] for figure in deciding(cluster.device.figures))
    if cluster.num_nodes > 1:
        width += MANY_NODES
    if scenario.execution.float8 or scenario.execution.compile:
        width += 0.05  # one row each to calibrate on
    return 1 - width, 1 / (1 - width)


def deciding(figures: tuple[Figure, ...]) -> tuple[Figure, ...]:
    """The constants that most of a step's time follows from."""
    return tuple(figure for figure in figures if figure.key in DECIDING)
