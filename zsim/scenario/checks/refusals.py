"""The one list of refusals: parts of a scenario that are right alone and do not go together.

It holds for scenarios from files and from Python, and for those that analyses derive. Each
function yields one line for each refusal, with the scenario's key in front; a new one is a line in
`REFUSALS`. A strategy refuses in its own file. What is wrong in one table alone is refused where
that table is read: `scenario.keys`, `scenario.parts`, `models.wrapping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from zsim import strategies
from zsim.autograd.aten.sdpa import kernel_problem
from zsim.autograd.traced.model import FAMILY, TracedModel
from zsim.engine.costs import kernel_time
from zsim.engine.faults.fault import LostLink, SlowLink
from zsim.errors import ZsimError, listed
from zsim.models import checkpointing
from zsim.models.saving import Checkpoint
from zsim.models.spec import TRANSFORMERS, ModelSpec
from zsim.models.training_options import DTYPE_NAMES
from zsim.models.wrapping import Wrapping
from zsim.scenario.checks import checkpoint_checks, fault_checks, huggingface_checks, offload_checks
from zsim.scenario.checks.work_limits import work
from zsim.strategies import STRATEGIES

OWN_CALLS = {
    FAMILY: "for a trace has the calls that its module makes",
    TRANSFORMERS: "for a module of transformers has norms and a loss of its own",
}
"""Families whose norms and loss have no other form, and the reason."""

Refuses = Callable[[Any], Iterator[str]]
"""Takes a Scenario, or the parts of one that is being made."""


def problems(parts: Any) -> tuple[str, ...]:
    """Refusals of the `parts` of a scenario, or of a whole Scenario, one line each.

    One whose parts are not all there (None) is left out.
    """
    refusals = [
        line
        for refuses, needed in REFUSALS.items()
        if all(getattr(parts, name) is not None for name in needed)
        for line in refuses(parts)
    ]
    return tuple(refusals)


def _strategy(parts: Any) -> Iterator[str]:
    """The strategy's options on this mesh and with this optimizer."""
    yield from strategies.problems(
        parts.strategy, parts.options, mesh=parts.mesh, optimizer=parts.optimizer
    )


def _wrapping(parts: Any) -> Iterator[str]:
    """Units of a strategy whose runtime has each module for one."""
    if STRATEGIES[parts.strategy].nests == "modules" and parts.wrapping != Wrapping():
        yield (
            f"wrapping: expected none with {parts.strategy}, which gathers each module that owns "
            "parameters by itself"
        )


def _momentum(parts: Any) -> Iterator[str]:
    if parts.optimizer.name == "adamw" and parts.optimizer.momentum:
        yield (
            "optimizer.momentum: expected only with sgd, found with adamw, whose betas are torch's "
            "defaults"
        )


def _adamw8bit(parts: Any) -> Iterator[str]:
    """torchao's AdamW steps tensors on the device, in a way of its own."""
    optimizer, strategy = parts.optimizer, parts.strategy
    if optimizer.name != "adamw8bit":
        return
    if optimizer.momentum or optimizer.implementation != "foreach":
        key = "momentum" if optimizer.momentum else "implementation"
        yield f"optimizer.{key}: expected none with adamw8bit, which has one way to step"
    if STRATEGIES[strategy].wraps_optimizer:
        able = sorted(n for n, each in STRATEGIES.items() if not each.wraps_optimizer)
        yield (
            f"optimizer.name: expected adamw or sgd with {strategy}, which wraps the optimizer, "
            f"found adamw8bit; it is modelled with {listed(able, 'and')}"
        )
    if parts.offload.states or STRATEGIES[strategy].offloads(parts.options):
        yield "optimizer.name: expected adamw or sgd with states in host memory, found adamw8bit"


