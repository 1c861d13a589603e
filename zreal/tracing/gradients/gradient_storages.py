"""Storages of a traced step that are gradients of parameters, and when autograd is done with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zreal.tracing.errors import UntraceableError
from zreal.tracing.gradients.engine_sums import Lives
from zreal.tracing.gradients.parameter_gradients import ParameterGradients
from zreal.tracing.storage_log import Born, Entry, Place
from zsim.autograd.lowered import Accumulated
from zsim.models.spec import without_run
from zsim.models.training_options import DTYPE_NBYTES, Dtype


def gradient_storages(
    trained: Mapping[str, int], lives: Lives, gradients: ParameterGradients, *, dtype: Dtype
) -> dict[int, tuple[str, ...]]:
    """Storages that are born as gradients of parameters: the one kept and, of several, those added
    to it.

    `trained` has the elements of each, which are of `dtype`. UntraceableError for a gradient that
    has no storage of its own.
    """
    for fqn in gradients.shared:
        raise UntraceableError(
            where=fqn,
            expected="a gradient of its own",
            found="a view of one that goes on, as of what is added to a single sample",
            remedy="trace two samples or more, or write parameter * 1 in forward",
        )
    births = {entry.storage: entry.nbytes for _, entry in lives.entries if isinstance(entry, Born)}
    marks: dict[int, tuple[str, ...]] = {}
    numels = dict(trained)
    # of what each run of a unit may have read a view
    runs: dict[str, list[str]] = {fqn: [] for fqn in numels}
    for name in gradients.kept:
        runs.get(name if name in runs else without_run(name), []).append(name)
    numels |= {name: numels[fqn] for fqn, views in runs.items() for name in views}
    for views in runs.values():
        for name in views:
            kept = lives.final(gradients.kept[name])
            made = dict.fromkeys(map(lives.final, gradients.made.get(name, [])))
            added = (
                [storage for storage in made if storage in lives.used_up and storage != kept]
                if kept in made
                else []
            )
            for storage in (kept, *added):
                marks[storage] = (*marks.get(storage, ()), name)
    for fqn in (name for fqns in marks.values() for name in fqns if not numels[name]):
        raise UntraceableError(
            where=fqn, expected="elements in what is trained", found="an empty parameter",
            remedy="freeze it",
        )
    for storage, fqns in marks.items():
        nbytes = sum(numels[fqn] * DTYPE_NBYTES[dtype] for fqn in fqns)
        if births.get(storage) != nbytes:
            raise UntraceableError(
                where=fqns[0],
                expected=f"a gradient of {nbytes:,} B of its own",
                found=f"a part of a storage of {births.get(storage, 0):,} B",
                remedy="give the parameter's gradient room of its own, as by parameter * 1 in "
                       "forward, or take more samples",
            )
    return marks


def accumulated_once(lives: Lives, marks: Mapping[int, tuple[str, ...]]) -> Lives:
    """`lives` in which each parameter is accumulated once, after its last gradient: a reentrant
    checkpoint in it may do so again."""
    due, entries = set[str](), list[tuple[Place, Entry]]()
    last = {
        fqn: index
        for index, (_, e) in enumerate(lives.entries)
        if isinstance(e, Born)
        for fqn in marks.get(e.storage, ())
    }
    for index, (at, entry) in enumerate(lives.entries):
        if isinstance(entry, Born):
            due.update(fqn for fqn in marks.get(entry.storage, ()) if last[fqn] == index)
        if not isinstance(entry, Accumulated) or entry.fqn in due:
            entries.append((at, entry))
        if isinstance(entry, Accumulated):
            due.discard(entry.fqn)
    return replace(lives, entries=entries)
