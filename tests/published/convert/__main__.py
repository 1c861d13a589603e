"""Writes every table anew: `python -m tests.published.convert`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tests.published.convert import (
    TABLES,
    Row,
    fms_fsdp,
    llm_foundry,
    nanotron,
    nccl,
    table,
    torchtitan,
    vtrain,
)

SOURCES: dict[str, Callable[[], Iterable[Row]]] = {
    "mpt_llm_foundry.csv": llm_foundry.rows, "vtrain_megatron_ds_a100.csv": vtrain.rows,
    "fms_fsdp.csv": fms_fsdp.rows, "torchtitan.csv": torchtitan.rows,
    "ultrascale_playbook_sweep.csv": nanotron.rows, "nccl_collectives.csv": nccl.collectives,
    "nccl_h100_sweep.csv": nccl.h100_sweep,
    "nccl_allreduce_vtrain_lut.csv": nccl.vtrain_all_reduces,
}


def write(folder: Path) -> None:
    """Writes all tables into `folder`."""
    for name, rows in SOURCES.items():
        (folder / name).write_text(table(rows()), encoding="utf-8")


if __name__ == "__main__":
    write(TABLES)
