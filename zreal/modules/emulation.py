"""Emulated compute: a module's forward and backward last as long as predicted, by a timer.

Ranks that share cores then do not fight for them, so that network, order and overlap are tested
alone. Outputs and gradients have their true shapes, and are zero.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zsim.cluster.cluster import ClusterSpec
from zsim.engine.costs.op_costs import Costs
from zsim.errors import BackendUnavailableError
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

OPTIMIZER = "optimizer.step()"
"""Key of the optimizer's time, which is no module's path."""


@dataclass(slots=True)
class Timers:
    """The timers of a module, by the path of what runs in it; they rest until `durations` are set.
    """

    durations: Mapping[str, list[int]] = field(default_factory=dict)
    """Nanoseconds of forward and backward, by path."""
    outputs: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    """Shape and dtype of the outputs of real compute, by path."""

    @property
    def running(self) -> bool:
        """True while timers take the place of compute."""
        return bool(self.durations)

    def note(self, path: str, output: Tensor) -> None:
        """Keep the shape and dtype of a real output."""
        self.outputs[path] = output.shape, output.dtype

    def run(self, path: str, x: Tensor, *parameters: Tensor) -> Tensor:
        """The emulated output of what runs at `path`."""
        return cast(
            Tensor,
            _Timed.apply(self.durations[path], *self.outputs[path], x, *parameters),
        )


class _Timed(torch.autograd.Function):
    """Zeros after a time, and zero gradients after another."""

    @staticmethod
    def forward(
        ctx: Any, durations: list[int], shape: torch.Size, dtype: torch.dtype, x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        start = time.perf_counter_ns()
        ctx.save_for_backward(x, *parameters)
        ctx.backward_ns = durations[1]
        output = torch.zeros(shape, dtype=dtype, device=x.device)
        _until(start + durations[0])
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        start = time.perf_counter_ns()
        gradients = [
            torch.zeros_like(tensor) if needs else None
            for tensor, needs in zip(ctx.saved_tensors, ctx.needs_input_grad[3:], strict=True)
        ]
        _until(start + ctx.backward_ns)
        return (None, None, None, *gradients)


def _until(deadline_ns: int) -> None:
    left = deadline_ns - time.perf_counter_ns()
    if left > 0:
        time.sleep(left / 10**9)


def is_running(model: nn.Module) -> bool:
    """True while timers take the place of compute in `model`."""
    timers = getattr(model, "timers", None)
    return isinstance(timers, Timers) and timers.running


def start(model: nn.Module, durations: Mapping[str, list[int]]) -> None:
    """Let timers take the place of compute in every module of `model`, from its next step on.

    An optimizer steps for real, and then waits until its time is over.
    """
    if not durations:
        return
    began: list[int] = []
    register_optimizer_step_pre_hook(lambda *_: began.append(time.perf_counter_ns()))
    register_optimizer_step_post_hook(lambda *_: _until(began.pop() + durations[OPTIMIZER][0]))
    for module in model.modules():
        timers = getattr(module, "timers", None)
        if isinstance(timers, Timers):
            timers.durations = durations


def durations(scenario: Scenario, cluster: ClusterSpec) -> dict[str, list[int]]:
    """Nanoseconds of forward and backward of each module on `cluster`, by its path, and of the
    optimizer's step. They include the host's time to issue the kernels.

    BackendUnavailableError for models and options whose modules do not run one after another.
    """
    costs = Costs(cluster=cluster, execution=scenario.executed_on(cluster))
    modules = [each for each in scenario.model.modules if each.within in ("", each.path)]
    ops = plan(scenario, device="cpu").of_rank(0).steady
    forwards, backwards = (
        [op for op in ops if op.kind == kind and op.micro_batch == 0]
        for kind in ("forward", "backward")
    )
    if scenario.checkpointing.mode != "none" or not (
        len(forwards) == len(backwards) == len(modules) == len(scenario.model.modules)
        and scenario.batch.forwards == 1
    ):
        raise BackendUnavailableError(
            where="compute emulated", expected="modules that run once each, one after another",
            found=f"{len(modules)} modules with {len(forwards)} forward and {len(backwards)} "
                  f"backward runs, checkpointing {scenario.checkpointing.mode}",
            remedy="leave out checkpointing, nested units and frozen parameters, or use "
                   "--compute real",
        )
    ns = {id(op): costs.issue_ns(op) + costs.compute_ns(op.kernels) for op in ops}
    stepped = sum(ns[id(op)] for op in ops if op.kind == "optimizer")
    return {OPTIMIZER: [stepped]} | {
        module.path: [ns[id(forward)], ns[id(backward)]]
        for module, forward, backward in zip(modules, forwards, reversed(backwards), strict=True)
    }
