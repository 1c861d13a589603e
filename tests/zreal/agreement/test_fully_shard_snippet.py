"""The exported Python module shards a real model as the scenario's Program says: the same
collectives of the same bytes, in the same order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.folders import PARITY, ROOT
from zsim import load, simulate
from zsim.configs.front import export_config

pytest.importorskip("torch")

SCRIPT = """
import importlib.util, json, sys
from functools import partial

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zreal.meters.collectives import CollectiveRecorder
from zreal.modules.numerics.batches import inputs
from zreal.modules.modules import build
from zsim import load

def collectives(folder):
    scenario = load(f"{folder}/scenario.toml")
    dist.init_process_group("fake", rank=0, world_size=scenario.world_size, store=FakeStore())
    spec = importlib.util.spec_from_file_location("snippet", f"{folder}/snippet.py")
    snippet = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(snippet)
    model = build(scenario.model, seed=0)
    blocks = [model.module_at(module.fqn) for module in scenario.model.blocks]
    sharded = snippet.parallelize(model, blocks, device="cpu")
    optimizer = snippet.optimizer_of(sharded)

    def losses(step):
        for index in range(scenario.batch.accumulation):
            yield partial(sharded, *inputs(
                scenario.model, scenario.batch, seed=0, rank=0, step=step, micro_batch=index
            ))

    with CollectiveRecorder({}, world_size=scenario.world_size) as recorder:
        for step in range(2):
            recorder.take()
            snippet.training_step(sharded, optimizer, losses(step))
        records = recorder.take()
    dist.destroy_process_group()
    return [[record.op, record.nbytes] for record in records]

print(json.dumps([collectives(folder) for folder in sys.argv[1:]]))
"""
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


@pytest.fixture(scope="module")
def communicated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, int]]]:
    """The collectives of the second step of each case, on a fake process group."""
    folders = []
    for name, (file, changes) in CASES.items():
        folder = tmp_path_factory.mktemp(name.partition(",")[0])
        scenario = load(PARITY / f"{file}.toml").with_(**changes)
        (folder / "scenario.toml").write_text(scenario.to_toml())
        (folder / "snippet.py").write_text(export_config(scenario, "fully_shard").text)
        folders.append(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *folders], capture_output=True, text=True, cwd=Path(ROOT)
    )
    assert done.returncode == 0, done.stderr
    lists = json.loads(done.stdout.splitlines()[-1])
    return {
        name: [tuple(record) for record in records]
        for name, records in zip(CASES, lists, strict=True)
    }


@pytest.mark.parametrize("name", CASES)
def test_the_module_communicates_as_the_program_says(name, communicated):
    file, changes = CASES[name]
    scenario = load(PARITY / f"{file}.toml").with_(**changes)
    steady = simulate(scenario, ranks=(0,)).record.ranks[0].phases["steady"].collectives
    assert communicated[name] == [(record.op, record.nbytes) for record in steady]
