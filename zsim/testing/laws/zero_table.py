"""ZeRO's table to the byte, with padding: parameters, gradients and optimizer states of each rank.

It follows from the model's shapes and the scenario's tables alone. Rajbhandari et al. 2020 (arXiv
1910.02054) have it for whole multiples; torch's FSDP2 pads each parameter to equal rows (dim 0),
ZeRO and FSDP1 pad a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from zsim.ir.run import RankRun
from zsim.models.spec import Parameter
from zsim.models.training_options import DTYPE_NBYTES, Library
from zsim.runs.run import Run
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.testing.laws.variants import library_of, stage_of

Held = dict[str, int]
"""Bytes by kind of memory."""
STEP_COUNTER, MASTER = 4, 4
"""Bytes of AdamW's step counter, and of an element of a float32 copy of parameters."""
FSDP1_ALIGNMENT = 16
"""Bytes that a parameter's offset is a multiple of, with use_orig_params."""

DEEPSPEED_ALIGNMENT = 2
"""Elements that DeepSpeed's part of a rank is a multiple of."""


def states_follow_zeros_table(run: Run) -> Iterator[str]:
    """Each rank holds the parameters, gradients and optimizer states of its strategy's row of
    ZeRO's table, padding included, when its optimizer has stepped."""
    table, strategy = ROWS[library_of(run.scenario)], STRATEGIES[run.scenario.strategy]
    if strategy.offloads(run.scenario.options):
        return
    if run.scenario.offload.states or run.scenario.optimizer.name == "adamw8bit":
        return  # the host holds the most; states of 8 bits have no row
    device = run.record.provenance.get("device", run.scenario.cluster.kind)
    states = _States(run.scenario, device)
    for rank in run.ranks:
        if held := _held(rank):
            expected = table(run.scenario, rank.rank, states)
            for kind, nbytes in expected.items():
                if held.get(kind, 0) != nbytes:
                    yield (
                        f"rank {rank.rank}: {held.get(kind, 0):,} B of {kind} when the optimizer "
                        f"has stepped, and {nbytes:,} B by ZeRO's table"
                    )


def _held(rank: RankRun) -> Held:
    return dict(rank.phases["steady"].memory.held) if "steady" in rank.phases else {}


class _States:
    """Bytes of an optimizer's states: `element` for each element, `counter` for each tensor; and
    the fqns of what is `trained`."""

    def __init__(self, scenario: Scenario, device: str) -> None:
        optimizer, precision = scenario.optimizer, scenario.precision
        adam = optimizer.name == "adamw"
        self.number = 2 if adam else int(optimizer.momentum > 0)
        on_device = device == "cpu" or optimizer.implementation == "fused"
        self.counter = STEP_COUNTER if adam and on_device else 0
        self.parameter = DTYPE_NBYTES[precision.parameters]
        self.stepped = DTYPE_NBYTES[precision.stepped]
        self.element = self.number * self.stepped
        self.master = MASTER if precision.master and self.parameter < MASTER else 0
        self.trained = scenario.model.trained
        self.with_master = self.element + self.master


def _whole(scenario: Scenario, rank: int, states: _States) -> Held:
    """A plain module: all of everything. Parameters that forward leaves out have copies too."""
    trained = _trained(scenario, states)
    numel, left_out = _numel(trained), _numel(scenario.model.left_out)
    return {
        "parameters": _numel(scenario.model.parameters) * states.parameter,
        "gradients": numel * states.parameter,
        "optimizer_states": numel * states.with_master + left_out * states.master
        + len(trained) * states.counter,
    }


def _replicated(scenario: Scenario, rank: int, states: _States) -> Held:
    """DDP: all of everything. Gradients that are views of buckets are communication."""
    held = _whole(scenario, rank, states)
    return {**held, "gradients": 0} if scenario.options.gradient_as_bucket_view else held


def _zero_redundancy(scenario: Scenario, rank: int, states: _States) -> Held:
    """ZeroRedundancyOptimizer: states of whole parameters, the largest first to the rank with the
    fewest elements, in the dtype of the parameters."""
    owned: list[list[Parameter]] = [[] for _ in range(scenario.world_size)]
    trained = [each for each in scenario.model.named_parameters if each.requires_grad]
    for parameter in sorted(trained, key=lambda each: -each.numel):
        min(owned, key=_numel).append(parameter)
    mine = [each for each in owned[rank] if each.fqn in states.trained]
    nbytes = _numel(mine) * states.number * states.parameter + len(mine) * states.counter
    return {**_replicated(scenario, rank, states), "optimizer_states": nbytes}


