"""torchtitan's config as a scenario: TOML of older versions, and the Python of newer ones.

Units are those of torchtitan: the embedding, [last norm, head], and each block. The loss is that of
float32 logits. Sources: torchtitan 0.1 to 0.3, config/ and distributed/fsdp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from zsim.configs.config_keys import ARGUMENTS, CALLED, MODEL_PARALLEL, ConfigKeys
from zsim.configs.documents import toml_config
from zsim.configs.draft import Draft
from zsim.configs.importer import Importer
from zsim.configs.scripts.python_config import STATEMENTS, python_config
from zsim.errors import shown
from zsim.models.families import presets
from zsim.models.families.aliases import llama

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
RESHARDS = {"default": "auto", "always": True, "never": False}
WEIGHT_DECAY, MAX_NORM = 0.1, 1.0
NO_STEP = (
    "job", "profiling", "profiler", "metrics", "lr_scheduler", "checkpoint", "comm", "validation",
    "validator", "memory_estimation", "fault_tolerance", "experimental", "debug", "dataloader",
    "hf_assets_path", "dump_folder", "tokenizer", "generator", "override",
)
"""Tables that change no step."""
MODES = {"none": "none", "full": "full", "selective": "selective", "FullAC": "full",
         "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget",
         "memory_budget": "memory_budget", "None": "none"}


def read(config: ConfigKeys, draft: Draft) -> None:
    """Put what a torchtitan config says into the draft; its problems, ignored keys and assumptions
    go to the notes."""
    for statement in config.any(STATEMENTS) or ():
        draft.notes.problem(statement, "a statement, which is not executed; choose a recipe "
                                       f"without it, or --drop {STATEMENTS}")
    newer = CALLED in config
    config = _regrouped(config)
    converters = _model(config, draft)
    sharded = _parallelism(config.table("parallelism"), draft)
    compiled = _training(config.table("training"), draft, sharded=sharded)
    _optimizer(config.table("optimizer"), draft)
    _checkpointing(config, draft, newer=newer)
    table = config.table("compile")
    compiled = bool(table.flag("enable", compiled))
    table.ignore("inductor compiles what is modelled as one", "backend", "model_backend_override",
                 "enable_async_tensor_parallel")
    components = table.any("components")
    table.close()
    if compiled:
        _compiled(components, draft)
    _float8(config, draft, converters)
    config.ignore("changes no byte and no time of a step", *NO_STEP)
    config.ignore("the loss is computed at once here, and not in chunks", "loss")
    config.close()


def _compiled(components: Any, draft: Draft) -> None:
    """Put what is compiled, among them the loss or not; alone it is not modelled."""
    if components in (None, ["model"], ["model", "loss"], ["loss", "model"]):
        draft.put("execution.compile", "blocks" if components == ["model"] else True)
    else:
        draft.notes.problem("compile.components", 'expected "model", or "model" and "loss", found '
                            f"{shown(components)}; --drop compile leaves it out")


def _regrouped(config: ConfigKeys) -> ConfigKeys:
    """The config with degrees of parallelism in their table, and the converter of float8: the
    oldest releases have them under training, experimental and float8."""
    tables = {key: config.any(key) for key in config.left}
    mesh = dict(tables.get("parallelism") or {})
    for name in ("training", "experimental"):
        table = tables.get(name)
        if isinstance(table, dict):
            moved = {k: v for k, v in table.items() if k.endswith(("_parallel_degree", "_degree"))}
            mesh = moved | mesh
            tables[name] = {k: v for k, v in table.items() if k not in moved}
    float8 = tables.get("float8")
    if isinstance(float8, dict) and float8.pop("enable_float8_linear", False):
        tables["model_converters"] = ["float8"]
    return ConfigKeys(tables | {"parallelism": mesh}, config.notes)


def _model(config: ConfigKeys, draft: Draft) -> list[Any]:
    """Put the preset that the config names, or ask for it; returns its converters."""
    recipe = config.text("recipe", "") or ""
    model, spec = config.table("model"), config.any("model_spec")
    spec = spec if isinstance(spec, Mapping) else {}
    flavor = model.text("flavor") or next(iter(spec.get(ARGUMENTS, ())), "")
    name = model.text("name", "") or recipe
    known = llama(f"{name}-{flavor}") or llama(recipe)
    if known in presets():
        draft.put_model({"preset": known}, f"{name} {flavor}")
    else:
        draft.name_model(f"{name} {flavor}", "model")
        draft.notes.assume(f"the config's own model is {name} {flavor}, which is no preset")
    if "preset" in draft.tables["model"]:
        draft.put("model.loss_dtype", "float32")
    converters = [model.any("converters"), config.any("model_converters"), spec.get("converters")]
    model.ignore("a path or a log", "hf_assets_path", "tokenizer_path", "print_after_conversion",
                 "norm_type")
    model.close()
    return [each for each in converters if each]


def _parallelism(table: ConfigKeys, draft: Draft) -> bool:
    """Put the strategy and its mesh; returns whether parameters are sharded."""
    replicas = table.whole("data_parallel_replicate_degree", 1) or 1
    shards = table.whole("data_parallel_shard_degree", table.whole("data_parallel_degree", -1))
    for key in ("tensor", "pipeline"):
        table.only(f"{key}_parallel_degree", 1, unmodelled=MODEL_PARALLEL)
    for key in ("context", "expert", "expert_tensor"):
        table.only(f"{key}_parallel_degree", 1, unmodelled="not modelled")
    reshard = table.word("fsdp_reshard_after_forward", RESHARDS, "default") or "default"
    table.only("enable_fsdp_symm_mem", False, unmodelled="not modelled")
    table.only("enable_compiled_autograd", False, unmodelled="not modelled")
    table.ignore("an option of other parallelism", *(
        key for key in table.left
        if key.startswith(("pipeline_", "context_", "expert_", "module_fqns", "spmd_"))
    ), "disable_loss_parallel", "enable_async_tensor_parallel", "enable_sequence_parallel")
    table.close()
    sharded = shards != 1
    if sharded:
        draft.put("strategy.name", "hsdp" if replicas > 1 else "fsdp2")
        draft.put("strategy.reshard_after_forward", RESHARDS[reshard])
        if shards and shards > 1:
            draft.put("strategy.dp_shard", shards)
        if draft.ends_can_be_apart:
            draft.put("wrapping.ends", "apart")
    else:
        draft.put("strategy.name", draft.replicated)
    if replicas > 1:
        draft.put("strategy.dp_replicate", replicas)
    return sharded


def _training(table: ConfigKeys, draft: Draft, *, sharded: bool) -> bool:
    """Put batch, dtypes and clipping; returns whether the model is compiled."""
    length = table.whole("seq_len", table.whole("max_context_length", 2048)) or 2048
    tokens, total = (table.whole("num_tokens_per_microbatch_per_dp_rank"),
                     table.whole("num_tokens_per_train_step", -1) or -1)
    micro = table.whole("local_batch_size", table.whole("batch_size"))
    if micro is None:
        micro = tokens // length if tokens else 8
    for key, number in (("num_tokens_per_microbatch_per_dp_rank", tokens),
                        ("num_tokens_per_train_step", total)):
        if number and number > 0 and number % length:
            draft.notes.problem(f"training.{key}", f"expected sequences of {length} tokens, found "
                                                   f"{number} tokens")
    batch = table.whole("global_batch_size", -1) or -1
    total = total // length if total > 0 else batch
    draft.batch(micro=micro, accumulation=None if total > 0 else 1, total=total,
                total_key="training.global_batch_size")
    draft.put("batch.sequence_length", length)
    stored, compute = (table.word(key, DTYPES, default) or default for key, default in (
        ("dtype", "float32"), ("mixed_precision_param", "bfloat16")
    ))
    reduced = DTYPES[table.word("mixed_precision_reduce", DTYPES, "float32") or "float32"]
    if sharded:
        draft.put("precision.parameters", DTYPES[compute])
        draft.put("precision.reduce", reduced)
    elif compute != "float32":
        draft.put("precision.autocast", DTYPES[compute])
    if stored != "float32":
        draft.put("precision.master", False)
    draft.put("optimizer.clip_norm", _clip_norm(table, draft))
    if table.flag("enable_cpu_offload", False):
        draft.put("strategy.offload", True)
    table.ignore("data and loops are no part of a step", "dataset", "dataset_path", "steps",
                 "gc_freq", "gc_debug", "seed", "deterministic", "dataloader", "warmup_steps",
                 "data_parallel_degree", "disable_cuda_graphs")
    compiled = bool(table.flag("compile", False))
    table.close()
    return compiled


def _clip_norm(table: ConfigKeys, draft: Draft) -> float | None:
    """The norm of clipping, which torchtitan has at each step: to 0 it would train nothing."""
    norm = table.number("max_norm", MAX_NORM)
    if norm == 0:
        draft.notes.problem("training.max_norm", "expected above 0, found 0, by which torchtitan "
                                                 "multiplies all gradients; inf clips none")
    if norm != inf:
        return norm
    draft.notes.assume("max_norm = inf clips nothing; the norm that torchtitan computes all the "
                       "same is left out")
    return 0.0


def _optimizer(table: ConfigKeys, draft: Draft) -> None:
    name, called = table.text("name", "AdamW") or "AdamW", table.text(CALLED, "") or ""
    table.only("early_step_in_backward", False, unmodelled="not modelled")
    if "InBackward" in called:
        draft.notes.problem("optimizer", f"expected OptimizersContainer, found {called[:60]}, "
                                         "which steps within backward and is not modelled")
    draft.put("optimizer.name", name.lower())
    draft.put("optimizer.implementation", table.word(
        "implementation", ("for-loop", "foreach", "fused"),
        "foreach" if table.flag("fused") is False else "fused",
    ))
    draft.put("optimizer.learning_rate", table.number("lr"))
    draft.put("optimizer.weight_decay", table.number("weight_decay", WEIGHT_DECAY))
    table.ignore("changes no byte and no time", "beta1", "beta2", "eps", "betas")
    table.ignore("param groups differ in numbers alone", "param_groups", "extra_param_group_split")
    table.close()


def _checkpointing(config: ConfigKeys, draft: Draft, *, newer: bool) -> None:
    """Put activation checkpointing. Its default is selective, by operators in newer versions."""
    table = config.table("activation_checkpoint")
    called = (table.text(CALLED, "") or "").removesuffix(".Config")
    mode = MODES.get(called) or table.word("mode", MODES, "selective") or "selective"
    option = str(table.any("selective_ac_option", "op" if newer else "2"))
    table.ignore("the form of torch's checkpoint", *(
        key for key in table.left if key != CALLED
    ))
    table.close()
    if MODES[mode] == "memory_budget":
        draft.notes.problem("activation_checkpoint", "expected none, full or selective, found a "
                                                     "memory budget, which is not modelled")
    elif mode == "selective" and option == "op":
        draft.put("activation_checkpointing", {
            "mode": "selective", "save": ["linear", "attention"], "save_every": 2,
        })
    elif mode == "selective" and option.isdigit() and 0 < len(option) < 6:
        draft.put("activation_checkpointing", {"mode": "full", "every": int(option)})
    elif mode == "selective":
        draft.notes.problem("activation_checkpoint.selective_ac_option",
                            f"expected op or a number of layers, found {option[:40]}")
    elif mode == "full":
        draft.put("activation_checkpointing.mode", "full")


def _float8(config: ConfigKeys, draft: Draft, converters: list[Any]) -> None:
    """Put products in 8 bits, where a converter asks for them."""
    text = str(converters).lower()
    table = config.table("float8")
    quantize = config.any("quantize") or {}
    linear = quantize.get("linear", {}) if isinstance(quantize, Mapping) else {}
    inner = linear.get("float8", {}) if isinstance(linear, Mapping) else {}
    recipe = table.text("recipe_name") or (inner or {}).get("recipe_name") or "tensorwise"
    gathers = table.flag("enable_fsdp_float8_all_gather", False)
    table.ignore("an option of float8", *table.left)
    config.ignore("an option of what no converter asks for", "mx", "float8_grouped_mm")
    table.close()
    if "mx" in text or "fp4" in text:
        draft.notes.problem("model.converters", "expected float8, found another of fewer bits; "
                                                "give --set execution.float8=mx where it is mxfp8")
    elif "float8" in text:
        draft.put("execution.float8", recipe)
        if gathers or "enable_fsdp_float8_all_gather': true" in text:
            draft.notes.assume("parameters are gathered in two bytes, where float8 all-gathers "
                               "move half of them")


def is_config(config: dict[str, Any]) -> bool:
    """True for a table that looks like torchtitan's."""
    own = sum(key in config for key in ("training", "parallelism", "activation_checkpoint", "job",
                                        "lr_scheduler", "model_spec"))
    return own >= 3


IMPORTER = Importer(
    parsers={".toml": toml_config, ".py": python_config}, read=read, is_config=is_config
)
