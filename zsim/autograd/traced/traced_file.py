"""TracedModels of a module as JSON and back: one, or one for each size of its batch.

A file may come from anywhere. `zsim.autograd.traced.schema` holds each key, name and number.
`zsim.autograd.traced.model.check_whole` then holds the model to the laws of names and lifetimes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from zsim.autograd.lowered import LoweredModule
from zsim.autograd.traced import model as traced
from zsim.autograd.traced.model import FAMILY, TracedModel, TracedModelError
from zsim.autograd.traced.schema import EVENTS, FILE, SIGNS
from zsim.errors import shown
from zsim.io import files
from zsim.io.files import obstacle
from zsim.io.json_reader import TwiceError, loads
from zsim.io.json_tables import complaint
from zsim.ir.ops import Kernel
from zsim.models.spec import ROOT, ParamGroup
from zsim.models.training_options import Batch, Device

SCHEMA: Final = "zsim-traced-model-4"
SIZES_SCHEMA: Final = "zsim-traced-sizes-1"
"""A file whose key `sizes` is a list of models of SCHEMA's form, each without its schema."""
MAX_SIZES = 64
"""Most sizes in a file."""
MAX_FILE_BYTES = 64 * 1024**2
TRACE_AGAIN = "trace the module again"
DERIVED: dict[type[Any], frozenset[str]] = {
    TracedModel: frozenset({"family", "modules", "idle", "lowered"}),
    LoweredModule: frozenset({"differentiates"}), Kernel: frozenset({"launches"}),
}
"""Fields that a file leaves out, or holds per module: the reader derives them."""


def load(path: str | Path, *, batch: Batch | None = None) -> TracedModel:
    """The traced model in the file `path`, of several the one of `batch`; TracedModelError, with
    the key, for anything else."""
    return parse(_data(path), where=str(path), batch=batch)


def load_all(path: str | Path) -> tuple[TracedModel, ...]:
    """The traced model in the file `path`, once for each batch; TracedModelError as of `load`."""
    return _models(_data(path), where=str(path))


def _data(path: str | Path) -> bytes:
    try:
        if Path(path).is_fifo() or Path(path).is_char_device():  # which may never end
            raise OSError
        with Path(path).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a path may hold what no path can
        raise TracedModelError(
            where=repr(str(path)[:200]), expected="a traced model",
            found=obstacle(Path(path), error) if isinstance(error, OSError)
            else "a path that cannot be one",
            remedy="`zsim trace mymodel:MyModel` makes one",
        ) from None


def parse(
    data: bytes, *, where: str = "traced model", batch: Batch | None = None
) -> TracedModel:
    """The traced model in JSON, of several the one of `batch`; TracedModelError, which begins with
    `where`, for anything else.

    A single one may have another batch than is asked: its scenario is held to it.
    """
    models = _models(data, where=where)
    if len(models) == 1:
        return models[0]
    known = {(m.batch.micro_batch, m.batch.sequence_length): m for m in models}
    shape = None if batch is None else (batch.micro_batch, batch.sequence_length)
    if shape in known:
        return known[shape]
    shapes = ", ".join(f"{micro_batch} x {length}" for micro_batch, length in sorted(known))
    raise TracedModelError(
        where=where, expected=f"a micro-batch x sequence length at which it was traced: {shapes}",
        found="none" if shape is None else f"{shape[0]} x {shape[1]}",
        remedy="name it in --micro-batch and --sequence-length of `zsim trace`",
    )


@lru_cache(maxsize=8)
def _models(data: bytes, *, where: str) -> tuple[TracedModel, ...]:
    """Every model of a file. The last few files are remembered: a sweep asks at each point."""
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
    version = table.pop("schema", None) if isinstance(table, dict) else SCHEMA
    if version == SIZES_SCHEMA:
        return _sizes(table, where=where)
    if version != SCHEMA:
        raise TracedModelError(
            where=f"{where}: schema",
            expected=f"{SCHEMA} or {SIZES_SCHEMA}, the forms of this version",
            found=shown(version), remedy=TRACE_AGAIN,
        )
    return (_one(table, where=where),)


