"""Draws of jitter, and the largest of several in closed form.

A draw is a function of seed, rank and op, by a hash. So it is the same on every machine, and for
every number of ranks, and no draw depends on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from math import log1p

from zsim.engine.faults.fault import Distribution, Jitter


def draw_ns(jitter: Jitter, *, rank: int, op: int) -> int:
    """The delay of this rank and op, in ns; `op` is -1 for a step's."""
    return draws_ns(jitter, rank=rank, ops=(op,))[0]


def draws_ns(jitter: Jitter, *, rank: int, ops: Iterable[int]) -> list[int]:
    """The delays of these `ops` of a rank, in ns. Jitter of many ranks has millions of them, so all
    are drawn in one loop."""
    begin, mean, quantile = f"{jitter.seed}/{rank}/", jitter.mean_ns, QUANTILES[jitter.distribution]
    return [
        round(mean * quantile(((int.from_bytes(digest) >> 12) + 0.5) * SPACING))  # never of 0 or 1
        for op in ops
        for digest in (blake2b(f"{begin}{op}".encode(), digest_size=8).digest(),)
    ]


SPACING = 2.0**-52
"""The distance of shares that are drawn."""


QUANTILES: dict[Distribution, Callable[[float], float]] = {
    "exponential": lambda share: -log1p(-share),
    "uniform": lambda share: 2 * share,
}
"""The quantile of each distribution of mean 1: P(delay > t) is exp(-t); or all from 0 to 2 are
alike."""


def expected_largest(distribution: Distribution, number: int) -> float:
    """The expected largest of `number` draws of mean 1.

    Exponential: the harmonic number 1 + 1/2 + … + 1/n, which grows as ln n (Rényi 1953, "On the
    theory of order statistics"). Uniform: 2n / (n + 1).
    """
    if distribution == "uniform":
        return 2 * number / (number + 1)
    return sum(1 / n for n in range(number, 0, -1))
