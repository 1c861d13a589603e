"""Closed forms of the literature for traffic and time per step, which simulations are held against.

They are an independent way to the same numbers. Sources: Rajbhandari et al. 2020 (arXiv 1910.02054)
for traffic; the time of gathers and computes follows from their two queues.
"""

from __future__ import annotations

from collections.abc import Sequence

from zsim.cluster.collectives import ring
from zsim.memory.formulas import StateBytes

MIXED_ADAM = StateBytes(parameter=2, gradient=2, optimizer=12)
"""16-bit parameters and gradients; fp32 master, m and v."""
FP32_ADAM = StateBytes(parameter=4, gradient=4, optimizer=8)
"""fp32 throughout: m and v, and no master."""
BF16_ADAM = StateBytes(parameter=2, gradient=2, optimizer=8)
"""16-bit parameters and gradients, fp32 m and v, no master."""

STEP_COLLECTIVES: dict[str, tuple[str, ...]] = {
    "ddp": ("all_reduce",), "zero1_all_reduce": ("all_reduce", "all_gather"),
    "zero1": ("reduce_scatter", "all_gather"), "zero2": ("reduce_scatter", "all_gather"),
    "zero3": ("all_gather", "all_gather", "reduce_scatter"),
}
"""The collectives over all parameters that one step of each scheme makes (one micro-batch)."""


def bytes_sent_per_step(nbytes: int, *, scheme: str, num_ranks: int) -> int:
    """Bytes that rank 0 sends in one step when all parameters together have `nbytes`, by ring
    algorithms."""
    return sum(ring.bytes_sent(op, nbytes, group_size=num_ranks) for op in STEP_COLLECTIVES[scheme])


def zero3_communication_ns(nbytes: int, *, num_units: int, alpha_ns: int, bytes_per_s: int) -> int:
    """Three collectives per unit of latency α, and three times all parameters over the link; no
    overlap."""
    return 3 * num_units * alpha_ns + -(-3 * nbytes * 10**9 // bytes_per_s)


def training_flops(num_parameters: int, *, num_tokens: int) -> int:
    """6·Ψ per token: 2 forward and 4 backward (Kaplan et al. 2020, arXiv 2001.08361, §2.1)."""
    return 6 * num_parameters * num_tokens


def smallest_batch(communication_ns: int, *, compute_ns_per_sequence: int, percent: int) -> int:
    """The fewest sequences at which communication is at most `percent` of compute."""
    return -(-communication_ns * 100 // (compute_ns_per_sequence * percent))


def pipeline_ns(gathers: Sequence[int], computes: Sequence[int], *, lookahead: int) -> int:
    """End of the last compute, if gathers form one queue, computes another, and a unit computes
    once gathered.

    At most `lookahead` units are gathered beyond the one that computes: gather i waits for compute
    i − lookahead − 1.
    """
    gathered, computed = 0, [0] * (lookahead + 1)
    for gather, compute in zip(gathers, computes, strict=True):
        gathered = max(gathered, computed[-lookahead - 1]) + gather
        computed.append(max(gathered, computed[-1]) + compute)
    return computed[-1]
