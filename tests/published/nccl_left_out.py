"""Predictions of a row by constants without its own source, or without its generation of GPUs.
They show the model's worth on machines that it has never seen.

Whole sources are left out, and whole generations, never cells of a table. Rows between nodes have
no part in any fit. Constants of networks are those of source code, and two are of sums that no
table here has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tests.published.nccl_fit import source_of, without_generation, without_source
from zsim.calibration.collectives import Prediction, group_of, predict
from zsim.calibration.records import Collective
from zsim.cluster.collectives.nccl.curves import CURVES

LeftOut = Literal["source", "generation"]


def predict_left_out(row: Collective, what: LeftOut = "source") -> Prediction:
    """`row` by constants of other sources, or of other generations, alone."""
    group = group_of(row)
    constants = (
        without_source(source_of(row)) if what == "source" else without_generation(group.generation)
    )
    return predict(row, curves=replace(CURVES, constants=constants), group=group)
