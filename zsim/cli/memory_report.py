"""What memory is for, for people and for programs: the verdict, the waterfall, what lives at the
peak, what would help, what fits.

It shows what zsim.memory.fits, zsim.memory.waterfall, zsim.analysis.advice and zsim.analysis.fit
have found, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zsim.analysis.advice import Effect
from zsim.analysis.fit import Candidate, Fit
from zsim.cli.report import bar, say, table, write_json
from zsim.io.units import format_bytes, format_time
from zsim.ir.program import RankProgram
from zsim.ir.run import SCHEMA_VERSION
from zsim.memory.fits import Answer, Band, holdings, ridges
from zsim.memory.waterfall import Stage

MOST_HOLDINGS = 12
MOST_POINTS = 48
"""Lines of the timeline. Of a longer step each stands for several computations; `--json` has all of
them."""
WIDTH = 40
SURER = (
    "step times are expected in the bands in brackets; all rest on the same constants, so "
    "differences are surer than the times"
)
"""A constant that is off moves the times of all candidates in one direction, and so their
difference by less than the times. How much less depends on what the two have in common: bands of
differences are not known."""


def answer_object(found: Answer, stages: Sequence[Stage], program: RankProgram) -> dict[str, Any]:
    """The keys of `zsim show --memory --json`; "memory" is the timeline, bytes during each
    computation."""
    return {
        "verdict": found.verdict, "needed_bytes": asdict(found.needed),
        "capacity_bytes": asdict(found.capacity), "margin_bytes": found.margin_bytes,
        "releases_per_step": found.releases_per_step,
        "pressure": None if found.pressure is None else asdict(found.pressure), "rank": found.rank,
        "peak": {
            "phase": found.phase, "op": found.peak_at, "allocated_bytes": found.allocated_bytes
        },
        "peak_memory_by_kind": dict(found.by_kind), "peak_memory_by_part": dict(found.by_part),
        "reserved_bytes": found.reserved_bytes, "expandable_segments": found.expandable_segments,
        "construction_bytes": found.construction_bytes, "built_on_device": found.built_on_device,
        "live_at_peak": [asdict(holding) for holding in holdings(program, found.phase)],
        "outside": [asdict(item) for item in found.outside],
        "waterfall": [asdict(stage) for stage in stages],
        "memory": [list(point) for point in ridges(program, found.phase)],
    }


def print_answer(found: Answer, stages: Sequence[Stage], program: RankProgram) -> None:
    """The timeline, the waterfall and the verdict of one scenario."""
    ridge, held = ridges(program, found.phase), holdings(program, found.phase)
    size = -(-len(ridge) // MOST_POINTS)
    each = "each computation to the next" if size <= 1 else f"each {size} computations to the next"
    say(f"allocated bytes of rank {found.rank}'s {found.phase} step, the highest from {each}")
    for place in range(0, len(ridge), size or 1):
        label, nbytes = max(ridge[place : place + size], key=lambda point: point[1])
        say(f"{place:5} {label:28} {nbytes:>18,} B  {_bars(nbytes, found.allocated_bytes)}")
    say("what lives at the peak")
    for holding in held[:MOST_HOLDINGS]:
        say(f"      {holding.kind:21} {holding.unit:20} {holding.nbytes:>18,} B in "
            f"{holding.count:,}")
    rest = held[MOST_HOLDINGS:]
    if rest:
        say(f"      and of {len(rest):,} more {'':26} "
            f"{sum(holding.nbytes for holding in rest):>18,} B")
    say("from the formula to what is needed")
    for stage in stages:
        sign = "=" if stage.total else "+" if stage.nbytes >= 0 else "-"
        say(f"    {sign} {stage.name:28} {abs(stage.nbytes):>18,} B  {stage.reason}")
    say(f"{found.verdict}: {verdict_words(found)}")
    unconfirmed = [
        item.name if item.nbytes else f"{item.name} (none expected, up to "
                                      f"{format_bytes(item.high)})"
        for item in found.outside
        if not item.confirmed
    ]
    if unconfirmed:
        say(f"      not confirmed on a GPU yet, and so with a wide band: {', '.join(unconfirmed)}")


def verdict_words(found: Answer) -> str:
    """Needed against there is, with the band and the margin or how it runs without one, in a
    sentence."""
    needed, capacity = found.needed, found.capacity
    unsure = f" ({_band(needed)})" if needed.low != needed.high else ""
    built = ""
    if not found.built_on_device:
        built = (
            f"; building the model on the device takes {format_bytes(found.construction_bytes)}: "
            f"build it on the meta device"
        )
    return (
        f"needs {format_bytes(needed.nbytes)}{unsure} of "
        f"{format_bytes(capacity.nbytes)}{_margin(found)}{built}"
    )


def _margin(found: Answer) -> str:
    """What is to spare or short; where what is cached would be too much, what comes of giving it
    back."""
    margin = (
        f", {format_bytes(abs(found.margin_bytes))} "
        f"{'to spare' if found.margin_bytes >= 0 else 'short'}"
    )
    pressed = found.pressure
    if pressed is None:
        return margin
    full = f"{margin}: full at {pressed.full_at} although all cached memory is given back"
    if pressed.runs is None:
        return f"{full}, even with the least outside torch's bytes"
    stalls = f", {pressed.runs.words}, which stalls the device" if pressed.runs.words else ""
    if pressed.expected:
        return f" to keep all that it caches; runs{stalls}"
    return f"{full}; with the least outside torch's bytes it runs{stalls}"


def _band(band: Band) -> str:
    return f"{format_bytes(band.low)} to {format_bytes(band.high)}"


def _bars(nbytes: int, highest: int) -> str:
    return bar() * (WIDTH * nbytes // max(1, highest))


def print_advice(effects: Sequence[Effect], nothing_fits: str = "") -> None:
    """What each change saves and takes, and a sentence where none is enough."""
    say(f"what would help, each planned and simulated again{f'; {SURER}' if effects else ''}")
    for effect in effects:
        what = finding(effect)
        more = f"{'+' if effect.added_ns >= 0 else '-'}{format_time(abs(effect.added_ns))} a step"
        time = f"{more}, {_between(effect.step_time_ns, effect.step_time_band_ns)}"
        then = (
            f"{effect.verdict}{f', {effect.running}' if effect.running else ''}, peak in "
            f"{effect.peak_at}{_without(effect.dropped)}"
        )
        say(f"      {effect.change:48} {what}, {time}; then {then}")
    if nothing_fits:
        say(f"      {nothing_fits}")


def finding(effect: Effect) -> str:
    """What a change saves, or why it saves nothing."""
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
    return f"changes nothing: the peak is elsewhere{f', it saves {saved}' if saved else ''}"


def _without(dropped: Sequence[str]) -> str:
    """What of the scenario's options is left out, if anything."""
    return f"; without {', '.join(dropped)}" if dropped else ""


