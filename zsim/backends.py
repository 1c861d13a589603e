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
    try:
        backend: Backend = entries[name].load()()
    except ImportError as error:
        missing = error.name or str(error)
        raise BackendUnavailableError(
            where=f"backend {name}",
            expected="its package to be importable",
            found=f"no {missing}",
            remedy="pip install 'zsim[real]'",
        ) from error
    return backend


def _entries() -> dict[str, EntryPoint]:
    return {BUILT_IN.name: BUILT_IN} | {entry.name: entry for entry in entry_points(group=GROUP)}
