"""A Run as a JSON file and back, to the last field: what `--save` writes and `zsim compare` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from zsim.errors import ZsimError, listed, shown
from zsim.io import files
from zsim.io.json_reader import TwiceError, loads
from zsim.ir.program import PHASES
from zsim.ir.run import SCHEMA_VERSION, RankRun, RunRecord

Part = TypeVar("Part")

MAX_SAVED_BYTES = 4 * 1024**3
REMEDY = "write one with `zsim run --save`"
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
    numbers: dict[tuple[int, int], int] = {}
    for rank in ranks:
        first = numbers.setdefault((id(rank.phases), id(rank.spans)), rank.rank)
        left_out = tuple(key for key in ("cache", "off_device") if getattr(rank, key) is None)
        if first == rank.rank:
            own, like = _plain(rank), {}
        else:
            own, like = _plain(replace(rank, phases={}, spans=())), {"like": first}
            left_out += SHARED
        yield {key: value for key, value in own.items() if key not in left_out} | like


def save(run: RunRecord, path: Path) -> None:
    """Write `dump(run)` to `path`, making its folder."""
    files.write(path, dump(run))


def load(path: Path) -> RunRecord:
    """The Run in a saved file; SavedRunError, with the key, for anything else."""
    try:
        return _run(_json(path)["run"])
    except SavedRunError as error:
        raise SavedRunError(
            where=f"{path}: {error.where}" if error.where else str(path), expected=error.expected,
            found=error.found, remedy=error.remedy or REMEDY,
        ) from None


def _json(path: Path) -> dict[str, Any]:
    """The table in the file."""
    try:
        if path.is_fifo() or path.is_char_device():  # which may never end
            raise OSError
        with path.open("rb") as file:
            table = loads(file.read(MAX_SAVED_BYTES))
    except OSError as error:
        raise _no_run(files.obstacle(path, error)) from None
    except TwiceError as error:
        raise _no_run(str(error)) from None
    except (ValueError, RecursionError):
        raise _no_run("no JSON") from None
    if not isinstance(table, dict) or "run" not in table:
        raise _no_run("other JSON")
    if table.get("schema_version") != SCHEMA_VERSION:
        raise SavedRunError(
            where="schema_version", expected=f"{SCHEMA_VERSION}, that of this version",
            found=shown(table.get("schema_version")),
        )
    return table


def _no_run(problem: str) -> SavedRunError:
    return SavedRunError(where="", expected="a saved Run", found=problem)


def _run(table: Any) -> RunRecord:
    """The Run of a table, where some ranks name the one that they are `like`."""
    ranks = table.get("ranks") if isinstance(table, dict) else None
    if not isinstance(ranks, list):
        return from_table(RunRecord, table)  # which says so
    if "stand_ins" in table:  # the key in older files
        table["representatives"] = table.pop("stand_ins")
    run = replace(from_table(RunRecord, table | {"ranks": []}), ranks=tuple(_shared(ranks)))
    _require_sense(run)
    return run


def _shared(tables: list[Any]) -> Iterator[RankRun]:
    """The ranks of a saved Run; what they share is read once."""
    whole: dict[int, RankRun] = {}
    for index, table in enumerate(tables):
        where = f"run.ranks[{index}]"
        if not isinstance(table, dict) or "like" not in table:
            rank: RankRun = _typed(RankRun, table, where)
            yield whole.setdefault(rank.rank, rank)
            continue
        like = whole.get(table["like"]) if isinstance(table["like"], int) else None
        if like is None:
            raise SavedRunError(
                where=f"{where}.like", expected="a rank before this one",
                found=shown(table["like"]),
            )
        own = {key: value for key, value in table.items() if key != "like"} | {"phases": {}}
        yield replace(_typed(RankRun, own, where), phases=like.phases, spans=like.spans)


def _mesh_fits(run: RunRecord) -> bool:
    return min(run.mesh.shape) >= 1 and run.mesh.world_size == run.world_size


def _ranks_fit(run: RunRecord) -> bool:
    ranks = [rank.rank for rank in run.ranks]
    return len(set(ranks)) == len(ranks) and all(0 <= rank < run.world_size for rank in ranks)


def _phases_fit(run: RunRecord) -> bool:
    return all(phase in PHASES for rank in run.ranks for phase in rank.phases)


def _representatives_fit(run: RunRecord) -> bool:
    ranks = {rank.rank for rank in run.ranks}
    return not run.representatives or (
        len(run.representatives) == run.world_size and set(run.representatives) <= ranks
    )


LAWS: tuple[tuple[Callable[[RunRecord], bool], str], ...] = (
    (_mesh_fits, "{run.mesh} for {run.world_size} ranks"),
    (_ranks_fit, "ranks that are there twice or outside the world"),
    (_phases_fit, f"a phase that is none of {listed(PHASES)}"),
    (lambda run: not (run.complete and run.failure), "a failure in a Run that says it is complete"),
    (_representatives_fit, "representatives that are not among its ranks"),
)
"""Conditions on ranks, mesh and world of a Run, each with the finding where it does not hold."""


def _require_sense(run: RunRecord) -> None:
    """SavedRunError with the first of LAWS that does not hold."""
    for holds, broken in LAWS:
        if not holds(run):
            raise SavedRunError(
                where="run", expected="parts that fit one another", found=broken.format(run=run)
            )


def problem(run: RunRecord) -> str:
    """The first part of `run` that has another type than it must have, or contradicts another
    part; or ""."""
    try:
        _require_sense(from_table(RunRecord, as_table(run)))
    except (SavedRunError, TypeError, AttributeError) as error:
        return f"a damaged one ({error})"
    return ""


def as_table(value: Any) -> Any:
    """A Run, or a part of one, as plain dicts, lists and numbers, as `dump` writes them."""
    return _plain(value)


def from_table(kind: type[Part], table: Any) -> Part:
    """The `kind` (Run, RankRun …) that `as_table` made; SavedRunError, with the key, for anything
    else."""
    typed: Part = _typed(kind, table, "run" if kind is RunRecord else "rank")
    return typed


def _typed(kind: Any, table: Any, where: str) -> Any:
    from pydantic import ValidationError  # 10 ms, for those who read a file only

    from zsim.io.json_tables import complaint, reader

    try:
        return reader(kind).validate_python(table)
    except ValidationError as error:
        key, expected, defect = complaint(error)
        raise SavedRunError(
            where=f"{where}.{key}" if key else where, expected=expected, found=defect
        ) from None


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(inner) for inner in value]
    return value
