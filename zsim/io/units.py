"""Quantities in scenario files ("80 GiB", "400 Gbit/s", "5 us") to integers, and back.

Bytes and bytes per second are ints, times are int nanoseconds. A prefix without a unit ("80G") is
refused, because it could mean GB, GiB or Gbit.
"""

from __future__ import annotations

import re
from decimal import Decimal

from zsim.errors import ZsimError, listed

_PREFIX = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30,
    "Ti": 2**40,
}
BYTES: dict[str, Decimal] = {f"{prefix}B": Decimal(factor) for prefix, factor in _PREFIX.items()}
RATES: dict[str, Decimal] = {f"{unit}/s": factor for unit, factor in BYTES.items()} | {
    f"{prefix}bit/s": Decimal(factor) / 8 for prefix, factor in _PREFIX.items()
}
TIMES: dict[str, Decimal] = {
    "ns": Decimal(1),
    "us": Decimal(10**3),
    "µs": Decimal(10**3),
    "ms": Decimal(10**6),
    "s": Decimal(10**9),
}
PERIODS: dict[str, Decimal] = TIMES | {
    "min": Decimal(60 * 10**9), "h": Decimal(3600 * 10**9), "d": Decimal(86_400 * 10**9)
}
FLOP_RATES: dict[str, Decimal] = {
    f"{prefix}FLOP/s": Decimal(10**power)
    for prefix, power in zip("MGTP", (6, 9, 12, 15), strict=True)
}
POWERS: dict[str, Decimal] = {"W": Decimal(1), "kW": Decimal(1000)}
FRACTIONS: dict[str, Decimal] = {"%": Decimal("0.01"), "": Decimal(1)}
WHOLE = r"[0-9]{1,3}(?:,[0-9]{3}){1,7}|[0-9]{1,24}(?:_[0-9]{1,3}){0,7}"
"""Regular expression of a whole number, perhaps with commas between thousands, or underscores as in
Python."""
_QUANTITY = re.compile(rf"\s*((?:{WHOLE})(?:\.[0-9]{{1,12}})?)\s*([A-Za-zµ/%]{{0,8}})\s*")
OPERATORS: tuple[str, ...] = ("<=", ">=", "==", "<", ">")


class UnitError(ZsimError, ValueError):
    """A quantity that cannot be read: an unknown or missing unit. A ValueError, as the schema of
    scenarios wants one."""


def _parse(text: str, units: dict[str, Decimal], *, example: str) -> Decimal:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise UnitError(
            where="quantity",
            expected=f'a number of {listed(unit for unit in units if unit)} (as '
                     f'"{example}")',
            found=f'"{text[:40]}"',
            remedy="" if match is None else _remedy(match[1], match[2], units),
        )
    return Decimal(match[1].replace(",", "").replace("_", "")) * units[match[2]]


def _remedy(number: str, unit: str, units: dict[str, Decimal]) -> str:
    """The readings of a prefix without a unit, such as "80G"; "" for any other mistake."""
    meant = [known for known in units if unit and unit in _PREFIX and known.startswith(unit)]
    return (
        f"say which is meant: {listed(f'{number} {known}' for known in meant)}"
        if meant
        else ""
    )


def parse_bytes(text: str) -> int:
    """Bytes of a text such as "80 GiB", rounded to the nearest byte.

    >>> parse_bytes("80 GiB")
    85899345920
    >>> parse_bytes("80G")
    Traceback (most recent call last):
        ...
    zsim.io.units.UnitError: quantity: expected a number of B, kB, MB, GB, TB, KiB, MiB, GiB \
or TiB (as "80 GiB"), found "80G"; say which is meant: 80 GB or 80 GiB
    """
    return int(_parse(text, BYTES, example="80 GiB").to_integral_value())


def parse_rate(text: str) -> int:
    """Bytes per second of a text such as "400 Gbit/s" or "25 GB/s".

    >>> parse_rate("400 Gbit/s")
    50000000000
    """
    return int(_parse(text, RATES, example="400 Gbit/s").to_integral_value())


def parse_flop_rate(text: str) -> int:
    """Floating-point operations per second of a text such as "989 TFLOP/s"."""
    return int(_parse(text, FLOP_RATES, example="989 TFLOP/s").to_integral_value())


