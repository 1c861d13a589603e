"""Flat buffers of ZeRO: which parameters share one, and where each lies in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from zsim.model import ParamGroup

Granularity = Literal["unit", "parameter"] | int


def regroup(
    units: Iterable[ParamGroup], *, granularity: Granularity, element_nbytes: int = 1
) -> tuple[ParamGroup, ...]:
    """The param groups that are sharded and reduced together.

    "unit" keeps the units; "parameter" makes a group of each parameter; a number of bytes packs consecutive parameters,
    across units, and closes a bucket once it has reached that size (the rule of torch's DDP). New groups bear the name
    of their first parameter, so that no two share a name.
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
