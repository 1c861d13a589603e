"""The words that fsdp2 and hsdp are written in: unshard, wait, reshard, reduce, as torch's FSDPParamGroup does each.

Lifetimes follow the host's order: a buffer lives from the line of torch that makes it to the line that drops its last
reference. Streams and waits follow FSDPCommContext. Nothing here decides which group comes next; see fsdp2.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from zsim.model import ROOT
from zsim.ops import Alloc, Kernel, MemoryEvent
from zsim.strategies.building import add_kernel, copy_kernel
from zsim.strategies.hook_calls import COPY_OUT, GATHER, RECORD, HookCalls
from zsim.strategies.passes import ORIGINAL, Passes
from zsim.strategies.sharded_groups import Group, Sharded
from zsim.training import DTYPE_NBYTES


@dataclass(slots=True, kw_only=True)
class ShardedStep(Passes):
    """One training step of one rank. The last events of each stream's kind are kept for the waits that torch makes."""

    offload: bool = False
    """Whether sharded parameters, their gradients and optimizer states live in host memory (CPUOffloadPolicy)."""
    on_host: set[str] = field(default_factory=set)
    """The groups whose gradients this step has brought to the host."""
    over_replicas: bool = True
    """Whether this micro-batch's reductions go on over replicas, or are kept for a later one to add."""
    gather_waits: list[int] = field(default_factory=list)
    """What the next all-gather waits for: a copy-out, in forward the one before the last, in backward the last."""
    last_copy_out: list[int] = field(default_factory=list)
    forward_gather: Group | None = None
    """The group whose all-gather output forward keeps until the next one has been copied out."""
    forward_output: str = ""
    """That output."""
    calls: HookCalls = field(default_factory=HookCalls)
    """What hooks call inside blocks of which outputs are kept."""
    root_again: str = ""
    """The unit that takes itself for the root, as it is called while its block is recomputed."""
    outputs: dict[str, str] = field(default_factory=dict)
    """The last all-gather output of each group; one that runs twice in a row has two at once."""
    gathers: dict[str, int] = field(default_factory=dict)
    reshards: dict[str, int] = field(default_factory=dict)
    """The copy that kept a part of each group after forward; the group's next all-gather waits for it."""
    reduce_input: tuple[str, int] | None = None
    reduces: list[int] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    """Reductions that the compute stream has not waited for yet."""
    post_reduces: dict[str, int] = field(default_factory=dict)
    """The reduction of each group in this backward; a second one of the same group waits for it."""

    def copy(self) -> ShardedStep:
        """This step so far, to be ended in another way."""
        return replace(self, ops=list(self.ops), parts=list(self.parts), live=set(self.live))

    # -- unshard and reshard

    def unshard(self, group: Group) -> None:
        """Issue the all-gather of a group that is neither gathered nor unsharded."""
        if group.unsharded or group.gathered:
            return
        group.gathered = True
        if self.mesh.dp_shard == 1:
            return
        self.calls.count(RECORD, GATHER)
        dtype = self.training.precision.parameters
        spread = group.resharded_to or self.mesh.dp_shard
        part = group.totals["padded"] // spread
        inputs, transfers = self._all_gather_inputs(group, part)
        name = f"{group.fqn}.all_gather"
        self.outputs[group.fqn] = f"{name}.again" if name in self.live else name
        output = self.alloc(self.outputs[group.fqn], "communication", self.nbytes(group.totals["padded"], dtype))
        if group.fqn in self.reshards:
            self.gather_waits = [*self.gather_waits, self.reshards.pop(group.fqn)]
        copy = self.issue(
            "copy",
            group.fqn,
            stream="all_gather_copy_in",
            waits=self.gather_waits,
            micro_batch=self.micro_batch,
            kernels=(*transfers, copy_kernel(part, source=dtype if group.resharded_to else ORIGINAL, target=dtype)),
            memory=(*inputs, *output),
        )
        self.gathers[group.fqn] = self.issue(
            "all_gather",
            group.fqn,
            stream="all_gather",
            waits=(copy,),
            group="dp_shard" if not group.resharded_to else f"dp_shard:{spread}",
            nbytes=self.nbytes(group.totals["padded"], dtype),
            dtype=dtype,
            micro_batch=self.micro_batch,
            memory=self._dropped(inputs),
        )

    def _all_gather_inputs(self, group: Group, part: int) -> tuple[list[MemoryEvent], tuple[Kernel, ...]]:
        """What an all-gather reads: the shards, cast all at once, or, offloaded, each brought to the device and cast by itself."""
        dtype = self.training.precision.parameters
        if not self.offload:
            casts = dtype != ORIGINAL
            return self.alloc(f"{group.fqn}.cast", "communication", self.nbytes(part, dtype)) if casts else [], ()
        if group.resharded_to:  # what forward kept is on the device, in the dtype of compute
            return [], ()
        memory: list[MemoryEvent] = []
        for parameter in group.parameters:
            memory += self._onloaded(parameter)
        return memory, self._transfer("to_device", group.totals["shard"])

    def _onloaded(self, parameter: Sharded) -> list[MemoryEvent]:
        """One shard as the device reads it: from the host where it is there, in the dtype of compute."""
        dtype, memory = self.training.precision.parameters, list[MemoryEvent]()
        if self.elsewhere:
            memory += self.alloc(f"{parameter.fqn}.onloaded", "communication", self.nbytes(parameter.shard, ORIGINAL))
        if dtype != ORIGINAL:
            memory += self.alloc(f"{parameter.fqn}.cast", "communication", self.nbytes(parameter.shard, dtype))
            memory += self.drop(f"{parameter.fqn}.onloaded")
        return memory

    def _dropped(self, made: list[MemoryEvent]) -> list[MemoryEvent]:
        """The frees of what of `made` lives."""
        return self.drop_each([event.buffer for event in made if isinstance(event, Alloc)]) if made else []

    @property
    def elsewhere(self) -> bool:
        """Whether host memory is not the device's own."""
        return self.offload and self.training.device != "cpu"

    def where_shards_are(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        """`kernels` of the optimizer, run by the host where the shards lie in its memory."""
        return tuple(replace(kernel, place="host") for kernel in kernels) if self.elsewhere else kernels

    def _transfer(self, name: str, numel: int) -> tuple[Kernel, ...]:
        """One crossing of the link by `numel` elements of this rank's shards, in the dtype they are kept in."""
        nbytes = self.nbytes(numel, ORIGINAL)
        return (Kernel(name, 0, nbytes, ORIGINAL, place="link"),) if self.elsewhere else ()

    def unshard_each(self, groups: Iterable[Group]) -> None:
        """Issue the all-gathers of groups that will be needed later."""
        for group in groups:
            self.unshard(group)

    def wait_for_unshard(self, group: Group, *, forward: bool) -> None:
        """Copy the all-gather's output out into the unsharded parameters; the next all-gathers wait for that copy."""
        if group.unsharded:
            return
        if self.mesh.dp_shard > 1:
            self.calls.count(RECORD, COPY_OUT)
        dtype = self.training.precision.parameters
        memory = self._unsharded(group)
        if group.resharded_to:
            memory += self.drop_each([f"{parameter.fqn}.{group.part}" for parameter in group.parameters])
            group.part = ""
        transfers = self._transfer("to_device", group.totals["shard"]) if self.mesh.dp_shard == 1 else ()
        group.resharded_to = 0
        gathered = self.outputs.get(group.fqn, "")
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

    def _unsharded(self, group: Group) -> list[MemoryEvent]:
        """The allocations of a group's unsharded parameters."""
        element = DTYPE_NBYTES[self.training.precision.parameters]
        sizes = [(f"{parameter.fqn}.unsharded", parameter.padded * element) for parameter in group.parameters]
        if self.mesh.dp_shard > 1:
            return self.alloc_each(sizes, "unsharded_parameters")
        memory: list[MemoryEvent] = []
        before: list[MemoryEvent] = []
        for parameter, size in zip(group.parameters, sizes, strict=True):
            read = self._onloaded(parameter)  # no all-gather: each shard is read by itself, and dropped once the next one is
            memory += [*read, *before]
            before = self._dropped(read)
            memory += self.alloc_each([size], "unsharded_parameters")
        return memory + before

    def reshard(self, group: Group, *, to: int = 0, held: Sequence[MemoryEvent] = ()) -> None:
        """Free the unsharded parameters; with `to`, keep 1/to of them for a cheaper all-gather in backward, and then let `held` go.

        A group without a backward is sharded again at its end, as nothing has gathered it, but its part goes with the next one only.
        """
        if not group.unsharded:
            group.resharded_to = 0
            return
        if to:
            memory: list[MemoryEvent] = []
            dtype = self.training.precision.parameters
            before, group.part = group.part, "resharded" if group.part != "resharded" else "resharded.again"
            for parameter in group.parameters:
                nbytes = self.nbytes(parameter.padded // to, dtype)
                memory += self.alloc(f"{parameter.fqn}.{group.part}", "unsharded_parameters", nbytes)
                memory += self.drop(f"{parameter.fqn}.{before}")
                memory += self.drop(f"{parameter.fqn}.unsharded")
            memory += held
            kernels = (copy_kernel(group.totals["padded"] // to, source=dtype, target=dtype),)
            copied = self.issue("copy", group.fqn, micro_batch=self.micro_batch, kernels=kernels, memory=memory)
            self.reshards[group.fqn] = copied
        else:
            memory = self.drop_each([f"{parameter.fqn}.unsharded" for parameter in group.parameters])
            self.issue("free", group.fqn, stream="host", micro_batch=self.micro_batch, memory=memory)
        group.unsharded, group.resharded_to = False, to

    # -- reduce

    def accumulate_without_sync(self, group: Group) -> None:
        """Keep the unsharded gradients for a later micro-batch, in the reduce dtype if that is another one."""
        precision = self.training.precision
        if precision.reduce == precision.parameters:
            return
        memory: list[MemoryEvent] = []
        kernel = add_kernel(group.reduces["numel"], of=precision.parameters, to=precision.reduce)
        for parameter in group.trained:
            accumulated = f"{parameter.fqn}.accumulated_gradient"
            if accumulated not in self.live and f"{parameter.fqn}.unsharded_gradient" in self.live:
                nbytes = self.nbytes(parameter.numel, precision.reduce)
                memory += self.alloc(accumulated, "unsharded_gradients", nbytes)
                kernel = copy_kernel(group.reduces["numel"], source=precision.parameters, target=precision.reduce)
            memory += self.drop(f"{parameter.fqn}.unsharded_gradient")
        if not self.has_gradients(group):
            return
        self.issue("copy", group.fqn, micro_batch=self.micro_batch, kernels=(kernel,), memory=memory)

    def add_accumulated(self, group: Group) -> None:
        """Add this micro-batch's gradients to those accumulated in the reduce dtype."""
        live = self.live
        accumulated = [p.fqn for p in group.trained if f"{p.fqn}.accumulated_gradient" in live]
        memory = self.drop_each([f"{fqn}.unsharded_gradient" for fqn in accumulated])
        if memory:
            precision = self.training.precision
            kernel = add_kernel(group.reduces["numel"], of=precision.parameters, to=precision.reduce)
            self.issue("copy", group.fqn, micro_batch=self.micro_batch, kernels=(kernel,), memory=memory)

    def _gradient_buffers(self, group: Group) -> list[str]:
        live, fqns = self.live, [parameter.fqn for parameter in group.trained]
        return [a if (a := f"{fqn}.accumulated_gradient") in live else f"{fqn}.unsharded_gradient" for fqn in fqns]

    def has_gradients(self, group: Group) -> bool:
        """Whether there is an unsharded gradient of `group`, of this micro-batch or earlier ones."""
        return not self.live.isdisjoint(self._gradient_buffers(group))

    def drop_reduce_input(self, group: Group) -> None:
        """Wait for the last reduce-scatter and let its input go, as before a reduction, where `group` has nothing to reduce."""
        if self.reduce_input is not None:
            (buffer, event), self.reduce_input = self.reduce_input, None
            memory = self.drop(buffer)
            self.issue("free", group.fqn, stream="compute", waits=(event,), micro_batch=self.micro_batch, memory=memory)

    def reduce(self, group: Group) -> None:
        """foreach_reduce: copy in, reduce-scatter, over replicas all-reduce, cast to the original dtype, accumulate."""
        dtype = self.training.precision.reduce
        waits: list[int] = []
        memory: list[MemoryEvent] = []
        if self.reduce_input is not None:
            buffer, event = self.reduce_input
            memory += self.drop(buffer)
            waits.append(event)
        if group.fqn in self.post_reduces:  # the group's second reduction in this backward
            waits.append(self.post_reduces[group.fqn])
            memory += self.drop(f"{group.fqn}.reduced")
        fresh = f"{group.fqn}.gradient" not in self.live and group.fqn not in self.on_host
        output = self._reduced_into(group, fresh=fresh)
        source = f"{group.fqn}.reduce_input"
        gradients = self._gradient_buffers(group)
        held = gradients[-1:] if self.mesh.dp_shard > 1 else []  # by torch's loop over shards, until it returns
        memory += self.alloc(source, "communication", self.nbytes(group.reduces["padded"], dtype))
        memory += self.drop_each([name for name in gradients if name not in held])
        made = self.alloc(output, "gradients", self.nbytes(group.reduces["shard"], dtype))  # on the reduction's stream
        copy = self.issue(
            "copy",
            group.fqn,
            waits=waits,
            micro_batch=self.micro_batch,
            kernels=(copy_kernel(group.reduces["padded"], source=self.training.precision.parameters, target=dtype),),
            memory=memory,
        )
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

    def _reduce_over_shards(self, group: Group, *, after: int, memory: list[MemoryEvent]) -> int:
        """The reduce-scatter; torch copies the one shard where there is only one."""
        dtype = self.training.precision.reduce
        if self.mesh.dp_shard == 1:
            return self.issue(
                "copy",
                group.fqn,
                stream="reduce_scatter",
                waits=(after,),
                micro_batch=self.micro_batch,
                kernels=(copy_kernel(group.reduces["shard"], source=dtype, target=dtype),),
                memory=memory,
            )
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

    def _reduce_over_replicas(self, group: Group, *, after: int) -> int:
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

    def _reduced_into(self, group: Group, *, fresh: bool) -> str:
        """The buffer that the shards' reduction makes: one that stays, or one that is cast or added to what is there."""
        if not self.over_replicas:
            partial = f"{group.fqn}.partial_gradient"
            return f"{group.fqn}.reduced" if partial in self.live else partial
        stays = fresh and not self.elsewhere and self.training.precision.reduce == ORIGINAL
        return f"{group.fqn}.gradient" if stays else f"{group.fqn}.reduced"

    def _add_kernel(self, group: Group, dtype: str) -> Kernel:
        shard = group.reduces["shard"]
        return Kernel("add", shard, 3 * self.nbytes(shard, dtype), dtype)

    def _keep_partial(self, group: Group, output: str, done: int, last: list[str]) -> int:
        """Without an all-reduce: keep the reduced shard, or add it to the one that is kept, on the reduction's stream."""
        again = output == f"{group.fqn}.reduced"
        return self.issue(
            "copy",
            group.fqn,
            stream="reduce_scatter",
            waits=(done,),
            micro_batch=self.micro_batch,
            kernels=(self._add_kernel(group, self.training.precision.reduce),) if again else (),
            memory=[event for name in ([output] if again else []) + last for event in self.drop(name)],
        )

    def _add_partial(self, group: Group, *, after: int) -> int:
        """Add the partial gradient of earlier micro-batches, if there is one, before the all-reduce. Returns what to wait for."""
        if f"{group.fqn}.partial_gradient" not in self.live:
            return after
        return self.issue(
            "copy",
            group.fqn,
            stream="reduce_scatter",
            waits=(after,),
            micro_batch=self.micro_batch,
            kernels=(self._add_kernel(group, self.training.precision.reduce),),
        )

    def _post_reduce(self, group: Group, output: str, done: int, last: list[str], *, fresh: bool) -> int:
        """Cast, and add to the sharded gradient of earlier micro-batches; the last unsharded gradient goes only now.

        Offloaded, the gradient goes to the host instead, and what the device has of it goes too.
        """
        dtype, shard = self.training.precision.reduce, group.reduces["shard"]
        held = self.mesh.dp_replicate > 1  # torch holds the all-reduce's buffer until the end of backward
        memory: list[MemoryEvent] = []
        kernels: tuple[Kernel, ...] = ()
        result = output
        if dtype != ORIGINAL:
            result = f"{group.fqn}.gradient" if fresh and not self.elsewhere else f"{group.fqn}.cast_gradient"
            memory += self.alloc(result, "gradients", self.nbytes(shard, ORIGINAL))
            kernels += (copy_kernel(shard, source=dtype, target=ORIGINAL),)
            memory += [] if held else self.drop(output)
        if not fresh or self.elsewhere:
            kernels += self._transfer("to_host", group.reduces["shard"]) or (self._add_kernel(group, ORIGINAL),)
            memory += [] if held and result == output else self.drop(result)
        memory += [event for name in (*last, f"{group.fqn}.partial_gradient") for event in self.drop(name)]
        return self.issue(
            "copy",
            group.fqn,
            stream="all_reduce" if held else "reduce_scatter",
            waits=(done,),
            micro_batch=self.micro_batch,
            kernels=kernels,
            memory=memory,
        )

    def _add_on_host(self, group: Group, done: int) -> int:
        """Add what has come from the device to the gradient of earlier micro-batches: torch's copy blocks for it."""
        kernel = replace(self._add_kernel(group, ORIGINAL), place="host")
        return self.issue(
            "copy", group.fqn, stream="host", waits=(done,), micro_batch=self.micro_batch, kernels=(kernel,)
        )

    def begin_forward(self) -> None:
        """The root's forward begins: the all-gather streams wait for whatever the compute stream was last given."""
        last = next((op.index for op in reversed(self.ops) if op.stream == "compute"), None)
        self.gather_waits = [] if last is None else [last]
        self.last_copy_out = []

    def call(self, group: Group, following: Sequence[Group]) -> None:
        """The pre-forward hook: gather the group if need be, wait for it, and prefetch the `following` ones."""
        self._count_steps(1 + len(following))
        self.unshard(group)
        self.wait_for_unshard(group, forward=True)
        self.unshard_each(following)

    def call_again(self, group: Group, following: Sequence[Group]) -> None:
        """The pre-forward hook of a unit whose block is recomputed.

        In its own backward it only needs its parameters. Before that it begins a forward, of which it is the root if it is in no other.
        """
        if group.in_backward:
            self._count_steps(0)
            self.unshard(group)
            self.wait_for_unshard(group, forward=False)
            return
        if not self.root_again:
            self.root_again = group.fqn
            self.calls.count(RECORD, *([RECORD] if self.training.device != "cpu" else []))  # inputs are brought to a device
            self.begin_forward()
            self.last_copy_out = self.gather_waits
        self.call(group, following)

    def _count_steps(self, number: int) -> None:
        """So many steps of a hook are recorded, and one more where inputs are cast."""
        self.calls.count(*[RECORD] * (number + (self.training.precision.parameters != ORIGINAL)))

    def return_again(self, group: Group) -> None:
        """Its post-forward hook, which in backward reshards nothing: a root lets the last all-gather's output go."""
        if not group.in_backward:
            self.calls.count(RECORD)
        if self.root_again == group.fqn:
            self.root_again = ""
            self.end_forward()

    def end_forward(self, held: Sequence[MemoryEvent] = ()) -> None:
        """The root's forward is over: the last all-gather output goes, then what the root `held` of its inputs."""
        group, self.forward_gather = self.forward_gather, None
        self.gather_waits = self.last_copy_out or self.gather_waits
        if group is not None:
            memory, self.forward_output = [*self.drop(self.forward_output), *held], ""
            self.issue("free", group.fqn, stream="host", micro_batch=self.micro_batch, memory=memory)

    def leave_autocast(self) -> None:
        """The last forward before a backward is over: autocast's cache is emptied."""
        if self.training.uncached:
            self.issue("free", ROOT, stream="host", micro_batch=self.micro_batch, memory=self.training.uncached)

    def finalize_backward(self, group: Group) -> None:
        """The compute stream waits for the reductions so far, and what they held of `group` goes.

        So does an all-gather that was prefetched and that nobody came to use.
        """
        memory = self.drop(f"{group.fqn}.reduced")
        if group.gathered:
            group.gathered = False
            memory += self.drop(self.outputs.get(group.fqn, ""))
            self.unfinished += [self.gathers[group.fqn]] if group.fqn in self.gathers else []
        if memory or self.unfinished:
            waits, self.unfinished = self.unfinished, []
            self.issue("free", group.fqn, stream="compute", waits=waits, micro_batch=self.micro_batch, memory=memory)

    def end_backward(self) -> None:
        """The end of the root's final callback: the last reduce-scatter's input goes; backward returns, and the loss goes."""
        self.gather_waits, self.last_copy_out, self.post_reduces = [], [], {}
        if self.reduce_input is not None:
            (buffer, event), self.reduce_input = self.reduce_input, None
            memory = self.drop(buffer)
            if memory:
                self.issue("free", ROOT, stream="compute", waits=(event,), micro_batch=self.micro_batch, memory=memory)
        self.release_loss()
