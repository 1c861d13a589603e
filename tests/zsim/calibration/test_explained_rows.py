"""The scenario of published rows, as `zsim accuracy --explain` prints it, and what they leave open.

To write the golden files anew: ZSIM_UPDATE_GOLDEN=1 pytest
tests/zsim/calibration/test_explained_rows.py
"""

from __future__ import annotations

import os

import pytest

from tests.published.convert import TABLES
from tests.support.folders import GOLDEN
from zsim.calibration import explain_row
from zsim.calibration.data import table

EXPLAINED = GOLDEN / "explained"
ROWS = {
    "mpt_llm_foundry": (2, 6, 16, 39), "vtrain_megatron_ds_a100": (2,), "fms_fsdp": (2,),
    "torchtitan": (2, 4), "ultrascale_playbook_sweep": (2, 4), "nccl_collectives": (2, 62, 130),
    "nccl_h100_sweep": (2,), "nccl_allreduce_vtrain_lut": (100,),
}
"""Lines of each table, by what most changes how a row is read."""


@pytest.mark.parametrize(
    ("name", "line"), [(name, line) for name, lines in ROWS.items() for line in lines]
)
def test_a_row_is_explained_as_its_golden_text(name: str, line: int) -> None:
    (row,) = (row for row in table.read(TABLES / f"{name}.csv") if row.line == line)
    text = explain_row.text(row, as_json=False)
    file = EXPLAINED / f"{name}-{line}.txt"
    if os.environ.get("ZSIM_UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


def test_no_golden_text_is_left_of_a_row_that_is_gone() -> None:
    names = {f"{name}-{line}" for name, lines in ROWS.items() for line in lines}
    assert {file.stem for file in EXPLAINED.iterdir()} == names
