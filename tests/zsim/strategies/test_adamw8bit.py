"""AdamW8bit of torchao: bytes of its states, and where it is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from zsim.memory.waterfall import formula_bytes
from zsim.models.training_options import Optimizer
from zsim.strategies.building.optimizers import kernels, states, step_memory

EIGHT = Optimizer(name="adamw8bit")
AXES = {"hsdp": {"dp_replicate": 2, "dp_shard": 4}}
NUMELS = st.one_of(st.integers(0, 20_000), st.integers(0, 100).map(lambda n: 256 * n))


def nbytes(numel: int) -> int:
    made = states([numel], optimizer=EIGHT, dtype="float32", device="cuda", owner="p")
    return sum(event.nbytes for event in made)


@given(NUMELS)
def test_states_have_the_bytes_of_torchao_s(numel: int) -> None:
    """torchao runs where it is installed; 0.18 was on 2026-11-26."""
    torch = pytest.importorskip("torch")
    optim = pytest.importorskip("torchao.optim")
    parameter = torch.nn.Parameter(torch.zeros(numel))
    made = [optim.AdamW8bit([parameter])._new_buffer(parameter, signed) for signed in (True, False)]
    parts = [
        [getattr(each, name) for name in getattr(each, "tensor_attrs", ())] or [each]
        for each in made
    ]
    assert nbytes(numel) == sum(part.nbytes for state in parts for part in state)


@given(NUMELS)
def test_large_whole_blocks_take_two_bytes_and_a_32nd_an_element(numel: int) -> None:
    is_quantized = numel >= 4096 and numel % 256 == 0
    assert nbytes(numel) == (2 * numel + 8 * numel // 256 + 2048 if is_quantized else 8 * numel)


def test_a_step_is_a_pass_for_each_tensor_without_temporaries() -> None:
    numels = [8192, 0, 100]
    asked = {"optimizer": EIGHT, "dtype": "float32", "device": "cuda"}
    assert step_memory(numels, owner="p", **asked) == ()
    assert [kernel.nbytes for kernel in kernels(numels, **asked)] == [
        8192 * 16 + 8192 * 4 // 256 * 4, 100 * 28,
    ]


def llama(strategy: str, **more: object) -> zsim.Scenario:
    return zsim.Scenario(
        model={"preset": "llama-3-8b", "num_layers": 2},
        batch={"micro_batch": 1, "sequence_length": 2048}, cluster={"preset": "dgx-h100"},
        strategy={"name": strategy, **AXES.get(strategy, {})}, precision={"parameters": "bf16"},
        optimizer={"name": "adamw8bit", **more},
    )


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp", "fsdp1", "ddp", "zero1", "zero2", "zero3"])
def test_states_shrink_to_one_byte_each(strategy: str) -> None:
    made, usual = (
        zsim.simulate(each).record.ranks[0].phases["steady"].memory.held["optimizer_states"]
        for each in (llama(strategy), llama(strategy).with_(optimizer={"name": "adamw"}))
    )
    share = {"ddp": 2 / 4, "zero1": 6 / 12, "zero2": 6 / 12, "zero3": 6 / 12}.get(strategy, 2 / 8)
    assert made / usual == pytest.approx(share, abs=0.01)
    assert formula_bytes(llama(strategy)) < formula_bytes(
        llama(strategy).with_(optimizer={"name": "adamw"})
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: llama("fsdp2", momentum=0.9),
        lambda: llama("fsdp2", implementation="fused"),
        lambda: llama("deepspeed2"),
        lambda: llama("zero2").with_(offload={"optimizer": "cpu"}),
        lambda: llama("fsdp2").with_(strategy={"offload": True}),
    ],
)
def test_what_it_cannot_do_is_refused(make) -> None:
    with pytest.raises(zsim.ScenarioError, match="optimizer"):
        make()
