"""Options of the plugin as a session of pytest has them, and the rank that a session is.

It is loaded with the plugin, at every start of pytest, and imports nothing but pytest.
"""

from __future__ import annotations

from typing import Any

import pytest

RANK = pytest.StashKey[Any]()
"""The `on_rank.rank.Rank` that this process is, in the config of a rank's session."""


def option_of(config: pytest.Config, name: str) -> Any:
    """The value of an option, or of its ini key; None where neither is given, or zsim's plugin is
    not loaded."""
    value = config.getoption(name, None)
    if value not in (None, False):
        return value
    try:
        return config.getini(name) or None
    except (KeyError, ValueError):  # by the version of pytest
        return None


def world_sizes(config: pytest.Config) -> list[int]:
    """Numbers of ranks of tests whose marker names none; zsim's plugin refuses what is no number.
    """
    text = str(option_of(config, "zero_world_size") or "")
    return [int(size) for size in text.split(",") if size.strip().isdigit()]


def debug_level(config: pytest.Config) -> str:
    """The value of torch's variable for the ranks; "" for that of the controller."""
    return str(option_of(config, "zero_debug") or "").upper()
