"""A scenario whose model is replaced by a user's own module, traced for its precision."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import fields, replace

from zreal.modules.modules import cast_buffers
from zreal.modules.own.own_module import OwnModel, OwnModule, draws, load
from zreal.modules.own.user_code import add_location
from zreal.tracing.errors import UntraceableError
from zreal.tracing.trace import trace
from zreal.tracing.units.param_groups import UnitChoice
from zsim import strategies
from zsim.autograd.traced.model import TracedModel, TracedModelError
from zsim.errors import ArgumentError, ScenarioError
from zsim.models.training_options import Device
from zsim.scenario.checks import offload_checks
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario

INSIDE = (
    "say it in the function that makes the module: torch.utils.checkpoint, requires_grad_(False), "
    "units, or a forward that runs parts several times"
)


def with_module(
    scenario: Scenario, name: str, *, device: Device, like: str | None = None
) -> Scenario:
    """`scenario` with the module that the function `name` makes, and the batch of its inputs.

    ArgumentError where it cannot be loaded, or where the scenario with it has another fingerprint
    than `like`; UntraceableError where it cannot be traced, ScenarioError where the scenario's
    strategy refuses it. Its text stays that of the file.
    """
    for key in ("activation_checkpointing", "frozen", "wrapping"):
        if key in scenario.tables:
            raise ArgumentError(
                where=key, expected="none with an own module", found="some", remedy=INSIDE
            )
    if scenario.batch.forwards > 1:
        raise ArgumentError(
            where="batch.forwards", expected="1 with an own module",
            found=str(scenario.batch.forwards), remedy=INSIDE,
        )
    own = load(name)
    try:
        model = _traced(scenario, own, device=device)
    except UntraceableError as error:
        if own.whole:
            raise
        own = load(name, whole=f"on the meta device it is not traced: {error}")
        model = _traced(scenario, own, device=device)
    batch = replace(
        scenario.batch, micro_batch=model.batch.micro_batch,
        sequence_length=model.batch.sequence_length,
    )
    refusals = [
        *strategies.problems(
            scenario.strategy, scenario.options, mesh=scenario.mesh, optimizer=scenario.optimizer,
            model=model, precision=scenario.precision, batch=batch, sync=scenario.sync,
        ),
        *offload_checks.model_problems(scenario.offload, model),
    ]
    if refusals:
        raise ScenarioError(tuple(f"{scenario.name}: {problem}" for problem in refusals))
    made = derived(scenario, model=model, batch=batch)
    object.__setattr__(made, "_tables", scenario.tables)
    if like not in (None, made.fingerprint):
        raise ArgumentError(
            where=f"module {name[:60]}", expected=f"the module that was predicted, {like}",
            found=f"another one, {made.fingerprint}",
            remedy="look for a condition on the rank, the time or the environment in it",
        )
    return made


def _traced(scenario: Scenario, own: OwnModule, *, device: Device) -> OwnModel:
    """The module traced so that most strategies can be compared: by its units, with its inputs
    cast. Where it does not run so, the scenario's strategy alone has a say.

    DDP's reductions begin between backwards of units, but it has no rules of units: what breaks
    them is one unit for it.
    """
    strategy = strategies.STRATEGIES[scenario.strategy]
    casts = strategy.casts(scenario.precision)
    tries = [(own.units, casts)]
    if not casts and strategy.unit_hooks == "raw_inputs":  # it has a trace of its own for them
        tries.insert(0, (own.units, True))
    if strategy.nests == "nothing":
        tries.append(([], casts))
    for units, cast in tries[:-1]:
        with suppress(UntraceableError, TracedModelError):
            model = _in_units(scenario, own, units, casts_input=cast, device=device)
            model.modules_for(
                model.batch, dtype=model.dtype, casts_input=casts, autocast=model.autocast,
                unit_hooks=strategy.unit_hooks,
            )
            return model
    units, cast = tries[-1]
    return _in_units(scenario, own, units, casts_input=cast, device=device)


def _in_units(
    scenario: Scenario, own: OwnModule, units: UnitChoice, *, casts_input: bool, device: Device
) -> OwnModel:
    precision = scenario.precision
    module = own.make(scenario.seed)
    cast_buffers(module, scenario)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a module that is one unit: reports of it are enough
        try:
            model = trace(
                module, own.inputs, units=units, dtype=precision.parameters,
                loss=own.loss, autocast=precision.autocast, device=device,
                casts_input=casts_input,
                # a CPU is metered by a dispatch mode, under which the engine adds nothing in place
                sums_in_place=device == "cuda",
            )
        except UntraceableError as error:
            add_location(error, getattr(type(module), "forward", None))
            raise
    kept = {slot.name: getattr(model, slot.name) for slot in fields(TracedModel)}
    drawing = draws(own, model, seed=scenario.seed)
    return OwnModel(**kept, own=own, made_whole=bool(own.whole), draws=drawing)
