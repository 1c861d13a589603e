"""Published peaks of reserved memory against what the simulator says of the same runs: `python -m
tests.published.predictions`.

No constant here or in zsim was fitted to these rows. It needs no torch: the models were traced
before (`tests.published.traces`).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.published.traces import whole
from zsim.memory.fits import MemoryVerdict, assess_program
from zsim.models.checkpointing import NO_CHECKPOINTING
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

GIB = 2**30
LAYERS = {"torchtitan": 32, "nanotron": 16}
TITAN = """
model = {{ preset = "llama-3-8b", loss_dtype = "float32" }}
batch = {{ micro_batch = {micro_batch}, sequence_length = 8192 }}
cluster = {{ preset = "dgx-h100", nodes = {nodes} }}
strategy = {{ name = "fsdp2", dp_shard = {gpus} }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
optimizer = {{ name = "adamw", implementation = "foreach" }}
activation_checkpointing = {{ mode = "selective", save = ["linear", "attention"], save_every = 2 }}
execution = {{ norms = "composite" }}
"""
NANOTRON = """
model.family = "llama"
model.sizes = {{ num_layers = 16, hidden_size = 2048, num_heads = 32, feed_forward = 8192, vocabulary = 131072, tied = true, loss_dtype = "float32" }}
batch = {{ micro_batch = {micro_batch}, sequence_length = 4096, accumulation = {accumulation} }}
cluster = {{ preset = "dgx-h100", nodes = {nodes} }}
strategy = {{ name = "ddp", dp_replicate = {gpus}, sync = "last", gradient_as_bucket_view = true }}
precision = {{ parameters = "bf16", reduce = "fp32" }}
optimizer = {{ name = "adamw", implementation = "fused" }}
execution = {{ loss = "composite" }}
"""  # noqa: E501


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published peak. `unit` is as published; nanotron's own log divides by 1024³ and says GB,
    so both are read as GiB."""

    row: str
    framework: str
    model: str
    gpus: int
    micro_batch: int
    sequence_length: int
    accumulation: int
    mode: str
    peak: float
    unit: str
    metric: str
    use: str
    source: str

    def scenario(self) -> Scenario:
        """The row as a scenario in the words that scenarios have today."""
        text = TITAN if self.framework == "torchtitan" else NANOTRON
        said = text.format(
            micro_batch=self.micro_batch, gpus=self.gpus, nodes=self.gpus // 8,
            accumulation=min(self.accumulation, 2),
        )
        return parse(said.encode(), where=self.row)

    def traced(self) -> Scenario:
        """The same with the framework's own model, traced, in place of the preset."""
        name = f"{self.framework}-micro-batch-{self.micro_batch}"
        model = whole(name, num_layers=LAYERS[self.framework])
        return derived(self.scenario(), model=model, checkpointing=NO_CHECKPOINTING)


@cache
def rows() -> dict[str, Row]:
    """The published peaks by their short names."""
    with (Path(__file__).parent / "peak_memory.csv").open(encoding="utf-8", newline="") as file:
        return {table["row"]: _row(table) for table in csv.DictReader(file)}


def _row(table: dict[str, str]) -> Row:
    counts = {
        key: int(table[key]) for key in ("gpus", "micro_batch", "sequence_length", "accumulation")
    }
    return Row(**(table | counts | {"peak": float(table["peak"])}))  # type: ignore[arg-type]


@cache
def _answers(scenario_of: str, *, is_traced: bool) -> tuple[MemoryVerdict, MemoryVerdict]:
    row = rows()[scenario_of]
    scenario = row.traced() if is_traced else row.scenario()
    program = plan(scenario, device="cuda")
    return assess_program(program, scenario.cluster), assess_program(
        program, scenario.cluster, expandable_segments=True
    )


def answers(row: Row, *, is_traced: bool = True) -> tuple[MemoryVerdict, MemoryVerdict]:
    """The simulator's answer, without and with expandable segments. Rows that differ in what is not
    modelled share one."""
    alike = (row.framework, row.gpus, row.micro_batch)
    first = next(
        other for other in rows().values()
        if (other.framework, other.gpus, other.micro_batch) == alike
    )
    return _answers(first.row, is_traced=is_traced)


def besides(row: Row) -> int:
    """Bytes that the framework is known to hold and that no strategy here has.

    nanotron: one float32 buffer for all gradients, always; ours are bf16, and gone between steps.
    """
    if row.framework != "nanotron":
        return 0
    held = answers(row)[0].by_kind["gradients"]
    return 4 * row.scenario().model.num_parameters - held


def errors(row: Row, *, is_traced: bool = True) -> tuple[float, float]:
    """Predicted over measured, less 1, in percent, with expandable segments and without."""
    more = besides(row) if is_traced else 0
    segments, expandable = (
        round(100 * ((verdict.reserved_bytes + more) / GIB / row.peak - 1), 1)
        for verdict in answers(row, is_traced=is_traced)
    )
    return expandable, segments


def table(chosen: Iterable[Row]) -> str:
    """The error table as Markdown; reserved bytes and errors with expandable segments and without.
    """
    head = (
        "| run | GPUs | micro-batch | measured, GiB | allocated, GiB | reserved, GiB | error | "
        "scenario alone |",
        "|---|---|---|---|---|---|---|---|",
    )
    return "\n".join((*head, *map(_line, chosen)))


def _line(row: Row) -> str:
    more = besides(row)
    segments, expandable = ((verdict.reserved_bytes + more) / GIB for verdict in answers(row))
    cells = (
        f"{row.framework} {row.model}, {row.mode}{', held out' if row.use == 'held out' else ''}",
        f"{row.gpus}", f"{row.micro_batch}", f"{row.peak:.1f}",
        f"{(answers(row)[0].allocated_bytes + more) / GIB:.1f}",
        f"{expandable:.1f} to {segments:.1f}", "{:+.1f} to {:+.1f} %".format(*errors(row)),
        "{:+.1f} to {:+.1f} %".format(*errors(row, is_traced=False)),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(f"{table(rows().values())}\n")
