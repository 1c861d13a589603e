"""Limits of a scenario file, checked before it costs anything: size, depth of keys, long numbers.

This module knows text and numbers only; zsim.scenario.checks.work_limits bounds the cost of a
simulation.
"""

from __future__ import annotations

import math
import re

from zsim.errors import ScenarioError

MAX_BYTES = 256 * 1024
MAX_INT = 2**63 - 1
MAX_LAYERS = 4096

_DEEP_KEY = re.compile(r"^[ \t]*(?:[\w-]+[ \t]*\.[ \t]*){8}", re.MULTILINE)


def check_text(data: bytes, *, where: str) -> str:
    """The text of a scenario file; ScenarioError when it is too large, not UTF-8, or of deep keys.
    """
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
    """The problem of a TOML text with a key of too many parts, or "" for none.

    The standard parser takes time quadratic in their number.
    """
    deep = _DEEP_KEY.search(text)
    line = text.count("\n", 0, deep.start()) + 1 if deep else 0
    return f"line {line}: expected keys of at most 8 parts, found a longer one" if deep else ""


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
