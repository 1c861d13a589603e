"""ShardedParameters: each parameter in equal shards, as DeepSpeed lays them out at stage 3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zsim.ir.mesh import Mesh
from zsim.ir.sharding import padded_size, shard, shard_size
from zsim.models.spec import Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.parameters import trained_parameters
from zsim.strategies.building.training import Training
from zsim.strategies.deepspeed_engine.options import ShardOptions
from zsim.strategies.deepspeed_engine.partition import AXIS
from zsim.strategies.replicated.buckets import ReplicatedModel


@dataclass(frozen=True, kw_only=True)
class ShardedParameters:
    """The parameters of a training in `num_ranks` shards each, the last ones padded."""

    training: Training
    options: ShardOptions
    num_ranks: int

    @classmethod
    def of(cls, training: Training, *, mesh: Mesh, options: ShardOptions) -> ShardedParameters:
        """The layout over the ranks of `mesh`."""
        return cls(training=training, options=options, num_ranks=mesh.size(AXIS))

    @cached_property
    def gradients(self) -> ReplicatedModel:
        """Whole gradients as every rank makes them, which are DDP's."""
        return ReplicatedModel(
            training=self.training, rebuilt=(), num_replicas=self.num_ranks, views=False
        )

    @property
    def dtype(self) -> str:
        """The dtype of parameters and gradients."""
        return self.training.precision.parameters

    @property
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

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters in the order of the model."""
        return trained_parameters(self.training.model)

    @cached_property
    def own(self) -> dict[str, tuple[Parameter, ...]]:
        """The parameters of each unit in that order."""
        return {
            unit.fqn: tuple(sorted(unit.parameters, key=self.turn))
            for unit in self.training.model.units
        }

    @cached_property
    def _turns(self) -> dict[str, int]:
        return {parameter.fqn: index for index, parameter in enumerate(self.parameters)}

    def turn(self, parameter: Parameter) -> int:
        """Index of a parameter in the order of the model."""
        return self._turns[parameter.fqn]

    @cached_property
    def saving(self) -> dict[str, tuple[str, ...]]:
        """Weights of linears whose input needs a gradient, by module: all but an MLP's first."""
        model = self.training.model
        first = model.first_operator if model.family == "mlp" else None
        return {
            module.fqn: tuple([
                op.weight for op in module.operators if op.kind == "linear" and op is not first
            ])
            for module in model.modules
        }

    @cached_property
    def persistent(self) -> tuple[Parameter, ...]:
        """Parameters that stay whole from step to step."""
        most = self.options.stage3_param_persistence_threshold
        return tuple(p for p in self.parameters if p.numel <= most)

    @cached_property
    def sub_groups(self) -> tuple[tuple[Parameter, ...], ...]:
        """Parameters that the optimizer steps together: a group ends once its shards have
        `sub_group_size` elements."""
        most, groups, filled = self.options.sub_group_size, [list[Parameter]()], 0
        if most >= sum(map(self.shard_numel, self.parameters)):
            return (self.parameters,)
        for parameter in self.parameters:
            if filled >= most:
                groups.append([])
                filled = 0
            groups[-1].append(parameter)
            filled += self.shard_numel(parameter)
        return tuple(map(tuple, groups))

    def shard_numel(self, parameter: Parameter) -> int:
        """Elements of a shard, padding included."""
        return shard_size(parameter.numel, self.num_ranks)

    def padded_nbytes(self, parameter: Parameter) -> int:
        """Bytes of a gathered parameter with its padding."""
        return padded_size(parameter.numel, self.num_ranks) * self.element

    def local_numel(self, parameter: Parameter, *, rank: int) -> int:
        """Elements of a rank's shard without padding."""
        return shard(parameter.numel, num_shards=self.num_ranks, rank=rank).numel

    @cached_property
    def rank_numel(self) -> int:
        """Elements of all shards of a rank."""
        return sum(map(self.shard_numel, self.parameters))
