"""Every allocation and free of `optimizer.step()` in torch, in order, against
zsim.strategies.building.optimizers, for parameters of unlike sizes."""

from __future__ import annotations

import pytest
import torch

from zreal.meters.memory import MemoryMeter
from zsim.ir.ops import Alloc, MemoryEvent
from zsim.models.training_options import Optimizer
from zsim.strategies.building import optimizers

NUMELS = (5, 0, 300, 70)


def deltas(events: tuple[MemoryEvent, ...]) -> list[int]:
    """Bytes that each event adds to allocated bytes."""
    sizes = {event.buffer: event.nbytes for event in events if isinstance(event, Alloc)}
    return [event.nbytes if isinstance(event, Alloc) else -sizes[event.buffer] for event in events]


@pytest.mark.parametrize("implementation", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_steady_step_makes_and_drops_its_temporaries_in_torchs_order(
    name: str, implementation: str
) -> None:
    """foreach drops first what it made last."""
    settings = Optimizer(name=name, momentum=0.9, implementation=implementation)  # type: ignore[arg-type]
    parameters = [torch.nn.Parameter(torch.ones(numel)) for numel in NUMELS]
    options = {
        "lr": 0.1, "weight_decay": settings.weight_decay, "foreach": implementation == "foreach"
    }
    made = (
        torch.optim.AdamW(parameters, **options)
        if name == "adamw"
        else torch.optim.SGD(parameters, momentum=0.9, **options)
    )
    with MemoryMeter(log=True) as meter:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        made.step()
        before = len(meter.events or [])
        made.step()
        seen = [delta for _, delta in (meter.events or [])[before:]]
    planned = optimizers.step_memory(
        NUMELS, optimizer=settings, dtype="float32", device="cpu", owner="o"
    )
    assert settings.weight_decay
    assert seen == deltas(planned)
