"""Sums of gradients as torch's engine makes them when nothing watches its dispatcher: in place."""

from __future__ import annotations

from dataclasses import dataclass

from zreal.tracing.storage_log import Born, Died, Entry, Place, Summed
from zsim.ir.ops import Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """A log with the engine's sums undone: `same` are storages that are a part of another,
    `used_up` went into a sum."""

    entries: list[tuple[Place, Entry]]
    same: dict[int, int]
    used_up: frozenset[int]

    def final(self, storage: int) -> int:
        """The storage that `storage` has become part of."""
        return _final(storage, self.same)


def merged(entries: list[tuple[Place, Entry]], *, in_place: bool) -> Lives:
    """`entries` with the engine's sums in place where it adds in place: into the earlier gradient,
    if nobody else holds it.

    Then its storage dies as soon as the sum has been made. It is as large as the sum, and not that
    of a view, whose base would hold it. Otherwise, and always without `in_place`, the sum stays a
    storage of its own. Seen on torch 2.13.
    """
    sizes = {e.storage: e.nbytes for _, e in entries if isinstance(e, Born)}
    same: dict[int, int] = {}
    gone: set[int] = set()
    used_up: set[int] = set()
    for index, (_, entry) in enumerate(entries):
        if not isinstance(entry, Summed):
            continue
        dying = _dying_after(entries, index)
        used_up |= {_final(storage, same) for storage in dying}
        kept = entry.earlier
        if in_place and kept in dying and sizes.get(kept) == sizes.get(entry.result):
            same[entry.result] = kept
            gone.add(dying[kept])
    return Lives(
        entries=[
            (at, Died(_final(entry.storage, same)) if isinstance(entry, Died) else entry)
            for index, (at, entry) in enumerate(entries)
            if index not in gone and not (isinstance(entry, Born) and entry.storage in same)
        ],
        same=same,
        used_up=frozenset(used_up),
    )


def _final(storage: int, same: dict[int, int]) -> int:
    while storage in same:
        storage = same[storage]
    return storage


def _dying_after(entries: list[tuple[Place, Entry]], index: int) -> dict[int, int]:
    """The storages that die before anything else happens, with the places of their deaths in the
    log."""
    dying: dict[int, int] = {}
    for later in range(index + 1, len(entries)):
        entry = entries[later][1]
        if isinstance(entry, Died):
            dying[entry.storage] = later
        elif not isinstance(entry, Kernel) or dying:
            break
    return dying
