"""A traced module of which parts are frozen, as LoRA leaves them: torch's own strategies on it,
against its Program."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from tests.support.installed_torch import TORCH
from tests.zreal.agreement.test_event_order import in_order, of_program
from tests.zreal.tracing.test_trace import records
from tests.zreal.tracing.test_tracing_against_torch import measured_events, traced_events
from tests.zreal.tracing.traced_subject import Subject
from tests.zreal.tracing.user_modules import FROZEN
from zreal import torch_private
from zreal.modules import modules
from zreal.modules.numerics import batches
from zreal.tracing.trace import trace
from zsim.autograd.traced.traced_file import dump
from zsim.autograd.traced.traced_file import parse as read
from zsim.ir.run import RankRun
from zsim.models.families import load_preset
from zsim.models.training_options import Batch, Dtype
from zsim.runs.backend import RunOptions
from zsim.runs.compare.compare import compare
from zsim.runs.simulator import SimBackend
from zsim.scenario.derived import derived
from zsim.scenario.parts.frozen import cut
from zsim.scenario.scenario import Scenario, parse
from zsim.strategies import STRATEGIES

FSDP2 = 'name = "fsdp2"'
RESHARDING = f"{FSDP2}, reshard_after_forward = true"
HSDP = 'name = "hsdp", dp_replicate = 2, dp_shard = 2'
DDP = 'name = "ddp"'
VIEWS = 'name = "ddp", gradient_as_bucket_view = true'
OWNED = 'name = "zero_redundancy"'


def scenario(name: str, strategy: str, *, parameters: str = "fp32", ranks: int = 2) -> Scenario:
    """The case `name` traced, under `strategy`, as a scenario that names its file would be."""
    case = FROZEN[name]
    text = f"""
model = {{ preset = "mlp-tiny" }}
batch = {{ micro_batch = 2, sequence_length = 1 }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "{parameters}", reduce = "fp32" }}
"""
    parsed = parse(text.encode(), where="frozen.toml")
    model = trace(
        case.make, case.data(), units=case.all_units, dtype=parsed.precision.parameters,
        casts_input=STRATEGIES[parsed.strategy].casts_input, sums_in_place=False,
    )
    return derived(parsed,
        model=model, batch=replace(model.batch, accumulation=parsed.batch.accumulation)
    )


def differences(name: str, case: Scenario, *, rank: int) -> list[str]:
    """Checks of `compare` that are not exact: order, bytes, memory of all phases and kinds."""
    predicted = SimBackend("cpu", torch=TORCH).run(
        case, options=RunOptions(ranks=(rank,), interpreter="observer")
    )
    with torch_private.fake_group(rank=rank, world_size=case.world_size):
        real = Subject(FROZEN[name], case)
        first, _, steady = (real.step() for _ in range(3))
    phases = {"construction": real.construction, "first": first, "steady": steady}
    measured = replace(predicted, backend="fake", ranks=(RankRun(rank=rank, phases=phases),))
    checks = [check for check in compare(predicted, measured) if check.status != "unsupported"]
    assert len(checks) > 4
    inexact = [check for check in checks if not check.detail.startswith("exact")]
    return [f"{check.name}: {check.detail}" for check in inexact]


def quick(*chosen: tuple[str, ...], **of: tuple[str, ...]) -> list[Any]:
    """Every combination of `of`; those that are not `chosen` have no time in the suite."""
    combinations = itertools.product(*of.values())
    return [
        pytest.param(*values, marks=[] if values in chosen else [pytest.mark.slow])
        for values in combinations
    ]


@pytest.mark.parametrize(("name", "dtype"), quick(
    ("adapters, dropout", "float32"), ("llama, query and value", "bfloat16"), names=tuple(FROZEN),
    dtypes=("float32", "bfloat16"),
))
def test_every_allocation_of_a_plain_step_is_traced_in_order(name: str, dtype: Dtype) -> None:
    case = FROZEN[name]
    model = trace(
        case.make, case.data(), units=case.all_units, dtype=dtype, casts_input=False,
        sums_in_place=False,
    )
    assert traced_events(model) == measured_events(case, dtype=dtype)


@pytest.mark.parametrize(("name", "strategy", "parameters"), quick(
    ("adapters in later blocks, head", FSDP2, "bf16"), ("adapters", HSDP, "fp32"),
    names=tuple(FROZEN), strategies=(FSDP2, RESHARDING, HSDP), parameters=("fp32", "bf16"),
))
def test_fully_shard_gathers_what_is_frozen_and_reduces_what_is_trained(
    name: str, strategy: str, parameters: str
) -> None:
    case = scenario(name, strategy, parameters=parameters, ranks=4)
    assert differences(name, case, rank=3) == []


WITHOUT_BUFFERS = tuple(name for name in FROZEN if not name.startswith("llama"))
"""DDP broadcasts a module's buffers before each forward, which is not modelled."""


