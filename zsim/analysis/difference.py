"""Two simulated scenarios side by side, for a pull request: figure by figure, with bands.

Allocated bytes, bytes on the wire and counts are exact. Needed memory and times have bands: where
each one's expected value lies in the other's band, the two cannot be told apart. Both rest on the
same constants, so that differences are surer than the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from zsim.analysis.growth import FIGURES, Growth, Limit, growths
from zsim.io.units import format_bytes, format_time
from zsim.ir.run import RunRecord, band_of
from zsim.runs.figures import metrics
from zsim.runs.run import Run

Change = Literal["same", "less", "more", "not distinguishable", "changed"]
VERDICTS = ("FITS", "TIGHT", "OOM")


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """One figure of both scenarios; `band` is None of exact figures, and values are None where a
    scenario has no such figure."""

    name: str
    base: float | str | None
    head: float | str | None
    base_band: tuple[float, float] | None = None
    head_band: tuple[float, float] | None = None
    show: Callable[[float], str] = str

    @property
    def change(self) -> Change:
        """The direction of the change, where there is one."""
        if self.base == self.head:
            return "same"
        if isinstance(self.base, str | None) or isinstance(self.head, str | None):
            return "changed"
        if self.base_band and self.head_band and (
            self.base_band[0] <= self.head <= self.base_band[1]
            and self.head_band[0] <= self.base <= self.head_band[1]
        ):
            return "not distinguishable"
        return "less" if self.head < self.base else "more"

    @property
    def share(self) -> str:
        """The change as a share of the base, "" where there is none."""
        numbers = isinstance(self.base, int | float) and isinstance(self.head, int | float)
        if not numbers or not self.base or self.base == self.head:
            return ""
        return f"{self.head / self.base - 1:+.1%}"  # type: ignore[operator]

    @property
    def told(self) -> str:
        """The change in words, as "1.3 % less"."""
        share = self.share.replace("%", " %")
        if share and self.change in ("less", "more"):
            small = share[1:] == "0.0 %"
            by = self.show(abs(self.head - self.base)) if small else share[1:]  # type: ignore[operator]
            return f"{by} {self.change}"
        return f"{self.change}, {share}" if share else self.change

    def to_dict(self) -> dict[str, Any]:
        """Both values with their bands, and the change, as plain data."""
        return {
            "name": self.name, "base": self.base, "head": self.head, "base_band": self.base_band,
            "head_band": self.head_band, "change": self.change,
        }

    def text(self, side: Literal["base", "head"]) -> str:
        """The value of one side, with its band."""
        value, band = getattr(self, side), getattr(self, f"{side}_band")
        if value is None or isinstance(value, str):
            return value or "–"
        between = f" ({self.show(band[0])} to {self.show(band[1])})" if band else ""
        return f"{self.show(value)}{between}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioDiff:
    """The figures of two simulated scenarios, and the expectations of the second."""

    base: Run
    head: Run
    figures: tuple[FigureChange, ...]
    limits: tuple[Limit, ...] = ()

    @property
    def verdicts(self) -> tuple[str, str]:
        """FITS, TIGHT or OOM of both; "" where a device has no verdict."""
        runs = (self.base, self.head)
        base, head = ("" if r.device_memory is None else r.device_memory.verdict for r in runs)
        return base, head

    @property
    def broken(self) -> tuple[str, ...]:
        """The reasons for which the second is not to be merged, as text."""
        return tuple(f"{name}: {reason}" for name, reason in self._broken())

    def _broken(self) -> Iterator[tuple[str, str]]:
        """Names and reasons: a worse verdict on memory, broken expectations of the second, figures
        that grow beyond their limits."""
        base, head = self.verdicts
        if base in VERDICTS and head in VERDICTS and VERDICTS.index(head) > VERDICTS.index(base):
            yield "memory verdict", f"{base} before, {head} now"
        for item in self.head.expectations:
            if item.ok is False:
                yield item.name, f"expected {item.expected}, found {item.actual}"
        for each in self.growths:
            if each.is_over:
                yield FIGURES[each.name].title, str(each)

    @property
    def growths(self) -> tuple[Growth, ...]:
        """The growth of each figure that has a limit."""
        if not self.limits:
            return ()
        return tuple(growths(self.base.figures, self.head.figures, self.limits))

    @property
    def cases(self) -> dict[str, str]:
        """A case for each figure and each expectation of the second: the reason for which it is
        broken, or ""."""
        names = [each.name for each in self.figures]
        names += [FIGURES[each.name].title for each in self.growths]
        names += [item.name for item in self.head.expectations]
        messages = dict.fromkeys(names, "")
        return messages | {name: f"{name}: {reason}" for name, reason in self._broken()}

    @property
    def ok(self) -> bool:
        """True where nothing is broken."""
        return not self.broken

    def to_dict(self) -> dict[str, Any]:
        """Figures and reasons as plain data."""
        figures = [each.to_dict() for each in self.figures]
        return {
            "base": self.base.record.scenario, "head": self.head.record.scenario,
            "figures": figures, "broken": list(self.broken), "ok": self.ok,
        }

    def to_markdown(self) -> str:
        """A table for a pull request, and what is broken."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield f"### {_plain(titled(self.base))} → {_plain(titled(self.head))}"
        yield ""
        yield "| figure | base | head | change |"
        yield "|---|---|---|---|"
        for each in self.figures:
            change = each.change if each.change in ("same", "not distinguishable") else (
                each.share or each.change
            )
            yield f"| {each.name} | {each.text('base')} | {each.text('head')} | {change} |"
        yield ""
        for reason in self.broken:
            yield f"**Broken:** {_plain(reason)}"
        yield (
            "Ranges are bands. Both sides share their constants, so that the change is surer than "
            "the values."
        )


