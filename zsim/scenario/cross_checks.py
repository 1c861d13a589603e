"""What of a scenario's parts does not go together: options with a mesh, recomputation with a model,
kernels with a device.

Each check raises a ScenarioError with all that it has to say, by key; the parts by themselves are
right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zsim import strategies
from zsim.autograd.aten.sdpa import kernel_problem
from zsim.autograd.traced import FAMILY, TracedModel
from zsim.cluster.cluster import ClusterSpec
from zsim.engine import kernel_time
from zsim.engine.execution import Execution
from zsim.errors import ScenarioError, ZsimError
from zsim.ir.mesh import Mesh
from zsim.models import checkpointing
from zsim.models.checkpointing import Checkpointing
from zsim.models.spec import ModelSpec
from zsim.models.training_options import DTYPE_NAMES, Batch, Optimizer, Precision
from zsim.models.wrapping import Wrapping
from zsim.scenario import huggingface_checks
from zsim.scenario.schema import ModelTable
from zsim.scenario.work_limits import work
from zsim.strategies import STRATEGIES


def refuse(problems: Iterable[str]) -> None:
    """ScenarioError where there are any."""
    if found := tuple(problems):
        raise ScenarioError(found)


def check_strategy(strategy: Any, options: Any, mesh: Mesh, optimizer: Optimizer) -> None:
    """What the strategy refuses of its options on this mesh and with this optimizer."""
    problems = list(strategies.problems(strategy.name, options, mesh=mesh, optimizer=optimizer))
    if optimizer.name == "adamw" and optimizer.momentum:
        problems.append("optimizer.momentum: expected only with sgd, found with adamw, whose "
                        "betas are torch's defaults")
    refuse(problems)


def check_checkpointing(
    model: ModelSpec, asked: Checkpointing, batch: Batch, precision: Precision, strategy: Any
) -> None:
    """Blocks that cannot be recomputed as asked, with the leaves of autograd that the strategy
    makes."""
    casts = precision.autocast != "none" and STRATEGIES[strategy.name].leaves
    refuse(checkpointing.problems(asked, model, casts=casts, forwards=batch.forwards))


def check_precision(precision: Precision) -> None:
    """Autocast casts float32 weights: it leaves those that have two bytes already as they are."""
    if precision.autocast != "none" and precision.parameters != "float32":
        expected = 'expected only with parameters = "fp32", of which it makes two-byte copies'
        raise ScenarioError((f'precision.autocast: {expected}, found with '
                             f'"{DTYPE_NAMES[precision.parameters]}"',))


def check_execution(asked: Execution, cluster: ClusterSpec, model: ModelSpec) -> None:
    """Kernels that the device has not, and those that are asked of a model which has its own."""
    problems = list(kernel_time.problems(asked, cluster.device))
    if model.family == FAMILY:
        traced = "for a trace has the calls that its module makes"
        problems += [
            f"execution.{key}: expected fused, {traced}"
            for key in ("norms", "loss")
            if getattr(asked, key) != "fused"
        ]
        if asked.softmax != "eager":
            problems.append(f"execution.softmax: expected eager, {traced}")
    elif asked.softmax != "eager" and not _has_explicit_attention(model):
        expected = (
            'expected eager, for only explicit attention has a softmax of its own; set '
            'model.attention = "explicit"'
        )
        problems.append(f"execution.softmax: {expected}")
    refuse(problems)


def _has_explicit_attention(model: ModelSpec) -> bool:
    return any(
        op.kind == "attention" and op.implementation == "explicit"
        for module in model.modules
        for op in module.operators
    )


def check_transformers(
    model: ModelSpec, table: ModelTable, batch: Batch, precision: Precision, again: Checkpointing,
    units: Wrapping,
) -> None:
    """What is not known of a Hugging Face model."""
    refuse(
        huggingface_checks.problems(
            model, batch=batch, autocast=DTYPE_NAMES[precision.autocast], checkpointing=again,
            wrapping=units, unused=table.unused,
        )
    )


def check_traced(
    model: ModelSpec, batch: Batch, precision: Precision, again: Checkpointing, strategy: Any
) -> None:
    """A traced model is one of a batch, a dtype, an autocast, and of some ways to recompute."""
    if not isinstance(model, TracedModel):
        return
    traits = STRATEGIES[strategy.name]
    try:
        model.modules_for(
            batch,
            dtype=precision.parameters,
            casts_input=traits.casts_input and precision.parameters != "float32",
            unit_hooks=traits.unit_hooks,
            autocast=precision.autocast,
            checkpointing=again,
        )
    except ZsimError as error:
        raise ScenarioError((f"model.traced: {error}",)) from None


def check_model(
    model: ModelSpec, options: Any, batch: Batch, precision: Precision, strategy: Any,
    again: Checkpointing,
) -> None:
    """What the strategy does not do with such a model: a block that forward passes by, say."""
    refuse(
        strategies.problems(
            strategy.name, options, model=model, checkpointing=again, precision=precision,
            batch=batch, sync=strategy.sync,
        )
    )


def check_work(model: ModelSpec, strategy: Any, options: Any, mesh: Mesh, batch: Batch) -> None:
    asked = work(model, strategy=strategy.name, options=options, mesh=mesh, batch=batch)
    if problem := asked.problem():
        raise ScenarioError((f"{asked.key}: {problem}",))


def check_kernels(model: ModelSpec, precision: Precision, cluster: ClusterSpec) -> None:
    """Attention kernels that torch has not for this dtype on this device."""
    if missing := kernel_problem(model, precision, device=cluster.kind):
        raise ScenarioError((missing,))
