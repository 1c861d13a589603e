"""A model cut into flat buffers for ZeRO: the modules that need each buffer, its size, and its
construction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zsim.autograd.lowered import LoweredModule, ParameterGradient
from zsim.ir.buffers import Buffer, buffer_of
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, MemoryKind
from zsim.models.training_options import DTYPE_NBYTES, Offload
from zsim.strategies.building.backward_events import (
    Backwards,
    InTwo,
    accumulated_after_sums,
    until_recomputed,
)
from zsim.strategies.building.kernels import MASTER_DTYPE, accumulate_kernel, copy_kernel
from zsim.strategies.building.parameters import used_parameters
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.building.training import Training
from zsim.strategies.flat_buffer import host_buffers
from zsim.strategies.flat_buffer.groups import FlatGroup, Grouping, flat_groups

AXIS, REPLICAS = "dp_shard", "dp_replicate"
"""The axis that shards, and the one along which shards have copies."""


@dataclass(frozen=True)
class FlatModel:
    """A Training with flat buffers for param groups, cut into `num_shards` that have
    `num_replicas` each; the groups that each module needs."""

    training: Training
    groups: tuple[FlatGroup, ...]
    num_shards: int
    num_replicas: int

    @classmethod
    def cut(cls, training: Training, *, mesh: Mesh, grouping: Grouping) -> FlatModel:
        """The model of `training` cut over the axis dp_shard of `mesh`."""
        groups = flat_groups(
            training.model,
            grouping=grouping,
            num_shards=mesh.size(AXIS),
            dtype=training.precision.parameters,
        )
        return cls(training, groups, mesh.size(AXIS), mesh.size(REPLICAS))

    @property
    def dtype(self) -> str:
        """The dtype of parameters, and of each gradient that autograd makes."""
        return self.training.precision.parameters

    @property
    def gradient_dtype(self) -> str:
        """The dtype of kept gradients, into which autograd's are added."""
        return self.training.gradients or self.dtype

    @property
    def has_master(self) -> bool:
        """True where the optimizer steps a float32 copy of the shards."""
        return self.rounds and self.training.precision.master

    @property
    def offload(self) -> Offload:
        """States that live in host memory."""
        return self.training.offload

    @property
    def rounds(self) -> bool:
        """True where parameters are float32 ones, as they are drawn, rounded to two bytes."""
        return self.dtype != MASTER_DTYPE

    @property
    def casts_gradients(self) -> bool:
        """True where gradients are reduced in another dtype than theirs."""
        return self.training.precision.reduce != self.gradient_dtype

    @cached_property
    def needs(self) -> dict[str, tuple[FlatGroup, ...]]:
        """Groups with any parameter that a module reads, in group order; by module."""
        index = {
            parameter.fqn: index
            for index, group in enumerate(self.groups)
            for parameter in group.group.parameters
        }
        modules = self.training.model.modules
        return {
            module.fqn: tuple(
                [
                    self.groups[at]
                    for at in sorted(
                        {index[fqn] for fqn in used_parameters(module) if fqn in index}
                    )
                ]
            )
            for module in modules
        }

    @cached_property
    def uses(self) -> Counter[str]:
        """Number of gradients that autograd makes of each parameter in one backward: several where
        it is tied."""
        events = (event for module in self.training.modules for event in module.backward.memory)
        return Counter(event.fqn for event in events if isinstance(event, ParameterGradient))

    @cached_property
    def adding_kernels(self) -> dict[str, tuple[Kernel, ...]]:
        """Backward kernels by module, with additions into the flat gradients that the module
        completes."""
        made: Counter[str] = Counter()
        by_module = dict[str, tuple[Kernel, ...]]()
        for module in self.training.modules[::-1]:
            added = []
            for event in module.backward.memory:
                if isinstance(event, ParameterGradient):
                    made[event.fqn] += 1
                    if made[event.fqn] == self.uses[event.fqn]:
                        added.append(
                            accumulate_kernel(
                                self.numels[event.fqn], of=self.dtype, to=self.gradient_dtype
                            )
                        )
            by_module[module.fqn] = (*module.backward.kernels, *added)
        return by_module

    @cached_property
    def backwards(self) -> Backwards[InTwo]:
        """The memory of each module's backward, up to the end of its recomputation and after it."""
        return Backwards(until_recomputed, accumulated_after_sums(self.training))

    @cached_property
    def numels(self) -> dict[str, int]:
        """The elements of each parameter."""
        return {parameter.fqn: parameter.numel for parameter in self.training.model.parameters}

    @cached_property
    def made_nbytes(self) -> dict[str, int]:
        """The bytes of each gradient as autograd makes it, by parameter."""
        return {fqn: numel * DTYPE_NBYTES[self.dtype] for fqn, numel in self.numels.items()}

    @cached_property
    def stepped(self) -> list[int]:
        """The elements, padding included, of each buffer that this rank's optimizer steps."""
        return [group.layout.shard_numel for group in self.trained]

    @cached_property
    def trained(self) -> tuple[FlatGroup, ...]:
        """The groups that have gradients and are stepped."""
        return tuple([group for group in self.groups if group.trained])

    def full_nbytes(self, group: FlatGroup, dtype: str = "") -> int:
        """Bytes of the whole padded buffer."""
        return group.layout.padded_numel * DTYPE_NBYTES[dtype or self.dtype]

    def shard_nbytes(self, group: FlatGroup, dtype: str = "") -> int:
        """Bytes of one shard."""
        return group.layout.shard_numel * DTYPE_NBYTES[dtype or self.dtype]

    def last_users(self, order: Iterable[LoweredModule]) -> dict[str, tuple[FlatGroup, ...]]:
        """Groups that no later module of `order` needs, last groups first; by module."""
        last = {group.fqn: module.fqn for module in order for group in self.needs[module.fqn]}
        users: dict[str, list[FlatGroup]] = {fqn: [] for fqn in self.needs}
        for group in reversed(self.groups):
            if group.fqn in last:
                users[last[group.fqn]].append(group)
        return {fqn: tuple(groups) for fqn, groups in users.items()}


