"""Every strategy through every interpreter that runs it, on real gloo ranks: layout to the bit,
training within rounding."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.folders import PARITY
from zreal.executor.executor import RANKS
from zreal.modules.numerics import reference as numerics
from zreal.modules.numerics.parity import gradient_differences, largest, relative_differences
from zreal.modules.numerics.reference import Reference, ReferenceGradients, SingleProcess
from zreal.modules.rank_modules import RankModules
from zreal.observer.subjects.table import SUBJECTS
from zreal.processes.launch import launch
from zsim.cli.main import main
from zsim.models.training_options import Precision
from zsim.runs.backend import RunOptions
from zsim.runs.registry import find
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario, parse

pytestmark = pytest.mark.gloo

BOTH = [(strategy, "executor") for strategy in RANKS] + [
    (strategy, "observer") for strategy in SUBJECTS
]


def some(*taken: tuple[str, str]) -> list[Any]:
    """Each pair; those not `taken` are slow."""
    return [pair if pair in taken else pytest.param(*pair, marks=pytest.mark.slow) for pair in BOTH]


def scenario(strategy: str, *, model: str, optimizer: str, ranks: int = 3) -> Scenario:
    replicas = ", dp_replicate = 1, dp_shard = 3" if strategy in ("hsdp", "fsdp1") else ""
    text = f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 1, sequence_length = {1 if "mlp" in model else 8} }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ name = "{strategy}"{replicas} }}
optimizer = {{ {optimizer} }}
"""
    return parse(text.encode(), where="parity.toml")


def difference(case: Scenario, interpreter: str) -> float:
    """The largest relative difference of a parameter on any rank to the single-process reference.
    """
    run = find("gloo").run(case, options=RunOptions(interpreter=interpreter, all_ranks=True))
    differences = [
        rank.numerics.largest_relative_difference for rank in run.ranks if rank.numerics is not None
    ]
    assert len(differences) == case.world_size
    return max(differences)


@pytest.mark.parametrize(("strategy", "interpreter"), some(("fsdp2", "observer")))
def test_cutting_and_joining_parameters_changes_no_bit(strategy, interpreter):
    """Uneven shapes on three ranks, with a learning rate of 0: what comes back is what went in."""
    assert (
        difference(
            scenario(strategy, model="mlp-uneven", optimizer='name = "adamw", learning_rate = 0.0'),
            interpreter,
        )
        == 0.0
    )


@pytest.mark.parametrize(
    ("strategy", "interpreter"), some(("zero3", "executor"), ("hsdp", "observer"))
)
def test_tied_weights_train_as_in_one_process(strategy, interpreter):
    """SGD keeps rounding as small as it is: AdamW divides by gradients that are nearly nothing."""
    case = scenario(strategy, model="gpt-tiny", optimizer='name = "sgd", learning_rate = 0.1, '
                                                          'momentum = 0.9')
    head, embedding = case.model.modules[-1].operators, case.model.modules[0].operators
    assert {op.weight for op in head} & {op.weight for op in embedding if op.kind == "embedding"}

    assert 0 < difference(case, interpreter) < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2-uneven-4",
        pytest.param("hsdp-gpt-2x2", marks=pytest.mark.slow),
        "fsdp1-gpt-2x2",
        pytest.param("fsdp1-gpt-2-parts", marks=pytest.mark.slow),
        pytest.param("zero-redundancy-gpt-4", marks=pytest.mark.slow),
        "ddp-llama-2-bf16",
        pytest.param("zero3-uneven-4", marks=pytest.mark.slow),
        pytest.param("zero2-gpt-4-accumulate-every", marks=pytest.mark.slow),
    ],
)
def test_a_scenario_of_the_project_agrees_with_its_real_run(name, capsys):
    assert main(["validate", str(PARITY / f"{name}.toml"), "--json"]) == 0

    checks: dict[str, dict[str, Any]] = {
        c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"]
    }
    exact = {
        key: checks[key]["detail"].startswith("exact") for key in ("collective order", "bytes")
    }
    assert exact == {"collective order": True, "bytes": True}
    times = ("step time", "exposed communication", "time by unit")
    assert {key: check["status"] for key, check in checks.items() if key not in times} == {
        "collective order": "ok",
        "bytes": "ok",
        "groups": "ok",
        "peak memory, construction": "ok",
        "peak memory, first": "ok",
        "peak memory, steady": "ok",
        "memory at rest": "ok",
        "memory of parts": "ok",
        "memory by kind": "ok",
        "numerics": "ok",
    }


