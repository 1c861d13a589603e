"""The check of step time: judged wherever the constants behind the prediction have a source and
the measured device is the same.

A real step's time depends on more than the scenario, so the bound is the prediction's own band. The
constants behind the prediction make that band. Assumed constants are not judged by it. A time ten
times off is a failure all the same. It reads Runs and nothing else.

Other work that takes a share s of the cores widens the band upwards by 1 / (1 - s)². Ranks get 1 -
s of the cores, and each collective waits for the slowest rank, which waits for a core once more.
Assumed constants of a CPU have a core for each rank, and are themselves ten times off. Where ranks
share cores, or have other work beside, it counts from that.
"""

from __future__ import annotations

from zsim.cluster.devices import is_called
from zsim.io.units import format_time
from zsim.ir.run import RunRecord, band_of, sees
from zsim.runs.compare.check import Check, unsupported

NAME = "step time"
BOUND = 0.1
"""Share of the measured time by which one without a band may differ."""
BUSY = 0.1
"""Share of a machine's cores from which work other than the run's widens the band."""
MOST_BUSY = 0.9
"""Largest share that widens it, a hundredfold."""
TOO_FAR = 10
"""Factor between the times at which no band and no assumed constant is an excuse."""
ASSUMED_CPU = 10
"""Factor by which steps on a CPU may be longer than assumed constants say. Those of four ranks on
two quiet cores measured 10 to 17 times as long."""

_TIMES = "; predicted "


def compare_time(predicted: RunRecord, measured: RunRecord) -> Check:
    """The check that the measured time lies within the prediction's band.

    Without a band, or without a step that real ranks timed, the bound is the share `BOUND`.
    """
    left, right = predicted.step_time_ns, measured.step_time_ns
    blind = _blind(predicted, measured)
    if blind or not left or not right:
        return unsupported(NAME, blind or "one side has no step time")
    reason = _other_device(predicted, measured) or _shared_gpu(measured)
    share = _others(measured)
    slower = 1 / (1 - min(MOST_BUSY, share)) ** 2
    shared = slower * _ranks_on_a_core(measured)
    excuse = ASSUMED_CPU * shared if _of_another_cpu(predicted) else 1.0
    far = "" if reason else _too_far(left, right, excuse=excuse)
    if far:
        return Check(
            name=NAME, status="failed", predicted=left, measured=right,
            relative_error=(left - right) / right, detail=f"{far}{_beside(share)}",
        )
    reason = reason or assumed_reason(predicted, measured)
    if reason:
        times = f"{format_time(left)}, measured {format_time(right)}"
        return unsupported(NAME, f"{reason}{_TIMES}{times}", predicted=left, measured=right)
    error = (left - right) / right
    band = band_of(predicted) if _is_timed(measured) else None
    ends_ns: tuple[int, int] | None = None
    if band is None:
        good, within = abs(error) <= BOUND, f", {error:+.1%}, at most {BOUND:.0%} allowed"
        detail = f"predicted {format_time(left)}, measured {format_time(right)}{within}"
    else:
        low, high = round(left * band[0]), round(left * band[1] * slower)
        good, ends_ns = low <= right <= high, (low, high)
        ends = f"{format_time(low)} to {format_time(high)}{_widened(share)}"
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
        band_ns=ends_ns,
    )


def reason_of(check: Check) -> str:
    """The reason that a step's time was not judged, without the times."""
    return check.reason.partition(_TIMES)[0]


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
    return f"{' and '.join(blind)} cannot see time" if blind else ""


def _of_another_cpu(predicted: RunRecord) -> bool:
    """True where the prediction is for a CPU without measured constants."""
    assumed = predicted.provenance.get("calibration") == "assumed"
    return assumed and predicted.provenance.get("device") == "cpu"


def _too_far(predicted: int, measured: int, *, excuse: float) -> str:
    """The words for times that differ by `TOO_FAR` or more, or ""; the measured one may be `excuse`
    times as long for other reasons."""
    factor = max(predicted, measured) / min(predicted, measured)
    far = TOO_FAR * (excuse if measured > predicted else 1)
    return "" if factor < far else (
        f"{factor:.0f} times off: predicted {format_time(predicted)}, measured "
        f"{format_time(measured)}"
    )


def assumed_reason(predicted: RunRecord, measured: RunRecord) -> str:
    """The reason that the band judges no time: its constants are assumed. Or ""."""
    assumed = [
        run
        for run in (predicted, measured)
        if run.provenance.get("calibration", "measured") == "assumed"
    ]
    if assumed:
        return (
            f"{assumed[0].provenance.get('cluster', 'this hardware')} is not calibrated here (its "
            f"constants are assumed){_remedy(assumed[0])}"
        )
    return ""


def _others(measured: RunRecord) -> float:
    """The share of the cores that other work took, 0 where it widens nothing."""
    share = max((rank.others_share or 0.0 for rank in measured.ranks), default=0.0)
    return share if share > BUSY else 0.0


def _widened(share: float) -> str:
    return f", widened{_beside(share)}" if share else ""


def _beside(share: float) -> str:
    return f": other work took {share:.0%} of this machine's cores" if share else ""


def _ranks_on_a_core(measured: RunRecord) -> float:
    """Ranks for each core of a node, at least 1."""
    try:
        cores, nodes = (int(measured.provenance.get(key, "1")) for key in ("cores", "nodes"))
    except ValueError:  # a saved Run that was edited by hand
        return 1.0
    known = "cores" in measured.provenance and min(cores, nodes) > 0
    return max(1.0, measured.world_size / nodes / cores) if known else 1.0


def _remedy(run: RunRecord) -> str:
    return ": `zsim calibrate --here`" if run.provenance.get("device") == "cpu" else ""


def _other_device(predicted: RunRecord, measured: RunRecord) -> str:
    """The reason that the two times are not of one device, or ""."""
    kind, ran_on = predicted.provenance.get("device"), measured.provenance.get("device")
    name = predicted.provenance.get("device_name", kind)
    if kind is None or name is None or ran_on is None or ran_on == kind or is_called(name, ran_on):
        return ""
    return f"measured on {ran_on[:60]}, and predicted for {name[:60]}"


def _shared_gpu(measured: RunRecord) -> str:
    """The reason that ranks may have shared a GPU, which no prediction has; or ""."""
    shared = "nccl_hostid" in measured.provenance
    return "NCCL_HOSTID was set, by which ranks share a GPU and talk by sockets" if shared else ""
