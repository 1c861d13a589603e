"""A TracedModel as JSON and back. A file may come from anywhere, so every number, name and lifetime
in it is checked when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from errno import EINVAL
from pathlib import Path
from typing import Any, Final

from zsim.autograd.lowered import (
    Accumulated,
    Computation,
    InnerCall,
    LoweredModule,
    NodeOver,
    ParameterGradient,
    Recomputed,
    TapeEvent,
)
from zsim.autograd.traced import (
    DEVICES,
    FAMILY,
    HookVariant,
    TracedModel,
    TracedModelError,
    check_whole,
    placed,
    stretch,
    whole,
)
from zsim.io import files
from zsim.io.json_reader import Reader, TwiceError, loads
from zsim.ir.ops import MEMORY_KINDS, Alloc, Free, Kernel
from zsim.models.checkpointing import NO_CHECKPOINTING, SAVEABLE, Checkpointing
from zsim.models.spec import ROOT, Module, Parameter, ParamGroup
from zsim.models.training_options import DTYPE_NBYTES, Batch, Device

SCHEMA = "zsim-traced-model-1"
MAX_FILE_BYTES = 64 * 1024**2
MAX_DIMS = 16
KERNEL_DIMS = 4
TRANSPOSED = "transposed"
MAX_MODULES = 20_000
MAX_VARIANTS = 16
FLOATS: Final = tuple(name for name in DTYPE_NBYTES if "float" in name)
UNCACHED: Final = "uncached"
AUTOCAST: Final = ("autocast", UNCACHED)
"""What a file has besides where the module ran under autocast: its dtype, and the buffers that went
when forward was over."""
FROZEN: Final = "frozen"
NOT_IN_LOSS: Final = "not in the loss"
"""What follows a parameter's shape in a file where it needs no gradient."""
RECOMPUTING: Final = "recomputing"
"""What a file has besides where the module was traced with activation checkpointing as well."""
OTHERWISE: Final = "otherwise"
"""What a file has besides where other strategies than fully_shard have other lowered modules of it.
"""
GOES_ON: Final = "gradient that is not the last"
WAITS: Final = "gradient that waits"
COPIED: Final = "gradient that waits, a copy"
ACCUMULATED: Final = "accumulated"
"""A gradient of which the file says when it is accumulated, and that it is. In older files none
does."""
CALLS: Final = "calls a unit"
RETURNS: Final = "a unit returns"
PASSES_ON: Final = "passes_on"
"""What a unit in a block has besides where the gradient of its input is added to others."""
GIVEN_BACK: Final = "given_back"
"""What a unit has besides where its caller lets go of something when it returns. In older files
none has."""
HANDS_ON: Final = "hands_on"
"""What a unit has besides where it returns what a unit in it made. In older files none has."""
COMPUTED: Final = ("input_needs_gradient", "forward", "backward", "recompute")


def dump(model: TracedModel) -> str:
    """The model as JSON text; equal models give equal text."""
    table = {
        "schema": SCHEMA,
        "name": model.name,
        "dtype": model.dtype,
        "micro_batch": model.batch.micro_batch,
        "sequence_length": model.batch.sequence_length,
        "casts_input": model.casts_input,
        "buffer_nbytes": model.buffer_nbytes,
        "input_nbytes": model.input_nbytes,
        "devices": list(model.devices),
        "registered": list(model.registered),
        "buffers": [list(buffer) for buffer in model.buffers],
        "units": [[unit.fqn, [_parameter_row(p) for p in unit.parameters]] for unit in model.units],
        "modules": [
            {
                "fqn": module.fqn,
                "unit": module.unit,
                "reads": [[op.weight, op.bias] for op in module.operators if op.weight],
                **_lowered_table(lowered),
            }
            for module, lowered in zip(model.modules, model.lowered, strict=True)
        ],
    }
    if model.recomputing:
        table[RECOMPUTING] = [
            [asdict(asked), _lowered_tables(again)] for asked, again in model.recomputing
        ]
    if model.hook_variants:
        table[OTHERWISE] = [
            [
                one.unit_hooks,
                [asdict(one.checkpointing)] * (one.checkpointing != NO_CHECKPOINTING),
                _lowered_tables(one.lowered),
                *([one.fails] if one.fails else []),
            ]
            for one in model.hook_variants
        ]
    if model.autocast != "none":
        table |= {
            "autocast": model.autocast,
            "uncached": [event.buffer for event in model.lowered[-1].freed_with_autocast_cache],
        }
    return json.dumps(table, separators=(",", ":")) + "\n"


