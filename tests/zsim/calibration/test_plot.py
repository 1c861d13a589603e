"""The picture of predicted against measured: each source has a mark, and files are repeatable."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zsim.calibration import plot
from zsim.calibration.plot import PlotError
from zsim.calibration.row_predictions import Predicted


def row(source: str, measured: float) -> Predicted:
    return Predicted(
        source=source, line=2, kind="step", gpu="A100", nodes=1, predicted=1.1 * measured,
        measured=measured, band=(0.9, 1.1), assumed=(), fields={},
    )


def texts(path: Path) -> list[str]:
    """The words of a picture."""
    return [
        str(node.text) for node in ElementTree.fromstring(path.read_text(encoding="utf-8")).iter()
        if node.tag.endswith("}text")
    ]


@pytest.mark.parametrize("count", [1, 9, 35, 60])
def test_sources_are_named_as_far_as_there_are_marks(tmp_path: Path, count: int) -> None:
    sources = [f"{index}.csv" for index in range(count)]
    rows = [row(source, 10.0**power) for source in sources for power in (-5, 0, 2)]
    plot.write(rows, tmp_path / "p.svg")
    labels = texts(tmp_path / "p.svg")
    room = count if count <= plot.MOST_NAMES else plot.MOST_NAMES - 1
    assert [name for name in labels if name.endswith(".csv")] == sources[:room]
    assert (f"and {count - room} more sources" in labels) == (count > room)
    assert {"as measured", "± 10 %", "measured, s", "predicted, s"} <= set(labels)


def test_two_pictures_of_the_same_rows_are_the_same_file(tmp_path: Path) -> None:
    before = set(sys.modules)
    for name in ("a.svg", "b.svg"):
        plot.write([row("a.csv", 1.0), row("$b_{c}.csv", 2.0)], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "matplotlib.pyplot" not in sys.modules.keys() - before



def test_without_matplotlib_or_rows_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlotError, match="expected times that were predicted, found none"):
        plot.write([], tmp_path / "p.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"expected matplotlib.*; pip install 'zsim\[plot\]'"):
        plot.require(tmp_path / "p.svg")