def construction(model: FlatModel, *, sharded: bool) -> StepBuilder:
    """The model is on the meta device, or made whole first. Make each param group, join it in a
    flat buffer and, if `sharded`, keep only this rank's shard of those that do not stay whole."""
    step, element = StepBuilder(), DTYPE_NBYTES[MASTER_DTYPE]
    made_whole = model.training.model.made_whole

    def make(group: FlatGroup) -> None:
        whole = (
            Alloc(Buffer(parameter.fqn), "parameters", parameter.numel * element)
            for parameter in group.group.parameters
        )
        step.issue("alloc", group.fqn, stream="host", memory=whole)

    swapped = host_buffers.swapped(model.groups, offload=model.offload, dtype=model.dtype)
    if swapped:
        step.issue("alloc", host_buffers.SWAP, stream="host", host=swapped)
    for group in model.groups if made_whole else ():
        make(group)
    for group in model.groups:
        if not made_whole:
            make(group)
        cut = sharded and not group.whole
        step.issue(
            "copy", group.fqn,
            kernels=(copy_kernel(group.layout.numel, source=model.dtype, target=model.dtype),),
            memory=_flatten(model, group, sharded=cut),
            host=host_buffers.constructed(group, offload=model.offload, dtype=model.dtype),
        )
        if cut:
            gone = Free(buffer_of(group.fqn, "unsharded"))
            step.issue("free", group.fqn, stream="host", memory=(gone,))
    return step


def _flatten(model: FlatModel, group: FlatGroup, *, sharded: bool) -> Iterator[MemoryEvent]:
    """The float32 parameters become one flat buffer, of which 2-byte parameters are a rounded copy.
    """
    kept: tuple[str, MemoryKind] = (
        ("unsharded", "unsharded_parameters") if sharded else ("parameters", "parameters")
    )
    whole: tuple[str, MemoryKind] = ("exact", "temporaries") if model.rounds else kept
    yield Alloc(buffer_of(group.fqn, whole[0]), whole[1], model.full_nbytes(group, MASTER_DTYPE))
    for parameter in group.group.parameters:
        yield Free(Buffer(parameter.fqn))
    if model.rounds:
        yield Alloc(buffer_of(group.fqn, kept[0]), kept[1], model.full_nbytes(group))
    if sharded and not model.offload.parameters:
        yield Alloc(buffer_of(group.fqn, "parameters"), "parameters", model.shard_nbytes(group))
    if model.has_master and group.trained and not model.offload.optimizer:
        yield Alloc(
            buffer_of(group.fqn, "master"), "optimizer_states",
            model.shard_nbytes(group, MASTER_DTYPE),
        )
    if model.rounds:
        yield Free(buffer_of(group.fqn, "exact"))
