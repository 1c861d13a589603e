"""What would help: each change that a user could make, planned and simulated again; nothing is recited.

A change that saves nothing says where the peak is instead. It knows which changes there are, and reads their effects off
Programs and Runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from zsim import checkpointing, plan, wrapping
from zsim.answer import Answer, Verdict, answer
from zsim.checkpointing import Checkpointing
from zsim.mesh import Mesh
from zsim.run import RunOptions
from zsim.scenario import Scenario
from zsim.simulator import SimBackend
from zsim.strategies import STRATEGIES, model_problems
from zsim.traced import TracedModel, TracedModelError

LADDER = ("ddp", "zero1", "zero2", "zero3")
"""Each stage shards one thing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One change: what is saved of what is needed, and what the step takes more, both negative when it is the other way.

    Of the peak of allocated bytes `saved_allocated_bytes` are saved, which may fit in the very segments that were needed before.
    """

    change: str
    saved_bytes: int
    saved_allocated_bytes: int
    added_ns: int
    needed_bytes: int
    verdict: Verdict
    peak_at: str


def advice(scenario: Scenario) -> tuple[Effect, ...]:
    """The effect of every change that the scenario allows, those that save most first."""
    before, before_ns = assess(scenario)
    effects = []
    for change, other in changes(scenario):
        if refusals(other):
            continue
        after, after_ns = assess(other)
        effects.append(
            Effect(
                change=change,
                saved_bytes=before.needed.nbytes - after.needed.nbytes,
                saved_allocated_bytes=before.allocated_bytes - after.allocated_bytes,
                added_ns=after_ns - before_ns,
                needed_bytes=after.needed.nbytes,
                verdict=after.verdict,
                peak_at=after.peak_at,
            )
        )
    return tuple(sorted(effects, key=lambda effect: -effect.saved_bytes))


def assess(scenario: Scenario) -> tuple[Answer, int]:
    """What the scenario needs, and its step time in ns."""
    program = plan.plan(scenario, device=scenario.cluster.kind)
    run = SimBackend().run(scenario, options=RunOptions())
    return answer(program, scenario.cluster), run.step_time_ns or 0


def changes(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Every single change that makes sense here, with the scenario that it makes."""
    if scenario.strategy in LADDER[:-1]:
        stage = LADDER[LADDER.index(scenario.strategy) + 1]
        yield f"strategy {stage}", moved(scenario, stage, **_shared(scenario, stage))
    if scenario.strategy == "hsdp":
        yield "strategy fsdp2: shard over all ranks", moved(scenario, "fsdp2", **_shared(scenario, "fsdp2"))
    if hasattr(scenario.options, "reshard_after_forward") and scenario.options.reshard_after_forward is not True:
        yield "reshard_after_forward = true", _with_option(scenario, reshard_after_forward=True)
    on_device = scenario.cluster.kind != "cpu"
    if on_device and getattr(scenario.options, "offload", True) is False:
        yield "offload = true: states and the optimizer's step go to the host", _with_option(scenario, offload=True)
    if hasattr(scenario.options, "gradient_as_bucket_view") and not scenario.options.gradient_as_bucket_view:
        yield "gradient_as_bucket_view = true", _with_option(scenario, gradient_as_bucket_view=True)
    if scenario.checkpointing != Checkpointing(mode="full") and can_checkpoint(scenario):
        yield "activation checkpointing of every block", replace(scenario, checkpointing=Checkpointing(mode="full"))
    batch = scenario.batch
    if batch.micro_batch % 2 == 0 and can_checkpoint(scenario, whole=True):
        halved = replace(batch, micro_batch=batch.micro_batch // 2, accumulation=2 * batch.accumulation)
        yield "half the micro-batch, twice the accumulation", replace(scenario, batch=halved)
    if scenario.wrapping.every != 1:
        by_block = replace(scenario.wrapping, every=1)
        model = wrapping.wrapped(scenario.model, by_block)
        yield "wrapping.every = 1: one param group per block", replace(scenario, wrapping=by_block, model=model)
    optimizer = scenario.optimizer
    if optimizer.name == "adamw" and optimizer.implementation != "fused":
        yield "fused optimizer", replace(scenario, optimizer=replace(optimizer, implementation="fused"))


def refusals(scenario: Scenario) -> tuple[str, ...]:
    """What a scenario file that asks for this would be refused for: what its parts cannot do together."""
    strategy, precision, batch = STRATEGIES[scenario.strategy], scenario.precision, scenario.batch
    if isinstance(scenario.model, TracedModel):
        try:
            casts = strategy.casts_input
            scenario.model.modules_for(batch, dtype=precision.parameters, casts_input=casts, autocast=precision.autocast)
        except TracedModelError as error:
            return (str(error),)
    return (
        *strategy.problems(scenario.options, scenario.mesh, scenario.optimizer),
        *checkpointing.problems(
            scenario.checkpointing, scenario.model, casts=precision.autocast != "none", forwards=batch.forwards
        ),
        *model_problems(
            scenario.strategy,
            scenario.options,
            scenario.model,
            casts=precision.reduce != precision.parameters,
            waits=scenario.sync == "last" and batch.accumulation > 1,
        ),
    )


def can_checkpoint(scenario: Scenario, *, whole: bool = False) -> bool:
    """Whether the model is one of ours, with blocks; a traced one is what it was traced as."""
    ours = scenario.model.family != "traced"
    return ours and (whole or bool(scenario.model.blocks))


def moved(scenario: Scenario, strategy: str, **options: Any) -> Scenario:
    """The scenario under another strategy over all its ranks, with that strategy's defaults but for `options`."""
    axis = STRATEGIES[strategy].axes[-1]
    mesh = Mesh(**{axis: scenario.world_size})
    return replace(scenario, strategy=strategy, options=STRATEGIES[strategy].options(**options), mesh=mesh)


def _shared(scenario: Scenario, strategy: str) -> dict[str, Any]:
    """The options that the scenario's strategy and another have both, as the scenario gives them."""
    theirs = {field.name for field in fields(STRATEGIES[strategy].options)}
    return {field.name: getattr(scenario.options, field.name) for field in fields(scenario.options) if field.name in theirs}


def _with_option(scenario: Scenario, **option: Any) -> Scenario:
    kept = {field.name: getattr(scenario.options, field.name) for field in fields(scenario.options)}
    return replace(scenario, options=type(scenario.options)(**(kept | option)))