def test_a_reduce_scatter_and_an_all_gather_give_what_an_all_reduce_gives():
    """Equality holds on every rank, bit by bit: gloo adds in the same order in both."""
    results = launch(
        "tests.zreal.processes.rank_bodies:reduced_both_ways", {"numels": [3, 6, 33, 3000]},
        world_size=3,
    )
    assert results == [{"equal": [True] * 4, "nonzero": True}] * 3


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_reduce_scatter_of_gloo_takes_a_copy_of_its_input_and_no_other_collective_takes_anything(
    world_size
):
    results = launch(
        "tests.zreal.processes.rank_bodies:scratch_of_collectives", {"numel": 100},
        world_size=world_size,
    )
    assert (
        results
        == [
            {
                "all_gather": [], "reduce_scatter": [400 * world_size], "all_reduce": [],
                "broadcast": [],
            }
        ]
        * world_size
    )


def reference_of(parameters: dict[str, torch.Tensor], *, moved: float) -> Reference:
    """A reference whose every element training has moved by `moved`."""
    initial = {name: tensor - moved for name, tensor in parameters.items()}
    return Reference(losses=(1.0,), initial=initial, parameters=parameters)


CANCELLING = """
model = { family = "mlp", sizes = { dims = [3, 1, 5], hidden = 7, num_classes = 2 } }
batch = { micro_batch = 2 }
cluster = { preset = "cpu-gloo", ranks = 4 }
strategy = { name = "ddp" }
precision = { parameters = "bf16", reduce = "fp32" }
optimizer = { name = "adamw", implementation = "fused" }
"""


def furthest(parameters: dict[str, torch.Tensor], reference: Reference) -> float:
    return largest(relative_differences(parameters, reference))[0]


def furthest_gradient(
    gradients: dict[str, torch.Tensor], want: dict[str, torch.Tensor], **rounding: float
) -> float:
    expected = ReferenceGradients(whole=want, rounding=rounding)
    return largest(gradient_differences(gradients, expected))[0]


@pytest.mark.quality
@pytest.mark.parametrize("index", [0, -1])
def test_one_changed_element_is_a_difference(index):
    whole = {"weight": torch.linspace(1, 2, 12).view(3, 4), "bias": torch.zeros(3)}
    changed = {name: tensor.clone() for name, tensor in whole.items()}
    changed["weight"].view(-1)[index] += 1e-3
    reference = reference_of(whole, moved=1e-3)
    assert furthest(whole, reference) == 0.0
    assert furthest(changed, reference) == pytest.approx(12**-0.5, rel=1e-3)


@pytest.mark.quality
def test_steps_that_the_dtype_rounds_away_are_measured_by_its_rounding():
    """A bf16 weight of 1 without a master copy does not move by 0.001. One that rounds up the other
    way is no error of training."""
    whole = {"weight": torch.ones(4), "bias": torch.ones(4)}
    reference = replace(reference_of(whole, moved=1e-5), rounding=5 * 2**-7)
    rounded = whole | {"bias": torch.tensor([1.0, 1.0, 1.0, 1 + 2**-7])}
    assert furthest(rounded, reference) == pytest.approx(1 / 10)
    assert furthest(rounded, replace(reference, rounding=0.0)) > 100
    still = replace(reference, initial=whole)
    assert furthest(rounded, still) == float("inf"), "where nothing moves, nothing may differ"


