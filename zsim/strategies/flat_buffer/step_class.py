"""Steps of ZeRO by where optimizer states are: few scenarios have them in host memory or on drives.
"""

from __future__ import annotations

from collections.abc import Mapping

from zsim.loaded import Loaded
from zsim.strategies.flat_buffer.flat_buffer_step import FlatBufferStep
from zsim.strategies.flat_buffer.layout import FlatModel

_OFFLOADED: Mapping[str, type[FlatBufferStep]] = Loaded({
    "cpu": "zsim.strategies.flat_buffer.offloaded_step:OffloadedStep",
    "nvme": "zsim.strategies.flat_buffer.swapping_step:SwappingStep",
})


def step_class(model: FlatModel) -> type[FlatBufferStep]:
    """The class of a step of `model`, by where its states are."""
    offloaded_to = model.offload.optimizer
    return _OFFLOADED[offloaded_to] if offloaded_to else FlatBufferStep
