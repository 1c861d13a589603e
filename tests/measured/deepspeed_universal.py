"""Universal checkpoints of DeepSpeed on gloo ranks of this machine:
`python -m tests.measured.deepspeed_universal`.

It needs the extra `deepspeed`. Each row of the record is a scenario that ranks save and convert,
with loads by other ranks. A test predicts them anew.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zreal.processes import launch
from zsim.scenario.scenario import Scenario, parse

FILE = Path(__file__).with_suffix(".json")
RANKS = "tests.zreal.checkpoints.universal_ranks"
MLP: dict[str, Any] = {
    "model": {"family": "mlp", "sizes": {"dims": [5, 7, 6], "hidden": 9, "num_classes": 3}},
    "batch": {"micro_batch": 1},
}
GPT: dict[str, Any] = {
    "model": {"family": "gpt", "sizes": {"num_layers": 1, "hidden_size": 8, "num_heads": 2,
                                         "vocabulary": 13}},
    "batch": {"micro_batch": 1, "sequence_length": 8},
}
BF16: dict[str, Any] = {"precision": {"parameters": "bf16", "reduce": "fp32"}}
CASES: tuple[tuple[dict[str, Any], dict[str, Any], int, tuple[int, ...]], ...] = (
    (MLP | BF16, {"name": "deepspeed1"}, 4, (2, 4)),
    (GPT, {"name": "deepspeed1"}, 2, (3,)),
    (MLP | BF16, {"name": "deepspeed2"}, 2, (1, 3)),
    (MLP | BF16, {"name": "deepspeed3"}, 2, (3,)),
    (MLP | BF16, {"name": "deepspeed3", "sub_group_size": 60}, 3, (2, 4)),
    (GPT | BF16, {"name": "deepspeed3"}, 4, (2,)),
)
"""Models, strategies, the ranks that save, and those that load."""


def scenario(
    tables: dict[str, Any], strategy: dict[str, Any], num_ranks: int, *, form: str = "universal"
) -> Scenario:
    """A scenario whose conversion, if any, has one process for each of its phases."""
    workers = {"extract_workers": 1, "merge_workers": 1} if form == "universal" else {}
    return Scenario(
        **tables, cluster={"preset": "cpu-gloo", "ranks": num_ranks},
        strategy=strategy | {"reduce_bucket_size": 5000},
        checkpoint={"format": form, **workers},
    )


def measured(saving: Scenario, on: tuple[int, ...]) -> dict[str, Any]:
    """A row: what the ranks of `saving` save and convert, and its loads by each number of ranks.

    It raises AssertionError where a rank has loaded other states than have been saved, or other
    weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = launch.launch(
            f"{RANKS}:saved_rank", {"text": saving.to_toml(), "folder": folder},
            world_size=saving.world_size, timeout_s=300,
        )[0]
        states, weights = saved.pop("states"), saved.pop("weights")
        loads = {}
        for number in on:
            text = saving.with_(cluster={"ranks": number}).to_toml()
            loads[str(number)] = launch.launch(
                f"{RANKS}:loaded_rank", {"text": text, "folder": folder}, world_size=number,
                timeout_s=300,
            )
            for load in loads[str(number)]:
                assert load.pop("states") == states
                assert load.pop("weights") == weights
    return {"text": saving.to_toml(), "saved": saved, "loads": loads}


def scenario_of(row: dict[str, Any]) -> Scenario:
    """The scenario of a row."""
    return parse(row["text"].encode(), where="row.toml")


def main() -> None:
    """Measure all cases and write the record."""
    rows = [measured(scenario(*case[:3]), case[3]) for case in CASES]
    record = {"deepspeed": version("deepspeed"), "rows": rows}
    FILE.write_text(json.dumps(record, indent=0) + "\n")


if __name__ == "__main__":
    main()
