"""The vocabulary of ZeRO on flat buffers: unshard, forward, backward, reduce, step.

Strategies compose these words; the order is theirs. Buffers are called "<param group>:<what>"; the executor frees and
makes real ones by these names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from zsim import optimizers
from zsim.mesh import Mesh
from zsim.model import ROOT
from zsim.program import Alloc, Free, Kernel, MemoryEvent, MemoryKind
from zsim.sharding import Granularity
from zsim.strategies.building import (
    MASTER_DTYPE,
    FlatGroup,
    Step,
    copy_kernel,
    flat_groups,
    late_weights,
    used_parameters,
)
from zsim.training import DTYPE_NBYTES, LoweredModule, ParameterGradient, Training

AXIS = "dp_shard"


@dataclass(frozen=True)
class FlatModel:
    """A Training whose param groups are flat buffers cut into `num_shards`; which modules need which groups."""

    training: Training
    groups: tuple[FlatGroup, ...]
    num_shards: int

    @classmethod
    def cut(cls, training: Training, *, mesh: Mesh, granularity: Granularity) -> FlatModel:
        """The model of `training` cut over the axis dp_shard of `mesh`."""
        groups = flat_groups(
            training.model.units,
            granularity=granularity,
            num_shards=mesh.size(AXIS),
            dtype=training.precision.parameters,
        )
        return cls(training, groups, mesh.size(AXIS))

    @property
    def dtype(self) -> str:
        """The dtype of parameters and kept gradients."""
        return self.training.precision.parameters

    @property
    def has_master(self) -> bool:
        """Whether the optimizer steps a float32 copy of the shards."""
        return self.dtype != MASTER_DTYPE

    @property
    def casts_gradients(self) -> bool:
        """Whether gradients are reduced in another dtype than theirs."""
        return self.training.precision.reduce != self.dtype

    @cached_property
    def needs(self) -> dict[str, tuple[FlatGroup, ...]]:
        """By module: the groups with any parameter that it reads, in group order."""
        used = {module.fqn: set(used_parameters(module)) for module in self.training.model.modules}
        return {
            fqn: tuple(g for g in self.groups if any(p.fqn in names for p in g.group.parameters))
            for fqn, names in used.items()
        }

    @cached_property
    def uses(self) -> Counter[str]:
        """How many gradients autograd makes of each parameter in one backward; more than one where it is tied."""
        events = (event for module in self.training.modules for event in module.backward.memory)
        return Counter(event.fqn for event in events if isinstance(event, ParameterGradient))

    @cached_property
    def late(self) -> frozenset[str]:
        """Weights whose gradients are added after their bias's."""
        return late_weights(self.training.model)

    @cached_property
    def numels(self) -> dict[str, int]:
        """The elements of each parameter."""
        return {parameter.fqn: parameter.numel for parameter in self.training.model.parameters}

    @cached_property
    def stepped(self) -> list[int]:
        """The elements, padding included, of each buffer that this rank's optimizer steps."""
        return [group.layout.shard_numel for group in self.groups]

    def full_nbytes(self, group: FlatGroup, dtype: str = "") -> int:
        """Bytes of the whole padded buffer."""
        return group.layout.padded_numel * DTYPE_NBYTES[dtype or self.dtype]

    def shard_nbytes(self, group: FlatGroup, dtype: str = "") -> int:
        """Bytes of one shard."""
        return group.layout.shard_numel * DTYPE_NBYTES[dtype or self.dtype]

    def last_users(self, order: Iterable[LoweredModule]) -> dict[str, tuple[FlatGroup, ...]]:
        """By module: the groups that no later module of `order` needs; those that come last first."""
        last = {group: module.fqn for module in order for group in self.needs[module.fqn]}
        return {fqn: tuple(g for g in reversed(self.groups) if last.get(g) == fqn) for fqn in self.needs}


def construction(model: FlatModel, *, sharded: bool) -> Step:
    """Build the whole model, make each param group a flat buffer and, if `sharded`, keep only this rank's shard."""
    step, element = Step(), DTYPE_NBYTES[MASTER_DTYPE]
    for unit in model.training.model.units:
        whole = (Alloc(parameter.fqn, "parameters", parameter.numel * element) for parameter in unit.parameters)
        step.issue("alloc", unit.fqn, stream="host", memory=whole)
    for group in model.groups:
        step.issue("copy", group.fqn, kernels=_copies(model, group), memory=_flatten(model, group, sharded=sharded))
        if sharded:
            step.issue("free", group.fqn, stream="host", memory=(Free(f"{group.fqn}:unsharded"),))
    return step


def _copies(model: FlatModel, group: FlatGroup) -> tuple[Kernel, ...]:
    return (copy_kernel(group.layout.numel, source=model.dtype, target=model.dtype),)


