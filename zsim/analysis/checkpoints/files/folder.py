"""Check of a real checkpoint's folder against the scenario: files that lack, or are cut off, and
tensors of other shapes. It needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.analysis.checkpoints.files.dcp_metadata import DcpMetadata, read_metadata
from zsim.analysis.checkpoints.files.formats import CheckpointFile, saved_state
from zsim.analysis.checkpoints.reshard import CheckpointError, CheckpointFolderError
from zsim.errors import listed
from zsim.io.units import counted, format_bytes
from zsim.models.saving import OF_DEEPSPEED
from zsim.scenario.scenario import Scenario

HEADER_NBYTES, OWN_NBYTES = 4096, 2**16
"""Most bytes of torch.save beside those of tensors: of each tensor, and of a file. Measured are 1.5
and 5 kB."""
MOST_OTHERS = 7
"""Most problems that are told beside the first."""
LATEST = "latest"
"""DeepSpeed's file with the name of its last checkpoint's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """A whole checkpoint in a folder: its files, with their bytes on disk."""

    path: str
    num_files: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.path} has all of it: {counted(self.num_files, 'file')}, "
            f"{format_bytes(self.nbytes)}"
        )


def check_folder(
    scenario: Scenario, files: Sequence[CheckpointFile], folder: Path
) -> CheckpointFolder:
    """The checkpoint in `folder`, if it is one of the `scenario` with its predicted `files`. One of
    torch DCP may be of any number of ranks.

    CheckpointFolderError names the first file or tensor that is not as it has to be.
    """
    form = scenario.checkpoint.format
    if form == "consolidated" or (form == "sharded" and not _shapes(scenario)):
        raise CheckpointError(
            where="--folder", expected="a checkpoint of torch DCP or of DeepSpeed",
            found=f"{form} of {scenario.strategy}, whose files no library names",
        )
    if form not in OF_DEEPSPEED:
        stored = read_metadata(folder)
        names = {item.file for item in stored.items}
        problems = [*_of_items(folder, stored), *_of_shapes(scenario, folder, stored)]
    else:
        folder = _tagged(folder)
        names = {file.name for file in files}
        problems = [*_of_files(folder, files)]
    if problems:
        first, *others = problems
        first.details = "\n".join(map(str, others[:MOST_OTHERS]))
        raise first
    sizes = [(folder / name).stat().st_size for name in names]
    return CheckpointFolder(path=str(folder), num_files=len(sizes), nbytes=sum(sizes))


def _of_items(folder: Path, stored: DcpMetadata) -> Iterator[CheckpointFolderError]:
    """Files of shards that lack, or are cut off."""
    inside: dict[str, list[str]] = {}
    ends: Counter[str] = Counter()
    for item in stored.items:
        inside.setdefault(item.file, []).append(item.fqn)
        ends[item.file] = max(ends[item.file], item.end)
    for name, held in sorted(inside.items()):
        size = _size(folder / name)
        if size is None or size < ends[name]:
            tensors = [fqn for fqn in held if stored.shapes.get(fqn)] or held
            yield CheckpointFolderError(
                where=str(folder / name),
                expected=f"the file with {counted(len(tensors), 'shard')}, as of {tensors[0]}"
                         + ("" if size is None else f", of {ends[name]:,} B"),
                found="no such file" if size is None else f"{size:,} B",
                remedy="every rank's file is needed to load",
            )


def _of_shapes(
    scenario: Scenario, folder: Path, stored: DcpMetadata
) -> Iterator[CheckpointFolderError]:
    """Tensors of the scenario that have none of their shape in the checkpoint."""
    there = Counter(stored.shapes.values())
    wanted: dict[tuple[int, ...], list[str]] = {}
    for shape, name in _shapes(scenario):
        wanted.setdefault(shape, []).append(name)
    others = {
        len(shape): f"{fqn} of {_described(shape)}"
        for fqn, shape in reversed(stored.shapes.items()) if shape not in wanted
    }
    for shape, names in wanted.items():
        if there[shape] < len(names):
            yield CheckpointFolderError(
                where=str(folder),
                expected=f"{counted(len(names), 'tensor')} of {_described(shape)}, as "
                         f"{names[there[shape]]}",
                found=f"{there[shape]:,}"
                      + (f", and {others[len(shape)]}" if len(shape) in others else ""),
                remedy="a checkpoint is loaded by the model that saved it",
            )


def _shapes(scenario: Scenario) -> list[tuple[tuple[int, ...], str]]:
    """Shapes of the scenario's whole tensors, each with its part and parameter. Step counters have
    none, and flat buffers neither."""
    return [
        (entry.shape, f"{part.name} of {entry.fqn}")
        for part, _, entry in saved_state(scenario).pairs() if entry.shape and not part.is_counter
    ]


def _described(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape))


def _tagged(folder: Path) -> Path:
    """DeepSpeed's folder of one step: itself, or the latest in it."""
    try:
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return folder
    return folder / tag if tag == Path(tag).name else folder


def _of_files(
    folder: Path, files: Sequence[CheckpointFile]
) -> Iterator[CheckpointFolderError]:
    """Files of DeepSpeed that lack, or hold fewer or more bytes than the scenario's tensors."""
    if not folder.is_dir():
        yield CheckpointFolderError(
            where=str(folder), expected="a folder of a checkpoint", found="no such folder"
        )
        return
    there = sorted(file.name for file in folder.iterdir())[:3]
    for file in files:
        size, headers = _size(folder / file.name), OWN_NBYTES + HEADER_NBYTES * len(file.tensors)
        if size is None:
            yield CheckpointFolderError(
                where=str(folder / file.name),
                expected=f"rank {file.rank}'s file with {format_bytes(file.nbytes)} of tensors",
                found=f"no such file, but {listed(there, 'and')}" if there else "no such file",
                remedy="every rank's file is needed to load, by as many ranks as saved it",
            )
        elif not file.nbytes <= size <= file.nbytes + headers:
            yield CheckpointFolderError(
                where=str(folder / file.name),
                expected=f"{file.nbytes:,} B of tensors, and at most {headers:,} of headers",
                found=f"{size:,} B",
                remedy="a checkpoint is loaded by the model, ranks and dtypes that saved it",
            )


def _size(file: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:
        return None
