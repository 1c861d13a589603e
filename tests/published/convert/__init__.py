"""Published tables as tables of measurements: one file for each source, run as a module.

Whatever a row leaves open is decided here, with the reason in the row's column `assumed`. No
script looks at a prediction.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

RAW = Path(__file__).parents[1]
"""The tables as they were published."""
TABLES = RAW / "tables"
"""The tables that the scripts here make of them."""
LEFT_OF_NETWORK = 0.55
"""Exponent of a network that others use: the median share of n nodes is n to the power of minus
this.

Collectives of 256 MiB ran on 4, 8, 16, 32 and 64 nodes of one shared cluster of p5 (nanotron).
All-reduces took 1.9, 3.2, 3.8, 5.1 and 10.6 times as long as alone, all-gathers 2.5, 4.2, 4.7, 9.2
and 25 times.
"""
SHARED = {"network.least": "0.3", "network.most": "3", "group": "shared network"}
"""The 5th and the 95th percentile of collectives on such a network, as shares of the median."""

Row = Mapping[str, object]


def published(name: str) -> list[dict[str, str]]:
    """The rows of a raw table."""
    with (RAW / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def bandwidth_left(num_nodes: int) -> float:
    """The share of a shared network's bandwidth that is left to collectives over `num_nodes`."""
    return float(num_nodes**-LEFT_OF_NETWORK)


def table(rows: Iterable[Row]) -> str:
    """The CSV of `rows`, whose columns are all keys in order of first use."""
    listed = list(rows)
    columns = list(dict.fromkeys(key for row in listed for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in row.items()} for row in listed)
    return text.getvalue()


def cell(value: object) -> object:
    """Booleans as TOML writes them."""
    return str(value).lower() if isinstance(value, bool) else value


def seconds(value: float) -> str:
    """A time with its unit, to the nanosecond."""
    return f"{value:.9f} s"
