"""Flat buffers of ZeRO: which parameters share one, and where each lies in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from zsim.ir.sharding import FlatLayout
from zsim.models.spec import ModelSpec, Parameter, ParamGroup
from zsim.models.training_options import DTYPE_NBYTES

Granularity = Literal["unit", "parameter"] | int


class Grouping(NamedTuple):
    """Rules for the parameters that share a flat buffer, and for those of ZeRO-3 that stay whole.

    Parameters of at most `persistence_threshold` elements stay whole, and so do all of a unit of at
    most `zero2_threshold`.
    """

    granularity: Granularity = "unit"
    persistence_threshold: int = 0
    zero2_threshold: int = 0

    def kept_whole(self, model: ModelSpec) -> tuple[Parameter, ...]:
        """The parameters that are gathered once a step alone, after they have been stepped."""
        return tuple([
            parameter for unit in model.units for parameter in unit.parameters
            if parameter.numel <= self.persistence_threshold
            or unit.numel <= self.zero2_threshold
        ])


def regroup(
    units: Iterable[ParamGroup], *, granularity: Granularity, element_nbytes: int = 1
) -> tuple[ParamGroup, ...]:
    """The param groups that are sharded and reduced together.

    "unit" keeps the units; "parameter" makes a group of each parameter. A number of bytes packs
    consecutive parameters, across units, and closes a bucket that has reached it (DDP's rule). New
    groups bear the name of their first parameter, so that no two share a name.
    """
    if granularity == "unit":
        return tuple(units)
    cap = 0 if granularity == "parameter" else int(granularity)
    return tuple(_buckets(units, cap=cap, element_nbytes=element_nbytes))


def _buckets(units: Iterable[ParamGroup], *, cap: int, element_nbytes: int) -> Iterator[ParamGroup]:
    bucket, nbytes = [], 0
    for parameter in (parameter for unit in units for parameter in unit.parameters):
        bucket.append(parameter)
        nbytes += parameter.numel * element_nbytes
        if nbytes >= cap:
            yield ParamGroup(fqn=bucket[0].fqn, parameters=tuple(bucket))
            bucket, nbytes = [], 0
    if bucket:
        yield ParamGroup(fqn=bucket[0].fqn, parameters=tuple(bucket))


class FlatGroup(NamedTuple):
    """A param group as one flat buffer, cut into shards; one that is not `trained` has no gradients
    and is not stepped.

    The parameters of a `whole` one are not sharded, though its strategy shards others.
    """

    group: ParamGroup
    layout: FlatLayout
    trained: bool = True
    whole: bool = False

    @property
    def fqn(self) -> str:
        """The name of the param group."""
        return self.group.fqn


def flat_groups(
    model: ModelSpec, *, grouping: Grouping, num_shards: int, dtype: str
) -> tuple[FlatGroup, ...]:
    """The flat buffers of a model; a bucket's size is in bytes of `dtype`.

    Parameters that get no gradient lie in buffers of their own, those of a whole unit in
    "<unit>.frozen". So do those that stay whole where others of their unit do not, in
    "<unit>.whole".
    """
    trained, element = model.trained, DTYPE_NBYTES[dtype]
    kept = _parts(model.units, lambda parameter: parameter.fqn in trained)
    rest = _parts(model.units, lambda parameter: parameter.fqn not in trained, suffix=".frozen")
    return tuple(
        FlatGroup(
            group=group,
            layout=FlatLayout(
                numels=tuple(p.numel for p in group.parameters), num_shards=num_shards
            ),
            trained=steps,
            whole=whole,
        )
        for units, steps in ((kept, True), (rest, False))
        for whole, parts in _by_wholeness(units, model, grouping)
        for group in regroup(parts, granularity=grouping.granularity, element_nbytes=element)
    )


def _by_wholeness(
    units: Sequence[ParamGroup], model: ModelSpec, grouping: Grouping
) -> tuple[tuple[bool, list[ParamGroup]], ...]:
    """The parts of `units` that are sharded, and those that stay whole."""
    kept = {parameter.fqn for parameter in grouping.kept_whole(model)}
    sharded, whole = list[ParamGroup](), list[ParamGroup]()
    for unit in units:
        parts: dict[bool, list[Parameter]] = {False: [], True: []}
        for parameter in unit.parameters:
            parts[parameter.fqn in kept].append(parameter)
        if parts[False] or not parts[True]:
            sharded.append(replace(unit, parameters=tuple(parts[False])))
        if parts[True]:
            fqn = unit.fqn + (".whole" if parts[False] else "")
            whole.append(replace(unit, fqn=fqn, parameters=tuple(parts[True])))
    return (False, sharded), (True, whole)


def num_groups(options: Any, model: ModelSpec) -> int:
    """Flat buffers at most: one for each parameter, or for each unit, or two of a unit of which a
    part may stay whole; `options` have a `grouping`."""
    grouping = options.grouping
    if grouping.granularity != "unit":
        return len(model.parameters)
    return len(model.units) * (2 if grouping.persistence_threshold else 1)


def saved_buffers(
    options: Any, model: ModelSpec, dtype: str
) -> tuple[tuple[ParamGroup, bool], ...]:
    """The flat buffers of a checkpoint, and whether each is trained; `options` have a `grouping`.

    Of those that stay whole each rank saves its own shard, as of others.
    """
    groups = flat_groups(model, grouping=options.grouping, num_shards=1, dtype=dtype)
    return tuple([(group.group, group.trained) for group in groups])


def _parts(
    units: Sequence[ParamGroup], wanted: Callable[[Parameter], bool], *, suffix: str = ""
) -> list[ParamGroup]:
    """The wanted parameters of each unit that has some; without a suffix a unit of no parameters at
    all stays."""
    parts = [
        replace(u, fqn=u.fqn + suffix, parameters=tuple(filter(wanted, u.parameters)))
        for u in units
    ]
    return [
        part
        for part, unit in zip(parts, units, strict=True)
        if part.parameters or not (suffix or unit.parameters)
    ]
