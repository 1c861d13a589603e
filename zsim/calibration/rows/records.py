"""Files of measurements as tables of text, and what a row becomes: a scenario with the time it
took, or a reason why not.

The files come from anywhere, so sizes are limited and every field is checked by name. A row that
says nothing usable is skipped with its reason, and never dropped in silence.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

from zsim.errors import ZsimError

MAX_FILE_BYTES = 32 * 1024**2
MAX_ROWS = 200_000
MAX_FIELD = 20_000
MAX_COLUMNS = 1000
"""Tables of measurements have some tens; what has more is no header."""
MOST = 1e15
"""Of any figure, whose inverse is the least: nothing measured has a larger one, and products of
several are still finite."""
MISSING = "nothing: there is no file or folder of that name"
OTHER_FIELDS = "more or fewer fields than the header"
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs"}
"""Between the fields of a table; the one that its first line has most of."""
_NAMED = re.compile(r"\"?sep=([,;\t])\"?[^\S\n]*\r?\n", re.IGNORECASE)
"""The first line by which spreadsheets say what their fields are between."""
NUL = "\0"
DAMAGED = "damaged: a NUL byte in it"
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
TRUE, FALSE = (
    ("true", "t", "yes", "y", "on", "1", "1.0", "enabled"),
    ("false", "f", "no", "n", "off", "0", "0.0", "disabled", "none"),
)


class MeasurementError(ZsimError):
    """A file of measurements that cannot be read at all."""


class RowError(Exception):
    """Why one row is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A measured training step: the scenario it ran, in the words of a scenario file, and the
    seconds that it took.

    `fields` are what was run, by the source's own names: two rows that differ in one of them are a
    pair. `tokens` are those of one GPU's step. `assumed` says in words what the row left open and
    the mapping decided, and `widened` by how much that widens the band. `shared` is true where
    others used its network meanwhile, and `otherwise` are the scenarios that the row's words may
    mean as well: the band covers their predictions too.
    """

    source: str
    line: int
    scenario: str
    seconds: float
    tokens: int
    gpu: str
    nodes: int
    fields: Mapping[str, str]
    assumed: tuple[str, ...]
    widened: float = 0.0
    shared: bool = False
    otherwise: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row that is not predicted, and why, in one line; where that is why several are not, `first`
    and `last` are the lines of all."""

    source: str
    line: int
    reason: str
    first: int = field(default=0, compare=False)
    last: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", " ".join(self.reason.split()))


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a table, with its fields as text; asking for one that is missing or wrong raises
    RowError.

    `asked` are the fields that anybody has read; `unended` is the last column where the line is the
    file's last and has no line end, as one that was cut inside its last field, and "" for all
    others. `broken` is why a line with more or fewer fields than the header has none here, and ""
    for all others.
    """

    line: int
    fields: Mapping[str, str]
    unended: str = ""
    asked: set[str] = field(default_factory=set, compare=False, repr=False)
    broken: str = ""

    def text(self, name: str, default: str | None = None) -> str:
        """The field, stripped; `default` where it is empty or there is no such column."""
        self.asked.add(name)
        value = (self.fields.get(name) or "").strip()
        if value:
            return value
        if default is None:
            raise RowError(f"{name}: missing")
        return default

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.text(name, None if default is None else str(default))
        try:
            number = _number(value)
        except ValueError:
            raise RowError(f"{name}: expected a whole number, found {value[:40]!r}") from None
        if not isfinite(number) or number != int(number) or not 1 <= number <= MOST:
            raise RowError(f"{name}: expected a whole number of at least 1, found {value[:40]!r}")
        return int(number)

    def number(self, name: str) -> float:
        """A number, also one that is not finite."""
        value = self.text(name)
        try:
            return _number(value)
        except ValueError:
            raise RowError(f"{name}: expected a number, found {value[:40]!r}") from None

    def positive(self, name: str) -> float:
        """A number above 0, neither larger nor smaller than anything that is measured."""
        number = self.number(name)
        if not isfinite(number) or number <= 0:
            raise RowError(f"{name}: expected a number above 0, found {self.text(name)[:40]!r}")
        if not 1 / MOST <= number <= MOST:
            raise RowError(f"{name}: expected a number of {1 / MOST:g} to {MOST:g}, found "
                           f"{self.text(name)[:40]!r}")
        return number

    def truth(self, name: str, default: bool | None = None) -> bool:
        """Whether the field says so: True, yes, on, 1, or False, no, off, 0."""
        value = self.text(name, None if default is None else str(default)).lower()
        if value in TRUE:
            return True
        if value in FALSE:
            return False
        raise RowError(f"{name}: expected True or False, found {value[:40]!r}")

    def one_of(self, name: str, words: Mapping[str, str], default: str | None = None) -> str:
        """What `words` has for the field."""
        value = self.text(name, default)
        if value not in words:
            raise RowError(f"{name}: expected one of {', '.join(words)}, found {value[:40]!r}")
        return words[value]


def _number(value: str) -> float:
    """A plain number, and 5,762, whose comma groups thousands; ValueError for a comma that does
    not."""
    return plain_number(value.replace(",", "") if _THOUSANDS.fullmatch(value) else value)


def plain_number(value: str) -> float:
    """5762, 5.762e3, 785.50000000000011; ValueError for what is none, and for what only Python
    calls one."""
    if "_" in value or not value.isascii():
        raise ValueError
    return float(value)


def same(name: str, found: float, expected: float, *, within: float = 0.02) -> None:
    """RowError where two fields that say the same contradict each other."""
    if not abs(found - expected) <= within * expected:
        raise RowError(f"{name}: {found:g} contradicts {expected:g}, which the other fields say")


def content(path: Path, *, only: int | None = None) -> bytes:
    """The bytes of a file, or `only` its first; MeasurementError for one that is none, as a pipe,
    cannot be read, or is too large."""
    try:
        if not path.is_file():
            found = "one that is not a plain file" if path.exists() else MISSING
            raise MeasurementError(where=str(path), expected="a file of measurements", found=found)
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1 if only is None else only)
    except OSError as error:
        raise MeasurementError(
            where=str(path), expected="a file of measurements", found=str(error.strerror)
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise MeasurementError(
            where=str(path), expected=f"at most {MAX_FILE_BYTES:,} bytes", found="more"
        )
    return data


def read(path: Path) -> tuple[tuple[str, ...], list[Record]]:
    """The columns and the rows of a CSV file; MeasurementError for a file that is none."""
    return table_of(content(path), where=str(path))


def decoded(data: bytes, *, errors: str = "strict") -> str:
    """The text of a file in UTF-8, or in UTF-16 where its first bytes say so; UnicodeDecodeError
    for neither unless `errors` says else."""
    return data.decode(
        "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", errors=errors
    )


def from_header(text: str) -> tuple[int, str, str]:
    """How many lines stand before a table's header, the text from it on, and what its fields are
    between.

    Before it stand blank lines, comments that begin with `#`, and first of all perhaps `sep=;`,
    which says what fields are between.
    """
    named = _NAMED.match(text)
    before = _BEFORE.match(text, named.end() if named else 0)
    end = before.end() if before else 0
    return text.count("\n", 0, end), text[end:], named[1] if named else _separator(text[end:])


_BEFORE = re.compile(r"(?:[^\S\n]*+(?:#[^\n]*+)?\n)*+")


def _separator(text: str) -> str:
    """What the fields of a table are between, by its first line."""
    first = text.lstrip("\r\n").partition("\n")[0]
    return max(SEPARATORS, key=first.count)


def column(name: str) -> str:
    """A column's name as everything here asks for it: in lower case, its words joined by
    underscores."""
    return re.sub(r"[\s\-]+", "_", name.strip().lower())


def columns_of(names: Sequence[str]) -> tuple[str, ...]:
    """The columns of a header by their names; csv.Error for two of one name, more than any table of
    measurements has, and a NUL byte."""
    if len(names) > MAX_COLUMNS:
        raise csv.Error(f"{len(names):,} columns, more than {MAX_COLUMNS:,}")
    if any(NUL in name for name in names):
        raise csv.Error(f"its header is {DAMAGED}")
    columns = tuple(map(column, names))
    twice = next((name for name, count in Counter(columns).items() if name and count > 1), "")
    if twice:
        raise csv.Error(f"two columns {twice[:40]!r}")
    return columns


def other_fields(fields: Mapping[str | None, str | list[str] | None], *, between: str) -> str:
    """Why a line of a csv.DictReader is broken, with how many fields it has of how many `between`
    the header's separators; "" for none.

    A line that was cut, or has another separator than the header, has fewer; one with a separator
    inside a field that is not quoted more.
    """
    beyond = fields.get(None) or ()
    found = [value for key, value in fields.items() if key is not None and isinstance(value, str)]
    expected = len(fields) - (None in fields)
    if any(NUL in value for value in (*found, *beyond)):
        return DAMAGED
    if not beyond and len(found) == expected:
        return ""
    others = {
        name: sum(value.count(sign) for value in found)
        for sign, name in SEPARATORS.items()
        if sign != between
    }
    also = [
        f"{count} {name}"
        for name, count in others.items()
        if count and count >= expected - len(found) > 0
    ]
    behind = f" with {' and '.join(also)} in them" if also else ""
    return (
        f"{OTHER_FIELDS}: expected {expected} between {SEPARATORS[between]}, found "
        f"{len(found) + len(beyond)}{behind}"
    )


def table_of(data: bytes, *, where: str) -> tuple[tuple[str, ...], list[Record]]:
    """The columns and the rows of a table between commas, semicolons or tabs; MeasurementError,
    naming `where`, for anything else."""
    try:
        before, text, between = from_header(decoded(data))
        lines = io.StringIO(text, newline="")
        reader = csv.DictReader(lines, strict=True, delimiter=between)
        columns = columns_of(reader.fieldnames or ())
        reader.fieldnames = columns
        rows = list(_records(reader, between=between, before=before))
        if rows and columns and not text.endswith(("\n", "\r")):
            rows[-1] = replace(rows[-1], unended=columns[-1])
    except (UnicodeDecodeError, csv.Error) as error:
        raise MeasurementError(
            where=where, expected="a CSV table in UTF-8 or UTF-16", found=str(error)[:200]
        ) from None
    return columns, rows


def _records(reader: csv.DictReader[str], *, between: str, before: int) -> Iterator[Record]:
    for count, fields in enumerate(reader):
        if count >= MAX_ROWS:
            raise csv.Error(f"more than {MAX_ROWS:,} rows")
        broken = other_fields(fields, between=between)
        if any(isinstance(value, str) and len(value) > MAX_FIELD for value in fields.values()):
            raise csv.Error(f"line {before + reader.line_num}: a field of more than {MAX_FIELD:,} "
                            f"characters")
        named = {key: value for key, value in fields.items() if isinstance(value, str) and key}
        yield Record(before + reader.line_num, {} if broken else named, broken=broken)
