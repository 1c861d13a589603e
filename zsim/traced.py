"""TracedModel: a model that was seen running, as data: its units, and what each stretch computes, allocates and frees.

A tracer makes it once; strategies then plan with it as with any other model. As a file it is JSON from anywhere, so every
number, name and lifetime is checked when it is read. It knows no torch and no operator's meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from errno import EINVAL
from pathlib import Path
from typing import Any, Final, Literal

from zsim.errors import ZsimError
from zsim.json_reader import Reader
from zsim.model import ROOT, ModelSpec, Module, Parameter, ParamGroup
from zsim.operators import Operator, OperatorKind
from zsim.ops import MEMORY_KINDS, Alloc, Free, Kernel
from zsim.traced_problems import problems
from zsim.training import (
    DTYPE_NBYTES,
    NOTHING,
    Batch,
    Computation,
    Device,
    Dtype,
    LoweredModule,
    NodeOver,
    ParameterGradient,
    Recomputed,
    TapeEvent,
)

FAMILY: Final = "traced"
SCHEMA = "zsim-traced-model-1"
MAX_FILE_BYTES = 64 * 1024**2
MAX_DIMS = 16
KERNEL_DIMS = 4
MAX_MODULES = 20_000
INPUT = "x"
"""The buffer of the first cast input; of further ones it is the beginning of the name."""
LOSS = "loss"
FLOATS: Final = tuple(name for name in DTYPE_NBYTES if "float" in name)
AUTOCAST: Final = ("autocast", "uncached")
"""What a file has besides where the module ran under autocast: its dtype, and the buffers that went when forward was over."""
FROZEN: Final = "frozen"
"""What follows a parameter's shape in a file where it needs no gradient."""

DEVICES: Final[tuple[Device, ...]] = ("cpu", "cuda")
DEVICE_NAMES: Final[dict[Device, str]] = {"cpu": "a CPU", "cuda": "CUDA"}


