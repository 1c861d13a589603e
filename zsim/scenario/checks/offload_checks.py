"""Refusals of the table `offload`, one line each, the scenario's key first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from zsim.autograd.traced.model import TracedModel
from zsim.cluster.cluster import ClusterSpec
from zsim.errors import listed
from zsim.io.units import counted, format_bytes
from zsim.ir.mesh import Mesh
from zsim.models.checkpointing import Checkpointing
from zsim.models.spec import ModelSpec
from zsim.models.training_options import ON_DEVICE, Offload, Optimizer, Precision
from zsim.strategies import STRATEGIES
from zsim.strategies.flat_buffer import host_buffers


def problems(
    offload: Offload, *, strategy: str, mesh: Mesh, optimizer: Optimizer, precision: Precision,
    model: ModelSpec, checkpointing: Checkpointing, options: Any, cluster: ClusterSpec,
) -> Iterator[str]:
    """The reasons for which `strategy` cannot train so."""
    if offload == ON_DEVICE:
        return
    able = STRATEGIES[strategy].offloadable
    for state in offload.states:
        if state not in able:
            yield f"offload.{state}: {_unable(strategy, state)}"
    yield from model_problems(offload, model)
    if offload.activations == "checkpoint_inputs":
        yield from _checkpoint_inputs(offload, checkpointing)
    if not offload.optimizer:
        if offload.parameters != "cpu" or not STRATEGIES[strategy].offloads_shards_alone:
            yield from _without_optimizer(offload)
            return
        if offload.adam != ON_DEVICE.adam:
            yield from _beside("cpu", ["adam"])
    if offload.parameters and mesh.size(STRATEGIES[strategy].shard_axis) == 1:
        yield "offload.parameters: expected ranks to shard over, found one"
    if offload.optimizer and not precision.master and precision.parameters != "float32":
        yield (
            "offload.optimizer: expected precision.master = true, for the host steps float32 "
            "copies, found false"
        )
    for state in offload.states:
        if getattr(offload, state) == "nvme" and state not in STRATEGIES[strategy].on_drives:
            yield f"offload.{state}: {_not_on_drives(strategy, state)}"
            return
    yield from _of_engine(offload, is_own=STRATEGIES[strategy].is_own)
    yield from _drives(offload, optimizer, is_own=STRATEGIES[strategy].is_own)
    if offload.adam == "deepspeed" and optimizer.name != "adamw":
        yield f"offload.adam: expected torch with {optimizer.name}, found deepspeed"
    if not all(state in able for state in offload.states):
        return
    yield from _pinned(
        STRATEGIES[strategy].pinned(offload, options, model, mesh, precision), cluster,
        remedy="take fewer offload.buffer_count" if offload.uses_drives else "pin nothing",
    )
    if offload.uses_drives:
        if offload.parameters == "nvme" and STRATEGIES[strategy].num_whole(options, model):
            yield (
                "offload.parameters: expected cpu with parameters that stay whole, found nvme; "
                "leave out strategy.persistence_threshold and zero2_threshold"
            )
        yield from STRATEGIES[strategy].drive_problems(
            offload, options, model, mesh, precision, optimizer
        )
        yield from _room_on_drives(
            offload, cluster, nbytes=STRATEGIES[strategy].drive_nbytes(
                offload, options, model, mesh, precision, optimizer
            )
        )


def _of_engine(offload: Offload, *, is_own: bool) -> Iterator[str]:
    """Keys of DeepSpeed's buffers for parameters, where there are none."""
    if offload.parameters != "nvme" or is_own:
        for key in ("max_in_cpu", "parameter_buffer_count", "parameter_buffer_size"):
            if getattr(offload, key) != getattr(ON_DEVICE, key):
                yield f'offload.{key}: expected with deepspeed3 and parameters = "nvme" alone'


def _without_optimizer(offload: Offload) -> Iterator[str]:
    """Keys that are nothing without an offloaded optimizer."""
    alone = ("activations", "pin_memory") if offload.activations else ()
    set_keys = [key for key in _set_keys(offload) if key not in alone]
    on_drives = any(_is_of_drives(offload, key) for key in set_keys)
    yield from _beside("nvme" if on_drives else "cpu", set_keys)


def _beside(optimizer: str, keys: Iterable[str]) -> Iterator[str]:
    alone = ", which is not modelled" * (optimizer == "nvme")
    return (f'offload.{key}: expected with offload.optimizer = "{optimizer}", found without'
            + alone * (key == "parameters") for key in keys)