def parse_time(text: str) -> int:
    """Nanoseconds of a text such as "5 us".

    >>> parse_time("5 us")
    5000
    """
    return int(_parse(text, TIMES, example="5 us").to_integral_value())


def parse_period(text: str) -> int:
    """Nanoseconds of a text such as "30 min", "8 h" or "2 d", or of one that `parse_time` reads.

    >>> parse_period("1.5 h") == 5400 * 10**9
    True
    """
    return int(_parse(text, PERIODS, example="8 h").to_integral_value())


def parse_power(text: str) -> int:
    """Watts of a text such as "500 W".

    >>> parse_power("0.7 kW")
    700
    """
    return int(_parse(text, POWERS, example="500 W").to_integral_value())


def parse_fraction(text: str) -> float:
    """A share of one, of a text such as "10 %" or "0.1". Without a unit it must be below 1: "10"
    could mean ten times the whole."""
    share = _parse(text, FRACTIONS, example="10 %")
    if share >= 1 and not text.rstrip().endswith("%"):
        raise UnitError(
            where="quantity", expected='a share with its unit (as "10 %"), or below 1',
            found=f'"{text[:40]}"',
        )
    return float(share)


def split_comparison(text: str) -> tuple[str, str]:
    """The operator and the quantity of a comparison; a bare quantity has "" for the operator.

    >>> split_comparison("<= 70 GiB"), split_comparison("9")
    (('<=', '70 GiB'), ('', '9'))
    """
    stripped = text.strip()
    for operator in OPERATORS:
        if stripped.startswith(operator):
            return operator, stripped[len(operator) :].strip()
    return "", stripped


def holds(operator: str, left: float, right: float) -> bool:
    """The truth of `left operator right`, with an operator of `OPERATORS`."""
    return {
        "<=": left <= right,
        ">=": left >= right,
        "==": left == right,
        "<": left < right,
        ">": left > right,
    }[operator]


def format_bytes(nbytes: int) -> str:
    """The text of a size: exact below 1 MiB, two decimals of MiB, GiB or TiB above.

    >>> format_bytes(4096), format_bytes(3 * 2**30)
    ('4,096 B', '3.00 GiB')
    """
    for unit in ("TiB", "GiB", "MiB"):
        factor = int(BYTES[unit])
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:,.2f} {unit}"
    return f"{nbytes:,} B"


_EXACT = re.compile(
    r"(?<![\d,.])(?P<low>\d{1,3}(?:,\d{3}){2,8})(?: B)? to (?P<high>\d{1,3}(?:,\d{3}){2,8}) B\b"
    r"|(?<![\d,.])(?P<one>\d{1,3}(?:,\d{3}){2,8}) B\b(?: \([\d,.]+ [MGT]iB\))?"
)


def rounded_sizes(text: str) -> str:
    """`text` with its bytes as `format_bytes` has them.

    >>> rounded_sizes("exact    3,221,225,472 B on rank 0, 212,872 B on rank 1")
    'exact    3.00 GiB on rank 0, 212,872 B on rank 1'
    """
    def size(digits: str) -> str:
        return format_bytes(int(digits.replace(",", "")))

    return _EXACT.sub(
        lambda match: size(match["one"]) if match["one"]
        else f"{size(match['low'])} to {size(match['high'])}", text
    )


def format_time(ns: int) -> str:
    """The text of a time: ns, or us, ms or s with three decimals.

    >>> format_time(840), format_time(1_250_000)
    ('840 ns', '1.250 ms')
    """
    for unit, factor in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if abs(ns) >= factor:
            return f"{ns / factor:,.3f} {unit}"
    return f"{ns} ns"


def counted(number: int, noun: str) -> str:
    """The text of a count, with its noun in the plural where it is not one.

    >>> counted(1, "rank"), counted(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_rate(bytes_per_second: int) -> str:
    """The text of a rate: MB/s below 1 GB/s, and GB/s above.

    >>> format_rate(450 * 10**6), format_rate(48 * 10**9)
    ('450.0 MB/s', '48.0 GB/s')
    """
    unit = "GB/s" if bytes_per_second >= 10**9 else "MB/s"
    return f"{bytes_per_second / int(RATES[unit]):,.1f} {unit}"
