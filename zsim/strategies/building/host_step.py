"""The optimizer's step on the host: its work, and what it allocates in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zsim.ir.buffers import is_state
from zsim.ir.ops import PAGEABLE, Alloc, HostAlloc, HostEvent, Kernel, MemoryEvent
from zsim.models.training_options import DTYPE_NBYTES, Offload, Optimizer
from zsim.strategies.building import optimizers
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel


def on_host(events: Iterable[MemoryEvent]) -> Iterator[HostEvent]:
    """Allocations and frees of pageable host memory in place of the device's."""
    for event in events:
        yield (
            HostAlloc(event.buffer, event.kind, event.nbytes) if isinstance(event, Alloc) else event
        )


def located(kernels: Iterable[Kernel], *, implementation: str = "") -> tuple[Kernel, ...]:
    """`kernels` as the host runs them. A step of the optimizer says its `implementation`, since
    several passes are slower than their bytes."""
    end = f".{implementation}" if implementation else ""
    return tuple(
        [replace(each, operator=each.operator + end, location="host") for each in kernels]
    )


def settings_of(optimizer: Optimizer, offload: Offload) -> Optimizer:
    """The optimizer by whose calls the host steps. DeepSpeed's Adam is one pass, as torch's fused.
    """
    return optimizer if offload.adam == "torch" else replace(optimizer, implementation="fused")


def step_kernels(
    numel: int, *, optimizer: Optimizer, offload: Offload, of: str
) -> tuple[Kernel, ...]:
    """The step of `numel` float32 elements, and their cast to the dtype `of` of parameters.

    In one pass 16 bytes are read and 12 written an element.
    """
    settings = settings_of(optimizer, offload)
    stepped = located(
        optimizers.kernels([numel], optimizer=settings, dtype=MASTER_DTYPE, device="cpu"),
        implementation=settings.implementation,
    )
    if of == MASTER_DTYPE:
        return stepped
    return (*stepped, *located([copy_kernel(numel, source=MASTER_DTYPE, target=of)]))


def step_memory(
    numel: int, *, optimizer: Optimizer, offload: Offload, owner: str, first: bool
) -> tuple[HostEvent, ...]:
    """All that the step of `numel` elements allocates and frees in host memory; the first makes the
    states. Those that go to drives are made in their buffers, but for step counters."""
    events = on_host(
        optimizers.memory(
            [numel], optimizer=settings_of(optimizer, offload), dtype=MASTER_DTYPE,
            device="cpu", owner=owner, first=first,
        )
    )
    if offload.optimizer != "nvme":
        return tuple(events)
    names = optimizers.state_names(optimizer)
    return tuple(event for event in events if not is_state(event.buffer, *names))


def crossing(direction: str, numel: int, *, dtype: str, pinned: bool) -> tuple[Kernel, ...]:
    """A copy of `numel` elements over the link, "to_host" or "to_device"; none for nothing."""
    operator = direction if pinned else f"{direction}{PAGEABLE}"
    if not numel:
        return ()
    return (Kernel(operator, 0, numel * DTYPE_NBYTES[dtype], dtype, location="link"),)
