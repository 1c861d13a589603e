"""The fixture `sessions`. A test module that asks for it has "pytester" in its `pytest_plugins`."""

from __future__ import annotations

import pytest

from tests.support.plugin_sessions import Sessions


@pytest.fixture
def sessions(pytester, monkeypatch):
    """Sessions with no plugin but pytest's own and zsim's."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    return Sessions(pytester)
