"""The garbage collector looks for cycles among all objects whenever enough new ones are there. A
Program is tens of thousands of objects, which hold no cycles and live on: looking at them while
they are made, again and again, finds nothing and takes a fifth of the time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, the garbage collector does not run; objects made there count as old afterwards, and
    are examined rarely. Also a decorator."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else objects frozen by the caller would be thawed
                gc.freeze()
                gc.unfreeze()
            gc.enable()
