"""Limits of a scenario file against hostile input, checked before it costs anything: size, depth,
long numbers.

The standard TOML parser takes time quadratic in the depth of a dotted key, and recurses into nested
brackets. Both are bounded here by one linear scan of the text. This module knows text and numbers
only; zsim.scenario.checks.work_limits bounds the cost of a simulation.
"""

from __future__ import annotations

import math
import re

from zsim.errors import ScenarioError

MAX_BYTES = 256 * 1024
MAX_KEY_PARTS = 8
MAX_NESTING = 16
MAX_INT = 2**63 - 1
MAX_LAYERS = 4096

_SPECIAL = re.compile(r"""["'#\[\]{}.=,\n]""")


def check_text(data: bytes, *, where: str) -> str:
    """The text of a scenario file; ScenarioError when it is too large, not UTF-8, or nested too
    deeply."""
    if len(data) > MAX_BYTES:
        raise ScenarioError((f"{where}: expected at most {MAX_BYTES:,} bytes, found more",))
    try:
        text = data.removeprefix(
            b"\xef\xbb\xbf"
        ).decode()  # some editors begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        invalid = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise ScenarioError((f"{where}: expected UTF-8 text, found {invalid}",)) from None
    problem = scan(text)
    if problem:
        raise ScenarioError((f"{where}: {problem}",))
    return text


def scan(text: str) -> str:
    """The problem of a TOML text that is nested too deeply, or "" for none. The scan is linear in
    the text's length and skips strings and comments."""
    nesting = parts = position = 0
    while match := _SPECIAL.search(text, position):
        symbol, start, position = match[0], match.start(), match.end()
        if symbol in "\"'":
            position = _after_string(text, start)
            if position < 0:
                return f"line {_line(text, start)}: not TOML: a string begins here and does not end"
        elif symbol == "#":
            position = _find(text, "\n", position)
        elif symbol == ".":
            parts += 1
        else:
            parts = 0
            nesting = max(0, nesting + (symbol in "[{") - (symbol in "]}"))
        if parts >= MAX_KEY_PARTS:
            return (
                f"line {_line(text, start)}: expected keys of at most {MAX_KEY_PARTS} parts, found "
                f"a longer one"
            )
        if nesting > MAX_NESTING:
            return (
                f"line {_line(text, start)}: expected at most {MAX_NESTING} nested brackets, found "
                f"more"
            )
    return ""


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _find(text: str, wanted: str, start: int) -> int:
    position = text.find(wanted, start)
    return len(text) if position < 0 else position


def _after_string(text: str, start: int) -> int:
    """The position after the string that begins at `start`, or -1 when it does not end."""
    quote = text[start]
    triple = text.startswith(quote * 3, start)
    mark = quote * 3 if triple else quote
    position = start + len(mark)
    limit = len(text) if triple else _find(text, "\n", position)
    while (end := text.find(mark, position, limit)) >= 0:
        escape = text.find("\\", position, end) if quote == '"' else -1
        if escape < 0:
            return end + len(mark)
        position = escape + 2
    return -1


def number_problems(value: object, key: str = "") -> tuple[str, ...]:
    """One line for each key below `value` whose number is not finite or does not fit 64 bits."""
    if isinstance(value, dict):
        parts = [
            number_problems(inner, f"{key}.{name}" if key else str(name))
            for name, inner in value.items()
        ]
        return tuple(problem for part in parts for problem in part)
    if isinstance(value, list):
        parts = [number_problems(inner, f"{key}[{i}]") for i, inner in enumerate(value)]
        return tuple(problem for part in parts for problem in part)
    if isinstance(value, float) and not math.isfinite(value):
        return (f"{key[:100]}: expected a finite number, found {value}",)
    if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
        return (f"{key[:100]}: expected an integer of at most 64 bits, found a longer one",)
    return ()
