"""A cluster's own measured curves in place of those of its generation and of its kind of network.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zsim.cluster.cluster import ClusterSpec, MeasuredCurve, Nccl
from zsim.cluster.collectives.nccl.curves import (
    CURVES,
    Added,
    Crossing,
    Curve,
    CurveBand,
    CurveProvenance,
    Curves,
)

PROVENANCES: dict[str, CurveProvenance] = {
    "measured": "calibrated", "calibrated": "calibrated", "published": "published"
}


def curves_of(cluster: ClusterSpec) -> Curves:
    """The published curves, with those that were measured on `cluster`."""
    return _curves(cluster.curves, cluster.nccl) if cluster.curves and cluster.nccl else CURVES


@lru_cache(maxsize=64)
def _curves(measured: tuple[MeasuredCurve, ...], node: Nccl) -> Curves:
    curves = CURVES
    for curve in measured:
        curves = with_curve(curves, curve, node)
    return curves


def with_curve(curves: Curves, measured: MeasuredCurve, node: Nccl) -> Curves:
    """The `curves` with `measured` for the generation and the network of `node`. With a measured
    curve of the switch, NCCL's own choice goes by that alone."""
    band = CurveBand(large=measured.band, middle=measured.band_middle, small=measured.band_small)
    provenance = PROVENANCES.get(measured.provenance, "assumed")
    if measured.scope == "network":
        reduces = measured.collective == "all_reduce"
        crossing = Crossing(
            floor=measured.floor,
            added=measured.added,
            share=measured.share,
            band=band,
            provenance=provenance,
            source=measured.source,
            generations=(node.generation,),
        )
        return replace(curves, crossings={**curves.crossings, (node.fabric, reduces): crossing})
    curve = Curve(
        floor_us=measured.floor,
        share=measured.share,
        added=tuple(Added(microseconds=times, half=half) for times, half in measured.added),
        band=band,
        provenance=provenance,
        source=measured.source,
    )
    if measured.scope == "nvls":
        return replace(
            curves, nvls={**curves.nvls, node.generation: curve},
            own_switch=curves.own_switch | {node.generation},
        )
    return replace(curves, rings={**curves.rings, (node.generation, measured.collective): curve})


def as_it_is(curves: Curves, scope: str, collective: str, node: Nccl) -> MeasuredCurve | None:
    """The curve that `curves` have, as a MeasuredCurve; None where the generation has none."""
    if scope == "network":
        crossing, band, provenance = curves.crossing(node.fabric, collective, node.generation)
        return MeasuredCurve(
            scope="network",
            collective=collective,
            floor=crossing.floor,
            share=crossing.share,
            added=crossing.added,
            band=band.large,
            band_middle=band.middle,
            band_small=band.small,
            provenance=provenance,
            source=crossing.source,
        )
    curve = (
        curves.nvls.get(node.generation)
        if scope == "nvls"
        else curves.rings.get((node.generation, collective))
    )
    if curve is None:
        return None
    return MeasuredCurve(
        scope="nvls" if scope == "nvls" else "ring",
        collective=collective,
        floor=curve.floor_us,
        share=curve.share,
        added=tuple((each.microseconds, each.half) for each in curve.added),
        band=curve.band.large,
        band_middle=curve.band.middle,
        band_small=curve.band.small,
        provenance=curve.provenance,
        source=curve.source,
    )
