"""Measured steps and collectives, rows that are skipped, and the bytes of their files.

Files come from anywhere, so their sizes are limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import hypot, prod
from pathlib import Path

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.collectives.nccl.tuner import Algorithm
from zsim.errors import Caveat, ScenarioError, ZsimError
from zsim.io.files import obstacle
from zsim.scenario.scenario import Scenario

MAX_FILE_BYTES = 32 * 1024**2
MISSING = "no such file"
NUL = "\0"
WHOLE_NETWORK = (1.0, 1.0)
"""Factors on the times of collectives on a network that nothing else uses."""


class MeasurementError(ZsimError):
    """A file of measurements that cannot be read at all."""


class CalibrationError(ZsimError):
    """Too little to calibrate on, or scipy is missing."""


class TableError(ScenarioError):
    """A table of measurements with problems, each with file, line, column, expected and found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A measurement in `line` of the file `source`.

    Its `caveats` widen its band. Its `network` is the least and the most time of collectives, as
    shares of the prediction, on a network that others use too. Rows of one `group` are scored, and
    left out of a fit, together. Its `origin` is the publication.
    """

    source: str
    line: int
    caveats: tuple[Caveat, ...] = ()
    network: tuple[float, float] = WHOLE_NETWORK
    group: str = ""
    origin: str = ""

    @property
    def widened(self) -> float:
        """Share by which the time may be off besides; caveats are independent of another."""
        return hypot(*(caveat.widens for caveat in self.caveats))

    @property
    def is_shared(self) -> bool:
        """True where others used the network meanwhile."""
        return self.network != WHOLE_NETWORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Row):
    """A measured training step: its scenario and seconds, None where peaks alone were measured.

    `peaks` are bytes of rank 0 by "allocated" and "reserved". `fields` are the table's cells by
    column, by which rows are paired. `others` are further scenarios that may have run, where the
    row leaves a key open.
    """

    scenario: Scenario
    seconds: float | None
    simulated: bool = False
    """True for a Run that a simulator made, not a measurement."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    others: tuple[Scenario, ...] = ()

    @property
    def readings(self) -> tuple[Scenario, ...]:
        """Every scenario that the row may have been."""
        return (self.scenario, *self.others)

    @property
    def tokens(self) -> int:
        """Tokens of one rank's step."""
        batch = self.scenario.batch
        return prod((batch.micro_batch, batch.accumulation, batch.sequence_length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Row):
    """A measured collective over all ranks of `cluster`: bytes of the full message, and seconds.

    The `algorithm` was forced on NCCL; None is NCCL's own choice. No `nvls` means that the switch
    was kept from reducing, `through_torch` that torch called NCCL instead of nccl-tests.
    """

    op: str
    nbytes: int
    seconds: float
    cluster: ClusterSpec
    algorithm: Algorithm | None = None
    nvls: bool = True
    through_torch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """A row whose links need longer than was measured: seconds of both, and the links."""

    source: str
    line: int
    label: str
    measured: float
    least: float
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A row without a prediction, and the reason in one line.

    Where the reason holds for several lines, `first` and `last` are the lines of all.
    """

    source: str
    line: int
    reason: str
    first: int = field(default=0, compare=False)
    last: int = field(default=0, compare=False)
    count: int = field(default=1, compare=False)
    """Rows that are skipped together, as those of a log that was cut."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", " ".join(self.reason.split()))


def middle(times: Iterable[float]) -> float:
    """The middle between the least and the most of what the readings of a row come to."""
    known = list(times)
    return (min(known) + max(known)) / 2


def content(path: Path) -> bytes:
    """The bytes of a plain file; MeasurementError for any other."""
    try:
        if not path.is_file():
            raise OSError
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MeasurementError(
            where=str(path), expected="a file of measurements", found=obstacle(path, error)
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise MeasurementError(
            where=str(path), expected=f"at most {MAX_FILE_BYTES:,} bytes", found="more"
        )
    return data


def decoded(data: bytes, *, errors: str = "strict") -> str:
    """The text of a file in UTF-8, or in UTF-16 where its first bytes say so."""
    return data.decode(
        "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", errors=errors
    )
