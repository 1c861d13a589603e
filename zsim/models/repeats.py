"""Modules that run more than once: blocks used several times in a forward, and several forwards
before one backward.

Each run is a Module of its own, with its own values, on the same parameters of the same unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from zsim.errors import ScenarioError
from zsim.models.operators import Operator
from zsim.models.spec import ROOT, ModelSpec, Module, numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """Runs of each block in a forward: "block" by "block", each `times` in a row, or the whole
    "stack" again.

    Sharing weights across layers as in Universal Transformers (Dehghani et al., arXiv 1807.03819)
    and ALBERT (arXiv 1909.11942).
    """

    times: int = 1
    order: Literal["block", "stack"] = "block"


def with_uses(model: ModelSpec, uses: Uses) -> ModelSpec:
    """`model` with its blocks run as `uses` says; ScenarioError where what a block makes does not
    fit what runs next."""
    if uses.times == 1:
        return model
    modules: list[Module] = []
    for is_root, piece in groupby(model.modules, key=lambda module: module.unit == ROOT):
        run = tuple(piece)
        if is_root:
            modules += run
        elif uses.order == "stack":
            modules += run * uses.times
        else:
            modules += [module for module in run for _ in range(uses.times)]
    again = replace(model, modules=tuple(_numbered(modules)))
    problems = tuple(_misfits(again.modules))
    if problems:
        raise ScenarioError(problems)
    return again


def with_forwards(model: ModelSpec, forwards: int) -> ModelSpec:
    """`model` run `forwards` times on different inputs before one backward of the summed losses."""
    return (
        model
        if forwards == 1
        else replace(model, modules=tuple(_numbered(model.modules * forwards)), forwards=forwards)
    )


def repeats(model: ModelSpec) -> bool:
    """True where some module runs more than once."""
    return most_runs(model) > 1


def most_runs(model: ModelSpec) -> int:
    """Most runs of any module."""
    return max(Counter(module.path for module in model.modules).values(), default=1)


def first_runs(modules: Iterable[Module]) -> tuple[Module, ...]:
    """The modules without their later runs: what is really there."""
    return tuple(module for module in modules if module.fqn == module.path)


def _numbered(modules: Iterable[Module]) -> Iterator[Module]:
    runs: Counter[str] = Counter()
    for module in modules:
        runs[module.path] += 1
        yield replace(module, fqn=numbered(module.path, runs[module.path]))


def _misfits(modules: tuple[Module, ...]) -> Iterator[str]:
    """Blocks that make another width than the next module takes, each pair once."""
    misfits: dict[str, None] = {}
    for module, following in pairwise(modules):
        made, taken = (
            _features(module.operators[-1], made=True),
            _features(following.operators[0], made=False),
        )
        if made and taken and made != taken:
            line = (
                f"model.uses: {module.path} makes {made} features and {following.path}, which runs "
                f"next, takes {taken}"
            )
            misfits[f"{line}; give every block the same width"] = None
    yield from list(misfits)[:20]


def _features(operator: Operator, *, made: bool) -> int:
    return operator.in_features if operator.kind == "linear" and not made else operator.out_features
