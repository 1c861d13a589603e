"""A traced module, simulated, against the same module run by torch: plain, under fully_shard, under
DDP. The target is 0 bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.cases.sampling import one_in
from tests.support.installed_torch import TORCH
from tests.zreal.tracing.user_modules import CASES, HALF_OF_PAIRS, SOME_PAIRS, Case
from zreal import torch_private
from zreal.meters.memory import MemoryMeter
from zreal.tracing.trace import trace
from zsim.autograd.lowered import Accumulated, Recomputed
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.traced.model import TracedModel
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.training_options import DTYPE_NBYTES, Dtype, Precision
from zsim.strategies import STRATEGIES, ddp, fsdp2
from zsim.strategies.building.training import Training

Phases = dict[str, tuple[int, int, int]]


@cache
def traced(case: Case, *, dtype: Dtype, casts_input: bool = True) -> TracedModel:
    """The case traced as it runs while the meter watches the dispatcher."""
    return trace(
        case.make, case.data(), units=case.all_units, dtype=dtype, casts_input=casts_input,
        sums_in_place=False,
    )


# -- every allocation of a plain step, in order


def measured_events(case: Case, *, dtype: Dtype) -> list[int]:
    """Bytes that one forward and backward of the plain module allocates and, negative, frees."""
    model, meter = case.make(), MemoryMeter(log=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    with meter:
        meter.watch(*model.parameters())
        with meter.uncounted():
            meter.watch(*model.buffers())
            given = case.data()
            if isinstance(given, tuple):
                given = tuple(
                    t.to(getattr(torch, dtype)) if t.is_floating_point() else t for t in given
                )
        assert meter.events is not None
        meter.events.clear()
        loss = case.run(model, given)
        loss.backward()
        del loss
        events = [nbytes for _, nbytes in meter.events]
    del given
    return events


def traced_events(model: TracedModel) -> list[int]:
    """The same of the traced model; gradients of parameters that are halves of one storage are born
    together."""
    nbytes = {p.fqn: p.numel * DTYPE_NBYTES[model.dtype] for p in model.parameters}
    events = []
    passes = [module.forward for module in model.lowered] + [
        module.backward for module in model.lowered[::-1]
    ]
    for event in (event for computation in passes for event in computation.memory):
        if isinstance(event, Recomputed | Accumulated):
            continue
        if isinstance(event, Alloc):
            nbytes[event.buffer] = event.nbytes
        change = (
            -nbytes[event.buffer]
            if isinstance(event, Free)
            else nbytes[getattr(event, "buffer", "") or event.fqn]
        )
        if "halves.1" in getattr(event, "fqn", ""):
            events[-1] += change
        else:
            events.append(change)
    return events


@pytest.mark.parametrize(("name", "dtype"), HALF_OF_PAIRS)
def test_every_allocation_and_free_of_a_plain_step_is_traced_in_order(
    name: str, dtype: Dtype
) -> None:
    case = CASES[name]
    assert traced_events(traced(case, dtype=dtype, casts_input=False)) == measured_events(
        case, dtype=dtype
    )


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.GRU | nn.RNN]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer(16, 16, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x.sum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layer", [nn.GRU, nn.RNN])
def test_so_are_those_of_recurrent_layers_that_a_cpu_makes_of_operators(
    layer: type[nn.GRU | nn.RNN], dtype: Dtype
) -> None:
    case = Case(lambda: Recurrent(layer), "blocks", lambda: (torch.randn(2, 6, 16),), num_units=2)
    assert traced_events(traced(case, dtype=dtype, casts_input=False)) == measured_events(
        case, dtype=dtype
    )


# -- under fully_shard and DDP


def measured_phases(
    case: Case, wrap: Callable[[nn.Module], nn.Module], *, accumulation: int = 1
) -> Phases:
    """Start, peak and end of the first and of a steady step of the wrapped module; of several
    backwards, the last reduces."""
    model, meter, spans = case.make(), MemoryMeter(), []
    with meter:
        meter.watch(*model.parameters())
        with meter.uncounted():
            meter.watch(*model.buffers())
        wrapped = wrap(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), foreach=True)
        for _ in range(3):
            with meter.uncounted():
                batches = [case.data() for _ in range(accumulation)]
            with meter.span() as span:
                for i, given in enumerate(batches):
                    if accumulation > 1:
                        wrapped.set_requires_gradient_sync(i == accumulation - 1)
                    loss = case.run(wrapped, given)
                    loss.backward()
                    del loss
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            spans.append((span.start, span.peak, span.end))
    return {"first": spans[0], "steady": spans[2]}


def simulated_phases(
    model: TracedModel, options: Any, *, rank: int, mesh: Mesh, accumulation: int = 1
) -> Phases:
    """The same of the strategy's Program for the traced model; the strategy is known by its
    options."""
    strategy = next(
        strategy for strategy in STRATEGIES.values() if strategy.options is type(options)
    )
    batch = replace(model.batch, accumulation=accumulation)
    training = Training(
        model=model,
        modules=lower(
            model, batch=batch, dtype=model.dtype, casts_input=strategy.casts_input,
            autocast=model.autocast, unit_hooks=strategy.unit_hooks,
        ),
        batch=batch,
        precision=Precision(parameters=model.dtype, reduce="float32", autocast=model.autocast),
        sync="last", device="cpu", torch=TORCH,
    )
    program = strategy.plan(training, mesh=mesh, options=options)
    records = replay(program.ranks[program.assignment[rank]], timeline=False)
    steps = ((phase, records[phase]) for phase in ("first", "steady"))
    return {
        phase: (record.start_bytes, record.peak_bytes, record.end_bytes) for phase, record in steps
    }


def recomputed(model: TracedModel, asked: Checkpointing) -> TracedModel:
    """`model` as it is with `asked` of what it was traced with."""
    hook_variants = tuple(
        replace(variant, checkpointing=NO_CHECKPOINTING) for variant in model.hook_variants
        if variant.checkpointing == asked
    )
    return replace(
        model, lowered=dict(model.recomputing)[asked], recomputing=(), hook_variants=hook_variants
    )


def sharded(case: Case, dtype: Dtype, world_size: int) -> Callable[[nn.Module], nn.Module]:
    """fully_shard on every unit of the case and on the whole."""
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        if dtype == "bfloat16"
        else MixedPrecisionPolicy()
    )

    mesh = init_device_mesh("cpu", (world_size,))

    def wrap(model: nn.Module) -> nn.Module:
        for part in (*map(model.get_submodule, case.all_units), model):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        return model

    return wrap


def replicated(*, views: bool = False) -> Callable[[nn.Module], nn.Module]:
    """DDP on the fake group, whose all-reduce returns nothing that DDP could read: a hook does."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are text
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=views, broadcast_buffers=False
        )
        wrapped.register_comm_hook(None, hook)
        return wrapped

    return wrap


