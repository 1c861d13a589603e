"""ReducingStep: gradients of a param group are accumulated, or reduced over shards and replicas, as
torch's FSDPParamGroup does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from zsim.ir.buffers import Buffer, form_of, gradient_of, unsharded_gradient_of
from zsim.ir.ops import Free, HostAlloc, HostEvent, Kernel, MemoryEvent
from zsim.models.torch_versions import INPUT_BESIDE_THE_NEXT, INPUT_PAST_IDLE_UNITS
from zsim.strategies.building.kernels import add_kernel, copy_kernel
from zsim.strategies.fsdp.gradient_division import divide_kernels, division
from zsim.strategies.fully_shard.param_group import FSDPParamGroup, Sharded
from zsim.strategies.fully_shard.unshard import UnshardingStep


def accumulated_of(parameter: Sharded) -> Buffer:
    """The gradient of a parameter from earlier micro-batches, kept in the reduce dtype."""
    return form_of(parameter.fqn, "accumulated_gradient")


@lru_cache(maxsize=1024)
def additions(numels: tuple[int, ...], *, of: str, to: str) -> tuple[Kernel, ...]:
    """A kernel for each parameter, as torch adds gradients, of so many elements; the same object
    for the same ones."""
    return tuple([add_kernel(numel, of=of, to=to) for numel in numels])


@dataclass(slots=True, kw_only=True)
class ReducingStep(UnshardingStep):
    """The reductions of one rank's step, and the waits for them."""

    on_host: set[str] = field(default_factory=set)
    """The groups whose gradients this step has brought to the host."""
    over_replicas: bool = True
    """This micro-batch's reductions go on over replicas; else they are kept for a later one to add.
    """
    reduce_input: tuple[Buffer, int] | None = None
    """The input of the last reduce-scatter, which lives until the next one is copied in, and that
    reduction."""
    reduces: list[int] = field(default_factory=list)
    """All reductions of the step, which the optimizer waits for."""
    unfinished: list[int] = field(default_factory=list)
    """Reductions that the compute stream has not waited for yet."""
    post_reduces: dict[str, int] = field(default_factory=dict)
    """The reduction of each group in this backward; a second one of the same group waits for it."""

    def accumulate_without_sync(self, group: FSDPParamGroup) -> None:
        """Keep the unsharded gradients for a later micro-batch, in the reduce dtype if that is
        another one.

        Those that have been added to what was there are gone: torch's to_accumulated_grad_if_needed
        returns where it finds none.
        """
        precision = self.training.precision
        if precision.reduce == precision.parameters:
            return
        memory: list[MemoryEvent] = []
        kernels: list[Kernel] = []
        for parameter, gradient in zip(group.trained, group.gradients, strict=True):
            if gradient in self.live:
                nbytes = self.nbytes(parameter.numel, precision.reduce)
                memory += self.alloc(accumulated_of(parameter), "unsharded_gradients", nbytes)
                kernels.append(
                    copy_kernel(
                        parameter.numel, source=precision.parameters, target=precision.reduce
                    )
                )
                memory += self.drop(gradient)
        if memory:
            self.issue(
                "copy", group.fqn, micro_batch=self.micro_batch, kernels=tuple(kernels),
                memory=memory,
            )

    def add_accumulated(self, group: FSDPParamGroup) -> None:
        """Add this micro-batch's gradients to those accumulated in the reduce dtype."""
        live, precision = self.live, self.training.precision
        both = [
            p
            for p, gradient in zip(group.trained, group.gradients, strict=True)
            if accumulated_of(p) in live and gradient in live
        ]
        if both:
            kernels = additions(
                tuple([p.numel for p in both]), of=precision.parameters, to=precision.reduce
            )
            memory = self.drop_each([unsharded_gradient_of(p.fqn) for p in both])
            self.issue(
                "copy", group.fqn, micro_batch=self.micro_batch, kernels=kernels, memory=memory
            )

    def _gradient_buffers(self, group: FSDPParamGroup) -> list[Buffer]:
        if not self.micro_batch:  # nothing is accumulated yet
            return [*group.gradients]
        return [
            a if (a := accumulated_of(p)) in self.live else gradient
            for p, gradient in zip(group.trained, group.gradients, strict=True)
        ]

    def has_gradients(self, group: FSDPParamGroup) -> bool:
        """True where an unsharded gradient of `group` lives, of this micro-batch or earlier ones.
        """
        return not self.live.isdisjoint(self._gradient_buffers(group))

    def drop_reduce_input(self, group: FSDPParamGroup) -> None:
        """Wait for the last reduce-scatter and let its input go, as before a reduction, where
        `group` has nothing to reduce."""
        stays = self.training.torch in INPUT_PAST_IDLE_UNITS.versions
        if self.reduce_input is not None and not stays:
            (buffer, event), self.reduce_input = self.reduce_input, None
            memory = self.drop(buffer)
            self.issue(
                "free", group.fqn, stream="compute", waits=(event,), micro_batch=self.micro_batch,
                memory=memory,
            )

    def reduce(self, group: FSDPParamGroup) -> None:
        """foreach_reduce: copy in, reduce-scatter, over replicas all-reduce, cast to the original
        dtype, accumulate."""
        dtype = self.training.precision.reduce
        waits: list[int] = []
        memory: list[MemoryEvent] = []
        source, earlier = form_of(group.fqn, "reduce_input"), self.reduce_input
        beside = self.training.torch in INPUT_BESIDE_THE_NEXT.versions
        if earlier is not None:
            source = form_of(source, "next") if beside and earlier[0] == source else source
            memory += [] if beside else self.drop(earlier[0])
            waits.append(earlier[1])
        if group.fqn in self.post_reduces:  # the group's second reduction in this backward
            waits.append(self.post_reduces[group.fqn])
            memory += self.drop(form_of(group.fqn, "reduced"))
        fresh = gradient_of(group.fqn) not in self.live and group.fqn not in self.on_host
        output = self._reduced_into(group, fresh=fresh)
        gradients = self._gradient_buffers(group)
        # by torch's loop over shards, until it returns
        held = gradients[-1:] if self.mesh.dp_shard > 1 else []
        held += [earlier[0]] if earlier is not None and beside else []
        # of earlier micro-batches, in the reduce dtype already
        kept = not set(gradients).issubset(group.gradients)
        read = dtype if kept else self.training.precision.parameters
        memory += self.alloc(source, "communication", self.nbytes(group.reduces["padded"], dtype))
        memory += self.drop_each([name for name in gradients if name not in held])
        made = self.alloc(
            output, "gradients", self.nbytes(group.reduces["shard"], dtype)
        )  # on the reduction's stream
        copy = self.issue(
            "copy", group.fqn, waits=waits, micro_batch=self.micro_batch,
            kernels=(
                Kernel(
                    "copy", 0,
                    self.nbytes(group.reduces["numel"], read)
                    + self.nbytes(group.reduces["padded"], dtype), dtype,
                    # torch._chunk_cat loads 16 bytes at once only of what it need not cast
                    singly=group.reduces["numel"] if read != dtype else 0,
                ),
            ),
            memory=memory,
        )
        divides = divide_kernels(group.reduces["padded"], by=self._divided_by[0], dtype=dtype)
        if divides:
            copy, made = self._on_reductions_stream(group, divides, after=copy, memory=made), []
        done = self._reduce_over_shards(group, after=copy, memory=made)
        self.reduce_input = (source, done)
        if self.over_replicas:
            if self.mesh.dp_replicate > 1:
                done = self._reduce_over_replicas(group, after=self._add_partial(group, after=done))
            done = self._post_reduce(group, output, done, held, fresh=fresh)
            done = self._add_on_host(group, done) if self.elsewhere and not fresh else done
        else:
            done = self._keep_partial(group, output, done, held)
        self.unfinished = [done]  # one stream: the last covers all
        self.post_reduces[group.fqn] = done
        self.reduces += self.unfinished
        self.on_host |= {group.fqn} if self.elsewhere and self.over_replicas else set()

    def _reduce_over_shards(
        self, group: FSDPParamGroup, *, after: int, memory: list[MemoryEvent]
    ) -> int:
        """The reduce-scatter; torch copies the one shard where there is only one."""
        dtype = self.training.precision.reduce
        if self.mesh.dp_shard == 1:
            kernel = copy_kernel(group.reduces["shard"], source=dtype, target=dtype)
            return self._on_reductions_stream(group, (kernel,), after=after, memory=memory)
        return self.issue(
            "reduce_scatter",
            group.fqn,
            stream="reduce_scatter",
            waits=(after,),
            group="dp_shard",
            nbytes=self.nbytes(group.reduces["padded"], dtype),
            dtype=dtype,
            micro_batch=self.micro_batch,
            memory=memory,
        )

    def _reduce_over_replicas(self, group: FSDPParamGroup, *, after: int) -> int:
        dtype = self.training.precision.reduce
        return self.issue(
            "all_reduce",
            group.fqn,
            stream="all_reduce",
            waits=(after,),
            group="dp_replicate",
            nbytes=self.nbytes(group.reduces["shard"], dtype),
            dtype=dtype,
            micro_batch=self.micro_batch,
        )

    def _reduced_into(self, group: FSDPParamGroup, *, fresh: bool) -> Buffer:
        """The buffer that the shards' reduction makes: it stays, or is cast or added to an earlier
        one."""
        if not self.over_replicas:
            partial = form_of(group.fqn, "partial_gradient")
            return form_of(group.fqn, "reduced") if partial in self.live else partial
        stays = fresh and not self.elsewhere and self.training.precision.reduce == self.original
        return gradient_of(group.fqn) if stays else form_of(group.fqn, "reduced")

    @property
    def _divided_by(self) -> tuple[float, float]:
        """Divisors that kernels apply before and after the reduction; NCCL itself averages dtypes
        with bf16's exponents.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
        _get_gradient_divide_factors.
        """
        return (
            division(self.mesh.world_size)
            if self.training.precision.reduce == "float16"
            else (1.0, 1.0)
        )

    def _add_to_partial(self, group: FSDPParamGroup) -> tuple[Kernel, ...]:
        """The group's reduced shard added to its partial gradient, or the other way round, all at
        once."""
        dtype = self.training.precision.reduce
        return additions((group.reduces["shard"],), of=dtype, to=dtype)

    def _add_to_shards(self, group: FSDPParamGroup) -> tuple[Kernel, ...]:
        """The reduced gradient of each parameter added to that of earlier micro-batches."""
        dtype = self.original
        return additions(
            tuple([parameter.shard for parameter in group.trained]), of=dtype, to=dtype
        )

    def _on_reductions_stream(
        self, group: FSDPParamGroup, kernels: tuple[Kernel, ...], *, after: int,
        memory: list[MemoryEvent] | None = None,
    ) -> int:
        """Ops between the copy-in and the all-reduce, on the stream of reduce-scatters."""
        return self.issue(
            "copy",
            group.fqn,
            stream="reduce_scatter",
            waits=(after,),
            micro_batch=self.micro_batch,
            kernels=kernels,
            memory=memory or (),
        )

    def _keep_partial(
        self, group: FSDPParamGroup, output: Buffer, done: int, last: list[Buffer]
    ) -> int:
        """Without an all-reduce: keep the reduced shard, or add it to the one that is kept, on the
        reduction's stream."""
        again = output == form_of(group.fqn, "reduced")
        memory = [event for name in ([output] if again else []) + last for event in self.drop(name)]
        return self._on_reductions_stream(
            group, self._add_to_partial(group) if again else (), after=done, memory=memory
        )

    def _add_partial(self, group: FSDPParamGroup, *, after: int) -> int:
        """Add the partial gradient of earlier micro-batches, if there is one, before the
        all-reduce. Returns what to wait for."""
        if form_of(group.fqn, "partial_gradient") not in self.live:
            return after
        return self._on_reductions_stream(group, self._add_to_partial(group), after=after)

    def _post_reduce(
        self, group: FSDPParamGroup, output: Buffer, done: int, last: list[Buffer], *, fresh: bool
    ) -> int:
        """Divide, cast, and add to the sharded gradient of earlier micro-batches; the last
        unsharded gradient goes only now.

        Offloaded, the gradient goes to the host instead, and what the device has of it goes too.
        """
        dtype, shard = self.training.precision.reduce, group.reduces["shard"]
        # torch holds the all-reduce's buffer until the end of backward
        held = self.mesh.dp_replicate > 1
        memory: list[MemoryEvent] = []
        kernels = divide_kernels(shard, by=self._divided_by[1], dtype=dtype)
        result = output
        if dtype != self.original:
            result = (
                gradient_of(group.fqn)
                if fresh and not self.elsewhere
                else form_of(group.fqn, "cast_gradient")
            )
            memory += self.alloc(result, "gradients", self.nbytes(shard, self.original))
            kernels += (copy_kernel(shard, source=dtype, target=self.original),)
            memory += [] if held else self.drop(output)
        if not fresh or self.elsewhere:
            kernels += self._transfer("to_host", group.reduces["shard"]) or self._add_to_shards(
                group
            )
            memory += [] if held and result == output else self.drop(result)
        memory += [
            event for name in (*last, form_of(group.fqn, "partial_gradient"))
            for event in self.drop(name)
        ]
        return self.issue(
            "copy",
            group.fqn,
            stream="all_reduce" if held else "reduce_scatter",
            waits=(done,),
            micro_batch=self.micro_batch,
            kernels=kernels,
            memory=memory,
            host=self._arriving(group, fresh=fresh) if self.elsewhere else (),
        )

    def _arriving(self, group: FSDPParamGroup, *, fresh: bool) -> list[HostEvent]:
        """The pinned memory that a gradient comes to: it stays there, or is added and goes."""
        nbytes = self.nbytes(group.reduces["shard"], self.original)
        name = form_of(group.fqn, "gradient" if fresh else "arriving")
        return [HostAlloc(name, "gradients", nbytes, pinned=True)]

    def _add_on_host(self, group: FSDPParamGroup, done: int) -> int:
        """Add what has come from the device to the gradient of earlier micro-batches: torch's copy
        blocks for it."""
        kernels = tuple([replace(kernel, location="host") for kernel in self._add_to_shards(group)])
        return self.issue(
            "copy", group.fqn, stream="host", waits=(done,), micro_batch=self.micro_batch,
            kernels=kernels, host=[Free(form_of(group.fqn, "arriving"))],
        )