def _set_keys(offload: Offload) -> list[str]:
    """The keys of `offload` that are not at their defaults, but for its optimizer."""
    names = [each.name for each in fields(Offload) if each.name != "optimizer"]
    return [key for key in names if getattr(offload, key) != getattr(ON_DEVICE, key)]


def _is_of_drives(offload: Offload, key: str) -> bool:
    """True for keys of drives alone; an unused number of buffers is let be, as DeepSpeed does."""
    return getattr(offload, key) == "nvme" or key in (
        "pipeline_read", "pipeline_write", "block_size", "queue_depth"
    )


def model_problems(offload: Offload, model: ModelSpec) -> Iterator[str]:
    """A traced model, which does not tell what autograd saves."""
    if offload.activations and isinstance(model, TracedModel):
        yield (
            "offload.activations: expected a preset, a family or a config.json, found a traced "
            "model, which does not tell which tensors autograd saves"
        )


def _checkpoint_inputs(offload: Offload, checkpointing: Checkpointing) -> Iterator[str]:
    """Inputs of checkpoints where blocks are none, or copies that no compute is beside."""
    if checkpointing.mode == "none" or checkpointing.recompute:
        yield (
            'offload.activations: expected activation_checkpointing.mode = "full", or "selective" '
            'with `save`, for inputs of blocks, found "checkpoint_inputs" without'
        )
    if not offload.pin_memory:
        yield (
            "offload.pin_memory: expected true, for copies that run beside compute, found false"
        )


def _drives(offload: Offload, optimizer: Optimizer, *, is_own: bool) -> Iterator[str]:
    """Options of states on drives, and what these need."""
    if offload.optimizer != "nvme":
        yield from _beside(
            "nvme", [key for key in _set_keys(offload) if _is_of_drives(offload, key)]
        )
        return
    needed = host_buffers.BUFFERS_PER_GROUP * offload.groups_in_flight
    if offload.buffer_count < needed and is_own:
        yield (
            f"offload.buffer_count: expected at least {needed}, four for each group in flight, "
            f"found {offload.buffer_count}"
        )
    if not offload.pin_memory and is_own:
        yield "offload.pin_memory: expected true, for drives read into pinned buffers, found false"
    if optimizer.clip_norm and is_own:
        yield (
            'optimizer.clip_norm: expected 0 with offload.optimizer = "nvme", as gradients are on '
            f"drives before the last one is known, found {optimizer.clip_norm}"
        )


def _room_on_drives(offload: Offload, cluster: ClusterSpec, *, nbytes: int) -> Iterator[str]:
    """A cluster without drives, or with too small ones for `nbytes` of each rank."""
    ranks = min(cluster.devices_per_node, cluster.num_ranks)
    if not nbytes:
        return
    if cluster.drives is None:
        yield (
            f"offload.optimizer: expected a cluster whose file has [drives], found "
            f"{cluster.name} without; {format_bytes(ranks * nbytes)} a node are needed"
        )
    elif cluster.drives.capacity < ranks * nbytes:
        yield (
            f"offload.optimizer: expected at most {format_bytes(cluster.drives.capacity)}, the "
            f"drives of a node of {cluster.name}, found {format_bytes(ranks * nbytes)} of "
            f"{counted(ranks, 'rank')}; shard over more ranks"
        )


def _pinned(nbytes: int, cluster: ClusterSpec, *, remedy: str) -> Iterator[str]:
    """More pinned memory than a node has, with `nbytes` of each rank; no system can give it."""
    ranks = min(cluster.devices_per_node, cluster.num_ranks)
    if 0 < cluster.host.memory < ranks * nbytes:
        yield (
            f"offload.pin_memory: expected at most {format_bytes(cluster.host.memory)}, the host "
            f"memory of a node of {cluster.name}, found {format_bytes(ranks * nbytes)} of "
            f"{counted(ranks, 'rank')}; shard over more ranks, or {remedy}"
        )


def _not_on_drives(strategy: str, state: str) -> str:
    names = [name for name in STRATEGIES if state in STRATEGIES[name].on_drives]
    ignores = STRATEGIES[strategy].library == "deepspeed" and not STRATEGIES[strategy].on_drives
    return (
        f"expected cpu with {strategy}, found nvme, which {listed(names, 'and')} alone have"
        + "; DeepSpeed takes nvme for cpu here" * ignores
    )


def _unable(strategy: str, state: str) -> str:
    if option := STRATEGIES[strategy].offload_option:
        return (
            f"unknown to {strategy}; its option strategy.{option} = true moves all sharded states"
        )
    names = [name for name in STRATEGIES if state in STRATEGIES[name].offloadable]
    return f"expected strategy {listed(names)}, found {strategy}"
