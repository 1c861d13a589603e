"""A cluster as one TOML file: a preset with the constants that a calibration found, each with its
source, and how good they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

from zsim.calibration.accuracy import percentile
from zsim.calibration.fitting import fit_warnings
from zsim.calibration.fitting.fit_collectives import FittedCurves
from zsim.calibration.fitting.fit_steps import Fitted
from zsim.calibration.fitting.planned_steps import MOVED, OF_ATTENTION, PRODUCTS
from zsim.errors import Caveat
from zsim.presets import preset_table
from zsim.scenario.parts.cluster_schema import LEAST_WIDTH, MOST_WIDTH
from zsim.scenario.tables import in_line


def text(
    preset: str, fitted: Fitted | None, *, source: str, curves: FittedCurves | None = None,
    simulated: bool = False,
) -> str:
    """The whole file: the cluster `preset`, as a table in it its device with what was fitted, and
    curves of its collectives.

    What was fitted says how wide its band is by the errors of the fit. What no row speaks of stays
    as it was, with where it comes from. What was fitted on simulated Runs alone is "assumed", since
    they are no measurements.
    """
    cluster, device = preset_tables(preset)
    if fitted is not None:
        generation = device["name"].split()[0]
        factors = {
            name: factor
            for (kind, name), factor in fitted.factors.items()
            if kind in ("", generation)
        }
        about = (
            {"provenance": "assumed"}
            if simulated
            else {"provenance": "calibrated", "width": f"{100 * width(fitted):.1f} %"}
        )
        device = _calibrated(
            device, factors, fitted.heard,
            Stamp(source=_doubted(source, fit_warnings.of_steps(fitted)), about=about),
        )
    whole = {**cluster, "device": device, **({"curves": curve_tables(curves)} if curves else {})}
    return "\n".join([*head(fitted, curves, source), *toml_of("", whole)]) + "\n"


def preset_tables(preset: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables of the cluster `preset` and of its device, as their files have them."""
    cluster = preset_table("clusters", preset)
    return cluster, preset_table("devices", cluster["device"])


def head(fitted: Fitted | None, curves: FittedCurves | None, source: str) -> Iterator[str]:
    """Comments: on what it was fitted, how well, and how well each group is predicted by the
    others."""
    for kind, groups in ("steps", step_errors(fitted)), ("collectives", curve_errors(curves)):
        if not groups:
            continue
        yield f"# calibrated on {sum(group.n for group in groups)} {kind} of {_plain(source)}"
        for label, errors in (
            ("fitted", _all(groups, "fitted")),
            ("left out with their group", _all(groups, "left_out")),
        ):
            yield f"# errors of rows {label}: {_figures(errors)}"
        for group in groups:
            figures = (
                f"n {group.n}, fitted {_figures(group.fitted)}; left out "
                f"{_figures(group.left_out)}{_plain(group.by_preset)}"
            )
            yield f"#   {_plain(group.name)}: {figures}"
        if kind == "steps" and fitted is not None:
            yield from (f"# {line}" for line in worth(fitted))
    for caveat in fit_warnings.caveats(fitted, curves):
        yield f"# doubtful: {_plain(caveat.text)}"
    yield ""


def worth(fitted: Fitted) -> Iterator[str]:
    """The width of the band of what was fitted, with its reason, and the constants that stay as
    they were."""
    near = "rows are nearer, but the presets' own calibration is worth no more"
    reason = "nine of ten rows lie within it" if fitted.width > LEAST_WIDTH else near
    yield f"half-width of steps by what was fitted: {_share(width(fitted))}; {reason}"
    kept = [name for _, name in fitted.factors if not kernels_heard(fitted, name)]
    if kept:
        yield (
            f"no row speaks of {', '.join(dict.fromkeys(kept))}: as before, with where it came from"
        )
    ran = sorted({name.split(".")[1] for name in fitted.heard if name.startswith(OF_ATTENTION)})
    if ran:
        yield f"attention was run by {', '.join(ran)}: other kernels stay as before"


def kernels_heard(fitted: Fitted, name: str) -> list[str]:
    """Names in `fitted.heard` of the constant `name`: its own, or one for each kind of attention
    kernels that the rows ran."""
    if not name.startswith(OF_ATTENTION):
        return [name] if name in fitted.heard else []
    part = name.removeprefix(OF_ATTENTION)
    return sorted(
        heard for heard in fitted.heard
        if heard.startswith(OF_ATTENTION) and heard.endswith(f".{part}")
    )


