"""FlatParameterStep: a training step in FSDP1's terms: unshard, reshard, reduce one flat parameter.

Lifetimes follow the host's order, streams and waits torch/distributed/fsdp/_runtime_utils.py. Its
pre-unshard stream is called all_gather_copy_in, its unshard stream all_gather, its post-backward
stream reduce_scatter. An op of the compute stream frees the memory of these streams that compute
reads, as record_stream tells the allocator. The limiter blocks the host for that op's event.
hooks.py decides the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from zsim.ir.buffers import NOTHING, form_of, gradient_of, unsharded_gradient_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, Stream
from zsim.models.spec import ROOT
from zsim.strategies.building.kernels import copy_kernel
from zsim.strategies.flat_parameter.flat_parameter import FlatParameter
from zsim.strategies.flat_parameter.views import view
from zsim.strategies.fsdp.gradient_division import divide_kernels, division
from zsim.strategies.fsdp.passes import ORIGINAL, Passes

MAX_PENDING_FREES = 2
"""Pending frees at which the limiter waits for the oldest before it gathers
(_FreeEventQueue._max_num_inflight_all_gathers)."""
EARLIER_STEP = -1
"""The event of a free in an earlier step, which is over."""


@dataclass(slots=True, kw_only=True)
class FlatParameterStep(Passes):
    """One training step of one rank."""

    limits: bool = True
    """The host waits when frees are pending (limit_all_gathers)."""
    units: tuple[str, ...] = ()
    """The units that have a flat parameter."""
    hollow: frozenset[str] = frozenset()
    """Units of which this rank's shard has nothing of trained original parameters: only padding, or
    frozen ones."""
    originals: bool = False
    """The original parameters are visible (use_orig_params)."""
    hung: list[tuple[int, str]] = field(default_factory=list)
    """The ops in which unsharded gradients are hung on original parameters for the first time, and
    the units of these."""
    frees: list[int] = field(default_factory=list)
    """The events of frees that the limiter has not waited for, oldest first."""
    gather_waits: dict[Stream, list[int]] = field(default_factory=dict)
    """Waits of the first op of each gather stream in this forward: the compute stream as it was."""
    last_gather: list[int] = field(default_factory=list)
    reduced: dict[Stream, int] = field(default_factory=dict)
    """The last op of each of the streams that reduce."""

    def copy(self) -> FlatParameterStep:
        """This step so far, to be ended in another way."""
        return replace(
            self, ops=list(self.ops), parts=list(self.parts), live=set(self.live),
            hung=list(self.hung),
        )

    def repeated(self, *, sync: bool) -> bool:
        """True where this micro-batch begins as one before, whose ops it then has."""
        state = sync, frozenset(self.live)
        events = self.frees, self.last_gather, self.waits
        return self.repeat(self.micro_batch, state, *events) > 0

    def hang_gradients(self, placeholders: dict[str, tuple[int, ...]]) -> None:
        """Fill in what a rank makes, by unit, to hang unsharded gradients on original parameters:
        each for a moment."""
        for index, unit in self.hung:
            memory: list[MemoryEvent] = []
            for number, numel in enumerate(placeholders[unit]):
                name = form_of(unit, "placeholder", number)
                memory += [Alloc(name, "temporaries", self.nbytes(numel, ORIGINAL)), Free(name)]
            self.ops[index] = replace(self.ops[index], memory=tuple(memory))

    # -- unshard and reshard

    def unshard(self, flat: FlatParameter) -> None:
        """Cast the shard, let the limiter wait, all-gather; of one that is unsharded already only
        the limiter's part."""
        dtype, cast = self.training.precision.parameters, list[MemoryEvent]()
        waits = self.gather_waits.pop("all_gather", []) if not flat.unsharded else []
        if not flat.unsharded and dtype != ORIGINAL:
            nbytes = self.nbytes(flat.shard, dtype)
            cast = self.alloc(form_of(flat.fqn, "cast"), "communication", nbytes)
            copied = self.issue(
                "copy",
                flat.fqn,
                stream="all_gather_copy_in",
                waits=self.gather_waits.pop("all_gather_copy_in", []),
                micro_batch=self.micro_batch,
                kernels=(copy_kernel(flat.shard, source=ORIGINAL, target=dtype),),
                memory=cast,
            )
            waits = [*waits, copied]
        self._limit(flat)
        flat.in_use = True
        if flat.unsharded:
            return
        flat.unsharded = True
        nbytes = self.nbytes(flat.padded, dtype)
        made = self.alloc(form_of(flat.fqn, "unsharded"), "unsharded_parameters", nbytes)
        gathered = self.issue(
            "all_gather",
            flat.fqn,
            stream="all_gather",
            waits=waits,
            group="dp_shard",
            nbytes=nbytes,
            dtype=dtype,
            micro_batch=self.micro_batch,
            memory=(*made, *self.drop(form_of(flat.fqn, "cast"))),
        )
        self.last_gather = [gathered]

    def _limit(self, flat: FlatParameter) -> None:
        """Block the host until the compute stream has come to the oldest of too many pending frees.
        """
        if self.limits and len(self.frees) >= MAX_PENDING_FREES:
            event = self.frees.pop(0)
            if event != EARLIER_STEP:
                self.issue(
                    "host_wait", flat.fqn, stream="host", waits=(event,),
                    micro_batch=self.micro_batch,
                )

    def wait_for_unshard(self) -> None:
        """The compute stream waits for all that the unshard stream has been given."""
        self.waits = [*self.waits, *self.last_gather]

    def reshard(self, flat: FlatParameter, *, free: bool, keeps_views: bool = False) -> None:
        """The unit is over, and its unsharded storage is freed, or kept; with `keeps_views` the
        original parameters stay in it."""
        flat.prefetched, flat.in_use = False, keeps_views
        if free:
            flat.unsharded = False
            memory = self.drop(form_of(flat.fqn, "unsharded"))
            event = self.issue("free", flat.fqn, micro_batch=self.micro_batch, memory=memory)
            self.frees += [event] if self.limits else []

    def begin_forward(self) -> None:
        """The root's forward begins: gradients that only flat parameters still hold go, and gathers
        wait for the compute stream.

        In a later micro-batch these are of hollow shards, in which no original parameter has a
        gradient (_reset_flat_param_grad_info).
        """
        holders = [fqn for fqn in self.units if not self.micro_batch or fqn in self.hollow]
        gone = self.drop_each([gradient_of(fqn) for fqn in holders])
        if gone:
            self.issue("free", ROOT, stream="host", memory=gone)
        last = self.last_computed()
        self.gather_waits = {"all_gather": [*last], "all_gather_copy_in": [*last]}

    def last_computed(self) -> list[int]:
        """The last op of the compute stream."""
        return next(([op.index] for op in reversed(self.ops) if op.stream == "compute"), [])

    # -- reduce

    def concatenate_gradients(self, flat: FlatParameter, *, run: int) -> None:
        """The backward of the split into the views of a `run`: their gradients are copied into one,
        beside zeros for missing ones.

        Autograd first adds up the runs of a unit. With casts each run has an accumulator of its
        own, as they change the flat parameter's dtype. Gradients that earlier micro-batches have
        left are added to in place. The hook after the last run holds the addend to its end.
        """
        dtype, own, last = (
            self.training.precision.parameters, unsharded_gradient_of(flat.fqn), not flat.splits,
        )
        nbytes, apart, waiting = (
            self.nbytes(flat.numel, dtype), dtype != ORIGINAL, flat.accumulating,
        )
        in_place = (
            self.training.device == "cuda"
        )  # autograd adds out of place where a meter watches, see zsim/autograd/tape.py
        parts = [
            unsharded_gradient_of(view(fqn, run)) if fqn else NOTHING
            for fqn, _ in flat.pieces
        ]
        copies, sharing = self.gradients.copied(
            [view(fqn, run) for fqn, _ in reversed(flat.pieces) if fqn], self.live
        )
        empty = [
            numel
            for (_, numel), part in zip(flat.pieces, parts, strict=True)
            if part not in self.live and part not in sharing
        ]
        zeros = [
            (form_of(flat.fqn, "zeros", index), self.nbytes(numel, dtype))
            for index, numel in enumerate(empty)
        ]
        total = form_of(own, "added") if own in self.live and waiting != own else own
        made = form_of(own, "of", flat.splits)
        if apart or (not waiting and (last or in_place)):
            made = total
        memory = (
            copies
            + self.alloc_each(zeros, "temporaries")
            + self.alloc(made, "unsharded_gradients", nbytes)
        )
        memory += self.drop_each([name for name, _ in zeros]) + self.drop_each(parts)
        if waiting and not in_place:
            flat.accumulating = total if last else form_of(own, "sum", flat.splits)
            memory += self.alloc(flat.accumulating, "unsharded_gradients", nbytes) + self.drop_each(
                [waiting, made]
            )
        elif waiting or (apart and total != own and not last):
            memory += self.drop(made)
        elif not apart:
            flat.accumulating = made
        if last:
            flat.accumulating = NOTHING
        sums = bool(waiting) + (total != own and (apart or last))
        kernels = (
            copy_kernel(flat.numel, source=dtype, target=dtype),
            *[Kernel("add", flat.numel, 3 * nbytes, dtype)] * sums,
        )
        self.issue("copy", flat.fqn, micro_batch=self.micro_batch, kernels=kernels, memory=memory)

    def reduce(self, flat: FlatParameter) -> None:
        """Cast, pad and divide the flat gradient, reduce-scatter, over replicas all-reduce, divide,
        cast and add the shard."""
        dtype = self.training.precision.reduce
        kernels, memory = self._reduce_input(flat)
        fresh = gradient_of(flat.fqn) not in self.live
        kept = fresh and dtype == ORIGINAL
        output = gradient_of(flat.fqn) if kept else form_of(flat.fqn, "reduced")
        memory += self.alloc(output, "gradients", self.nbytes(flat.shard, dtype))
        after = self.last_computed()
        if kernels:
            after = [self._on("reduce_scatter", flat, kernels, waits=after, memory=memory)]
            memory = []
        self.reduced["reduce_scatter"] = self.issue(
            "reduce_scatter",
            flat.fqn,
            stream="reduce_scatter",
            waits=after,
            group="dp_shard",
            nbytes=self.nbytes(flat.padded, dtype),
            dtype=dtype,
            micro_batch=self.micro_batch,
            memory=memory,
        )
        stream: Stream = "reduce_scatter"
        if self.mesh.dp_replicate > 1:
            stream = "all_reduce"
            self.reduced[stream] = self.issue(
                "all_reduce",
                flat.fqn,
                stream=stream,
                waits=(self.reduced["reduce_scatter"],),
                group="dp_replicate",
                nbytes=self.nbytes(flat.shard, dtype),
                dtype=dtype,
                micro_batch=self.micro_batch,
            )
        kernels, memory = self._accumulated(flat, fresh=fresh)
        memory += self.drop_each(
            [
                form_of(flat.fqn, "reduced"), form_of(flat.fqn, "cast_gradient"),
                form_of(flat.fqn, "padded_gradient"),
            ]
        )
        unsharded = unsharded_gradient_of(flat.fqn)
        memory += self.drop_each([unsharded, form_of(unsharded, "added")])
        self._on(stream, flat, kernels, memory=memory)

    def accumulate_without_sync(self, flat: FlatParameter) -> None:
        """Keep the unsharded gradient, in the dtype of the parameters, for a later micro-batch
        (no_sync)."""
        if self.originals and not self.micro_batch:
            self.hung.append((self.issue("alloc", flat.fqn, stream="host"), flat.fqn))
        memory = self.drop(form_of(unsharded_gradient_of(flat.fqn), "added"))
        if memory:
            self.issue("free", flat.fqn, stream="host", micro_batch=self.micro_batch, memory=memory)

    def _reduce_input(self, flat: FlatParameter) -> tuple[tuple[Kernel, ...], list[MemoryEvent]]:
        """Cast, padding and division of the flat gradient before the reduce-scatter."""
        source, dtype = self.training.precision.parameters, self.training.precision.reduce
        kernels, memory = tuple[Kernel, ...](), list[MemoryEvent]()
        if source != dtype:
            kernels += (copy_kernel(flat.numel, source=source, target=dtype),)
            memory += self.alloc(
                form_of(flat.fqn, "cast_gradient"), "communication", self.nbytes(flat.numel, dtype)
            )
        if flat.padded > flat.numel:
            moved = self.nbytes(flat.padded + 2 * flat.numel, dtype)  # filled, then copied into
            kernels += (Kernel("pad", 0, moved, dtype),)
            memory += self.alloc(
                form_of(flat.fqn, "padded_gradient"), "communication",
                self.nbytes(flat.padded, dtype),
            )
        before, _ = division(self.mesh.world_size)
        return kernels + divide_kernels(
            flat.padded, by=before, dtype=self.training.precision.reduce
        ), memory

    def _accumulated(
        self, flat: FlatParameter, *, fresh: bool
    ) -> tuple[tuple[Kernel, ...], list[MemoryEvent]]:
        """Division and cast of the reduced shard, and its addition to that of earlier
        micro-batches."""
        dtype, name = self.training.precision.reduce, gradient_of(flat.fqn)
        _, after = division(self.mesh.world_size)
        kernels, memory = (
            divide_kernels(flat.shard, by=after, dtype=self.training.precision.reduce),
            list[MemoryEvent](),
        )
        if dtype != ORIGINAL:
            kernels += (copy_kernel(flat.shard, source=dtype, target=ORIGINAL),)
            memory += self.alloc(
                name if fresh else form_of(flat.fqn, "new_gradient"), "gradients",
                self.nbytes(flat.shard, ORIGINAL),
            )
            memory += self.drop(form_of(flat.fqn, "reduced"))
        if not fresh:
            kernels += (Kernel("add", flat.shard, 3 * self.nbytes(flat.shard, ORIGINAL), ORIGINAL),)
            memory += self.drop(form_of(flat.fqn, "new_gradient"))
        return kernels, memory

    def _on(
        self,
        stream: Stream,
        flat: FlatParameter,
        kernels: tuple[Kernel, ...],
        *,
        waits: list[int] | None = None,
        memory: list[MemoryEvent],
    ) -> int:
        """Kernels on one of the streams that reduce, or nothing but the frees of their memory."""
        self.reduced[stream] = self.issue(
            "copy" if kernels else "free",
            flat.fqn,
            stream=stream,
            waits=waits or (),
            micro_batch=self.micro_batch,
            kernels=kernels,
            memory=memory,
        )
        return self.reduced[stream]

    def wait_for_reductions(self) -> None:
        """The compute stream waits for all reductions so far."""
        waits, self.reduced = self.reduced.values(), {}
        self.issue("free", ROOT, waits=waits, micro_batch=self.micro_batch)
