"""torch's DistributedDataParallel, with an optimizer of float32 master copies for 2-byte
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from zreal.meters.held_memory import state_tensors
from zreal.modules.initial_values import DTYPES, Make, by_unit
from zreal.modules.modules import Model, cast_all
from zreal.modules.optimizers import make_optimizer, trained
from zreal.observer.subjects import Subject
from zsim.scenario.scenario import Scenario


class MasterOptimizer(torch.optim.Optimizer):
    """An optimizer of float32 copies of 2-byte parameters, with casts before and after its step."""

    def __init__(
        self, parameters: list[nn.Parameter], masters: list[torch.Tensor],
        inner: torch.optim.Optimizer,
    ) -> None:
        super().__init__(parameters, {})
        self.replicas, self.masters, self.inner = parameters, masters, inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step the masters with the gradients of the parameters, then copy them into the
        parameters."""
        for replica, master in zip(self.replicas, self.masters, strict=True):
            master.grad = replica.grad.float() if replica.grad is not None else None
        self.inner.step()
        for replica, master in zip(self.replicas, self.masters, strict=True):
            replica.copy_(master)
            master.grad = None


def wrap(scenario: Scenario, model: Model, mesh: DeviceMesh) -> DistributedDataParallel:
    """`model` under DDP with the scenario's buckets, reduced in the scenario's reduce dtype.

    The fake process group needs a communication hook, since its all-reduce returns no future that
    DDP can read.
    """
    options, group = scenario.options, mesh.get_group()
    extra: dict[str, Any] = (
        {} if options.bucket_cap_mb is None else {"bucket_cap_mb": options.bucket_cap_mb}
    )
    cast_all(model, DTYPES[scenario.precision.parameters])
    wrapped = DistributedDataParallel(
        model,
        process_group=group,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        find_unused_parameters=options.find_unused_parameters,
        **extra,
    )
    casts = scenario.precision.reduce != scenario.precision.parameters
    if casts or dist.get_backend(group) == "fake":
        wrapped.register_comm_hook(group, _reduce_in(DTYPES[scenario.precision.reduce]))
    return wrapped


def _reduce_in(
    dtype: torch.dtype
) -> Callable[[dist.ProcessGroup, Any], torch.futures.Future[torch.Tensor]]:
    """A communication hook that averages a bucket in `dtype` before it returns."""

    def hook(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        reduced = buffer.to(dtype).div_(group.size())
        dist.all_reduce(reduced, group=group)
        if reduced is not buffer:
            buffer.copy_(reduced)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    # torch accepts only class objects as annotations, not text
    hook.__annotations__.clear()
    return hook


@contextmanager
def synchronised(module: DistributedDataParallel, sync: bool) -> Iterator[None]:
    """Context around one forward and backward, with or without the reduction of gradients."""
    with nullcontext() if sync else module.no_sync():
        yield


def make_whole(scenario: Scenario, make: Make) -> None:
    """Make every parameter, since each rank holds a whole model."""
    for fqns in by_unit(scenario.model).values():
        make(fqns)


def build(scenario: Scenario, model: Model, mesh: DeviceMesh, make: Make) -> Subject:
    """`model` under DDP on the mesh's only axis, with a plain optimizer or one over master copies.
    """
    make_whole(scenario, make)
    masters = masters_of(scenario, model)
    module = wrap(scenario, model, mesh)
    return stepped(
        scenario, module, masters,
        micro_batch=lambda last: synchronised(module, last or scenario.sync == "every"),
        owns_gradients=not scenario.options.gradient_as_bucket_view,
    )


def masters_of(scenario: Scenario, model: Model) -> list[torch.Tensor]:
    """The float32 parameters of a `model` that is yet to be cast, where the optimizer steps them.
    """
    has_masters = scenario.precision.stepped != scenario.precision.parameters
    return [parameter.detach() for parameter in trained(model)] if has_masters else []


def stepped(
    scenario: Scenario, module: nn.Module, masters: list[torch.Tensor], *,
    micro_batch: Callable[[bool], AbstractContextManager[None]], owns_gradients: bool = True,
) -> Subject:
    """`module` of whole parameters with a plain optimizer of them, or one of their `masters`."""
    parameters = trained(module)
    inner = make_optimizer(scenario.optimizer, masters or list(parameters))
    optimizer = MasterOptimizer(parameters, masters, inner) if masters else inner
    return Subject(
        module=module,
        optimizer=optimizer,
        micro_batch=micro_batch,
        states=lambda: [*masters, *state_tensors(inner)],
        owns_gradients=owns_gradients,
        dtype=scenario.precision.parameters,
        masters=tuple(masters),
    )
