"""Tables of scenarios: models, strategies with their options, checkpointing, wrapping, frozen
parts. What does not go together in torch is not drawn together."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from zsim.models.training_options import Library
from zsim.strategies import STRATEGIES as TABLE

FAMILIES = ("mlp", "gpt", "llama")


def _of(*libraries: Library) -> tuple[str, ...]:
    """The strategies by which these libraries train."""
    return tuple(name for name, each in TABLE.items() if each.library in libraries)


STRATEGIES = tuple(TABLE)
PLAIN = _of("torch")
REPLICATED, FLAT_PARAMETER = _of("ddp", "zero_redundancy"), _of("fsdp1")
FULLY_SHARD = _of("fully_shard")
ENGINE = tuple(name for name in _of("deepspeed") if TABLE[name].formula.number < 3)
SHARDED_ENGINE = tuple(name for name in _of("deepspeed") if name not in ENGINE)
GRANULARITIES = ("unit", "parameter", "900 B")
STACK = {"times": 2, "order": "stack"}
FROZEN = {
    "mlp": (["blocks.0.*"], ["*.bias"], ["*.fc2.weight"]),
    "gpt": (
        ["*.attn.*", "w?e.*"], ["wte.*", "wpe.*", "blocks.0.*"], ["*.ln_1.*", "*.mlp.fc.weight"],
        ["*.bias"],
    ),
    "llama": (["*.attn.[qk].*", "wte.*"], ["wte.*", "blocks.0.*"], ["blocks.*.weight"]),
}
Tables = dict[str, Any]


@st.composite
def model_tables(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> Tables:
    """The tables `model` and `batch`: a mlp of uneven widths, a gpt or a llama, 1 to 5 blocks."""
    layers = draw(st.integers(1, 5))
    family = draw(st.sampled_from(families))
    uses = draw(st.sampled_from([1, 1, 2, STACK]))
    alike, sizes = True, dict[str, Any]()
    if family == "mlp":
        digits = draw(st.integers(0, 9 ** (layers + 1) - 1))  # one choice, so that mlp is smallest
        dims = [1 + digits // 9**index % 9 for index in range(layers + 1)]
        alike = len(set(dims)) == 1
        uses = uses if alike else 1
        sizes = {"dims": dims, "hidden": draw(st.integers(1, 11)), "num_classes": 3}
    else:
        sizes = {
            "num_layers": layers, "hidden_size": 8, "num_heads": 2, "vocabulary": 13,
            "tied": draw(st.booleans()), "attention": draw(st.sampled_from(["explicit", "sdpa"])),
        }
    if family == "llama":
        sizes |= {"num_heads": 4, "num_kv_heads": 2, "feed_forward": 10}
    model = {"family": family, "sizes": sizes, "uses": uses}
    if alike and layers > 1 and draw(st.sampled_from([False, False, True])):
        model["unused"] = [f"blocks.{draw(st.integers(0, layers - 1))}"]
    batch = {
        "micro_batch": 2, "accumulation": draw(st.integers(1, 3)),
        "forwards": draw(st.sampled_from([1, 1, 2])),
    }
    return {"model": model, "batch": batch | ({} if family == "mlp" else {"sequence_length": 4})}


def runs_once(tables: Tables) -> bool:
    """True where each block runs once in a step's forward."""
    return bool(tables["model"]["uses"] == 1 and tables["batch"]["forwards"] == 1)


