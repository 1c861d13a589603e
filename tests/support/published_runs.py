"""Scenarios that the texts on ZeRO and FSDP speak of, in the product's own terms."""

from __future__ import annotations

from typing import Any

from zsim.ir.ledger import Ledger
from zsim.ir.program import Program
from zsim.scenario.scenario import Scenario


def scenario(
    preset: str = "llama-2-7b", *, micro_batch: int = 4, sequence_length: int = 2048,
    cluster: str = "dgx-a100", nodes: int = 1, checkpointing: str = "none",
    attention: str | None = None, **strategy: Any,
) -> Scenario:
    """A model in bf16 on 80 GB GPUs."""
    model = {"preset": preset} | ({"attention": attention} if attention else {})
    return Scenario(
        model=model, batch={"micro_batch": micro_batch, "sequence_length": sequence_length},
        cluster={"preset": cluster, "nodes": nodes}, strategy=strategy,
        precision={"parameters": "bf16", "reduce": "bf16"},
        activation_checkpointing={"mode": checkpointing},
    )


def kept_and_peak_activations(program: Program) -> tuple[int, int]:
    """Bytes of activations of rank 0 at the end of the steady step's forward, and the most there
    ever are in it."""
    rank = program.of_rank(0)
    last = max(op.index for op in rank.steady if op.kind == "forward")
    ledger, kept, peak = Ledger(), 0, 0
    for op in (*rank.construction, *rank.first):
        ledger.apply(op)
    for op in rank.steady:
        ledger.apply(op)
        peak = max(peak, ledger.by_kind["activations"])
        if op.index == last:
            kept = ledger.by_kind["activations"]
    return kept, peak
