"""Ranks that save fully_shard's parameters and AdamW's states by torch DCP, and load them again on
another number of ranks."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zreal import torch_private
from zreal.meters.collectives import SETTLE_S
from zreal.meters.memory import MemoryMeter
from zreal.modules import modules
from zreal.modules.initial_values import Initialiser
from zreal.observer.subjects import Subject
from zreal.observer.subjects.table import SUBJECTS
from zreal.processes.rendezvous import rendezvous
from zsim.scenario.scenario import Scenario


def saved_and_loaded(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Callable[[Any], None],
) -> dict[str, Any]:
    """A checkpoint that the first `old` ranks save, and its loads by the first rank, the first two
    and so on: bytes and digests."""
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    folder, tables, old = Path(arguments["folder"]), arguments["tables"], arguments["old"]
    groups = {size: dist.new_group(range(size)) for size in range(1, world_size + 1)}
    result: dict[str, Any] = {"loads": {}}
    if rank < old:
        subject = built(tables, groups[old], seed=1)
        stepped(subject)
        result |= saved(subject, folder, groups[old])
    dist.barrier()
    for new, group in groups.items():
        if rank < new:
            result["loads"][str(new)] = loaded(built(tables, group, seed=2), folder, group)
    dist.barrier()
    dist.destroy_process_group()
    return result


def built(tables: dict[str, Any], group: dist.ProcessGroup, *, seed: int) -> Subject:
    """The strategy of the scenario's `tables` on the ranks of `group`, with parameters drawn from
    `seed`."""
    num_ranks = dist.get_world_size(group)
    scenario = Scenario(**tables, cluster={"preset": "cpu-gloo", "ranks": num_ranks}, seed=seed)
    model = modules.empty(scenario.model, seed=seed, checkpointing=scenario.checkpointing)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp_shard",))
    make = Initialiser(
        model=model, spec=scenario.model, seed=seed, device="cpu", meter=MemoryMeter()
    )
    return SUBJECTS[scenario.strategy](scenario, model, mesh, make)


def stepped(subject: Subject) -> None:
    """One step of the optimizer, on gradients that depend on the parameters, makes its states."""
    for parameter in subject.module.parameters():
        parameter.grad = parameter.detach() * 0.1 + 1.0
    subject.optimizer.step()
    subject.optimizer.zero_grad(set_to_none=True)


class MeteredWriter(dcp.FileSystemWriter):
    """Writer that meters the tensors that it makes while it writes; planning exchanges objects."""

    def __init__(self, folder: Path, held: dict[str, Any]) -> None:
        super().__init__(folder)
        self.held, self.peak = held, 0

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        with metered(self):
            return super().write_data(plan, planner)


class MeteredReader(dcp.FileSystemReader):
    """Reader that meters the tensors that it makes while it reads."""

    def __init__(self, folder: Path, held: dict[str, Any]) -> None:
        super().__init__(folder)
        self.held, self.peak = held, 0

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Any:
        with metered(self):
            return super().read_data(plan, planner)


@contextmanager
def metered(storage: MeteredWriter | MeteredReader) -> Iterator[None]:
    """Meter the bytes beyond the state that is held, into the `peak` of `storage`."""
    with MemoryMeter() as meter:
        meter.watch(*tree_leaves(storage.held))
        with meter.span() as span:
            yield
    storage.peak = span.peak - span.start


def saved(subject: Subject, folder: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """The files that `dcp.save` writes, by rank, and the tensors that it makes meanwhile."""
    state = _state(subject)
    writer = MeteredWriter(folder, state)
    dcp.save(state, storage_writer=writer, process_group=group)
    return {"saved": _digests(state), "save_peak": writer.peak, "files": files_in(folder)}


def loaded(subject: Subject, folder: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """The state after `dcp.load`, and the tensors that it makes for that."""
    state = _state(subject)
    reader = MeteredReader(folder, state)
    dcp.load(state, storage_reader=reader, process_group=group)
    set_state_dict(
        subject.module, subject.optimizer, model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return {"loaded": _digests(_state(subject)), "load_peak": reader.peak}


def files_in(folder: Path) -> list[dict[str, int]]:
    """The number of tensors in each rank's file, their bytes by the checkpoint's metadata, and the
    bytes of the file."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    tensors, nbytes = Counter[str](), Counter[str]()
    for index, entry in metadata.storage_data.items():
        stored = metadata.state_dict_metadata[index.fqn]
        if isinstance(stored, TensorStorageMetadata):
            chunk = next(c for c in stored.chunks if index.offset in (None, c.offsets))
            tensors[entry.relative_path] += 1
            nbytes[entry.relative_path] += chunk.sizes.numel() * stored.properties.dtype.itemsize
    return [
        {"tensors": tensors[name], "nbytes": nbytes[name], "size": (folder / name).stat().st_size}
        for name in (f"__{rank}_0.distcp" for rank in range(len(list(folder.glob("*.distcp")))))
    ]


def _state(subject: Subject) -> dict[str, Any]:
    model, optimizer = get_state_dict(subject.module, subject.optimizer)
    return {"model": model, "optimizer": optimizer}


def _digests(state: dict[str, Any]) -> dict[str, str]:
    """A digest of each whole tensor, by name."""
    tensors = dict(state["model"])
    for fqn, states in state["optimizer"]["state"].items():
        tensors |= {f"{fqn}.{name}": value for name, value in states.items()}
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in tensors.items()
    }
    return {
        name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
        for name, value in whole.items()
    }


class Gathers(TorchDispatchMode):
    """Records the bytes of the all-gathers of DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(torch_private.is_dtensor_type(kind) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        if func.name() == "_c10d_functional::all_gather_into_tensor":
            self.nbytes.append(made.nbytes)
        if func.name() == "_c10d_functional::wait_tensor":
            time.sleep(5 * SETTLE_S)  # gloo's thread holds tensors a moment longer
        return made


def consolidated(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Callable[[Any], None],
) -> dict[str, Any]:
    """All-gathers of whole state dicts, with the bytes that they need at most and leave."""
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    group = dist.new_group(range(world_size))
    subject = built(arguments["tables"], group, seed=1)
    stepped(subject)
    options = StateDictOptions(full_state_dict=True, cpu_offload=arguments["cpu_offload"])
    gathers, meter = Gathers(), MemoryMeter()
    with meter, gathers:
        meter.watch(*tree_leaves(_state(subject)))
        with meter.span() as span:
            state = get_state_dict(subject.module, subject.optimizer, options=options)
    dist.destroy_process_group()
    return {
        "gathers": gathers.nbytes, "peak": span.peak - span.start, "kept": span.end - span.start,
        "tensors": sum(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(state)),
    }