@st.composite
def strategy_tables(
    draw: st.DrawFn, ranks: int, strategies: tuple[str, ...] = STRATEGIES
) -> Tables:
    """The table `strategy` of one of `strategies` for so many ranks, with options drawn."""
    name = draw(st.sampled_from(strategies))
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    if name in PLAIN:
        return {"name": name}
    if name in REPLICATED:
        return {"name": name} | draw(_one_of(
            {}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}
        ))
    if name in FLAT_PARAMETER:
        return {"name": name} | draw(_flat_parameter(ranks, divisors))
    if name in FULLY_SHARD:
        return {"name": name} | draw(_fully_shard(name, ranks, divisors))
    if name in SHARDED_ENGINE:
        return {"name": name, "reduce_bucket_size": draw(st.sampled_from([20, 200, 100_000]))} | {
            f"stage3_{option}": draw(st.sampled_from(sizes)) for option, sizes in {
                "prefetch_bucket_size": [0, 60, 100_000], "max_live_parameters": [0, 600, 10**9],
                "max_reuse_distance": [0, 500, 10**9],
                "param_persistence_threshold": [0, 10, 10**5],
            }.items()
        } | {"zero_hpz_partition_size": draw(st.sampled_from([1, *divisors]))}
    if name in ENGINE:
        bucket = draw(st.sampled_from([20, 200, 100_000]))
        return {"name": name, "reduce_bucket_size": bucket} | draw(_one_of(
            {}, {"overlap_comm": True}, {"round_robin_gradients": True}, {"reduce_scatter": False},
        ))
    replicas = draw(st.sampled_from(divisors))
    more: Tables = {"dp_replicate": replicas, "dp_shard": ranks // replicas}
    more["granularity"] = draw(st.sampled_from(GRANULARITIES))
    stage = TABLE[name].formula.number
    if stage == 1:
        more["form"] = draw(st.sampled_from(["all_reduce", "reduce_scatter"]))
    if stage == 3:
        more["lookahead"] = draw(st.integers(0, 3))
        more |= draw(_one_of(
            {}, {}, {"persistence_threshold": 11}, {"zero2_threshold": 90},
            {"persistence_threshold": 5, "zero2_threshold": 40},
        ))
    return {"name": name, **more}


def offload_tables(strategy: str) -> st.SearchStrategy[Tables]:
    """The table `offload` of a strategy of DeepSpeed, empty half of the time; others have none."""
    on_host: Tables = {"optimizer": "cpu"}
    shards: Tables = {"parameters": "cpu"}
    if strategy in SHARDED_ENGINE:
        return _one_of({}, {}, {}, on_host, shards, on_host | shards)
    return _one_of({}, on_host) if strategy in ENGINE else st.just({})


def _one_of(*tables: Tables) -> st.SearchStrategy[Tables]:
    return st.sampled_from(tables)


@st.composite
def _flat_parameter(draw: st.DrawFn, ranks: int, divisors: list[int]) -> Tables:
    """The mesh and options of fsdp1."""
    replicas = draw(st.sampled_from([n for n in divisors if n < ranks] or [1]))
    sharding = draw(_one_of(
        {}, {"sharding": "grad_op"}, {"backward_prefetch": "post"},
        {"backward_prefetch": "none", "limit_all_gathers": False},
    ))
    more = draw(_one_of({}, {"forward_prefetch": True}, {"use_orig_params": True}))
    return {"dp_replicate": replicas, "dp_shard": ranks // replicas} | sharding | more


@st.composite
def _fully_shard(draw: st.DrawFn, name: str, ranks: int, divisors: list[int]) -> Tables:
    """The options of fsdp2, and of hsdp with its mesh."""
    reshard: list[Any] = ["auto", True, False]
    more: Tables = {}
    if TABLE[name].asks_replicas:
        replicas = draw(st.sampled_from(divisors))
        shards = ranks // replicas
        reshard += [n for n in range(1, shards + 1) if shards % n == 0]
        more = {"dp_replicate": replicas, "dp_shard": shards}
        more |= draw(_one_of({}, {"all_reduce": "last"}))
    more["reshard_after_forward"] = draw(st.sampled_from(reshard))
    return more | draw(_one_of(
        {}, {}, {"forward_prefetch": 1}, {"forward_prefetch": 2, "backward_prefetch": 2}
    ))


@st.composite
def checkpointing_tables(draw: st.DrawFn, model: Tables) -> Tables:
    """No activation checkpointing, {}, or some that fits `model`."""
    family, explicit = model["family"], model["sizes"].get("attention") == "explicit"
    if family == "mlp":
        recomputed, saved = ["gelu"], ["linear", "gelu"]
    else:
        norm = "layer_norm" if family == "gpt" else "swiglu"
        recomputed, saved = ["attention", norm], ["linear", "attention"]
    forms: list[Tables] = [
        {}, {}, {"mode": "full"}, {"mode": "selective", "recompute": recomputed}
    ]
    if not explicit:
        save = saved if family != "mlp" else ["linear"]
        forms.append({"mode": "selective", "save": save})
    return draw(st.sampled_from(forms))


@st.composite
def wrapping_tables(
    draw: st.DrawFn, model: Tables, *, strategy: str, checkpointing: Tables
) -> Tables:
    """No wrapping policy, {}, or one that fits `model`, its checkpointing and the strategy."""
    if strategy in FLAT_PARAMETER:  # it wraps no list of modules as one
        return draw(_one_of({}, {"every": 1, "ends": "root"}, {"every": "all"}))
    if not draw(st.booleans()):
        return {}
    sizes = model["sizes"]
    layers = len(sizes["dims"]) - 1 if "dims" in sizes else sizes["num_layers"]
    ends = "root" if sizes.get("tied") else draw(st.sampled_from(["root", "apart"]))
    some = 1 if model["uses"] == 2 else draw(st.integers(1, layers))
    every = draw(st.sampled_from([some, some, 1 if ends == "apart" else "all"]))
    policy: Tables = {"every": every, "ends": ends}
    if strategy in FULLY_SHARD and (not checkpointing or "recompute" in checkpointing):
        inner = [["fc2"]] if model["family"] == "mlp" else [["mlp"], ["attn", "mlp"]]
        policy |= draw(_one_of({}, *({"nested": names} for names in inner)))
    return policy


@st.composite
def frozen_patterns(draw: st.DrawFn, model: Tables, *, strategy: str) -> list[str]:
    """Nothing frozen, [], or some of what `model` has. DDP waits for gradients of a block that
    never runs, so such a block is frozen."""
    if strategy in FLAT_PARAMETER:
        return []
    if strategy in REPLICATED and "unused" in model:
        return [f"{model['unused'][0]}.*"]
    if not draw(st.booleans()):
        return []
    return draw(st.sampled_from(FROZEN[model["family"]]))
