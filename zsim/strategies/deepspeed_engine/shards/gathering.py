"""GatheringStep: the carrier of a coordinator's decisions at stage 3, with its all-gathers.

Shards of parameters may live in host memory. They come to the device in front of each all-gather.
Source: deepspeed/runtime/zero/partition_parameters.py, partitioned_param_coordinator.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zsim.ir.buffers import Buffer, buffer_of, gather_of, on_host
from zsim.ir.mesh import part_of
from zsim.ir.ops import Alloc, Free, Kernel, MemoryEvent
from zsim.models.spec import ROOT, Parameter
from zsim.strategies.building.host_step import crossing
from zsim.strategies.building.kernels import MASTER_DTYPE, copy_kernel, fill_kernel
from zsim.strategies.deepspeed_engine.engine_step import EngineStep
from zsim.strategies.deepspeed_engine.layout import AXIS
from zsim.strategies.deepspeed_engine.offload.placement import placed
from zsim.strategies.deepspeed_engine.partition import MASTER_NBYTES
from zsim.strategies.deepspeed_engine.shards import quantized
from zsim.strategies.deepspeed_engine.shards.coordinator import Gather
from zsim.strategies.deepspeed_engine.shards.parameters import ShardedParameters

_Onloaded = tuple[Sequence[Kernel], Sequence[Alloc], Sequence[Free]]


def persistent_buffer(fqn: str) -> Buffer:
    """The buffer of a parameter that stays whole from step to step."""
    return buffer_of(fqn, "persistent")


def secondary_copy(sharded: ShardedParameters, parameter: Parameter) -> Alloc:
    """A rank's part of the copy of a released parameter, beside shards on the device or the host.
    """
    moved = bool(sharded.training.offload.parameters)
    nbytes = sharded.secondary_numel(parameter) * sharded.element
    name = on_host(buffer_of(parameter.fqn, "secondary"), moved=moved)
    return Alloc(name, "unsharded_parameters", nbytes)


@dataclass(slots=True, kw_only=True)
class GatheringStep(EngineStep):
    """A step whose parameters are whole while modules need them."""

    sharded: ShardedParameters
    _numbers: int = 0
    _whole: dict[str, Buffer] = field(default_factory=dict)
    """The buffer that each whole parameter lies in, by fqn."""
    _emptied: dict[str, Buffer] = field(default_factory=dict)
    """The one element that released parameters of a leaf by mean size share, by fqn."""
    _held: set[Buffer] = field(default_factory=set)
    """Buffers that a recomputed module holds until its backward."""
    _gathers: dict[int, int] = field(default_factory=dict)
    """Ops of all-gathers, by the gather's number."""
    _known: dict[tuple[str, bool], _Onloaded] = field(default_factory=dict)
    """Copies of shards to the device, by parameter and by whether they are of larger shards."""

    def follow(self, before: GatheringStep) -> None:
        """Begin with what the step before has left."""
        self._whole = {p.fqn: persistent_buffer(p.fqn) for p in self.sharded.persistent}
        self._emptied = dict(before._emptied)

    def gather(self, parameters: Sequence[Parameter], *, secondary: bool) -> Gather:
        """All-gather shards into one flat buffer, or a parameter alone into its own memory."""
        sharded, number = self.sharded, self._numbers
        self._numbers += 1
        if sharded.training.offload.parameters:
            self._onload(parameters, gather_of(number), secondary=secondary)
        nbytes = sum([sharded.padded_nbytes(p) for p in parameters])
        if len(parameters) == 1:
            made = Alloc(
                self._new(parameters[0].fqn, number), "unsharded_parameters", nbytes
            )
        else:
            made = Alloc(buffer_of(gather_of(number), "flat"), "communication", nbytes)
        spreads = secondary and sharded.spread < sharded.num_ranks
        group = part_of(AXIS, sharded.spread) if spreads else AXIS
        if sharded.options.zero_quantized_weights:
            self._gather_quantized(
                parameters, number, group=group,
                size=sharded.spread if secondary else sharded.num_ranks,
            )
            return Gather(number, tuple(parameters), {p.fqn for p in parameters})
        self._gathers[number] = self.step.issue(
            "all_gather", gather_of(number), stream="all_gather",
            waits=() if sharded.options.overlap_comm or self._compute < 0 else (self._compute,),
            group=group, nbytes=nbytes,
            dtype=sharded.dtype, micro_batch=self.micro_batch,
            memory=(made, *(self.filled_again(parameters) if len(parameters) == 1 else ())),
        )
        return Gather(number, tuple(parameters), {p.fqn for p in parameters})

    def _onload(self, parameters: Sequence[Parameter], unit: str, *, secondary: bool) -> None:
        """Copy shards to the device, for which the host waits."""
        copies = [self._onloaded(p, secondary=secondary) for p in parameters]
        fetched = self.step.issue(
            "copy", unit, stream="all_gather", micro_batch=self.micro_batch,
            kernels=tuple([kernel for kernels, _, _ in copies for kernel in kernels]),
            memory=[
                *(event for _, made, _ in copies for event in made),
                *(event for _, _, gone in copies for event in gone),
            ],
        )
        self.step.issue(
            "host_wait", unit, stream="host", waits=(fetched,), micro_batch=self.micro_batch
        )

    def _onloaded(self, p: Parameter, *, secondary: bool) -> _Onloaded:
        """A shard's copy to the device, and its memory there, made and freed."""
        key = p.fqn, secondary
        if key not in self._known:
            sharded = self.sharded
            numel = sharded.secondary_numel(p) if secondary else sharded.shard_numel(p)
            there = Alloc(buffer_of(p.fqn, "onloaded"), "temporaries", numel * sharded.element)
            made = [there] if sharded.training.device != "cpu" else []
            pins = sharded.training.offload.pin_memory and p.fqn not in sharded.in_files
            self._known[key] = crossing(
                "to_device", numel, dtype=sharded.dtype,
                pinned=pins or (not secondary and p.fqn in sharded.in_one_buffer),
            ), made, [Free(each.buffer) for each in made]
        return self._known[key]

    def _gather_quantized(
        self, parameters: Sequence[Parameter], number: int, *, group: str, size: int
    ) -> None:
        """All-gather shards in int8 and then their scales, over `size` ranks."""
        sharded, unit = self.sharded, gather_of(number)
        padded = sum(map(sharded.padded_nbytes, parameters)) // sharded.element
        numel = padded // size
        quantized.require_eighths(parameters, numel=numel)
        if len(parameters) == 1:
            quantized.require_unpadded(parameters[0], padded_numel=padded)
        scales = quantized.num_scales(numel) * size * quantized.SCALE_NBYTES
        flat, scale_buffer, _ = quantized.buffers(number)
        ready = self.step.issue(
            "copy", unit, stream="all_gather", micro_batch=self.micro_batch,
            waits=() if sharded.options.overlap_comm or self._compute < 0 else (self._compute,),
            kernels=quantized.kernels(numel, dtype=sharded.dtype),
            memory=[
                Alloc(flat, "communication", padded),
                *quantized.local(sharded, parameters, number=number, numel=numel),
                Alloc(scale_buffer, "communication", scales),
            ],
        )
        for nbytes, dtype in ((padded, quantized.BYTE), (scales, MASTER_DTYPE)):
            ready = self.step.issue(
                "all_gather", unit, stream="all_gather", waits=(ready,), group=group,
                nbytes=nbytes, dtype=dtype, micro_batch=self.micro_batch,
            )
        self._gathers[number] = ready

    def _new(self, fqn: str, number: int) -> Buffer:
        self._whole[fqn] = buffer_of(fqn, "gathered", number)
        return self._whole[fqn]

    def wait(self, gather: Gather) -> None:
        """Compute waits for it; each of several parameters is copied into memory of its own."""
        many = len(gather.parameters) > 1
        numel = sum([parameter.numel for parameter in gather.parameters])
        dtype, narrow = self.sharded.dtype, self.sharded.options.zero_quantized_weights
        made = [
            Alloc(
                self._new(parameter.fqn, gather.number), "unsharded_parameters",
                parameter.numel * self.sharded.element,
            )
            for parameter in (gather.parameters if many or narrow else ())
        ]
        copied, memory = copy_kernel(numel, source=dtype, target=dtype), list[MemoryEvent](made)
        if narrow:
            padded = sum(map(self.sharded.padded_nbytes, gather.parameters))
            # DeepSpeed's own kernel loads 16 bytes at once, where torch's casts do not
            copied = replace(copy_kernel(numel, source=quantized.BYTE, target=dtype), singly=0)
            memory = [
                *(Free(each) for each in quantized.sent(gather.number) if not self._keeps_sent),
                *quantized.dequantized(
                    self.sharded, made, number=gather.number,
                    padded_numel=padded // self.sharded.element,
                ),
            ]
        self._compute = self.step.issue(
            "copy", gather_of(gather.number), waits=(self._gathers[gather.number],),
            micro_batch=self.micro_batch, memory=[*memory, *self.filled_again(gather.parameters)],
            kernels=(copied,) if made else (),
        )

    @property
    def _keeps_sent(self) -> bool:
        return self.training.device == "cpu"

    def forget(self, gather: Gather) -> None:
        """Free the flat buffer, once the modules of all its parameters have come."""
        many = len(gather.parameters) > 1
        if self.sharded.options.zero_quantized_weights:
            sent = quantized.sent(gather.number) if self._keeps_sent else ()
            for buffer in (*quantized.buffers(gather.number)[: 2 + many], *sent):
                self._free(buffer)
        elif many:
            self._free(buffer_of(gather_of(gather.number), "flat"))

    def release(self, parameter: Parameter) -> None:
        """Free a parameter's memory, unless a backward needs it."""
        buffer = self._whole.pop(parameter.fqn)
        if buffer not in self._held:
            self._free(buffer)

    def release_leaf(self, module: str, parameters: Sequence[Parameter]) -> None:
        """A leaf by mean size has one element made, to which its released parameters point."""
        if self.sharded.options.stage3_module_granularity_threshold:
            shared = Alloc(buffer_of(module, "emptied"), "temporaries", MASTER_NBYTES)
            self._emptied |= dict.fromkeys([p.fqn for p in parameters], shared.buffer)
            self.step.issue(
                "alloc", ROOT, micro_batch=self.micro_batch,
                memory=[shared] if parameters else [shared, Free(shared.buffer)],
            )

    def filled_again(self, parameters: Sequence[Parameter]) -> list[Free]:
        """Frees of elements to which none of the leaf's parameters points any longer."""
        if not self._emptied:
            return []
        left = {self._emptied.pop(p.fqn) for p in parameters if p.fqn in self._emptied}
        return [Free(buffer) for buffer in sorted(left.difference(self._emptied.values()))]

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

    def is_on_drive(self, parameter: Parameter) -> bool:
        """False: all shards are in memory."""
        return False

    def num_free(self) -> int:
        """Buffers for shards on drives: none."""
        return 0

    def read_ahead(self, parameters: Sequence[Parameter]) -> None:
        """Read nothing, as nothing is on drives."""

    def rename(self, names: Mapping[str, Parameter]) -> None:
        """Nothing has been read."""

    def _free(self, buffer: Buffer) -> None:
        """Free by record_stream: the memory is free once compute has come so far."""
        self.step.issue(
            "free", ROOT, micro_batch=self.micro_batch, memory=[Free(buffer)]
        )
