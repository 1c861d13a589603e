"""Expectations of a scenario on its steady step: `[expect]` entries, read once and checked against
figures of a Run.

It knows how each figure is written (bytes, time, share, count) and nothing of how it is computed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from zsim.errors import ScenarioError, ZsimError, listed, shown
from zsim.io.units import (
    OPERATORS,
    WHOLE,
    UnitError,
    format_bytes,
    format_time,
    holds,
    parse_bytes,
    parse_fraction,
    parse_time,
    split_comparison,
)

Number = int | float


def _parse_count(text: str) -> int:
    digits = text.replace(",", "").replace("_", "").strip()
    if not re.fullmatch(WHOLE, text.strip(), flags=re.ASCII) or len(digits) > 18:
        raise UnitError(
            where="quantity", expected='a whole number (as "<= 9")', found=f'"{text[:40]}"'
        )
    return int(digits)


def _parse_exact_bytes(text: str) -> int:
    return parse_bytes(text) if text.strip()[-1:].isalpha() else _parse_count(text)


def _format_count(value: Number) -> str:
    return f"{value:,}"


def _format_exact_bytes(value: Number) -> str:
    nbytes = int(value)
    return f"{nbytes:,} B" if nbytes < 2**20 else f"{nbytes:,} B ({format_bytes(nbytes)})"


def _format_time(value: Number) -> str:
    return format_time(int(value))


def _format_share(value: Number) -> str:
    return f"{100 * value:.2f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Reads a figure from text, or from a bare integer where `integer`, and shows it."""

    parse: Callable[[str], Number]
    show: Callable[[Number], str]
    integer: bool = False
    count: bool = False
    """A count alone is an equality: "9". Of other figures "70 GiB" could be a limit as well."""
    meaning: str = ""


def _format_bool(value: Number) -> str:
    return str(bool(value)).lower()


NO_RANK = -1
"""Figure of `at_fault` where no single rank is named."""


def _format_rank(value: Number) -> str:
    return "no single rank" if value == NO_RANK else f"rank {value}"


_BOOL = Figure(parse=_parse_count, show=_format_bool)
_BYTES = Figure(parse=_parse_exact_bytes, show=_format_exact_bytes, integer=True)
_COUNT = Figure(parse=_parse_count, show=_format_count, integer=True, count=True)
_TIME = Figure(parse=parse_time, show=_format_time)
_RANK = Figure(parse=_parse_count, show=_format_rank, integer=True)
_SHARE = Figure(parse=parse_fraction, show=_format_share)

FIGURES: dict[str, Figure] = {
    name: replace(figure, meaning=meaning)
    for name, figure, meaning in (
        (
            "ends", _BOOL,
            "false: with its faults the step does not end, for ranks wait forever or fail.",
        ),
        (
            "at_fault", _RANK,
            "The rank that is named for it: where the step ends, that which holds it up most.",
        ),
        ("fits", _BOOL, "true: the device has the memory that is needed; false: it has not."),
        ("needed_memory", _BYTES, "Bytes of the device, with what torch does not count."),
        ("peak_memory", _BYTES, "The most bytes that torch has allocated at once, on any rank."),
        ("peak_first_step", _BYTES, "The same of the first step."),
        (
            "peak_host_memory", _BYTES,
            "The most bytes that all ranks of a node have offloaded to its host at once.",
        ),
        (
            "needed_host_memory", _BYTES,
            "The same, with rounded pinned blocks, processes and the system.",
        ),
        ("drive_bytes", _BYTES, "Bytes on the drives of a node."),
        ("bytes_sent_per_rank", _BYTES, "Bytes on the wire of the rank that sends most."),
        ("step_time", _TIME, 'Time of the step, as "<= 5 ms".'),
        (
            "exposed_communication", _SHARE,
            "Share of the step in which collectives run and compute does not.",
        ),
        (
            "mfu", _SHARE,
            "Model FLOPs utilization by PaLM's FLOPs, which count all scores of attention.",
        ),
        ("hfu", _SHARE, "Hardware FLOPs utilization: FLOPs that are done, recomputation included."),
        ("all_gathers", _COUNT, "All-gathers of a rank."),
        ("reduce_scatters", _COUNT, "Reduce-scatters of a rank."),
        ("all_reduces", _COUNT, "All-reduces of a rank."),
        ("broadcasts", _COUNT, "Broadcasts of a rank."),
        ("all_to_alls", _COUNT, "All-to-alls of a rank."),
    )
}
"""The figures that a scenario can expect, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One entry of `[expect]`: `name operator value`, and `text`, the right-hand side as it was
    written."""

    name: str
    operator: str
    value: Number
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on an expectation. `actual` is text for people; "unsupported", and `ok` None,
    where there is no figure."""

    name: str
    expected: str
    actual: str
    ok: bool | None

    def to_dict(self) -> dict[str, str | bool | None]:
        """The verdict's object in JSON, whose keys are stable."""
        return {
            "name": self.name, "expected": self.expected, "found": self.actual, "ok": self.ok
        }


