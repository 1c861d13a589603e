"""Sizes and times that read as people write them: integers of bytes and of nanoseconds.

>>> Bytes(36_012_348)
36,012,348 B (34.34 MiB)
>>> Bytes("70 GiB") == GiB(70) == 70 * 2**30
True
>>> Duration("1.5 ms")
1.500 ms
"""

from __future__ import annotations

from zsim.errors import ArgumentError
from zsim.io.arguments import described
from zsim.io.units import format_bytes, format_time, parse_bytes, parse_time

LARGEST = 10**24
"""The largest size and time, in bytes and nanoseconds: beyond it a mistake is likelier."""


class Bytes(int):
    """A size: an int of bytes, from an int or a text with its unit ("70 GiB").

    UnitError for a text without a unit. Sums and differences of sizes are plain ints.
    """

    def __new__(cls, size: int | str) -> Bytes:
        return super().__new__(
            cls, parse_bytes(size) if isinstance(size, str) else _int("Bytes", size, "bytes")
        )

    def __repr__(self) -> str:
        exact = f"{int(self):,} B"
        return exact if abs(self) < 2**20 else f"{exact} ({format_bytes(int(self))})"

    __str__ = __repr__


class Duration(int):
    """A time: an int of nanoseconds, from an int or a text with its unit ("5 ms").

    The true time is expected between the two of `band`, in ns, where a simulator gave them.
    UnitError for a text without a unit. Sums and differences of times are plain ints.
    """

    band: tuple[Duration, Duration] | None

    def __new__(cls, time: int | str, band: tuple[int, int] | None = None) -> Duration:
        made = super().__new__(
            cls, parse_time(time) if isinstance(time, str) else _int("Duration", time, "ns")
        )
        if band is not None and not (isinstance(band, tuple) and len(band) == 2):
            raise ArgumentError(
                where="Duration: band", expected="two times in ns, as (900, 1100)",
                found=described(band),
            )
        made.band = None if band is None else (Duration(band[0]), Duration(band[1]))
        return made

    def __repr__(self) -> str:
        between = f" ({self.band[0]} to {self.band[1]})" if self.band else ""
        return f"{format_time(int(self))}{between}"

    __str__ = __repr__


def MiB(number: float) -> Bytes:  # noqa: N802 (a unit is written so)
    """`number` mebibytes, to the nearest byte.

    >>> MiB(1.5)
    1,572,864 B (1.50 MiB)
    """
    return Bytes(_whole("MiB", number, 2**20))


def GiB(number: float) -> Bytes:  # noqa: N802 (a unit is written so)
    """`number` gibibytes, to the nearest byte.

    >>> GiB(70)
    75,161,927,680 B (70.00 GiB)
    """
    return Bytes(_whole("GiB", number, 2**30))


def ms(number: float) -> Duration:
    """`number` milliseconds, to the nearest nanosecond.

    >>> ms(2)
    2.000 ms
    """
    return Duration(_whole("ms", number, 10**6))


def _whole(unit: str, number: float, scale: int) -> int:
    """`number` times `scale`, to the nearest; ArgumentError for what is no finite number."""
    real = isinstance(number, int | float) and not isinstance(number, bool)
    if real and abs(number) * scale <= LARGEST:
        return round(number * scale)
    raise ArgumentError(
        where=unit, expected=f"a number of a machine's size, as zsim.{unit}(70)",
        found=described(number),
        remedy='zsim.Bytes("70 GiB") and zsim.Duration("5 ms") read texts',
    )


def _int(name: str, number: object, unit: str) -> int:
    """`number` itself; ArgumentError for what is no whole number, or larger than any machine's."""
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) <= LARGEST:
        return number
    raise ArgumentError(
        where=name, expected=f"a whole number of {unit} up to 10^24, or a text with its unit",
        found=described(number), remedy='as zsim.Bytes("70 GiB") or zsim.Duration("5 ms")',
    )
