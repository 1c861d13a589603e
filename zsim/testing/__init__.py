"""Tests of training steps: a pytest plugin, and what test modules import.

README.md of this folder begins with an example. Each public name is loaded when it is first used,
so a session of pytest without such tests pays for none.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zsim.testing.laws import check_laws as check_laws
    from zsim.testing.laws import law as law
    from zsim.testing.plugin.zero import Zero as Zero
    from zsim.testing.sharding import ShardLawError as ShardLawError
    from zsim.testing.sharding import check_sharding as check_sharding
    from zsim.testing.units import assert_units as assert_units

_MODULES = {
    "ShardLawError": "zsim.testing.sharding", "Zero": "zsim.testing.plugin.zero",
    "assert_units": "zsim.testing.units", "check_laws": "zsim.testing.laws",
    "check_sharding": "zsim.testing.sharding", "law": "zsim.testing.laws",
}
"""Every public name, and the module that defines it."""

__all__ = [*_MODULES]


if not TYPE_CHECKING:  # to a type checker every misspelling would be an object

    def __getattr__(name: str) -> object:
        """A public name, loaded when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