@pytest.mark.parametrize(("name", "dtype"), SOME_PAIRS)
def test_fully_shard_holds_the_bytes_that_the_traced_module_says(name: str, dtype: Dtype) -> None:
    rank, world_size = (0, 2) if dtype == "float32" else (3, 4)
    simulated = simulated_phases(
        traced(CASES[name], dtype=dtype), fsdp2.Options(), rank=rank, mesh=Mesh(dp_shard=world_size)
    )
    with torch_private.fake_group(rank=rank, world_size=world_size):
        assert simulated == measured_phases(CASES[name], sharded(CASES[name], dtype, world_size))


@pytest.mark.parametrize(
    ("name", "dtype"),
    one_in(3, itertools.product(
        ["encoder, tied, logits largest", "pairs", "turned"], ["float32", "bfloat16"]
    )),
)
def test_so_it_does_when_gradients_are_accumulated(name: str, dtype: Dtype) -> None:
    model = traced(CASES[name], dtype=dtype)
    simulated = simulated_phases(
        model, fsdp2.Options(), rank=1, mesh=Mesh(dp_shard=2), accumulation=2
    )
    with torch_private.fake_group(rank=1, world_size=2):
        assert simulated == measured_phases(
            CASES[name], sharded(CASES[name], dtype, 2), accumulation=2
        )


@pytest.mark.filterwarnings(
    "ignore:.*broadcast_buffers"
)  # its newer name is not known to older torch
@pytest.mark.parametrize(
    ("name", "views"),
    one_in(3, itertools.product(
        ["encoder, tied, logits largest", "encoder, checkpointed", "pairs", "convolutions", "gpt2"],
        [False, True],
    )),
)
def test_ddp_holds_the_bytes_that_the_traced_module_says(name: str, views: bool) -> None:
    options = ddp.Options(gradient_as_bucket_view=views)
    simulated = simulated_phases(
        traced(CASES[name], dtype="float32"), options, rank=1, mesh=Mesh(dp_replicate=2)
    )
    with torch_private.fake_group(rank=1, world_size=2):
        assert simulated == measured_phases(CASES[name], replicated(views=views))
