"""The scenario, or the collective, that a row of measurements is, and what it leaves open."""

from __future__ import annotations

import json
from typing import Any

from zsim.calibration import memory_pressure
from zsim.calibration.collectives import group_of, predict
from zsim.calibration.data.table import OR
from zsim.calibration.records import Collective, Skipped, Step
from zsim.cluster.collectives.nccl.durations import factor
from zsim.cluster.collectives.nccl.estimate import channels
from zsim.errors import ZsimError
from zsim.io.units import counted, format_bytes, format_time
from zsim.scenario.plan import planned


def text(row: Step | Collective | Skipped, *, as_json: bool) -> str:
    """The row as a scenario file, or as lines of its collective; or one JSON object."""
    about = of_row(row)
    if as_json:
        return json.dumps(about) + "\n"
    if isinstance(row, Skipped):
        return f"# skipped: {row.reason}\n"
    caveats = "".join(
        f"# {kind}: {caveat}\n" for kind in ("assumed", "warning") for caveat in about.get(kind, ())
    )
    lines = about.get("scenario") or "".join(
        f"{key}: {value}\n" for key, value in about["taken_for"].items()
    )
    return f"# {row.source} line {row.line}, measured {_measured(row)}\n{caveats}{lines}"


def of_row(row: Step | Collective | Skipped) -> dict[str, Any]:
    """`measured` in seconds, `assumed`, and the `scenario` with a `warning` or what it was
    `taken_for`."""
    if isinstance(row, Skipped):
        return {"skipped": row.reason}
    if isinstance(row, Step):
        return {
            "scenario": row.scenario.to_toml(), "measured": row.seconds, "peaks": dict(row.peaks),
            "assumed": [*_assumed(row), *_left_open(row)], "warning": list(_pressure(row)),
        }
    return {"taken_for": _collective(row), "measured": row.seconds, "assumed": _assumed(row)}


def _measured(row: Step | Collective) -> str:
    time = [] if row.seconds is None else [f"{row.seconds:.6g} s"]
    peaks = row.peaks if isinstance(row, Step) else {}
    return ", ".join((*time, *(f"{format_bytes(size)} {name}" for name, size in peaks.items())))


def _assumed(row: Step | Collective) -> list[str]:
    """Caveats of a row, and by how much they widen its band."""
    wider = f"so the time may be another {100 * row.widened:.0f} % off"
    shared = "others used the network: collectives take {:g} to {:g} times as long"
    return [
        *(caveat.text for caveat in row.caveats),
        *([wider] if row.widened else []),
        *([shared.format(*row.network)] if row.is_shared else []),
    ]


def _left_open(row: Step) -> list[str]:
    """Keys of which one of several values ran; the scenario has the first."""
    return [
        f"{key}: {text}; all are predicted, the middle is the prediction, the band spans all"
        for key, text in row.fields.items() if OR in text
    ]


def _pressure(row: Step) -> tuple[str, ...]:
    """Caveats of a step's memory, or the reason why it is not predicted."""
    try:
        _, caveats = memory_pressure.pressed(row.scenario, planned(row.scenario).program)
        return tuple(caveat.text for caveat in caveats)
    except ZsimError as error:
        return (" ".join(f"not predicted: {error}".split()),)


def _collective(row: Collective) -> dict[str, str]:
    answer, group = predict(row), group_of(row)
    ranks = f"{counted(group.num_ranks, 'rank')} on {counted(group.num_nodes, 'node')}"
    steps = factor(row.op, group.num_ranks)
    reached = steps * row.nbytes / (1000 * answer.microseconds)
    return {
        "collective": f"{row.op} of {row.nbytes:,} B over {ranks}",
        "cluster": row.cluster.name,
        "machine": f"{group.generation}, {group.links}, network {group.fabric}",
        "algorithm": answer.algorithm,
        "protocol": answer.protocol,
        "channels": str(channels(group, answer.algorithm)),
        "links": f"{group.bus_gb_s:.6g} GB/s, what a ring has at its narrowest place",
        "bus bandwidth": f"{reached:.4g} GB/s reached, as nccl-tests counts: {steps:.6g} of the "
                         f"message in the predicted time",
        "provenance": answer.provenance,
        "predicted": format_time(round(answer.microseconds * 1000)),
        "band": " to ".join(format_time(round(end * 1000)) for end in (answer.low, answer.high)),
    }