@pytest.mark.quality
def test_a_gradient_that_is_half_or_missing_or_not_finite_is_as_far_away():
    want = {"weight": torch.linspace(1, 2, 12).view(3, 4), "bias": torch.full((4,), 1e-6)}
    assert furthest_gradient(want, want) == 0.0
    halves = {name: gradient / 2 for name, gradient in want.items()}
    assert furthest_gradient(halves, want) == pytest.approx(0.5)
    assert furthest_gradient({"bias": want["bias"]}, want) == pytest.approx(1.0)
    assert furthest_gradient(want | {"frozen": torch.ones(4)}, want) > 0.5
    assert furthest_gradient(want | {"bias": torch.zeros(4)}, want) < 1e-5, (
        "measured by what is average"
    )
    assert furthest_gradient(want | {"bias": torch.full((4,), torch.nan)}, want) == float("inf")
    assert furthest_gradient({}, {}) == 0.0


def test_what_differs_most_is_named():
    want = {"weight": torch.ones(4), "bias": torch.ones(4)}
    differences = gradient_differences(
        want | {"bias": torch.zeros(4)}, ReferenceGradients(whole=want, rounding={})
    )
    assert largest(differences) == (pytest.approx(1.0), "bias")
    whole = {"weight": torch.ones(3), "bias": torch.zeros(3)}
    assert largest(
        relative_differences({"weight": whole["weight"]}, reference_of(whole, moved=1e-3))
    ) == (float("inf"), "bias")


def test_a_gradient_whose_parts_cancel_may_be_as_far_off_as_they_round_and_no_farther():
    want = {"weight": torch.ones(4), "bias": torch.full((4,), 0.01)}
    apart = want | {"weight": torch.full((4,), 1.2)}
    assert furthest_gradient(apart, want) == pytest.approx(0.2)
    assert furthest_gradient(apart, want, weight=0.4) == pytest.approx(0.0, abs=1e-6)
    assert furthest_gradient(apart, want, weight=0.2) == pytest.approx(0.1)
    assert furthest_gradient(apart, want, bias=0.4) == pytest.approx(0.2)


def test_ranks_whose_gradients_nearly_cancel_agree_in_two_bytes():
    """Four ranks make gradients that are up to a hundred times their sum, each of them rounded to a
    thousandth."""
    case = parse(CANCELLING.encode(), where="cancelling.toml")
    process = SingleProcess(case)
    gradients = process.gradients_at(process.train(5).parameters)
    sizes = {name: float(gradient.norm()) for name, gradient in gradients.whole.items()}
    assert max(gradients.rounding[name] / sizes[name] for name in sizes) > 0.2
    assert min(gradients.rounding[name] / sizes[name] for name in sizes) < 0.02


@pytest.mark.quality
@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_the_reference_gradient_is_that_of_all_ranks_and_micro_batches_clipped(clip_norm):
    """Twice the ranks on the same data per rank would halve nothing: means over ranks, sums over
    micro-batches."""
    clip = f", clip_norm = {clip_norm}" if clip_norm else ""
    case = scenario("ddp", model="mlp-tiny", optimizer=f'name = "sgd", learning_rate = 0.1, '
                                                       f'weight_decay = 0.0{clip}', ranks=2)
    done = SingleProcess(case).train(1)
    gradients = SingleProcess(case).gradients_at(done.initial).whole
    assert set(gradients) == set(done.parameters)
    for name, before in done.initial.items():
        torch.testing.assert_close(before - 0.1 * gradients[name], done.parameters[name])


@pytest.mark.quality
def test_half_of_every_gradient_is_seen_even_in_two_bytes_under_adamw(monkeypatch, capsys):
    """AdamW divides the scale of gradients out: parameters end up within the bound of two bytes all
    the same."""

    def halved(target: str, arguments: dict[str, Any], **more: Any) -> list[Any]:
        assert target == "zreal.rank.run:launched_rank"
        return launch("tests.zreal.processes.rank_bodies:with_half_gradients", arguments, **more)

    monkeypatch.setattr("zreal.processes.launch.launch", halved)
    assert main(["validate", str(PARITY / "zero3-llama-4-bf16.toml"), "--json"]) == 1

    checks = json.loads(capsys.readouterr().out)["checks"]
    check = next(entry for entry in checks if entry["name"] == "numerics")
    assert check["status"] == "failed"
    assert check["measured"] < 0.2
    assert "gradients 0.49 of their size, at most 0.05" in check["detail"]


