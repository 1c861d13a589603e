"""What a row of each source becomes, as `zsim accuracy --explain` shows it: the scenario whole, and
all that was assumed.

To write the golden files anew: ZSIM_UPDATE_GOLDEN=1 pytest
tests/zsim/calibration/test_explained_rows.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.folders import GOLDEN
from tests.zsim.calibration.tables.test_measurements import FMS, FOUNDRY, MEGATRON, NANOTRON, TITAN
from tests.zsim.calibration.tables.test_row_checks import step
from zsim.calibration import explain_row

EXPLAINED = GOLDEN / "explained"
NODES = {"n_gpus": "64", "dp": "64", "nodes": "8"}
ROWS: dict[str, dict[str, str]] = {
    "llm-foundry": FOUNDRY,
    "llm-foundry-checkpointed-fp8": FOUNDRY
    | {
        "activation_checkpointing": "True", "mp_mode": "DEFAULT", "gpu": "h100_80gb",
        "precision": "amp_fp8",
    },
    "llm-foundry-grad-op": FOUNDRY
    | {"sharding": "SHARD_GRAD_OP", "mp_mode": "FULL", "attn_impl": "torch"}, "vtrain": MEGATRON,
    "vtrain-zero1": MEGATRON | {"zero_stage": "1", "activation_checkpointing": "none"},
    "vtrain-nodes-flash": MEGATRON
    | {
        "n_gpus": "64", "dp": "64", "inter_node_gbps_per_node": "800",
        "attention": "flash_attention_2",
    },
    "torchtitan": TITAN,
    "torchtitan-float8": TITAN | {"float8": "tensorwise", "technique": "FSDP full shard"},
    "torchtitan-hsdp-eager": TITAN
    | {
        "n_gpus": "64", "dp_shard": "", "technique": "HSDP", "torch_compile": "False",
        "tokens_per_s_per_gpu": "5700",
    },
    "nanotron": NANOTRON, "nanotron-zero1-shared": NANOTRON | NODES | {"zero_stage": "1"},
    "nanotron-zero3-own-network": NANOTRON
    | NODES
    | {"zero_stage": "3", "interconnect": "InfiniBand 3200 Gbps/node, dedicated"}, "fms-fsdp": FMS,
    "fms-fsdp-compiled": FMS
    | {"torch_compile": "True", "attention": "SDPA flash v2", "activation_checkpointing": "p=1/3"},
}
"""Rows as tests elsewhere have them, and what most changes how they run."""


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_explained_as_its_golden_text(tmp_path: Path, name: str) -> None:
    text = explain_row.text(step(tmp_path, ROWS[name]), as_json=False)
    file = EXPLAINED / f"{name}.txt"
    if os.environ.get("ZSIM_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_no_golden_text_is_left_of_a_row_that_is_gone() -> None:
    assert {file.stem for file in EXPLAINED.iterdir()} == set(ROWS)