def _flatten(model: FlatModel, group: FlatGroup, *, sharded: bool) -> Iterator[MemoryEvent]:
    """The float32 parameters become one flat buffer, of which 2-byte parameters are a rounded copy."""
    kept: tuple[str, MemoryKind] = ("unsharded", "unsharded_parameters") if sharded else ("parameters", "parameters")
    whole: tuple[str, MemoryKind] = ("exact", "temporaries") if model.has_master else kept
    yield Alloc(f"{group.fqn}:{whole[0]}", whole[1], model.full_nbytes(group, MASTER_DTYPE))
    for parameter in group.group.parameters:
        yield Free(parameter.fqn)
    if model.has_master:
        yield Alloc(f"{group.fqn}:{kept[0]}", kept[1], model.full_nbytes(group))
    if sharded:
        yield Alloc(f"{group.fqn}:parameters", "parameters", model.shard_nbytes(group))
    if model.has_master:
        yield Alloc(f"{group.fqn}:master", "optimizer_states", model.shard_nbytes(group, MASTER_DTYPE))
        yield Free(f"{group.fqn}:exact")


@dataclass(slots=True)
class FlatStep:
    """One training step in the words of ZeRO. It remembers what is gathered and which gradients live."""

    model: FlatModel
    gradient_kind: MemoryKind = "unsharded_gradients"
    step: Step = field(default_factory=Step)
    micro_batch: int = 0
    _gathered: dict[str, int] = field(default_factory=dict)
    _gradients: set[str] = field(default_factory=set)
    _shards: set[str] = field(default_factory=set)
    _made: Counter[str] = field(default_factory=Counter)
    _compute: list[int] = field(default_factory=list)
    _reduced: list[int] = field(default_factory=list)

    def unshard(self, *groups: FlatGroup) -> None:
        """All-gather what is not gathered yet, once the compute issued so far has ended: its memory is reused."""
        for group in groups:
            if group.fqn not in self._gathered:
                nbytes = self.model.full_nbytes(group)
                self._gathered[group.fqn] = self.step.issue(
                    "all_gather",
                    group.fqn,
                    stream="all_gather",
                    waits=self._compute[-1:],
                    group=AXIS,
                    nbytes=nbytes,
                    dtype=self.model.dtype,
                    micro_batch=self.micro_batch,
                    memory=(Alloc(f"{group.fqn}:unsharded", "unsharded_parameters", nbytes),),
                )

    def reshard(self, *groups: FlatGroup) -> None:
        """Free gathered parameters."""
        for group in groups:
            del self._gathered[group.fqn]
            self._free(group, "unsharded")

    def forward(self, module: LoweredModule) -> None:
        """Compute with the parameters of the module, which must be gathered."""
        memory = (event for event in module.forward.memory if not isinstance(event, ParameterGradient))
        self._issue_compute("forward", module, memory=memory)

    def backward(self, module: LoweredModule) -> None:
        """Compute; each gradient is added into the flat gradient of its group, which is made when missing."""
        self._issue_compute("backward", module, memory=self._backward_memory(module))

    def _issue_compute(self, kind: str, module: LoweredModule, *, memory: Iterable[MemoryEvent]) -> None:
        backward = kind == "backward"
        index = self.step.issue(
            "backward" if backward else "forward",
            module.unit,
            waits=(self._gathered[g.fqn] for g in self.model.needs[module.fqn] if g.fqn in self._gathered),
            micro_batch=self.micro_batch,
            kernels=(module.backward if backward else module.forward).kernels,
            memory=memory,
        )
        self._compute.append(index)

    def _backward_memory(self, module: LoweredModule) -> Iterator[MemoryEvent]:
        for group in self.model.needs[module.fqn]:
            if group.fqn not in self._gradients:
                self._gradients.add(group.fqn)
                yield Alloc(f"{group.fqn}:gradients", self.gradient_kind, self.model.full_nbytes(group))
        deferred: list[MemoryEvent] = []
        for event in module.backward.memory:
            if not isinstance(event, ParameterGradient):
                yield event
                continue
            made, *freed = self._born(event.fqn)
            yield made
            if event.fqn in self.model.late:
                deferred = freed
            else:
                yield from (*freed, *deferred)
                deferred = []

    def _born(self, fqn: str) -> Iterator[MemoryEvent]:
        """A gradient is made apart; the last of a parameter's gradients lets all of them be added and freed."""
        self._made[fqn] += 1
        nbytes = self.model.numels[fqn] * DTYPE_NBYTES[self.model.dtype]
        yield Alloc(f"{fqn}.gradient{self._made[fqn]}", "temporaries", nbytes)
        if self._made[fqn] == self.model.uses[fqn]:
            for made in range(self._made.pop(fqn), 0, -1):
                yield Free(f"{fqn}.gradient{made}")

    def all_reduce_gradients(self, group: FlatGroup) -> None:
        """Average the whole flat gradient in place."""
        self._reduce_in_place("all_reduce", group)

    def reduce_scatter_in_place(self, group: FlatGroup) -> None:
        """Average into this rank's slice of the flat gradient, which stays whole."""
        self._reduce_in_place("reduce_scatter", group)

    def _reduce_in_place(self, kind: str, group: FlatGroup) -> None:
        memory = (Free(f"{group.fqn}:reduce_input"),) if self.model.casts_gradients else ()
        self._issue_reduction(kind, group, memory=memory)

    def reduce_scatter_gradients(self, group: FlatGroup) -> None:
        """Average into the gradient shard, which is made or added to, and free the whole gradient."""
        self._issue_reduction("reduce_scatter", group, memory=tuple(self._shard_memory(group)))
        self._gradients.remove(group.fqn)
        self._free(group, "gradients")

    def _shard_memory(self, group: FlatGroup) -> Iterator[MemoryEvent]:
        kept = group.fqn in self._shards
        self._shards.add(group.fqn)
        apart = kept or self.model.casts_gradients
        if apart:
            nbytes = self.model.shard_nbytes(group, self.model.training.precision.reduce)
            yield Alloc(f"{group.fqn}:reduce_output", "communication", nbytes)
        if self.model.casts_gradients:
            yield Free(f"{group.fqn}:reduce_input")
        if not kept:
            yield Alloc(f"{group.fqn}:gradient_shard", "gradients", self.model.shard_nbytes(group))
        if apart:
            yield Free(f"{group.fqn}:reduce_output")

    def _issue_reduction(self, kind: str, group: FlatGroup, *, memory: tuple[MemoryEvent, ...]) -> None:
        reduce_dtype = self.model.training.precision.reduce
        nbytes = self.model.full_nbytes(group, reduce_dtype)
        ready = self._compute[-1]
        if self.model.casts_gradients:
            ready = self.step.issue(
                "copy",
                group.fqn,
                micro_batch=self.micro_batch,
                kernels=(copy_kernel(group.layout.padded_numel, source=self.model.dtype, target=reduce_dtype),),
                memory=(Alloc(f"{group.fqn}:reduce_input", "communication", nbytes),),
            )
        self._reduced.append(
            self.step.issue(
                "all_reduce" if kind == "all_reduce" else "reduce_scatter",
                group.fqn,
                stream="all_reduce" if kind == "all_reduce" else "reduce_scatter",
                waits=(ready,),
                group=AXIS,
                nbytes=nbytes,
                dtype=reduce_dtype,
                micro_batch=self.micro_batch,
                memory=memory,
            )
        )

    def optimizer(self, *, first: bool) -> int:
        """Step this rank's shards in float32 and return the op; the first step makes the optimizer's states."""
        model = self.model
        kernels = optimizers.kernels(model.stepped, optimizer=model.training.optimizer, dtype=MASTER_DTYPE)
        if model.has_master:
            kernels += (copy_kernel(sum(model.stepped), source=MASTER_DTYPE, target=model.dtype),)
        return self.step.issue(
            "optimizer", ROOT, waits=self._reduced, kernels=kernels, memory=self._optimizer_memory(first=first)
        )

    def _optimizer_memory(self, *, first: bool) -> Iterator[MemoryEvent]:
        model, optimizer = self.model, self.model.training.optimizer
        casts = [group for group in model.groups if model.has_master]
        for group in casts:
            yield Alloc(f"{group.fqn}:master_gradient", "temporaries", model.shard_nbytes(group, MASTER_DTYPE))
        if first:
            yield from optimizers.states(
                model.stepped, optimizer=optimizer, dtype=MASTER_DTYPE, device=model.training.device, owner="optimizer"
            )
        yield from optimizers.step_memory(model.stepped, optimizer=optimizer, dtype=MASTER_DTYPE, owner="optimizer")
        for group in casts:
            yield Free(f"{group.fqn}:master_gradient")

    def all_gather_parameters(self, group: FlatGroup, *, after: int) -> None:
        """All-gather stepped shards in place, into the whole parameters that every rank keeps."""
        self.step.issue(
            "all_gather",
            group.fqn,
            stream="all_gather",
            waits=(after,),
            group=AXIS,
            nbytes=self.model.full_nbytes(group),
            dtype=self.model.dtype,
        )

    def zero_grad(self) -> None:
        """Free whatever gradients still live."""
        for group in self.model.groups:
            if group.fqn in self._gradients:
                self._free(group, "gradients")
            if group.fqn in self._shards:
                self._free(group, "gradient_shard")

    def _free(self, group: FlatGroup, what: str) -> None:
        buffer = Free(f"{group.fqn}:{what}")
        self.step.issue("free", group.fqn, stream="host", micro_batch=self.micro_batch, memory=(buffer,))
