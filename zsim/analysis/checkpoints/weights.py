"""Whole weights in one file of rank 0, as DeepSpeed's save_16bit_model gathers them at stage 3.

Module by module its parameters are all-gathered, and rank 0 copies them to host memory. They are
broadcast then, as DeepSpeed takes them for changed. A tied weight is gathered by each module that
reads it. Parameters that persist are gathered once more at the end. Source: DeepSpeed 0.19.8,
runtime/engine.py (_zero3_consolidated_16bit_state_dict), as measured on gloo.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from zsim.analysis.checkpoints.files.formats import CheckpointFile
from zsim.analysis.checkpoints.program import RankFiles, pageable
from zsim.ir.buffers import Buffer, numbered
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.ir.sharding import padded_size
from zsim.models.spec import Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.scenario.scenario import Scenario
from zsim.strategies.deepspeed_engine.shards.parameters import persistent_among

NAME = "pytorch_model.bin"
"""The file's name by default."""
WEIGHTS = Buffer("weights")


def weights_file(scenario: Scenario) -> CheckpointFile:
    """The file, in which a tied weight is once."""
    element = DTYPE_NBYTES[scenario.precision.parameters]
    return CheckpointFile(
        name=NAME, rank=0, tensors=tuple([p.numel * element for p in scenario.model.parameters])
    )


def save_weights(ops: RankFiles, scenario: Scenario, rank: int) -> None:
    """Issue the ops of one rank, in sequence. On a CPU rank 0 keeps what is gathered, uncopied."""
    element, kept = DTYPE_NBYTES[scenario.precision.parameters], dict[str, Buffer]()
    for parameters in owned_by_modules(scenario):
        gathered = {p.fqn: _gathered(ops, scenario, p) for p in parameters}
        for p in parameters:
            if rank or p.fqn in kept:
                continue
            kept[p.fqn], nbytes = gathered[p.fqn], p.numel * element
            if ops.has_gpu:
                ops.last = ops.to_host(
                    WEIGHTS, nbytes, waits=ops.after(), host=(pageable(kept[p.fqn], nbytes),),
                    over_link=True,
                )
            else:
                del gathered[p.fqn]
        for p in parameters:
            ops.exchange("broadcast", p.numel * element, WEIGHTS)
        _free(ops, gathered.values())
    for p in persistent_among(scenario.model.named_parameters, scenario.options):
        _free(ops, [_gathered(ops, scenario, p)])
    if rank == 0:
        ops.last = ops.files("write", WEIGHTS, weights_file(scenario).nbytes, waits=ops.after())
        gone = tuple(map(Free, kept.values()))
        ops.step.issue(
            "free", WEIGHTS, stream="host", waits=ops.after(),
            memory=() if ops.has_gpu else gone, host=gone if ops.has_gpu else (),
        )


def _gathered(ops: RankFiles, scenario: Scenario, parameter: Parameter) -> Buffer:
    """All-gather a parameter into that buffer; its shard comes to the GPU first if it is in host
    memory."""
    num_ranks, element = scenario.world_size, DTYPE_NBYTES[scenario.precision.parameters]
    name = numbered(WEIGHTS, str(len(ops.step.ops)))
    nbytes = padded_size(parameter.numel, num_ranks) * element
    memory: list[MemoryEvent] = [Alloc(name, "unsharded_parameters", nbytes)]
    if ops.has_gpu and scenario.offload.parameters:
        moved = Alloc(numbered(name, "shard"), "communication", nbytes // num_ranks)
        memory.append(Free(moved.buffer))
        ops.last = ops.to_device(
            WEIGHTS, moved.nbytes, waits=ops.after(), over_link=True, memory=(moved,)
        )
    ops.last = ops.step.issue(
        "all_gather", WEIGHTS, stream="all_gather", waits=ops.after(), group="dp_shard",
        nbytes=nbytes, memory=tuple(memory),
    )
    return name


def _free(ops: RankFiles, gathered: Iterable[Buffer]) -> None:
    gone = tuple(map(Free, gathered))
    ops.step.issue("free", WEIGHTS, stream="host", waits=ops.after(), memory=gone)


def owned_by_modules(scenario: Scenario) -> Iterator[tuple[Parameter, ...]]:
    """The parameters of each module that has some, in the order of the real module. Those that read
    a tied weight come last."""
    model, owned = scenario.model, dict[str, list[str]]()
    known = {p.fqn: p for p in model.named_parameters}
    for fqn in known:
        owned.setdefault(fqn.rpartition(".")[0], []).append(fqn)
    for operator in (each for module in model.modules for each in module.operators):
        if operator.weight and operator.name not in owned:
            owned[operator.name] = [operator.weight]
    yield from (tuple([known[fqn] for fqn in fqns]) for fqns in owned.values())