@pytest.mark.quality
def test_an_untrained_model_is_as_far_from_the_reference_as_training_went():
    whole = {"weight": torch.linspace(1, 2, 12).view(3, 4), "bias": torch.zeros(3)}
    reference = reference_of(whole, moved=1e-3)
    assert furthest(reference.initial, reference) == pytest.approx(1.0)


@pytest.mark.quality
def test_a_parameter_without_a_direction_may_be_where_random_steps_take_it_and_no_farther():
    whole = {"weight": torch.ones(3), "bias": torch.zeros(3)}
    reference = replace(
        reference_of(whole, moved=1e-3), directionless={"bias": torch.ones(3, dtype=torch.bool)}
    )
    assert furthest(whole | {"bias": torch.full((3,), -2e-3)}, reference) == 0.0
    assert furthest(whole | {"bias": torch.full((3,), -3e-3)}, reference) == pytest.approx(3.0)
    assert furthest(whole | {"bias": torch.full((3,), torch.nan)}, reference) == float("inf")
    assert furthest(whole | {"weight": torch.full((3,), 1.002)}, reference) == pytest.approx(
        2.0, rel=1e-3
    )


@pytest.mark.quality
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_biases_of_keys_are_the_parameters_without_a_direction(dtype):
    """Keys have biases in the gpt family; in llama no key has one."""
    gpt, llama = (
        scenario("zero3", model=f"{name}-tiny", optimizer='name = "adamw"')
        for name in ("gpt", "llama")
    )
    precision = Precision(parameters=dtype, reduce=dtype)

    def random(case: Scenario) -> set[str]:
        directionless = SingleProcess(derived(case, precision=precision)).train(1).directionless
        return {name for name, elements in directionless.items() if elements.all()}

    assert random(gpt) == {f"blocks.{i}.attn.k.bias" for i in range(4)}
    assert random(llama) == set()


def test_two_byte_training_with_accumulation_agrees_whatever_keys_biases_do(capsys, tmp_path):
    path = tmp_path / "noise.toml"
    path.write_text("""
model = { preset = "gpt-tiny" }
batch = { micro_batch = 1, sequence_length = 8, accumulation = 3 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "zero3", sync = "every" }
precision = { parameters = "bf16", reduce = "bf16" }
optimizer = { name = "adamw" }
""")
    assert main(["validate", str(path)]) == 0
    assert "agree" in capsys.readouterr().out


@pytest.mark.quality
def test_where_nothing_moves_only_equality_agrees():
    whole = {"weight": torch.ones(3)}
    reference = reference_of(whole, moved=0.0)
    assert furthest(whole, reference) == 0.0
    assert furthest({"weight": torch.full((3,), 1.0001)}, reference) == float("inf")


@pytest.mark.quality
def test_a_missing_parameter_is_no_agreement():
    whole = {"weight": torch.ones(3), "bias": torch.ones(3)}
    reference = reference_of(whole, moved=1e-3)
    assert furthest({"weight": torch.ones(3)}, reference) == float("inf")
    assert furthest(whole | {"bias": torch.full((3,), float("nan"))}, reference) == float("inf")


def test_an_element_without_a_direction_in_any_one_step_has_none():
    """A gradient that is far from its exact value in the first step, and right in the second."""
    case = scenario("zero3", model="mlp-tiny", optimizer='name = "adamw"')
    ranks = RankModules(scenario=case, dtype="float32")
    noise, model = numerics._Noise(replace(ranks, wide=True)), ranks.first
    for step, wrong in ((0, 7.0), (1, 0.0)):
        model.zero_grad()
        numerics._accumulate(ranks, step=step)
        name, parameter = next(iter(model.named_parameters()))
        assert parameter.grad is not None
        parameter.grad.view(-1)[3] += wrong
        noise.look(model, step=step)
    assert noise.elements[name].view(-1)[3]
    assert int(noise.elements[name].sum()) < noise.elements[name].numel() // 2
