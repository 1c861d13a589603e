"""Ranks of DeepSpeed's engine with states on drives, that save and load checkpoints of its own."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.measured.deepspeed_drives import logged
from tests.zreal.checkpoints.universal_ranks import SAVED, UNIVERSAL, tensors
from zreal.observer.observer import observe
from zreal.observer.subjects import deepspeed_engine
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zsim.scenario.scenario import parse


class _LoadedError(Exception):
    """Ends a rank whose engine is new."""


def saved_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> dict[str, Any]:
    """The sub-groups that a rank saves, and on rank 0 files, and what ds_to_universal ends with."""
    _begin(rank=rank, world_size=world_size, port=port)
    folder = Path(arguments["folder"])
    with deepspeed_engine.files_removed():
        trained = observe(parse(arguments["text"].encode(), where="saved"), rank=rank)
        engine = trained.subject.module
        groups = _groups(engine)
        engine.save_checkpoint(folder, tag=SAVED)
        dist.barrier()
    if rank:
        return {"groups": groups}
    saved = folder / SAVED
    return {"groups": groups, "converted": _converted(folder), "files": {
        **{path.name: tensors(path) for path in saved.glob("*optim_states.pt")},
        **{str(path.relative_to(saved)): [path.stat().st_size] for path in saved.rglob("*.swp")},
    }}


def loaded_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> dict[str, Any]:
    """The sub-groups of a rank's new engine, as it is made and as it has loaded a checkpoint, and
    that load's requests to drives."""
    _begin(rank=rank, world_size=world_size, port=port)
    seen: dict[str, Any] = {}
    log = list[str]()

    def loads(_: Any, engine: Any) -> None:
        seen["made"] = _groups(engine)
        log.clear()
        engine.load_checkpoint(Path(arguments["folder"]), tag=SAVED)
        seen["requests"] = [line for line in log if line.split()[-1].isdecimal()]
        seen["loaded"] = _groups(engine)
        raise _LoadedError

    deepspeed_engine.EngineOptimizer.__init__ = loads  # type: ignore[method-assign]
    with deepspeed_engine.files_removed(), logged(log):
        try:
            observe(parse(arguments["text"].encode(), where="loaded"), rank=rank)
        except _LoadedError:
            dist.barrier()
    return seen


def _begin(*, rank: int, world_size: int, port: int) -> None:
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    deepspeed_engine._deepspeed("cpu")


def _groups(engine: Any) -> list[dict[str, Any]]:
    """Each sub-group's digests of float32 weights and moments, and whether drives have it."""
    zero, made = engine.optimizer, []
    for number, master in enumerate(zero.fp32_partitioned_groups_flat):
        if is_on_drive := zero._swappable_optimizer_subgroup(number):
            zero._optimizer_states_and_gradient_swap_in(number)
        states = zero.optimizer.state.get(master, {})
        made.append({
            "is_on_drive": is_on_drive, "master": _digest(master),
            "moments": {name: _digest(each) for name, each in states.items() if name != "step"},
        })
        if is_on_drive:
            zero._release_swap_buffers(number)
    return made


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def _converted(folder: Path) -> str:
    """The error of ds_to_universal, "" for none."""
    from deepspeed.checkpoint import ds_to_universal

    try:
        ds_to_universal.main(Namespace(
            input_folder=str(folder / SAVED), output_folder=str(folder / UNIVERSAL),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=True, strict=True,
            inject_missing_state=True,
        ))
    except RuntimeError as error:
        return str(error)
    return ""
