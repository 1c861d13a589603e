"""Options of accelerate's FullyShardedDataParallelPlugin: in its YAML, and in `fsdp_config` of
transformers' TrainingArguments.

Source: accelerate 1.15, utils/dataclasses.py and utils/fsdp_utils.py.
"""

from __future__ import annotations

from zsim.configs.config_keys import ConfigKeys
from zsim.configs.draft import Draft
from zsim.errors import listed

SHARDINGS = {
    "FULL_SHARD": ("full", False), "SHARD_GRAD_OP": ("grad_op", False), "NO_SHARD": (None, False),
    "HYBRID_SHARD": ("full", True), "HYBRID_SHARD_ZERO2": ("grad_op", True),
}
"""FSDP1's sharding strategies: a scenario's `sharding`, and whether nodes are replicas."""
PREFETCHES = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": "none"}
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
NUMBERS = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD",
           "5": "HYBRID_SHARD_ZERO2"}
"""Sharding strategies by the numbers that older configs have."""


def read(fsdp: ConfigKeys, draft: Draft, *, version: int, policy: str, replicas: int = 1) -> None:
    """Put the strategy, wrapping and checkpointing. `version` and `policy` are the defaults of the
    tool whose config it is; `replicas` is its mesh's."""
    number = fsdp.whole("version", version)
    if number not in (1, 2):
        draft.notes.problem(f"{fsdp.prefix}version", f"expected 1 or 2, found {number}")
        return
    if number == 1:
        _first(fsdp, draft, replicas=replicas)
    else:
        _second(fsdp, draft, replicas=replicas)
    _wrapping(fsdp, draft, policy=policy, second=number == 2)
    if fsdp.flag("activation_checkpointing", False):
        draft.put("activation_checkpointing.mode", "full")
    fsdp.ignore("loading and saving are no part of a step", "cpu_ram_efficient_loading",
                "sync_module_states", "state_dict_type")
    fsdp.ignore("blocks of the model are the units here", "transformer_layer_cls_to_wrap")
    for key in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"):
        fsdp.only(key, False, unmodelled="XLA is not modelled")
    fsdp.ignore("an option of XLA", "xla_fsdp_settings")
    fsdp.only("ignored_modules", None, unmodelled="modules outside FSDP are not modelled")
    fsdp.close()


def _first(fsdp: ConfigKeys, draft: Draft, *, replicas: int) -> None:
    """Put FSDP1's options. Newer configs name its sharding under reshard_after_forward. `accelerate
    launch` and transformers set use_orig_params where a config does not say."""
    newer = fsdp.any("reshard_after_forward", "FULL_SHARD")
    value = str(fsdp.any("sharding_strategy", newer)).upper()
    name = NUMBERS.get(value, "FULL_SHARD" if value == "TRUE" else
                       "SHARD_GRAD_OP" if value == "FALSE" else value)
    if name not in SHARDINGS:
        draft.notes.problem(f"{fsdp.prefix}sharding_strategy",
                            f"expected {listed(SHARDINGS)}, found {value[:60]}")
        return
    sharding, hybrid = SHARDINGS[name]
    prefetch, forward = fsdp.any("backward_prefetch"), fsdp.flag("forward_prefetch", False)
    original = fsdp.flag("use_orig_params", True)
    limit = fsdp.flag("limit_all_gathers", True)
    offload = _offload(fsdp)
    if sharding is None:
        draft.put("strategy.name", "ddp")
        draft.notes.assume("NO_SHARD is ddp, which reduces in buckets and not unit by unit")
        return
    draft.put("strategy.name", "fsdp1")
    draft.put("strategy.sharding", sharding)
    draft.put("strategy.backward_prefetch", _prefetch(prefetch, fsdp, draft))
    draft.put("strategy.forward_prefetch", forward)
    draft.put("strategy.use_orig_params", original)
    draft.put("strategy.limit_all_gathers", limit)
    if offload:
        draft.notes.problem(f"{fsdp.prefix}offload_params", "expected false with FSDP1, found "
                                                            "true; it is modelled with version 2")
    if replicas > 1:
        draft.put("strategy.dp_replicate", replicas)
    elif hybrid and draft.cluster is not None:
        draft.put("strategy.dp_shard", draft.cluster.devices_per_node)


def _prefetch(value: object, fsdp: ConfigKeys, draft: Draft) -> str:
    """The backward prefetch of FSDP1; accelerate's default is none."""
    word = {"1": "BACKWARD_PRE", "2": "BACKWARD_POST", "3": "NO_PREFETCH"}.get(
        str(value), "NO_PREFETCH" if value is None else str(value).upper()
    )
    if word not in PREFETCHES:
        draft.notes.problem(f"{fsdp.prefix}backward_prefetch",
                            f"expected {listed(PREFETCHES)}, found {word[:60]}")
    return PREFETCHES.get(word, "none")


def _second(fsdp: ConfigKeys, draft: Draft, *, replicas: int) -> None:
    """Put FSDP2's options, on replicas as HSDP."""
    draft.put("strategy.name", "hsdp" if replicas > 1 else "fsdp2")
    if replicas > 1:
        draft.put("strategy.dp_replicate", replicas)
    reshard = fsdp.flag("reshard_after_forward", True)
    draft.put("strategy.reshard_after_forward", "auto" if reshard else False)
    draft.put("strategy.offload", _offload(fsdp) or None)
    for key in ("forward_prefetch", "use_orig_params", "limit_all_gathers"):
        fsdp.ignore("FSDP2 has no such option", key)
    fsdp.ignore("FSDP2 has reshard_after_forward in its place", "sharding_strategy")
    if fsdp.any("backward_prefetch") not in (None, "NO_PREFETCH"):
        draft.notes.ignored[f"{fsdp.prefix}backward_prefetch"] = "FSDP2 has no such option"


def _offload(fsdp: ConfigKeys) -> bool:
    """True where either spelling asks for it."""
    flags = [fsdp.flag(key, False) for key in ("offload_params", "cpu_offload")]
    return any(flags)


def _wrapping(fsdp: ConfigKeys, draft: Draft, *, policy: str, second: bool) -> None:
    """Put the units: blocks, or the whole model. FSDP2's ends are units apart, unless tied."""
    smallest = fsdp.whole("min_num_params", 0)
    chosen = fsdp.word("auto_wrap_policy", POLICIES, policy)
    if chosen == "SIZE_BASED_WRAP" or smallest:
        draft.notes.problem(
            f"{fsdp.prefix}auto_wrap_policy",
            "expected TRANSFORMER_BASED_WRAP or NO_WRAP, found units by size "
            "(min_num_params), which are not modelled",
        )
    elif chosen == "NO_WRAP":
        draft.put("wrapping.every", "all")
    elif second and draft.ends_can_be_apart:
        draft.put("wrapping.ends", "apart")
        draft.notes.assume("embedding, and last norm with head, are units of their own, as "
                           "accelerate 1.15 makes them; it keeps the latter whole in backward")
    elif second:
        draft.notes.assume("embedding, last norm and head belong to the root's unit, since this "
                           "model cannot have them apart")
