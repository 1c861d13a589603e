"""A run of nccl-tests as its text and its JSON have it, and the checks of its rows.

Time, size and bandwidth say the same thing twice: a row whose figures contradict one another is
skipped. All-gathers and sends of many ranks have nearly one bandwidth factor, so the collective is
never guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import PurePath

from zsim.calibration.nccl_tests.log_row import LogRow
from zsim.calibration.nccl_tests.variables import FORCING, HARMLESS, WIDENS
from zsim.calibration.records import Skipped
from zsim.errors import Caveat

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
"""Bus bandwidth over size/time, by nccl-tests' convention (doc/PERFORMANCE.md)."""
REDUCTIONS = ("all_reduce", "reduce_scatter")
"""Collectives with an operation; nccl-tests prints "none" for the others."""
OF_PARTS = ("all_gather", "reduce_scatter")
"""Collectives with the count of one rank's part and the size of all parts (getCollByteCount of each
program)."""
TYPE_BYTES = {
    **dict.fromkeys(("int8", "uint8", "f8e4m3", "f8e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
"""Bytes of an element by the name that nccl-tests prints (test_typenames in src/common.cu)."""
CONTRADICTION = 0.05
"""Share by which a printed bandwidth of three digits may differ from size/time."""
MOST_BYTES = 1 << 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One size of a run: out-of-place µs and GB/s. `operation` is "" where it is not printed."""

    line: int
    nbytes: int
    count: int
    dtype: str
    operation: str
    microseconds: float
    bus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDevice:
    """A device of the run as its header lists it."""

    rank: int
    group: int
    host: str
    gpu: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """The run in lines `first` to `last`: program, header, results, and those it skips itself.

    `problem` is the reason for which nothing of it can be used, "" for none.
    """

    first: int
    last: int
    program: str
    devices: tuple[ListedDevice, ...]
    results: tuple[Result, ...]
    skipped: tuple[Skipped, ...] = ()
    variables: tuple[str, ...] = ()
    is_blocking: bool = False
    grouped: int = 1
    graphs: int = 0
    problem: str = ""

    def rows(self, *, source: str, collective: str) -> list[LogRow | Skipped]:
        """Rows of the collective that the run, `collective` or the file's name says."""
        stem = PurePath(source).stem
        op = self.program or collective or (stem if stem in FACTORS else "")
        if reason := self.problem or next(self._problems(op, collective), ""):
            count = max(1, len(self.results) + len(self.skipped))
            return [Skipped(source=source, line=self.last, reason=reason, first=self.first,
                            last=self.last, count=count)]
        rows = (self._row(result, op, source) for result in self.results)
        return sorted([*rows, *self.skipped], key=lambda row: row.line)

    def _problems(self, op: str, collective: str) -> Iterator[str]:
        if not op:
            yield "no collective named: --collective says it, or the file's name, as all_gather.txt"
        elif op not in FACTORS:
            yield f"{op[:40]} has no model"
        if collective not in ("", op):
            yield f"collectives contradict each other: the log says {op}, --collective {collective}"
        ranks, hosts = len(self.devices), len({device.host for device in self.devices})
        if sorted(device.rank for device in self.devices) != list(range(ranks)) or ranks < 2:
            yield f"expected each rank's device once, found {ranks} devices"
        elif ranks % hosts:
            yield f"expected as many ranks on each node, found {ranks} on {hosts} nodes"
        gpus = sorted({device.gpu for device in self.devices})
        if len(gpus) > 1:  # a ring is as fast as its slowest GPU, which the log does not name
            yield f"GPUs contradict each other: {', '.join(gpus)[:100]}"
        if groups := len({device.group for device in self.devices}) - 1:
            yield f"{groups + 1} communicators at once (NCCL_TESTS_SPLIT): no model of what they " \
                  f"take from one another"
        if self.is_blocking:
            yield "blocking launches (-z 1): times with the host's launch and wait of each " \
                  "collective, not of the collective"
        yield from (f"{each}: no model of what it forces" for each in self.variables
                    if FORCING.fullmatch(each))
        if not self.results and not self.skipped:
            yield "no rows"

    def _caveats(self) -> Iterator[Caveat]:
        """A CUDA graph, or several collectives in a launch, save host time for each."""
        taken = "taken for collectives launched one by one"
        if self.graphs:
            yield Caveat(f"launched as CUDA graphs (graph: {self.graphs}), {taken}", widens=WIDENS)
        if self.grouped > 1:
            yield Caveat(f"{self.grouped} collectives in one launch (agg iters: {self.grouped}), "
                         f"{taken}", widens=WIDENS)
        for each in self.variables:
            if not HARMLESS.match(each):
                yield Caveat(f"{each} is taken to change nothing", widens=WIDENS)

    def _row(self, result: Result, op: str, source: str) -> LogRow | Skipped:
        ranks = len(self.devices)
        if reason := next(_contradictions(result, op, ranks), ""):
            return Skipped(source=source, line=result.line, reason=reason)
        return LogRow(
            op=op, gpu=self.devices[0].gpu, num_ranks=ranks,
            num_nodes=len({device.host for device in self.devices}), nbytes=result.nbytes,
            microseconds=result.microseconds, nvls="NCCL_NVLS_ENABLE=0" not in self.variables,
            caveats=tuple(self._caveats()), source=source, line=result.line,
        )


def _contradictions(result: Result, op: str, ranks: int) -> Iterator[str]:
    if not 0 < result.nbytes <= MOST_BYTES or not 0 < result.microseconds < float("inf"):
        yield "size or time is not above 0"
        return
    if result.operation and (result.operation == "none") == (op in REDUCTIONS):
        yield f"operation {result.operation[:20]} contradicts {op}"
    parts = ranks if op in OF_PARTS else 1
    nbytes = result.count * parts * TYPE_BYTES.get(result.dtype, 0)
    if nbytes not in (0, result.nbytes):  # nccl-tests rounds sizes to whole elements first
        yield f"size {result.nbytes} contradicts {result.count} elements of {result.dtype}" \
              f"{f' of each of {ranks} ranks' if parts > 1 else ''}, which are {nbytes} bytes"
    bus = result.nbytes / result.microseconds / 1000 * FACTORS[op](ranks)
    if not isfinite(result.bus) or abs(bus - result.bus) > max(CONTRADICTION * bus, 0.02):
        yield "time, size and bus bandwidth contradict one another"
