"""DeepSpeed's engine on gloo ranks of this machine: `python -m tests.measured.deepspeed`.

It needs the extra `deepspeed`. Each row of the record is a scenario, with collectives in order and
bytes by phase and part of its first and last rank. A test predicts them anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from tests.measured import quantizer_substitutes
from zreal.modules.initial_values import Make
from zreal.modules.modules import Model
from zreal.observer.observer import observe
from zreal.observer.subjects import Subject, deepspeed_engine
from zreal.observer.subjects.table import SUBJECTS
from zreal.processes import launch
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zsim.ir.run import PhaseRecord
from zsim.scenario.scenario import Scenario, parse
from zsim.testing.strategies.tables import ENGINE

Tables = dict[str, Any]
RANKS = (2, 4)
MODELS: tuple[Tables, ...] = (
    {"family": "mlp", "sizes": {"dims": [5, 7, 6], "hidden": 9, "num_classes": 3}},
    {"family": "gpt", "sizes": {"num_layers": 2, "hidden_size": 8, "num_heads": 2,
                                "vocabulary": 13, "tied": False}},
    {"family": "gpt", "sizes": {"num_layers": 2, "hidden_size": 8, "num_heads": 2,
                                "vocabulary": 13, "attention": "sdpa"}},
    {"family": "llama", "sizes": {"num_layers": 2, "hidden_size": 8, "num_heads": 4,
                                  "num_kv_heads": 2, "feed_forward": 10, "vocabulary": 13}},
)
PRECISIONS: tuple[Tables, ...] = (
    {}, {"parameters": "bf16", "reduce": "fp32"}, {"parameters": "bf16", "reduce": "bf16"},
    {"reduce": "bf16"}, {"parameters": "fp16", "reduce": "fp16"},
    {"parameters": "fp16", "reduce": "fp32"},
)
OPTIMIZERS: tuple[Tables, ...] = (
    {}, {"clip_norm": 0.5}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.9, "clip_norm": 1.0},
    {"implementation": "fused"}, {"implementation": "for-loop", "clip_norm": 0.1},
)
SEED = 3000
"""The seed of the first draw."""
BUCKETS = (20, 50, 100, 200, 300, 1000, 5000)
RECOMPUTED: tuple[Tables, ...] = (
    {}, {"activation_checkpointing": {"mode": "full"}},
    {"activation_checkpointing": {"mode": "full", "every": 2}},
)
CONFIGS = {
    "llama": ["model.embed_tokens.*"], "qwen2": ["*.q_proj.*", "*.down_proj.weight"],
    "gemma": ["*norm*"], "gpt2": ["*.ln_1.*"],
}
"""Models of transformers, whose config.json are in deepspeed_models, and what some freeze."""
CALLED = ("phi3", "gpt2-without-dropout")
"""Models of transformers that call dropouts of 0, which do nothing."""
FROZEN: dict[str, tuple[list[str], ...]] = {
    "mlp": ([], ["*.bias"], ["blocks.0.*"], ["*.weight"]),
    "gpt": ([], ["*.bias"], ["wte.*", "wpe.*"], ["wte.*", "wpe.*", "blocks.0.*"], ["*.weight"]),
    "llama": ([], ["wte.*"], ["wte.*", "blocks.*"], ["*.q.weight", "*.down.weight", "*norm*"]),
}
"""Parameters that are frozen, by the model's family."""
ON_HOST: Tables = {"optimizer": "cpu"}
SHARDS_ON_HOST: Tables = {"parameters": "cpu"}
ALL_ON_HOST = ON_HOST | SHARDS_ON_HOST
BOOLEANS = ("overlap_comm", "round_robin_gradients", "check_grad_overflow")


def offloads(*tables: Tables) -> list[Tables]:
    """The tables `offload` of scenarios, without an empty one."""
    return [{"offload": each} if each else {} for each in tables]


