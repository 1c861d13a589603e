"""zreal: real runs of what zsim simulates. `zreal.ZeRO` trains a user's own module; torch is loaded
when that name is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zreal.zero.zero import ZeRO as ZeRO

__all__ = ["ZeRO"]


if not TYPE_CHECKING:  # to a type checker every misspelling would be an object

    def __getattr__(name: str) -> object:
        """A public name, loaded when it is first used (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("zreal.zero.zero"), name)
