"""SwappingShardedStep: stage 3 whose sub-groups are on drives.

The last micro-batch casts each shard of a gradient on the device, and copies it into a page-locked
buffer. CUDA takes that for pageable memory, so the host waits. Full buffers are written beside
backward, what is left of them at the end of it. A sub-group is read, stepped and written; states
come first, then gradients from files, then those that waited on the device. With `pipeline_read`
all is read at once, the next sub-group beside the step. With `pipeline_write` a sub-group is
written beside the next one's step.
Source: deepspeed/runtime/swap_tensor/partitioned_optimizer_swapper.py and
pipelined_optimizer_swapper.py, which either option takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from zsim.errors import ScenarioError
from zsim.ir.buffers import Buffer, buffer_of, numbered, owner_of, role_of, state_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent, Op, Stream
from zsim.models.spec import ROOT, Parameter
from zsim.strategies.building.host_step import crossing
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.optimizers import state_names
from zsim.strategies.deepspeed_engine.offload.placement import STATES, Event, placed
from zsim.strategies.deepspeed_engine.partition import Bucket
from zsim.strategies.deepspeed_engine.shards.coordinator import Gather
from zsim.strategies.deepspeed_engine.shards.drives import SWAP, aligned, drive, moved
from zsim.strategies.deepspeed_engine.shards.offload.offloaded_step import (
    SENT,
    OffloadedShardedStep,
)

KEPT = "kept"
"""Place holder: what is left of a sub-group's gradients on the device."""


def kept_buffer(parameter: Parameter) -> Buffer:
    """The float32 shard of a gradient on the device, until it is in host memory."""
    return buffer_of(parameter.fqn, "swapped")


