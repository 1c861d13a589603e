"""Ranks of DeepSpeed's engine that save, convert by ds_to_universal, and load the universal
checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import io
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from zreal.meters.memory import MemoryMeter
from zreal.observer.observer import Observation, observe
from zreal.processes.rank_settings import settle
from zreal.processes.rendezvous import rendezvous
from zsim.scenario.scenario import parse

SAVED, UNIVERSAL, WEIGHTS = "saved", "universal", "pytorch_model.bin"
OF_ENGINE = ("watch", "zeros_like", "aten::eq")
"""Operators that make what is none of a load's host memory: the engine's states, and bytes that
compare step counters."""


def saved_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> dict[str, Any]:
    """The states that a rank saves. Rank 0 converts them: tensors by file, reads, peaks."""
    trained = _trained(arguments["text"], rank=rank, world_size=world_size, port=port)
    folder = Path(arguments["folder"])
    trained.subject.module.save_checkpoint(folder, tag=SAVED)
    dist.barrier()
    result: dict[str, Any] = {"states": _states(trained), "weights": _weights(trained)}
    if rank == 0:
        result |= _converted(folder)
    dist.barrier()
    return result


def loaded_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> dict[str, Any]:
    """The states that a rank has loaded, the files that it read, and its peak of host memory."""
    trained = _trained(arguments["text"], rank=rank, world_size=world_size, port=port)
    folder, engine = Path(arguments["folder"]), trained.subject.module
    engine._config.load_universal_checkpoint = True
    meter = MemoryMeter(log=True)
    trained.recorder.take()
    with meter, trained.recorder, reads_of(folder / UNIVERSAL) as reads:
        meter.watch(*trained.subject.states(), *trained.subject.flat(), *engine.parameters())
        engine.load_checkpoint(folder, tag=UNIVERSAL)
    gathered = [each.nbytes for each in trained.recorder.take() if each.op == "all_gather"]
    return {
        "states": _states(trained), "weights": _weights(trained), "reads": reads,
        "peak": _host_peak(meter), "gathered": gathered,
    }


def weights_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int, **_: Any
) -> dict[str, Any]:
    """Collectives in which a rank saves whole weights, by kind and bytes. Rank 0 has also the bytes
    of each tensor in the file."""
    trained = _trained(arguments["text"], rank=rank, world_size=world_size, port=port)
    folder, engine = Path(arguments["folder"]), trained.subject.module
    engine._config.zero_config.gather_16bit_weights_on_model_save = True
    trained.recorder.take()
    with trained.recorder:
        is_saved = engine.save_16bit_model(folder, WEIGHTS)
    moved = [(each.op, each.nbytes) for each in trained.recorder.take()]
    dist.barrier()
    sizes = {
        name: each.nbytes for name, each in torch.load(folder / WEIGHTS).items()
    } if rank == 0 else {}
    return {"is_saved": is_saved, "moved": moved, "sizes": sizes}


def _trained(text: str, *, rank: int, world_size: int, port: int) -> Observation:
    settle()
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return observe(parse(text.encode(), where="scenario"), rank=rank)


def _converted(folder: Path) -> dict[str, Any]:
    """The conversion by one process, so that its memory is seen, with the peak of each phase."""
    from deepspeed.checkpoint import ds_to_universal

    meter, peaks, parallel = MemoryMeter(), list[int](), ds_to_universal._do_parallel_work

    def next_phase() -> None:
        peaks.append(meter.peak)
        meter.reset_peak()

    def metered(*arguments: Any) -> Any:
        next_phase()
        made = parallel(*arguments)
        next_phase()
        return made

    ds_to_universal._do_parallel_work = metered
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with meter, reads_of(folder) as reads, quiet[0], quiet[1]:
        ds_to_universal.main(Namespace(
            input_folder=str(folder / SAVED), output_folder=str(folder / UNIVERSAL),
            num_extract_workers=1, num_merge_workers=1, keep_temp_folder=True, strict=True,
            inject_missing_state=True,
        ))
    next_phase()
    start, extract, _, merge, finish = peaks
    return {
        "files": {
            str(path.relative_to(folder)): tensors(path)
            for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "latest"
            and path.suffix not in (".py", "") and not path.name.startswith("latest")
        },
        "reads": reads, "peaks": [max(start, extract), merge, finish],
    }


def tensors(path: Path) -> list[int]:
    """Bytes of each tensor of a file of torch.save, smallest first; views of one count once."""
    return sorted({
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for leaf in tree_leaves(torch.load(path, weights_only=False))
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes()
    }.values())


@contextmanager
def reads_of(folder: Path) -> Iterator[list[str]]:
    """The files of the folder that torch.load reads, in order."""
    made, load = list[str](), torch.load

    def noted(file: Any, *arguments: Any, **options: Any) -> Any:
        made.append(str(Path(file).relative_to(folder)))
        return load(file, *arguments, **options)

    torch.load = noted
    try:
        yield made
    finally:
        torch.load = load


def _host_peak(meter: MemoryMeter) -> int:
    """The most bytes of tensors in files and of copies of them."""
    level = peak = 0
    for name, change in meter.events or []:
        if not any(operator in name for operator in OF_ENGINE):
            level += change
            peak = max(peak, level)
    return peak


def _weights(trained: Observation) -> dict[str, str]:
    """A digest of each whole parameter as forward uses it."""
    import deepspeed

    named = dict(trained.subject.module.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: _digest(parameter) for name, parameter in named.items()}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().numpy().tobytes()).hexdigest()


def _states(trained: Observation) -> dict[str, str]:
    """A digest of each whole float32 parameter and moment."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = trained.subject.module
    return {
        f"{name}/{key}": _digest(whole)
        for name, parameter in engine.module.named_parameters()
        for key, whole in (
            ("fp32", safe_get_full_fp32_param(parameter)),
            *((key, safe_get_full_optimizer_state(parameter, key))
              for key in ("exp_avg", "exp_avg_sq")),
        )
    }
