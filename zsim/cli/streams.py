"""Standard streams that outlive their readers: a reader that closes a pipe early loses the rest,
and not the verdict in the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class _Stream:
    """A stream whose reader may go away: what is written then is dropped. `patient` ones drop what
    a full disk refuses as well."""

    def __init__(self, stream: TextIO, *, patient: bool) -> None:
        self._stream = stream
        self._errors: tuple[type[Exception], ...] = (
            (OSError, ValueError) if patient else (BrokenPipeError,)
        )

    def write(self, text: str) -> int:
        """Write to the stream; after its reader is gone, to nowhere."""
        try:
            return self._stream.write(text)
        except self._errors:
            self._leave()
            return len(text)

    def flush(self) -> None:
        """Flush the stream, unless its reader is gone."""
        try:
            self._stream.flush()
        except self._errors:
            self._leave()

    def _leave(self) -> None:
        """Drops what Python still holds, so that it does not fail at its own end."""
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Inside, sys.stdout and sys.stderr outlive their readers, and are there even if they were
    closed before the start."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        out: Any = _Stream(sys.stdout or nowhere, patient=False)
        err: Any = _Stream(sys.stderr or nowhere, patient=True)
        sys.stdout, sys.stderr = out, err
        try:
            yield
        finally:
            err.flush()
            sys.stdout, sys.stderr = before
