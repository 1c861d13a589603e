"""accelerate's YAML (`accelerate config`, `--config_file`) as a scenario.

It says how ranks are launched and sharded, and nothing of batch or optimizer: those are asked, or
assumed and told. Source: accelerate 1.15, commands/config/config_args.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zsim.configs.config_keys import AUTO, MODEL_PARALLEL, ConfigKeys
from zsim.configs.documents import json_config, text_of
from zsim.configs.draft import Draft
from zsim.configs.importer import JSON_OR_YAML, Importer
from zsim.configs.importers import deepspeed, fsdp_plugin, transformers_modules
from zsim.errors import ScenarioError

TYPES = ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU",
         "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_HPU")
REPLICATED = ("NO", "MULTI_GPU", "MULTI_CPU")
SEQUENCES = "sequences over ranks are not modelled"
STAGE = 2
"""Stage of accelerate's DeepSpeed plugin by default."""


def read(config: ConfigKeys, draft: Draft) -> None:
    """Put what an accelerate config says into the draft; its problems, ignored keys and assumptions
    go to the notes."""
    kind = config.word("distributed_type", TYPES, "NO") or "NO"
    precision = config.word("mixed_precision", ("no", "fp16", "bf16", "fp8"), "no")
    number = config.whole("num_processes")
    machines = config.whole("num_machines", 1)
    _launcher(config, draft)
    replicas = _mesh(config.table("parallelism_config"), draft)
    if kind != "FSDP":
        config.ignore("not of this distributed_type", "fsdp_config")
    if kind != "DEEPSPEED":
        config.ignore("not of this distributed_type", "deepspeed_config")
    fsdp, zero = _without_prefix(config, "fsdp_config"), config.table("deepspeed_config")
    draft.processes(number, key="num_processes", machines=machines)
    if kind == "FSDP":
        fsdp_plugin.read(fsdp, draft, version=1, policy="NO_WRAP", replicas=replicas)
        sharded_precision(draft, precision)
    elif kind == "DEEPSPEED":
        _deepspeed(zero, draft, precision)
    elif kind in REPLICATED:
        draft.put("strategy.name", draft.replicated)  # Accelerator.prepare_model asks for several
        replicated_precision(draft, precision)
    else:
        draft.notes.problem("distributed_type", "expected NO, MULTI_GPU, MULTI_CPU, FSDP or "
                                                f"DEEPSPEED, found {kind}")
    if kind != "DEEPSPEED":
        draft.batch(micro=None, accumulation=config.whole("gradient_accumulation_steps"))
        draft.notes.assume("optimizer: adamw, as accelerate leaves it to the script")
        reduce_last(draft)
    transformers_modules.tell(draft)
    config.ignore("not of this distributed_type", "megatron_lm_config", "mpirun_config")
    config.close()


def reduce_last(draft: Draft) -> None:
    """Put the reduction of gradients after the last micro-batch: before it `accumulate`, and
    transformers' Trainer, enter no_sync, in which ranks keep whole gradients."""
    if draft.get("strategy.name") != "single":
        draft.put("strategy.sync", "last")


def sharded_precision(draft: Draft, precision: str | None) -> None:
    """Put the dtypes of FSDP's mixed precision: parameters and reductions in one."""
    if precision == "fp8":
        draft.put("execution.float8", True)
    dtype = {"fp8": "bf16", "no": "fp32", None: "fp32"}.get(precision, precision)
    draft.put("precision.parameters", dtype)
    draft.put("precision.reduce", dtype)
    if dtype != "fp32":
        draft.notes.assume(
            f"{dtype} is FSDP's own, over float32 shards; the autocast around it is not modelled"
        )


def replicated_precision(draft: Draft, precision: str | None) -> None:
    """Put the dtype of autocast, which accelerate uses where nothing is sharded."""
    if precision in ("bf16", "fp16"):
        draft.put("precision.autocast", precision)
    elif precision == "fp8":
        draft.notes.problem("mixed_precision", "expected no, fp16 or bf16 with DDP, found fp8, "
                                               "which is modelled with sharded parameters")


