"""Rules on the order of a step: meshes, prefetch, buckets, accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import ceil

from zsim.analysis.alternatives import moved
from zsim.analysis.lint.case import LintCase
from zsim.analysis.lint.finding import LintFinding, compared
from zsim.errors import shown
from zsim.io.units import format_bytes
from zsim.scenario.checks import refusals

NO_FASTER = 0.001
"""Share of a step that prefetch must save to be of help."""
LEAST_SAVED = 0.01
"""Share of a step from which smaller buckets are worth a finding."""
LEAST_HELD = 0.05
"""Share of the peak from which gradients held between micro-batches are worth a finding."""
SMALLER_BUCKETS = 4
"""Buckets that the gradients are cut into, to see if one is too few."""


def flat_mesh(case: LintCase) -> Iterator[LintFinding]:
    """A strategy of replicas and shards on a mesh that has only one of the two."""
    strategy, mesh = case.strategy, case.scenario.mesh
    simpler = strategy.over_all_ranks
    if not simpler or 1 not in mesh.shape:
        return
    if mesh.dp_shard == 1 and mesh.dp_replicate > 1:
        yield LintFinding(
            fact=f"dp_shard = 1: each of {mesh.dp_replicate} ranks holds a whole copy, with the "
                 f"{'hooks and ' if strategy.hooks else ''}buffers of sharding",
            remedy="set dp_shard to the devices of a node, or use ddp",
        )
    elif mesh.dp_replicate == 1 and simpler != case.scenario.strategy:
        other = moved(case.scenario, simpler)
        if not refusals.problems(other):
            yield compared(
                case, LintCase(other), remedy=f"use {simpler}",
                fact=f"dp_replicate = 1: there is one copy, so this is {simpler}",
            )


def held_gradients(case: LintCase) -> Iterator[LintFinding]:
    """Gradients that are reduced after the last micro-batch alone, and held whole until then."""
    if case.scenario.sync != "last" or case.scenario.batch.accumulation == 1:
        return
    every = case.with_parts(sync="every")
    if every is None or case.peak_bytes - every.peak_bytes <= LEAST_HELD * case.peak_bytes:
        return
    yield compared(
        case, every,
        fact="whole gradients are held from micro-batch to micro-batch, as only the last reduces "
             "them",
        remedy='use sync = "every", if the peak is what limits you',
    )


def idle_prefetch(case: LintCase) -> Iterator[LintFinding]:
    """Prefetch that is asked for and makes the step hardly faster."""
    options = case.scenario.options
    defaults = {field.name: field.default for field in fields(options)}
    deeper = [
        name for name in case.strategy.prefetch_depths
        if getattr(options, name) > defaults[name]
    ]
    earlier = [
        each.option for each in case.strategy.gathers_earlier
        if each.is_set(options) and each.value != defaults[each.option]
    ]
    for name in (*deeper, *earlier):
        other = case.with_options(**{name: defaults[name]})
        if other is None or other.step_ns * (1 - NO_FASTER) > case.step_ns:
            continue
        yield compared(
            case, other,
            fact=f"{name} = {shown(getattr(options, name))} makes the step less than "
                 f"{100 * NO_FASTER:g} % faster",
            remedy="leave it out; `zsim show --time` says what would hide communication",
        )


def one_bucket(case: LintCase) -> Iterator[LintFinding]:
    """A bucket that holds all gradients: its reduction begins when backward has ended."""
    option = case.strategy.bucket_cap
    reductions = list(case.steady("all_reduce")) if option else []
    if len({op.unit for op in reductions}) != 1:
        return
    mib = reductions[0].nbytes / 2**20
    smaller = case.with_options(**{option: ceil(1000 * mib / SMALLER_BUCKETS) / 1000})
    if smaller is None or smaller.step_ns > (1 - LEAST_SAVED) * case.step_ns:
        return
    yield compared(
        case, smaller,
        fact=f"one bucket holds all gradients, {format_bytes(reductions[0].nbytes)}: nothing hides "
             "its reduction",
        remedy=f"use {option} = {getattr(smaller.scenario.options, option):g}",
    )
