"""Execution of a step: compiled or eager, attention kernels, the trainer's pauses.

It changes times and nothing else, with two exceptions. The model takes on the forms of norms and
loss, and ZeRO keeps float32 gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.engine.detail import Detail
from zsim.models.forms import Form, in_form
from zsim.models.spec import ModelSpec

AttentionKernels = Literal["flash2", "flash3", "triton", "cudnn"]

Float8 = Literal[False, True, "delayed", "tensorwise", "rowwise", "mx"]
Casts = Literal["fused", "eager"]
Compile = Literal[False, True, "blocks"]
Accumulation = Literal["eager", "fp32", "fused"]
Softmax = Literal["eager", "fused"]
Products = Literal["training", "alone"]
Float32Products = Literal["ieee", "tf32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The `execution` table of a scenario, and facts that other tables decide."""

    compile: Compile = False
    """torch.compile fuses chains of element-wise kernels: those of the whole model and its loss,
    or those of "blocks" alone, as older torchtitan does."""
    float8: Float8 = False
    """Linears but the head multiply in 8 bits, and cast for it by a recipe; True for "delayed".
    """
    float8_casts: Casts = "fused"
    """Casts are one kernel each and parts of those before, "fused", as in Transformer Engine and
    with torch.compile. "eager": several, as torchao's without it."""
    float32_products: Float32Products = "ieee"
    """Products of float32 factors round them to TF32 or do not, as
    torch.backends.cuda.matmul.fp32_precision says."""
    attention_kernels: AttentionKernels = "flash2"
    norms: Form = "fused"
    """An RMSNorm is torch's, or a "composite" of single calls in float32.

    torch had composite ones before 2.9, and models still have their own. torch.compile fuses both.
    """
    loss: Form = "fused"
    """A cross-entropy is torch's log_softmax, or a "composite" of single calls. Trainers that can
    split the vocabulary over ranks have composite ones."""
    accumulation: Accumulation = "eager"
    """Addition of a later micro-batch's gradients to those before.

    It runs in a kernel for each parameter and in the gradient's dtype, "eager", or in float32,
    "fp32". It is part of the products where "fused", as apex's kernels in Megatron do.

    Both of the latter keep gradients in one float32 buffer for reduction and optimizer, so none are
    copied or cast. With "fp32", zero1, zero2 and zero3 have it in their Program, as Megatron's
    main_grad, and each gradient is freed when it is added. Of other strategies it changes times.
    """
    softmax: Softmax = "eager"
    """Scores of explicit attention are scaled and masked in kernels before the softmax, "eager", or
    in the softmax's own, "fused", as in Megatron."""
    products: Products | None = None
    """Matrix products are as fast as in "training" on eight GPUs of a node, or as each "alone".
    None: alone on a single GPU, whose steps here are met so, else as in training."""
    interference: bool = True
    """Collectives slow down the kernels that they overlap."""
    detail: Detail = "flows"
    """Collectives are simulated as "flows", which share links at fair rates. "steps": those that go
    round a ring are simulated chunk by chunk and hop by hop, on all ranks."""
    step_overhead_ns: int = 0
    """Pause of the trainer around a step, in which the device is idle."""
    micro_batch_overhead_ns: int = 0
    """Pause of the trainer around each micro-batch, in which the device is idle."""
    issue_kernel_ns: int | None = None
    """The host's time to issue a kernel; None for that of the cluster's preset."""
    host_threads: int | None = None
    """Threads of a rank's optimizer on the host; None for those that its launcher gives it."""
    torchrun: bool = False
    """torchrun starts the ranks, and gives each one thread where a node has several. Others leave
    each its part of the node's cores. Strategy and cluster decide it."""
    wide_products: bool = False
    """Products give float32, which what torch.compile fuses reads and writes too. The precision
    decides it."""
    hooks: float = 0.0
    """Host's time of the hooks of modules that issue all-gathers and reduce-scatters, over that of
    FSDP's; 0 for none. The strategy decides it."""
    by_call: bool = False
    """Each kernel of the model is one call of torch, as in traced models. The scenario decides it.
    """
    dtensors: bool = False
    """The optimizer steps DTensors. The strategy decides it."""
    drive_queue_nbytes: int = 0
    """Bytes of a rank's requests that drives have at once, 0 for enough. The table `offload`
    decides it."""
    synchronous: bool = False
    """The host ends each op before it begins the next. Strategy and cluster decide it."""

    @property
    def recipe(self) -> str:
        """The recipe of products in 8 bits, "" for none."""
        return ("delayed" if self.float8 else "") if isinstance(self.float8, bool) else self.float8

    def form_of(self, model: ModelSpec) -> ModelSpec:
        """`model` in the forms that run eagerly; torch.compile fuses either."""
        if self.compiles_loss:
            return model
        norms: Form = "fused" if self.compile else self.norms
        return in_form(model, norms=norms, loss=self.loss)

    @property
    def compiles_loss(self) -> bool:
        """True where torch.compile fuses the head's loss, and pads the head's products, too."""
        return self.compile is True


EAGER = Execution()