def print_fit(scenario: str, found: Fit, *, as_json: bool) -> None:
    """Every candidate, and the recommendation."""
    if as_json:
        recommended = found.recommended.name if found.recommended else None
        write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "scenario": scenario,
                "candidates": [_candidate(one) for one in found.candidates],
                "refused": [{"name": name, "reason": reason} for name, reason in found.refused],
                "recommended": recommended,
                "reason": found.reason,
            }
        )
        return
    rows = []
    for one in found.candidates:
        mark = "<- take this" if one is found.recommended else ""
        needed = format_bytes(one.answer.needed.nbytes)
        step = _between(one.step_time_ns, one.step_time_band_ns)
        figures = f"{one.answer.verdict:6} needs {needed:>12}  step {step:>38}"
        rows.append(
            (
                one.name,
                "  ".join(filter(None, (figures, one.answer.running, mark)))
                + _without(one.dropped),
            )
        )
    capacity = format_bytes(found.candidates[0].answer.capacity.nbytes) if found.candidates else "-"
    table(f"{scenario}: what fits {capacity} a rank, from least to most sharded", rows)
    if len(found.candidates) > 1:
        say(f"  {SURER}")
    for name, reason in found.refused:
        say(f"  {name} cannot be: {reason}")
    say(f"{found.recommended.name if found.recommended else 'nothing'}: {found.reason}")


def _between(step_ns: int, band_ns: tuple[int, int]) -> str:
    """A step time, and between which times it is expected."""
    return f"{format_time(step_ns)} ({' to '.join(map(format_time, band_ns))})"


def _candidate(one: Candidate) -> dict[str, Any]:
    return {
        "name": one.name, "strategy": one.scenario.strategy,
        "options": asdict(one.scenario.options), "dropped": list(one.dropped),
        "activation_checkpointing": one.scenario.checkpointing.mode,
        "mesh": {
            "dp_replicate": one.scenario.mesh.dp_replicate, "dp_shard": one.scenario.mesh.dp_shard
        },
        "verdict": one.answer.verdict, "needed_bytes": asdict(one.answer.needed),
        "releases_per_step": one.answer.releases_per_step,
        "peak_memory_bytes": one.answer.allocated_bytes, "peak_at": one.answer.peak_at,
        "step_time_ns": one.step_time_ns, "step_time_band_ns": list(one.step_time_band_ns),
        "expandable_segments": one.scenario.expandable_segments,
        "micro_batch": one.scenario.batch.micro_batch,
        "accumulation": one.scenario.batch.accumulation,
    }
