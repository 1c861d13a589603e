"""ShardedStep: compute and reductions of a step at stage 3.

Linears are DeepSpeed's own, which save their parameters and not views of gathered memory. So that
goes when a parameter is released, and a backward gathers it anew.
Source: deepspeed/runtime/zero/stage3.py, partition_parameters.py, utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from zsim.autograd.lowered import LoweredModule, ParameterGradient, TapeEvent
from zsim.ir.buffers import Buffer, buffer_of, gradient_of, numbered, owner_of, role_of
from zsim.ir.ops import NORM_STEP, Alloc, Free, Kernel, MemoryEvent, Op
from zsim.models.spec import ROOT, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.backward_events import forward_memory
from zsim.strategies.building.kernels import copy_kernel, move_gradients
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.engine_step import OWN, EngineStep
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.partition import Bucket, buckets
from zsim.strategies.deepspeed_engine.shards.coordinator import Coordinator
from zsim.strategies.deepspeed_engine.shards.gathering import GatheringStep
from zsim.strategies.deepspeed_engine.shards.module_calls import Called
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.replicated.buckets import ready_order

TRACE = "trace"
"""The unit of broadcasts by which ranks assert that they have recorded the same trace."""
INTEGER = DTYPE_NBYTES["int64"]
OWN_ENDS = "own_ends"
"""Role of a place holder for the frees of what a rank has for itself."""


def _end_of_node(tape: Sequence[TapeEvent]) -> int:
    """Index behind the gradients that a module's first node makes, of its parameters if any."""
    for kind in (ParameterGradient, Alloc):
        if made := [index for index, event in enumerate(tape) if isinstance(event, kind)]:
            return made[-1] + 1
    return 0


def _with_leaves_whole(
    order: Sequence[Parameter], sharded: ShardedParameters
) -> list[Parameter]:
    """The `order` in which gradients are reduced: those of a leaf in that of the model, with the
    last."""
    leaf_of = sharded.leaf_of
    last = {leaf_of.get(p.fqn, p.fqn): index for index, p in enumerate(order)}
    return sorted(
        order, key=lambda p: (
            last[leaf_of.get(p.fqn, p.fqn)], sharded.turn(p) if p.fqn in leaf_of else 0
        )
    )


