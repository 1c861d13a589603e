"""Dropout of attention's probabilities and of residuals in family gpt, against the real module.

Every allocation and free in order on the fake process group, and equal parameters on real ranks.
"""

from __future__ import annotations

import pytest
import torch

import zsim
from tests.zreal.agreement.test_event_order import of_program, of_torch
from zreal import torch_private
from zreal.modules import modules
from zreal.modules.numerics import batches
from zsim.errors import ScenarioError
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

SIZES = "num_layers = 2, hidden_size = 12, num_heads = 2, vocabulary = 13"
BOTH = "attention_dropout = 0.1, residual_dropout = 0.2"
BF16, AUTOCAST = 'parameters = "bf16"', 'parameters = "fp32", autocast = "bf16"'
FULL = 'activation_checkpointing = { mode = "full" }'


def scenario(
    sizes: str = BOTH, *, strategy: str = "fsdp2", precision: str = 'parameters = "fp32"',
    ranks: int = 2, more: str = "",
) -> Scenario:
    text = f"""
model = {{ family = "gpt", sizes = {{ {SIZES}, {sizes} }} }}
batch = {{ micro_batch = 2, sequence_length = 5 }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ name = "{strategy}" }}
precision = {{ {precision} }}
{more}
"""
    return parse(text.encode(), where="dropout.toml")


@pytest.mark.parametrize(("sizes", "options"), [
    (BOTH, {}),
    (f'{BOTH}, attention = "sdpa"', {"precision": BF16}),
    (BOTH, {"precision": AUTOCAST}),
    (f'{BOTH}, attention = "sdpa"', {"precision": AUTOCAST, "strategy": "ddp"}),
    ("residual_dropout = 0.5", {"strategy": "ddp", "precision": BF16}),
    ("attention_dropout = 0.5", {"strategy": "fsdp1"}),
    (BOTH, {"more": FULL}),
    (BOTH, {"more": 'frozen = ["*.attn.*", "w?e.*"]'}),
    (BOTH, {"more": 'activation_checkpointing = { mode = "selective", recompute = ["gelu"] }'}),
])
def test_every_allocation_and_free_comes_in_torchs_order(sizes, options):
    case = scenario(sizes, **options)
    assert of_program(case) == of_torch(case)


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.slow), FULL])
def test_ranks_train_as_the_reference_does(more):
    """Zeros are drawn by the tokens, in recomputation the same as before."""
    verdict = zsim.validate(scenario(more=more), against="gloo")
    checks = {check.name: check.status for check in verdict.checks}
    assert checks["numerics"] == "ok", str(verdict)
    assert checks["peak memory, steady"] == "ok"


def test_a_forward_drops_out_what_it_is_asked_for_and_nothing_else():
    losses = {}
    for name, sizes in (("none", ""), ("some", BOTH)):
        case = scenario(sizes or "residual_dropout = 0.0")
        with torch_private.fake_group(rank=0, world_size=1):
            model = modules.build(case.model, seed=1)
            ((x, targets),) = batches.micro_batches(case, rank=0, step=0, dtype="float32")
            losses[name] = [model(x, targets).item(), model(x, targets).item()]
    assert losses["none"][0] == losses["none"][1] != losses["some"][0] == losses["some"][1]


def test_a_mask_on_cuda_has_a_byte_for_each_number():
    """native_dropout keeps it; on a CPU the noise is as wide as the numbers."""
    kept = {}
    for sizes in ("residual_dropout = 0.0", "residual_dropout = 0.1"):
        program = plan(scenario(sizes, precision=BF16), device="cuda").ranks[0]
        kept[sizes] = sum(
            event.nbytes for op in program.steady for event in op.memory
            if getattr(event, "kind", "") == "activations" and ".mask" in event.buffer
        )
    masks = 2 * 2 * (2 * 5 * 12)  # blocks, dropouts in each, numbers of each
    assert kept["residual_dropout = 0.1"] - kept["residual_dropout = 0.0"] == masks


@pytest.mark.parametrize("share", ["1.0", "-0.1", "true"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ScenarioError, match="residual_dropout"):
        scenario(f"residual_dropout = {share}")


def test_dropout_takes_time():
    steps = [
        zsim.simulate(
            zsim.Scenario(
                model={"family": "gpt", "sizes": {
                    "num_layers": 4, "hidden_size": 1024, "num_heads": 8, "vocabulary": 1024,
                    "attention": "sdpa", "residual_dropout": share,
                }},
                batch={"micro_batch": 8, "sequence_length": 1024}, strategy={"name": "ddp"},
                cluster={"preset": "dgx-a100"}, precision={"parameters": "bf16"},
            )
        ).figures.step_time_ns
        for share in (0.0, 0.1)
    ]
    kernels = 2 * 4 * 2 * 5 * 8 * 1024 * 1024  # five bytes a number, in both directions
    assert steps[1] - steps[0] >= kernels / 2039e9 * 1e9


def test_torch_draws_alike_for_the_same_tokens_alone():
    case = scenario()
    with torch_private.fake_group(rank=0, world_size=1):
        model = modules.build(case.model, seed=1)
        ((x, targets),) = batches.micro_batches(case, rank=0, step=0, dtype="float32")
        first = model(x, targets)
        torch.manual_seed(12345)
        assert torch.equal(first, model(x, targets))
