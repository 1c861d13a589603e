"""Examples in docstrings give what they show."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from tests.support.folders import ROOT

FILES = [
    file.relative_to(ROOT) for package in ("zsim", "zreal")
    for file in sorted((ROOT / package).rglob("*.py")) if ">>> " in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_examples_of_a_module_give_what_they_show(file, monkeypatch) -> None:
    if file.parts[0] == "zreal":
        pytest.importorskip("torch")
    monkeypatch.chdir(ROOT)
    module = import_module(".".join(file.with_suffix("").parts))
    failed, attempted = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert attempted > 0
    assert failed == 0


def test_there_are_examples_of_the_front_door_and_of_clusters() -> None:
    names = {str(file) for file in FILES}
    assert {"zsim/api.py", "zsim/cluster/testbed.py", "zsim/cluster/measured_times.py"} <= names