def expectation(name: str, written: int | str) -> Expectation:
    """The entry `name = written`; ScenarioError for an unknown figure, UnitError for a value that
    cannot be read."""
    key = f"expect.{name[:60]}"
    if name not in FIGURES:
        near = difflib.get_close_matches(name, FIGURES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {listed(FIGURES, 'and')}"
        raise ScenarioError((f"{key}: unknown key, {hint}",))
    figure = FIGURES[name]
    if figure.show is _format_bool:
        if not isinstance(written, bool):
            raise ScenarioError((f"{key}: expected true or false, found {shown(written)}",))
        text = _format_bool(written)
        return Expectation(name=name, operator="==", value=written, text=text)
    if figure is FIGURES["at_fault"] and (isinstance(written, bool | str) or written < 0):
        raise ScenarioError((f"{key}: expected the number of a rank, found {shown(written)}",))
    if isinstance(written, int):
        if isinstance(written, bool):
            raise ScenarioError(
                (f"{key}: expected a whole number or text, found {str(written).lower()}",)
            )
        if figure.integer and written < 0:
            raise ScenarioError((f"{key}: expected a whole number of at least 0, or text as \"<= "
                                 f"9\", found {written}",))
        if not figure.integer:
            raise ScenarioError((f"{key}: expected text with a unit, as \"<= 5 ms\" or \"<= 10 "
                                 f"%\", found {written}",))
        text = figure.show(written) if figure is FIGURES["at_fault"] else f"{written:,}"
        return Expectation(name=name, operator="==", value=written, text=text)
    operator, quantity = split_comparison(written)
    try:
        value = figure.parse(quantity)
    except UnitError as error:
        raise ScenarioError((f"{key}: {_comparison(error, written)}",)) from None
    if not operator and not figure.count:
        raise ScenarioError((f"{key}: expected a comparison, as \"<= {quantity[:40]}\", found "
                             f"{shown(written)}",))
    return Expectation(
        name=name, operator=operator or "==", value=value, text=written.strip()
    )


def _comparison(error: UnitError, written: str) -> str:
    """The complaint about a comparison, of which the `error` knows only the quantity."""
    whole = ZsimError(
        where="", expected=f"a comparison ({listed(OPERATORS)}) with {error.expected}",
        found=shown(written), remedy=error.remedy,
    )
    return whole.complaint


def check(
    expectations: tuple[Expectation, ...], *, figures: Mapping[str, Number | None]
) -> tuple[Verdict, ...]:
    """One verdict per expectation, in order. `figures` has numbers by name of `FIGURES`; None or
    absent: unsupported."""
    return tuple(_verdict(item, figures.get(item.name)) for item in expectations)


def _verdict(item: Expectation, figure: Number | None) -> Verdict:
    if figure is None:
        return Verdict(name=item.name, expected=item.text, actual="unsupported", ok=None)
    return Verdict(
        name=item.name,
        expected=item.text,
        actual=FIGURES[item.name].show(figure),
        ok=holds(item.operator, figure, item.value),
    )