def grid() -> list[Tables]:
    """Stages 1 and 2 with one and two micro-batches, buckets of three sizes, on two and four ranks.
    The optimizer is on the device, or on the host."""
    return [
        {
            "model": MODELS[1],
            "batch": {"micro_batch": 2, "sequence_length": 4, "accumulation": accumulation},
            "cluster": {"preset": "cpu-gloo", "ranks": ranks},
            "strategy": {"name": name, "reduce_bucket_size": bucket}, **offload,
        }
        for name, accumulation, bucket, ranks, offload in product(
            ENGINE, (1, 2), (50, 300, 5000), RANKS, offloads({}, ON_HOST)
        )
    ]


def sharded_grid() -> list[Tables]:
    """Stage 3 with one and two micro-batches, buckets and gathers ahead of two sizes, on two and
    four ranks. Everything is on the device; or the optimizer, parameters or both on the host."""
    return [
        {
            "model": MODELS[1],
            "batch": {"micro_batch": 2, "sequence_length": 4, "accumulation": accumulation},
            "cluster": {"preset": "cpu-gloo", "ranks": ranks},
            "strategy": {
                "name": "deepspeed3", "reduce_bucket_size": bucket,
                "stage3_prefetch_bucket_size": ahead, "stage3_param_persistence_threshold": 10,
            },
            **offload,
        }
        for accumulation, bucket, ahead, ranks, offload in product(
            (1, 2), (50, 5000), (0, 400), RANKS,
            offloads({}, ON_HOST, SHARDS_ON_HOST, ALL_ON_HOST),
        )
    ]


def adam_grid() -> list[Tables]:
    """Every stage with DeepSpeed's own Adam on the host, also with parameters there."""
    cases = [({}, 1, ON_HOST), (PRECISIONS[2], 2, ON_HOST), (PRECISIONS[1], 1, ALL_ON_HOST)]
    return [
        {
            "model": MODELS[1],
            "batch": {"micro_batch": 2, "sequence_length": 4, "accumulation": accumulation},
            "cluster": {"preset": "cpu-gloo", "ranks": 2},
            "strategy": {"name": name, "reduce_bucket_size": 300}, "precision": precision,
            "optimizer": {} if accumulation == 2 else {"clip_norm": 0.5},
            "offload": ON_HOST | {"adam": "deepspeed"} | states,
        }
        for name in (*ENGINE, "deepspeed3") for precision, accumulation, states in cases
        if name == "deepspeed3" or states is ON_HOST
    ]


def activations_grid() -> list[Tables]:
    """Every stage with activations on the host: all that is saved, or inputs of checkpoints."""
    five = [model | {"sizes": model["sizes"] | {"num_layers": 5}} for model in MODELS[1:]]
    return [
        {
            "model": five[index % 3],
            "batch": {"micro_batch": 2, "sequence_length": 4, "accumulation": 1 + index % 2},
            "cluster": {"preset": "cpu-gloo", "ranks": 2},
            "strategy": {"name": name, "reduce_bucket_size": 300},
            "precision": PRECISIONS[index % 2],
            "offload": {"activations": what} | (ON_HOST if index % 2 else {}), **recomputed,
        }
        for name in (*ENGINE, "deepspeed3")
        for index, (what, recomputed) in enumerate(product(
            ("saved_tensors", "checkpoint_inputs"), RECOMPUTED
        ))
        if recomputed or what == "saved_tensors"
    ]


def quantized_models(width: int) -> tuple[Tables, ...]:
    """An MLP with odd sizes, and two models of this width."""
    return (
        MODELS[0],
        {"family": "gpt", "sizes": {"num_layers": 2, "hidden_size": width, "num_heads": 2,
                                    "vocabulary": 24, "tied": False}},
        {"family": "llama", "sizes": {"num_layers": 2, "hidden_size": width, "num_heads": 4,
                                      "num_kv_heads": 2, "feed_forward": 32, "vocabulary": 24}},
    )


