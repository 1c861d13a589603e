"""Predictions of a row by constants that its own source had no part in: the model's worth on
machines it has never seen.

Groups of rows are systems of one source. The constants that were fitted on a group are replaced by
others, never by row. Others are, in turn: other sources of the same machine, its other collectives,
another generation, or the published defaults.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.calibration.collectives import Prediction, group_of, predict
from zsim.calibration.data.records import Collective
from zsim.cluster.cluster import Fabric
from zsim.cluster.collectives.nccl.communicator import Communicator
from zsim.cluster.collectives.nccl.curves import CURVES, MIB, Added, Crossing, Curve, Curves

AZURE_NVLS = replace(CURVES.nvls["hopper"], added=(Added(microseconds=70, half=24 * MIB),))
"""Azure's NDv5 alone: 30 and 70 µs on H100 and on H200, half at 16 and at 32 MiB."""
AZURE_A100 = replace(
    CURVES.rings["ampere", "all_reduce"], added=(Added(microseconds=270, half=32 * MIB),)
)
"""Azure's NDv4 alone."""
XLA_RINGS = {
    "all_reduce": (28, 1.04, 60, 8), "all_gather": (18, 0.98, 50, 8),
    "reduce_scatter": (26, 0.94, 60, 64),
}
"""The sweep of 8 H100 alone, up to 256 MiB: floor, share, added, half in MiB."""
FROM_ALL_REDUCE = {"all_reduce": 1.0, "all_gather": 32.2 / 56, "reduce_scatter": 32.2 / 56}
"""The tuner's latencies of Ring Simple over that of all-reduce, 8 ranks: a ring of which only the
switch's all-reduce is known."""
CUBE_MESH_RINGS = {2: 1, 3: 2, 4: 4, 5: 2, 6: 2, 7: 4, 8: 6}
"""Rings between the first N GPUs of a V100 node, by its links alone."""


def predict_left_out(row: Collective) -> Prediction:
    """`row` by constants of other sources alone."""
    group = group_of(row)
    if group.generation == "volta" and group.num_nodes == 1:
        bus_gb_s = 20.0 * CUBE_MESH_RINGS.get(group.num_ranks, 6)
        group = replace(group, bus_gb_s=bus_gb_s, inside_gb_s=bus_gb_s)
    return predict(row, curves=remaining(row, group), group=group)


def remaining(row: Collective, group: Communicator) -> Curves:
    """The constants without those that this row's source was used for."""
    if group.num_nodes > 1:
        return _networks()
    generation = group.generation
    if generation == "hopper":
        return _hopper_without_sweep() if "xla" in row.origin else _hopper_without_h200()
    if generation == "blackwell":
        rings = {
            key: replace(curve, share=CURVES.rings["hopper", key[1]].share)
            for key, curve in CURVES.rings.items()
        }
        return replace(
            CURVES, rings=rings, nvls={**CURVES.nvls, "blackwell": CURVES.nvls["hopper"]}
        )
    if generation == "ampere":
        rings = {**CURVES.rings, ("ampere", "all_reduce"): AZURE_A100}
        return replace(CURVES, rings=rings, ring_share_lost={})
    rings = {key: replace(CURVES.rings["ampere", key[1]], share=1.0) for key in CURVES.rings}
    return replace(CURVES, rings=rings, ring_share_lost={})


def _hopper_without_h200() -> Curves:
    rings = dict(CURVES.rings)
    for op, (floor, share, added, half) in XLA_RINGS.items():
        rings["hopper", op] = _ring(floor, share, added, half)
    return replace(CURVES, rings=rings, nvls={**CURVES.nvls, "hopper": AZURE_NVLS})


def _hopper_without_sweep() -> Curves:
    """Rings as the switch's all-reduce, by the tuner's latencies; their shares from 8 and 16 GiB on
    H200."""
    rings = dict(CURVES.rings)
    for op, times in FROM_ALL_REDUCE.items():
        rings["hopper", op] = _ring(30 * times, CURVES.rings["hopper", op].share, 70 * times, 16)
    return replace(CURVES, rings=rings)


def _ring(floor: float, share: float, added: float, half: int) -> Curve:
    known = CURVES.rings["hopper", "all_gather"]
    return replace(
        known, floor_us=floor, share=share, added=(Added(microseconds=added, half=half * MIB),)
    )


def _networks() -> Curves:
    """Published floors and defaults: no row of 4 nodes had a part in them."""
    efa, ib = CURVES.crossings["efa", True], CURVES.crossings["ib", True]
    crossings: dict[tuple[Fabric, bool], Crossing] = dict(CURVES.crossings)
    crossings["efa", True] = replace(efa, added=((2.2, MIB // 8),))
    crossings["ib", True] = replace(ib, added=((1.0, 32 * MIB),))
    return replace(CURVES, crossings=crossings)