def _lowered_tables(modules: Iterable[LoweredModule]) -> list[dict[str, Any]]:
    """Those of another form, the last of which says what autocast's cache holds in it."""
    uncached = ([event.buffer for event in one.freed_with_autocast_cache] for one in modules)
    return [
        _lowered_table(one) | ({UNCACHED: names} if names else {})
        for one, names in zip(modules, uncached, strict=True)
    ]


def _lowered_table(lowered: LoweredModule) -> dict[str, Any]:
    return {
        "input_needs_gradient": lowered.input_needs_gradient,
        "forward": _computation_table(lowered.forward),
        "backward": _computation_table(lowered.backward),
        "recompute": _kernel_table(lowered.recompute),
        **(
            {PASSES_ON: [_event_table(event) for event in lowered.events_after_hook]}
            if lowered.events_after_hook
            else {}
        ),
        **({GIVEN_BACK: list(lowered.caller_frees)} if lowered.caller_frees else {}),
        **({HANDS_ON: [True]} if lowered.returns_inner_output else {}),
    }


def _parameter_row(parameter: Parameter) -> list[Any]:
    mark = FROZEN if not parameter.requires_grad else NOT_IN_LOSS if not parameter.in_loss else ""
    return [parameter.fqn, list(parameter.shape), *([mark] if mark else [])]


def _kernel_table(kernels: tuple[Kernel, ...]) -> list[list[Any]]:
    return [
        [
            kernel.operator, kernel.flops, kernel.nbytes, kernel.dtype, list(kernel.shape),
            *([TRANSPOSED] if kernel.transposed else []),
        ]
        for kernel in kernels
    ]


def _computation_table(computation: Computation) -> dict[str, Any]:
    return {
        "kernels": _kernel_table(computation.kernels),
        "memory": [_event_table(event) for event in computation.memory],
    }


def _event_table(event: TapeEvent) -> list[Any]:
    if isinstance(event, Alloc):
        return ["+", event.buffer, event.kind, event.nbytes]
    if isinstance(event, Recomputed):
        return ["recomputed"]
    if isinstance(event, NodeOver):
        return ["node over"]
    if isinstance(event, InnerCall):
        return [RETURNS if event.returns else CALLS, event.unit, event.kernels]
    if isinstance(event, Free):
        return ["-", event.buffer]
    if isinstance(event, Accumulated):
        return [ACCUMULATED, event.fqn]
    if event.accumulation_is_marked:
        return [COPIED if event.is_copy else WAITS, event.fqn]
    return [GOES_ON if event.node_makes_more else "gradient", event.fqn]


def save(model: TracedModel, path: str | Path) -> None:
    """Write `dump(model)` to `path`."""
    files.write(Path(path), dump(model))


def load(path: str | Path) -> TracedModel:
    """The traced model in a file; TracedModelError, with the place in it, for anything else."""
    try:
        if Path(path).is_fifo() or Path(path).is_char_device():  # which may never end
            raise OSError(EINVAL, "a pipe or a device")
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a path may hold what no path can
        found = error.strerror if isinstance(error, OSError) else "a path that cannot be one"
        raise TracedModelError(
            where=repr(str(path)[:200]), expected="a traced model", found=str(found)
        ) from None
    return parse(data, where=str(path))


def parse(data: bytes, *, where: str = "traced model") -> TracedModel:
    """The traced model in JSON; TracedModelError, which begins with `where`, for anything else."""
    if len(data) > MAX_FILE_BYTES:
        raise TracedModelError(
            where=where, expected=f"at most {MAX_FILE_BYTES:,} bytes", found="more"
        )
    try:
        table = loads(data.decode("utf-8"))
    except TwiceError as error:
        raise TracedModelError(
            where=where, expected="each key of a table once", found=str(error)
        ) from None
    except (ValueError, RecursionError):
        raise TracedModelError(where=where, expected="a traced model", found="no JSON") from None
    return check_whole(_model(Reader(table, where)))