class TracedModelError(ZsimError):
    """A traced model that does not hold together, or a file that holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel(ModelSpec):
    """A ModelSpec that brings its lowered modules along. It stands for the batch, dtype and device it was traced at.

    `casts_input`: floating-point inputs, of the model and of its units, were cast to `dtype` as fully_shard does.
    `autocast`: the dtype of torch.autocast around its forward.
    `buffer_nbytes` are held by the module itself (its buffers, and what its first forward left in it), `input_nbytes` by
    the caller; no strategy counts either. `devices`: those whose kernels it shows, both where none of them depends on that.
    """

    lowered: tuple[LoweredModule, ...]
    dtype: Dtype
    batch: Batch
    casts_input: bool
    autocast: Dtype | Literal["none"] = "none"
    buffer_nbytes: int = 0
    input_nbytes: int = 0
    devices: tuple[Device, ...] = DEVICES

    def modules_for(
        self,
        batch: Batch,
        *,
        dtype: str,
        casts_input: bool,
        checkpointed: bool = False,
        autocast: str = "none",
        device: Device | None = None,
    ) -> tuple[LoweredModule, ...]:
        """The lowered modules; TracedModelError for another batch, dtype, autocast or device, or for checkpointing that was not traced.

        A strategy that casts no input gets no cast. Without a `device` it is not asked for which the trace stands.
        """
        if device is not None and device not in self.devices:
            raise TracedModelError(
                where=self.name,
                expected=f"a trace with the kernels that torch takes on {DEVICE_NAMES[device]}",
                found=f"one with those of {DEVICE_NAMES[self.devices[0]]}, of which some keep other bytes (attention, dropout, norms)",
                remedy=f'trace it again with device="{device}"',
            )
        if casts_input and not self.casts_input and self.dtype != "float32":
            raise TracedModelError(
                where=self.name,
                expected="inputs that are cast to the parameters' dtype, for this strategy",
                found="a trace that casts none",
                remedy="trace it again with casts_input=True",
            )
        if checkpointed:
            raise TracedModelError(
                where=self.name,
                expected="activation checkpointing as the module itself does it",
                found="checkpointing asked for from outside",
                remedy="wrap its blocks in torch.utils.checkpoint and trace it again",
            )
        asked = {
            "dtype": dtype,
            "autocast": autocast,
            "micro_batch": batch.micro_batch,
            "sequence_length": batch.sequence_length,
        }
        known = {
            "dtype": self.dtype,
            "autocast": self.autocast,
            "micro_batch": self.batch.micro_batch,
            "sequence_length": self.batch.sequence_length,
        }
        for name, value in asked.items():
            if value != known[name]:
                raise TracedModelError(
                    where=self.name,
                    expected=f"{name} {known[name]}, at which it was traced",
                    found=f"{value}",
                    remedy="trace the module again with such inputs",
                )
        return self.lowered if casts_input else tuple(map(_without_input_cast, self.lowered))


def stretch(fqn: str, *, unit: str, weights: tuple[tuple[str, str], ...], last: bool) -> Module:
    """A Module of a traced model: the parameters it reads, as (weight, bias) or (parameter, "").

    A weight comes with a bias where autograd accumulates the bias's gradient first, as for a linear layer. The last one
    ends in the value `LOSS`.
    """
    operators = [
        _operator("linear" if bias else FAMILY, name=weight, weight=weight, bias=bias, output=weight)
        for weight, bias in weights
    ]
    if last or not operators:
        operators.append(_operator(FAMILY, name=fqn, weight="", bias="", output=LOSS if last else "y"))
    return Module(fqn=fqn, unit=unit, operators=tuple(operators))


def placed(modules: Iterable[Module], *, units: Iterable[ParamGroup]) -> tuple[Module, ...]:
    """`modules` that know which unit they lie in: those of units in a unit, and the parts that those cut that one into."""
    fqns = [unit.fqn for unit in units if unit.fqn != ROOT]
    around = {fqn: max((other for other in fqns if fqn.startswith(f"{other}.")), key=len, default="") for fqn in fqns}
    cut = set(around.values())
    within = {fqn: fqn if fqn in cut else outer for fqn, outer in around.items()}
    return tuple(replace(module, within=within.get(module.unit, "")) for module in modules)


def _operator(kind: OperatorKind, *, name: str, weight: str, bias: str, output: str) -> Operator:
    return Operator(kind=kind, name=name, inputs=(INPUT,), output=output, weight=weight, bias=bias)


def _is_input(buffer: str) -> bool:
    return buffer == INPUT or (buffer.startswith(f"{INPUT}.") and ":" not in buffer)


def _without_input_cast(module: LoweredModule) -> LoweredModule:
    """Casts of the model's inputs left out: the caller's own are in the right dtype already."""

    def kept(given: Computation) -> Computation:
        memory = tuple(e for e in given.memory if not isinstance(e, Alloc | Free) or not _is_input(e.buffer))
        return given if len(memory) == len(given.memory) else replace(given, memory=memory)

    return replace(module, forward=kept(module.forward), backward=kept(module.backward))


def check(model: TracedModel) -> TracedModel:
    """`model` itself; TracedModelError naming the first thing in it that does not hold together."""
    last = model.modules[-1].fqn if model.modules else ""
    for where, expected, found in problems(model, model.lowered, loss=f"{last}:{LOSS}"):
        raise TracedModelError(where=where, expected=expected, found=found, remedy="trace the module again")
    return model


# -- as JSON


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
                "input_needs_gradient": lowered.input_needs_gradient,
                "forward": _computation_table(lowered.forward),
                "backward": _computation_table(lowered.backward),
                "recompute": _kernel_table(lowered.recompute),
            }
            for module, lowered in zip(model.modules, model.lowered, strict=True)
        ],
    }
    if model.autocast != "none":
        table |= {"autocast": model.autocast, "uncached": [event.buffer for event in model.lowered[-1].uncached]}
    return json.dumps(table, separators=(",", ":")) + "\n"


def _parameter_row(parameter: Parameter) -> list[Any]:
    return [parameter.fqn, list(parameter.shape), *([] if parameter.requires_grad else [FROZEN])]


def _kernel_table(kernels: tuple[Kernel, ...]) -> list[list[Any]]:
    return [[kernel.operator, kernel.flops, kernel.nbytes, kernel.dtype, list(kernel.shape)] for kernel in kernels]


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
    if isinstance(event, Free):
        return ["-", event.buffer]
    return ["gradient that is not the last" if event.goes_on else "gradient", event.fqn]


def save(model: TracedModel, path: str | Path) -> None:
    """Write `dump(model)` to `path`."""
    try:
        Path(path).write_text(dump(model), encoding="utf-8")
    except OSError as error:
        raise TracedModelError(
            where=str(path), expected="a file that can be written", found=str(error.strerror)
        ) from None


def load(path: str | Path) -> TracedModel:
    """The traced model in a file; TracedModelError, with the place in it, for anything else."""
    try:
        if Path(path).is_fifo() or Path(path).is_char_device():  # which may never end
            raise OSError(EINVAL, "a pipe or a device")
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a path may hold what no path can
        found = error.strerror if isinstance(error, OSError) else "a path that cannot be one"
        raise TracedModelError(where=repr(str(path)[:200]), expected="a traced model", found=str(found)) from None
    return parse(data, where=str(path))


def parse(data: bytes, *, where: str = "traced model") -> TracedModel:
    """The traced model in JSON; TracedModelError, which begins with `where`, for anything else."""
    if len(data) > MAX_FILE_BYTES:
        raise TracedModelError(where=where, expected=f"at most {MAX_FILE_BYTES:,} bytes", found="more")
    try:
        table = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise TracedModelError(where=where, expected="a traced model", found="no JSON") from None
    return check(_model(Reader(table, where)))


def _model(reader: Reader) -> TracedModel:
    scalars = ("name", "dtype", "micro_batch", "sequence_length", "casts_input", "buffer_nbytes", "input_nbytes", "devices")
    cast = AUTOCAST if isinstance(reader.value, dict) and AUTOCAST[0] in reader.value else ()
    table = reader.table("schema", *scalars, *cast, "units", "modules", lists=("registered", "buffers"))
    table["schema"].one_of((SCHEMA,))
    modules = list(table["modules"].items(at_most=MAX_MODULES))
    pairs = [_module(module, last=place == len(modules) - 1) for place, module in enumerate(modules)]
    if cast and pairs:
        uncached = tuple(Free(buffer.name()) for buffer in table["uncached"].items())
        pairs[-1] = pairs[-1][0], replace(pairs[-1][1], uncached=uncached)
    units = tuple(_unit(unit) for unit in table["units"].items(at_most=MAX_MODULES))
    first = next((place for place, (_, one) in enumerate(pairs) if one.backward != NOTHING), 0)
    return TracedModel(
        name=table["name"].name(),
        family=FAMILY,
        modules=placed((module for module, _ in pairs), units=units),
        units=units,
        idle=tuple(unit.fqn for unit in units if unit.fqn not in {ROOT, *(module.unit for module, _ in pairs)}),
        lowered=tuple(replace(one, differentiates=place >= first) for place, (_, one) in enumerate(pairs)),
        dtype=table["dtype"].one_of(FLOATS),
        batch=Batch(micro_batch=table["micro_batch"].size(), sequence_length=table["sequence_length"].size()),
        casts_input=table["casts_input"].truth(),
        autocast=table["autocast"].one_of(FLOATS) if cast else "none",
        buffer_nbytes=table["buffer_nbytes"].size(),
        input_nbytes=table["input_nbytes"].size(),
        devices=_devices(table["devices"]),
        registered=tuple(fqn.name() for fqn in table["registered"].items()),
        buffers=tuple(_buffer(buffer) for buffer in table["buffers"].items()),
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
    return ParamGroup(fqn=fqn.name(), parameters=tuple(_parameter(parameter) for parameter in parameters.items()))


def _parameter(reader: Reader) -> Parameter:
    frozen = isinstance(reader.value, list) and len(reader.value) == 3
    fqn, shape, *marks = reader.row(3 if frozen else 2)
    for mark in marks:
        mark.one_of((FROZEN,))
    dims = tuple(dim.size() for dim in shape.items(at_most=MAX_DIMS))
    parameter = Parameter(fqn=fqn.name(), shape=dims, requires_grad=not frozen)
    Reader(parameter.numel, f"{reader.where}: elements").size()
    return parameter


def _module(reader: Reader, *, last: bool) -> tuple[Module, LoweredModule]:
    table = reader.table("fqn", "unit", "reads", "input_needs_gradient", "forward", "backward", "recompute")
    fqn, unit = table["fqn"].name(), table["unit"].name()
    rows = [row.row(2) for row in table["reads"].items()]
    weights = tuple((weight.name(), bias.name(empty=True)) for weight, bias in rows)
    lowered = LoweredModule(
        fqn=fqn,
        unit=unit,
        forward=_computation(table["forward"]),
        backward=_computation(table["backward"]),
        input_needs_gradient=table["input_needs_gradient"].truth(),
        recompute=_kernels(table["recompute"]),
    )
    return stretch(fqn, unit=unit, weights=weights, last=last), lowered


def _kernels(reader: Reader) -> tuple[Kernel, ...]:
    return tuple(_kernel(*row.row(5)) for row in reader.items())


def _kernel(operator: Reader, flops: Reader, nbytes: Reader, dtype: Reader, shape: Reader) -> Kernel:
    sizes = tuple(size.size() for size in shape.items(at_most=KERNEL_DIMS))
    if len(sizes) not in (0, KERNEL_DIMS) or 0 in sizes:
        raise shape.refuse(f"{KERNEL_DIMS} sizes above 0, or none")
    return Kernel(operator.name(), flops.size(), nbytes.size(), dtype.name(), shape=sizes)


def _computation(reader: Reader) -> Computation:
    table = reader.table("kernels", "memory")
    memory = tuple(_event(event) for event in table["memory"].items())
    return Computation(kernels=_kernels(table["kernels"]), memory=memory)


def _event(reader: Reader) -> TapeEvent:
    sign = next(reader.items(), reader).one_of(("+", "-", "gradient", "gradient that is not the last", "node over", "recomputed"))
    if sign == "+":
        _, buffer, kind, nbytes = reader.row(4)
        return Alloc(buffer.name(), kind.one_of(MEMORY_KINDS), nbytes.size())
    if sign in ("recomputed", "node over"):
        reader.row(1)
        return Recomputed() if sign == "recomputed" else NodeOver()
    _, name = reader.row(2)
    return Free(name.name()) if sign == "-" else ParameterGradient(name.name(), goes_on=sign != "gradient")
