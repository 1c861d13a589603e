"""A user's own module on the meta device: values of one parameter at a time, or else the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zsim
from tests.zreal.own.own_modules import Loaded, Mixed
from tests.zreal.own.test_own_scenario import OWN, STRATEGIES, scenario
from zreal.modules import modules
from zreal.modules.own.deferred import Deferred, NotDeferrableError, recording
from zreal.tracing.own_scenario import with_module
from zsim.cli.main import main


def deferred(make: Callable[[], nn.Module]) -> tuple[nn.Module, Deferred]:
    """The module that is made on the meta device, with its buffers, and what has its values."""
    values = Deferred(seed=3)
    with recording(values):
        module = make()
    values.fill_rest(module)
    values.keep_parameters(module)
    return module, values


def test_each_parameter_has_the_distribution_that_the_build_gives_it() -> None:
    module, values = deferred(Mixed)
    assert {fqn for fqn, p in module.named_parameters() if not p.is_meta} == {
        fqn for fqn, p in module.named_parameters() if p.numel() <= 1024
    }
    table = values.parameter("table.weight")
    assert float(table[0].abs().max()) == 0  # padding, set after it was drawn
    assert 0.017 < float(table[1:].std()) < 0.018  # of 0.02, cut at twice that
    assert float(table.abs().max()) <= 0.04  # truncated
    square = values.parameter("square")
    torch.testing.assert_close(square @ square.T, torch.eye(64), atol=1e-5, rtol=0)
    torch.testing.assert_close(values.parameter("doubled"), 2 * square)
    lower = values.parameter("lower")
    assert (lower.shape, lower.untyped_storage().nbytes()) == ((32, 64), 32 * 64 * 4)
    assert torch.equal(table, values.parameter("table.weight"))
    assert torch.equal(values.parameter("head.weight"), table)


def test_buffers_and_plain_tensors_are_those_of_a_whole_build() -> None:
    module, whole = deferred(Mixed)[0], Mixed()
    assert torch.equal(module.get_buffer("mask"), whole.get_buffer("mask"))
    assert torch.equal(module.cache["cos"], whole.cache["cos"])
    assert module.rates == whole.rates


@pytest.mark.parametrize(("make", "reason"), [
    (Loaded, "own has values of its own, as loaded weights have"),
    (lambda: nn.Linear(64, int(torch.ones(64, 64).sum().item())), "item"),
    (lambda: Kept(), "the module keeps a parameter in a plain attribute"),
])
def test_a_build_that_needs_values_is_no_one_for_the_meta_device(
    make: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.raises((NotDeferrableError, RuntimeError), match=reason):
        deferred(make)


class Kept(nn.Linear):
    """A layer with its weight in a list, which is registered nowhere."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.others = [nn.Parameter(torch.ones(64, 64))]


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3", "fsdp1", "ddp"])
@pytest.mark.parametrize("module", ["mixed", "loaded"])
def test_construction_is_predicted_as_it_is_done(
    module: str, strategy: str, tmp_path: Path
) -> None:
    case = zsim.load(scenario(tmp_path, STRATEGIES[strategy]))
    comparison = zsim.validate(case, against="fake", module=OWN + module)
    checks = {check.name: check for check in comparison.checks}
    assert comparison.ok
    assert checks["peak memory, construction"].relative_error == 0
    whole = comparison.measured.provenance.get("built_whole", "")
    assert ("loaded weights" in whole) == (module == "loaded")


def test_no_rank_that_shards_holds_the_whole_module() -> None:
    peaks = {
        module: zsim.validate(CASE, against="fake", module=OWN + module).measured.ranks[0]
        .phases["construction"].memory.peak_bytes
        for module in ("mixed", "loaded")
    }
    own = with_module(CASE, f"{OWN}mixed", device="cpu").model
    whole = 4 * sum(parameter.numel for parameter in own.parameters)
    assert peaks["mixed"] < 0.75 * whole < whole <= peaks["loaded"]


def test_two_byte_parameters_of_a_whole_module_are_cast_unit_by_unit() -> None:
    case = CASE.with_(precision={"parameters": "bf16", "reduce": "fp32", "master": False})
    comparison = zsim.validate(case, against="fake", module=f"{OWN}loaded_layers")
    checks = {check.name: check for check in comparison.checks}
    assert checks["peak memory, construction"].relative_error == 0
    assert checks["memory at rest"].status == "ok"


def test_the_module_of_a_rank_has_no_memory_and_the_references_has_all_values() -> None:
    model = with_module(CASE, f"{OWN}mixed", device="cpu").model
    empty, built = modules.empty(model, seed=7), modules.build(model, seed=7)
    values = modules.own_values(empty)
    assert values is not None
    for fqn, parameter in built.named_parameters():
        meta: Any = empty.get_parameter(fqn)
        assert torch.equal(values(fqn) if meta.is_meta else meta, parameter)


def test_a_whole_build_is_told_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = scenario(tmp_path, STRATEGIES["fsdp2"])
    assert main(["validate", file, "--against", "fake", "--module", f"{OWN}loaded"]) == 0
    told = "own: each rank builds the whole module, as NotDeferrableError: own has values of its"
    assert told in capsys.readouterr().err


CASE = zsim.Scenario(
    model={"preset": "gpt-tiny"}, batch={"micro_batch": 1},
    cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "fsdp2"},
)
