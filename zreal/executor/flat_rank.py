"""One rank under zero1, zero2 and zero3: carries out the ops of a Program on flat buffers.

An op's kind, and the buffers that it allocates and frees, say how it is carried out. The trainer
reads from the Program when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zreal import torch_private
from zreal.executor.communication_stream import CollectiveQueue, DeviceStreams, OpStreams
from zreal.executor.drive_shards import DriveShards
from zreal.executor.flat_buffers import FlatBuffers, release
from zreal.executor.host_shards import HostShards
from zreal.executor.rank_optimizer import RankOptimizer
from zreal.meters.held_memory import held_bytes
from zreal.modules import emulation
from zreal.modules.clipping import Clipping
from zreal.modules.initial_values import DTYPES, Make, made
from zsim.errors import ProgramError
from zsim.ir.buffers import buffer_of, owner_of, role_of
from zsim.ir.host_ledger import OFFLOADED
from zsim.ir.ops import Alloc, Free, Op
from zsim.models.spec import ModelSpec, Module
from zsim.models.training_options import Dtype, Offload, Optimizer, Precision
from zsim.strategies.building import clipping
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.parameters import used_parameters
from zsim.strategies.flat_buffer.groups import flat_groups
from zsim.strategies.flat_buffer.host_buffers import SWAP
from zsim.strategies.flat_buffer.layout import REPLICAS

MASTER = DTYPES[MASTER_DTYPE]
DRIVES = ("drive_read", "drive_write")
"""Streams of copies between host memory and drives."""


class FlatSettings(Protocol):
    """The part of a scenario that flat buffers need."""

    @property
    def model(self) -> ModelSpec: ...
    @property
    def options(self) -> Any: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def offload(self) -> Offload: ...
    @property
    def gradient_dtype(self) -> Dtype: ...


@dataclass(slots=True)
class FlatRank:
    """The model of one rank, its param groups as flat buffers, and the optimizer of its shards."""

    scenario: FlatSettings
    model: nn.Module
    process_group: dist.ProcessGroup
    """The ranks that shards are cut for."""
    replicas: dist.ProcessGroup | None = None
    """The ranks that have the same shards, where there are several."""
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around collectives: copies inside the backend, as in gloo's reduce-scatter, are not the
    strategy's."""
    make: Make = made
    """Makes the parameters of a group, before they are joined."""
    device: str | torch.device = "cpu"
    keeps_whole_gradients: bool = False
    """True where whole gradients live until the optimizer has stepped, as in ZeRO-1."""
    buffers: FlatBuffers = field(init=False)
    optimizer: RankOptimizer = field(init=False)
    host: HostShards | None = field(init=False)
    """Shards in host memory, where any are offloaded."""
    _main: dict[Tensor, Tensor] = field(default_factory=dict)
    """Views of the kept gradients of another dtype than their parameters, by parameter."""
    _clipping: Clipping = field(default_factory=Clipping)
    device_streams: DeviceStreams = field(init=False)
    _queue: CollectiveQueue = field(default_factory=CollectiveQueue)

    def __post_init__(self) -> None:
        groups = flat_groups(
            self.scenario.model,
            grouping=self.scenario.options.grouping,
            num_shards=self.process_group.size(),
            dtype=self.scenario.precision.parameters,
        )
        by_unit = {group.fqn: group for group in groups}
        self.buffers = FlatBuffers(by_unit, self.model, self.process_group)
        offload, settings = self.scenario.offload, self.scenario.optimizer
        if offload.adam == "deepspeed":  # in one pass, as torch's fused
            settings = replace(settings, implementation="fused")
        self.optimizer = RankOptimizer(settings)
        kind = DriveShards if offload.optimizer == "nvme" else HostShards
        self.host = kind(
            offload, self.scenario.precision.parameters, self.optimizer, self.uncounted,
            pins=torch.device(self.device).type == "cuda",
        ) if offload.optimizer else None
        self.device_streams = DeviceStreams(torch.get_device_module(self.device))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters."""
        return DTYPES[self.scenario.precision.parameters]

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of kept gradients."""
        return DTYPES[self.scenario.gradient_dtype]

    @property
    def gradient_scale(self) -> float:
        """Gradient of the loss that starts backward: this rank's share of the mean, as reductions
        sum."""
        copies = self.replicas.size() if self.replicas is not None else 1
        return 1 / (self.process_group.size() * copies)

    def construct(self, op: Op) -> None:
        """Make a group's parameters, join them in a flat buffer, or free it where only the shard is
        kept."""
        if op.unit == SWAP and self.host is not None:
            self.host.make_buffers(op)
        elif op.kind == "alloc":
            self.make(p.fqn for p in self.buffers.groups[op.unit].group.parameters)
        elif op.kind == "copy":
            self._flatten(op)
        elif op.kind == "free":
            self._free(op)

    def _flatten(self, op: Op) -> None:
        """Join float32 parameters in a flat buffer; 2-byte ones are views of a rounded copy of it.
        """
        unit, made, buffers = op.unit, _allocated(op), self.buffers
        group = buffers.groups[unit]
        exact = torch.zeros(group.layout.padded_numel, dtype=MASTER, device=self.device)
        for parameter, view in buffers.views(group, exact):
            view.copy_(parameter.data)
            parameter.data = view
        flat = exact.to(self.dtype)
        for parameter, view in buffers.views(group, flat):
            parameter.data = view
            if group.trained and self.gradient_dtype != self.dtype:
                parameter.register_post_accumulate_grad_hook(self._add_to_main)
        kept = "unsharded" if buffer_of(unit, "unsharded") in made else "parameters"
        buffers.live[buffer_of(unit, kept)] = flat
        if buffer_of(unit, "parameters") in made and kept == "unsharded":
            buffers.live[buffer_of(unit, "parameters")] = buffers.own_slice(unit, flat).clone()
        if self.host is not None:
            own = buffers.own_slice(unit, exact), buffers.own_slice(unit, flat)
            self.host.construct(op, *own, trained=group.trained)
        elif group.trained:
            self.optimizer.stepped[unit] = buffers.shard(unit)
        if buffer_of(unit, "master") in made:
            master = buffers.own_slice(unit, exact).clone()
            self.optimizer.stepped[unit] = buffers.live[buffer_of(unit, "master")] = master

    def enter(self, module: Module, *, backward: bool) -> None:
        """Before `module` computes: require its parameters, and in backward make its gradients.

        ProgramError where a parameter is resharded.
        """
        used = set(used_parameters(module))
        for unit, group in self.buffers.groups.items():
            if not any(parameter.fqn in used for parameter in group.group.parameters):
                continue
            full = self.buffers.full(unit)
            if group.layout.numel and full.untyped_storage().size() == 0:
                raise ProgramError(
                    where=f"{'backward' if backward else 'forward'} of {module.fqn}",
                    expected=f"{unit} to be unsharded",
                    found="it sharded",
                    remedy="the Program must all-gather it first",
                )
            if backward and group.trained and buffer_of(unit, "gradients") not in self.buffers.live:
                flat = torch.zeros_like(full, dtype=self.gradient_dtype)
                self.buffers.live[buffer_of(unit, "gradients")] = flat
                for parameter, view in self.buffers.views(group, flat):
                    if flat.dtype == parameter.dtype:
                        parameter.grad = view
                    else:
                        self._main[parameter] = view

    @torch.no_grad()
    def _add_to_main(self, parameter: Tensor) -> None:
        """Add the gradient that autograd has made to the kept one and free it, as Megatron does.

        torch takes no gradient of another dtype than its parameter's.
        """
        assert parameter.grad is not None
        self._main[parameter].add_(parameter.grad)
        parameter.grad = None

    @property
    def streams(self) -> OpStreams:
        """Streams of the device; beside timers a queue, since collectives would else share the
        host's thread with them."""
        return self._queue if emulation.is_running(self.model) else self.device_streams

    def perform(self, op: Op) -> None:
        """Carry out one op that is not compute, on its stream."""
        with self.streams.on(op):
            self._carry_out(op)

    def _carry_out(self, op: Op) -> None:
        live = self.buffers.live
        has_output = buffer_of(op.unit, "reduce_output") in live
        match op.kind:
            case "all_gather":
                self._gather(op)
            case "copy" if self.host is not None and op.stream in DRIVES:
                self.host.move(op)
            case "copy" if self.host is not None and _crosses(op):
                self._cross(op, self.host)
            case "copy" if op.stream != "compute" and has_output:
                self._keep_output(op)
            case "copy" if op.stream != "compute":
                self._copy_back(op)
            case "copy":
                reduce = DTYPES[self.scenario.precision.reduce]
                gradients = live[buffer_of(op.unit, "gradients")]
                live[buffer_of(op.unit, "reduce_input")] = gradients.to(reduce)
            case "optimizer" | "all_reduce" if op.unit in (clipping.NORMS, clipping.CLIP):
                self._clip(op)
            case "all_reduce" if op.group == REPLICAS:
                self._reduce_over_replicas(op)
            case "all_reduce" | "reduce_scatter" if not _allocated(op):
                self._reduce_in_place(op)
            case "reduce_scatter":
                self._reduce_scatter(op)
            case "free":
                self._free(op)
            case "optimizer" if self.host is not None:
                self.host.step(op.unit)
            case "optimizer":
                self._step()
            case _:
                raise ProgramError(
                    where=f"op {op.index}", expected="an op of zero1, zero2 or zero3", found=op.kind
                )

    def _gather(self, op: Op) -> None:
        """All-gather a shard, which goes where it was brought from the host for this."""
        full = self.buffers.full(op.unit)
        full.untyped_storage().resize_(full.numel() * full.element_size())
        onloaded = self.buffers.live.pop(buffer_of(op.unit, "onloaded"), None)
        shard = self.buffers.shard(op.unit) if onloaded is None else onloaded
        self._issue(op, torch_private.all_gather, full, shard)
        if onloaded is not None:
            self.streams.free(onloaded, op.stream)

    def _cross(self, op: Op, host: HostShards) -> None:
        """Copy a gradient to the host and free it, or a shard to the device.

        For an all-gather the shard has a buffer of its own; else it goes back into the parameters.
        """
        unit, live = op.unit, self.buffers.live
        if op.kernels[-1].operator.startswith("to_host"):
            host.take_gradient(unit, self.buffers.gradient(unit))
            if Free(buffer_of(unit, "gradient_shard")) in op.memory:
                self.streams.free(live.pop(buffer_of(unit, "gradient_shard")), op.stream)
            return
        source, onloaded = host.parameters(unit), buffer_of(unit, "onloaded")
        if onloaded in _allocated(op):
            live[onloaded] = torch.empty_like(source, device=self.device)
        target = live[onloaded] if onloaded in live else self.buffers.shard(unit)
        target.copy_(source, non_blocking=host.pins)
        host.crossed(unit)

    def _issue(self, op: Op, collective: Callable[..., object], *tensors: Tensor) -> None:
        """Carry out a collective of `tensors`."""
        group = self.replicas if op.group == REPLICAS else self.process_group
        call = partial(collective, *tensors, group=group)
        with self.uncounted() if op.kind != "all_gather" else nullcontext():
            self.streams.issue(call, op, *tensors)

    def _clip(self, op: Op) -> None:
        """One of the three ops of clipping: norms of the shards, their all-reduce, the scaling."""
        gradients = [*self._own_gradients().values()]
        if self.host is not None:
            with self.uncounted():
                self._clip_in_place(op, gradients)
        else:
            self._clip_in_place(op, gradients)

    def _own_gradients(self) -> Mapping[str, Tensor]:
        """This rank's gradients where they are stepped, by unit."""
        if self.host is not None:
            return self.host.gradients()
        return {unit: self.buffers.gradient(unit) for unit in self.optimizer.stepped}

    def _clip_in_place(self, op: Op, gradients: Sequence[Tensor]) -> None:
        if op.kind == "all_reduce":
            self._clipping.reduce(self.process_group, device=self.device)
        elif op.unit == clipping.NORMS:
            self._clipping = Clipping()
            self._clipping.measure(gradients, sharded=self.process_group.size() > 1)
        else:
            self._clipping.clip(gradients, max_norm=self.scenario.optimizer.clip_norm)
            self._clipping = Clipping()

    def _reduce_in_place(self, op: Op) -> None:
        """Sum the gradients over ranks, or the copy of them in the reduce dtype."""
        live = self.buffers.live
        buffer = live.get(buffer_of(op.unit, "reduce_input"), live[buffer_of(op.unit, "gradients")])
        if op.kind == "all_reduce":
            self._issue(op, dist.all_reduce, buffer)
        else:
            shard = self.buffers.own_slice(op.unit, buffer)
            self._issue(op, torch_private.reduce_scatter, shard, buffer)

    def _reduce_over_replicas(self, op: Op) -> None:
        """Sum this rank's shard over its replicas: in the reduce dtype, or the gradient itself."""
        live, unit = self.buffers.live, op.unit
        output = live.get(buffer_of(unit, "reduce_output"))
        if output is None and buffer_of(unit, "reduce_input") in live:
            output = self.buffers.own_slice(unit, live[buffer_of(unit, "reduce_input")])
        self._issue(op, dist.all_reduce, self.buffers.gradient(unit) if output is None else output)

    def _copy_back(self, op: Op) -> None:
        """Cast reduced gradients back, as many as the Program moves: all, or this rank's slice.
        Where it fills, zero the other ranks' slices."""
        gradients = self.buffers.live[buffer_of(op.unit, "gradients")]
        own = self.buffers.own_slice(op.unit, gradients)
        reduced = self.buffers.live.pop(buffer_of(op.unit, "reduce_input"), None)
        if reduced is not None:
            if op.kernels[0].nbytes == reduced.nbytes + gradients.nbytes:
                gradients.copy_(reduced)
            else:
                own.copy_(self.buffers.own_slice(op.unit, reduced))
            self.streams.free(reduced)
        if any(kernel.operator == "fill" for kernel in op.kernels):
            start = own.storage_offset() - gradients.storage_offset()
            gradients[:start].zero_()
            gradients[start + own.numel() :].zero_()

    def _reduce_scatter(self, op: Op) -> None:
        """Sum over ranks into the gradient shard, or into an output from which it is made."""
        unit, live = op.unit, self.buffers.live
        source = live.pop(buffer_of(unit, "reduce_input"), live[buffer_of(unit, "gradients")])
        output = source.new_empty(self.buffers.groups[unit].layout.shard_numel)
        self._issue(op, torch_private.reduce_scatter, output, source)
        if source is not live[buffer_of(unit, "gradients")]:
            self.streams.free(source)
        name = buffer_of(unit, "reduce_output")
        live[name if name in _allocated(op) else buffer_of(unit, "gradient_shard")] = output

    def _keep_output(self, op: Op) -> None:
        """Make the gradient shard of a reduction's output in its dtype, or add to the existing one.

        Where the Program frees the existing one and keeps the output, it adds to the output.
        """
        live, shard = self.buffers.live, buffer_of(op.unit, "gradient_shard")
        if Free(shard) in op.memory:
            kept = live.pop(shard)
            live[buffer_of(op.unit, "reduce_output")].add_(kept)
            release(kept)
            return
        output = live.pop(buffer_of(op.unit, "reduce_output"))
        if shard in _allocated(op):
            live[shard] = output.to(self.gradient_dtype, copy=True)
        else:
            live[shard].add_(output)
        release(output)

    def _free(self, op: Op) -> None:
        """Free the op's buffers: an unsharded buffer keeps its tensor without memory, others go."""
        live = self.buffers.live
        for event in op.memory:
            if isinstance(event, Free) and event.buffer in live:  # autograd frees others
                buffer, role = event.buffer, role_of(event.buffer)
                if role == "gradients":  # a reduction may read it
                    self.streams.free(live[buffer])
                else:
                    release(live[buffer])
                if role != "unsharded":
                    del live[buffer]
                if role == "gradients":
                    self._forget_gradients(owner_of(buffer))

    def _forget_gradients(self, unit: str) -> None:
        for parameter in self.buffers.groups[unit].group.parameters:
            tensor = self.model.get_parameter(parameter.fqn)
            tensor.grad = None
            self._main.pop(tensor, None)

    def restore(self, with_memory: Mapping[str, bool]) -> None:
        """Free what is live beside `with_memory`, as of an unfinished step, and gather what had
        memory then."""
        self.streams.join()
        self.device_streams.module.synchronize()
        live = self.buffers.live
        for name in [name for name in live if not with_memory.get(name, False)]:
            release(live[name])
            if name in with_memory:
                continue
            del live[name]
            if role_of(name) == "gradients":
                self._forget_gradients(owner_of(name))
        for unit in self.buffers.groups:
            name = buffer_of(unit, "unsharded")
            if with_memory.get(name) and live[name].untyped_storage().size() == 0:
                self.buffers.gather(unit)

    def _step(self) -> None:
        """Step this rank's shards; stepped master copies are cast into the parameters."""
        units = self.optimizer.stepped
        gradients = self._own_gradients()
        self.optimizer.step(gradients, {unit: self.buffers.shard(unit) for unit in units})

    def expected_step(self) -> dict[str, Tensor]:
        """The shards after the next step, as a new optimizer makes them from the same state."""
        return self.optimizer.expected_step(self._own_gradients())

    def held(self) -> Mapping[str, int]:
        """Bytes of this rank's parameters, gradients and optimizer states, and of host memory where
        some are offloaded.

        Whole gradients count in ZeRO-1, and where nothing is sharded.
        """
        whole = self.keeps_whole_gradients or self.process_group.size() == 1
        held = held_bytes(
            parameters=self._with_role("parameters"),
            gradients=self._with_role(*(["gradients"] if whole else []), "gradient_shard"),
            states=[] if self.host else [*self._with_role("master"), *self.optimizer.states()],
            device=self.device,
        )
        return held if self.host is None else {**held, OFFLOADED: self.host.nbytes()}

    def _with_role(self, *roles: str) -> list[Tensor]:
        named = self.buffers.live.items()
        return [tensor for name, tensor in named if role_of(name) in roles]

    def parameters(self, stepped: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Every parameter whole, all-gathered, as the optimizer has it; for parity.

        With `stepped`, earlier copies of the optimizer's shards take their place.
        """
        return {fqn: view.clone() for fqn, view in self.each_parameter(stepped)}

    def each_parameter(
        self, stepped: Mapping[str, Tensor] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Parameters as `parameters` has them, views of one unit at a time."""
        shards = self.optimizer.stepped if stepped is None else stepped
        units = self.buffers.groups
        return self.buffers.gathered(
            {unit: shards[unit] if unit in shards else self._unstepped(unit) for unit in units}
        )

    def _unstepped(self, unit: str) -> Tensor:
        """The shard of parameters that are not stepped, where it lives."""
        if buffer_of(unit, "parameters") in self.buffers.live or self.host is None:
            return self.buffers.shard(unit)
        return self.host.parameters(unit)

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient whole, all-gathered before the optimizer's step; for parity."""
        gathered = self.buffers.gathered(self._own_gradients())
        return {fqn: view.clone() for fqn, view in gathered}


def _allocated(op: Op) -> set[str]:
    return {event.buffer for event in op.memory if isinstance(event, Alloc)}


def _crosses(op: Op) -> bool:
    """True for a copy between device and host."""
    return any(kernel.location == "link" for kernel in op.kernels)
