"""A traced module built in two bytes, with buffers, against the same module under DDP:
construction, and what is broadcast when."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.zreal.tracing.test_tracing_against_torch import traced
from tests.zreal.tracing.user_modules import CASES, Case
from zreal import torch_private
from zreal.meters.collectives import CollectiveRecorder
from zreal.meters.memory import MemoryMeter
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.traced import traced_file as files
from zsim.autograd.traced.model import TracedModel
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES
from zsim.models.training_options import Dtype, Precision
from zsim.strategies import ddp, zero_redundancy
from zsim.strategies.building.training import Training

Collectives = list[tuple[str, int]]


def hook(state: Any, bucket: Any) -> Any:
    """Communication hook: the fake group's own all-reduce returns nothing that DDP can read."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


hook.__annotations__.clear()  # torch refuses annotations that are text


def measured(
    case: Case, dtype: Dtype, *, masters: bool
) -> tuple[tuple[int, int, int], list[Collectives]]:
    """Start, peak and end of construction, and the collectives of it and of three forwards and
    backwards."""
    model, meter, recorder = case.make(), MemoryMeter(), CollectiveRecorder({}, world_size=2)
    buffers = dict(model.named_buffers())
    with meter, recorder:
        with meter.uncounted():
            meter.watch(*buffers.values())
        with meter.span() as span:
            meter.watch(*model.parameters())
            kept = [parameter.detach() for parameter in model.parameters()] if masters else []
            model.to(getattr(torch, dtype))
            for name, buffer in buffers.items():  # which were traced as they are
                path, _, last = name.rpartition(".")
                setattr(model.get_submodule(path), last, buffer)
            wrapped = DistributedDataParallel(model)
            wrapped.register_comm_hook(None, hook)
        issued = [[(collective.op, collective.nbytes) for collective in recorder.take()]]
        for _ in range(3):
            with meter.uncounted():
                given = case.data()
            case.run(wrapped, given).backward()
            wrapped.zero_grad()
            issued.append([(collective.op, collective.nbytes) for collective in recorder.take()])
    del kept
    return (span.start, span.peak, span.end), issued


def predicted(model: TracedModel, strategy: Any) -> tuple[tuple[int, int, int], list[Collectives]]:
    """The same of the strategy's Program; of steps, the first and a steady one up to the optimizer.
    """
    training = Training(
        model=model, modules=lower(model, batch=model.batch, dtype=model.dtype), batch=model.batch,
        precision=Precision(parameters=model.dtype, reduce=model.dtype),
    )
    program = strategy.plan(
        training, mesh=Mesh(dp_replicate=2), options=strategy.Options()
    ).of_rank(1)
    record = replay(program)["construction"]
    issued = []
    for phase in (program.construction, program.first, program.steady):
        end = next((op.index for op in phase if op.kind == "optimizer"), len(phase))
        issued.append([(op.kind, op.nbytes) for op in phase[:end] if op.kind in COLLECTIVES])
    return (record.start_bytes, record.peak_bytes, record.end_bytes), issued


@pytest.mark.parametrize(
    ("strategy", "masters"), [(ddp, True), (zero_redundancy, False)], ids=["masters", "none"]
)
@pytest.mark.parametrize(("name", "dtype"), [
    ("llama", "bfloat16"), pytest.param("gpt2", "bfloat16", marks=pytest.mark.slow),
    ("convolutions", "float32"), pytest.param("llama", "float32", marks=pytest.mark.slow),
    pytest.param("gpt2", "float32", marks=pytest.mark.slow),
])
def test_construction_and_broadcasts_of_buffers_are_those_of_torch(
    name: str, dtype: Dtype, strategy: Any, masters: bool
) -> None:
    model = traced(CASES[name], dtype=dtype, casts_input=False)
    with torch_private.fake_group(rank=1, world_size=2):
        construction, (built, first, *_, steady) = measured(CASES[name], dtype, masters=masters)
    assert predicted(model, strategy) == (construction, [built, first, steady])


def test_buffers_and_the_order_of_parameters_are_in_the_file_and_may_be_missing() -> None:
    model = traced(CASES["llama"], dtype="float32")
    text = files.dump(model)
    assert files.parse(text.encode()) == model
    assert model.buffers == (("float32", 32), ("float32", 32))
    assert [p.fqn for p in model.named_parameters] == [
        name for name, _ in CASES["llama"].make().named_parameters()
    ]
    older = {
        key: value
        for key, value in json.loads(text).items()
        if key not in ("registered", "buffers")
    }
    assert files.parse(json.dumps(older).encode()).buffers == ()