def quantized_grid() -> list[Tables]:
    """Stage 3 with quantized gradients on two nodes of one or two ranks, four of one, and on one.
    Some gradients have one dimension, and those of an MLP are not divided by the ranks."""
    models = quantized_models(16)
    cases = product(((2, 2), (2, 4), (4, 4), (1, 2)), (200, 5000), ("fp32", "bf16", "fp16"))
    return [
        {
            "model": models[index % 3],
            "batch": {"micro_batch": 2, "accumulation": 1 + index % 2} | (
                {"sequence_length": 8} if index % 3 else {}
            ),
            "cluster": {"preset": "cpu-gloo", "nodes": nodes, "ranks": ranks},
            "strategy": {
                "name": "deepspeed3", "reduce_bucket_size": bucket, "overlap_comm": index % 4 < 2,
                "stage3_param_persistence_threshold": 10, "zero_quantized_gradients": True,
            } | ({"leaf_module": "blocks"} if index % 6 == 5 else {}),
            "precision": {"parameters": dtype, "reduce": "fp16"},
            **offloads({}, ON_HOST, SHARDS_ON_HOST, ALL_ON_HOST)[index % 4],
        }
        for index, ((nodes, ranks), bucket, dtype) in enumerate(cases)
    ]


def narrow_grid() -> list[Tables]:
    """Stage 3 that gathers in int8, none ahead, few or all, on two and four ranks.

    Copies of released parameters are there or not; some have leaf blocks, frozen biases, recomputed
    blocks, or quantized gradients on two nodes.
    """
    cases = product(RANKS, (0, 600, 100_000), ("fp32", "bf16", "fp16"), (1, 2))
    return [
        {
            "model": quantized_models(8 * ranks)[1 + index % 2],
            "batch": {"micro_batch": 2, "accumulation": 1 + index % 2, "sequence_length": 8},
            "cluster": {"preset": "cpu-gloo", "nodes": 1 + (index % 4 == 3), "ranks": ranks},
            "strategy": {
                "name": "deepspeed3", "reduce_bucket_size": 5000, "zero_quantized_weights": True,
                "stage3_prefetch_bucket_size": ahead, "zero_hpz_partition_size": copies,
                "stage3_param_persistence_threshold": (10, 40)[index % 2],
                "overlap_comm": index % 4 < 2, "zero_quantized_gradients": index % 4 == 3,
            } | ({"leaf_module": "blocks"} if index % 10 == 4 and ahead != 600 else {}),
            "precision": {"parameters": dtype, "reduce": "fp16"}, **RECOMPUTED[index % 5 == 1],
            **offloads({}, ON_HOST, SHARDS_ON_HOST, ALL_ON_HOST)[index % 4],
            **({"frozen": FROZEN["gpt"][1]} if index % 10 == 8 else {}),
        }
        for index, (ranks, ahead, dtype, copies) in enumerate(cases)
    ]


def granularity_grid() -> list[Tables]:
    """Stage 3 with a mean size of modules that takes each block, on two and four ranks.

    Gathers ahead are none or all; blocks are recomputed, parameters on the host. One takes none.
    """
    large = [
        model | {"sizes": model["sizes"] | {"vocabulary": 200, "tied": False}}
        for model in MODELS[1:]
    ]
    cases = product(RANKS, (0, 100_000), RECOMPUTED[:2], offloads({}, ALL_ON_HOST))
    return [
        {
            "model": large[index % 3],
            "batch": {"micro_batch": 2, "sequence_length": 4, "accumulation": 1 + index % 2},
            "cluster": {"preset": "cpu-gloo", "ranks": ranks}, "precision": PRECISIONS[index % 4],
            "strategy": {
                "name": "deepspeed3", "reduce_bucket_size": 300,
                "stage3_prefetch_bucket_size": ahead, "stage3_param_persistence_threshold": 10,
                "stage3_module_granularity_threshold": 110 if index else 20,
            },
            **recomputed, **offload,
        }
        for index, (ranks, ahead, recomputed, offload) in enumerate(cases)
    ]


