"""Gathering and letting go of parameters, as torch's FSDPParamGroup does: unshard, wait for it,
reshard.

Lifetimes follow the host's order: a buffer lives from the line of torch that makes it to the line
that drops its last reference. Streams and waits follow FSDPCommContext.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from zsim.ir.buffers import NOTHING, Buffer, Form, form_of
from zsim.ir.mesh import part_of
from zsim.ir.ops import Alloc, Kernel, MemoryEvent
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import copy_kernel
from zsim.strategies.fsdp.passes import Passes
from zsim.strategies.fully_shard.param_group import FSDPParamGroup, Sharded

PART: Form = "resharded"
AGAIN: Form = "resharded.again"
"""Forms of parameters in the part that forward keeps, in turn."""


@dataclass(slots=True, kw_only=True)
class UnshardingStep(Passes):
    """The gathered groups of one rank's step, and the last events of each stream that torch waits
    for."""

    offload: bool = False
    """Sharded parameters, their gradients and optimizer states live in host memory
    (CPUOffloadPolicy)."""
    gather_waits: list[int] = field(default_factory=list)
    """Waits of the next all-gather: a copy-out, in forward the one before the last, in backward the
    last."""
    last_copy_out: list[int] = field(default_factory=list)
    forward_gather: FSDPParamGroup | None = None
    """The group whose all-gather output forward keeps until the next one has been copied out."""
    forward_output: Buffer = NOTHING
    """Name of that group's all-gather output."""
    outputs: dict[str, Buffer] = field(default_factory=dict)
    """The last all-gather output of each group; one that runs twice in a row has two at once."""
    gathers: dict[str, int] = field(default_factory=dict)
    reshards: dict[str, int] = field(default_factory=dict)
    """The copy that kept a part of each group after forward; the group's next all-gather waits for
    it."""

    @property
    def original(self) -> str:
        """The dtype of sharded parameters, of their gradients and of optimizer states."""
        return self.training.precision.stepped

    def unshard(self, group: FSDPParamGroup) -> None:
        """Issue the all-gather of a group that is neither gathered nor unsharded."""
        if group.unsharded or group.gathered:
            return
        group.gathered = True
        if self.mesh.dp_shard == 1:
            return
        dtype = self.training.precision.parameters
        spread = group.resharded_to or self.mesh.dp_shard
        part = group.totals["padded"] // spread
        inputs, transfers = self._all_gather_inputs(group, part)
        source = dtype if group.resharded_to else self.original
        name = form_of(group.fqn, "all_gather")
        self.outputs[group.fqn] = form_of(name, "again") if name in self.live else name
        output = self.alloc(
            self.outputs[group.fqn], "communication", self.nbytes(group.totals["padded"], dtype)
        )
        if group.fqn in self.reshards:
            self.gather_waits = [*self.gather_waits, self.reshards.pop(group.fqn)]
        copy = self.issue(
            "copy", group.fqn, stream="all_gather_copy_in", waits=self.gather_waits,
            micro_batch=self.micro_batch,
            kernels=(*transfers, copy_kernel(part, source=source, target=dtype)),
            memory=(*inputs, *output),
        )
        self.gathers[group.fqn] = self.issue(
            "all_gather",
            group.fqn,
            stream="all_gather",
            waits=(copy,),
            group="dp_shard" if not group.resharded_to else part_of("dp_shard", spread),
            nbytes=self.nbytes(group.totals["padded"], dtype),
            dtype=dtype,
            micro_batch=self.micro_batch,
            memory=self._dropped(inputs),
        )

    def _all_gather_inputs(
        self, group: FSDPParamGroup, part: int
    ) -> tuple[list[MemoryEvent], tuple[Kernel, ...]]:
        """Inputs of an all-gather: the shards, cast together; offloaded ones are moved to the
        device and cast one by one."""
        dtype = self.training.precision.parameters
        if not self.offload:
            casts = dtype != self.original
            return self.alloc(
                form_of(group.fqn, "cast"), "communication", self.nbytes(part, dtype)
            ) if casts else [], ()
        if group.resharded_to:  # what forward kept is on the device, in the dtype of compute
            return [], ()
        memory: list[MemoryEvent] = []
        for parameter in group.parameters:
            memory += self._onloaded(parameter)
        return memory, self._transfer("to_device", group.totals["shard"])

    def _onloaded(self, parameter: Sharded) -> list[MemoryEvent]:
        """One shard as the device reads it: from the host where it is there, in the dtype of
        compute."""
        dtype, memory = self.training.precision.parameters, list[MemoryEvent]()
        if self.elsewhere:
            nbytes = self.nbytes(parameter.shard, self.original)
            memory += self.alloc(form_of(parameter.fqn, "onloaded"), "communication", nbytes)
        if dtype != self.original:
            memory += self.alloc(
                form_of(parameter.fqn, "cast"), "communication", self.nbytes(parameter.shard, dtype)
            )
            memory += self.drop(form_of(parameter.fqn, "onloaded"))
        return memory

    def _dropped(self, made: list[MemoryEvent]) -> list[MemoryEvent]:
        """The frees of what of `made` lives."""
        return (
            self.drop_each([event.buffer for event in made if isinstance(event, Alloc)])
            if made
            else []
        )

    @property
    def elsewhere(self) -> bool:
        """True where host memory is not the device's own."""
        return self.offload and self.training.device != "cpu"

    def where_shards_are(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """`kernels` of the optimizer, run by the host where the shards lie in its memory."""
        return (
            tuple(replace(kernel, location="host") for kernel in kernels)
            if self.elsewhere
            else kernels
        )

    def _transfer(self, name: str, numel: int) -> tuple[Kernel, ...]:
        """One crossing of the link by `numel` elements of this rank's shards, in the dtype they are
        kept in."""
        nbytes = self.nbytes(numel, self.original)
        return (Kernel(name, 0, nbytes, self.original, location="link"),) if self.elsewhere else ()

    def unshard_each(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Issue the all-gathers of groups that will be needed later."""
        for group in groups:
            self.unshard(group)

    def wait_for_unshard(self, group: FSDPParamGroup, *, forward: bool) -> None:
        """Copy the all-gather's output out into the unsharded parameters; the next all-gathers wait
        for that copy."""
        if group.unsharded:
            return
        dtype = self.training.precision.parameters
        memory = self._unsharded(group)
        if group.resharded_to and group.part:
            memory += self.drop_each(
                [form_of(parameter.fqn, group.part) for parameter in group.parameters]
            )
            group.part = None
        transfers = (
            self._transfer("to_device", group.totals["shard"]) if self.mesh.dp_shard == 1 else ()
        )
        group.resharded_to = 0
        gathered = self.outputs.get(group.fqn, NOTHING)
        if forward:
            memory += self.drop(self.forward_output)
            self.forward_gather, self.forward_output = group, gathered
        else:
            memory += self.drop(gathered)
        copied = self.issue(
            "copy",
            group.fqn,
            waits=[self.gathers[group.fqn]] if group.fqn in self.gathers else [],
            micro_batch=self.micro_batch,
            kernels=(*transfers, copy_kernel(group.totals["padded"], source=dtype, target=dtype)),
            memory=memory,
        )
        self.gather_waits = self.last_copy_out if forward else [copied]
        self.last_copy_out = [copied]
        group.unsharded, group.gathered = True, False

    def _unsharded(self, group: FSDPParamGroup) -> list[MemoryEvent]:
        """The allocations of a group's unsharded parameters."""
        element = DTYPE_NBYTES[self.training.precision.parameters]
        sizes = [
            (buffer, parameter.padded * element)
            for buffer, parameter in zip(group.whole, group.parameters, strict=True)
        ]
        if self.mesh.dp_shard > 1:
            return self.alloc_each(sizes, "unsharded_parameters")
        memory: list[MemoryEvent] = []
        before: list[MemoryEvent] = []
        for parameter, size in zip(group.parameters, sizes, strict=True):
            # no all-gather: each shard is read by itself, and dropped once the next one is
            read = self._onloaded(parameter)
            memory += [*read, *before]
            before = self._dropped(read)
            memory += self.alloc_each([size], "unsharded_parameters")
        return memory + before

    def reshard(
        self, group: FSDPParamGroup, *, to: int = 0, held: Sequence[MemoryEvent] = ()
    ) -> None:
        """Free the unsharded parameters; with `to`, keep 1/to of them for a cheaper all-gather in
        backward, and then let `held` go.

        A group without a backward is sharded again at its end, as nothing has gathered it, but its
        part goes with the next one only.
        """
        if not group.unsharded:
            group.resharded_to = 0
            return
        if to:
            memory: list[MemoryEvent] = []
            dtype = self.training.precision.parameters
            before, part = group.part, AGAIN if group.part == PART else PART
            group.part = part
            for whole, parameter in zip(group.whole, group.parameters, strict=True):
                nbytes = self.nbytes(parameter.padded // to, dtype)
                memory += self.alloc(
                    form_of(parameter.fqn, part), "unsharded_parameters", nbytes
                )
                memory += self.drop(form_of(parameter.fqn, before)) if before else []
                memory += self.drop(whole)
            memory += held
            kernels = (copy_kernel(group.totals["padded"] // to, source=dtype, target=dtype),)
            copied = self.issue(
                "copy", group.fqn, micro_batch=self.micro_batch, kernels=kernels, memory=memory
            )
            self.reshards[group.fqn] = copied
        else:
            memory = self.drop_each(group.whole)
            self.issue(
                "free", group.fqn, stream="host", micro_batch=self.micro_batch, memory=memory
            )
        group.unsharded, group.resharded_to = False, to
