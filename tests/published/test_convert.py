"""The committed tables are what the scripts make of the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.published.convert import TABLES, bandwidth_left
from tests.published.convert.__main__ import SOURCES, write
from zsim.calibration.data import table


def test_the_committed_tables_are_what_the_scripts_make(tmp_path: Path) -> None:
    """`python -m tests.published.convert` writes them anew."""
    write(tmp_path)
    assert sorted(SOURCES) == sorted(path.name for path in TABLES.glob("*.csv"))
    for path in tmp_path.iterdir():
        assert path.read_text(encoding="utf-8") == (TABLES / path.name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SOURCES)
def test_every_row_names_its_source(name: str) -> None:
    rows = table.read(TABLES / name)
    assert rows
    assert [row.line for row in rows if not row.origin] == []


def test_the_more_nodes_a_shared_network_joins_the_less_of_it_is_left() -> None:
    left = [bandwidth_left(nodes) for nodes in (1, 2, 4, 8, 16, 32, 64)]
    assert left[0] == 1
    assert left == sorted(left, reverse=True)
    assert 1 / left[-1] == pytest.approx(9.8, rel=0.02)  # 10.6 and 25 times were measured
