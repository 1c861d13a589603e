"""Base of the schemas of tables, and types that several of them have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from zsim.io.units import parse_bytes, parse_time

MAX_NAME = 200
"""The most characters of a name or a pattern."""
MAX_NAMES = 1024
"""The most entries of a list of names or patterns."""
MAX_SIZE = 10_000_000
"""The largest width, vocabulary or count that a size or an option may have."""
MAX_USES = 64
"""The most often that a block runs in a forward, or a model before a backward."""
MOST_FAULTS = 64
"""The most entries of `faults`."""
MAX_PAUSE_NS = 3600 * 10**9
"""The longest pause of the trainer, or delay of a rank, in ns: an hour."""
Names = Annotated[
    tuple[Annotated[str, Field(max_length=MAX_NAME)], ...], Field(max_length=MAX_NAMES)
]


class Table(BaseModel):
    """Base of every table: strict types, no unknown keys, finite numbers.

    Most tables are checked inside a larger one. The others build their validators when they are
    used.
    """

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )


def _pause(value: str) -> str:
    if parse_time(value) > MAX_PAUSE_NS:
        raise ValueError("expected at most an hour")
    return value


Pause = Annotated[str, AfterValidator(_pause)]


LEAST_REQUEST, MOST_REQUEST = 512, 2**40
"""The smallest and the largest request to drives, in bytes: one of their sectors, and 1 TiB."""


def _request(value: str) -> int:
    nbytes = parse_bytes(value)
    if not LEAST_REQUEST <= nbytes <= MOST_REQUEST:
        raise ValueError('expected "512 B" to "1 TiB"')
    return nbytes


Request = Annotated[str, AfterValidator(_request)]


def _delay(value: str) -> str:
    if not parse_time(value):
        raise ValueError("expected more than 0 ns")
    return value


Delay = Annotated[Pause, AfterValidator(_delay)]
