"""Flat buffers of ZeRO: which parameters share one, and where each lies in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zsim.ir.sharding import FlatLayout
from zsim.models.spec import ModelSpec, Parameter, ParamGroup
from zsim.models.training_options import DTYPE_NBYTES

Granularity = Literal["unit", "parameter"] | int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGroup:
    """A param group as one flat buffer, cut into shards; one that is not `trained` has no gradients
    and is not stepped."""

    group: ParamGroup
    layout: FlatLayout
    trained: bool = True

    @property
    def fqn(self) -> str:
        """The name of the param group."""
        return self.group.fqn


def flat_groups(
    model: ModelSpec, *, granularity: Granularity, num_shards: int, dtype: str
) -> tuple[FlatGroup, ...]:
    """The flat buffers of a model; `granularity` is "unit", "parameter" or a bucket size in bytes
    of `dtype`.

    Parameters that get no gradient lie in buffers of their own, those of a whole unit in
    "<unit>.frozen".
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
        )
        for units, steps in ((kept, True), (rest, False))
        for group in regroup(units, granularity=granularity, element_nbytes=element)
    )


def saved_buffers(
    options: Any, model: ModelSpec, dtype: str
) -> tuple[tuple[ParamGroup, bool], ...]:
    """The flat buffers of a checkpoint, and whether each is trained; `options` have a
    `granularity`."""
    groups = flat_groups(model, granularity=options.granularity, num_shards=1, dtype=dtype)
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