@dataclass(slots=True, kw_only=True)
class SwappingShardedStep(OffloadedShardedStep):
    """OffloadedShardedStep with sub-groups on drives."""

    _written: list[list[tuple[int, ...]]] = field(default_factory=list)
    """Elements that each kind of rank writes of each bucket."""
    _flushed: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The bucket, and the write's number in it, of each op that writes buffers or awaits that."""
    _gradients: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The sub-group of each op that reads gradients, and elements of others that it reads."""
    _rests: dict[int, int] = field(default_factory=dict)
    """The sub-group of each op that copies gradients from the device."""
    _read: dict[int, int] = field(default_factory=dict)
    """Reads, by sub-group."""
    _fetched: set[str] = field(default_factory=set)
    """Parameters whose shards are in buffers, or on their way there."""
    _reading: set[str] = field(default_factory=set)
    """The ones among them that nobody has awaited."""
    _last_read: int = -1
    _storing: list[int] = field(default_factory=list)
    """The write that goes on beside the next sub-group's step."""

    @property
    def _pipelined(self) -> bool:
        offload = self.training.offload
        return offload.pipeline_read or offload.pipeline_write

    def _swapped_of(self, parameters: Iterable[Parameter]) -> list[Parameter]:
        """The ones of sub-groups on drives, in the order of the model."""
        swapped = self.sharded.swapped
        return sorted((p for p in parameters if p.fqn in swapped), key=self.sharded.turn)

    def _next(self, number: int) -> int | None:
        """The next sub-group on drives."""
        return next((each for each in self.sharded.drives.swapped if each > number), None)

    # -- parameters

    def is_on_drive(self, parameter: Parameter) -> bool:
        """True where the shard is in a file alone."""
        return parameter.fqn in self.sharded.in_files and parameter.fqn not in self._fetched

    def num_free(self) -> int:
        """Buffers that hold no shard; each does until its parameter is released."""
        if not self.sharded.in_files:
            return 0
        return self.training.offload.parameter_buffer_count - len(self._fetched)

    def read_ahead(self, parameters: Sequence[Parameter]) -> None:
        """Begin to read shards, which the next gather that needs one of them awaits."""
        if len(set(parameters)) < len(parameters) or len(parameters) > self.num_free():
            raise ScenarioError((
                "offload.parameter_buffer_count: expected a buffer for each shard of a whole "
                f"parameter, found none for {parameters[-1].fqn}, where DeepSpeed fails; lower "
                "strategy.stage3_max_reuse_distance or stage3_prefetch_bucket_size, or raise it",
            ))
        kernels = moved("read", self.sharded.file_nbytes(parameters))
        self._reading = {p.fqn for p in parameters}.union(self._reading)
        self._fetched |= self._reading
        self._last_read = self._issue("drive_read", kernels=kernels, micro_batch=self.micro_batch)

    def rename(self, names: Mapping[str, Parameter]) -> None:
        """Shards in buffers are those of blocks that are called in other places."""
        self._fetched, self._reading = (
            {names[fqn].fqn if fqn in names else fqn for fqn in fqns}
            for fqns in (self._fetched, self._reading)
        )

    def gather(self, parameters: Sequence[Parameter], *, secondary: bool) -> Gather:
        """All-gather shards, of which those on drives are read first; the host waits."""
        missing = [p for p in parameters if self.is_on_drive(p)]
        if missing:
            self.read_ahead(missing)
        if self._reading.intersection(p.fqn for p in parameters):
            self._await(self._last_read, micro_batch=self.micro_batch)
            self._reading = set()
        return OffloadedShardedStep.gather(self, parameters, secondary=secondary)

    def release(self, parameter: Parameter) -> None:
        """Free a parameter's memory, and the buffer of its shard."""
        OffloadedShardedStep.release(self, parameter)
        self._fetched.discard(parameter.fqn)

    # -- gradients

    def average(self, bucket: Bucket) -> None:
        """Send a bucket, and write the buffers that it fills."""
        OffloadedShardedStep.average(self, bucket)
        if self.is_last:
            self._flush(bucket.number)

    def _flush(self, bucket: int) -> None:
        """Write what the bucket has filled on any rank; the host waits between several writes."""
        if not self._written:
            ranks = {self.kind_of(rank): rank for rank in range(self.sharded.num_ranks)}
            self._written = [self._flushes(rank) for rank in ranks.values()]
        written = [of_rank[bucket] for of_rank in self._written]
        of = self.micro_batch if bucket < len(self.buckets) else 0
        for number, numels in enumerate(zip_longest(*written, fillvalue=0)):
            if any(numels):
                write = self._issue("drive_write", waits=self._reduced[-1:], micro_batch=of)
                self._flushed[write] = bucket, number
                if any(len(each) > number + 1 for each in written):
                    self._flushed[self._await(write, micro_batch=of)] = bucket, number

    def _flushes(self, rank: int) -> list[tuple[int, ...]]:
        numels = self.sharded.local_numels(rank)
        return list(self.sharded.drives.flushes(
            [numels[p.fqn] for p in self._swapped_of(bucket.parameters)] for bucket in self.buckets
        ))

    def _into_host(self, p: Parameter, numel: int) -> Iterator[Kernel]:
        """The copy of a shard into a page-locked buffer, of which CUDA knows nothing."""
        if p.fqn in self.sharded.swapped:
            piece = self.sharded.drives.piece(numel)
            yield from crossing("to_host", piece, dtype=MASTER_DTYPE, pinned=False)
        else:
            yield from OffloadedShardedStep._into_host(self, p, numel)

    def _sent_memory(self, p: Parameter, numel: int, op: Op) -> Iterator[Event]:
        """The float32 shard on the device lives until it is in host memory."""
        is_last = op.micro_batch == self.training.batch.accumulation - 1
        keeps = is_last and p.fqn in self.sharded.swapped
        names = {"sent.back", "sent.cast"} if self.sharded.dtype == MASTER_DTYPE else {"sent.cast"}
        for event in OffloadedShardedStep._sent_memory(self, p, numel, op):
            if not keeps or event.buffer not in names:
                yield event
            elif isinstance(event, Alloc):
                yield Alloc(kept_buffer(p), "gradients", event.nbytes)

    @property
    def _makes(self) -> bool:
        """True where float32 shards on the device are others than those in host memory."""
        return self.training.device != "cpu" or self.sharded.dtype != MASTER_DTYPE

    def _own(self, event: MemoryEvent, op: Op, numels: Mapping[str, int]) -> Iterator[Event]:
        """Gradients of which all is in a buffer go with their bucket, others with their step."""
        name, part = owner_of(event.buffer), role_of(event.buffer)
        if part != KEPT:
            yield from OffloadedShardedStep._own(self, event, op, numels)
        if not self._makes or part not in (KEPT, SENT):
            return
        if part == KEPT:
            among: Sequence[Parameter] = self.sharded.sub_groups[int(name)]
        elif op.micro_batch == self.training.batch.accumulation - 1:
            among = self.bucket_of[name].parameters
        else:
            among = ()
        for p in self._swapped_of(among):
            numel = numels[p.fqn]
            whole = numel == self.sharded.drives.piece(numel)
            if numel and whole is (part == SENT):
                yield Free(kept_buffer(p))

    # -- the optimizer's step

    def swap_in(self, number: int, *, first: bool) -> None:
        """Read a sub-group, unless it was read ahead, and perhaps the next one."""
        drives = self.sharded.drives
        if number not in drives.swapped:
            return
        if number == drives.swapped[0]:
            self._flush(len(self.buckets))
        if number not in self._read:
            self._read_group(number, first=first)
        if self._pipelined:
            self._await(self._read[number])
        following = self._next(number)
        if self.training.offload.pipeline_read and following is not None:
            self._read_group(following, first=first)

    def _read_group(self, number: int, *, first: bool) -> None:
        """Read copy and states, and gradients; then copy those that are on the device."""
        names = state_names(self.training.optimizer)
        numel = aligned(self.sharded.drives.sizes[number]) * (1 if first else 1 + len(names))
        if not self._pipelined:
            self._await(self._issue("drive_read", kernels=drive("read", numel)))
            numel = 0
        elif not first:
            freed = [Free(state_of(numbered(STATES, number), 0, name)) for name in names]
            memory, host = placed(freed, device=self.training.device)
            self.asserts.issue("free", ROOT, stream="host", memory=memory, host=host)
        self._read[number] = self._issue("drive_read")
        self._gradients[self._read[number]] = number, numel
        if not self._pipelined:
            self._await(self._read[number])
        self._rests[self._issue("host")] = number

    def swap_out(self, number: int, *, after: int, first: bool) -> None:
        """Write parameters, and then a sub-group once the last one is written. States that the
        first step has made in other memory go through buffers."""
        if nbytes := self.sharded.file_nbytes(self.sharded.sub_groups[number]):
            self._await(self._issue("drive_write", waits=[after], kernels=moved("write", nbytes)))
        if number not in self.sharded.drives.swapped:
            return
        numel, names = aligned(self.sharded.drives.sizes[number]), state_names(
            self.training.optimizer
        )
        for write in self._storing:
            self._await(write)
        self._storing = []
        if first and not self._pipelined:
            self._await(self._issue("drive_write", waits=[after], kernels=drive("write", numel)))
            stored = self._issue("drive_write", kernels=drive("write", numel * len(names)))
        else:
            kernels = drive("write", numel * (1 + len(names)))
            stored = self._issue("drive_write", waits=[after], kernels=kernels)
        if self.training.offload.pipeline_write and self._next(number) is not None:
            self._storing = [stored]
        else:
            self._await(stored)
        made = [state_of(numbered(STATES, number), 0, name) for name in names]
        self.issue_placed(
            "free", ROOT, buffer_of(str(number), KEPT), stream="host",
            memory=[Free(each) for each in made] if first and not self._pipelined else [],
        )

    def _issue(
        self, stream: Stream, *, waits: Sequence[int] = (), kernels: tuple[Kernel, ...] = (),
        micro_batch: int = 0,
    ) -> int:
        return self.step.issue(
            "copy", SWAP, stream=stream, waits=waits, kernels=kernels, micro_batch=micro_batch
        )

    def _await(self, op: int, *, micro_batch: int = 0) -> int:
        return self.step.issue(
            "host_wait", SWAP, stream="host", waits=(op,), micro_batch=micro_batch
        )

    # -- ranks

    def of_rank(self, rank: int) -> list[Op]:
        """The ops of a rank, with what it reads and writes."""
        ops, drives = OffloadedShardedStep.of_rank(self, rank), self.sharded.drives
        numels, flushes = self.sharded.local_numels(rank), self._flushes(rank)
        for index, (bucket, number) in self._flushed.items():
            written = flushes[bucket][number:]
            if ops[index].kind == "copy":
                ops[index] = replace(ops[index], kernels=drive("write", sum(written[:1])))
            elif len(written) < 2:
                ops[index] = replace(ops[index], waits=())
        for index, (number, more) in self._gradients.items():
            pieces = sum(drives.piece(numels[p.fqn]) for p in self.sharded.sub_groups[number])
            ops[index] = replace(ops[index], kernels=drive("read", more + pieces))
        for index, number in self._rests.items():
            own = [numels[p.fqn] for p in self.sharded.sub_groups[number]]
            rest = sum(own) - sum(map(drives.piece, own))
            kernels = crossing("to_host", rest, dtype=MASTER_DTYPE, pinned=False)
            ops[index] = replace(ops[index], kernels=kernels)
        return ops
