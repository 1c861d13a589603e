"""A scenario of fsdp2 or hsdp as a Python module: the calls of torch that shard a model so.

The module takes the model and its blocks; units, precision, prefetch, recomputation, optimizer and
accumulation are the scenario's.
"""

from __future__ import annotations

from collections.abc import Iterator

from zsim.configs.exported import Exported, Said, require_strategy
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

HEAD = '''\
"""{title}

Call parallelize(model, blocks) on every rank of torchrun, then training_step for each step.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
{imports}

ACCUMULATION = {accumulation}


def parallelize(
    model: nn.Module, blocks: Sequence[nn.Module], *, embedding: nn.Module | None = None,
    tail: Sequence[nn.Module] = (), device: str = "{device}",
) -> nn.Module:
    """`model` sharded in place; `blocks` in the order in which forward calls them{ends_doc}."""
'''
STEP = '''

def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; call it after parallelize."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.{optimizer}(parameters, {arguments})


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterable[Callable[[], torch.Tensor]]
) -> None:
    """One step: each of `losses`, {accumulation} of them, runs forward and returns the loss."""
    for index, loss in enumerate(losses):
{sync}        (loss() / ACCUMULATION).backward()
{clip}    optimizer.step()
    optimizer.zero_grad()
'''
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}


def write(scenario: Scenario) -> Exported:
    """The Python module; ScenarioError for a strategy that is not fully_shard's."""
    require_strategy(scenario, "fully_shard")
    keys = Said(scenario)
    keys.say("strategy", "precision.parameters", "precision.reduce", "precision.master", "wrapping",
             "batch.accumulation", "optimizer", "execution.compile", "cluster.nodes",
             "cluster.ranks")
    if scenario.execution.compiles_loss:
        keys.but("execution.compile", "the blocks are compiled here; compile the loss too")
    if scenario.wrapping.nested:
        keys.but("wrapping.nested", "shard them in each block before the block itself")
    body = "".join(f"    {line}\n" if line else "\n" for line in _parallelize(scenario, keys))
    name = scenario.name.replace("\\", "").replace('"', "")
    title = f"{scenario.strategy} of {scenario.model.name} on {scenario.world_size} ranks ({name})."
    apart = scenario.wrapping.ends == "apart"
    head = HEAD.format(
        title=title, imports="\n".join(_imports(scenario)), device=scenario.cluster.kind,
        accumulation=scenario.batch.accumulation,
        ends_doc=", `tail` the last norm and the head" if apart else "",
    )
    return Exported(
        kind="fully_shard", files={"": head + body + _step(scenario)}, unsaid=keys.unsaid()
    )


def _imports(scenario: Scenario) -> Iterator[str]:
    if scenario.checkpointing.mode == "full":
        yield "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ("
        yield "    apply_activation_checkpointing,"
        yield ")"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    offload = "CPUOffloadPolicy, " if scenario.options.offload else ""
    yield f"from torch.distributed.fsdp import {offload}MixedPrecisionPolicy, fully_shard"


def _parallelize(scenario: Scenario, keys: Said) -> Iterator[str]:
    """Lines of the function's body."""
    options, mesh, wrapping = scenario.options, scenario.mesh, scenario.wrapping
    checkpointing = scenario.checkpointing
    if checkpointing.mode == "full":
        every = f"[{checkpointing.every - 1}::{checkpointing.every}]"
        yield f"recomputed = {{id(block) for block in blocks{every}}}"
        yield "apply_activation_checkpointing(model, check_fn=lambda m: id(m) in recomputed)"
        keys.say("activation_checkpointing")
    elif checkpointing.mode == "selective":
        keys.but("activation_checkpointing", "wrap the blocks in torch's selective checkpointing")
    axes = [(axis, mesh.size(axis)) for axis in STRATEGIES[scenario.strategy].axes]
    names = ", ".join(f'"{name}"' for name, _ in axes)
    sizes = ", ".join(str(size) for _, size in axes)
    yield f"mesh = init_device_mesh(device, ({sizes},), mesh_dim_names=({names},))"
    yield f"policy = MixedPrecisionPolicy({_policy(scenario)})"
    extra = ""
    if options.reshard_after_forward != "auto":
        extra += f', "reshard_after_forward": {options.reshard_after_forward}'
    if options.offload:
        extra += ', "offload_policy": CPUOffloadPolicy()'
    yield f'options = {{"mesh": mesh, "mp_policy": policy{extra}}}'
    if wrapping.every == 1:
        yield "for block in blocks:"
        yield "    fully_shard(block, **options)"
    elif wrapping.every != "all":
        yield f"for start in range(0, len(blocks), {wrapping.every}):"
        yield f"    fully_shard(list(blocks[start : start + {wrapping.every}]), **options)"
    if wrapping.ends == "apart":
        yield "if embedding is not None:"
        yield "    fully_shard(embedding, **options)"
        yield "if tail:"
        yield "    fully_shard(list(tail), **options)"
    yield "fully_shard(model, **options)"
    yield from _prefetch(scenario)
    if scenario.execution.compile:
        yield "for block in blocks:"
        yield "    block.compile()"
    yield "return model"


def _policy(scenario: Scenario) -> str:
    """Dtypes of the policy; those of the shards are left out, which torch then casts nowhere."""
    precision = scenario.precision
    if precision.parameters == precision.reduce == precision.stepped:
        return ""
    narrow = "" if precision.parameters == precision.stepped else (
        f"param_dtype=torch.{precision.parameters}, "
    )
    return f"{narrow}reduce_dtype=torch.{precision.reduce}"


def _prefetch(scenario: Scenario) -> Iterator[str]:
    """Lines that set which units each gathers early."""
    forward, backward = scenario.options.forward_prefetch, scenario.options.backward_prefetch
    if not (forward or backward):
        return
    every = scenario.wrapping.every
    yield f"units = list(blocks[::{every if every != 'all' else 1}])"
    yield "for index, unit in enumerate(units):"
    if forward:
        yield f"    unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + {forward}])"
    if backward:
        yield f"    before = units[max(0, index - {backward}) : index]"
        yield "    unit.set_modules_to_backward_prefetch(before[::-1])"


def _step(scenario: Scenario) -> str:
    """Optimizer and step."""
    optimizer = scenario.optimizer
    arguments = [f"lr={optimizer.learning_rate}", f"weight_decay={optimizer.weight_decay}"]
    if optimizer.name == "sgd":
        arguments.append(f"momentum={optimizer.momentum}")
    arguments.append({
        "fused": "fused=True", "foreach": "foreach=True", "for-loop": "foreach=False"
    }[optimizer.implementation])
    sync = ""
    if scenario.batch.accumulation > 1 and scenario.sync == "last":
        sync += "        model.set_requires_gradient_sync(index == ACCUMULATION - 1)\n"
    if scenario.options.all_reduce_after == "last":
        sync += "        model.set_requires_all_reduce(index == ACCUMULATION - 1)\n"
    clip = ""
    if optimizer.clip_norm:
        clip = f"    nn.utils.clip_grad_norm_(model.parameters(), {optimizer.clip_norm})\n"
    return STEP.format(
        optimizer=OPTIMIZERS[optimizer.name], arguments=", ".join(arguments), sync=sync, clip=clip,
        accumulation=scenario.batch.accumulation,
    )
