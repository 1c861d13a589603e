"""`zreal.ZeRO` on two gloo ranks: a user's loop does what the Program says, and trains as one
process; what it refuses, and why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zreal
from tests.support.cases.sampling import one_in
from tests.zreal.zero.zero_ranks import MODULES, Perceptron
from zreal import torch_private
from zreal.processes.launch import launch
from zsim.errors import ArgumentError, ZsimError
from zsim.ir.buffers import role_of

BODIES = "tests.zreal.zero.zero_ranks:"
TOLERANCE = 1e-6
"""Relative to the movement of a parameter, as in tests of the executor."""


def on_ranks(body: str, world_size: int = 2, **arguments: Any) -> list[Any]:
    """Return what each of two gloo ranks, or more, returns."""
    return launch(f"{BODIES}{body}", arguments, world_size=world_size)


@pytest.mark.gloo
@pytest.mark.parametrize(("name", "stage"), one_in(3, [*itertools.product(MODULES, (3, 1, 2))]))
def test_a_users_loop_does_what_the_program_says_and_trains_as_one_process(
    name: str, stage: int
) -> None:
    for rank in on_ranks("trained", module=name, stage=stage):
        assert rank["differences"] == []
        assert rank["relative"] < TOLERANCE


@pytest.mark.gloo
@pytest.mark.parametrize("choice", [
    {"module": "encoder", "stage": 3, "accumulation": 2},
    pytest.param(
        {"module": "perceptron", "stage": 1, "accumulation": 3}, marks=pytest.mark.slow
    ),
    {"module": "convolutions", "stage": 2, "clip_norm": 0.5},
])
def test_micro_batches_and_clipping_are_in_the_program(choice: dict[str, Any]) -> None:
    """SGD, since AdamW moves a key's bias, whose gradient is rounding alone, in any direction."""
    for rank in on_ranks("trained", optimizer="sgd", **choice):
        assert rank["differences"] == []
        assert rank["relative"] < 10 * TOLERANCE  # sums of micro-batches are made in another order


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [
    3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow),
])
def test_a_mesh_of_two_dims_shards_over_the_last_and_trains_as_one_process(stage: int) -> None:
    ranks = on_ranks(
        "trained", 4, module="perceptron", stage=stage, accumulation=2, clip_norm=0.5, shards=2,
        optimizer="sgd", grouped=True,
    )
    assert len(ranks) == 4
    for rank in ranks:
        assert rank["differences"] == []
        assert rank["relative"] < 10 * TOLERANCE  # as above


@pytest.mark.parametrize(("shape", "message"), [
    ((1, 1, 2), "mesh: expected one or two dims over all 2 ranks, found a mesh of 1 x 1 x 2"),
    ((1,), "mesh: expected one or two dims over all 2 ranks, found a mesh of 1"),
])
def test_other_meshes_are_refused(alone: None, shape: tuple[int, ...], message: str) -> None:
    ranks = torch.arange(math.prod(shape)).view(shape)
    mesh = DeviceMesh("cpu", ranks, _init_backend=math.prod(shape) > 1)
    model = Perceptron()
    with pytest.raises(ArgumentError) as refusal:
        zreal.ZeRO(model, sgd(model), mesh=mesh)
    assert str(refusal.value).startswith(message)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", one_in(2, [3, 1]))
def test_each_param_group_of_the_optimizer_keeps_its_own_settings(stage: int) -> None:
    for rank in on_ranks("trained", module="perceptron", stage=stage, grouped=True):
        assert rank["relative"] < TOLERANCE


@pytest.mark.gloo
def test_an_evaluation_between_steps_sees_the_whole_module_and_schedules_hold() -> None:
    for rank in on_ranks("trained", module="convolutions", stage=3, evaluates=True):
        assert rank["relative"] < TOLERANCE
        assert len(rank["losses"]) == 5
        for sharded, whole in rank["losses"]:
            assert sharded == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", one_in(3, [1, 2, 3]))
def test_parameters_of_two_bytes_are_what_stepped_copies_of_four_are(stage: int) -> None:
    """Exact, as two gradients have one sum in any order."""
    assert on_ranks("master_copies", stage=stage) == [[], []]


@pytest.mark.gloo
def test_ranks_that_start_from_other_values_are_refused() -> None:
    messages = on_ranks("refused")
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "module: expected the same parameters on every rank, found others on rank 1 than on rank "
        "0; seed every rank alike"
    )


@pytest.mark.gloo
def test_a_module_on_the_meta_device_is_never_whole_and_has_the_state_of_rank_0() -> None:
    for rank in on_ranks("from_meta", state=True):
        assert rank["peak"] < 0.85 * rank["whole"]
        assert rank["same"] == rank["names"]
        assert rank["tied"]
        assert rank["states"][0] == 0 < rank["states"][1]


@pytest.mark.gloo
def test_a_module_on_the_meta_device_without_a_state_is_reset() -> None:
    for rank in on_ranks("from_meta", state=False):
        assert rank["finite"]
        assert "embedding.weight" not in rank["same"]


@pytest.mark.gloo
def test_the_readmes_example_trains() -> None:
    assert on_ranks("readme_example")[1] == sorted(
        f"layers.{i}.{name}" for i in range(4) for name in ("weight", "bias")
    )


