"""Backends by name, found through the entry-point group `zsim.backends`; and the simulator, which is one of them.

Anybody's package can add a backend. Listing them imports none of them, and so no torch.
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from zsim.errors import BackendUnavailableError, ZsimError
from zsim.run import Backend
from zsim.simulator import SimBackend

__all__ = ["SimBackend", "UnknownBackendError", "find", "names"]

GROUP = "zsim.backends"
BUILT_IN = EntryPoint(name="sim", value="zsim.backends:SimBackend", group=GROUP)


class UnknownBackendError(ZsimError):
    """A backend's name that no installed package offers."""


def names() -> dict[str, str]:
    """Every backend's name and where it comes from, as "package.module:Class". Imports none of them."""
    return {name: entry.value for name, entry in sorted(_entries().items())}


def find(name: str) -> Backend:
    """The backend called `name`; UnknownBackendError for no such name, BackendUnavailableError when not importable."""
    entries = _entries()
    if name not in entries:
        near = difflib.get_close_matches(name, entries, n=1)
        remedy = f"did you mean {near[0]}?" if near else "`zsim list backends` names those that are installed"
        expected = f"one of {', '.join(sorted(entries))}"
        raise UnknownBackendError(where="backend", expected=expected, found=name[:60], remedy=remedy)
    entry = entries[name]
    try:
        backend: Backend = entry.load()()
    except Exception as error:  # whatever another package does when it is loaded
        found = f"no {error.name}" if isinstance(error, ImportError) and error.name else f"{type(error).__name__}: {error}"
        own = entry.dist is None or entry.dist.name == "zsim"
        raise BackendUnavailableError(
            where=f"backend {name} ({entry.value})",
            expected="a class that can be imported and made without arguments",
            found=found,
            remedy="pip install 'zsim[real]'" if own else f"ask those who make {entry.dist.name if entry.dist else entry.value}",
        ) from error
    missing = [part for part in ("name", "capabilities", "run") if not hasattr(backend, part)]
    if missing:
        raise BackendUnavailableError(
            where=f"backend {name} ({entry.value})",
            expected="a zsim.run.Backend: name, capabilities() and run()",
            found=f"no {missing[0]}",
        )
    return backend


def _entries() -> dict[str, EntryPoint]:
    return {BUILT_IN.name: BUILT_IN} | {entry.name: entry for entry in entry_points(group=GROUP)}