def _checkpointing(parts: Any) -> Iterator[str]:
    """Blocks that cannot be recomputed so, with the leaves of autograd that the strategy makes."""
    casts = parts.precision.autocast != "none" and STRATEGIES[parts.strategy].leaves
    yield from checkpointing.problems(
        parts.checkpointing, parts.model, casts=casts, forwards=parts.batch.forwards
    )


def _autocast(parts: Any) -> Iterator[str]:
    """Autocast casts float32 weights: two-byte weights stay as they are."""
    if parts.precision.autocast != "none" and parts.precision.parameters != "float32":
        yield (
            'precision.autocast: expected only with parameters = "fp32", of which it makes '
            f'two-byte copies, found with "{DTYPE_NAMES[parts.precision.parameters]}"'
        )


def _master(parts: Any) -> Iterator[str]:
    """Two-byte parameters alone may have no float32 ones that the optimizer steps."""
    if parts.precision.master:
        return
    if parts.precision.parameters == "float32":
        yield 'precision.master: expected true with parameters = "fp32", which are stepped anyway'
    if not STRATEGIES[parts.strategy].steps_two_bytes:
        yield (
            f"precision.master: expected true with {parts.strategy}, whose two-byte parameters "
            "alone are not modelled; use fsdp2"
        )


def _execution(parts: Any) -> Iterator[str]:
    """Kernels that the device has not, or that a model brings itself."""
    execution, model = parts.execution, parts.model
    yield from kernel_time.problems(execution, parts.cluster.device)
    if model.family in OWN_CALLS:
        for key in ("norms", "loss"):
            if getattr(execution, key) != "fused":
                yield f"execution.{key}: expected fused, {OWN_CALLS[model.family]}"
    if execution.accumulation == "fp32" and not parts.precision.master:
        yield (
            "execution.accumulation: expected eager without precision.master, found fp32; the "
            "optimizer steps two-byte parameters by gradients of their own dtype"
        )
    if execution.loss != "fused" and parts.precision.autocast != "none":
        yield (
            "execution.loss: expected fused with precision.autocast, found composite; autocast "
            "runs its single calls in other dtypes"
        )
    if model.family == FAMILY and execution.softmax != "eager":
        yield f"execution.softmax: expected eager, {OWN_CALLS[FAMILY]}"
    elif execution.softmax != "eager" and not _has_explicit_attention(model):
        yield (
            "execution.softmax: expected eager, for only explicit attention has a softmax of its "
            'own; set model.attention = "explicit"'
        )


def _has_explicit_attention(model: ModelSpec) -> bool:
    return any(
        op.kind == "attention" and op.implementation == "explicit"
        for module in model.modules
        for op in module.operators
    )


def _huggingface(parts: Any) -> Iterator[str]:
    """Keys that a Hugging Face model does not have."""
    yield from huggingface_checks.problems(
        parts.model, batch=parts.batch, autocast=DTYPE_NAMES[parts.precision.autocast],
        checkpointing=parts.checkpointing, wrapping=parts.wrapping, unused=parts.model.idle,
    )


def _traced(parts: Any) -> Iterator[str]:
    """A traced model is one of a batch, a dtype, an autocast, and of some ways to recompute."""
    if not isinstance(parts.model, TracedModel):
        return
    strategy = STRATEGIES[parts.strategy]
    try:
        parts.model.modules_for(
            parts.batch, dtype=parts.precision.parameters,
            casts_input=strategy.casts(parts.precision),
            unit_hooks=strategy.unit_hooks, autocast=parts.precision.autocast,
            checkpointing=parts.checkpointing,
        )
    except ZsimError as error:
        yield f"model.traced: {error}"


def _model(parts: Any) -> Iterator[str]:
    """Models that the strategy cannot train, such as one with a block that forward skips."""
    yield from strategies.problems(
        parts.strategy, parts.options, model=parts.model, checkpointing=parts.checkpointing,
        precision=parts.precision, batch=parts.batch, sync=parts.sync,
    )