@pytest.fixture
def alone() -> Iterator[None]:
    """A fake process group of two ranks."""
    with torch_private.fake_group(rank=0, world_size=2):
        yield


def hooked() -> nn.Module:
    """A module with a hook that sees gradients."""
    model = Perceptron()
    model.head.register_full_backward_hook(lambda *_: None)
    return model


def watched() -> nn.Module:
    """A module with a hook on a parameter."""
    model = Perceptron()
    model.head.weight.register_hook(lambda gradient: gradient)
    return model


class Bare(nn.Module):
    """A parameter that nothing resets."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


def bare() -> nn.Module:
    """A module on the meta device that cannot be made real."""
    with torch.device("meta"):
        return Bare()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that nothing is wrong with."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(("make", "optimize", "message"), [
    (hooked, sgd, "head: expected a module without backward hooks"),
    (watched, sgd, "head.weight: expected a parameter without hooks"),
    (Perceptron, lambda m: torch.optim.LBFGS(m.parameters()),
     "optimizer: expected torch's SGD, Adam, AdamW, found LBFGS"),
    (Perceptron, lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
     "optimizer amsgrad: expected False"),
    (Perceptron, lambda m: sgd(m.head),
     "optimizer: expected every parameter that requires a gradient, found none of layers.0"),
    (lambda: nn.parallel.DistributedDataParallel(Perceptron()), sgd,
     "DistributedDataParallel: expected a plain module"),
    (lambda: torch.distributed.fsdp.fully_shard(Perceptron()), sgd,
     "FSDPPerceptron: expected a plain module"),
    (bare, sgd,
     "gain: expected a module that can be made on the meta device, found Bare, which has no "
     "reset_parameters"),
])
def test_what_cannot_be_trained_is_refused_by_name(
    alone: None, make: Callable[[], nn.Module],
    optimize: Callable[[nn.Module], torch.optim.Optimizer], message: str,
) -> None:
    model = make()
    with pytest.raises(ArgumentError) as refusal:
        zreal.ZeRO(model, optimize(model), stage=2)
    assert str(refusal.value).startswith(message)


def test_without_a_process_group_the_error_says_how_to_make_one() -> None:
    model = Perceptron()
    with pytest.raises(ArgumentError, match="init_process_group"):
        zreal.ZeRO(model, sgd(model))


def one_forward(model: nn.Module) -> Tensor:
    """The loss of one batch."""
    loss: Tensor = model(torch.randn(4, 16)).sum()
    return loss


def test_a_loop_out_of_order_is_told_what_comes_next(alone: None) -> None:
    model = Perceptron()
    optimizer = sgd(model)
    zero = zreal.ZeRO(model, optimizer, stage=2)
    with pytest.raises(ArgumentError, match="expected a forward first"):
        zero.step()
    zero.zero_grad()
    loss = one_forward(model)
    with pytest.raises(ArgumentError, match=r"found zero.step\(\) in the backward"):
        zero.step()
    with pytest.raises(ArgumentError, match="found a forward in the backward"):
        one_forward(model)
    loss.backward()
    with pytest.raises(ArgumentError, match=r"expected zero.step\(\)"):
        optimizer.step()
    zero.step()
    with pytest.raises(ArgumentError, match="found a forward in the zero_grad"):
        one_forward(model)
    zero.zero_grad()
    one_forward(model).backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "reads",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model: model.head.weight.grad.norm(),
    ],
)
def test_whoever_reads_gradients_of_which_there_are_shards_is_told_of_clip_norm(
    alone: None, stage: Literal[1, 2, 3], reads: Callable[[Any], object]
) -> None:
    model = Perceptron()
    zero = zreal.ZeRO(model, sgd(model), stage=stage, accumulation=2)
    for ends in (zero.step, zero.zero_grad):  # a step, and one that is dropped
        for _ in range(2):  # after each micro-batch
            one_forward(model).backward()
            assert repr(model.head.weight.grad) == "<sharded by zreal.ZeRO>"
            message = r"parameter.grad .* clip by clip_norm= of zreal"
            with pytest.raises(ArgumentError, match=message):
                reads(model)
        ends()
        zero.zero_grad()
        assert [p.grad for p in model.parameters()] == [None] * 10


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_has_shards_of_gradients_alone_when_backward_returns(
    alone: None, stage: Literal[2, 3]
) -> None:
    model = Perceptron()
    zero = zreal.ZeRO(model, sgd(model), stage=stage)
    one_forward(model).backward()
    roles = {role_of(name) for name in zero.rank.buffers.live}
    assert roles >= {"gradient_shard"}
    assert "gradients" not in roles


class Fickle(Perceptron):
    """A perceptron that may leave its second layer out."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if self.skips and index == 1 else layer(x).relu()
        head: Tensor = self.head(x)
        return head


def test_a_forward_that_takes_another_way_is_refused(alone: None) -> None:
    model = Fickle()
    zero = zreal.ZeRO(model, sgd(model), stage=3)
    one_forward(model).backward()
    zero.step()
    zero.zero_grad()
    model.skips = True
    with pytest.raises(ZsimError, match=r"expected layers.1, as in the first forward"):
        one_forward(model)
