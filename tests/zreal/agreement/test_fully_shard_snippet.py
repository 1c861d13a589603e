"""The exported Python module shards a real model as the scenario's Program says: the same
collectives of the same bytes, in the same order."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import pytest

from tests.support.folders import PARITY
from zreal import torch_private
from zreal.meters.collectives import CollectiveRecorder
from zreal.modules.modules import build
from zreal.modules.numerics.batches import inputs
from zsim import Scenario, load, simulate
from zsim.configs.front import export_config

CASES = {
    "plain": ("fsdp2-gpt-4", {}), "accumulated": ("fsdp2-gpt-4-accumulate-last", {}),
    "kept": ("fsdp2-mlp-4-reshard-false", {}), "bf16": ("fsdp2-llama-4-bf16", {}),
    "recomputed": ("fsdp2-gpt-4", {"activation_checkpointing": {"mode": "full"}}),
    "prefetched, clipped": (
        "fsdp2-gpt-4", {"strategy": {"forward_prefetch": 1}, "optimizer": {"clip_norm": 1.0}}
    ),
    "replicated": ("hsdp-gpt-2x2", {}),
}
"""Scenarios of which the module is made, and what is changed in them."""


def collectives(scenario: Scenario, folder: Path) -> list[tuple[str, int]]:
    """The collectives of the second step of the exported module, on a fake process group."""
    file = folder / "snippet.py"
    file.write_text(export_config(scenario, "fully_shard").text)
    spec = importlib.util.spec_from_file_location("snippet", file)
    assert spec is not None
    assert spec.loader is not None
    snippet = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(snippet)
    with torch_private.fake_group(rank=0, world_size=scenario.world_size):
        model = build(scenario.model, seed=0)
        blocks = [model.module_at(module.fqn) for module in scenario.model.blocks]
        sharded = snippet.parallelize(model, blocks, device="cpu")
        optimizer = snippet.optimizer_of(sharded)
        with CollectiveRecorder({}, world_size=scenario.world_size) as recorder:
            for step in range(2):
                recorder.take()
                snippet.training_step(sharded, optimizer, (
                    partial(sharded, *inputs(
                        scenario.model, scenario.batch, seed=0, rank=0, step=step,
                        micro_batch=index,
                    ))
                    for index in range(scenario.batch.accumulation)
                ))
            return [(record.op, record.nbytes) for record in recorder.take()]


@pytest.mark.parametrize("name", CASES)
def test_the_module_communicates_as_the_program_says(name: str, tmp_path: Path) -> None:
    file, changes = CASES[name]
    scenario = load(PARITY / f"{file}.toml").with_(**changes)
    steady = simulate(scenario, ranks=(0,)).record.ranks[0].phases["steady"].collectives
    assert collectives(scenario, tmp_path) == [(each.op, each.nbytes) for each in steady]
