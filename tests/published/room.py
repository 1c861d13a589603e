"""The verdicts FITS, TIGHT and OOM of runs that ended and of runs that failed: `python -m
tests.published.room`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from tests.published.convert import TABLES, Row, cell, nanotron
from tests.published.errors import STEPS
from zsim.calibration.data import table
from zsim.calibration.records import Step
from zsim.memory.fits import FitsVerdict, MemoryVerdict, assess
from zsim.scenario.plan import planned
from zsim.scenario.scenario import Scenario

VERDICTS: tuple[FitsVerdict, ...] = ("FITS", "TIGHT", "OOM")


def ran(file: str, every: int = 1) -> Iterator[Scenario]:
    """The scenarios of each `every`-th row of `file`, all that a row may have been."""
    for row in table.read(TABLES / file)[::every]:
        assert isinstance(row, Step)
        yield from row.readings


def failed() -> Iterator[Scenario]:
    """The scenarios of rows without a time: out of memory, or a crash."""
    for row in nanotron.failed():
        yield scenario_of(row)


def scenario_of(row: Row) -> Scenario:
    """The scenario of a converted row without its measurement."""
    cells = {key: str(cell(value)) for key, value in row.items() if value != ""}
    problems: list[str] = []
    tables = table.nested(cells, problems)
    assert not problems
    return Scenario(**tables)


def verdict(scenario: Scenario) -> MemoryVerdict:
    """The verdict on its own cluster."""
    return assess(planned(scenario))


def counts(scenarios: Iterator[Scenario]) -> Counter[FitsVerdict]:
    """Numbers of verdicts."""
    return Counter(verdict(scenario).verdict for scenario in scenarios)


def line(title: str, numbers: Counter[FitsVerdict]) -> str:
    """The table's line."""
    return f"| {title} | {' | '.join(str(numbers[name]) for name in VERDICTS)} |"


def lines() -> Iterator[str]:
    """The confusion matrix: rows that ran by source, and those that failed."""
    for file, title in STEPS.items():
        yield line(f"ran: {title.partition(':')[0]}", counts(ran(file)))
    yield line("failed: nanotron", counts(failed()))


if __name__ == "__main__":
    sys.stdout.writelines(f"{each}\n" for each in lines())