def broken_grid() -> list[Tables]:
    """Stage 3 whose blocks have another order in each forward, with one to three micro-batches, on
    two and four ranks. Gathers ahead are none, few or all."""
    three = [model | {"sizes": model["sizes"] | {"num_layers": 3}} for model in MODELS[1:]]
    config: Tables = {"huggingface": "tests/measured/deepspeed_models/qwen2.json"}
    cases = product(RANKS, (1, 2, 3), (0, 300, 100_000))
    return [
        {
            "model": (*three, config)[index % 4],
            "batch": {"micro_batch": 2, "sequence_length": 4, "accumulation": accumulation},
            "cluster": {"preset": "cpu-gloo", "ranks": ranks}, "precision": PRECISIONS[index % 5],
            "strategy": {
                "name": "deepspeed3", "trace": "breaks", "reduce_bucket_size": 300,
                "stage3_prefetch_bucket_size": ahead, "stage3_param_persistence_threshold": 10,
                "stage3_max_reuse_distance": (500, 1_000_000)[index % 2],
                "leaf_module": "blocks" if index % 4 == 1 and ahead != 300 else "none",
            },
            **RECOMPUTED[index % 2],
            **offloads({}, {}, ON_HOST, ALL_ON_HOST, SHARDS_ON_HOST)[index % 5],
        }
        for index, (ranks, accumulation, ahead) in enumerate(cases)
    ]


def broken_copies_grid() -> list[Tables]:
    """`broken_grid` with hpZ over two ranks or all four. Where all is gathered ahead blocks are
    recomputed: else DeepSpeed's peak is among its releases, in the order of a set."""
    return [
        each | {"strategy": each["strategy"] | {
            "zero_hpz_partition_size": (2, 4)[index % 3 == 2], "leaf_module": "none",
        }} | (RECOMPUTED[1] if each["strategy"]["stage3_prefetch_bucket_size"] > 300 else {})
        for index, each in enumerate(broken_grid()) if each["cluster"]["ranks"] == 4
    ]


def draw_sharded(seed: int) -> Tables:
    """A random scenario of stage 3."""
    one_of = random.Random(seed).choice
    model, accumulation = one_of(MODELS), one_of((1, 1, 2, 3))
    batch = {"micro_batch": 2, "accumulation": accumulation}
    strategy = {
        "name": "deepspeed3", "reduce_bucket_size": one_of((20, 100, 300, 5000)),
        "stage3_prefetch_bucket_size": one_of((0, 60, 300, 100_000)),
        "stage3_max_live_parameters": one_of((0, 600, 1_000_000)),
        "stage3_max_reuse_distance": one_of((0, 500, 1_000_000)),
        "stage3_param_persistence_threshold": one_of((0, 0, 10, 100_000)),
        "sub_group_size": one_of((100, 1_000_000, 1_000_000)),
        "overlap_comm": one_of((True, False)), "zero_hpz_partition_size": one_of((1, 1, 2)),
    }
    return {
        "model": model,
        "batch": batch if model["family"] == "mlp" else batch | {"sequence_length": 4},
        "cluster": {"preset": "cpu-gloo", "ranks": one_of(RANKS)}, "strategy": strategy,
        "precision": one_of(PRECISIONS), "optimizer": one_of(OPTIMIZERS),
        **one_of(offloads({}, ON_HOST, SHARDS_ON_HOST, ALL_ON_HOST)), **one_of(RECOMPUTED),
        **one_of([{"frozen": each} if each else {} for each in FROZEN[model["family"]]]),
    }


def draw_leaves(seed: int) -> Tables:
    """A random scenario of stage 3 with leaf blocks, that gathers nothing ahead or everything."""
    one_of = random.Random(seed).choice
    drawn = (draw_sharded, draw_transformers)[seed % 2](seed)
    drawn.pop("frozen", None)
    model = drawn["model"] if drawn["model"].get("family") != "mlp" else one_of(MODELS[1:])
    prefetch, live = one_of(((0, 600), (0, 1_000_000), (100_000, 1_000_000)))
    return drawn | {
        "model": model, "batch": drawn["batch"] | {"sequence_length": 4},
        "strategy": drawn["strategy"] | {
            "leaf_module": "blocks", "zero_hpz_partition_size": 1,
            "stage3_prefetch_bucket_size": prefetch, "stage3_max_live_parameters": live,
        },
    }


def draw_transformers(seed: int) -> Tables:
    """A random scenario of stage 3 with a model of transformers; its path is one from the root."""
    drawn, one_of = draw_sharded(seed), random.Random(seed).choice
    drawn.pop("frozen", None)
    config = one_of(tuple(CONFIGS))
    return drawn | one_of(({}, {"frozen": CONFIGS[config]})) | {
        "model": {"huggingface": f"tests/measured/deepspeed_models/{config}.json"},
        "batch": drawn["batch"] | {"sequence_length": 4},
    }


