"""Recorded steps on shaped networks: what tests/measured/testbed.json says of itself is true."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.testbed_grid import TARGET

NEAR = 0.05
"""Difference of measured times from which their order counts."""


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """The recorded measurements."""
    read: dict[str, Any] = json.loads(Path(TARGET).read_text())
    return read


def test_its_figures_are_those_of_its_rows(table: dict[str, Any]) -> None:
    errors = [abs(row["predicted_ns"] / row["measured_ns"] - 1) for row in table["steps"]]
    figures = table["figures"]
    assert len(errors) == figures["steps"]
    assert median(errors) == pytest.approx(figures["median"], abs=1e-4)
    assert max(errors) == pytest.approx(figures["worst"], abs=1e-4)


def test_bytes_on_the_wire_are_within_a_percent_for_every_strategy(table: dict[str, Any]) -> None:
    rows = table["wire_bytes"]
    assert {row["strategy"] for row in rows} == {"ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp"}
    for row in rows:
        for predicted, measured in zip(row["predicted"], row["measured"], strict=True):
            assert predicted == pytest.approx(measured, rel=0.01), row


def test_a_lookahead_of_one_shortens_the_step_as_predicted(table: dict[str, Any]) -> None:
    rows = {
        (row["layout"], row["ratio"], row["lookahead"]): row
        for row in table["steps"] if "lookahead" in row
    }
    assert rows
    for layout, ratio, _ in rows:
        without, ahead = (rows[layout, ratio, lookahead] for lookahead in (0, 1))
        for time in ("predicted_ns", "measured_ns"):
            assert ahead[time] < without[time], (layout, ratio)


def test_strategies_are_in_the_measured_order_wherever_it_is_clear(table: dict[str, Any]) -> None:
    """Both strategies of a layout have nearly equal communication and other compute."""
    rows = table["steps"]
    wrong = [
        (left, right)
        for left in rows for right in rows
        if left["layout"] == right["layout"]
        and left["measured_ns"] * (1 + NEAR) < right["measured_ns"]
        and left["predicted_ns"] >= right["predicted_ns"]
    ]
    assert wrong == []
