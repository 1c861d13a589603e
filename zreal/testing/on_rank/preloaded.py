"""Imports of the fork server for tests: pytest, so that no rank imports it anew."""

from __future__ import annotations

import gc
import pkgutil
from contextlib import suppress
from importlib import import_module

import _pytest

import zreal.testing.on_rank.rank_session as rank_session

__all__ = ["rank_session"]

for _module in pkgutil.iter_modules(_pytest.__path__, "_pytest."):
    with suppress(ImportError):  # for another system
        import_module(_module.name)
gc.collect()
gc.freeze()
