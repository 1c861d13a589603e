"""Steps of a user's module under torch's own strategies: as predicted, and as measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tests.zreal.agreement.test_event_order import in_order, of_program
from tests.zreal.agreement.test_matrix import figures, predicted
from tests.zreal.tracing.traced_subject import Subject
from tests.zreal.tracing.user_modules import Case
from zreal import torch_private
from zreal.tracing.trace import trace
from zsim.autograd.traced.model import TracedModel
from zsim.autograd.traced.traced_file import save
from zsim.ir.program import PHASES
from zsim.models.training_options import Dtype
from zsim.scenario.parts.assemble import DTYPES
from zsim.scenario.scenario import parse

DDP = 'name = "ddp"'
FSDP1 = 'name = "fsdp1", dp_shard = 2, dp_replicate = 1'
FSDP2 = 'name = "fsdp2"'
HSDP = 'name = "hsdp", dp_shard = 2, dp_replicate = 2'
KEPT = 'name = "fsdp2", reshard_after_forward = false'
SGD = 'name = "sgd"'


class Exact(Protocol):
    """Asserts that each phase of a step is predicted to the byte; more as `differences` takes it.
    """

    def __call__(
        self, make: Callable[[], nn.Module], data: Callable[[], Any], strategy: str, **more: Any
    ) -> None: ...


@lru_cache(maxsize=8)
def traced(
    make: Callable[[], nn.Module], data: Callable[[], Any], units: tuple[str, ...], dtype: Dtype,
    loss: Callable[[Any], Tensor] | None = None,
) -> TracedModel:
    """The same for every strategy that a module is tried under: it is traced once, which takes
    longer than its steps."""
    torch.manual_seed(0)
    return trace(
        make, data(), units=units, dtype=dtype, sums_in_place=False, name="traced", loss=loss
    )


def differences(
    make: Callable[[], nn.Module], data: Callable[[], Any], strategy: str, folder: Path, *,
    ranks: int, more: str = "", parameters: str = "fp32", reduce: str = "fp32",
    accumulation: int = 1, optimizer: str = SGD, layers: str = "layers", units: Sequence[str] = (),
    loss: Callable[[Any], Tensor] | None = None, rank: int = 0, order: bool = False,
) -> dict[str, Any]:
    """Prediction and measurement, by phase, where these differ; with `order`, also of the order in
    which the third step on rank 0 allocates and frees."""
    units = tuple(units or (f"{layers}.{index}" for index in range(4)))
    model = traced(make, data, units, DTYPES[parameters], loss)
    save(model, folder / "traced.json")
    text = f"""
model = {{ traced = "traced.json" }}
batch = {{ micro_batch = {model.batch.micro_batch}, sequence_length = {model.batch.sequence_length}, accumulation = {accumulation} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{parameters}", reduce = "{reduce}" }}
optimizer = {{ {optimizer} }}
{more}
"""  # noqa: E501
    case = parse(text.encode(), where="user.toml", folder=folder)
    ours = predicted(case, ranks=(rank,))[0]
    user = Case(make, "", data, num_units=0, more=units, makes_loss=loss)
    with torch_private.fake_group(rank=rank, world_size=ranks):
        real = Subject(user, case, log=order)
        first, _, steady = (real.step() for _ in range(3))
        events = in_order(nbytes for _, nbytes in real.meter.events or ())
    pairs: dict[str, tuple[Any, Any]] = {
        name: (figures(ours[name]), figures(phase))
        for name, phase in zip(PHASES, (real.construction, first, steady), strict=True)
    }
    if order:
        pairs["order"] = of_program(case), events
    return {
        name: (simulated, measured)
        for name, (simulated, measured) in pairs.items()
        if simulated != measured
    }
