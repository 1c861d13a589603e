"""The rate of causal attention on a CPU: it grows with the number of tokens, as on GPUs.

Short rows of scores leave more of the time to exponentials, and to products of small blocks. The
inverse of the rate is linear in the inverse of the number of tokens: rate / (1 + half_length /
tokens). Least squares on relative errors finds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import get_args

from zsim.cluster.devices import AttentionRate
from zsim.engine.execution import AttentionKernels

FLOPS_OF_FORWARD, FLOPS_OF_BACKWARD = 4, 10
"""FLOPs for each score and each column of a head: two products of two, and five in backward."""
KINDS: tuple[str, ...] = get_args(AttentionKernels)
"""Kinds of kernels that a scenario may ask for; torch has one for all of them on a CPU."""


def attention_rate(
    shapes: Sequence[tuple[int, int, int, int]], times: Sequence[Sequence[int]], *, most: int
) -> AttentionRate:
    """The rate of attention with `shapes` (batch, heads, tokens, width), whose forward and backward
    took `times` in turn, each in nanoseconds. It is at most `most` FLOP/s."""
    means = [sum(each) / len(each) / 1e9 for each in times]
    forward, backward = means[::2], means[1::2]
    scores = [batch * heads * tokens**2 / 2 * width for batch, heads, tokens, width in shapes]
    lengths = [tokens for _, _, tokens, _ in shapes]
    inverses = [
        seconds / (FLOPS_OF_FORWARD * count) for seconds, count in zip(forward, scores, strict=True)
    ]
    level, slope = _line([1 / tokens for tokens in lengths], inverses, least=1 / most)
    shares = [
        FLOPS_OF_BACKWARD * count * (level + slope / tokens) / seconds
        for seconds, count, tokens in zip(backward, scores, lengths, strict=True)
    ]
    return AttentionRate(
        rate=round(1 / level), half_length=max(1, round(slope / level)),
        backward=min(1.0, median(shares)),
    )


def _line(xs: Sequence[float], ys: Sequence[float], *, least: float) -> tuple[float, float]:
    """The level, not below `least`, and the slope, not below 0, of the line through the points with
    least squares of relative errors."""
    weights = [1 / y**2 for y in ys]
    total = sum(weights)
    x = sum(w * each for w, each in zip(weights, xs, strict=True)) / total
    y = sum(w * each for w, each in zip(weights, ys, strict=True)) / total
    spread = sum(w * (each - x) ** 2 for w, each in zip(weights, xs, strict=True))
    joint = sum(w * (a - x) * (b - y) for w, a, b in zip(weights, xs, ys, strict=True))
    slope = max(0.0, joint / spread) if spread else 0.0
    level = y - slope * x
    if level >= least:
        return level, slope
    squares = sum(w * each**2 for w, each in zip(weights, xs, strict=True))
    rest = sum(w * a * (b - least) for w, a, b in zip(weights, xs, ys, strict=True))
    return least, max(0.0, rest / squares)
