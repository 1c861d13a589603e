"""Results of ranks as files of a shared folder: each rank writes its own, a reader joins them.

A file is a saved Run of one rank. It is written anew after every phase, so a rank that is killed
leaves what it had ended.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zsim.errors import RankError
from zsim.ir.run import IncompleteRunError, RunRecord
from zsim.models.training_options import Device
from zsim.runs import saved
from zsim.runs.launch.launched_failure import (
    ABSENT,
    BEFORE,
    LAST,
    OUTSIDE,
    SEPARATOR,
    UNFINISHED,
    RankFailure,
    error_of,
)
from zsim.runs.launch.planned_collectives import planned_collectives
from zsim.scenario.scenario import Scenario

STARTED = "started"
OTHER = "a result of another scenario or rank"


def file_of(folder: Path, rank: int) -> Path:
    """The file of `rank`."""
    return folder / f"rank-{rank}.json"


def write(folder: Path, run: RunRecord) -> None:
    """Write the Run of one rank; an earlier file stays whole until the new one is complete."""
    (own,) = run.ranks
    saved.save(run, file_of(folder, own.rank))


def forget(folder: Path) -> None:
    """Delete the files of ranks of an earlier run."""
    (folder / STARTED).unlink(missing_ok=True)
    for file in folder.glob("rank-*.json"):
        if file.stem.removeprefix("rank-").isdecimal():
            file.unlink()


def mark_started(folder: Path, *, rank: int) -> None:
    """Note that a rank has started, for the launcher's limit: the queue's time is no run's. Delete
    its file of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    file_of(folder, rank).unlink(missing_ok=True)
    (folder / STARTED).touch()


def has_started(folder: Path) -> bool:
    """True once any rank has started since `forget`."""
    return (folder / STARTED).exists()


def finished(folder: Path, scenario: Scenario, *, like: dict[str, str]) -> RunRecord | None:
    """The whole Run in `folder`, where it is one of `scenario` whose provenance is `like` this;
    None otherwise."""
    try:
        run = gather(folder, scenario)
    except (RankError, saved.SavedRunError):
        return None
    provenance = dict(run.provenance) | {"backend": run.backend, "interpreter": run.interpreter}
    return run if all(provenance.get(key) == value for key, value in like.items()) else None


def gather(folder: Path, scenario: Scenario) -> RunRecord:
    """The Run of all ranks of `scenario`.

    IncompleteRunError, with what there is, where a rank failed; RankError where none wrote a file.
    """
    files = {rank: file_of(folder, rank) for rank in range(scenario.world_size)}
    written = {rank: saved.load(file) for rank, file in files.items() if file.is_file()}
    runs = {rank: run for rank, run in written.items() if _is_own(run, rank, scenario)}
    failures = {rank: _failure(run) for rank, run in runs.items() if not run.complete}
    failures |= {
        rank: RankFailure(reason=OTHER if rank in written else ABSENT)
        for rank in files if rank not in runs
    }
    if not runs:
        raise RankError(
            where=scenario.name, expected=f"a result of each of {len(files)} ranks in {folder}",
            found=f"{len(written)} of another scenario or module" if written else "none",
            remedy="see what the launcher printed",
        )
    ranks = tuple(run.ranks[0] for run in runs.values())
    times = [rank.step_time_ns for rank in ranks if rank.step_time_ns is not None]
    first = next(iter(runs.values()))
    own = ("ranks", BEFORE, LAST, OUTSIDE)
    provenance = {key: text for key, text in first.provenance.items() if key not in own}
    whole = replace(
        first, ranks=ranks, complete=not failures, failure="", provenance=provenance,
        step_time_ns=max(times) if len(times) == len(files) and not failures else None,
    )
    if failures:
        device: Device = "cuda" if first.backend == "nccl" else "cpu"
        error = error_of(dict(sorted(failures.items())), planned_collectives(scenario, device))
        raise IncompleteRunError(error, replace(whole, failure=str(error)))
    return whole


def there_is(folder: Path, scenario: Scenario) -> RunRecord | None:
    """The results written until now, marked incomplete unless all ranks are done; None for none.
    """
    try:
        return gather(folder, scenario)
    except IncompleteRunError as error:
        return error.run
    except RankError:
        return None


def _is_own(run: RunRecord, rank: int, scenario: Scenario) -> bool:
    """True where the Run in a rank's file is of that rank and of this scenario.

    A rank that failed before its first phase may not have had the user's own module, whose traced
    form is part of the fingerprint.
    """
    is_here = [each.rank for each in run.ranks] == [rank] and run.world_size == scenario.world_size
    is_early = bool(run.failure) and run.scenario == scenario.name and not run.ranks[0].phases
    return is_here and (is_early or run.provenance.get("fingerprint") == scenario.fingerprint)


def _failure(run: RunRecord) -> RankFailure:
    """The end of the rank of an incomplete Run, as it told it."""
    return RankFailure(
        reason=run.failure or UNFINISHED, last=run.provenance.get(LAST, ""),
        before=tuple(run.provenance.get(BEFORE, "").split(SEPARATOR)),
        outside=run.provenance.get(OUTSIDE, ""),
    )