def _model(reader: Reader) -> TracedModel:
    scalars = (
        "name", "dtype", "micro_batch", "sequence_length", "casts_input", "buffer_nbytes",
        "input_nbytes", "devices",
    )
    cast = AUTOCAST if isinstance(reader.value, dict) and AUTOCAST[0] in reader.value else ()
    table = reader.table(
        "schema", *scalars, *cast, "units", "modules",
        lists=("registered", "buffers", RECOMPUTING, OTHERWISE),
    )
    table["schema"].one_of((SCHEMA,))
    rows = list(table["modules"].items(at_most=MAX_MODULES))
    pairs = [_module(module, last=place == len(rows) - 1) for place, module in enumerate(rows)]
    modules = [module for module, _ in pairs]
    uncached = tuple(Free(buffer.name()) for buffer in table["uncached"].items()) if cast else ()
    units = tuple(_unit(unit) for unit in table["units"].items(at_most=MAX_MODULES))
    return TracedModel(
        name=table["name"].name(), family=FAMILY, modules=placed(modules, units=units), units=units,
        idle=tuple(
            unit.fqn
            for unit in units
            if unit.fqn not in {ROOT, *(module.unit for module in modules)}
        ),
        lowered=whole([lowered for _, lowered in pairs], uncached),
        dtype=table["dtype"].one_of(FLOATS),
        batch=Batch(
            micro_batch=table["micro_batch"].size(), sequence_length=table["sequence_length"].size()
        ),
        casts_input=table["casts_input"].truth(),
        autocast=table["autocast"].one_of(FLOATS) if cast else "none",
        buffer_nbytes=table["buffer_nbytes"].size(), input_nbytes=table["input_nbytes"].size(),
        devices=_devices(table["devices"]),
        registered=tuple(fqn.name() for fqn in table["registered"].items()),
        buffers=tuple(_buffer(buffer) for buffer in table["buffers"].items()),
        recomputing=tuple(
            _variant(variant, modules) for variant in table[RECOMPUTING].items(at_most=MAX_VARIANTS)
        ),
        hook_variants=tuple(
            _otherwise(row, modules) for row in table[OTHERWISE].items(at_most=3 * MAX_VARIANTS + 3)
        ),
    )


def _variant(
    reader: Reader, modules: list[Module]
) -> tuple[Checkpointing, tuple[LoweredModule, ...]]:
    asked, rows = reader.row(2)
    return _checkpointing(asked), _each_lowered(rows, modules)


def _otherwise(reader: Reader, modules: list[Module]) -> HookVariant:
    told = isinstance(reader.value, list) and len(reader.value) == 4
    hooks, given, rows, *fails = reader.row(4 if told else 3)
    asked = [_checkpointing(table) for table in given.items(at_most=1)]
    return HookVariant(
        unit_hooks=hooks.one_of(("none", "fsdp1_views", "raw_inputs")),
        checkpointing=asked[0] if asked else NO_CHECKPOINTING,
        lowered=_each_lowered(rows, modules) if list(rows.items(at_most=MAX_MODULES)) else (),
        fails=fails[0].sentence() if fails else "",
    )


def _each_lowered(rows: Reader, modules: list[Module]) -> tuple[LoweredModule, ...]:
    tables = [
        row.table(*COMPUTED, lists=(PASSES_ON, GIVEN_BACK, HANDS_ON, UNCACHED))
        for row in rows.items(at_most=MAX_MODULES)
    ]
    if len(tables) != len(modules):
        raise rows.refuse(f"one row for each of the {len(modules)} modules")
    lowered = [_lowered(module, table) for module, table in zip(modules, tables, strict=True)]
    return whole(
        lowered,
        tuple(Free(buffer.name()) for table in tables for buffer in table[UNCACHED].items()),
    )


def _checkpointing(reader: Reader) -> Checkpointing:
    """Of whole units: a trace does not know the kinds of its operators."""
    table = reader.table("mode", "every", "save", "save_every", "recompute", "early_stop")
    list(table["recompute"].items(at_most=0))
    return Checkpointing(
        mode=table["mode"].one_of(("full", "selective")),
        every=table["every"].size(),
        save=tuple(kind.one_of(SAVEABLE) for kind in table["save"].items(at_most=len(SAVEABLE))),
        save_every=table["save_every"].size(),
        early_stop=table["early_stop"].truth(),
    )


def _buffer(reader: Reader) -> tuple[str, int]:
    dtype, nbytes = reader.row(2)
    return dtype.name(), nbytes.size()


def _devices(reader: Reader) -> tuple[Device, ...]:
    given = [device.one_of(DEVICES) for device in reader.items(at_most=len(DEVICES))]
    if not given:
        raise reader.refuse("at least one device")
    return tuple(device for device in DEVICES if device in given)


