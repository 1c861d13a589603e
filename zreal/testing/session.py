"""The session of pytest that ranks run for a test, as the controller's own would run it.

It is described by JSON: arguments, plugins by the name of their module, options, markers,
environment. What watches a whole session (xdist, coverage, timeouts, reports) stays with the
controller.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zreal.testing.options import debug_level, world_sizes

LEFT_OUT = (
    "_pytest", "xdist", "pytest_cov", "pytest_timeout", "pytest_rerunfailures", "pytest_forked",
    "pytest_randomly", "_hypothesis_pytestplugin", "zsim",
)
"""Packages whose plugins run or watch a whole session, or are there anyway."""
WITHOUT = ("terminal", "cacheprovider", "junitxml", "pastebin", "skipping", "debugging", "stepwise")
"""Plugins of pytest that report, remember sessions, or judge marks."""
OWN_OPTIONS = frozenset({
    "file_or_dir", "plugins", "basetemp", "capture", "override_ini", "inifilename", "rootdir",
    "log_file", "log_cli_level", "setupshow", "setuponly", "setupplan", "collectonly", "maxfail",
    "ignore", "ignore_glob", "deselect", "keyword", "markexpr", "pyargs", "help", "version",
})
"""Options that choose tests, or name files that a session writes."""
DEBUG_LEVEL = "TORCH_DISTRIBUTED_DEBUG"
UNSHARED = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_CURRENT_TEST")
"""Variables that pytest itself reads or writes; all others go to the ranks."""


def session_of(
    config: pytest.Config, path: Path, inside: str = "", *, tmp_path: Path | None = None
) -> dict[str, Any]:
    """The session for the test `inside` the file `path`, or for the functions of the file.

    All ranks share the test's `tmp_path`.
    """
    return {
        "arguments": [*_arguments(config), f"{path}::{inside}" if inside else str(path)],
        "is_file": not inside,
        "plugins": list(_plugins(config)),
        "options": dict(_options(config))
        | {"zero_world_size": ",".join(map(str, world_sizes(config)))},
        "markers": config.getini("markers"),
        "autoload": {
            name: value for name, value in os.environ.items()
            if name == "PYTEST_DISABLE_PLUGIN_AUTOLOAD"
        },
        "variables": {DEBUG_LEVEL: level} if (level := debug_level(config)) else {},
        "tmp_path": "" if tmp_path is None else str(tmp_path),
    }


def _arguments(config: pytest.Config) -> Iterator[str]:
    yield from ("--capture=no", f"--rootdir={config.rootpath}")
    yield f"--import-mode={config.getoption('importmode')}"
    if config.inipath is not None:
        yield f"--config-file={config.inipath}"
    if config.getoption("noconftest"):
        yield "--noconftest"
    if cut := config.getoption("confcutdir"):
        yield f"--confcutdir={cut}"
    for line in config.getoption("override_ini") or ():
        yield f"--override-ini={line}"
    yield from ("--override-ini=addopts=", "--override-ini=log_file_mode=a")
    yield from ("--override-ini=log_cli=false", "--override-ini=strict_config=false")
    level = config.getoption("log_level") or config.getini("log_level") or "WARNING"
    yield f"--override-ini=log_file_level={level}"  # torch logs its errors at DEBUG besides
    # keys of plugins that are left out
    yield "-Wignore:Unknown config option:pytest.PytestConfigWarning"
    for name in config.getoption("plugins") or ():
        if name.startswith("no:") or f"_pytest.{name}" in sys.modules:
            yield f"-p{name}"
    yield from (f"-pno:{name}" for name in WITHOUT)


def _plugins(config: pytest.Config) -> Iterator[str]:
    """The modules of all plugins but pytest's own and those that are left out."""
    for _, plugin in config.pluginmanager.list_name_plugin():
        if isinstance(plugin, ModuleType) and plugin.__name__ in sys.modules:
            package = plugin.__name__.partition(".")[0]
            is_conftest = Path(plugin.__file__ or "").name == "conftest.py"
            if package not in LEFT_OUT and not is_conftest:
                yield plugin.__name__


def _options(config: pytest.Config) -> Iterator[tuple[str, Any]]:
    """Options whose values JSON can write; those of conftests and plugins are of this kind."""
    for name, value in vars(config.option).items():
        values = value if isinstance(value, list) else [value]
        is_plain = all(isinstance(each, str | int | float | None) for each in values)
        if is_plain and name not in OWN_OPTIONS:
            yield name, value


def environment(session: dict[str, Any] | None) -> dict[str, str]:
    """The controller's environment, for its ranks, with what the session sets."""
    shared = {name: value for name, value in os.environ.items() if name not in UNSHARED}
    return shared | (session["variables"] if session else {})
