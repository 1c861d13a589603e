"""Storages of a traced step that are gradients of parameters, and when autograd is done with each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from zreal.tracing.errors import refuse
from zreal.tracing.gradients.engine_sums import Lives
from zreal.tracing.gradients.parameter_gradients import ParameterGradients
from zreal.tracing.storage_log import Born, Entry, Place
from zsim.autograd.lowered import Accumulated
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
        raise refuse(
            fqn, "a gradient of its own",
            "a view of one that goes on, as of what is added to a single sample",
            "trace two samples or more, or write parameter * 1 in forward",
        )
    births = {entry.storage: entry.nbytes for _, entry in lives.entries if isinstance(entry, Born)}
    marks: dict[int, tuple[str, ...]] = {}
    for fqn in trained:
        if fqn not in gradients.kept:
            continue
        kept = lives.final(gradients.kept[fqn])
        made = dict.fromkeys(map(lives.final, gradients.made.get(fqn, [])))
        added = (
            [storage for storage in made if storage in lives.used_up and storage != kept]
            if kept in made
            else []
        )
        for storage in (kept, *added):
            marks[storage] = (*marks.get(storage, ()), fqn)
    for fqn in (name for fqns in marks.values() for name in fqns if not trained[name]):
        raise refuse(
            fqn, "elements in what is trained", "an empty parameter", "freeze it",
        )
    for storage, fqns in marks.items():
        nbytes = sum(trained[fqn] * DTYPE_NBYTES[dtype] for fqn in fqns)
        if births.get(storage) != nbytes:
            raise refuse(
                fqns[0], f"a gradient of {nbytes:,} B of its own",
                f"a part of a storage of {births.get(storage, 0):,} B",
                "give the parameter's gradient room of its own, as by parameter * 1 in "
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