def diff(base: Run, head: Run, *, limits: tuple[Limit, ...] = ()) -> ScenarioDiff:
    """The figures of two simulated Runs, side by side; `limits` say by how much some may grow."""
    return ScenarioDiff(
        base=base, head=head, figures=tuple(_figures(base, head)), limits=limits
    )


def titled(run: Run) -> str:
    """The name of a run's scenario, and its strategy."""
    return f"{run.record.scenario} ({run.scenario.strategy})"


def _plain(text: str) -> str:
    """`text` without characters that Markdown would obey."""
    return "".join(f"\\{c}" if c in "|<>*_`[]#\\" else c for c in text)


def _figures(base: Run, head: Run) -> Iterator[FigureChange]:
    """Figures of both Runs: those of their scenarios' devices, and those of their records."""
    needs = [run.device_memory for run in (base, head)]
    if any(needs):
        verdicts = [None if need is None else need.verdict for need in needs]
        yield FigureChange(name="memory verdict", base=verdicts[0], head=verdicts[1])
        bands = [None if n is None else (n.low_bytes, n.high_bytes) for n in needs]
        needed = [None if n is None else n.needed_bytes for n in needs]
        yield FigureChange(
            name="memory needed", base=needed[0], head=needed[1], base_band=bands[0],
            head_band=bands[1], show=_bytes,
        )
    yield from record_changes(base.record, head.record)
    tokens = [_tokens(run) for run in (base, head)]
    yield FigureChange(
        name="tokens/s per rank", base=tokens[0][0], head=tokens[1][0], base_band=tokens[0][1],
        head_band=tokens[1][1], show=_count,
    )


def record_changes(base: RunRecord, head: RunRecord) -> Iterator[FigureChange]:
    """Figures of two records' steady steps: peaks and times are the largest of any rank."""
    both = (base, head)
    peaks = [max(r.phases["steady"].memory.peak_bytes for r in run.ranks) for run in both]
    yield FigureChange(name="peak of torch", base=peaks[0], head=peaks[1], show=_bytes)
    times = [run.step_time_ns for run in both]
    bands = [
        metrics.band_ns(time, band_of(run)) if time else None
        for time, run in zip(times, both, strict=True)
    ]
    yield FigureChange(
        name="step time", base=times[0], head=times[1], base_band=bands[0], head_band=bands[1],
        show=_time,
    )
    exposed = [
        max(map(metrics.exposed_ns, run.ranks)) if any(rank.spans for rank in run.ranks) else None
        for run in both
    ]
    yield FigureChange(
        name="exposed communication", base=exposed[0], head=exposed[1], show=_time
    )
    sent = [max(rank.bytes_sent for rank in run.ranks) for run in both]
    yield FigureChange(name="sent per rank", base=sent[0], head=sent[1], show=_bytes)
    traffic = [metrics.traffic(run.ranks[0]) for run in both]
    for kind in dict.fromkeys((*traffic[0], *traffic[1])):
        counts = [side[kind].count if kind in side else 0 for side in traffic]
        yield FigureChange(name=f"{kind}s", base=counts[0], head=counts[1], show=_count)


def _tokens(run: Run) -> tuple[float | None, tuple[float, float] | None]:
    """Tokens a second of one rank, and their band, which is that of the step's time."""
    time, band = run.figures.step_time_ns, run.figures.step_time_band_ns
    rate = run.figures.tokens_per_second_per_gpu
    if rate is None or not time or not band:
        return rate, None
    return rate, (rate * time / band[1], rate * time / band[0])


def _bytes(value: float) -> str:
    return format_bytes(int(value))


def _time(value: float) -> str:
    return format_time(int(value))


def _count(value: float) -> str:
    return f"{value:,.0f}"