def dropouts_grid() -> list[Tables]:
    """Stage 3 with models of transformers that call dropouts of 0, on two and four ranks.

    Gathers ahead are few or all; blocks are recomputed, or their parameters on the host.
    """
    cases = product(RANKS, CALLED, (300, 100_000), RECOMPUTED[:2])
    return [
        {
            "model": {"huggingface": f"tests/measured/deepspeed_models/{config}.json"},
            "batch": {"micro_batch": 2, "sequence_length": 8, "accumulation": 1 + index % 2},
            "cluster": {"preset": "cpu-gloo", "ranks": ranks}, "precision": PRECISIONS[index % 4],
            "strategy": {
                "name": "deepspeed3", "reduce_bucket_size": 2000,
                "stage3_prefetch_bucket_size": ahead, "stage3_max_reuse_distance": ahead,
                "stage3_param_persistence_threshold": 10, "stage3_max_live_parameters": 10 * ahead,
            },
            **recomputed, **({"offload": ALL_ON_HOST} if index % 3 == 2 else {}),
        }
        for index, (ranks, config, ahead, recomputed) in enumerate(cases)
    ]


def draw(seed: int) -> Tables:
    """A random scenario of stage 1 or 2."""
    one_of = random.Random(seed).choice
    model = one_of(MODELS)
    strategy = {"name": one_of(ENGINE), "reduce_bucket_size": one_of(BUCKETS)}
    batch = {"micro_batch": 2, "accumulation": one_of((1, 2, 3))}
    strategy |= {name: one_of((True, False, False)) for name in BOOLEANS}
    strategy |= one_of(({}, {}, {"reduce_scatter": False}))
    more = one_of(({}, {}, {"activation_checkpointing": {"mode": "full"}}))
    more |= one_of(({}, {}, {"frozen": ["wte.*"] if model["family"] == "llama" else ["*.bias"]}))
    return {
        "model": model,
        "batch": batch if model["family"] == "mlp" else batch | {"sequence_length": 4},
        "cluster": {"preset": "cpu-gloo", "ranks": one_of(RANKS)}, "strategy": strategy,
        "precision": one_of(PRECISIONS), "optimizer": one_of(OPTIMIZERS), **more,
        **one_of(offloads({}, ON_HOST, ON_HOST | {"pin_memory": False})),
    }


def measured_rank(
    arguments: Tables, *, rank: int, world_size: int, port: int, **_: Any
) -> list[Tables]:
    """The phases of this rank, scenario by scenario; `configs` are the engine's, where they are not
    made of the scenarios."""
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    if "configs" in arguments:
        configs = iter(arguments["configs"])
        deepspeed_engine.config = lambda scenario: next(configs)
    return [observed(parse(text.encode(), where="row"), rank=rank) for text in arguments["texts"]]


def rotating(
    scenario: Scenario, model: Model, mesh: DeviceMesh, make: Make
) -> Subject:
    """The engine of a model, each forward of which begins with another block than the one before.
    """
    subject = deepspeed_engine.build(scenario, model, mesh, make)
    path = scenario.model.blocks[0].path.rpartition(".")[0]
    blocks = model.get_submodule(path)._modules

    def rotate(*_: Any) -> None:
        first, *others = blocks.values()
        blocks.update(zip(blocks, [*others, first], strict=True))

    model.register_forward_hook(rotate)
    return subject


def observed(scenario: Scenario, *, rank: int) -> Tables:
    """The phases of a rank. DeepSpeed reads the devices of a node from LOCAL_SIZE; for its kernels
    of quantized gradients there are substitutes."""
    os.environ["LOCAL_SIZE"] = str(scenario.cluster.devices_per_node)
    if getattr(scenario.options, "zero_quantized_gradients", False):
        from deepspeed.runtime.comm import coalesced_collectives

        coalesced_collectives.quantizer_module = quantizer_substitutes
    if getattr(scenario.options, "zero_quantized_weights", False):
        from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

        CUDAQuantizer.quantizer_cuda_module = quantizer_substitutes
        deepspeed_engine.require_kernels = lambda scenario, *, device_type: None
    breaks = getattr(scenario.options, "trace", "holds") == "breaks"
    SUBJECTS["deepspeed3"] = rotating if breaks else deepspeed_engine.build
    run = observe(scenario, rank=rank, steps=4 if breaks else 3).run  # every other step follows
    seen: Tables = {name: figures(phase) for name, phase in run.phases.items()}
    return seen | ({"groups": run.groups} if len(run.groups) > 1 else {})


