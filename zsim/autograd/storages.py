"""Storages of tensors by name, and the references to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from zsim.autograd.lowered import TapeEvent
from zsim.ir.buffers import Buffer
from zsim.ir.ops import Alloc, Free, MemoryKind


@dataclass(slots=True)
class Storages:
    """References to each live storage; a storage is freed, as an event, when its last reference
    goes."""

    events: list[TapeEvent] = field(default_factory=list)
    references: dict[str, int] = field(default_factory=dict)
    views: dict[str, str] = field(default_factory=dict)

    def allocate(self, name: str, nbytes: int, *, temporary: bool = False) -> None:
        """A new storage with one reference."""
        kind: MemoryKind = "temporaries" if temporary else "activations"
        self.events.append(Alloc(Buffer(name), kind, nbytes))
        self.references[name] = 1

    def view(self, name: str, of: str) -> None:
        """`name` is another tensor on the storage of `of`, and holds it."""
        self.views[name] = self.views.get(of, of)
        self.hold(name)

    def hold(self, name: str) -> None:
        """One reference more."""
        self.references[self.views.get(name, name)] += 1

    def release(self, name: str) -> None:
        """One reference less."""
        name = self.views.get(name, name)
        left = self.references[name] - 1
        if left:
            self.references[name] = left
            return
        del self.references[name]
        self.events.append(Free(Buffer(name)))

    def take(self) -> tuple[TapeEvent, ...]:
        """The events since the last time."""
        events, self.events = tuple(self.events), []
        return events
