"""Activation checkpointing: blocks, or operators of theirs, that backward recomputes instead of
keeping.

`zsim.autograd.tape` knows the effect on memory, as torch.utils.checkpoint (non-reentrant) has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from zsim.errors import listed, shown
from zsim.models.operators import Operator
from zsim.models.spec import ModelSpec

SAVEABLE = ("linear", "attention")
"""Operators whose outputs a selective policy can keep: those that are one aten call."""
LINEARS = ("linear", "conv1d")
"""Operators that "linear" means: the products of matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointing:
    """The mode, and the blocks and operators that it applies to.

    "full": every `every`-th block (the k-th, the 2k-th, …) is recomputed from its input.
    "selective" with `save`: the same, but the outputs of these operators are kept (torch's
    selective activation checkpointing). "selective" with `recompute`: each operator of these kinds
    is checkpointed by itself, everything else is kept.

    With `save_every` only the first of a block's linears, the (1 + save_every)-th, … are kept, as
    torchtitan's policy does. With `early_stop` operators that nothing in backward needs are left
    out. Without it a whole region is recomputed, as by torch before 2.1, or
    torch.utils.checkpoint.set_checkpoint_early_stop.
    """

    mode: Literal["none", "full", "selective"] = "none"
    every: int = 1
    save: tuple[str, ...] = ()
    save_every: int = 1
    recompute: tuple[str, ...] = ()
    early_stop: bool = True

    @property
    def words(self) -> str:
        """The mode and what is not by default, as a scenario has them: mode = "full"."""
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return ", ".join(
            f"{name} = {shown(getattr(self, name))}" for name in dict.fromkeys(("mode", *changed))
        )

    def applies_to(self, model: ModelSpec) -> frozenset[str]:
        """The fqns of the modules that are checkpointed: of the blocks, in forward order, every
        k-th."""
        blocks = [module.fqn for module in model.blocks]
        return (
            frozenset(blocks[self.every - 1 :: self.every]) if self.mode != "none" else frozenset()
        )

    def regions(self, operators: tuple[Operator, ...]) -> tuple[tuple[Operator, ...], ...]:
        """A checkpointed module's operators in regions that are each recomputed as one."""
        if self.recompute:
            return tuple((operator,) for operator in operators if operator.kind in self.recompute)
        return (operators,) if self.mode != "none" else ()

    def kept(self, operators: tuple[Operator, ...]) -> tuple[Operator, ...]:
        """Operators of a recomputed region whose outputs are kept."""
        linears = [operator for operator in operators if operator.kind in LINEARS]
        passed_over = [linear for index, linear in enumerate(linears) if index % self.save_every]
        kinds = {*self.save, *(LINEARS if "linear" in self.save else ())}
        return tuple(
            operator
            for operator in operators
            if operator.kind in kinds and operator not in passed_over
        )


NO_CHECKPOINTING = Checkpointing()


def problems(
    policy: Checkpointing, model: ModelSpec, *, casts: bool = False, forwards: int = 1
) -> Iterator[str]:
    """Refusals of a model and its checkpointing, one line each, the scenario's key first. `casts`:
    under autocast, which caches casts."""
    key = "activation_checkpointing"
    blocks_only = {block.unit for block in model.blocks}
    own = [module for module in model.modules if (module.within or module.unit) in blocks_only]
    operators = [operator for module in own for operator in module.operators]
    kinds = list(dict.fromkeys(operator.kind for operator in operators))
    blocks = len({module.unit for module in model.blocks})
    if policy.mode == "selective" and bool(policy.save) == bool(policy.recompute):
        yield (
            f"{key}: selective needs one of `save` and `recompute`, found "
            f"{'both' if policy.save else 'neither'}"
        )
    if policy.mode != "selective" and (policy.save or policy.recompute):
        yield f'{key}: `save` and `recompute` go with mode = "selective", found "{policy.mode}"'
    if policy.save_every > 1 and "linear" not in policy.save:
        yield (
            f'{key}.save_every: expected with "linear" among `save`, which it counts, found '
            f'{policy.save_every} without'
        )
    if not 1 <= policy.every <= max(1, blocks):
        yield (
            f"{key}.every: expected 1 to {max(1, blocks)}, the model's blocks, found {policy.every}"
        )
    for option, names, known in (
        ("recompute", policy.recompute, kinds), ("save", policy.save, SAVEABLE)
    ):
        yield from (
            f"{key}.{option}: expected some of {listed(known, 'and')}, found {shown(word)}"
            for word in names
            if word not in known
        )
    if "attention" in policy.save and any(
        o.kind == "attention" and o.implementation in ("explicit", "math") for o in operators
    ):
        yield (
            f"{key}.save: attention of several calls (explicit, math) has no one output to keep; "
            f"use model.attention = \"sdpa\""
        )
    if policy.save and casts and _casts_again(policy, model, forwards):
        yield (
            f"{key}.save: torch 2.13 fails where autocast meets a second run "
            '("aten._to_copy.default … encountered during backward but not found in storage"); '
            'use mode = "full", or run each block once'
        )


def _casts_again(policy: Checkpointing, model: ModelSpec, forwards: int) -> bool:
    """True where a linear that is recomputed reads a trained weight for the second time."""
    again = policy.applies_to(model)
    if forwards == 1 and all(module.fqn == module.path for module in model.modules):
        return False
    linears = [
        op
        for module in model.modules
        if (module.within or module.path) in again
        for op in module.operators
        if op.kind == "linear"
    ]
    return not model.trained.isdisjoint([fqn for op in linears for fqn in (op.weight, op.bias)])
