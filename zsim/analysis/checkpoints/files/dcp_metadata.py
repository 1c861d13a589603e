"""Reader of torch DCP's `.metadata` without torch: shapes of tensors, and the file of each shard.

It is a pickle of torch's classes. Objects of any class are read as records without methods, so no
code of a file runs. Source: torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from zsim.analysis.checkpoints.reshard import CheckpointFolderError

NAME = ".metadata"
MOST_NBYTES = 2**28
"""Most bytes of such a file; 405B on 1,024 ranks has some 200 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """A shard of `fqn` in `file`, which has it before byte `end`."""

    fqn: str
    file: str
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpMetadata:
    """Shapes of whole tensors by name, and all that files hold."""

    shapes: dict[str, tuple[int, ...]]
    items: tuple[StoredItem, ...]


class _Record:
    """An object of any class: the arguments that it was made of, and its fields."""

    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.fields = state if isinstance(state, dict) else {}


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Record]:
        """A class of records in place of the one that is named."""
        return type(name, (_Record,), {})


def read_metadata(folder: Path) -> DcpMetadata:
    """The metadata of the checkpoint in `folder`; CheckpointFolderError where it cannot be read."""
    file = folder / NAME
    try:
        if file.stat().st_size > MOST_NBYTES:
            raise ValueError
        with file.open("rb") as stream:
            whole = _Records(stream).load()
        return DcpMetadata(
            shapes=dict(_shapes(whole.fields["state_dict_metadata"])),
            items=tuple(_items(whole.fields["storage_data"])),
        )
    except OSError:
        raise _unreadable(file, "no such file, or none that can be read") from None
    except Exception:  # a pickle may raise anything
        raise _unreadable(file, "another file") from None


def _unreadable(file: Path, found: str) -> CheckpointFolderError:
    return CheckpointFolderError(
        where=str(file), expected="the metadata that torch.distributed.checkpoint.save writes last",
        found=found, remedy="a save that did not end leaves none",
    )


def _shapes(tensors: Mapping[str, _Record]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes by name; what is no tensor has none."""
    for fqn, entry in tensors.items():
        if "size" in entry.fields:
            (size,) = entry.fields["size"].arguments
            yield str(fqn), tuple(map(int, size))


def _items(stored: Mapping[_Record, _Record]) -> Iterator[StoredItem]:
    for index, info in stored.items():
        yield StoredItem(
            fqn=str(index.fields["fqn"]), file=str(info.fields["relative_path"]),
            end=int(info.fields["offset"]) + int(info.fields["length"]),
        )
