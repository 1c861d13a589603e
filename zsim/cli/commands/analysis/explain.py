"""`zsim explain`: why a job hung, from the flight recorders of its ranks."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from zsim.analysis.flight_recorder.dump_file import PICKLE, Dump, DumpError, is_pickle, read
from zsim.analysis.flight_recorder.explain import Explanation, explain
from zsim.analysis.flight_recorder.one_job import require_one_job
from zsim.cli import terminal
from zsim.errors import ZsimError
from zsim.io.units import counted
from zsim.ir.run import SCHEMA_VERSION


def run(options: argparse.Namespace) -> int:
    """`zsim explain`: 1 where something is found, 2 where dumps cannot be read, else 0."""
    dumps: list[Dump] = []
    unread: list[ZsimError] = []
    for path in _files(options.dumps):
        try:
            dumps.append(read(path))
        except DumpError as error:
            unread.append(error)
    if not dumps:
        raise unread[0]
    require_one_job(dumps)
    explanation = explain(dumps, unread=[str(error) for error in unread])
    if options.json:
        terminal.write_json({"schema_version": SCHEMA_VERSION, **explanation.to_dict()})
    else:
        _print(explanation)
    return 1 if explanation.findings else 2 if unread else 0


def _files(names: list[str]) -> list[Path]:
    """The files named, and every .json in a folder that is named, each once."""
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            pickles = [file.name for file in sorted(path.iterdir()) if _is_pickle(file)]
            raise DumpError(
                where=name, expected="dumps, *.json, in this folder",
                found=f"{counted(len(pickles), 'pickle')}, as {pickles[0]}" if pickles else "none",
                remedy=PICKLE if pickles else "name the files",
            )
        paths += inside
    return list({path.resolve(): path for path in paths}.values())


def _is_pickle(path: Path) -> bool:
    if not path.is_file():
        return False
    with suppress(OSError), path.open("rb") as file:
        return is_pickle(file.read(2))
    return False


def _print(explanation: Explanation) -> None:
    for line in explanation.unread:
        terminal.say(f"not read: {line}")
    terminal.say(
        f"{counted(len(explanation.ranks), 'rank')}, "
        f"{counted(explanation.collectives, 'collective')} of "
        f"{counted(explanation.groups, 'group')}: {len(explanation.findings) or 'nothing'} found"
    )
    for finding in explanation.findings:
        terminal.say(f"  {finding.kind}: {finding.text}")
    if explanation.waits:
        terminal.say("  ranks that wait for others:")
    for wait in explanation.waits:
        absent = ", ".join(map(str, wait.absent[:8]))
        at = f"  {wait.at}" if wait.at else ""
        inside = f"{wait.op} #{wait.seq} of {wait.group}"
        terminal.say(f"    rank {wait.rank:4}  {inside}  for {absent}{at}")
