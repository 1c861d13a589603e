"""Batch, precision and optimizer: choices that every strategy shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
Library = Literal["torch", "ddp", "zero_redundancy", "fsdp1", "fully_shard", "deepspeed", "zsim"]
"""Code that trains: torch's plain module, DistributedDataParallel, ZeroRedundancyOptimizer,
FullyShardedDataParallel or fully_shard; DeepSpeed's engine; or zsim's own Program, executed."""
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_NBYTES: dict[str, int] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int8": 1, "int32": 4,
    "int64": 8,
}
DTYPE_NAMES: dict[Dtype | Literal["none"], str] = {
    "none": "none", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"
}
"""Dtypes of torch, and their names in scenario files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One rank's batch: sequences per micro-batch, tokens per sequence (1 for mlp), micro-batches
    per step."""

    micro_batch: int
    sequence_length: int = 1
    accumulation: int = 1
    forwards: int = 1
    """Forwards, each on a batch of its own, whose losses are summed before the one backward of a
    micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """`parameters`: dtype of compute, unsharded parameters and gradients; `reduce`: dtype gradients
    are reduced in.

    `autocast`: the dtype of torch.autocast around the forward over float32 parameters; "none"
    without it.
    """

    parameters: Dtype = "float32"
    reduce: Dtype = "float32"
    autocast: Dtype | Literal["none"] = "none"
    master: bool = True
    """The optimizer steps float32 copies, or shards, of two-byte parameters; else them themselves,
    as after `model.to(torch.bfloat16)`."""

    @property
    def stepped(self) -> Dtype:
        """The dtype of what the optimizer steps, and of its states."""
        return "float32" if self.master else self.parameters

    @property
    def products(self) -> Dtype:
        """The dtype in which matrices are multiplied."""
        return self.parameters if self.autocast == "none" else self.autocast

    @property
    def narrowest(self) -> Dtype:
        """The dtype whose rounding decides how far results may be apart: that of products, or of
        reductions beside float32 products."""
        return self.products if self.products != "float32" else self.reduce


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """`adamw` or `sgd` (with or without momentum) and how torch loops over parameters: foreach,
    for-loop or fused. `adamw8bit` is torchao's, with states in blocks of 8 bits."""

    name: Literal["adamw", "sgd", "adamw8bit"] = "adamw"
    implementation: Literal["foreach", "for-loop", "fused"] = "foreach"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.01
    clip_norm: float = 0.0
    """The global norm to which gradients are clipped before each step; 0 for none."""


OffloadedActivations = Literal["saved_tensors", "checkpoint_inputs"]
"""Activations that a hook takes to host memory: every tensor that autograd saves, or the inputs of
checkpointed blocks alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorsHook:
    """The hook on saved tensors: the tensors that it takes, and whether the host's side of copies
    is pinned."""

    tensors: OffloadedActivations
    pinned: bool = True


BLOCK_NBYTES, QUEUE_DEPTH = 2**20, 8
"""DeepSpeed's defaults of a request to drives, and of requests at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """States that live outside the device: those of the optimizer, with its step, shards of
    parameters, and activations. None: they stay on the device.

    With `pin_memory` the host's side of copies is pinned, and copies run beside compute. The step
    on the host is torch's, by the optimizer's `implementation`, or that of DeepSpeedCPUAdam.
    """

    optimizer: Literal["cpu", "nvme"] | None = None
    parameters: Literal["cpu", "nvme"] | None = None
    activations: OffloadedActivations | None = None
    """Activations that a hook on autograd's saved tensors takes to host memory."""
    pin_memory: bool = True
    adam: Literal["torch", "deepspeed"] = "torch"
    buffer_count: int = 4
    """Pinned buffers, each as large as the largest float32 shard, for what goes to drives or comes
    from them."""
    pipeline_read: bool = False
    """The next group's states are read while the host steps a group."""
    pipeline_write: bool = False
    """A group's states are written while the host steps the next one."""
    block_size: int | None = None
    """Bytes of each request to the drives; None for the drives' own rates, as tuned."""
    queue_depth: int | None = None
    """Requests of a rank that the drives have at once; None for the drives' own rates, as tuned."""

    max_in_cpu: int = 10**9
    """Elements of a rank's parameters on drives that DeepSpeed keeps in host memory."""
    parameter_buffer_count: int = 5
    """DeepSpeed's buffers for parameters that come from drives."""
    parameter_buffer_size: int = 10**8
    """Elements of each of them."""

    @property
    def drive_queue_nbytes(self) -> int:
        """Bytes of a rank's requests that the drives have at once; 0 where neither is said. An
        unsaid one is DeepSpeed's default."""
        if self.block_size is None and self.queue_depth is None:
            return 0
        return (self.block_size or BLOCK_NBYTES) * (self.queue_depth or QUEUE_DEPTH)

    @property
    def uses_drives(self) -> bool:
        """True where some state lives on drives."""
        return "nvme" in (self.optimizer, self.parameters)

    @property
    def groups_in_flight(self) -> int:
        """Groups with states in buffers at once: the stepped one, the next if it is read ahead, the
        last if it is written behind."""
        return 1 + self.pipeline_read + self.pipeline_write

    @property
    def saving(self) -> SavedTensorsHook | None:
        """The hook on saved tensors; None where these stay on the device."""
        if self.activations is None:
            return None
        return SavedTensorsHook(tensors=self.activations, pinned=self.pin_memory)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that live outside the device from step to step."""
        return tuple(name for name in ("optimizer", "parameters") if getattr(self, name))


ON_DEVICE = Offload()
