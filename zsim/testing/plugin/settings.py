"""Options `--zero-…` of a session of pytest, read once, and refused before any test runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from zsim.analysis.growth import parse_limits
from zsim.errors import ZsimError
from zsim.io import files
from zsim.runs import registry
from zsim.runs.backend import require_seconds
from zsim.testing.regression import Baselines

MOST_SEED = 2**31


class OptionError(ZsimError):
    """An option of the plugin that cannot be read, or that another one needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The options of a session; those that are not given have their defaults."""

    backends: tuple[str, ...] = (registry.SimBackend.name,)
    world_sizes: tuple[int, ...] = ()
    """Numbers of ranks of tests whose marker names none."""
    require_backend: bool = False
    """A backend that is not available fails its tests instead of skipping them."""
    update_golden: bool = False
    baselines: Baselines | None = None
    artifacts: Path | None = None
    timeout_s: float = 120.0
    seed: int | None = None

    def lacks(self, reason: str) -> NoReturn:
        """Skip the test that runs, or fail it where backends are required."""
        if self.require_backend:
            text = f"{reason} (--zero-require-backend)"
            raise pytest.fail.Exception(text, pytrace=False) from None
        skipped: Any = pytest.skip.Exception(reason)
        skipped._use_item_location = True  # the report names the test, and no line of this package
        raise skipped from None


def read(
    text_of: Callable[[str], str], *, require_backend: bool, update_golden: bool
) -> SessionOptions:
    """The options whose texts are `text_of` their names, "" for one not given."""
    backends, timeout, seed = (text_of(name) for name in ("backend", "timeout", "seed"))
    return SessionOptions(
        backends=tuple(backends_of(backends.split(","), where="--zero-backend"))
        if backends
        else (registry.SimBackend.name,),
        world_sizes=_world_sizes(text_of("world-size")),
        require_backend=require_backend,
        update_golden=update_golden,
        baselines=_baselines(text_of("compare"), text_of("fail-if")),
        artifacts=_folder(text_of("artifacts")),
        timeout_s=_seconds(timeout) if timeout else 120.0,
        seed=_seed(seed) if seed else None,
    )


def backends_of(names: list[str], *, where: str) -> list[str]:
    """Each backend once, in order; UnknownBackendError, with `where`, for one that is not
    installed."""
    stripped = [name.strip() if isinstance(name, str) else name for name in names]
    for name in stripped:
        if name != registry.SimBackend.name and name not in registry.names():
            registry.find(name, where=where)  # which says so
    return list(dict.fromkeys(stripped))


def _world_sizes(text: str) -> tuple[int, ...]:
    sizes = [part.strip() for part in text.split(",")] if text else []
    if not all(re.fullmatch("[1-9][0-9]{0,6}", size) for size in sizes):
        raise OptionError(
            where="--zero-world-size", expected="numbers of ranks, as 2,4", found=text[:60]
        )
    return tuple(dict.fromkeys(map(int, sizes)))


def _baselines(path: str, limits: str) -> Baselines | None:
    if not path:
        if limits:
            raise OptionError(
                where="--zero-fail-if", expected="--zero-compare RUN beside it", found="none"
            )
        return None
    held_to = parse_limits(limits, where="--zero-fail-if") if limits else ()
    return Baselines(Path(path), limits=held_to)


def _folder(path: str) -> Path | None:
    if not path:
        return None
    folder = Path(path).absolute()
    files.require(folder / "run.json", option="--zero-artifacts")
    return folder


def _seconds(text: str) -> float:
    try:
        seconds: float | str = float(text)
    except ValueError:
        seconds = text
    require_seconds(seconds, where="--zero-timeout")
    return float(seconds)


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and int(text) <= MOST_SEED):
        raise OptionError(
            where="--zero-seed", expected=f"a whole number from 0 to {MOST_SEED:,}", found=text[:60]
        )
    return int(text)
