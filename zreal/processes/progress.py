"""The last collectives of a rank, in memory that it shares with its controller.

A rank announces a collective before it enters it. One that sends too much may get some collectives
further until another rank ends for it, so the last one alone is not enough.
"""

from __future__ import annotations

import ctypes
from typing import Any

KEPT = 16
"""Collectives of each rank that are remembered."""
TEXT_BYTES = 400
"""Bytes of a collective's text at most."""
SLOTS = KEPT + 1
"""Slots for texts: those remembered, and the one that is written next, which nobody reads."""


class Progress:
    """Texts that one process announces and another reads. There is no lock, since the announcing
    process may die at any moment."""

    def __init__(self, context: Any) -> None:
        self._memory = context.RawArray(ctypes.c_char, 1 + SLOTS * TEXT_BYTES)

    def announce(self, text: str) -> None:
        """Add a text, cut to its room; the oldest is forgotten."""
        slot = (self._memory[0][0] + 1) % SLOTS
        begin = 1 + slot * TEXT_BYTES
        data = text.encode(errors="replace")[: TEXT_BYTES - 1].decode(errors="ignore").encode()
        self._memory[begin : begin + TEXT_BYTES] = data.ljust(TEXT_BYTES, b"\0")
        self._memory[0] = bytes([slot])  # last, so that the newest text is whole

    def recent(self) -> tuple[str, ...]:
        """The last texts, oldest first."""
        newest = self._memory[0][0]
        memory = self._memory.raw
        texts = []
        for slot in range(newest + 2, newest + SLOTS + 1):
            begin = 1 + slot % SLOTS * TEXT_BYTES
            data = memory[begin : begin + TEXT_BYTES].split(b"\0", 1)[0]
            texts.append(data.decode(errors="replace"))
        return tuple(filter(None, texts))