@dataclass(slots=True, kw_only=True)
class ShardedStep(GatheringStep):
    """One training step."""

    _inputs: list[MemoryEvent] = field(default_factory=list)
    """The free of the input of the module that computes."""
    _recomputed: dict[str, list[Buffer]] = field(default_factory=dict)
    """Buffers that each module's recomputation has left for its backward."""
    _outputs: list[MemoryEvent] = field(default_factory=list)
    """The free of the gradient of a leaf's output."""
    asserts: StepBuilder = field(default_factory=StepBuilder)
    """Broadcasts at the beginning of the second step."""

    @classmethod
    def of(cls, sharded: ShardedParameters) -> ShardedStep:
        """An empty step, in which nothing is whole."""
        made = cls(training=sharded.training, gradients=sharded.gradients, sharded=sharded)
        order = _with_leaves_whole(ready_order(sharded.training), sharded)
        made.fill(buckets(order, most=sharded.options.reduce_bucket_size))
        return made

    # -- compute

    def begin(self, coordinator: Coordinator, *, first: bool) -> None:
        """A forward begins. Ranks assert that their recorded lists are the same: the length, then
        the list."""
        for length in coordinator.begin():
            step = self.step if first else self.asserts
            for numbers in (1, length):
                list_ = Alloc(numbered(TRACE, numbers), "communication", INTEGER * numbers)
                if numbers:
                    step.issue(
                        "broadcast", TRACE, stream="all_gather", group=AXIS,
                        nbytes=list_.nbytes, dtype="int64", micro_batch=self.micro_batch,
                        memory=(list_, Free(list_.buffer)),
                    )

    def forward(self, module: LoweredModule) -> None:
        """Compute. The caller of a module holds its input until the hook after it has run."""
        memory = forward_memory(self.training, module)
        if self.sharded.own.get(module.fqn):
            own = {event.buffer for event in memory if isinstance(event, Alloc)}
            self._inputs = [event for event in memory if event.buffer not in own]
        self._forward(module, [event for event in memory if event not in self._inputs])

    def let_go(self) -> None:
        """A module has returned: its caller lets go of its input."""
        if self._inputs:
            self.step.issue("free", ROOT, micro_batch=self.micro_batch, memory=self._inputs)
            self._inputs = []

    def begin_backward(self, seed: Alloc) -> Iterable[MemoryEvent]:
        """These events come before the root's hook, in an op of their own."""
        return ()

    def open_backward(self) -> None:
        """The loss is scaled, and backward begins."""
        seed = self.training.modules[-1].backward.memory[0]
        assert isinstance(seed, Alloc)
        self.step.issue(
            "alloc", ROOT, stream="host", micro_batch=self.micro_batch,
            memory=list(EngineStep.begin_backward(self, seed)),
        )

    def hold(self, module: str) -> None:
        """`module` returns from its recomputation, which keeps detached parameters for backward:
        the memory that they have now. It keeps frozen ones as they are."""
        saved = self._saved(module)
        self._recomputed[module] = [
            self._whole[p.fqn] for p in self.sharded.own[module]
            if p.requires_grad and p.fqn in saved
        ]
        self._held.update(self._recomputed[module])

    def _saved(self, module: str) -> tuple[str, ...]:
        """The parameters that autograd saves for the backward of a module. A norm in steps whose
        input needs no gradient saves that input alone."""
        index = next(i for i, each in enumerate(self.training.modules) if each.fqn == module)
        lowered, op = self.training.modules[index], self.training.model.modules[index].operators[0]
        steps = any(kernel.operator == NORM_STEP for kernel in lowered.forward.kernels)
        if op.kind == "shifted_norm" or (steps and not lowered.input_needs_gradient):
            return ()
        return (op.weight,) if op.kind == "conv1d" else (op.weight, op.bias)

    def _tape(self, module: LoweredModule) -> Iterator[TapeEvent]:
        """The backward of `module`; what its recomputation holds goes when its node has made
        gradients."""
        tape = list(EngineStep._tape(self, module))
        if module.fqn in self.sharded.leaves:  # torch's hook keeps the gradient of its output
            own = {event.buffer for event in tape if isinstance(event, Alloc)}
            frees = [event for event in tape if isinstance(event, Free)]
            self._outputs = [
                event for event in frees
                if event.buffer in self.sharded.gradients_of_values and event.buffer not in own
            ]
            tape = [event for event in tape if event not in self._outputs]
        if buffers := self._recomputed.pop(module.fqn, []):
            self._held.difference_update(buffers)
            gone = set(buffers).difference(self._whole.values())
            tape[_end_of_node(tape):_end_of_node(tape)] = [Free(each) for each in sorted(gone)]
        return iter(tape)

    def pass_on(self, call: Called) -> None:
        """The gradient of a module's input is added to others of the same value."""
        if call.adds:
            self._compute = self.step.issue(
                "backward", call.module, micro_batch=self.micro_batch, memory=call.adds
            )

    # -- reductions

    def hook(self, fqn: str, *, reduces: bool) -> Iterable[MemoryEvent]:
        """Reduce the bucket that would overflow, then copy the gradient into the next one; one
        larger than a bucket stays where it is. Gradients of a leaf wait for its end."""
        if fqn not in self.sharded.leaf_of:
            yield from self._take(fqn)

    def reduce_leaf(self, module: str) -> None:
        """The gradient of a leaf's input is there: its parameters' are reduced in their order."""
        if module not in self.sharded.leaves:
            return
        memory = [
            event for parameter in self.sharded.own[module] if parameter.fqn in self._live
            for event in self._take(parameter.fqn)
        ]
        self._placed.append(self.step.issue(
            "free", ROOT, micro_batch=self.micro_batch, memory=[*memory, *self._outputs]
        ))
        self._outputs = []
        self._average_full()

    def _take(self, fqn: str) -> Iterator[MemoryEvent]:
        if bucket := self._closes.get(fqn):
            yield from self._scattering(bucket)
        if self.gradients.nbytes_of[fqn] // self.sharded.element <= (
            self.sharded.options.reduce_bucket_size
        ):
            self._live.discard(fqn)
            yield Free(gradient_of(fqn))

    def _scattering(self, bucket: Bucket) -> Iterator[MemoryEvent]:
        """Memory of a reduce-scatter: zeros behind shards that need them, and all shards rank by
        rank in a copy. A gradient alone that divides evenly is no copy."""
        self._full.append(bucket)
        sharded, element = self.sharded, self.sharded.reduced_element
        ordered = sorted(bucket.parameters, key=self.sharded.turn)
        casts = [
            Alloc(buffer_of(p.fqn, "cast"), "communication", p.numel * element)
            for p in ordered if sharded.casts and not bucket.in_buffer
        ]
        yield from casts
        pads, flat = list[Alloc](), list[Alloc]()
        if len(ordered) > 1 or ordered[0].numel % sharded.num_ranks:
            for rank in range(sharded.num_ranks):
                for p in ordered:
                    missing = sharded.shard_numel(p) - sharded.local_numel(p, rank=rank)
                    if missing:
                        name = buffer_of(p.fqn, "padding", rank)
                        pads.append(Alloc(name, "communication", missing * element))
            numel = sum(map(sharded.shard_numel, ordered)) * sharded.num_ranks
            flat = [Alloc(buffer_of(bucket.name, "flat"), "communication", numel * element)]
        yield from (*pads, *flat)
        yield from (Free(alloc.buffer) for alloc in pads)
        if sharded.casts:
            yield Alloc(buffer_of(bucket.name, OWN), "gradients", 0)
            yield from (Free(alloc.buffer) for alloc in (*casts, *flat))
        yield from self._sent(bucket)
        if not bucket.in_buffer:
            self._live.discard(bucket.parameters[0].fqn)
            yield Free(gradient_of(bucket.parameters[0].fqn))
        if sharded.casts:
            yield Alloc(buffer_of(bucket.name, OWN_ENDS), "gradients", 0)
        else:
            yield from (Free(alloc.buffer) for alloc in flat)

    def _sent(self, bucket: Bucket) -> Iterable[Alloc]:
        """A place holder for what sending a rank's shards to the host allocates."""
        return ()

    def average(self, bucket: Bucket) -> None:
        """Copy gradients into the bucket, and shard by shard behind one another; divide, reduce;
        add the rank's shards to its gradients."""
        sharded, dtype = self.sharded, self.sharded.reduced_in
        numel = bucket.numel
        padded = sum(map(sharded.shard_numel, bucket.parameters)) * sharded.num_ranks
        moved = move_gradients(numel, source=sharded.dtype, target=dtype, reduced_in=dtype)
        divide = Kernel("divide", padded, 2 * padded * sharded.reduced_element, dtype)
        ready = self.step.issue(
            "copy", bucket.name, waits=(self._compute, *self._reduced[-1:]),
            micro_batch=self.micro_batch,
            kernels=(moved, copy_kernel(padded, source=dtype, target=dtype), divide),
        )
        reduced = self.step.issue(
            "reduce_scatter", bucket.name, stream="reduce_scatter", waits=(ready,), group=AXIS,
            nbytes=padded * sharded.reduced_element, dtype=dtype, micro_batch=self.micro_batch,
        )
        own = copy_kernel(padded // sharded.num_ranks, source=dtype, target=sharded.dtype)
        self._reduced.append(
            self.step.issue(
                "copy", bucket.name, waits=(reduced,), micro_batch=self.micro_batch,
                kernels=(own,),
                stream="reduce_scatter" if sharded.options.overlap_comm else "compute",
            )
        )

    def end_backward(self) -> None:
        """Reduce the last bucket; the host waits for the reductions, and the loss goes."""
        loss = self.return_from_backward()
        memory = list(self._scattering(self.buckets[-1]))
        self._average_full()
        self._placed.append(
            self.step.issue(
                "free", ROOT, stream="host", waits=self._reduced[-1:],
                micro_batch=self.micro_batch, memory=[*memory, *loss],
            )
        )

    # -- ranks

    def kind_of(self, rank: int) -> tuple[int, ...]:
        """All that the ops of a rank depend on: the elements of its shards, if anything."""
        if not self.sharded.casts:
            return ()
        return tuple(self.sharded.local_numel(p, rank=rank) for p in self.sharded.parameters)

    def of_rank(self, rank: int) -> list[Op]:
        """The ops of a rank, which casts its shards of reduced gradients to the parameters' dtype.
        """
        ops = list(self.step.ops)
        for index in self._placed if self.sharded.casts else ():
            memory = [e for event in ops[index].memory for e in self._filled(event, rank)]
            ops[index] = replace(ops[index], memory=tuple(memory))
        return ops

    def _filled(self, event: MemoryEvent, rank: int) -> Iterator[MemoryEvent]:
        name, role = owner_of(event.buffer), role_of(event.buffer)
        if role not in (OWN, OWN_ENDS):
            yield event
            return
        bucket = next(each for each in self.buckets if each.name == name)
        for p in sorted(bucket.parameters, key=self.sharded.turn):
            numel = self.sharded.local_numel(p, rank=rank)
            shard = buffer_of(p.fqn, "reduced_shard")
            if numel:
                nbytes = numel * self.sharded.element
                yield Free(shard) if role == OWN_ENDS else Alloc(shard, "communication", nbytes)