def _flat_buffers(scenario: Scenario, rank: int, states: _States) -> Held:
    """ZeRO 1 to 3: a flat buffer of each group, padded to equal shards. Of ZeRO-3 small parameters,
    or those of small units, lie in buffers that stay whole."""
    stage, ranks = stage_of(scenario), scenario.mesh.dp_shard
    cut = {
        (steps, persists): [
            -(-numel // ranks)
            for numel in _groups(scenario, states, trained=steps, persists=persists)
        ]
        for steps in (True, False) for persists in (True, False)
    }
    trained = cut[True, True] + cut[True, False]
    shard, whole = sum(trained), sum(trained) * ranks
    stored = sum(
        sum(shards) * (1 if stage == 3 and not persists else ranks)
        for (_, persists), shards in cut.items()
    )
    return {
        "parameters": stored * states.parameter,
        "gradients": (whole if stage == 1 else shard) * DTYPE_NBYTES[scenario.gradient_dtype],
        "optimizer_states": shard * states.with_master + len(trained) * states.counter,
    }


def _groups(
    scenario: Scenario, states: _States, *, trained: bool, persists: bool
) -> list[int]:
    """Elements of each flat buffer: of a unit, of a parameter, or of so many bytes and the
    parameter that fills them."""
    known = states.trained
    grouping = scenario.options.grouping
    of_parameter, of_unit = grouping.persistence_threshold, grouping.zero2_threshold
    units = [
        [
            each.numel for each in unit.parameters
            if (each.fqn in known) is trained
            and (each.numel <= of_parameter or _numel(unit.parameters) <= of_unit) is persists
        ]
        for unit in scenario.model.units
    ]
    cut = grouping.granularity
    if cut == "unit":
        return [sum(numels) for numels in units if numels]
    numels = [numel for unit in units for numel in unit]
    if cut == "parameter":
        return numels
    groups, is_open = list[int](), False
    for numel in numels:
        groups[-1:] = [groups[-1] + numel] if is_open else [*groups[-1:], numel]
        is_open = groups[-1] * states.parameter < cut
    return groups


def _fully_shard(scenario: Scenario, rank: int, states: _States) -> Held:
    """FSDP2: rows of each parameter, padded but in the optimizer's states."""
    ranks = scenario.mesh.dp_shard
    stored = reduced = stepped = 0
    trained = _trained(scenario, states)
    for each in scenario.model.parameters:
        rows, *others = each.shape or (1,)
        width = _product(others)
        full = -(-rows // ranks)
        own = max(0, min(full, rows - rank % ranks * full))
        stored += full * width
        if each.fqn in states.trained:
            reduced, stepped = reduced + full * width, stepped + own * width
    return {
        "parameters": stored * states.stepped, "gradients": reduced * states.stepped,
        "optimizer_states": stepped * states.element + len(trained) * states.counter,
    }


def _flat_parameters(scenario: Scenario, rank: int, states: _States) -> Held:
    """FSDP1: a flat parameter of each unit. With use_orig_params each parameter in it is aligned,
    and the optimizer steps the part of each that the shard has."""
    ranks, original = scenario.mesh.dp_shard, scenario.options.use_orig_params
    align = FSDP1_ALIGNMENT // states.parameter if original else 1
    trained = states.trained
    stored = reduced = stepped = tensors = 0
    for unit in scenario.model.units:
        begin, places = 0, list[tuple[int, int, bool]]()
        for each in unit.parameters:
            begin = -(-begin // align) * align
            places.append((begin, begin + each.numel, each.fqn in trained))
            begin += each.numel
        shard = -(-begin // ranks)
        first = rank % ranks * shard
        stored += shard
        if any(steps for *_, steps in places):
            reduced += shard
            own = [
                max(0, min(end, first + shard) - max(start, first))
                for start, end, steps in places if steps
            ] if original else [shard]
            stepped, tensors = stepped + sum(own), tensors + sum(numel > 0 for numel in own)
    return {
        "parameters": stored * states.stepped, "gradients": reduced * states.stepped,
        "optimizer_states": stepped * states.element + tensors * states.counter,
    }


def _engine(scenario: Scenario, rank: int, states: _States) -> Held:
    """DeepSpeed 1 and 2: one flat buffer, padded to two elements a rank. A master copy is made of
    float32 parameters too, and gradients are gone when the optimizer has stepped."""
    if stage_of(scenario) == 3:
        return _sharded_engine(scenario, rank, states)
    numel, ranks = _numel(_trained(scenario, states)), scenario.mesh.dp_shard
    part = -(-numel // (DEEPSPEED_ALIGNMENT * ranks)) * DEEPSPEED_ALIGNMENT
    untrained = _numel(scenario.model.parameters) - numel
    return {
        "parameters": (part * ranks + untrained) * states.parameter, "gradients": 0,
        "optimizer_states": part * (MASTER + states.element) + states.counter,
    }


def _sharded_engine(scenario: Scenario, rank: int, states: _States) -> Held:
    """DeepSpeed 3: each parameter in equal shards, small ones whole beside them, frozen or not.
    Gradients of shards stay; a sub-group of shards is one tensor of the optimizer."""
    ranks, options = scenario.mesh.dp_shard, scenario.options
    shards = [-(-each.numel // ranks) for each in _trained(scenario, states)]
    most = options.stage3_param_persistence_threshold
    stored = [
        (-(-each.numel // ranks), ranks if each.numel <= most else 0)
        for each in scenario.model.parameters
    ]
    groups, filled = 0, 0
    for shard in shards if options.sub_group_size < sum(shards) else ():
        groups, filled = groups + (filled == 0), filled + shard
        filled = 0 if filled >= options.sub_group_size else filled
    return {
        "parameters": sum(shard * (1 + whole) for shard, whole in stored) * states.parameter,
        "gradients": sum(shards) * states.parameter,
        "optimizer_states": sum(shards) * (MASTER + states.element)
        + max(1, groups) * states.counter,
    }


def _trained(scenario: Scenario, states: _States) -> list[Parameter]:
    return [each for each in scenario.model.parameters if each.fqn in states.trained]


def _numel(parameters: Sequence[Parameter]) -> int:
    return sum(each.numel for each in parameters)


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


ROWS: dict[Library, Callable[[Scenario, int, _States], Held]] = {
    "torch": _whole, "ddp": _replicated, "zero_redundancy": _zero_redundancy, "zsim": _flat_buffers,
    "fsdp1": _flat_parameters, "fully_shard": _fully_shard, "deepspeed": _engine,
}
"""The row of ZeRO's table that each library's strategies have."""
