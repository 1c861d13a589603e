"""RankShare: the elements of flat parameters that a rank has, by which ranks differ."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.strategies.building.training import Training
from zsim.strategies.flat_parameter.flat_parameter import FlatParameter, placeholders, stepped


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """A rank's share of the flat parameters: ranks with the same one share a program."""

    hollow: frozenset[str]
    """The units of whose original parameters it has no element that is trained."""
    kept: tuple[int, ...]
    """The elements of its shard of each flat parameter, without padding."""
    stepped: tuple[int, ...]
    """The elements of each parameter that it steps."""
    placeholders: tuple[tuple[str, tuple[int, ...]], ...]
    """Elements of placeholders for unsharded gradients of original parameters, by unit."""

    @classmethod
    def of(
        cls, rank: int, *, training: Training, flats: dict[str, FlatParameter], original: bool
    ) -> RankShare:
        """The share of `rank`; `original`: the optimizer steps the original parameters."""
        model, frozen = training.model, training.model.frozen
        waits = original and training.sync == "last" and training.batch.accumulation > 1
        made = (
            placeholders(model, flats, rank=rank, dtype=training.precision.parameters)
            if waits
            else {}
        )
        empty = [
            flat.fqn
            for flat in flats.values()
            if original and all(fqn in frozen for fqn, _ in flat.held(rank))
        ]
        return cls(
            hollow=frozenset(empty),
            kept=tuple([flat.layout.local(rank).numel for flat in flats.values()]),
            stepped=tuple(stepped(model, flats, rank=rank, original=original)),
            placeholders=tuple(made.items()),
        )
