"""Reports of memory, as text and as JSON: verdict, waterfall, buffers live at the peak, advice,
candidates that fit.

They show results of zsim.memory.fits, zsim.memory.waterfall, zsim.analysis.advice and
zsim.analysis.fit.fit, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zsim.analysis.advice import Effect
from zsim.analysis.fit.fit_table import SURER, Fit, without
from zsim.cli.terminal import bar, say, say_table, say_wrapped, write_json
from zsim.cluster.host import HostMemory
from zsim.io.units import format_bytes, format_time, rounded_sizes
from zsim.ir.program import RankProgram
from zsim.memory.fits import BytesBand, MemoryVerdict, ridges
from zsim.memory.holdings import alike, holdings
from zsim.memory.waterfall import Stage

MOST_HOLDINGS = 12
MOST_POINTS = 48
"""Lines of the timeline. Of a longer step each stands for several computations; `--json` has all of
them."""
WIDTH = 30
COLUMNS = 100


def answer_object(
    answer: MemoryVerdict, stages: Sequence[Stage], program: RankProgram, *, released_ns: int = 0
) -> dict[str, Any]:
    """The keys of `zsim show --memory --json`; "memory" is the timeline, bytes during each
    computation."""
    return {
        "verdict": answer.verdict, "needed_bytes": asdict(answer.needed),
        "capacity_bytes": asdict(answer.capacity), "margin_bytes": answer.margin_bytes,
        "releases_per_step": answer.releases_per_step, "released_ns": released_ns,
        "pressure": None if answer.pressure is None else asdict(answer.pressure),
        "rank": answer.rank,
        "peak": {
            "phase": answer.phase, "op": answer.peak_at, "allocated_bytes": answer.allocated_bytes
        },
        "peak_memory_by_kind": dict(answer.by_kind), "peak_memory_by_part": dict(answer.by_part),
        "reserved_bytes": answer.reserved_bytes, "expandable_segments": answer.expandable_segments,
        "construction_bytes": answer.construction_bytes, "built_on_device": answer.built_on_device,
        "live_at_peak": [asdict(holding) for holding in holdings(program, answer.phase)],
        "outside": [asdict(item) for item in answer.outside],
        "host": None if answer.host is None else host_object(answer.host),
        "waterfall": [asdict(stage) for stage in stages],
        "memory": [list(point) for point in ridges(program, answer.phase)],
    }


def host_object(host: HostMemory) -> dict[str, Any]:
    """Host memory in JSON, with its verdict."""
    return {"verdict": host.verdict, "needed_bytes": host.needed_bytes, **asdict(host)}


def print_answer(
    answer: MemoryVerdict, stages: Sequence[Stage], program: RankProgram, *, released_ns: int = 0
) -> None:
    """The timeline, the waterfall and the verdict of one scenario."""
    ridge, held = ridges(program, answer.phase), holdings(program, answer.phase)
    size = -(-len(ridge) // MOST_POINTS)
    each = "each computation to the next" if size <= 1 else f"each {size} computations to the next"
    _say_wrapped(
        f"allocated bytes of rank {answer.rank}'s {answer.phase} step, the highest from {each}",
        hanging=2,
    )
    for index in range(0, len(ridge), size or 1):
        label, nbytes = max(ridge[index : index + size], key=lambda point: point[1])
        say(f"{index:5} {label:28} {_bytes(nbytes)}  {_bars(nbytes, answer.allocated_bytes)}")
    say("live buffers at the peak")
    rows = list(alike(held))
    for kind, unit, nbytes, count in rows[:MOST_HOLDINGS]:
        say(f"      {kind:21} {unit:26} {_bytes(nbytes)} in {count:,}")
    rest = [nbytes for _, _, nbytes, _ in rows[MOST_HOLDINGS:]]
    if rest:
        say(f"      {f'and of {len(rest):,} more':48} {_bytes(sum(rest))}")
    say("from the formula to what is needed")
    for stage in stages:
        sign = "=" if stage.total else "+" if stage.nbytes >= 0 else "-"
        amount = f"    {sign} {stage.name:20} {_bytes(abs(stage.nbytes))}"
        _say_wrapped(f"{amount}  {rounded_sizes(stage.reason)}", hanging=len(amount) + 2)
    say(f"{answer.verdict}: {verdict_words(answer, released_ns)}")
    if answer.host is not None:
        say("in host memory of a node, with all its ranks")
        for kind, nbytes in answer.host.by_kind.items():
            say(f"      {kind:48} {_bytes(nbytes)}")
        rounding = "rounding of pinned blocks to powers of two"
        say(f"      {rounding:48} {_bytes(answer.host.rounding_bytes)}")
        say(f"      {'processes and the system (assumed)':48} {_bytes(answer.host.other_bytes)}")
    unconfirmed = [
        item.name if item.nbytes else f"{item.name} (none expected, up to "
                                      f"{format_bytes(item.high)})"
        for item in answer.outside
        if not item.confirmed
    ]
    if unconfirmed:
        _say_wrapped(
            f"      not confirmed on a GPU yet, and so with a wide band: {', '.join(unconfirmed)}",
            hanging=10,
        )


def _bytes(nbytes: int) -> str:
    return f"{format_bytes(nbytes):>11}"


def _say_wrapped(text: str, *, hanging: int) -> None:
    say_wrapped(text, hanging=hanging, most=COLUMNS)


def verdict_words(answer: MemoryVerdict, released_ns: int = 0) -> str:
    """Needed bytes against the device's capacity, with band and margin, as a phrase.

    Without a margin it tells how the allocator runs the step, and that flushing cached memory
    takes `released_ns` of it.
    """
    needed, capacity = answer.needed, answer.capacity
    unsure = f" ({_band(needed)})" if needed.low != needed.high else ""
    built = ""
    if not answer.built_on_device:
        built = (
            f"; building the model on the device takes {format_bytes(answer.construction_bytes)}, "
            f"unit by unit: build it elsewhere"
        )
    on_host = "" if answer.host is None else f"; {answer.on_device} on the device, {answer.host}"
    return (
        f"needs {format_bytes(needed.nbytes)}{unsure} of "
        f"{format_bytes(capacity.nbytes)}{_margin(answer, released_ns)}{built}{on_host}"
    )


def _margin(answer: MemoryVerdict, released_ns: int) -> str:
    """Bytes to spare or short; under memory pressure, the outcome of releasing cached memory."""
    margin = (
        f", {format_bytes(abs(answer.margin_bytes))} "
        f"{'to spare' if answer.margin_bytes >= 0 else 'short'}"
    )
    pressed = answer.pressure
    if pressed is None:
        return margin
    full = f"{margin}: full at {pressed.full_at} although all cached memory is given back"
    if pressed.runs is None:
        return f"{full}, even with the least outside torch's bytes"
    takes = f" and takes {format_time(released_ns)} of it" if released_ns else ""
    stalls = pressed.runs.sentence and f", {pressed.runs.sentence}, which stalls the device{takes}"
    if pressed.expected:
        return f" to keep all that it caches; runs{stalls}"
    return f"{full}; with the least outside torch's bytes it runs{stalls}"


def _band(band: BytesBand) -> str:
    return f"{format_bytes(band.low)} to {format_bytes(band.high)}"


def _bars(nbytes: int, highest: int) -> str:
    return bar() * (WIDTH * nbytes // max(1, highest))


def print_advice(effects: Sequence[Effect], nothing_fits: str = "") -> None:
    """Print bytes and step time of each change, and `nothing_fits` where no change suffices."""
    surer = f"; {SURER}" if effects else ""
    _say_wrapped(
        f"changes tried to save memory, each planned and simulated again{surer}", hanging=2
    )
    for effect in effects:
        text = finding(effect)
        more = f"{'+' if effect.added_ns >= 0 else '-'}{format_time(abs(effect.added_ns))} a step"
        time = f"{more}, {_between(effect.step_time_ns, effect.step_time_band_ns)}"
        then = (
            f"{effect.verdict}{f', {effect.running}' if effect.running else ''}, peak in "
            f"{effect.peak_at}{without(effect.dropped)}"
        )
        _say_wrapped(f"      {effect.change}: {text}", hanging=10)
        _say_wrapped(f"          {time}; then {then}", hanging=10)
    if nothing_fits:
        _say_wrapped(f"      {nothing_fits}", hanging=6)


def finding(effect: Effect) -> str:
    """Bytes that a change saves, or the reason that it saves none, as a phrase."""
    if effect.saved_bytes > 0:
        return f"saves {format_bytes(effect.saved_bytes)}"
    if effect.saved_bytes < 0:
        return f"takes {format_bytes(-effect.saved_bytes)} more"
    if effect.saved_allocated_bytes:
        saves = effect.saved_allocated_bytes > 0
        return (
            f"changes nothing: {format_bytes(abs(effect.saved_allocated_bytes))} "
            f"{'less' if saves else 'more'} in as many segments"
        )
    saved = " and ".join(
        f"{format_bytes(nbytes)} in {part}" for part, nbytes in effect.saved_by_part.items()
    )
    return f"no effect on the peak{f', it saves {saved}' if saved else ''}"


def print_fit(fit: Fit, *, as_json: bool) -> None:
    """Print every candidate and the recommendation, as text or as JSON."""
    if as_json:
        write_json(fit.to_dict())
        return
    say_table(str(fit), most=COLUMNS)


def _between(step_ns: int, band_ns: tuple[int, int]) -> str:
    """A step time with its band."""
    return f"{format_time(step_ns)} ({' to '.join(map(format_time, band_ns))})"
