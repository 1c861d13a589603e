"""EngineLayout: what every stage of DeepSpeed's engine knows of the parameters that it lays out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from zsim.ir.mesh import Mesh
from zsim.models.spec import Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.parameters import trained_parameters
from zsim.strategies.building.training import Training
from zsim.strategies.replicated.buckets import ReplicatedModel

AXIS = "dp_shard"
SCALED_DTYPE = "float16"
"""The dtype of gradients that may overflow, as their loss is scaled by more than 1."""


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The trained parameters of a training, laid out for `num_ranks` ranks."""

    training: Training
    options: Any
    """The options of its stage."""
    num_ranks: int

    @classmethod
    def of(cls, training: Training, *, mesh: Mesh, options: Any) -> Self:
        """The layout over the ranks of `mesh`, by the `options` of its stage."""
        return cls(training=training, options=options, num_ranks=mesh.size(AXIS))

    @cached_property
    def gradients(self) -> ReplicatedModel:
        """Whole gradients as every rank makes them, which are DDP's."""
        return ReplicatedModel(
            training=self.training, rebuilt=(), num_replicas=self.num_ranks, views=False
        )

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The trained parameters in the order of the model."""
        return trained_parameters(self.training.model)

    @cached_property
    def dtype(self) -> str:
        """The dtype of parameters and gradients."""
        return self.training.precision.parameters

    @cached_property
    def element(self) -> int:
        """Bytes of an element of them."""
        return DTYPE_NBYTES[self.dtype]

    @property
    def reduced_in(self) -> str:
        """The dtype of reductions: DeepSpeed's communication_data_type."""
        return self.training.precision.reduce

    @property
    def reduced_element(self) -> int:
        """Bytes of an element that is reduced."""
        return DTYPE_NBYTES[self.reduced_in]

    @property
    def casts(self) -> bool:
        """True where gradients are reduced in another dtype than their own."""
        return self.reduced_in != self.dtype
