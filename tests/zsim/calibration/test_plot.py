"""The picture of predicted against measured: whose each point is can be told, and nothing is drawn
over anything or outside of it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zsim.calibration import plot
from zsim.calibration.accuracy import Predicted


def row(source: str, measured: float) -> Predicted:
    return Predicted(
        source=source,
        line=2,
        kind="step",
        gpu="A100",
        nodes=1,
        predicted=1.1 * measured,
        measured=measured,
        band=(0.9, 1.1),
        assumed=(),
        fields={},
    )


def drawn(tmp_path: Path, sources: list[str]) -> list[ElementTree.Element]:
    plot.write(
        [row(source, 10.0**place) for source in sources for place in (-5, 0, 2)], tmp_path / "p.svg"
    )
    return list(ElementTree.fromstring((tmp_path / "p.svg").read_text(encoding="utf-8")))


def mark(node: ElementTree.Element) -> tuple[str, str | None]:
    """The shape of a mark without its place, and its colour."""
    return re.sub(r"^M[\d.]+ [\d.]+", "", node.get("d", "circle")), node.get("fill")


@pytest.mark.parametrize("count", [1, 9, 31])
def test_each_source_has_a_mark_of_its_own_which_the_legend_names(
    tmp_path: Path, count: int
) -> None:
    sources = [f"{place}.csv" for place in range(count)]
    nodes = drawn(tmp_path, sources)
    of_points: dict[str, set[tuple[str, str | None]]] = {}
    for node in nodes:
        if len(node):
            of_points.setdefault(str(node[0].text).partition(" line ")[0], set()).add(mark(node))
    assert list(of_points) == sources
    assert all(len(marks) == 1 for marks in of_points.values())
    assert len({one for marks in of_points.values() for one in marks}) == count
    legend = {
        str(after.text): {mark(node)}
        for node, after in zip(nodes, nodes[1:], strict=False)
        if after.text in of_points
    }
    assert legend == of_points


@pytest.mark.parametrize("count", [32, 41, 300])
def test_sources_that_the_legend_has_no_room_for_share_a_mark_that_no_named_source_has(
    tmp_path: Path, count: int
) -> None:
    nodes = drawn(tmp_path, [f"{place}.csv" for place in range(count)])
    legend = {
        str(after.text): mark(node)
        for node, after in zip(nodes, nodes[1:], strict=False)
        if float(after.get("x", 0)) > plot.SIDE
    }
    rest = legend.pop(f"and {count - len(legend) + 1} more sources")
    points = {(str(node[0].text).partition(" line ")[0], mark(node)) for node in nodes if len(node)}
    assert len({*legend.values(), rest}) == len(legend) + 1
    assert points == {(f"{place}.csv", legend.get(f"{place}.csv", rest)) for place in range(count)}


@pytest.mark.parametrize(
    "name", ["W" * 20, "W" * 21, "W" * 34, "ultrascale_playbook_sweep.csv", "W" * 300, "長" * 34]
)
def test_no_name_is_wider_than_its_place_however_wide_its_letters_are(
    tmp_path: Path, name: str
) -> None:
    """Of twelve pixels at most is a letter of this size; a width that is told holds in every font.
    """
    nodes = drawn(tmp_path, [name])
    (text,) = (node for node in nodes if node.get("x") == str(plot.SIDE + 20))
    wide = float(text.get("textLength", 12 * len(str(text.text))))
    assert plot.SIDE + 20 + wide <= plot.SIDE + plot.LEGEND


@pytest.mark.parametrize("count", [1, 31, 41, 300])
def test_nothing_is_outside_of_the_picture_and_the_legend_not_over_the_axes(
    tmp_path: Path, count: int
) -> None:
    nodes = drawn(tmp_path, [f"{'a-long-folder/' * 5}{place}.csv" for place in range(count)])
    texts = [
        (float(node.get("x", -1)), float(node.get("y", -1)), str(node.text))
        for node in nodes
        if node.tag.endswith("text")
    ]
    assert all(0 <= x <= plot.SIDE + plot.LEGEND and 0 <= y <= plot.SIDE for x, y, _ in texts)
    legend = [(x, y, words) for x, y, words in texts if x > plot.SIDE]
    assert max(y for _, y, _ in legend) <= plot.SIDE - plot.MARGIN + plot.LINE
    assert all(len(words) <= plot.LONGEST_NAME for _, _, words in legend)
    shown = [words for _, _, words in legend if words.endswith(".csv")]
    assert len(shown) == (count if count <= plot.MOST_NAMES else plot.MOST_NAMES - 1)
    assert (legend[-1][2] == f"and {count - len(shown)} more sources") == (count > plot.MOST_NAMES)


def test_the_lines_of_ten_percent_are_named(tmp_path: Path) -> None:
    assert {"+10 %", "-10 %", "as measured"} <= {node.text for node in drawn(tmp_path, ["a.csv"])}
