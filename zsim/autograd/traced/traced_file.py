"""A TracedModel as JSON and back.

A file may come from anywhere. `zsim.autograd.traced.schema` holds each key, name and number.
`zsim.autograd.traced.model.check_whole` then holds the model to the laws of names and lifetimes.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from errno import EINVAL
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from zsim.autograd.lowering.lowered import LoweredModule
from zsim.autograd.traced import model as traced
from zsim.autograd.traced.model import FAMILY, TracedModel, TracedModelError
from zsim.autograd.traced.schema import EVENTS, FILE, SIGNS
from zsim.errors import shown
from zsim.io import files
from zsim.io.json_reader import TwiceError, loads
from zsim.io.json_tables import complaint
from zsim.models.spec import ROOT, ParamGroup
from zsim.models.training_options import Device

SCHEMA: Final = "zsim-traced-model-3"
MAX_FILE_BYTES = 64 * 1024**2
TRACE_AGAIN = "trace the module again"
DERIVED: dict[type[Any], frozenset[str]] = {
    TracedModel: frozenset({"family", "modules", "idle", "lowered"}),
    LoweredModule: frozenset({"differentiates"}),
}
"""Fields that a file leaves out, or holds per module: the reader derives them."""


def load(path: str | Path) -> TracedModel:
    """The traced model in the file `path`; TracedModelError, with the key, for anything else."""
    try:
        if Path(path).is_fifo() or Path(path).is_char_device():  # which may never end
            raise OSError(EINVAL, "a pipe or a device")
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # a path may hold what no path can
        problem = error.strerror if isinstance(error, OSError) else "a path that cannot be one"
        raise TracedModelError(
            where=repr(str(path)[:200]), expected="a traced model", found=str(problem)
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
    version = table.pop("schema", None) if isinstance(table, dict) else SCHEMA
    if version != SCHEMA:
        raise TracedModelError(
            where=f"{where}: schema", expected=f"{SCHEMA}, the form of this version",
            found=shown(version), remedy=TRACE_AGAIN,
        )
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
        recomputing=tuple((asked, traced.whole(again)) for asked, again in recomputing),
        hook_variants=hook_variants, **others,
    )


# -- writing


def save(model: TracedModel, path: str | Path) -> None:
    """Write `dump(model)` to `path`."""
    files.write(Path(path), dump(model))


def dump(model: TracedModel) -> str:
    """The model as JSON text; equal models give equal text."""
    modules = [
        {
            "reads": [[op.weight, op.bias] for op in module.operators if op.weight],
            "lowered": _plain(lowered_module),
        }
        for module, lowered_module in zip(model.modules, model.lowered, strict=True)
    ]
    table = {"schema": SCHEMA, **_plain(model), "modules": modules}
    return json.dumps(table, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """Kernels and events as rows, other dataclasses as tables without defaults."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not is_dataclass(value):
        return value
    kind: Any = type(value)
    items = [(field, getattr(value, field.name)) for field in fields(kind)]
    if kind in SIGNS:
        return [*SIGNS[kind], *(_plain(item) for _, item in items)]
    return {
        field.name: _plain(item)
        for field, item in items
        if field.name not in DERIVED.get(kind, ()) and item != field.default
    }