@pytest.mark.parametrize(("name", "strategy"), quick(
    ("adapters in later blocks, head", DDP), ("adapters", OWNED), names=WITHOUT_BUFFERS,
    strategies=(DDP, VIEWS, OWNED),
))
def test_ddp_has_buckets_and_states_of_what_is_trained_only(name: str, strategy: str) -> None:
    assert differences(name, scenario(name, strategy), rank=0) == []


@pytest.mark.parametrize(("name", "strategy", "parameters"), [
    ("adapters", FSDP2, "bf16"),
    pytest.param("adapters, dropout", DDP, "fp32", marks=pytest.mark.slow),
])
def test_low_rank_adapters_are_allocated_and_freed_in_torchs_order(
    name: str, strategy: str, parameters: str
) -> None:
    case = scenario(name, strategy, parameters=parameters)
    with torch_private.fake_group(rank=0, world_size=case.world_size):
        real = Subject(FROZEN[name], case, log=True)
        for _ in range(3):
            real.step()
    events = real.meter.events or ()
    measured = in_order(delta for _, delta in events)
    assert of_program(case) == measured


@pytest.mark.parametrize(
    "strategy", [name for name in STRATEGIES if name not in ("fsdp1", "deepspeed3")]
)  # which refuse units of which parts are frozen, and frozen parameters
@pytest.mark.parametrize(("name", "attention", "frozen"), [
    ("mlp-tiny", None, ("blocks.0.*", "*.bias")),
    ("gpt-tiny", "sdpa", ("w?e.*", "blocks.0.*", "*.attn.[qk].*", "*.ln_1.*")),
])
def test_a_traced_family_with_frozen_parts_peaks_where_the_family_does(
    name: str, attention: str | None, frozen: tuple[str, ...], strategy: str
) -> None:
    length = 1 if name.startswith("mlp") else 16
    batch = Batch(micro_batch=2, sequence_length=length)
    spec = cut(
        load_preset(name, sequence_length=length, num_layers=None, attention=attention),
        frozen=frozen, unused=(),
    )
    data = batches.inputs(spec, batch, seed=0, rank=0, step=0, micro_batch=0)
    casts = STRATEGIES[strategy].casts_input
    model = trace(
        modules.build(spec, seed=0), data, dtype="bfloat16", casts_input=casts, sums_in_place=False
    )
    assert model.frozen == spec.frozen
    assert records(model, batch, name=strategy, dtype="bfloat16") == records(
        spec, batch, name=strategy, dtype="bfloat16"
    )


def test_what_is_frozen_is_known_of_a_file() -> None:
    case = FROZEN["adapters in later blocks, head"]
    model = trace(case.make, case.data())
    assert read(dump(model).encode()) == model
    assert [module.differentiates for module in model.lowered] == [False] * 3 + [True] * 3
    assert model.trained == {
        "head.weight",
        *(
            f"blocks.{i}.{projection}.{part}.weight" for i in (2, 3)
            for projection in ("query", "value") for part in ("down", "up")
        ),
    }
