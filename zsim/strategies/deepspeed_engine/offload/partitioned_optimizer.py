"""The end of a step at stages 1 and 2 whose optimizer steps on the host.

Norms of gradients were taken when these were sent, and the host reads one after the other. It has
their sum over ranks, and all that follows from it. The part is stepped in host memory, rounded
there and copied to the device. Then the flat buffer is all-gathered. Source:
deepspeed/runtime/zero/stage_1_and_2.py (step, complete_grad_norm_calculation_for_cpu_offload).
"""

from __future__ import annotations

from zsim.ir.buffers import form_of, norm_part
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.spec import ROOT
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.clipping import NORMS
from zsim.strategies.building.host_step import crossing, located
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.offload.partitioned import norm_buffer
from zsim.strategies.deepspeed_engine.offload.placement import (
    in_host_memory,
    placed,
    step_kernels,
    step_memory,
)
from zsim.strategies.deepspeed_engine.optimizer import GLOBAL_NORM, OVERFLOW, clipped, combined
from zsim.strategies.deepspeed_engine.partition import FlatPartition, Share

NORM_NBYTES = DTYPE_NBYTES[MASTER_DTYPE]


def optimizer_step(step: StepBuilder, flat: FlatPartition, share: Share, *, first: bool) -> None:
    """Step the rank's part on the host, and gather the flat buffer."""
    step.begin("optimizer")
    if flat.searches_infinities:
        _tell(step, flat, OVERFLOW, nbytes=1, dtype="uint8")
    normed = _tell(step, flat, NORMS, nbytes=NORM_NBYTES, dtype=MASTER_DTYPE)
    returned = _step(step, flat, after=normed, first=first)
    step.issue(
        "free", ROOT, stream="host", memory=[Free(norm_buffer(p.fqn)) for p in share.touched]
    )
    if flat.num_ranks > 1:
        step.issue(
            "all_gather", ROOT, stream="all_gather", waits=(returned,), group=AXIS,
            nbytes=flat.padded_numel * flat.element, dtype=flat.dtype,
        )
    gone = [Free(norm_part("all"))] if first else [Free(norm_part("all")), Free(norm_part("told"))]
    memory, host = placed(in_host_memory(gone), device=flat.training.device)
    step.issue("free", ROOT, stream="host", memory=memory, host=host)
    step.begin("zero_grad")


def _tell(step: StepBuilder, flat: FlatPartition, label: str, *, nbytes: int, dtype: str) -> int:
    """Send a number that the host has to all ranks; the host reads the answer."""
    sent = Alloc(form_of(label, "sent"), "communication", nbytes)
    copied = step.issue("optimizer", label, stream="host", memory=[sent])
    if flat.num_ranks > 1:
        copied = step.issue(
            "all_reduce", label, stream="all_reduce", waits=(copied,), group=AXIS, nbytes=nbytes,
            dtype=dtype,
        )
    root = [Alloc(norm_part("root"), "temporaries", NORM_NBYTES)] if label == NORMS else []
    memory, host = placed(
        [*in_host_memory(root), Free(sent.buffer)], device=flat.training.device
    )
    return step.issue(
        "host_wait", label, stream="host", waits=(copied,), memory=memory, host=host
    )


def _step(step: StepBuilder, flat: FlatPartition, *, after: int, first: bool) -> int:
    """Clip and step the part on the host, round it there, and copy it to the device."""
    training, part = flat.training, flat.part_numel
    pinned = training.offload.pin_memory
    made: list[MemoryEvent] = [
        *combined(1, NORM_NBYTES), Free(norm_part("root")),
        Alloc(GLOBAL_NORM if first else norm_part("told"), "temporaries", NORM_NBYTES),
    ]
    if training.optimizer.clip_norm:
        made += clipped()
    stepping = step_memory(training, part, first=first)
    memory, host = placed([*in_host_memory(made), *stepping], device=training.device)
    kernels: tuple[Kernel, ...] = step_kernels(training, part)
    rounded = located([copy_kernel(part, source=MASTER_DTYPE, target=flat.dtype)])
    stepped = step.issue(
        "optimizer", ROOT, stream="host", waits=(after,), kernels=(*kernels, *rounded),
        memory=memory, host=host,
    )
    return step.issue(
        "copy", ROOT, stream="compute" if pinned else "host", waits=(stepped,),
        kernels=crossing("to_device", part, dtype=flat.dtype, pinned=pinned),
    )
