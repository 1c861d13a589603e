"""All modules of a package imported, before sessions of pytest in this process.

Each session takes out of sys.modules what it has imported itself. What still holds a class of such
a module cannot resolve its annotations then.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType


def import_all(package: ModuleType) -> None:
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
