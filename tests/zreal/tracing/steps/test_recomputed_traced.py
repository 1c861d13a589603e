"""Traces with activation checkpointing put around units from outside: what torch's own
checkpoint_wrapper then does under strategies."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from tests.support.cases.sampling import one_in
from tests.zreal.tracing.test_tracing_against_torch import (
    measured_phases,
    recomputed,
    replicated,
    sharded,
    simulated_phases,
)
from tests.zreal.tracing.user_modules import CASES, Case
from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace
from zsim.analysis.alternatives import EVERY_BLOCK
from zsim.autograd.traced.model import TracedModel
from zsim.autograd.traced.traced_file import dump, parse
from zsim.ir.mesh import Mesh
from zsim.models.checkpointing import Checkpointing
from zsim.strategies import ddp, fsdp2

ASKED = {
    "full": EVERY_BLOCK, "every second": Checkpointing(mode="full", every=2),
    "linears kept": Checkpointing(mode="selective", save=("linear",)),
    "every second linear kept": Checkpointing(mode="selective", save=("linear",), save_every=2),
    "attention kept": Checkpointing(mode="selective", save=("attention",)),
    "no early stop": Checkpointing(mode="full", early_stop=False),
}
NAMES = (
    "encoder", "convolutions, cast", "pairs", "llama, no cache", "llama, padded",
    "encoder, tied, logits largest",
)
KEPT = {
    "linear": (torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
    "attention": (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,),
}


@cache
def seen(name: str, form: str) -> TracedModel:
    """The case with and without what is asked for, through a file."""
    case = CASES[name]
    model = trace(
        case.make, case.data(), units=case.all_units, sums_in_place=False,
        checkpointing=[ASKED[form]],
    )
    assert parse(dump(model).encode()) == model
    return model


def recomputing(name: str, form: str) -> TracedModel:
    """The case that is recomputed so, as a scenario would have it."""
    return recomputed(seen(name, form), ASKED[form])


def contexts(asked: Checkpointing) -> Any:
    """A policy that keeps what the calls of `asked` made, products one in some."""
    kept = {call for kind in asked.save for call in KEPT[kind]}
    counts = {True: 0, False: 0}

    def policy(context: Any, call: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keep = call in kept
        if call in KEPT["linear"]:
            keep = keep and counts[context.is_recompute] % asked.save_every == 0
            counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def wrapped(case: Case, asked: Checkpointing) -> Case:
    """The case whose units are wrapped as users wrap them."""
    how: dict[str, Any] = {"context_fn": partial(contexts, asked)} if asked.save else {}

    def make() -> nn.Module:
        model = case.make()
        for fqn in case.all_units[asked.every - 1 :: asked.every]:
            part = checkpoint_wrapper(
                model.get_submodule(fqn), checkpoint_impl=CheckpointImpl.NO_REENTRANT, **how
            )
            model.set_submodule(fqn, part)
        return model

    return replace(case, make=make)


def under(asked: Checkpointing) -> AbstractContextManager[None]:
    return nullcontext() if asked.early_stop else set_checkpoint_early_stop(False)


PAIRS = one_in(35, [(name, form) for name in NAMES for form in ASKED])


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_fully_shard_holds_what_the_recomputing_trace_says(name: str, form: str) -> None:
    asked = ASKED[form]
    simulated = simulated_phases(
        recomputing(name, form), fsdp2.Options(), rank=1, mesh=Mesh(dp_shard=2)
    )
    case = wrapped(CASES[name], asked)
    with torch_private.fake_group(rank=1, world_size=2), under(asked):
        assert simulated == measured_phases(case, sharded(case, "float32", 2))


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers")
@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_ddp_holds_what_the_recomputing_trace_says(name: str, form: str) -> None:
    asked = ASKED[form]
    simulated = simulated_phases(
        recomputing(name, form), ddp.Options(), rank=0, mesh=Mesh(dp_replicate=2)
    )
    case = wrapped(CASES[name], asked)
    with torch_private.fake_group(rank=0, world_size=2), under(asked):
        assert simulated == measured_phases(case, replicated())


def test_recomputation_saves_memory_and_takes_kernels() -> None:
    model = seen("encoder", "full")
    plain, full = model.lowered, dict(model.recomputing)[EVERY_BLOCK]
    assert not any(module.recompute for module in plain)
    assert sum(bool(module.recompute) for module in full) == CASES["encoder"].num_units


@pytest.mark.parametrize(("asked", "found"), [
    (Checkpointing(), "none"),
    (Checkpointing(mode="selective", recompute=("linear",)), "recompute"),
    (Checkpointing(mode="full", every=99), "expected 1 to"),
])
def test_what_no_trace_can_do_is_refused(asked: Checkpointing, found: str) -> None:
    case = CASES["encoder"]
    with pytest.raises(UntraceableError, match=f"^checkpointing: .*{found}"):
        trace(case.make, case.data(), units=case.all_units, checkpointing=[asked])


def test_the_module_is_left_as_it_was() -> None:
    case = CASES["encoder"]
    module = case.make()
    layer = module.get_submodule("layers.0")
    layer.forward = layer.forward  # an instance's own, as some libraries put there
    own = layer.forward
    trace(module, case.data(), checkpointing=[EVERY_BLOCK])
    assert layer.forward is own
    assert "forward" not in vars(module.get_submodule("layers.1"))
