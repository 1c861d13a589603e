"""What the hooks of units call in a block of which outputs are kept, as torch's selective
activation checkpointing counts it.

It numbers the calls of each operator in forward, and refuses a recomputation that has one more:
torch/utils/checkpoint.py, _CachedTorchDispatchMode. The operators of the model are the same both
times, those of fully_shard's hooks are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from zsim.errors import ScenarioError
from zsim.strategies.building.training import Training

RECORD: Final = "profiler._record_function_enter_new"
"""Every step of a hook is recorded for the profiler, whether that runs or not."""
GATHER: Final = "fsdp.all_gather_copy_in"
COPY_OUT: Final = "fsdp.split_with_sizes_copy"


def watched(training: Training) -> Mapping[str, str]:
    """By unit in a block of which some outputs are kept: the run of that block."""
    asked, model = training.checkpointing, training.model
    blocks = asked.applies_to(model) if asked.save else frozenset[str]()
    return {part.fqn: part.whole for part in model.modules if part.inside and part.within in blocks}


@dataclass(slots=True, kw_only=True)
class HookCalls:
    """The calls of one micro-batch's hooks, by run of a block; nothing is counted outside of
    `watched` units."""

    watched: Mapping[str, str] = field(default_factory=dict)
    in_forward: dict[str, Counter[str]] = field(default_factory=dict)
    now: Counter[str] | None = None
    """Where calls are counted at the moment."""

    def enter(self, part: str) -> None:
        """What comes is the forward of `part`."""
        whole = self.watched.get(part)
        self.now = None if whole is None else self.in_forward.setdefault(whole, Counter())

    def again(self) -> None:
        """What comes is a recomputation, if there is one."""
        self.now = Counter() if self.watched else None

    def count(self, *called: str) -> None:
        """A hook makes these calls."""
        if self.now is not None:
            self.now.update(called)

    def require_found(self, whole: str) -> None:
        """ScenarioError where the recomputation of `whole` has made a call more than its forward.
        """
        again, self.now = self.now or Counter(), None
        before = self.in_forward.get(whole, Counter())
        for called, times in again.items():
            if times > before[called]:
                raise ScenarioError(
                    (
                        "activation_checkpointing.save: expected hooks of units in a block to "
                        "call no more while it is recomputed than in "
                        f'forward, as torch 2.13 requires ("{called} … encountered during '
                        f'backward but not found in storage"), found '
                        f'{times} calls and {before[called]} in {whole}; use mode = "full", '
                        f'reshard_after_forward = false, or other '
                        "wrapping.nested units",
                    )
                )
