"""ShardedStep: gathers, compute and reductions of a step at stage 3.

A linear transposes its weight, and autograd saves that view. So the memory that was gathered for
its forward lives until its backward, also where DeepSpeed has released the parameter. (zero.Init
replaces the linear by one that saves none; deepspeed.initialize alone does not.)
Source: deepspeed/runtime/zero/stage3.py, partition_parameters.py, utils.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from zsim.autograd.lowering.lowered import LoweredModule, ParameterGradient, TapeEvent
from zsim.ir.buffers import Buffer
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, Op
from zsim.models.spec import ROOT, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.kernels import copy_kernel, fill_kernel, move_gradients
from zsim.strategies.building.step_builder import StepBuilder
from zsim.strategies.deepspeed_engine.engine_step import OWN, EngineStep
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.offload.placement import HOST, placed
from zsim.strategies.deepspeed_engine.partition import Bucket, buckets
from zsim.strategies.deepspeed_engine.shards.coordinator import Coordinator, Gather
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters
from zsim.strategies.replicated.buckets import ready_order

TRACE = "trace"
"""The unit of broadcasts by which ranks assert that they have recorded the same trace."""
INTEGER = DTYPE_NBYTES["int64"]


def persistent_buffer(fqn: str) -> str:
    """The buffer of a parameter that stays whole from step to step."""
    return Buffer.of(fqn, "persistent")


def secondary_copy(sharded: ShardedParameters, parameter: Parameter) -> Alloc:
    """A rank's part of the copy of a released parameter, beside shards on the device or the host.
    """
    prefix = HOST if sharded.training.offload.parameters else ""
    nbytes = sharded.secondary_numel(parameter) * sharded.element
    return Alloc(
        Buffer.of(f"{prefix}{parameter.fqn}", "secondary"), "unsharded_parameters", nbytes
    )


def _is_gradient_of(weight: str, event: TapeEvent) -> bool:
    """True where a node makes a gradient of `weight`; a tied one's are summed before they are its
    gradient."""
    if isinstance(event, ParameterGradient):
        return event.fqn == weight
    return isinstance(event, Alloc) and event.buffer.startswith(f"{weight}.grad")


@dataclass(slots=True, kw_only=True)
class ShardedStep(EngineStep):
    """One training step, and the carrier of its coordinator's decisions."""

    sharded: ShardedParameters
    asserts: StepBuilder = field(default_factory=StepBuilder)
    """Broadcasts at the beginning of the second step."""
    _numbers: int = 0
    _whole: dict[str, str] = field(default_factory=dict)
    """The buffer that each whole parameter lies in, by fqn."""
    _saved: dict[str, int] = field(default_factory=dict)
    """Linears that have saved a buffer for their backward, by buffer."""
    _of_linear: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """Saved buffers by module and weight."""
    _gathers: dict[int, int] = field(default_factory=dict)
    """Ops of all-gathers, by the gather's number."""
    _opening: list[MemoryEvent] = field(default_factory=list)
    """Memory events that begin a backward, before the root's hook."""

    @classmethod
    def of(cls, sharded: ShardedParameters) -> ShardedStep:
        """An empty step, in which nothing is whole."""
        made = cls(training=sharded.training, gradients=sharded.gradients, sharded=sharded)
        made.fill(
            buckets(ready_order(sharded.training), most=sharded.options.reduce_bucket_size)
        )
        return made

    def take_persistent(self) -> None:
        """Begin with what the step before has left whole."""
        self._whole = {p.fqn: persistent_buffer(p.fqn) for p in self.sharded.persistent}

    # -- the carrier

    def gather(self, parameters: Sequence[Parameter], *, secondary: bool) -> Gather:
        """All-gather shards into one flat buffer, or a parameter alone into its own memory."""
        sharded, number = self.sharded, self._numbers
        self._numbers += 1
        nbytes = sum(map(sharded.padded_nbytes, parameters))
        if len(parameters) == 1:
            made = Alloc(
                self._new(parameters[0].fqn, number), "unsharded_parameters", nbytes
            )
        else:
            made = Alloc(Buffer.of(f"gather.{number}", "flat"), "communication", nbytes)
        spreads = secondary and sharded.spread < sharded.num_ranks
        self._gathers[number] = self.step.issue(
            "all_gather", f"gather.{number}", stream="all_gather",
            waits=() if sharded.options.overlap_comm or self._compute < 0 else (self._compute,),
            group=f"{AXIS}:{sharded.spread}" if spreads else AXIS, nbytes=nbytes,
            dtype=sharded.dtype, micro_batch=self.micro_batch, memory=(made,),
        )
        return Gather(number, tuple(parameters), {p.fqn for p in parameters})

    def _new(self, fqn: str, number: int) -> str:
        self._whole[fqn] = Buffer.of(fqn, f"gathered.{number}")
        return self._whole[fqn]

    def wait(self, gather: Gather) -> None:
        """Compute waits for it; each of several parameters is copied into memory of its own."""
        many = len(gather.parameters) > 1
        numel = sum(parameter.numel for parameter in gather.parameters)
        dtype = self.sharded.dtype
        self._compute = self.step.issue(
            "copy", f"gather.{gather.number}", waits=(self._gathers[gather.number],),
            micro_batch=self.micro_batch,
            kernels=(copy_kernel(numel, source=dtype, target=dtype),) if many else (),
            memory=[
                Alloc(
                    self._new(parameter.fqn, gather.number), "unsharded_parameters",
                    parameter.numel * self.sharded.element,
                )
                for parameter in (gather.parameters if many else ())
            ],
        )

    def forget(self, gather: Gather) -> None:
        """Free the flat buffer, once the modules of all its parameters have come."""
        if len(gather.parameters) > 1:
            self._free(Buffer.of(f"gather.{gather.number}", "flat"))

    def release(self, parameter: Parameter) -> None:
        """Free a parameter's memory, unless a backward needs it."""
        buffer = self._whole.pop(parameter.fqn)
        if not self._saved.get(buffer):
            self._free(buffer)

    def copy_secondary(self, parameter: Parameter) -> None:
        """Copy this rank's larger shard, for which the host waits."""
        sharded, numel = self.sharded, self.sharded.secondary_numel(parameter)
        made = secondary_copy(sharded, parameter)
        memory, host = placed([made], device=self.training.device)
        copied = self.step.issue(
            "copy", made.buffer, micro_batch=self.micro_batch, memory=memory, host=host,
            kernels=(
                fill_kernel(numel, dtype=sharded.dtype),
                copy_kernel(numel, source=sharded.dtype, target=sharded.dtype),
            ),
        )
        self.step.issue(
            "host_wait", made.buffer, stream="host", waits=(copied,), micro_batch=self.micro_batch
        )

    def _free(self, buffer: str) -> None:
        """Free by record_stream: the memory is free once compute has come so far."""
        self.step.issue(
            "free", ROOT, micro_batch=self.micro_batch, memory=[Free(buffer)]
        )

    # -- compute

    def begin(self, coordinator: Coordinator, *, first: bool) -> None:
        """A forward begins. Ranks assert that their recorded lists are the same: the length, then
        the list."""
        for length in coordinator.begin():
            step = self.step if first else self.asserts
            for numbers in (1, length):
                list_ = Alloc(f"trace.{numbers}", "communication", INTEGER * numbers)
                if numbers:
                    step.issue(
                        "broadcast", TRACE, stream="all_gather", group=AXIS,
                        nbytes=list_.nbytes, dtype="int64", micro_batch=self.micro_batch,
                        memory=(list_, Free(list_.buffer)),
                    )

    def forward(self, module: LoweredModule) -> None:
        """Compute; a linear saves the memory of its weight."""
        EngineStep.forward(self, module)
        for weight in self.sharded.saving[module.fqn]:
            buffer = self._whole[weight]
            self._saved[buffer] = self._saved.get(buffer, 0) + 1
            self._of_linear.setdefault((module.fqn, weight), []).append(buffer)

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

    def _tape(self, module: LoweredModule) -> Iterator[TapeEvent]:
        """The backward of `module`, in which memory that a linear has saved goes with its node."""
        gone: list[str] = []
        for event in EngineStep._tape(self, module):
            if gone and not isinstance(event, Free | ParameterGradient):
                yield from self._unsaved(gone)
                gone = []
            for weight in self.sharded.saving[module.fqn]:
                saved = self._of_linear.get((module.fqn, weight))
                if saved and _is_gradient_of(weight, event):
                    gone.append(saved.pop())
            yield event
        yield from self._unsaved(gone)

    def _unsaved(self, buffers: Iterable[str]) -> Iterator[Free]:
        for buffer in buffers:
            self._saved[buffer] -= 1
            if not self._saved[buffer] and buffer not in self._whole.values():
                yield Free(buffer)

    # -- reductions

    def hook(self, fqn: str, *, reduces: bool) -> Iterable[MemoryEvent]:
        """Reduce the bucket that would overflow, then copy the gradient into the next one; one
        larger than a bucket stays where it is."""
        if bucket := self._closes.get(fqn):
            yield from self._scattering(bucket)
        if self.gradients.nbytes_of[fqn] // self.sharded.element <= (
            self.sharded.options.reduce_bucket_size
        ):
            self._live.discard(fqn)
            yield Free(f"{fqn}.gradient")

    def _scattering(self, bucket: Bucket) -> Iterator[MemoryEvent]:
        """Memory of a reduce-scatter: zeros behind shards that need them, and all shards rank by
        rank in a copy. A gradient alone that divides evenly is no copy."""
        self._full.append(bucket)
        sharded, element = self.sharded, self.sharded.reduced_element
        ordered = sorted(bucket.parameters, key=self.sharded.turn)
        casts = [
            Alloc(Buffer.of(p.fqn, "cast"), "communication", p.numel * element)
            for p in ordered if sharded.casts and not bucket.in_buffer
        ]
        yield from casts
        pads, flat = list[Alloc](), list[Alloc]()
        if len(ordered) > 1 or ordered[0].numel % sharded.num_ranks:
            for rank in range(sharded.num_ranks):
                for p in ordered:
                    missing = sharded.shard_numel(p) - sharded.local_numel(p, rank=rank)
                    if missing:
                        name = Buffer.of(p.fqn, f"padding.{rank}")
                        pads.append(Alloc(name, "communication", missing * element))
            numel = sum(map(sharded.shard_numel, ordered)) * sharded.num_ranks
            flat = [Alloc(Buffer.of(bucket.name, "flat"), "communication", numel * element)]
        yield from (*pads, *flat)
        yield from (Free(alloc.buffer) for alloc in pads)
        if sharded.casts:
            yield Alloc(Buffer.of(bucket.name, OWN), "gradients", 0)
            yield from (Free(alloc.buffer) for alloc in (*casts, *flat))
        yield from self._sent(bucket)
        if not bucket.in_buffer:
            self._live.discard(bucket.parameters[0].fqn)
            yield Free(f"{bucket.parameters[0].fqn}.gradient")
        if sharded.casts:
            yield Alloc(Buffer.of(f"{bucket.name}.end", OWN), "gradients", 0)
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
        buffer = Buffer(event.buffer)
        if buffer.role != OWN:
            yield event
            return
        name, ends = buffer.owner.removesuffix(".end"), buffer.owner.endswith(".end")
        bucket = next(each for each in self.buckets if each.name == name)
        for p in sorted(bucket.parameters, key=self.sharded.turn):
            numel = self.sharded.local_numel(p, rank=rank)
            shard = Buffer.of(p.fqn, "reduced_shard")
            if numel:
                nbytes = numel * self.sharded.element
                yield Free(shard) if ends else Alloc(shard, "communication", nbytes)
