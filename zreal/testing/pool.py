"""Ranks that stay from call to call, for examples and for functions of a test module."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from zreal.testing.judgement import output
from zreal.testing.judgement.verdict import RanksFailed
from zreal.testing.ranks import Backend, Ranks
from zreal.testing.session import session_of


class RankPool:
    """Ranks with a process group that call functions: a context manager, which ends them.

    They are started at the first call, and anew after a call that fails on any of them.
    """

    def __init__(
        self, world_size: int, *, backend: Backend = "gloo", timeout: float = 60.0,
        _session: dict[str, Any] | None = None, _folder: Path | None = None,
    ) -> None:
        self._ranks = Ranks(
            world_size=world_size, backend=backend, timeout_s=timeout, session=_session,
            folder=_folder or Path(tempfile.mkdtemp(prefix="zreal-ranks-")),
        )

    def run(self, function: Callable[..., Any], *arguments: object, **named: object) -> list[Any]:
        """Call `function` on every rank, and return what each returns, by rank.

        It stands at the top of a module; its argument `rank`, if it has one, is the Rank. Arguments
        and results are pickled. RanksFailed where a rank fails, dies or hangs.
        """
        __tracebackhide__ = True
        try:
            return self._ranks.call((function, arguments, named))
        except RanksFailed as failure:
            printed = output.sections(self._ranks.folder, self._ranks.world_size)
            lines = [f"{title}:\n{text}" for title, text in printed]
            raise RanksFailed("\n".join([str(failure), *lines])) from None

    def close(self) -> None:
        """End the ranks."""
        self._ranks.__exit__(None, None, None)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Pools:
    """Pools of a test module, by number of ranks and backend; a context manager."""

    def __init__(
        self, config: pytest.Config, path: Path, *, timeout_s: float,
        folders: pytest.TempPathFactory,
    ) -> None:
        self._session, self._timeout_s = session_of(config, path), timeout_s
        self._folders = folders
        self._pools: dict[tuple[int, Backend], RankPool] = {}

    def pool(self, world_size: int, *, backend: Backend = "gloo") -> RankPool:
        """The pool of so many ranks, whose functions are those of the test module."""
        key = world_size, backend
        if key not in self._pools:
            self._pools[key] = RankPool(
                world_size, backend=backend, timeout=self._timeout_s, _session=self._session,
                _folder=self._folders.mktemp("ranks"),
            )
        return self._pools[key]

    def __enter__(self) -> Pools:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pool in self._pools.values():
            pool.close()
