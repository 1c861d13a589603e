"""How a step is executed, where that changes time and nothing else: compiled or eager, which
attention kernels, the trainer's pauses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionKernels = Literal["flash2", "flash3", "triton"]

Casts = Literal["fused", "eager"]
Norms = Literal["fused", "composite"]
Loss = Literal["fused", "composite"]
Accumulation = Literal["eager", "fp32", "fused"]
Softmax = Literal["eager", "fused"]
Products = Literal["training", "alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What a scenario's `execution` table says.

    `compile`: torch.compile fuses chains of element-wise kernels. `float8`: linears multiply in 8
    bits, and cast for it; `float8_casts`: in one kernel for each factor, "fused", as Transformer
    Engine and torch.compile do, or "eager" as torchao does without it. `norms`: RMSNorms are one
    kernel, or "composite" of single calls in float32, as torch had them before 2.9 and models still
    have their own; torch.compile fuses both. `loss`: a cross-entropy is torch's log_softmax, or
    "composite" of single calls, as trainers have it that can cut their vocabulary. `accumulation`:
    gradients of later micro-batches are added to what is there in a kernel for each parameter and
    in their own dtype, "eager"; in "fp32", whatever their own; or "fused" into the products, as
    apex's kernels in Megatron do. With both of these gradients are kept in one float32 buffer,
    which is reduced and stepped with: none are copied or cast for that. `softmax`: of explicit
    attention, whose scores are scaled and masked before it in kernels of their own, "eager", or in
    its own, "fused", as Megatron's are. `products`: as fast as "training" has them, or "alone", as
    where a step is the sum of its kernels' profiles. `interference`: collectives slow down the
    kernels that they overlap. `step_overhead_ns` and `micro_batch_overhead_ns` are pauses of the
    trainer around a step and around each micro-batch, in which the device does nothing.
    `issue_kernel_ns`: what the host spends on each kernel, where it is not as the cluster's preset
    says. What follows from strategy and cluster: with `hooks` those of modules issue its
    all-gathers and reduce-scatters; `synchronous`, the host ends each op before it begins the next.
    """

    compile: bool = False
    float8: bool = False
    float8_casts: Casts = "fused"
    attention_kernels: AttentionKernels = "flash2"
    norms: Norms = "fused"
    loss: Loss = "fused"
    accumulation: Accumulation = "eager"
    softmax: Softmax = "eager"
    products: Products = "training"
    interference: bool = True
    step_overhead_ns: int = 0
    micro_batch_overhead_ns: int = 0
    issue_kernel_ns: int | None = None
    hooks: bool = False
    synchronous: bool = False

    @property
    def one_kernel_each(self) -> bool:
        """Whether every kernel of a Program is one that the host launches."""
        fused = self.float8_casts == "fused" and self.norms == "fused" and self.loss == "fused"
        return fused and self.accumulation == "eager" and self.softmax == "eager"


EAGER = Execution()
