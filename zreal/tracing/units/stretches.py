"""Stretches of a traced step: runs of units, and the parts of the root between them.

Their names are those of modules in `zsim.autograd`. A part of the root is `root.N`; a stretch of a
unit has the unit's fqn, the number of its part and of its run. The loss that the root's caller
makes is `root.loss`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zreal.tracing.errors import refuse
from zreal.tracing.gradients.engine_sums import Lives
from zreal.tracing.storage_log import Died, Entry, Place
from zreal.tracing.units.unit_hooks import Visit
from zsim.autograd.traced.model import LOSS_MODULE
from zsim.models.spec import PART, ROOT, numbered


@dataclass(slots=True, kw_only=True, eq=False)
class Stretch:
    """A run of a unit, or a part of one or of the root: its log in forward and in backward."""

    fqn: str
    unit: str
    needs_gradient: bool
    reads: dict[str, None]
    forward: list[Entry]
    backward: list[Entry]
    returns_inner_output: bool = False
    after_root: bool = False
    caller_frees: list[int] = field(default_factory=list)
    """Storages that its caller drops after it has returned, the last ones of forward."""

    def add_frees_of_caller(self, entries: Iterable[Entry]) -> None:
        """The caller drops these storages next."""
        self.forward += (dropped := list(entries))
        self.caller_frees += [entry.storage for entry in dropped if isinstance(entry, Died)]

    def absorb(self, after: Stretch) -> None:
        """The stretch `after` this one becomes a part of it."""
        self.forward += after.forward
        self.backward[:0] = after.backward

    def take_leading_frees(self) -> Iterator[Entry]:
        """The frees that forward begins with, which are gone from it."""
        while self.forward and isinstance(self.forward[0], Died):
            yield self.forward.pop(0)

    @property
    def only_frees(self) -> bool:
        """True if it computes nothing, neither in forward nor in backward."""
        return not self.backward and all(isinstance(entry, Died) for entry in self.forward)


def stretches_of(
    visits: Sequence[Visit], lives: Lives, reads: Mapping[Place, Mapping[str, None]], *,
    names: frozenset[str],
) -> list[Stretch]:
    """The stretches in the order of forward, without parts of the root in which nothing happens.

    With `names` the parts of the root are just those of these names; () leaves the choice to what
    happens in them.
    """
    kept: list[Stretch] = []
    for visit, stretch in zip(visits, _each(visits, lives, reads), strict=True):
        of_root = visit.unit == ROOT
        if not of_root and not visit.begins:
            # what an outer unit drops when an inner one returns is the inner one's
            kept[-1].add_frees_of_caller(stretch.take_leading_frees())
        is_named = stretch.fqn in names
        if kept and of_root and not is_named and stretch.only_frees:
            # what the root drops when a unit returns is the unit's
            kept[-1].add_frees_of_caller(stretch.forward)
        elif kept and of_root and not is_named and names:
            kept[-1].absorb(stretch)
        elif is_named or not of_root or stretch.forward or stretch.backward:
            kept.append(stretch)
    return kept


def _each(
    visits: Sequence[Visit], lives: Lives, reads: Mapping[Place, Mapping[str, None]]
) -> Iterator[Stretch]:
    """A stretch for each visit, whatever happens in it."""
    entries: dict[Place, list[Entry]] = {}
    for at, entry in lives.entries:
        entries.setdefault(at, []).append(entry)
    # a recomputation reads them again
    before = {fqn for at, fqns in reads.items() if not at.backward for fqn in fqns}
    for number, (visit, fqn) in enumerate(zip(visits, _names(visits), strict=True)):
        forward, backward = Place(False, number), Place(True, number)
        late = (fqn for fqn in reads.get(backward, ()) if fqn not in before)
        yield Stretch(
            fqn=fqn, unit=visit.unit, needs_gradient=visit.needs_gradient,
            returns_inner_output=visit.returns_inner_output, after_root=visit.after_root,
            reads=dict.fromkeys((*reads.get(forward, ()), *late)),
            forward=entries.get(forward, []), backward=entries.get(backward, []),
        )


def _names(visits: Sequence[Visit]) -> Iterator[str]:
    """The name of each visit; UntraceableError where a unit has that of a part of the root."""
    units = {visit.unit for visit in visits}
    parts, runs, begun = Counter[str](), Counter[str](), 0
    for visit in visits:
        unit, begun = visit.unit, begun + visit.begins
        runs[unit] += visit.begins
        parts[unit] = 1 if visit.begins else parts[unit] + 1
        if unit != ROOT:
            yield numbered(numbered(unit, parts[unit], PART), runs[unit])
        elif (name := LOSS_MODULE if visit.after_root else f"{ROOT}.{begun}") in units:
            raise refuse(
                name, "another name of this unit", "the root's", "rename it",
            )
        else:
            yield name