def _launcher(config: ConfigKeys, draft: Draft) -> None:
    """Leave out what launches ranks, and refuse what compiles or runs elsewhere."""
    config.ignore(
        "launches ranks, and changes no step", "compute_environment", "debug", "machine_rank",
        "main_process_ip", "main_process_port", "main_training_function", "rdzv_backend",
        "rdzv_endpoint", "same_network", "gpu_ids", "enable_cpu_affinity", "deepspeed_hostfile",
        "tpu_env", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "commands",
        "command_file", "downcast_bf16", "max_restarts", "monitor_interval",
        "num_cpu_threads_per_process", "ipex_config", "use_mps_device",
        "deepspeed_fields_from_accelerate_config", "role",
    )
    config.only("fp16", False, unmodelled="write mixed_precision: fp16")
    on_gpus = draft.cluster is not None and draft.cluster.kind != "cpu"
    if config.flag("use_cpu", False) and on_gpus:
        draft.notes.problem("use_cpu", "expected false on a cluster of GPUs, found true; name a "
                                       "cluster of CPUs, as --cluster cpu-gloo")
    dynamo = config.table("dynamo_config")
    backend = dynamo.any("dynamo_backend", config.any("dynamo_backend"))
    if str(backend or "no").lower() != "no":
        draft.put("execution.compile", True)
    dynamo.ignore("an option of torch.compile", "dynamo_mode", "dynamo_use_dynamic",
                  "dynamo_use_fullgraph", "dynamo_use_regional_compilation")
    dynamo.close()
    config.ignore("recipes of 8 bits are told by execution.float8", "fp8_config")


def _mesh(mesh: ConfigKeys, draft: Draft) -> int:
    """Replicas of the mesh; its shards go to the strategy."""
    prefix = "parallelism_config_"
    sizes = {
        name: mesh.whole(prefix + name if prefix + name in mesh else name, 1) or 1
        for name in ("dp_replicate_size", "dp_shard_size")
    }
    for axis, unmodelled in (("tp_size", MODEL_PARALLEL), ("cp_size", SEQUENCES),
                             ("sp_size", SEQUENCES)):
        mesh.only(prefix + axis if prefix + axis in mesh else axis, 1, unmodelled=unmodelled)
    if sizes["dp_shard_size"] > 1:
        draft.put("strategy.dp_shard", sizes["dp_shard_size"])
    mesh.ignore("an option of context parallelism", *(
        key for key in mesh.left if key.removeprefix(prefix).startswith(("cp_", "sp_"))
    ))
    mesh.close()
    return sizes["dp_replicate_size"]


def _without_prefix(config: ConfigKeys, key: str) -> ConfigKeys:
    """The table under `key`, whose keys lose a leading fsdp_, as both spellings are in use."""
    table = config.any(key) or {}
    if not isinstance(table, dict):
        config.notes.problem(key, "expected a table")
        table = {}
    bare = {str(name).removeprefix("fsdp_"): value for name, value in table.items()}
    return ConfigKeys(bare, config.notes, f"{key}.fsdp_")


def _deepspeed(zero: ConfigKeys, draft: Draft, precision: str | None) -> None:
    """Put what the plugin says, as the ds_config that accelerate makes of it, or names."""
    zero.ignore("launches ranks, and changes no step", "deepspeed_multinode_launcher",
                "deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter",
                "deepspeed_moe_layer_cls_names")
    zero.ignore("loading is no part of a step", "zero3_init_flag")
    file = zero.text("deepspeed_config_file")
    if file:
        made = named(file, draft)
        zero.ignore("the ds_config has a key of its own for it", "zero3_save_16bit_model")
    else:
        made = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO,
                "gradient_accumulation_steps": zero.any("gradient_accumulation_steps", 1),
                "zero_optimization": {
                    "stage": zero.whole("zero_stage", STAGE),
                    "stage3_gather_16bit_weights_on_model_save":
                        zero.any("zero3_save_16bit_model", False),
                }}
        if "gradient_clipping" in zero:
            made["gradient_clipping"] = zero.any("gradient_clipping")
        for key in ("offload_optimizer", "offload_param"):
            device = zero.text(f"{key}_device") or "none"
            made["zero_optimization"][key] = {"device": device}
            zero.ignore("a path of the machine", f"{key}_nvme_path")
        if precision in ("bf16", "fp16", "fp8"):
            made["fp16" if precision == "fp16" else "bf16"] = {"enabled": True}
        if precision == "fp8":
            draft.put("execution.float8", True)
    zero.close()
    deepspeed.read(ConfigKeys(made, draft.notes, "" if not file else f"{file}: "), draft)


def named(file: str, draft: Draft) -> dict[str, Any]:
    """The ds_config that a config names by its path: from its own folder, from one above it, as a
    repository's root, or from here."""
    folders = Path(draft.notes.where).resolve().parents
    path = next((folder / file for folder in folders if (folder / file).is_file()), Path(file))
    if not path.exists():
        raise ScenarioError((
            f"{draft.notes.where}: {file[:200]}: no such file beside this config, in a folder "
            "above it, or here; put it there, or its content in place of its name",
        ))
    return json_config(text_of(path), where=str(path))


def is_config(config: dict[str, Any]) -> bool:
    """True for a table that looks like accelerate's."""
    return "distributed_type" in config or "compute_environment" in config


IMPORTER = Importer(parsers=JSON_OR_YAML, read=read, is_config=is_config)
