"""Other ways to train a scenario: each change that a user could make, as the scenario that it
makes.

Another strategy keeps every option of the scenario that it knows, and `dropped` names those that it
does not know. This module knows no bytes and no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from zsim.autograd.traced.model import TracedModel
from zsim.errors import key_of
from zsim.ir.mesh import Mesh
from zsim.models.called_modules import by_block
from zsim.models.checkpointing import Checkpointing
from zsim.models.saving import Checkpoint
from zsim.models.training_options import ON_DEVICE, Offload, Optimizer
from zsim.scenario.checks import refusals
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario
from zsim.strategies import ALONE, STRATEGIES, problems, wrapped
from zsim.strategies.strategy import OptionValue, Strategy

EVERY_BLOCK = Checkpointing(mode="full")
OFFLOADABLE = ("optimizer", "parameters", "activations")


def changes(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Every single change that makes sense here, with the scenario that it makes."""
    strategy, on_device = STRATEGIES[scenario.strategy], scenario.cluster.kind != "cpu"
    yield from (_sharded if scenario.world_size > 1 else _alone)(scenario)
    for saving in strategy.saves_memory:
        options = saving.set_in(scenario.options)
        offloads = strategy.offloads(options) and not strategy.offloads(scenario.options)
        if saving.is_set(scenario.options) or (
            offloads and (not on_device or scenario.optimizer.clip_norm)
        ):
            continue
        effect = f": {saving.effect}" if saving.effect else ""
        yield f"{assignment(saving)}{effect}", derived(scenario, options=options)
    if scenario.checkpointing != EVERY_BLOCK and can_checkpoint(scenario):
        yield (
            "activation checkpointing of every block",
            derived(scenario, checkpointing=EVERY_BLOCK),
        )
    elif on_device and _can_offload_inputs(scenario):
        offload = replace(scenario.offload, activations="checkpoint_inputs", pin_memory=True)
        yield 'offload.activations = "checkpoint_inputs"', derived(scenario, offload=offload)
    batch = scenario.batch
    # which is one of its batch
    if batch.micro_batch % 2 == 0 and not isinstance(scenario.model, TracedModel):
        halved = replace(
            batch, micro_batch=batch.micro_batch // 2, accumulation=2 * batch.accumulation
        )
        yield "half the micro-batch, twice the accumulation", derived(scenario, batch=halved)
    if scenario.wrapping.every != 1:
        by_block = replace(scenario.wrapping, every=1)
        model = wrapped(scenario.strategy, scenario.model, by_block)
        yield (
            "wrapping.every = 1: one param group per block",
            derived(scenario, wrapping=by_block, model=model),
        )
    optimizer = scenario.optimizer
    if optimizer.name == "adamw" and optimizer.implementation != "fused":
        yield (
            "fused optimizer",
            derived(scenario, optimizer=replace(optimizer, implementation="fused")),
        )
    if on_device and not scenario.expandable_segments:
        yield "allocator.expandable_segments = true", derived(scenario, expandable_segments=True)


