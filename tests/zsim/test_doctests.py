"""Examples in docstrings give what they show."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

MODULES = [
    "zsim.io.units",
    "zsim.ir.buffers",
    "zsim.ir.ledger",
    "zsim.ir.program",
    "zsim.ir.sharding",
    "zsim.models.spec",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_give_what_they_show(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert attempted
    assert not failed
