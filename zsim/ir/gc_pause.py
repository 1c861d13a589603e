"""A pause of Python's garbage collector while a Program is made.

The collector looks for cycles among all objects whenever enough new ones are there. A Program is
tens of thousands of objects without cycles. Looking at them again and again while they are made
takes a fifth of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_frozen = False


@contextmanager
def uncollected() -> Iterator[None]:
    """Context manager, also a decorator, in which the garbage collector does not run. Objects made
    inside count as old afterwards, and the collector rarely examines them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not _caller_froze():  # what the caller froze would be thawed
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _caller_froze() -> bool:
    """True from when the caller was first found to freeze objects. Counting a million of them takes
    50 ms, longer than a small step takes to plan and simulate."""
    global _frozen
    _frozen = _frozen or gc.get_freeze_count() > 0
    return _frozen
