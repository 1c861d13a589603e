"""The check of step time: judged where the predicted device is calibrated and the measured device
is the same.

A real step's time depends on more than the scenario, so the bound is the prediction's own band. The
constants behind the prediction make that band. Elsewhere both times are reported and not judged.
It reads Runs and nothing else.
"""

from __future__ import annotations

from zsim.cluster.devices import is_called
from zsim.io.units import format_time
from zsim.ir.run import RunRecord, band_of, sees
from zsim.runs.compare.check import Check

NAME = "step time"


def compare_time(predicted: RunRecord, measured: RunRecord, *, bound: float) -> Check:
    """The check that the measured time lies within the prediction's band.

    Without a band, or without a step that real ranks timed, the bound is the share `bound`.
    """
    left, right = predicted.step_time_ns, measured.step_time_ns
    blind = _blind(predicted, measured)
    if blind or not left or not right:
        return Check(
            name=NAME, status="unsupported",
            detail=blind or "unsupported: one side has no step time",
        )
    reason = _not_judged(predicted, measured)
    if reason:
        detail = (
            f"unsupported: {reason}; predicted {format_time(left)}, measured {format_time(right)}"
        )
        return Check(name=NAME, status="unsupported", predicted=left, measured=right, detail=detail)
    error = (left - right) / right
    band = band_of(predicted) if _is_timed(measured) else None
    if band is None:
        good, within = abs(error) <= bound, f", {error:+.1%}, at most {bound:.0%} allowed"
        detail = f"predicted {format_time(left)}, measured {format_time(right)}{within}"
    else:
        low, high = (round(left * factor) for factor in band)
        good = low <= right <= high
        ends = f"{format_time(low)} to {format_time(high)}"
        word = "within" if good else "beyond"
        detail = (
            f"{word} the band: predicted {format_time(left)} ({ends}), measured "
            f"{format_time(right)}, {error:+.1%}"
        )
    return Check(
        name=NAME,
        status="ok" if good else "failed",
        predicted=left,
        measured=right,
        relative_error=error,
        detail=detail,
    )


def _is_timed(run: RunRecord) -> bool:
    """True where real ranks timed an unobserved step, though their backend times no single
    operators."""
    return "timed" in run.provenance and run.step_time_ns is not None


def _blind(predicted: RunRecord, measured: RunRecord) -> str:
    blind = [
        run.backend
        for run in (predicted, measured)
        if not sees(run, "time") and not (run is measured and _is_timed(run))
    ]
    return f"unsupported: {' and '.join(blind)} cannot see time" if blind else ""


def _not_judged(predicted: RunRecord, measured: RunRecord) -> str:
    """The reason that the two times cannot be compared, or ""."""
    assumed = [
        run
        for run in (predicted, measured)
        if run.provenance.get("calibration", "measured") == "assumed"
    ]
    if assumed:
        return (
            f"{assumed[0].provenance.get('cluster', 'this hardware')} is not calibrated here (its "
            f"constants are assumed)"
        )
    kind, ran_on = predicted.provenance.get("device"), measured.provenance.get("device")
    name = predicted.provenance.get("device_name", kind)
    if kind is None or name is None or ran_on is None or ran_on == kind or is_called(name, ran_on):
        return ""
    return f"measured on {ran_on[:60]}, and predicted for {name[:60]}"
