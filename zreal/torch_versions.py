"""Differences of older versions of torch from the one whose Programs zsim makes, by strategy.

A check that such a difference would fail is not made, and says why; a scenario whose collectives
would differ is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zsim.errors import BackendUnavailableError
from zsim.ir.ops import Free, Op
from zsim.models.training_options import Device
from zsim.runs.compare.compare import OTHER_PEAKS
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.version import TORCH


def other_peaks(scenario: Scenario, *, device: Device) -> dict[str, str]:
    """Provenance of a Run whose torch frees otherwise within a step than the Program does."""
    reason = _PEAKS[scenario.strategy](scenario, device) if scenario.strategy in _PEAKS else ""
    told = f"torch {torch.__version__} {reason}; the Program is that of torch {TORCH}"
    return {OTHER_PEAKS: told} if reason else {}


def require_version(scenario: Scenario) -> None:
    """BackendUnavailableError where this torch issues other collectives than the Program has."""
    in_part = scenario.model.waits_for_idle if scenario.strategy in _PEAKS else ()
    if in_part and torch.__version__ < "2.13":
        raise BackendUnavailableError(
            where=f"strategy {scenario.strategy}, model.unused",
            expected="torch >=2.13, which ends groups of which only some modules run",
            found=f"torch {torch.__version__}",
            remedy="upgrade torch, or leave each unused block a group of its own",
        )


def _fully_shard(scenario: Scenario, device: Device) -> str:
    """What an older fully_shard keeps of a reduce-scatter that 2.13 frees."""
    if torch.__version__ < "2.12":
        program = plan(scenario, device=device).of_rank(0)
        if any(_frees_between(ops) for ops in (program.first, program.steady)):
            return "keeps what a reduce-scatter read beyond units that reduce nothing"
    elif torch.__version__ < "2.13":
        return "keeps what a reduce-scatter read until the next one has run"
    return ""


def _frees_between(ops: Sequence[Op]) -> bool:
    """True where the input of a reduce-scatter goes by itself before the last backward op."""
    last = max((op.index for op in ops if op.kind == "backward"), default=0)
    return any(
        op.kind == "free" and op.index < last
        and any(isinstance(e, Free) and e.buffer.endswith(".reduce_input") for e in op.memory)
        for op in ops
    )


_PEAKS: dict[str, Callable[[Scenario, Device], str]] = {
    "fsdp2": _fully_shard, "hsdp": _fully_shard,
}
