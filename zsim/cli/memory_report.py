"""Reports of memory, as text and as JSON: verdict, waterfall, buffers live at the peak, advice,
candidates that fit.

They show results of zsim.memory.fits, zsim.memory.waterfall, zsim.analysis.advice and
zsim.analysis.fit, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from zsim.analysis.advice import Effect
from zsim.analysis.fit import Candidate, Fit
from zsim.cli.report import bar, say, write_json
from zsim.io.units import counted, format_bytes, format_time
from zsim.ir.program import RankProgram
from zsim.ir.run import SCHEMA_VERSION
from zsim.memory.fits import BytesBand, Holding, MemoryVerdict, holdings, ridges
from zsim.memory.waterfall import Stage
from zsim.runs import metrics
from zsim.scenario.scenario import Scenario

MOST_HOLDINGS = 12
MOST_POINTS = 48
"""Lines of the timeline. Of a longer step each stands for several computations; `--json` has all of
them."""
WIDTH = 40
COLUMNS = 100
SURER = (
    "bands hold nine of ten measurements; all times rest on the same constants, so differences "
    "are more certain than the times"
)
"""A constant that is off moves the times of all candidates in one direction, and so their
difference by less than the times. How much less depends on what the two have in common: bands of
differences are not known."""


def answer_object(
    answer: MemoryVerdict, stages: Sequence[Stage], program: RankProgram
) -> dict[str, Any]:
    """The keys of `zsim show --memory --json`; "memory" is the timeline, bytes during each
    computation."""
    return {
        "verdict": answer.verdict, "needed_bytes": asdict(answer.needed),
        "capacity_bytes": asdict(answer.capacity), "margin_bytes": answer.margin_bytes,
        "releases_per_step": answer.releases_per_step,
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
        "waterfall": [asdict(stage) for stage in stages],
        "memory": [list(point) for point in ridges(program, answer.phase)],
    }


def print_answer(answer: MemoryVerdict, stages: Sequence[Stage], program: RankProgram) -> None:
    """The timeline, the waterfall and the verdict of one scenario."""
    ridge, held = ridges(program, answer.phase), holdings(program, answer.phase)
    size = -(-len(ridge) // MOST_POINTS)
    each = "each computation to the next" if size <= 1 else f"each {size} computations to the next"
    say(f"allocated bytes of rank {answer.rank}'s {answer.phase} step, the highest from {each}")
    for index in range(0, len(ridge), size or 1):
        label, nbytes = max(ridge[index : index + size], key=lambda point: point[1])
        say(f"{index:5} {label:28} {nbytes:>18,} B  {_bars(nbytes, answer.allocated_bytes)}")
    say("what lives at the peak")
    rows = list(_alike(held))
    for kind, unit, nbytes, count in rows[:MOST_HOLDINGS]:
        say(f"      {kind:21} {unit:26} {_bytes(nbytes)} in {count:,}")
    rest = [nbytes for _, _, nbytes, _ in rows[MOST_HOLDINGS:]]
    if rest:
        say(f"      {f'and of {len(rest):,} more':48} {_bytes(sum(rest))}")
    say("from the formula to what is needed")
    for stage in stages:
        sign = "=" if stage.total else "+" if stage.nbytes >= 0 else "-"
        amount = f"    {sign} {stage.name:20} {_bytes(abs(stage.nbytes))}"
        _say_wrapped(f"{amount}  {stage.reason}", hanging=len(amount) + 2)
    say(f"{answer.verdict}: {verdict_words(answer)}")
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


def _alike(held: Sequence[Holding]) -> Iterator[tuple[str, str, int, int]]:
    """Rows of kind, units, bytes and number of buffers live at the peak, the largest first.

    Units that hold as many bytes of a kind share a row.
    """
    groups: dict[tuple[str, int, int], list[str]] = {}
    for holding in held:
        groups.setdefault((holding.kind, holding.nbytes, holding.count), []).append(holding.unit)
    for (kind, nbytes, count), units in sorted(
        groups.items(), key=lambda group: -group[0][1] * len(group[1])
    ):
        more = f" and {len(units) - 1:,} like it" if len(units) > 1 else ""
        yield kind, f"{units[0]}{more}", nbytes * len(units), count * len(units)


def _bytes(nbytes: int) -> str:
    return f"{nbytes:>15,} B {format_bytes(nbytes):>11}"


def _say_wrapped(text: str, *, hanging: int) -> None:
    """`text` in lines of at most COLUMNS, those after the first indented by `hanging`."""
    for line in wrap(
        text, COLUMNS, subsequent_indent=" " * hanging, break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True,
    ):
        say(line)


def verdict_words(answer: MemoryVerdict) -> str:
    """Needed bytes against the device's capacity, with band and margin, as a phrase.

    Without a margin it tells how the allocator runs the step.
    """
    needed, capacity = answer.needed, answer.capacity
    unsure = f" ({_band(needed)})" if needed.low != needed.high else ""
    built = ""
    if not answer.built_on_device:
        built = (
            f"; building the model on the device takes {format_bytes(answer.construction_bytes)}: "
            f"build it on the meta device"
        )
    return (
        f"needs {format_bytes(needed.nbytes)}{unsure} of "
        f"{format_bytes(capacity.nbytes)}{_margin(answer)}{built}"
    )


def _margin(answer: MemoryVerdict) -> str:
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
    stalls = f", {pressed.runs.words}, which stalls the device" if pressed.runs.words else ""
    if pressed.expected:
        return f" to keep all that it caches; runs{stalls}"
    return f"{full}; with the least outside torch's bytes it runs{stalls}"


def _band(band: BytesBand) -> str:
    return f"{format_bytes(band.low)} to {format_bytes(band.high)}"


def _bars(nbytes: int, highest: int) -> str:
    return bar() * (WIDTH * nbytes // max(1, highest))


def print_advice(effects: Sequence[Effect], nothing_fits: str = "") -> None:
    """Print bytes and step time of each change, and `nothing_fits` where no change suffices."""
    _say_wrapped(
        f"what would help, each planned and simulated again{f'; {SURER}' if effects else ''}",
        hanging=2,
    )
    for effect in effects:
        what = finding(effect)
        more = f"{'+' if effect.added_ns >= 0 else '-'}{format_time(abs(effect.added_ns))} a step"
        time = f"{more}, {_between(effect.step_time_ns, effect.step_time_band_ns)}"
        then = (
            f"{effect.verdict}{f', {effect.running}' if effect.running else ''}, peak in "
            f"{effect.peak_at}{_without(effect.dropped)}"
        )
        _say_wrapped(f"      {effect.change}: {what}", hanging=10)
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
    return f"changes nothing: the peak is elsewhere{f', it saves {saved}' if saved else ''}"


def _without(dropped: Sequence[str]) -> str:
    """Options of the scenario that a candidate leaves out, as the end of a sentence, or ""."""
    return f"; without {', '.join(dropped)}" if dropped else ""


def print_fit(scenario: Scenario, fit: Fit, *, as_json: bool) -> None:
    """Print every candidate and the recommendation, as text or as JSON."""
    if as_json:
        recommended = fit.recommended.name if fit.recommended else None
        write_json(
            {
                "schema_version": SCHEMA_VERSION,
                "scenario": scenario.name,
                "candidates": [_candidate(candidate) for candidate in fit.candidates],
                "refused": [{"name": name, "reason": reason} for name, reason in fit.refused],
                "recommended": recommended,
                "reason": fit.reason,
            }
        )
        return
    for line in fit_lines(scenario, fit):
        _say_wrapped(line, hanging=6)


def fit_lines(scenario: Scenario, fit: Fit) -> Iterator[str]:
    """The heading, a row for each candidate, and the recommendation."""
    model, batch = scenario.model, scenario.batch
    capacity = format_bytes(fit.candidates[0].answer.capacity.nbytes) if fit.candidates else "-"
    yield f"{scenario.name}: what fits {capacity} a rank, from least to most sharded"
    yield f"   model    {model.name}, {model.num_parameters:,} parameters"
    yield (
        f"   batch    micro_batch = {batch.micro_batch}, sequence_length = "
        f"{batch.sequence_length}, accumulation = {batch.accumulation}"
    )
    yield f"   cluster  {scenario.cluster.name}, {counted(scenario.cluster.num_ranks, 'rank')}"
    width = max((len(candidate.name) for candidate in fit.candidates), default=0)
    if fit.candidates:
        yield f"   {'':{width}} {'':5} {'needs':>10} {'step':>10} {'band':>9} {'token/s':>7}"
    for candidate in fit.candidates:
        mark = "->" if candidate is fit.recommended else "  "
        answer, step_ns = candidate.answer, candidate.step_time_ns
        needed, step = format_bytes(answer.needed.nbytes), format_time(step_ns)
        low, high = (100 * ns / max(1, step_ns) - 100 for ns in candidate.step_time_band_ns)
        tokens = metrics.tokens(candidate.scenario) * 10**9 / max(1, step_ns)
        yield (
            f"{mark} {candidate.name:{width}} {answer.verdict:5} {needed:>10} {step:>10} "
            f"{f'{low:.0f}/{high:+.0f} %':>9} {tokens:>7,.0f}"
        )
        if notes := "; ".join(filter(None, (answer.running, _without(candidate.dropped)[2:]))):
            yield f"      {notes}"
    if fit.candidates:
        yield f"   token/s are of one rank; {SURER}"
    for name, reason in fit.refused:
        yield f"   {name} cannot be: {reason}"
    yield f"{fit.recommended.name if fit.recommended else 'nothing'}: {fit.reason}"


def _between(step_ns: int, band_ns: tuple[int, int]) -> str:
    """A step time with its band."""
    return f"{format_time(step_ns)} ({' to '.join(map(format_time, band_ns))})"


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "name": candidate.name, "strategy": candidate.scenario.strategy,
        "options": asdict(candidate.scenario.options), "dropped": list(candidate.dropped),
        "activation_checkpointing": candidate.scenario.checkpointing.mode,
        "mesh": {
            "dp_replicate": candidate.scenario.mesh.dp_replicate,
            "dp_shard": candidate.scenario.mesh.dp_shard,
        },
        "verdict": candidate.answer.verdict, "needed_bytes": asdict(candidate.answer.needed),
        "releases_per_step": candidate.answer.releases_per_step,
        "peak_memory_bytes": candidate.answer.allocated_bytes, "peak_at": candidate.answer.peak_at,
        "step_time_ns": candidate.step_time_ns,
        "step_time_band_ns": list(candidate.step_time_band_ns),
        "expandable_segments": candidate.scenario.expandable_segments,
        "micro_batch": candidate.scenario.batch.micro_batch,
        "accumulation": candidate.scenario.batch.accumulation,
    }
