"""Files of nccl measurements: CSVs with a header, nccl-tests' text and its JSON. A row that cannot
be used is skipped by name.

Nothing is averaged. Where a CSV has only in-place times, or only bandwidths, a row's time is taken
from those, and says so.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

from zsim.calibration.nccl_tests.checks import (
    RefusedError,
    Rows,
    Skipped,
    Timed,
    checked,
    collect,
    inferred,
    number,
    whole,
)
from zsim.calibration.nccl_tests.json_logs import read_json
from zsim.calibration.nccl_tests.log_prefixes import holds_log, plain
from zsim.calibration.nccl_tests.rows import NcclRow
from zsim.calibration.nccl_tests.series_checks import held
from zsim.calibration.nccl_tests.setting_columns import is_setting
from zsim.calibration.nccl_tests.text_logs import read_text
from zsim.calibration.rows.checks import OUTCOMES, whole_to_the_end
from zsim.calibration.rows.records import (
    MAX_COLUMNS,
    column,
    columns_of,
    decoded,
    from_header,
    other_fields,
)

CSV_NEEDS: tuple[str, ...] = ("collective", "gpu", "n_ranks", "n_nodes", "size_bytes")
CSV_TIMES: tuple[str, ...] = ("time_us_oop", "time_us")
CSV_BUS: tuple[str, ...] = ("busbw_gb_s_oop", "busbw_gb_s")
CSV_ALGORITHM: tuple[str, ...] = ("algbw_gb_s_oop", "algbw_gb_s")
CSV_KNOWN = frozenset(
    (
        *CSV_NEEDS, *CSV_TIMES, *CSV_BUS, *CSV_ALGORITHM, "time_us_ip", "busbw_gb_s_ip",
        "algbw_gb_s_ip", "n_ranks_inferred", "intra_node",
    )
) | {"inter_node", "nccl_version", "dtype", "algo", "algorithm", "proto", "protocol"}
"""A dtype changes nothing of a message whose bytes are known."""
FORCED = {
    "algo": "NCCL_ALGO", "algorithm": "NCCL_ALGO", "proto": "NCCL_PROTO", "protocol": "NCCL_PROTO"
}
"""Columns that say what variables of NCCL do."""
UNKNOWN = "changes nothing: the column is not known"
"""Of what could be a setting (`nccl_settings` says why others are not), which makes a band wider.
"""
NO_SETTING = "is ignored: the column is not known, and its name is no setting's"
NODE = 8
"""As many GPUs as fit one node, where a table does not count nodes."""
IN_PLACE: tuple[str, ...] = ("time_us_ip", "busbw_gb_s_ip", "algbw_gb_s_ip")


def read(path: Path) -> Rows:
    """The rows of `path`, by its first characters: JSON, a CSV with a header, or nccl-tests' text.
    OSError if it cannot be read."""
    return read_any(plain(decoded(path.read_bytes(), errors="replace")), source=path.name)


def read_any(text: str, *, source: str, collective: str = "") -> Rows:
    """The rows of a file's text, whichever of the three it is; `collective` is what a log ran that
    does not say it.

    They hold by themselves and together with those of their series.
    """
    if is_json(text):
        return held(read_json(text, source=source, collective=collective))
    return held(
        read_csv(text, source=source)
        if is_csv(text)
        else read_text(text, source=source, collective=collective)
    )


def is_json(text: str) -> bool:
    """Whether a text, which is `plain`, is JSON, or was before it was cut or damaged.

    Tags and times of launchers begin as lists do, and words behind them as objects; JSON has no
    line that begins with nccl-tests' `#`.
    """
    start = text.lstrip()[:1]
    if start not in ("{", "[") or holds_log(text):
        return False
    if re.match(r'\s*(?:\{\s*["}]|\[\s*[\[{"\]])', text):
        return True
    try:
        json.loads(text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def is_csv(text: str) -> bool:
    """Whether the first line that is neither blank nor a comment is the header of a CSV of nccl
    rows, whatever else it has."""
    _, text, between = from_header(text)
    header = text.partition("\n")[0].strip().split(between, MAX_COLUMNS)
    return {"collective", "size_bytes"} <= {column(name.strip('"')) for name in header}


def read_csv(text: str, *, source: str) -> Rows:
    """Rows under a header that has at least `CSV_NEEDS` and a time or a bandwidth; other columns
    may be missing or more."""
    try:
        return _read_csv(text, source)
    except csv.Error as damaged:
        return Rows(
            rows=(), skipped=(Skipped(source=source, line=1, reason=f"CSV damaged: {damaged}"),)
        )


def _read_csv(text: str, source: str) -> Rows:
    before, text, between = from_header(text)
    reader = csv.DictReader(io.StringIO(text), delimiter=between)
    header = set(names := columns_of(reader.fieldnames or ()))
    reader.fieldnames = names
    lacking = [name for name in CSV_NEEDS if name not in header and name != "n_nodes"]
    if not header & {*CSV_TIMES, *CSV_BUS, *CSV_ALGORITHM, *IN_PLACE}:
        lacking.append(" or ".join(CSV_TIMES))
    if lacking:
        count, reason = sum(1 for _ in reader), f"no column {', '.join(lacking)}"
        first, end = before + 1, before + reader.line_num
        return Rows(
            rows=(),
            skipped=(
                Skipped(
                    source=source, line=first, reason=reason, count=count, first=first, last=end
                ),
            ),
        )
    unended = 0 if text.endswith(("\n", "\r")) else before + text.count("\n") + 1
    last = names[-1] if names[-1] in (*CSV_KNOWN, "notes") else ""
    return collect(
        (
            (
                line := before + reader.line_num,
                _csv_row(
                    table, source, line, between=between, unended=last if line == unended else ""
                ),
            )
            for table in reader
        ),
        source,
    )


def _csv_row(
    table: dict[str, str | None], source: str, line: int, *, between: str, unended: str
) -> Callable[[], NcclRow]:
    def make() -> NcclRow:
        if broken := other_fields(table, between=between):  # type: ignore[arg-type]
            raise RefusedError(broken)
        said = {key: (value or "").strip() for key, value in table.items()}
        ranks, size = (whole(said, name) for name in ("n_ranks", "size_bytes"))
        timed, assumed = _timed(said)
        if ranks <= NODE and "n_nodes" not in said:
            said["n_nodes"], assumed = "1", (*assumed, "ranks of one node")
        nodes = whole(said, "n_nodes")
        unread = [(name, value) for name, value in said.items() if value and not _known(name)]
        assumed += tuple(
            f"{name} = {value[:40]!r} {UNKNOWN}" for name, value in unread if is_setting(name)
        )
        inferred(said.get("n_ranks_inferred", ""), ranks)
        cautions = tuple(
            f"{name} = {value[:40]!r} {NO_SETTING}"
            for name, value in unread
            if not is_setting(name)
        )
        cautions += (whole_to_the_end(unended, said[unended]),) if unended else ()
        return checked(
            NcclRow(
                collective=said["collective"], gpu=said["gpu"], n_ranks=ranks, n_nodes=nodes,
                size_bytes=size, intra_node=said.get("intra_node", ""),
                inter_node=said.get("inter_node", ""), nccl_version=said.get("nccl_version", ""),
                tool=said.get("tool", ""),
                notes=" ".join(
                    [
                        said.get("notes", ""),
                        *(f"{to}={said[name]}" for name, to in FORCED.items() if said.get(name)),
                    ]
                ).strip(),
                assumed=assumed, cautions=cautions, origin=said.get("source", ""), source=source,
                line=line,
            ),
            timed,
        )

    return make


def _known(name: str) -> bool:
    return name in CSV_KNOWN or OUTCOMES.fullmatch(name.strip().lower()) is not None


def _timed(said: dict[str, str]) -> tuple[Timed, tuple[str, ...]]:
    """The out-of-place time and bandwidths, the in-place ones where there are none, and what was
    assumed."""
    for (time, bus, algorithm), assumed in (
        ((CSV_TIMES, CSV_BUS, CSV_ALGORITHM), ()),
        (tuple((name,) for name in IN_PLACE), (_IN_PLACE,)),
    ):
        found = [
            next((said[name] for name in names if said.get(name)), "")
            for names in (time, bus, algorithm)
        ]
        if any(found):
            microseconds, bandwidth, other = (
                number(text, name) if text else None
                for text, name in zip(found, _NAMES, strict=True)
            )
            return Timed(microseconds=microseconds, bus=bandwidth, algorithm=other), assumed
    raise RefusedError("time_us missing or no number")


_NAMES = ("time_us", "busbw", "algbw")
_IN_PLACE = "the in-place time as out of place"