def saved_rank(
    arguments: Tables, *, rank: int, world_size: int, port: int, **_: Any
) -> dict[str, list[int]]:
    """Bytes of each tensor in files of optimizer states, which the engine saves after three steps.
    """
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    trained = observe(parse(arguments["text"].encode(), where="saved"), rank=rank)
    trained.subject.module.save_checkpoint(arguments["folder"])
    dist.barrier()
    return {
        file.name: sorted(
            leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(torch.load(file, weights_only=False))
            if isinstance(leaf, torch.Tensor)
        )
        for file in Path(arguments["folder"]).glob("*/*optim_states.pt")
    }


def figures(phase: PhaseRecord) -> Tables:
    """The compared figures of a phase: collectives, levels, and start and peak of each part.

    A collective over a part of all ranks has its group's size.
    """
    memory, most = phase.memory, max(each.group_size for each in phase.collectives)
    return {
        "collectives": [
            f"{each.op} {each.nbytes}" + f" over {each.group_size}" * (each.group_size < most)
            for each in phase.collectives
        ],
        "levels": [memory.start_bytes, memory.peak_bytes, memory.end_bytes],
        "parts": [
            [f"{part.name} {part.micro_batch}", part.start_bytes, part.peak_bytes]
            for part in memory.parts
        ],
    }


def rows(scenarios: list[Scenario], module: str, *, timeout_s: float) -> list[Tables]:
    """Each scenario with the figures of its first and last rank, as a `module`'s measured_rank has
    them."""
    measured: list[Tables] = []
    for ranks in RANKS:
        texts = [each.to_toml() for each in scenarios if each.world_size == ranks]
        if not texts:
            continue
        by_rank = launch.launch(
            f"tests.measured.{module}:measured_rank", {"texts": texts}, world_size=ranks,
            timeout_s=timeout_s,
        )
        measured += [
            {"text": text, "first_rank": by_rank[0][index], "last_rank": by_rank[-1][index]}
            for index, text in enumerate(texts)
        ]
    return measured


def seeds(count: int) -> range:
    """The seeds of so many draws."""
    return range(SEED, SEED + count)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=150)
    parser.add_argument("--sharded-draws", type=int, default=60)
    parser.add_argument("--transformers-draws", type=int, default=20)
    parser.add_argument("--leaf-draws", type=int, default=20)
    parser.add_argument("--only-sharded", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("tests/measured/deepspeed.json"))
    parser.add_argument("--timeout", type=float, default=3600.0)
    asked = parser.parse_args()
    sharded = [
        *sharded_grid(), *map(draw_sharded, seeds(asked.sharded_draws)),
        *map(draw_transformers, seeds(asked.transformers_draws)), *adam_grid(),
        *activations_grid(), *map(draw_leaves, seeds(asked.leaf_draws)), *quantized_grid(),
        *narrow_grid(), *granularity_grid(), *dropouts_grid(), *broken_grid(),
        *broken_copies_grid(),
    ]
    tables = [*([] if asked.only_sharded else [*grid(), *map(draw, seeds(asked.draws))]), *sharded]
    record = {
        "command": "python -m tests.measured.deepspeed", "date": time.strftime("%Y-%m-%d"),
        "deepspeed": version("deepspeed"), "torch": torch.__version__,
        "rows": [
            # a stage-3 engine leaves patches of torch behind: it has processes of its own
            row
            for stage in (False, True)
            for row in rows(
                [
                    Scenario(**each) for each in tables
                    if (each["strategy"]["name"] == "deepspeed3") is stage
                ],
                "deepspeed", timeout_s=asked.timeout,
            )
        ],
    }
    asked.out.write_text(json.dumps(record, separators=(",", ":")).replace('{"text"', '\n{"text"'))
    return 0


if __name__ == "__main__":
    sys.exit(main())
