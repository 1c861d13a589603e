"""Imports of the fork server: no rank imports torch anew, and none looks for garbage in it."""

from __future__ import annotations

import gc

from zsim.ir.gc_pause import uncollected

with uncollected():  # looking for garbage meanwhile would take a fifth of the time
    import zreal.rank.run as run  # isort: skip, ranks have it though what follows fails

    import torch._dynamo as dynamo  # which torch imports for a rank's optimizer

    gc.freeze()

__all__ = ["dynamo", "run"]
