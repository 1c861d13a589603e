"""Construction of flat parameters, and the storages that the first forward makes, as torch's FSDP
does."""

from __future__ import annotations

from collections.abc import Iterator

from zsim.ir.buffers import form_of
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.models.spec import ROOT, ModelSpec
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.flat_parameter.flat_parameter import FlatParameter
from zsim.strategies.flat_parameter.flat_parameter_step import FlatParameterStep
from zsim.strategies.fsdp.passes import ORIGINAL


def construction(
    flats: list[FlatParameter], model: ModelSpec, *, kept: tuple[int, ...]
) -> StepBuilder:
    """The model is on the meta device, or made whole first. Then every unit's parameters are made
    and concatenated, and a shard is copied out: units in units first.

    `kept` are the elements of each flat parameter, without padding, that this rank's shard has.
    """
    step, element = StepBuilder(), DTYPE_NBYTES[ORIGINAL]
    sizes = {parameter.fqn: parameter.numel * element for parameter in model.parameters}
    of_rank = {flat.fqn: (flat, numel) for flat, numel in zip(flats, kept, strict=True)}
    for unit in model.units if model.made_whole else ():
        whole = [
            Alloc(form_of(p.fqn, "whole"), "parameters", sizes[p.fqn]) for p in unit.parameters
        ]
        step.issue("alloc", unit.fqn, stream="host", memory=whole)
    for fqn in [*[unit.fqn for unit in model.inside_out], *([ROOT] if ROOT in of_rank else [])]:
        flat, numel = of_rank[fqn]
        if not model.made_whole:
            whole = [
                Alloc(form_of(name, "whole"), "parameters", sizes[name]) for name in flat.names
            ]
            step.issue("alloc", fqn, stream="host", memory=whole)
        step.issue("alloc", flat.fqn, stream="host", memory=_flattened(flat, numel))
    return step


def _flattened(flat: FlatParameter, kept: int) -> Iterator[MemoryEvent]:
    """Padding is made of ones; the shard is a copy of a chunk, and padded by another copy where the
    chunk is short or empty."""
    element = DTYPE_NBYTES[ORIGINAL]
    for index, numel in enumerate(flat.paddings):
        yield Alloc(form_of(flat.fqn, "ones"), "temporaries", numel * element)
        yield Alloc(form_of(flat.fqn, "padding", index), "temporaries", numel * element)
        yield Free(form_of(flat.fqn, "ones"))
    yield Alloc(form_of(flat.fqn, "flat"), "temporaries", flat.numel * element)
    for index, _ in enumerate(flat.paddings):
        yield Free(form_of(flat.fqn, "padding", index))
    short = kept < flat.shard
    chunk = form_of(flat.fqn, "chunk") if short else form_of(flat.fqn, "shard")
    if kept:
        yield Alloc(chunk, "temporaries" if short else "parameters", kept * element)
    if short:
        yield Alloc(form_of(flat.fqn, "shard"), "parameters", flat.shard * element)
        if kept:
            yield Free(chunk)
    yield Free(form_of(flat.fqn, "flat"))
    for fqn in flat.names:
        yield Free(form_of(fqn, "whole"))


def lazy_init(step: FlatParameterStep, flats: list[FlatParameter]) -> None:
    """The first forward makes each storage that will be resized, the cast shard's first, and frees
    it at once."""
    narrow = DTYPE_NBYTES[step.training.precision.parameters]
    casts = step.training.precision.parameters != ORIGINAL
    for flat in flats:
        sizes = [flat.shard * narrow] if casts else []
        sizes += [flat.padded * narrow]
        sizes += [flat.padded * DTYPE_NBYTES[ORIGINAL]] if casts else []
        memory: list[MemoryEvent] = []
        for index, nbytes in enumerate(sizes):
            name = form_of(flat.fqn, "storage", index)
            memory += [Alloc(name, "temporaries", nbytes), Free(name)]
        step.issue("alloc", flat.fqn, stream="host", memory=memory)
