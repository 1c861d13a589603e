"""Floating-point operations of a rank's step: those that the model needs, and those that its
device does.

Both are sums over the kernels of the lowered model, so that they hold for every family and for
traced modules. What a strategy adds (sums, casts, the optimizer) multiplies nothing, and is left
out.

- Model FLOPs follow PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): 6 per token and
  weight of a linear layer, the head's included, and 12 * heads * head_dim * length in attention.
  That is forward once and backward twice, all scores of attention whether it is causal or not, and
  no recomputation. Of backward only what gradients need counts: a frozen weight has no gradient
  of its own, and below the first trained parameter there is no backward.
- Hardware FLOPs (Korthikanti et al. 2022, arXiv 2205.05198) are those that kernels do: half the
  scores where fused attention is causal, five products in its backward, and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from zsim.ir.ops import Kernel, is_attention
from zsim.scenario.plan import training
from zsim.scenario.scenario import Scenario


def model_flops(scenario: Scenario) -> int:
    """FLOPs that one rank's steady step needs, by PaLM's convention."""
    modules = training(scenario, device=scenario.cluster.kind).modules
    needed = (_by_convention((*each.forward.kernels, *each.backward.kernels)) for each in modules)
    return scenario.batch.accumulation * sum(needed)


def hardware_flops(scenario: Scenario) -> int:
    """FLOPs that the kernels of one rank's steady step do, recomputation included."""
    modules = training(scenario, device=scenario.cluster.kind).modules
    done = (
        kernel.flops
        for each in modules
        for kernel in (*each.forward.kernels, *each.backward.kernels, *each.recompute)
    )
    return scenario.batch.accumulation * sum(done)


def _by_convention(kernels: Iterable[Kernel]) -> int:
    """FLOPs of kernels as PaLM counts them: fused attention has two products of whole scores in
    forward, and four in backward."""
    return sum(
        (8 if kernel.operator.endswith("backward") else 4) * prod(kernel.shape)
        if kernel.shape and is_attention(kernel.operator)
        else kernel.flops
        for kernel in kernels
    )
