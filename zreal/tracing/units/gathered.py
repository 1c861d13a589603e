"""Parameters that are gathered while a stretch of a step runs: those of its unit, of the units that
this lies in, and the root's.

A unit's parameters are gathered while its forward runs, and again while its backward does. Modules
in it may read them too. A read at another time gets the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from zreal.tracing.errors import refuse
from zreal.tracing.storage_log import Place
from zreal.tracing.units.unit_hooks import Visit
from zsim.autograd.traced.checks import lies_in
from zsim.models.spec import ROOT, ParamGroup


def require_gathered(
    reads: Mapping[Place, Iterable[str]], visits: Sequence[Visit], groups: Iterable[ParamGroup]
) -> None:
    """UntraceableError for a parameter of a unit that forward reads where neither the unit nor a
    module in it runs.

    Backward reads what forward has read, and in another place where it recomputes.
    """
    owner = {parameter.fqn: group.fqn for group in groups for parameter in group.parameters}
    for at, fqns in reads.items():
        reader = visits[at.stretch].unit
        for fqn in () if at.backward else fqns:
            of = owner.get(fqn, ROOT)
            if not lies_in(reader, of):
                raise refuse(
                    fqn, f"a parameter of the unit {of} to be read while that runs, as only "
                    f"then it is gathered", f"{reader} reading it {_when(visits[: at.stretch])}",
                    f"leave {of} out of units: its parameters then belong to what contains it",
                )


def _when(before: Sequence[Visit]) -> str:
    """The time of a stretch, told by the last unit that began `before` it."""
    begun = [visit.unit for visit in before if visit.begins]
    return f"after {begun[-1]}" if begun else "before any unit"
