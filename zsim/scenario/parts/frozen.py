"""The part of a model that is trained: parameters frozen by patterns over their names, and blocks
that forward skips.

`frozen` are shell-style patterns (fnmatch) over fully qualified names; `unused` are fqns of blocks.
LoRA is the first: everything frozen but a few small parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from zsim.autograd.traced.model import TracedModel
from zsim.errors import ScenarioError, shown
from zsim.models.spec import ModelSpec, ParamGroup


def cut(model: ModelSpec, *, frozen: tuple[str, ...], unused: tuple[str, ...]) -> ModelSpec:
    """`model` with what `frozen` matches needing no gradient and without the modules of `unused`
    blocks.

    ScenarioError for what matches nothing or leaves nothing to train, and for a traced model, whose
    gradients are recorded.
    """
    if not frozen and not unused:
        return model
    problems = tuple(_problems(model, frozen, unused))
    if problems:
        raise ScenarioError(problems)
    units = tuple(_frozen(unit, frozen) for unit in model.units) if frozen else model.units
    modules = tuple(
        module for module in model.modules if (module.within or module.unit) not in unused
    )
    part = replace(model, units=units, modules=modules, idle=unused)
    if not part.trained:
        raise ScenarioError((f"{'frozen' if frozen else 'model.unused'}: nothing is left to "
                             f"train; leave a parameter out of it",))
    return part


def _frozen(unit: ParamGroup, patterns: tuple[str, ...]) -> ParamGroup:
    parameters = (
        replace(p, requires_grad=not any(fnmatchcase(p.fqn, pattern) for pattern in patterns))
        for p in unit.parameters
    )
    return replace(unit, parameters=tuple(parameters))


def _problems(model: ModelSpec, frozen: tuple[str, ...], unused: tuple[str, ...]) -> Iterator[str]:
    if isinstance(model, TracedModel):
        key = "frozen" if frozen else "model.unused"
        mend = "freeze parameters of the module" if frozen else "leave blocks out of the module"
        yield f"{key}: a traced model's gradients are recorded with it; {mend} and trace it again"
        return
    names = [parameter.fqn for parameter in model.parameters]
    unmatched = [each for each in frozen if not any(fnmatchcase(name, each) for name in names)]
    if unmatched:
        first = f"{shown(unmatched[0])} matches no parameter{_nearest(unmatched[0], names)}"
        others = f" ({len(unmatched) - 1:,} others match none either)" if unmatched[1:] else ""
        yield f"frozen: {first}{others}"
    blocks = [block.fqn for block in model.blocks]
    for block in unused:
        if block not in blocks:
            yield f"model.unused: the model has no block {shown(block)}{_nearest(block, blocks)}"
        elif not _fits_through(model, block):
            yield f"model.unused: {block} changes the width, so that nothing fits without it"


def _nearest(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f", did you mean {near[0]}?" if near else ""


def _fits_through(model: ModelSpec, block: str) -> bool:
    """True where a block's input is as wide as its output."""
    operators = [
        op
        for module in model.modules
        if (module.within or module.unit) == block
        for op in module.operators
    ]
    first, last = operators[0], operators[-1]
    return (first.in_features or first.out_features) == last.out_features
