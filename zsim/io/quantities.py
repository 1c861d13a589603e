"""Sizes and times that read as people write them: integers of bytes and of nanoseconds.

>>> Bytes(36_012_348)
36,012,348 B (34.34 MiB)
>>> Bytes("70 GiB") == GiB(70) == 70 * 2**30
True
>>> Duration("1.5 ms")
1.500 ms
"""

from __future__ import annotations

from zsim.io.units import format_bytes, format_time, parse_bytes, parse_time


class Bytes(int):
    """A size: an int of bytes, from an int or a text with its unit ("70 GiB").

    UnitError for a text without a unit. Sums and differences of sizes are plain ints.
    """

    def __new__(cls, size: int | str) -> Bytes:
        return super().__new__(cls, parse_bytes(size) if isinstance(size, str) else size)

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
        made = super().__new__(cls, parse_time(time) if isinstance(time, str) else time)
        made.band = None if band is None else (Duration(band[0]), Duration(band[1]))
        return made

    def __repr__(self) -> str:
        between = f" ({self.band[0]} to {self.band[1]})" if self.band else ""
        return f"{format_time(int(self))}{between}"

    __str__ = __repr__


def KiB(number: float) -> Bytes:  # noqa: N802 (a unit is written so)
    """`number` kibibytes, to the nearest byte.

    >>> KiB(1.5)
    1,536 B
    """
    return Bytes(round(number * 2**10))


def MiB(number: float) -> Bytes:  # noqa: N802 (a unit is written so)
    """`number` mebibytes, to the nearest byte.

    >>> MiB(1.5)
    1,572,864 B (1.50 MiB)
    """
    return Bytes(round(number * 2**20))


def GiB(number: float) -> Bytes:  # noqa: N802 (a unit is written so)
    """`number` gibibytes, to the nearest byte.

    >>> GiB(70)
    75,161,927,680 B (70.00 GiB)
    """
    return Bytes(round(number * 2**30))


def ms(number: float) -> Duration:
    """`number` milliseconds, to the nearest nanosecond.

    >>> ms(2)
    2.000 ms
    """
    return Duration(round(number * 10**6))