def _sizes(table: dict[str, Any], *, where: str) -> tuple[TracedModel, ...]:
    """The models of a file of several sizes, which differ in nothing but their batch."""
    rows = table.get("sizes")
    if list(table) != ["sizes"] or not isinstance(rows, list) or not 0 < len(rows) <= MAX_SIZES:
        raise TracedModelError(
            where=f"{where}: sizes", expected=f"one list of 1 to {MAX_SIZES} models",
            found=shown(rows), remedy=TRACE_AGAIN,
        )
    models = tuple(_one(row, where=f"{where}: sizes[{i}]") for i, row in enumerate(rows))
    return _require_alike(models, where=where)


def _require_alike(models: tuple[TracedModel, ...], *, where: str) -> tuple[TracedModel, ...]:
    first, batches = models[0], {model.batch for model in models}
    names = ("name", "dtype", "autocast", "casts_input", "units")
    for model in models:
        if any(getattr(model, name) != getattr(first, name) for name in names):
            raise TracedModelError(
                where=f"{where}: sizes", expected="one module with the same units at each size",
                found="others", remedy=TRACE_AGAIN,
            )
    if len(batches) < len(models):
        raise TracedModelError(
            where=f"{where}: sizes", expected="each batch once", found="one twice",
            remedy=TRACE_AGAIN,
        )
    return models


def _one(table: Any, *, where: str) -> TracedModel:
    try:
        return traced.check_whole(_model(**FILE.validate_python(table)))
    except ValidationError as error:
        key, expected, problem = complaint(error, signs=EVENTS)
        raise TracedModelError(
            where=f"{where}: {key}" if key else where, expected=expected, found=problem,
            remedy=TRACE_AGAIN,
        ) from None


def _model(
    *, modules: tuple[dict[str, Any], ...], units: tuple[ParamGroup, ...],
    devices: tuple[Device, ...], recomputing: Any, **others: Any,
) -> TracedModel:
    rows = [(row["lowered"], row["reads"]) for row in modules]
    stretches = [
        traced.stretch(module.fqn, unit=module.unit, weights=reads, last=i == len(rows) - 1)
        for i, (module, reads) in enumerate(rows)
    ]
    used = {ROOT, *(module.unit for module in stretches)}
    hook_variants = tuple(
        traced.HookVariant(
            unit_hooks=v.unit_hooks, checkpointing=v.checkpointing, fails=v.fails,
            lowered=traced.whole(v.lowered),
        )
        for v in others.pop("hook_variants")
    )
    return TracedModel(
        family=FAMILY, modules=traced.placed(stretches, units=units), units=units,
        idle=tuple(unit.fqn for unit in units if unit.fqn not in used),
        lowered=traced.whole(module for module, _ in rows),
        devices=tuple(device for device in traced.DEVICES if device in devices),
        recomputing=tuple((policy, traced.whole(again)) for policy, again in recomputing),
        hook_variants=hook_variants, **others,
    )


# -- writing


def save(model: TracedModel | Sequence[TracedModel], path: str | Path) -> None:
    """Write `dump(model)` to `path`."""
    files.write(Path(path), dump(model))


def dump(model: TracedModel | Sequence[TracedModel]) -> str:
    """The model, or a module's models at several sizes, as JSON text; equal ones give equal text.
    """
    if isinstance(model, TracedModel):
        table: dict[str, Any] = {"schema": SCHEMA, **_table(model)}
    else:
        models = _require_alike(tuple(model), where="traced models")
        table = {"schema": SIZES_SCHEMA, "sizes": [_table(each) for each in models]}
    return json.dumps(table, separators=(",", ":")) + "\n"


def _table(model: TracedModel) -> dict[str, Any]:
    modules = [
        {
            "reads": [[op.weight, op.bias] for op in module.operators if op.weight],
            "lowered": _plain(lowered_module),
        }
        for module, lowered_module in zip(model.modules, model.lowered, strict=True)
    ]
    return {**_plain(model), "modules": modules}


def _plain(value: Any) -> Any:
    """Kernels and events as rows, other dataclasses as tables without defaults."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    kind: Any = type(value)
    items = [(field, getattr(value, field.name)) for field in fields(kind)]
    if kind in SIGNS:
        row = (_plain(item) for field, item in items if field.name not in DERIVED.get(kind, ()))
        return [*SIGNS[kind], *row]
    return {
        field.name: _plain(item)
        for field, item in items
        if field.name not in DERIVED.get(kind, ()) and item != field.default
    }
