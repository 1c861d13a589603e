"""A Run as a JSON file and back, to the last field: what `--save` writes and `zsim compare` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from errno import EINVAL
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from zsim.errors import ZsimError, visible
from zsim.io import files
from zsim.io.json_reader import TwiceError, loads
from zsim.ir.program import PARTS, PHASES
from zsim.ir.run import SCHEMA_VERSION, RankRun, RunRecord

Part = TypeVar("Part")

MAX_SAVED_BYTES = 4 * 1024**3
MAX_INT = 2**63 - 1
SHARED = ("phases", "spans")


class SavedRunError(ZsimError):
    """A file that is not a saved Run."""


def dump(run: RunRecord) -> str:
    """The Run as JSON text; equal Runs give equal bytes. A rank that did the same as an earlier one
    says so by `like`."""
    table = _plain(replace(run, ranks=())) | {"ranks": list(_ranks(run.ranks))}
    return (
        json.dumps({"schema_version": SCHEMA_VERSION, "run": table}, indent=1, sort_keys=True)
        + "\n"
    )


def _ranks(ranks: tuple[RankRun, ...]) -> Iterator[dict[str, Any]]:
    seen: dict[tuple[int, int], int] = {}
    for rank in ranks:
        first = seen.setdefault((id(rank.phases), id(rank.spans)), rank.rank)
        if first == rank.rank:
            yield _plain(rank)
            continue
        own = _plain(replace(rank, phases={}, spans=()))
        yield {key: value for key, value in own.items() if key not in SHARED} | {"like": first}


def _typed_ranks(tables: list[dict[str, Any]]) -> Iterator[RankRun]:
    """The ranks of a saved Run; what they share is read once."""
    whole: dict[int, RankRun] = {}
    for table in tables:
        if "like" not in table:
            rank = whole[table["rank"]] = from_table(RankRun, table)
            yield rank
            continue
        own = {key: value for key, value in table.items() if key != "like"} | {"phases": {}}
        like = whole[table["like"]]
        yield replace(from_table(RankRun, own), phases=like.phases, spans=like.spans)


def save(run: RunRecord, path: Path) -> None:
    """Write `dump(run)` to `path`, making its folder."""
    files.write(path, dump(run))


def load(path: Path) -> RunRecord:
    """The Run in a saved file; SavedRunError when it is none, or of another schema version."""
    try:
        if path.is_fifo() or path.is_char_device():  # which may never end
            raise OSError(EINVAL, "a pipe or a device")
        with path.open("rb") as file:
            table = loads(file.read(MAX_SAVED_BYTES))
    except OSError as error:
        raise SavedRunError(
            where=str(path), expected="a saved Run", found=str(error.strerror)
        ) from None
    except TwiceError as error:
        raise _not_a_run(path, str(error)) from None
    except (ValueError, RecursionError):
        raise _not_a_run(path, "no JSON") from None
    if not isinstance(table, dict) or "run" not in table:
        raise _not_a_run(path, "other JSON")
    if table.get("schema_version") != SCHEMA_VERSION:
        raise _not_a_run(path, f"schema_version {str(table.get('schema_version'))[:20]}, this is "
                               f"{SCHEMA_VERSION}")
    try:
        if "stand_ins" in table["run"]:  # the key in older files
            table["run"]["representatives"] = table["run"].pop("stand_ins")
        ranks = tuple(_typed_ranks(table["run"]["ranks"]))
        run = replace(from_table(RunRecord, table["run"] | {"ranks": []}), ranks=ranks)
        _require_sense(run)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _not_a_run(path, f"a damaged one ({str(error)[:120]})") from None
    return run


def _mesh_fits(run: RunRecord) -> bool:
    return min(run.mesh.shape) >= 1 and run.mesh.world_size == run.world_size


def _ranks_fit(run: RunRecord) -> bool:
    ranks = [rank.rank for rank in run.ranks]
    return len(set(ranks)) == len(ranks) and all(0 <= rank < run.world_size for rank in ranks)


def _phases_fit(run: RunRecord) -> bool:
    return all(phase in PHASES for rank in run.ranks for phase in rank.phases)


def _parts_fit(run: RunRecord) -> bool:
    return all(
        part.name in PARTS and min(part.micro_batch, part.start_bytes, part.peak_bytes) >= 0
        for rank in run.ranks
        for phase in rank.phases.values()
        for part in phase.memory.parts
    )


def _numerics_fit(run: RunRecord) -> bool:
    told = [rank.numerics for rank in run.ranks if rank.numerics is not None]
    return not any(
        numbers.steps < 1
        or min(
            numbers.largest_relative_difference, numbers.largest_gradient_difference,
            numbers.initial_difference or 0.0, numbers.step_difference or 0.0,
        ) < 0
        for numbers in told
    )


def _times_fit(run: RunRecord) -> bool:
    return min([run.step_time_ns or 0, *(rank.step_time_ns or 0 for rank in run.ranks)]) >= 0


def _representatives_fit(run: RunRecord) -> bool:
    ranks = {rank.rank for rank in run.ranks}
    return not run.representatives or (
        len(run.representatives) == run.world_size and set(run.representatives) <= ranks
    )


LAWS: tuple[tuple[Callable[[RunRecord], bool], str], ...] = (
    (_mesh_fits, "{run.mesh} for {run.world_size} ranks"),
    (_ranks_fit, "ranks that are there twice or outside the world"),
    (_phases_fit, f"a phase that is none of {', '.join(PHASES)}"),
    (_parts_fit, f"a part of a step that is none of {', '.join(PARTS)}, or of negative bytes"),
    (_numerics_fit, "numerics of no steps, or a negative difference"),
    (_times_fit, "a step of negative time"),
    (lambda run: not (run.complete and run.failure), "a failure in a Run that says it is complete"),
    (_representatives_fit, "representatives that are not among its ranks"),
)
"""Conditions on ranks, mesh and world of a Run, each with the finding where it does not hold."""


def _require_sense(run: RunRecord) -> None:
    """ValueError with the first of LAWS that does not hold."""
    for holds, broken in LAWS:
        if not holds(run):
            raise ValueError(broken.format(run=run))


def problem(run: RunRecord) -> str:
    """The first part of `run` that has another type than it must have, or contradicts another
    part; or ""."""
    try:
        _require_sense(from_table(RunRecord, as_table(run)))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return f"a damaged one ({str(error)[:120]})"
    return ""


def as_table(value: Any) -> Any:
    """A Run, or a part of one, as plain dicts, lists and numbers, as `dump` writes them."""
    return _plain(value)


def from_table(kind: type[Part], table: Any) -> Part:
    """The `kind` (Run, RankRun …) that `as_table` made; TypeError, ValueError or KeyError for
    anything else."""
    value: Part = _typed(kind, table)
    return value


def _not_a_run(path: Path, defect: str) -> SavedRunError:
    remedy = "write one with `zsim run --save`"
    return SavedRunError(where=str(path), expected="a saved Run", found=defect, remedy=remedy)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return value


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _typed(kind: Any, value: Any) -> Any:
    """`value`, as JSON has it, as the annotated type `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return (
            None
            if value is None
            else _typed(next(part for part in arguments if part is not type(None)), value)
        )
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"unknown key {min(unknown)}")
        return kind(**{key: _typed(hints[key], inner) for key, inner in value.items()})  # type: ignore[operator]
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(_typed(part, inner) for part, inner in zip(kinds, value, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        return {key: _typed(arguments[1], inner) for key, inner in value.items()}
    if kind is float and isinstance(value, int):
        return float(value)
    if kind is str and isinstance(value, str):
        value.encode()  # a lone surrogate could not be printed
        return visible(value)
    if kind is int and isinstance(value, int) and abs(value) > MAX_INT:
        raise ValueError("an integer of more than 64 bits")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
