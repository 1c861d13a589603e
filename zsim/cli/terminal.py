"""Lines for people on a terminal, one JSON object for programs, and progress on standard error."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
from textwrap import wrap
from time import monotonic
from typing import Any, TypeVar

from zsim.errors import visible

Thing = TypeVar("Thing")

TELL_EVERY_S = 10.0
"""Seconds between lines of progress in a file or a pipe."""
COLOURS = {"FITS": 32, "TIGHT": 33, "OOM": 31, "FAILED": 31, "DIFFERS": 31, "BROKEN": 31}
"""Numbers of a terminal's colours, by the verdicts that have one: green, yellow, red."""
_VERDICT = re.compile(rf"\b(?:{'|'.join(COLOURS)})\b")


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show `text` on standard error while the work inside goes on, on a terminal only."""
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write(f"{one_line(text)} …\r")
        sys.stderr.flush()
    try:
        yield
    finally:
        if shown:
            sys.stderr.write("\033[K")


def tell(text: str) -> None:
    """Print the progress of long work on standard error, on a terminal only; the next line
    overwrites it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\033[K{one_line(text)}\r")
        sys.stderr.flush()


def telling(head: str) -> Callable[[str], None]:
    """A function like `tell`, with `head` before each text; where standard error is no terminal it
    prints a line every ten seconds."""
    told_at = monotonic()

    def told(text: str) -> None:
        nonlocal told_at
        if sys.stderr.isatty():
            tell(f"{head}{text}")
        elif monotonic() - told_at >= TELL_EVERY_S:
            told_at = monotonic()
            sys.stderr.write(f"{one_line(head + text)}\n")
            sys.stderr.flush()

    return told


def countdown(things: Sequence[Thing]) -> Iterator[tuple[str, Thing]]:
    """Each of many things, with the words before its progress: its number, and the time left."""
    begin = monotonic()
    for number, thing in enumerate(things):
        left = (monotonic() - begin) / number * (len(things) - number) if number else 0.0
        time_left = f", {left:,.0f} s left" if number else ""
        yield (f"{number + 1} of {len(things)}{time_left}: " if len(things) > 1 else ""), thing


def warn(name: str, warnings: Sequence[str]) -> None:
    """Print warnings about the scenario `name` on standard error."""
    for text in warnings:
        sys.stderr.write(f"warning: {one_line(name)}: {one_line(text)}\n")


def note(text: str) -> None:
    """Print on standard error what is no error."""
    sys.stderr.write(f"note: {one_line(text)}\n")


def wrote(path: object, hint: str = "") -> None:
    """Print on standard error that a result is in the file at `path`."""
    sys.stderr.write(f"wrote {one_line(str(path))}{hint}\n")


def one_line(text: str) -> str:
    """A name or a sentence of a scenario, a file or a backend, in one line."""
    return visible(text).replace("\n", "?").replace("\t", " ")


def write_json(value: Any) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def say(text: str) -> None:
    """A line for people, on standard output; what a terminal would obey instead of showing it is a
    ? there."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = visible(text).encode(encoding, errors="replace").decode(encoding)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        shown = _VERDICT.sub(lambda match: f"\033[{COLOURS[match[0]]}m{match[0]}\033[0m", shown)
    sys.stdout.write(shown + "\n")


def bar() -> str:
    """The character of bars, in the terminal's encoding."""
    try:
        "▇".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "▇"


def print_lists(lists: Mapping[str, Sequence[tuple[str, str]]], *, as_json: bool) -> None:
    """Lists by what they list: names with a word on each."""
    if as_json:
        write_json({
            kind: [{"name": name, "about": about} for name, about in rows]
            for kind, rows in lists.items()
        })
        return
    for kind, rows in lists.items():
        if rows:
            table(kind, rows)


def table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Names and values in two columns. On a terminal values are wrapped to its width, and a name
    that is long has a line of its own: none is cut."""
    title, rows = one_line(title), [(one_line(name), one_line(value)) for name, value in rows]
    width = max((len(name) for name, _ in rows), default=0)
    columns = line_width()
    say_wrapped(title, hanging=2)
    for name, value in rows:
        if not columns or 2 * width <= columns:
            say_wrapped(f"  {name:{width}}  {value}", hanging=width + 4)
        else:
            say(f"  {name}")
            say_wrapped(f"      {value}", hanging=6)


def line_width() -> int:
    """Columns of the terminal, or of COLUMNS where that is set; 0 of a file or a pipe."""
    fixed = os.environ.get("COLUMNS", "").isdigit()
    return get_terminal_size().columns if fixed or sys.stdout.isatty() else 0


def say_table(text: str, *, most: int = 0) -> None:
    """The lines of a table; a long one goes on below its last column, after two blanks."""
    for line in text.splitlines():
        column = line.rfind("  ") + 2
        say_wrapped(line, hanging=column if 6 < column < line_width() - 20 else 6, most=most)


def say_wrapped(text: str, *, hanging: int = 6, most: int = 0) -> None:
    """`text` in lines as wide as the terminal, and at most `most` columns; those after the first
    are indented by `hanging`. No name is cut."""
    width = min(filter(None, (line_width(), most)), default=0)
    if not width or len(text) <= width:
        say(text)
        return
    for line in wrap(
        text, max(width, hanging + 20), subsequent_indent=" " * hanging, break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False,
    ):
        say(line)