def _nodes(parts: Any) -> Iterator[str]:
    """Models and dtypes that the strategy cannot train on nodes of this size."""
    yield from STRATEGIES[parts.strategy].node_problems(
        parts.options, parts.model, parts.mesh, parts.precision, parts.cluster.devices_per_node
    )


def _work(parts: Any) -> Iterator[str]:
    """Scenarios that would take minutes to simulate."""
    needed = work(
        parts.model, strategy=parts.strategy, options=parts.options, mesh=parts.mesh,
        batch=parts.batch,
    )
    if problem := needed.problem():
        yield f"{needed.key}: {problem}"


def _kernels(parts: Any) -> Iterator[str]:
    """Attention kernels that torch has not for this dtype on this device."""
    if missing := kernel_problem(parts.model, parts.precision, device=parts.cluster.kind):
        yield missing


def _faults(parts: Any) -> Iterator[str]:
    """Faults of ranks that the mesh has not, and those that are told twice."""
    yield from fault_checks.rank_problems(parts.faults, parts.mesh)


def _expectations(parts: Any) -> Iterator[str]:
    """Steps that are not to end and have no fault, or are to have figures; a rank at fault that is
    none."""
    expected = {entry.name: entry.value for entry in parts.expect}
    unended = expected.get("ends") == 0
    if unended and not parts.faults:
        yield "expect.ends: expected true of a step without [[faults]], found false"
    for name in expected if unended else ():
        if name not in ("ends", "at_fault"):
            yield f"expect.{name}: expected none of a step that does not end, found {name}"
    if "at_fault" in expected:
        if all(isinstance(fault, SlowLink | LostLink) for fault in parts.faults):
            yield "expect.at_fault: expected in [[faults]] one of a rank, found none"
        elif expected["at_fault"] >= parts.mesh.world_size:
            yield (
                f"expect.at_fault: expected 0 to {parts.mesh.world_size - 1}, found "
                f"{expected['at_fault']}"
            )


def _offload(parts: Any) -> Iterator[str]:
    """States that a strategy cannot offload, or that make no sense in host memory."""
    yield from offload_checks.problems(
        parts.offload, strategy=parts.strategy, mesh=parts.mesh, optimizer=parts.optimizer,
        precision=parts.precision, model=parts.model, checkpointing=parts.checkpointing,
        options=parts.options, cluster=parts.cluster,
    )


def _checkpoint(parts: Any) -> Iterator[str]:
    """Checkpoints that the strategy or the cluster cannot have, where the scenario asks for any."""
    if parts.checkpoint != Checkpoint(format=STRATEGIES[parts.strategy].checkpoint_format):
        yield from checkpoint_checks.problems(parts)


REFUSALS: dict[Refuses, tuple[str, ...]] = {
    _strategy: ("strategy", "options", "mesh", "optimizer"),
    _wrapping: ("strategy", "wrapping"),
    _momentum: ("optimizer",),
    _adamw8bit: ("optimizer", "strategy", "options", "offload"),
    _checkpointing: ("model", "checkpointing", "batch", "precision", "strategy"),
    _autocast: ("precision",),
    _master: ("precision", "strategy"),
    _execution: ("execution", "cluster", "model", "precision"),
    _offload: (
        "offload", "strategy", "mesh", "optimizer", "precision", "model", "checkpointing",
        "options", "cluster",
    ),
    _huggingface: ("model", "batch", "precision", "checkpointing", "wrapping"),
    _traced: ("model", "batch", "precision", "checkpointing", "strategy"),
    _model: ("model", "options", "batch", "precision", "strategy", "checkpointing"),
    _nodes: ("strategy", "options", "model", "mesh", "precision", "cluster"),
    _work: ("model", "strategy", "options", "mesh", "batch"),
    _kernels: ("model", "precision", "cluster"),
    _checkpoint: ("checkpoint", "strategy", "cluster", "optimizer", "offload"),
    _faults: ("faults", "mesh"), _expectations: ("expect", "faults", "mesh"),
}
"""Each function that refuses, and the parts that it needs."""
