"""Tensors of an optimizer, kept and temporary, by implementation and device, after torch.optim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zsim.ir.ops import Alloc, Free
from zsim.models.training_options import Optimizer
from zsim.strategies.building.optimizers import kernels, states, step_memory, step_nbytes


@pytest.mark.parametrize(("implementation", "device", "nbytes"), [
    ("foreach", "cpu", 4), ("fused", "cpu", 4), ("foreach", "cuda", 0), ("for-loop", "cuda", 0),
    ("fused", "cuda", 4),
])
def test_the_step_counter_is_on_the_device_where_it_is_a_cpu_or_the_step_is_fused(
    implementation, device, nbytes
):
    assert step_nbytes(Optimizer(implementation=implementation), device=device) == nbytes


@pytest.mark.parametrize(("optimizer", "names"), [
    (Optimizer(), ["step", "exp_avg", "exp_avg_sq"]),
    (Optimizer(name="sgd", momentum=0.9), ["momentum_buffer"]), (Optimizer(name="sgd"), []),
])
def test_states_are_made_per_parameter_and_an_empty_one_has_a_counter_alone(optimizer, names):
    made = states([3, 0], optimizer=optimizer, dtype="float32", device="cpu", owner="o")
    full = [(f"o.0.{name}", 4 if name == "step" else 12) for name in names]
    empty = [("o.1.step", 4)] if "step" in names else []
    assert [(buffer.buffer, buffer.nbytes) for buffer in made] == full + empty


@pytest.mark.parametrize("implementation", ["foreach", "for-loop", "fused"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_temporaries_are_gone_when_the_step_ends(name, implementation, device):
    live = set()
    for event in step_memory(
        [3, 0, 5], optimizer=Optimizer(name=name, implementation=implementation, momentum=0.9),
        dtype="float32", device=device, owner="o",
    ):
        (live.add if isinstance(event, Alloc) else live.remove)(event.buffer)
    assert live == set()


def test_states_have_the_bytes_of_their_parameters_dtype():
    made = states([3], optimizer=Optimizer(), dtype="bfloat16", device="cuda", owner="o")
    assert [buffer.nbytes for buffer in made] == [6, 6]


def test_a_fused_step_makes_nothing():
    assert step_memory(
        [3], optimizer=Optimizer(implementation="fused"), dtype="float32", device="cpu", owner="o",
    ) == ()


def test_foreach_adamw_adds_one_tensor_to_all_counters_that_are_in_host_memory():
    def made(numels, device, **settings):
        return step_memory(
            numels, optimizer=Optimizer(**settings), dtype="float32", device=device, owner="o"
        )

    tensor = (Alloc("o.one", "temporaries", 4), Free("o.one"))
    assert made([0, 0], "cpu") == tensor
    assert made([3], "cpu")[:2] == tensor
    assert made([3], "cuda") == made([3], "cpu")[2:]
    assert (
        made([], "cpu")
        == made([0], "cpu", name="sgd")
        == made([0], "cpu", implementation="for-loop")
        == ()
    )


def test_an_empty_parameter_lets_the_quotient_before_it_go():
    def frees(numels):
        events = step_memory(
            numels, optimizer=Optimizer(implementation="for-loop"), dtype="float32", device="cpu",
            owner="o",
        )
        return ["+" if isinstance(event, Alloc) else event.buffer for event in events]

    assert frees([3, 2]) == [
        "+", "+", "o.0.root", "+", "+", "o.1.root", "o.0.quotient", "o.1.quotient"
    ]
    assert frees([3, 0, 2]) == [
        "+", "+", "o.0.root", "o.0.quotient", "+", "+", "o.2.root", "o.2.quotient"
    ]
    assert frees([3, 0]) == ["+", "+", "o.0.root", "o.0.quotient"]


@pytest.mark.parametrize("settings", [
    Optimizer(), Optimizer(weight_decay=0.0), Optimizer(name="sgd", momentum=0.9),
    Optimizer(name="sgd"),
])
def test_a_loop_over_parameters_moves_the_same_bytes_in_a_kernel_for_each_call_and_tensor(settings):
    numels = (6, 0, 1_000_000)
    together, loop = (
        kernels(
            numels, optimizer=replace(settings, implementation=how), dtype="float32", device="cuda"
        )
        for how in ("foreach", "for-loop")
    )
    assert len(together) == 1
    assert sum(kernel.nbytes for kernel in loop) == together[0].nbytes
    calls = kernels(
        (1,), optimizer=replace(settings, implementation="for-loop"), dtype="float32", device="cuda"
    )
    assert len(loop) == len(numels) * len(calls) > len(numels)
