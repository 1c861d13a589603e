"""zreal: real runs of what zsim simulates. `zreal.ZeRO` trains a user's own module, `zreal.lint`
looks for its mistakes. torch is loaded when a name is first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zreal.module_lint import lint as lint
    from zreal.zero.zero import ZeRO as ZeRO

_MODULES = {"ZeRO": "zreal.zero.zero", "lint": "zreal.module_lint"}
"""Every public name, and the module that defines it."""

__all__ = ["ZeRO", "lint"]


if not TYPE_CHECKING:  # to a type checker every misspelling would be an object

    def __getattr__(name: str) -> object:
        """A public name, loaded when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)