def _sharded(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Strategies and meshes that shard more."""
    strategy, per_node = STRATEGIES[scenario.strategy], scenario.cluster.devices_per_node
    more, other = strategy.shards_more, strategy.over_all_ranks
    if more:
        same_axes = STRATEGIES[more].axes == strategy.axes
        mesh = scenario.mesh if same_axes else None
        yield f"strategy {more}", moved(scenario, more, mesh=mesh)
    if other and other != scenario.strategy:
        yield f"strategy {other}: shard over all ranks", moved(scenario, other)
    elif other and scenario.mesh.dp_replicate > 1:
        yield (
            f"dp_shard = {scenario.world_size}: shard over all ranks",
            moved(scenario, scenario.strategy),
        )
    nodes = scenario.world_size // per_node
    if other == scenario.strategy and scenario.mesh.dp_shard == per_node * nodes > per_node > 1:
        in_nodes = Mesh(dp_replicate=nodes, dp_shard=per_node)
        yield (
            f"dp_shard = {per_node}: shard over a node",
            moved(scenario, scenario.strategy, mesh=in_nodes),
        )


def _alone(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Strategies of one rank: a plain module, and the one that keeps its states in host memory."""
    offloading = STRATEGIES[scenario.strategy].offloaded_by
    if scenario.strategy != ALONE:
        yield f"strategy {ALONE}: one rank has nothing to shard", moved(scenario, ALONE)
    if offloading and scenario.cluster.kind != "cpu" and not scenario.optimizer.clip_norm:
        option = _offloading(STRATEGIES[offloading])
        assert option is not None
        on_device = moved(scenario, offloading)
        yield (
            f"strategy {offloading}, {assignment(option)}: {option.effect}",
            derived(on_device, options=option.set_in(on_device.options)),
        )


def can_checkpoint(scenario: Scenario) -> bool:
    """True where the model has blocks; for a traced one, where its trace has recomputed
    blocks."""
    model = scenario.model
    return (
        EVERY_BLOCK in dict(model.recomputing)
        if isinstance(model, TracedModel)
        else bool(model.blocks)
    )


def _can_offload_inputs(scenario: Scenario) -> bool:
    """True where every block is checkpointed, and its input could go to host memory."""
    return (
        scenario.checkpointing == EVERY_BLOCK and scenario.offload.activations is None
        and not isinstance(scenario.model, TracedModel)
    )


def moved(
    scenario: Scenario, strategy: str, *, mesh: Mesh | None = None, **options: Any
) -> Scenario:
    """The scenario under another strategy, over all its ranks or on `mesh`.

    `options` are set. Every other option of both strategies stays as it is, or has its default if
    the strategy refuses it on that mesh. States in host memory stay there, by the strategy's own
    option or by the table offload.
    """
    kind = STRATEGIES[strategy]
    mesh = mesh or Mesh(**dict.fromkeys(kind.axes[-1:], scenario.world_size))
    known = {field.name: field.type for field in fields(kind.options)}
    # fsdp1 says "pre" where fsdp2 counts
    same = {field.name for field in fields(scenario.options) if known.get(field.name) == field.type}
    kept = {name: value for name, value in _options(scenario).items() if name in same}
    own = _offloading(kind)
    if own and scenario.offload.optimizer == "cpu":
        kept[own.option] = own.value
    kept |= options
    refused = _refused(strategy, kind.options(**kept), mesh, scenario.optimizer) - options.keys()
    chosen = {name: value for name, value in kept.items() if name not in refused}
    model, nests = scenario.model, (STRATEGIES[scenario.strategy].nests, kind.nests)
    if nests[0] == "modules":
        model = by_block(model)
    if scenario.wrapping.nested or nests[1] == "modules":
        model = wrapped(strategy, model, scenario.wrapping, kind.options(**chosen))
    return _without_refused_keys(derived(scenario,
        strategy=strategy, options=kind.options(**chosen), mesh=mesh, model=model,
        sync=scenario.sync if scenario.sync in kind.syncs else next(iter(kind.syncs), "every"),
        offload=_offload_under(kind, scenario),
    ))


def _without_refused_keys(case: Scenario) -> Scenario:
    """`case` with defaults for keys of `offload` and `checkpoint` that are refused, where these are
    not.

    Places of states stay: without them it would be another way to train.
    """
    defaults = {"offload": ON_DEVICE, "checkpoint": _own_checkpoint(case)}
    if all(getattr(case, table) == part for table, part in defaults.items()):
        return case
    for refused in map(key_of, refusals.problems(case)):
        table, _, key = refused.partition(".")
        default = getattr(defaults.get(table), key, None)
        if key in OFFLOADABLE or getattr(getattr(case, table, None), key, None) == default:
            continue
        other = derived(case, **{table: replace(getattr(case, table), **{key: default})})
        if refused not in map(key_of, refusals.problems(other)):
            return _without_refused_keys(other)
    return case


def _own_checkpoint(scenario: Scenario) -> Checkpoint:
    """The checkpoint of a scenario that says nothing of it."""
    return Checkpoint(format=STRATEGIES[scenario.strategy].checkpoint_format)


def _offloading(kind: Strategy) -> OptionValue | None:
    """The strategy's own option that keeps its states in host memory."""
    return next(
        (each for each in kind.saves_memory if kind.offloads(each.set_in(kind.options()))), None
    )


def _offload_under(kind: Strategy, scenario: Scenario) -> Offload:
    """The part of the scenario's offloading that the strategy can do by the table. The rest stays
    on the device, and options that only the rest reads have their defaults."""
    offload = scenario.offload
    if _is_by_option(scenario) and scenario.cluster.kind != "cpu":
        offload = replace(offload, optimizer="cpu", parameters="cpu")
    devices = {state: getattr(offload, state) for state in offload.states}
    able = {"cpu": kind.offloadable, "nvme": kind.on_drives}
    kept = {state: device for state, device in devices.items() if state in able[device]}
    if "optimizer" in kept or (kept and kind.offloads_shards_alone):
        return replace(offload, parameters=kept.get("parameters"))
    if offload.activations:
        return Offload(activations=offload.activations, pin_memory=offload.pin_memory)
    return ON_DEVICE


def _is_by_option(scenario: Scenario) -> bool:
    """True where the strategy's own option keeps its states in host memory."""
    return STRATEGIES[scenario.strategy].offloads(scenario.options)


def offloaded_otherwise(before: Scenario, after: Scenario) -> tuple[str, ...]:
    """The assignments by which `after` keeps states in host memory that `before` keeps there by
    others: ("offload = true",)."""
    if _is_by_option(after) and before.offload.optimizer:
        own = _offloading(STRATEGIES[after.strategy])
        return (assignment(own),) if own else ()
    if _is_by_option(before) and after.offload.states:
        return _offloaded(after)
    return ()


def _offloaded(scenario: Scenario) -> tuple[str, ...]:
    return tuple(
        f'offload.{state} = "{value}"'
        for state in OFFLOADABLE
        if (value := getattr(scenario.offload, state))
    )


def dropped(before: Scenario, after: Scenario, *, way: str = "") -> tuple[str, ...]:
    """The options that `before` sets and that `after` does not have, or has at their default again:
    ("offload = true", …).

    An option that the same strategy could keep on that mesh was changed to its default, and is not
    dropped. One that `way` names is not either. Keys of `offload` go unsaid with the last state
    that they are about.
    """
    defaults = {field.name: field.default for field in fields(before.options)}
    there = {field.name: field.default for field in fields(after.options)}
    left = _options(after)
    moved_by_option = offloaded_otherwise(before, after) and _is_by_option(after)
    on_device = [
        line
        for line in _offloaded(before)
        if line not in _offloaded(after)
        and not (moved_by_option and "activations" not in line)
    ]
    own = _offloading(STRATEGIES[before.strategy]) if after.offload.states else None
    if after.offload.states or _is_by_option(after):
        on_device += _lost("offload", before.offload, after.offload, default=ON_DEVICE)
    on_device += _lost(
        "checkpoint", before.checkpoint, after.checkpoint, default=_own_checkpoint(before)
    )
    return (*on_device, *(
        f"{name} = {_toml(value)}"
        for name, value in _options(before).items()
        if value != defaults[name] and not (own and own.option == name) and name not in way
        and (
            name not in left
            or (
                left[name] == there[name]
                and left[name] != value
                and not _could_keep(before, after, name, value)
            )
        )
    ))


def _lost(table: str, before: Any, after: Any, *, default: Any) -> list[str]:
    """The keys of a table that `before` sets and `after` has otherwise, but for places of states.
    """
    names = [field.name for field in fields(default) if field.name not in OFFLOADABLE]
    return [
        f"{table}.{name} = {_toml(value)}" for name in names
        if (value := getattr(before, name)) not in (getattr(default, name), getattr(after, name))
    ]


def _could_keep(before: Scenario, after: Scenario, name: str, value: object) -> bool:
    """True where `after`, of the same strategy, could have the value that `before` has."""
    if after.strategy != before.strategy:
        return False
    return name not in _refused(
        after.strategy, replace(after.options, **{name: value}), after.mesh, after.optimizer
    )


def _refused(strategy: str, options: Any, mesh: Mesh, optimizer: Optimizer) -> set[str]:
    """The options that are refused on that mesh."""
    return {
        key_of(problem).removeprefix("strategy.")
        for problem in problems(strategy, options, mesh=mesh, optimizer=optimizer)
    }


def assignment(option: OptionValue) -> str:
    """The value of an option as a scenario file sets it: "offload = true"."""
    return f"{option.option} = {_toml(option.value)}"


def _toml(value: object) -> str:
    """`value` as a scenario file has it."""
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
    )


def _options(scenario: Scenario) -> dict[str, Any]:
    return {field.name: getattr(scenario.options, field.name) for field in fields(scenario.options)}
