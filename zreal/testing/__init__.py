"""Tests whose body runs on every rank: a pytest plugin, and what test modules import.

README.md of this folder begins with an example. Each public name is loaded when it is first used,
so that the plugin alone does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zreal.testing.judgement.verdict import RanksFailed as RanksFailed
    from zreal.testing.on_rank.rank import Rank as Rank
    from zreal.testing.pool import RankPool as RankPool
    from zreal.testing.sharded.collectives import check_collectives as check_collectives
    from zreal.testing.sharded.module import check_module as check_module
    from zreal.testing.sharded.optimizer import check_optimizer as check_optimizer

_MODULES = {
    "Rank": "zreal.testing.on_rank.rank",
    "RankPool": "zreal.testing.pool",
    "RanksFailed": "zreal.testing.judgement.verdict",
    "check_collectives": "zreal.testing.sharded.collectives",
    "check_module": "zreal.testing.sharded.module",
    "check_optimizer": "zreal.testing.sharded.optimizer",
}
"""Every public name, and the module that defines it."""

__all__ = [*_MODULES]


if not TYPE_CHECKING:  # to a type checker every misspelling would be an object

    def __getattr__(name: str) -> object:
        """A public name, loaded when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)