def _unit(reader: Reader) -> ParamGroup:
    fqn, parameters = reader.row(2)
    return ParamGroup(
        fqn=fqn.name(), parameters=tuple(_parameter(parameter) for parameter in parameters.items())
    )


def _parameter(reader: Reader) -> Parameter:
    marked = isinstance(reader.value, list) and len(reader.value) == 3
    fqn, shape, *rest = reader.row(3 if marked else 2)
    marks = [mark.one_of((FROZEN, NOT_IN_LOSS)) for mark in rest]
    dims = tuple(dim.size() for dim in shape.items(at_most=MAX_DIMS))
    parameter = Parameter(
        fqn=fqn.name(), shape=dims, requires_grad=FROZEN not in marks,
        in_loss=NOT_IN_LOSS not in marks,
    )
    if not Reader(parameter.numel, f"{reader.where}: elements").size() and not marks:
        raise shape.refuse("sizes above 0 of what is trained")
    return parameter


def _module(reader: Reader, *, last: bool) -> tuple[Module, LoweredModule]:
    table = reader.table("fqn", "unit", "reads", *COMPUTED, lists=(PASSES_ON, GIVEN_BACK, HANDS_ON))
    fqn, unit = table["fqn"].name(), table["unit"].name()
    rows = [row.row(2) for row in table["reads"].items()]
    weights = tuple((weight.name(), bias.name(empty=True)) for weight, bias in rows)
    module = stretch(fqn, unit=unit, weights=weights, last=last)
    return module, _lowered(module, table)


def _lowered(module: Module, table: dict[str, Reader]) -> LoweredModule:
    return LoweredModule(
        fqn=module.fqn,
        unit=module.unit,
        forward=_computation(table["forward"]),
        backward=_computation(table["backward"]),
        input_needs_gradient=table["input_needs_gradient"].truth(),
        recompute=_kernels(table["recompute"]),
        events_after_hook=tuple(_event(event) for event in table[PASSES_ON].items()),
        caller_frees=tuple(buffer.name() for buffer in table[GIVEN_BACK].items()),
        returns_inner_output=any(mark.truth() for mark in table[HANDS_ON].items(at_most=1)),
    )


def _kernels(reader: Reader) -> tuple[Kernel, ...]:
    return tuple(_kernel(row) for row in reader.items())


def _kernel(reader: Reader) -> Kernel:
    transposed = isinstance(reader.value, list) and len(reader.value) == 6
    operator, flops, nbytes, dtype, shape, *marks = reader.row(6 if transposed else 5)
    for mark in marks:
        mark.one_of((TRANSPOSED,))
    sizes = tuple(size.size() for size in shape.items(at_most=KERNEL_DIMS))
    if len(sizes) not in (0, KERNEL_DIMS) or 0 in sizes:
        raise shape.refuse(f"{KERNEL_DIMS} sizes above 0, or none")
    if transposed and not sizes:
        raise shape.refuse(f"{KERNEL_DIMS} sizes above 0 of a product that is {TRANSPOSED}")
    return Kernel(
        operator.name(), flops.size(), nbytes.size(), dtype.name(), shape=sizes,
        transposed=transposed,
    )


def _computation(reader: Reader) -> Computation:
    table = reader.table("kernels", "memory")
    memory = tuple(_event(event) for event in table["memory"].items())
    return Computation(kernels=_kernels(table["kernels"]), memory=memory)


def _event(reader: Reader) -> TapeEvent:
    signs = (
        "+", "-", "gradient", GOES_ON, "node over", "recomputed", CALLS, RETURNS, WAITS, COPIED,
        ACCUMULATED,
    )
    sign = next(reader.items(), reader).one_of(signs)
    if sign == "+":
        _, buffer, kind, nbytes = reader.row(4)
        return Alloc(buffer.name(), kind.one_of(MEMORY_KINDS), nbytes.size())
    if sign in ("recomputed", "node over"):
        reader.row(1)
        return Recomputed() if sign == "recomputed" else NodeOver()
    if sign in (CALLS, RETURNS):
        _, unit, kernels = reader.row(3)
        return InnerCall(unit.name(), returns=sign == RETURNS, kernels=kernels.size())
    _, name = reader.row(2)
    if sign == "-":
        return Free(name.name())
    if sign == ACCUMULATED:
        return Accumulated(name.name())
    return ParameterGradient(
        name.name(),
        node_makes_more=sign == GOES_ON,
        accumulation_is_marked=sign in (WAITS, COPIED),
        is_copy=sign == COPIED,
    )
