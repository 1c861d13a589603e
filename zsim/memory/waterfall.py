"""Waterfall from the formula that everybody quotes (16Ψ/N and its kin) to the bytes that are
needed: one step per reason.

The formula is zsim.memory.formulas', the bytes are zsim.memory.fits's; each step says what the
formula leaves out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from zsim.memory.fits import MemoryVerdict
from zsim.memory.formulas import StateBytes, model_state_bytes
from zsim.models.training_options import DTYPE_NBYTES
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building.optimizers import state_names

STATES = ("parameters", "gradients", "optimizer_states")
WORDS: dict[str, str] = {
    "activations": "saved for backward",
    "unsharded_parameters": "gathered parameters",
    "unsharded_gradients": "whole gradients before they are reduced",
    "communication": "buffers of collectives",
    "temporaries": "live during one op: gradients of activations, scratch of the optimizer",
    "inputs": "the batch",
}


BUILT = {
    True: "assumes torch.cuda.empty_cache() once the model is built on the device",
    False: "assumes that the model is built elsewhere, on the meta device or in host memory",
}
"""Assumption about construction, by whether the device has room for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of the waterfall: what is added (or, negative, not there at the peak), and why. A
    `total` repeats the sum so far."""

    name: str
    nbytes: int
    reason: str
    total: bool = False


def state_bytes(scenario: Scenario) -> StateBytes:
    """Bytes per parameter that the formula counts, for the scenario's strategy, precision and
    optimizer."""
    compute, states = (
        DTYPE_NBYTES[scenario.precision.parameters], len(state_names(scenario.optimizer)),
    )
    is_8bit = scenario.optimizer.name == "adamw8bit"
    gradient = DTYPE_NBYTES[scenario.gradient_dtype]
    formula = STRATEGIES[scenario.strategy].formula
    if formula.keeps == "no master copy" or not scenario.precision.master:
        return StateBytes(
            parameter=compute, gradient=compute, optimizer=(1 if is_8bit else compute) * states
        )
    state = 1 if is_8bit else 4
    if formula.keeps == "float32 shards":
        return StateBytes(parameter=4, gradient=4, optimizer=state * states)
    master = 4 if formula.keeps == "master copy" and compute < 4 else 0
    return StateBytes(parameter=compute, gradient=gradient, optimizer=master + state * states)


def formula_bytes(scenario: Scenario, *, gradients: bool = True) -> int:
    """Parameters, gradients and optimizer states on one rank by the formula of the scenario's
    stage; without `gradients` the rest of them.

    What is frozen or unused counts as parameters alone.
    """
    state = state_bytes(scenario)
    return model_state_bytes(
        scenario.model.num_parameters,
        stage=STRATEGIES[scenario.strategy].formula.stage,
        num_ranks=scenario.mesh.size(STRATEGIES[scenario.strategy].shard_axis),
        state=state if gradients else replace(state, gradient=0),
        num_trained=num_trained(scenario),
        num_whole=num_whole(scenario),
    )


def num_trained(scenario: Scenario) -> int:
    """Elements of the parameters that get gradients."""
    trained = scenario.model.trained
    return sum(
        [parameter.numel for parameter in scenario.model.parameters if parameter.fqn in trained]
    )


def num_whole(scenario: Scenario) -> int:
    """Elements of the parameters that stay whole, though the stage shards parameters."""
    return STRATEGIES[scenario.strategy].num_whole(scenario.options, scenario.model)


def formula_text(scenario: Scenario) -> str:
    """The formula in the field's letters: "16Ψ/8", "2Ψ + 14Ψ/8". Where a part is trained only, Ψt
    is that: "2Ψ + 14Ψt". Where a part stays whole, Ψw is that: "2Ψw + 2(Ψ − Ψw)/8 + 14Ψ/8"."""
    state, stage = state_bytes(scenario), STRATEGIES[scenario.strategy].formula.stage
    trains_all = num_trained(scenario) == scenario.model.num_parameters
    letter = "Ψ" if trains_all else "Ψt"
    parameters = [("Ψ", state.parameter, stage == "zero3")]
    if whole := num_whole(scenario):
        parameters = [("Ψ", state.parameter, False)]
        if whole < scenario.model.num_parameters:
            parameters = [("Ψw", state.parameter, False), ("(Ψ − Ψw)", state.parameter, True)]
    parts = [
        *parameters, (letter, state.gradient, stage in ("zero2", "zero3")),
        (letter, state.optimizer, stage != "ddp"),
    ]
    cut = f"/{scenario.mesh.size(STRATEGIES[scenario.strategy].shard_axis)}"
    sizes: Counter[str] = Counter()
    for of, size, is_cut in sorted(parts, key=lambda part: part[-1]):  # what is whole comes first
        sizes[of + (cut if is_cut else "")] += size
    return " + ".join(f"{size}{of}" for of, size in sizes.items() if size)


def waterfall(scenario: Scenario, verdict: MemoryVerdict) -> tuple[Stage, ...]:
    """The steps from the formula to what is needed; each `total` is the sum of the steps before it.
    """
    return tuple(_stages(scenario, verdict))


def _states_reason(scenario: Scenario) -> str:
    """Reasons why parameters, gradients and states at the peak differ from the formula."""
    if STRATEGIES[scenario.strategy].offloads(scenario.options) and scenario.cluster.kind != "cpu":
        return "in host memory instead (CPUOffloadPolicy)"
    if scenario.offload.optimizer:
        return "the optimizer's states are in host memory, and gradients once they are reduced"
    strategy = STRATEGIES[scenario.strategy]
    cut = "" if strategy.formula.stage == "ddp" else "padding, uneven shards, "
    reason = f"{cut}step counters; gradients that are not there at the peak count less"
    if scenario.offload.parameters:
        reason = f"shards of parameters are in host memory; {reason}"
    if (
        scenario.model.left_out
        and strategy.formula.stage == "ddp"
        and scenario.precision.parameters != "float32"
    ):
        reason += "; master copies of parameters that are not used"
    return reason


def _cached_reason(verdict: MemoryVerdict) -> str:
    """Reasons for reserved bytes beyond live ones."""
    if verdict.expandable_segments:
        return (
            "expandable segments: the rest of pages of 2 and 20 MiB, holes between blocks, pages "
            "kept for reuse"
        )
    return "segments of 2 and 20 MiB, fragments, blocks kept for reuse"


def _stages(scenario: Scenario, verdict: MemoryVerdict) -> Iterator[Stage]:
    formula, trained = formula_bytes(scenario), num_trained(scenario)
    held = sum(verdict.by_kind.get(kind, 0) for kind in STATES)
    text = f"{formula_text(scenario)} with Ψ = {scenario.model.num_parameters:,}"
    if trained != scenario.model.num_parameters:
        text += f", of which Ψt = {trained:,} get gradients"
    if whole := num_whole(scenario):
        text += f", of which Ψw = {whole:,} stay whole"
    yield Stage(name="formula", nbytes=formula, reason=text)
    if held != formula:
        yield Stage(name="states", nbytes=held - formula, reason=_states_reason(scenario))
    for kind, reason in WORDS.items():
        if verdict.by_kind.get(kind, 0):
            yield Stage(name=kind, nbytes=verdict.by_kind[kind], reason=reason)
    peak = f"the peak, in {verdict.peak_at} of the {verdict.phase} step"
    yield Stage(name="allocated", nbytes=verdict.allocated_bytes, reason=peak, total=True)
    if verdict.reserved_bytes != verdict.allocated_bytes:
        if verdict.workspace_bytes:
            yield Stage(
                name="cuBLAS workspaces", nbytes=verdict.workspace_bytes,
                reason="one each for forward's thread and backward's",
            )
        yield Stage(
            name="rounding", nbytes=verdict.rounding_bytes,
            reason="blocks of 512 B, and remainders that are not split off",
        )
        yield Stage(name="cached", nbytes=verdict.cached_bytes, reason=_cached_reason(verdict))
        reason = f"torch's caching allocator; {BUILT[verdict.built_on_device]}"
        yield Stage(name="reserved", nbytes=verdict.reserved_bytes, reason=reason, total=True)
    for item in verdict.outside:
        if not item.inside_reserved and item.nbytes:
            yield Stage(name=item.name, nbytes=item.nbytes, reason=item.source)
    yield Stage(
        name="needed", nbytes=verdict.needed.nbytes,
        reason=f"{verdict.on_device} in {verdict.capacity.nbytes:,} B", total=True,
    )