def width(fitted: Fitted) -> float:
    """Half-width of a step's time, in which nine of ten rows lie: rounded up, and never less than
    that of presets."""
    return min(MOST_WIDTH, max(LEAST_WIDTH, ceil(1000 * fitted.width - 1e-6) / 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Keys of a fitted number; its `source` goes before that of the number it replaces."""

    source: str
    about: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupErrors:
    """Errors of rows that are left out together, predicted over measured less 1: fitted and held
    out."""

    name: str
    fitted: tuple[float, ...]
    left_out: tuple[float, ...]
    before: str = ""
    """Source of the published curve, where that alone predicts them left out, else ""."""

    @property
    def n(self) -> int:
        """Number of rows."""
        return len(self.fitted)

    @property
    def by_preset(self) -> str:
        """Note on rows that the preset alone predicts: it may have been fitted to them itself."""
        return f", not fitted, the preset's value, from: {self.before}" if self.before else ""


def step_errors(fitted: Fitted | None) -> list[GroupErrors]:
    """Errors of steps by GPU and model."""
    if fitted is None:
        return []
    names = [" ".join(filter(None, case.group)) for case in fitted.cases]
    return _groups(names, fitted.errors, fitted.left_out, [""] * len(names))


def curve_errors(curves: FittedCurves | None) -> list[GroupErrors]:
    """Errors of collectives by curve, and by the system that was measured."""
    if curves is None:
        return []
    names = [
        f"{scope} {op}, {group}"
        for (scope, op), group in zip(curves.keys, curves.groups, strict=True)
    ]
    return _groups(names, curves.errors, curves.left_out, curves.before)


def _groups(
    names: Sequence[str], errors: Sequence[float], left_out: Sequence[float], before: Sequence[str]
) -> list[GroupErrors]:
    indices: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        indices.setdefault(name, []).append(index)
    return [
        GroupErrors(
            name=name,
            fitted=tuple(errors[at] for at in members),
            left_out=tuple(left_out[at] for at in members),
            before=before[members[0]],
        )
        for name, members in indices.items()
    ]


def _all(groups: Sequence[GroupErrors], which: str) -> tuple[float, ...]:
    return tuple(error for group in groups for error in getattr(group, which))


def _figures(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    middle, high, largest = map(_share, (median(sizes), percentile(sizes, 95), max(sizes)))
    return f"median {middle}, 95th percentile {high}, largest {largest}"


def _plain(line: str) -> str:
    """Text of a foreign file as one line of a comment, cut to 300 characters."""
    return "".join(c if c.isprintable() else " " for c in line)[:300]


def curve_tables(fitted: FittedCurves) -> dict[str, Any]:
    """The tables that `cluster_reader` reads: µs inside a node, multiples of the tuner's latencies
    on a network."""
    tables: dict[str, Any] = {}
    for curve in fitted.curves:
        unit = "" if curve.scope == "network" else " us"
        bands = {
            "band": curve.band, "band_middle": curve.band_middle, "band_small": curve.band_small
        }
        values = {"floor": f"{curve.floor:.4g}{unit}", "share": f"{100 * curve.share:.4g} %"}
        values |= {name: f"{100 * band:.3g} %" for name, band in bands.items()}
        for number, (added, half) in enumerate(curve.added, start=1):
            suffix = "" if number == 1 else f"_{number}"
            values |= {f"added{suffix}": f"{added:.4g}{unit}", f"half{suffix}": f"{half} B"}
        where = {
            "provenance": curve.provenance,
            "source": _doubted(curve.source, fit_warnings.of_curve(curve, fitted)),
        }
        tables.setdefault(curve.scope, {})[curve.collective] = {
            key: {"value": value, **where} for key, value in values.items()
        }
    return tables


def _doubted(source: str, caveats: Iterable[Caveat]) -> str:
    """The source of fitted numbers, followed by their caveats."""
    return "; doubtful: ".join((source, *(caveat.text for caveat in caveats)))


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _calibrated(
    device: Mapping[str, Any], factors: Mapping[str, float], heard: Set[str], stamp: Stamp
) -> dict[str, Any]:
    """The device's table with the factors of what rows speak of; of attention only of the kernels
    that they ran."""
    calibrated = dict(device)
    for name, factor in factors.items():
        if name.startswith(OF_ATTENTION):
            part = name.removeprefix(OF_ATTENTION)
            calibrated["attention"] = {
                kind: {**table, part: scaled(table[part], factor, stamp)}
                if f"{OF_ATTENTION}{kind}.{part}" in heard
                else table
                for kind, table in calibrated.get("attention", {}).items()
            }
        elif name in heard:
            calibrated[name] = scaled(calibrated[name], factor, stamp)
            if name == PRODUCTS:
                calibrated |= moved_with_products(calibrated, factor)
    return calibrated


def moved_with_products(device: Mapping[str, Any], factor: float) -> dict[str, dict[str, str]]:
    """The numbers of a device's table that move with the factor of its products."""
    return {
        name: scaled(
            device[name], factor,
            Stamp(
                source=f"moved with {PRODUCTS}",
                about={"provenance": device[name]["provenance"]},
            ),
        )
        for name in MOVED if name in device
    }


def scaled(entry: Mapping[str, str], factor: float, stamp: Stamp) -> dict[str, str]:
    """A number with its unit, multiplied."""
    number, _, unit = entry["value"].partition(" ")
    product = min(100.0, float(number) * factor) if unit == "%" else float(number) * factor
    value = f"{product:.4g}" if unit else str(round(product))
    before = f"{stamp.source}; before: {entry['value']}, {entry['source']}"
    return {"value": f"{value} {unit}".strip(), **stamp.about, "source": before}


def toml_of(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    """A table of TOML: its values first, then the tables in it, under their whole names."""
    if name and any("value" in entry or not isinstance(entry, dict) for entry in table.values()):
        yield f"[{name}]"
    tables = {
        key: entry
        for key, entry in table.items()
        if isinstance(entry, dict) and "value" not in entry
    }
    for key, entry in table.items():
        if key not in tables:
            yield f"{key} = {in_line(entry)}"
    yield ""
    for key, entry in tables.items():
        yield from toml_of(f"{name}.{key}" if name else key, entry)

