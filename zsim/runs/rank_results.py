"""Results of ranks as files of a shared folder: each rank writes its own, a reader joins them.

A file is a saved Run of one rank. It is written anew after every phase, so a rank that is killed
leaves what it had ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zsim.errors import RankError
from zsim.ir.run import IncompleteRunError, RunRecord
from zsim.runs import saved
from zsim.scenario.scenario import Scenario

STARTED = "started"
UNFINISHED = "it did not end, and told no reason"
OTHER = "its file is of another scenario or rank"
CONSEQUENCES = ("ended by SIGTERM", "Connection closed", "Connection reset", "Broken pipe")
"""Texts of failures that follow from another rank's."""
MOST_NAMED = 12
"""Most ranks that a message lists of those that ended alike."""


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


def mark_started(folder: Path) -> None:
    """Note that a rank has started, for the launcher's limit: the queue's time is no run's."""
    folder.mkdir(parents=True, exist_ok=True)
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
    told = dict(run.provenance) | {"backend": run.backend, "interpreter": run.interpreter}
    return run if all(told.get(key) == value for key, value in like.items()) else None


def gather(folder: Path, scenario: Scenario) -> RunRecord:
    """The Run of all ranks of `scenario`.

    IncompleteRunError, with what there is, where a rank failed; RankError where none wrote a file.
    """
    files = {rank: file_of(folder, rank) for rank in range(scenario.world_size)}
    written = {rank: saved.load(file) for rank, file in files.items() if file.is_file()}
    runs = {rank: run for rank, run in written.items() if _is_own(run, rank, scenario)}
    failures = {rank: run.failure or UNFINISHED for rank, run in runs.items() if not run.complete}
    failures |= {
        rank: OTHER if rank in written else "it wrote no result"
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
    provenance = {key: text for key, text in first.provenance.items() if key != "ranks"}
    whole = replace(
        first, ranks=ranks, complete=not failures, failure="", provenance=provenance,
        step_time_ns=max(times) if len(times) == len(files) and not failures else None,
    )
    if failures:
        error = _error(failures)
        raise IncompleteRunError(error, replace(whole, failure=str(error)))
    return whole


def _is_own(run: RunRecord, rank: int, scenario: Scenario) -> bool:
    """True where the Run in a rank's file is of that rank and of this scenario.

    A rank that failed before its first phase may not have had the user's own module, whose traced
    form is part of the fingerprint.
    """
    is_here = [each.rank for each in run.ranks] == [rank] and run.world_size == scenario.world_size
    is_early = bool(run.failure) and run.scenario == scenario.name and not run.ranks[0].phases
    return is_here and (is_early or run.provenance.get("fingerprint") == scenario.fingerprint)


def _error(failures: dict[int, str]) -> RankError:
    """The failure of a rank of its own as the headline, and how the others ended."""
    own = {
        rank: text for rank, text in failures.items()
        if not any(each in text for each in CONSEQUENCES) and not _blames_another(rank, text)
    }
    told = {rank: text for rank, text in own.items() if "no result" not in text}
    first = min(told or own or failures)
    others = "; ".join(_roll_call({r: t for r, t in failures.items() if r != first}))
    return RankError(
        where=f"rank {first}", expected="every rank to finish",
        found=failures[first] + (f"; {others}" if others else ""),
        remedy="see what the launcher printed",
    )


def _blames_another(rank: int, text: str) -> bool:
    """True where the failure of `rank` begins with another rank."""
    blamed = re.match(r"ranks? (\d+)", text)
    return blamed is not None and int(blamed[1]) != rank


def _roll_call(failures: dict[int, str]) -> Iterator[str]:
    """Ranks that ended alike, and how."""
    alike: dict[str, list[int]] = {}
    for rank, text in failures.items():
        alike.setdefault(text, []).append(rank)
    for text, ranks in alike.items():
        more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
        yield f"ranks {', '.join(map(str, ranks[:MOST_NAMED]))}{more}: {text}"
