"""Limits on scenario text before any parser sees it, so that a hostile file costs nothing.

The standard TOML parser takes time quadratic in the depth of a dotted key and recurses into nested brackets; both are
bounded here by one linear scan. Knows text only.
"""

from __future__ import annotations

from zsim.errors import ScenarioError

MAX_BYTES = 256 * 1024
MAX_DOTS = 16
MAX_NESTING = 16
MAX_DIGITS = 40


def check_text(data: bytes, *, where: str) -> str:
    """The text of a scenario file; ScenarioError when it is too large, not UTF-8, or nested too deeply."""
    if len(data) > MAX_BYTES:
        raise ScenarioError((f"{where}: expected at most {MAX_BYTES:,} bytes, found {len(data):,}",))
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ScenarioError((f"{where}: expected UTF-8 text, found byte 0x{data[error.start]:02x}",)) from None
    problems = [problem for number, line in enumerate(text.split("\n"), 1) for problem in _line_problems(line, number)]
    depth = deepest = 0
    for character in text:
        if character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth = max(0, depth - 1)
    if deepest > MAX_NESTING:
        problems.append(f"brackets nested {deepest} deep, expected at most {MAX_NESTING}")
    if problems:
        raise ScenarioError(tuple(f"{where}: {problem}" for problem in problems[:20]))
    return text


def _line_problems(line: str, number: int) -> list[str]:
    problems = []
    if line.count(".") > MAX_DOTS and '"' not in line and "#" not in line:
        problems.append(f"line {number}: {line.count('.')} dots in one key, expected at most {MAX_DOTS}")
    elif line.split("=")[0].count(".") > MAX_DOTS * 4:
        problems.append(f"line {number}: a dotted key deeper than {MAX_DOTS * 4}")
    run = 0
    for character in line:
        run = run + 1 if character.isdigit() or character == "_" else 0
        if run > MAX_DIGITS:
            problems.append(f"line {number}: a number of more than {MAX_DIGITS} digits")
            break
    return problems
