"""The text form: golden Programs of every strategy at 3 units × 2 ranks, or 2 × 2, and back again
to the last field.

To write the golden files anew: ZSIM_UPDATE_GOLDEN=1 pytest tests/zsim/ir/test_program_text.py
"""

from __future__ import annotations

import os

import pytest

from tests.support.folders import GOLDEN
from zsim.errors import ProgramError, ScenarioError
from zsim.ir.program import parse
from zsim.ir.text import parse_op
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.scenario.scenario import parse as parse_scenario

CASES = {
    "single": 'name = "single"', "ddp": 'name = "ddp"',
    "zero1_reduce_scatter": 'name = "zero1", form = "reduce_scatter"',
    "zero1_all_reduce": 'name = "zero1", form = "all_reduce"', "zero2": 'name = "zero2"',
    "zero3": 'name = "zero3", lookahead = 1', "zero3_lookahead_2": 'name = "zero3", lookahead = 2',
    "zero3_persistence": 'name = "zero3", persistence_threshold = 130',
    "zero3_hybrid": 'name = "zero3", zero2_threshold = 400',
    "fsdp2": 'name = "fsdp2"', "hsdp": 'name = "hsdp", dp_replicate = 2, dp_shard = 1',
    "fsdp1": 'name = "fsdp1", dp_shard = 2',
    "zero2_in_groups": 'name = "zero2", dp_replicate = 2, dp_shard = 2',
    "zero_redundancy": 'name = "zero_redundancy"',
    "deepspeed1": 'name = "deepspeed1", reduce_bucket_size = 3000',
    "deepspeed2": 'name = "deepspeed2", reduce_bucket_size = 3000',
    "deepspeed3": 'name = "deepspeed3", reduce_bucket_size = 300, '
                  'stage3_prefetch_bucket_size = 600, stage3_param_persistence_threshold = 20',
    "deepspeed2_overlapped": 'name = "deepspeed2", reduce_bucket_size = 3000, overlap_comm = true',
}
RANKS = {"single": 1, "zero2_in_groups": 4}


def scenario(
    strategy: str, *, optimizer: str = 'name = "adamw"', ranks: int = 2
) -> Scenario:
    text = f"""
model = {{ preset = "mlp-tiny", num_layers = 2 }}
batch = {{ micro_batch = 2 }}
cluster = {{ preset = "cpu-gloo", ranks = {ranks} }}
strategy = {{ {strategy} }}
optimizer = {{ {optimizer} }}
"""
    return parse_scenario(text.encode(), where="golden.toml")


@pytest.mark.parametrize("name", CASES)
def test_a_program_reads_as_its_golden_text(name: str) -> None:
    text = str(plan(scenario(CASES[name], ranks=RANKS.get(name, 2)), device="cpu"))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("ZSIM_UPDATE_GOLDEN"):
        file.write_text(text)

    assert text == file.read_text()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_program_parses_back_to_the_last_field(name: str, device: str) -> None:
    program = plan(scenario(CASES[name], ranks=RANKS.get(name, 2)), device=device)

    assert parse(str(program)) == program


@pytest.mark.parametrize(
    "line", ["", "x", "    1  fly  blocks.0  compute", "    1  forward  a  compute | nonsense"]
)
def test_a_damaged_line_is_named(line: str) -> None:
    with pytest.raises(ProgramError, match="line 7: expected"):
        parse_op(line, number=7)


def test_fused_sgd_under_fully_shard_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(ScenarioError, match="no fused SGD for sharded parameters"):
        plan(
            scenario(CASES["fsdp2"], optimizer='name = "sgd", implementation = "fused"'),
            device="cpu",
        )
