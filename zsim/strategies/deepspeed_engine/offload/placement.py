"""Host memory of offloaded states. On a GPU it is apart from the device's; on a CPU it is the same,
and torch's meter counts both together.

A buffer is in host memory by its name (`zsim.ir.buffers.on_host`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zsim.ir.buffers import STEP, is_on_host, is_state, on_host
from zsim.ir.ops import Alloc, Free, HostAlloc, HostEvent, Kernel, MemoryEvent
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building import host_step, optimizers
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.training import Training

STATES = on_host("optimizer")
"""Owner of the optimizer's states."""

Event = Alloc | Free | HostAlloc


def placed(
    events: Iterable[Event], *, device: str
) -> tuple[list[MemoryEvent], list[HostEvent]]:
    """Events of device and host memory, apart; on a CPU all are the device's, in their order."""
    memory: list[MemoryEvent] = []
    host: list[HostEvent] = []
    for event in events:
        if device == "cpu" or not is_on_host(event.buffer):
            memory.append(
                Alloc(event.buffer, event.kind, event.nbytes)
                if isinstance(event, HostAlloc) else event
            )
        else:
            host.append(
                HostAlloc(event.buffer, event.kind, event.nbytes)
                if isinstance(event, Alloc) else event
            )
    return memory, host


def in_host_memory(events: Iterable[MemoryEvent]) -> Iterator[MemoryEvent]:
    """Events of numbers that the host has, such as norms behind their all-reduce."""
    return (replace(event, buffer=on_host(event.buffer)) for event in events)


def step_memory(
    training: Training, numel: int, *, owner: str = STATES, first: bool
) -> tuple[MemoryEvent, ...]:
    """Allocations of the optimizer's step of `numel` elements on the host.

    DeepSpeedCPUAdam makes two states and counts steps in Python.
    """
    settings, offload = training.optimizer, training.offload
    if offload.adam == "deepspeed":
        states = optimizers.states(
            [numel], optimizer=settings, dtype=MASTER_DTYPE, device="cpu", owner=owner
        )
        return tuple(each for each in states if first and not is_state(each.buffer, STEP))
    return optimizers.memory(
        [numel], optimizer=settings, dtype=MASTER_DTYPE, device="cpu", owner=owner, first=first
    )


def step_kernels(training: Training, numel: int) -> tuple[Kernel, ...]:
    """The step of `numel` elements by the host, behind the product with the loss scale's inverse
    and the clipping coefficient."""
    scale = Kernel("scale", numel, 2 * numel * DTYPE_NBYTES[MASTER_DTYPE], MASTER_DTYPE)
    return (
        *host_step.located([scale]),
        *host_step.step_kernels(
            numel, optimizer=training.optimizer, offload=training.offload, of=MASTER_DTYPE
        ),
    )

