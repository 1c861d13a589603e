"""One rank under our ddp: carries out the ops of a Program on whole parameters and buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.utils import clip_grad_norm_

from zreal import torch_private
from zreal.executor.communication_stream import DeviceStreams
from zreal.executor.rank_optimizer import RankOptimizer
from zreal.meters.held_memory import held_bytes
from zreal.modules.initial_values import DTYPES, Make, by_unit, made
from zreal.modules.modules import Model
from zsim.autograd.lowering import lower_model
from zsim.errors import ProgramError
from zsim.ir.buffers import bucket_number, buffer_of, owner_of
from zsim.ir.ops import Alloc, Op
from zsim.models.repeats import with_forwards
from zsim.models.spec import Module
from zsim.scenario.scenario import Scenario
from zsim.strategies import ddp
from zsim.strategies.building import clipping
from zsim.strategies.building.training import Training
from zsim.strategies.replicated import buckets
from zsim.strategies.replicated.construction import ONE_BUCKET


@dataclass(slots=True)
class ReplicatedRank:
    """The model of one rank, its gradient buckets, and its optimizer of every parameter.

    The optimizer steps the parameters, or float32 ones of which they are rounded copies.
    """

    scenario: Scenario
    model: Model
    process_group: dist.ProcessGroup
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around collectives: copies inside the backend are not the strategy's."""
    make: Make = made
    """Makes the parameters."""
    device: str | torch.device = "cpu"
    live: dict[str, Tensor] = field(default_factory=dict)
    """Live buckets by the Program's names of buffers."""
    optimizer: RankOptimizer = field(init=False)
    streams: DeviceStreams = field(init=False)
    _buckets: tuple[buckets.Bucket, ...] = ()
    _filled: set[str] = field(default_factory=set)
    """Buckets that hold this backward's gradients, by unit."""

    _accumulators: list[Node] = field(default_factory=list)
    """Nodes that accumulate gradients; parameters hold them by weak references alone."""

    def __post_init__(self) -> None:
        self.streams = DeviceStreams(torch.get_device_module(self.device))
        for fqns in by_unit(self.scenario.model).values():
            self.make(fqns)
        finds_unused = self.scenario.options.find_unused_parameters
        self._buckets = (
            self._rebuilt_buckets if finds_unused else (buckets.ready_order(self._training),)
        )
        if not self.scenario.precision.master:
            self.model.to(self._dtype)
        reduced = buckets.reduced_parameters(self.scenario.model)
        stepped = {p.fqn: self.model.get_parameter(p.fqn).data for p in reduced}
        self.optimizer = RankOptimizer(self.scenario.optimizer, stepped)
        self.model.to(self._dtype)

    @property
    def _training(self) -> Training:
        scenario = self.scenario
        model = with_forwards(scenario.model, scenario.batch.forwards)
        lowered = lower_model.lower(
            model,
            batch=scenario.batch,
            dtype=scenario.precision.parameters,
            checkpointing=scenario.checkpointing,
            autocast=scenario.precision.autocast,
        )
        return Training(
            model=model, modules=lowered, batch=scenario.batch, precision=scenario.precision
        )

    @property
    def gradient_scale(self) -> float:
        """Gradient of the loss that starts backward; buckets are divided by the number of ranks,
        as in torch's DDP."""
        return 1.0

    @property
    def _rebuilt_buckets(self) -> tuple[buckets.Bucket, ...]:
        return ddp.buckets(self._training, self.scenario.options)

    def construct(self, op: Op) -> None:
        """Carry out an op of construction: checks and broadcasts parameters, allocates the bucket.
        """
        match op.kind:
            case "all_gather":
                num_parameters = len(self.optimizer.stepped)
                own = torch.full((1,), num_parameters, device=self.device)
                all_ranks = own.new_empty(self.process_group.size())
                torch_private.all_gather(all_ranks, own, group=self.process_group)
            case "broadcast":
                self._broadcast(op)
            case "alloc" if op.unit == ONE_BUCKET:
                self._allocate(op)
                if self.scenario.options.find_unused_parameters:
                    self._allocate_used_parameters()

    def _allocate_used_parameters(self) -> None:
        """DDP's maps of used parameters, int32, on the host and on the device."""
        for where, device in (("host", torch.device("cpu")), ("device", self.device)):
            self.live[buffer_of(buckets.USED, where)] = torch.zeros(
                len(self.optimizer.stepped), dtype=torch.int32, device=device
            )

    def _used_parameters(self) -> Tensor:
        """1 for each parameter in buckets with a gradient on this rank, else 0; int32."""
        gradients = [self.model.get_parameter(fqn).grad for fqn in self.optimizer.stepped]
        return torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.scenario.precision.parameters]

    def _broadcast(self, op: Op) -> None:
        """Broadcast rank 0's parameters, joined with buffers of their dtype, into every rank's.

        The ops that broadcast anything else carry as many zeros.
        """
        if op.unit != "parameters":
            dtype: torch.dtype = getattr(torch, op.dtype)
            zeros = torch.zeros(op.nbytes // dtype.itemsize, dtype=dtype, device=self.device)
            dist.broadcast(zeros, 0, group=self.process_group)
            return
        buffers = [buffer for buffer in self.model.buffers() if buffer.dtype == self._dtype]
        tensors = [tensor.data for tensor in (*self.model.parameters(), *buffers)]
        joined = torch.cat([tensor.flatten() for tensor in tensors])
        dist.broadcast(
            joined, dist.get_global_rank(self.process_group, 0), group=self.process_group
        )
        pieces = torch.split(joined, [tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view(tensor.shape))

    def enter(self, module: Module, *, backward: bool) -> None:
        """Nothing to check: every rank has every parameter."""

    def perform(self, op: Op) -> None:
        """Carry out one op that is not compute, on its stream."""
        with self.streams.on(op):
            self._carry_out(op)

    def _carry_out(self, op: Op) -> None:
        match op.kind:
            case "alloc" | "broadcast":
                self._rebuild(op)
            case "copy" if op.stream == "callback":
                self._cast_back(op)
            case "copy" if op.unit in self._filled:
                self._copy_back(op.unit)
            case "copy":
                self._fill(op)
            case "all_reduce" if op.unit == buckets.USED:
                self._all_reduce(op, self._used_parameters().to(self.device))
            case "all_reduce":
                self._all_reduce(op, self._reduced(op.unit))
            case "optimizer" if op.unit == clipping.CLIP:
                clip_grad_norm_(self.model.parameters(), self.scenario.optimizer.clip_norm)
            case "optimizer":
                self._step()
            case "free":
                for parameter in self.model.parameters():
                    parameter.grad = None
            case _:
                raise ProgramError(where=f"op {op.index}", expected="an op of ddp", found=op.kind)

    def watch(self, arrived: Callable[[str], None]) -> None:
        """Call `arrived` for each parameter whose gradient is accumulated.

        The hook stands behind the node that accumulates, as DDP's: autograd still holds what the
        node has added.
        """
        for fqn in self.optimizer.stepped:
            node = get_gradient_edge(self.model.get_parameter(fqn)).node
            self._accumulators.append(node)
            node.register_hook(lambda *_, fqn=fqn: arrived(fqn))

    def is_ready(self, op: Op, arrived: Set[str]) -> bool:
        """True where `op` reduces a bucket whose gradients have all `arrived`. DDP does so inside a
        module's backward, and copies buckets back at its end."""
        number = bucket_number(op.unit)
        if number is None or (
            op.kind == "copy" and op.stream != "callback" and op.unit in self._filled
        ):
            return False
        bucket = self._buckets[number]
        return {p.fqn for p in bucket} & self.scenario.model.trained <= arrived

    def _all_reduce(self, op: Op, tensor: Tensor) -> None:
        with self.uncounted():
            call = partial(dist.all_reduce, tensor, group=self.process_group)
            self.streams.issue(call, op, tensor)

    def _rebuild(self, op: Op) -> None:
        """Replace the bucket of construction by DDP's later ones, as rank 0 orders them."""
        if op.kind == "broadcast":
            self._broadcast(op)
            return
        del self.live[ONE_BUCKET]
        self._buckets = self._rebuilt_buckets
        self._allocate(op)

    def _allocate(self, op: Op) -> None:
        """Allocate the buckets among the op's buffers."""
        dtype, device = self._dtype, self.device
        for event in op.memory:
            if isinstance(event, Alloc) and owner_of(event.buffer) != buckets.USED:
                numel = event.nbytes // dtype.itemsize
                self.live[event.buffer] = torch.empty(numel, dtype=dtype, device=device)

    def _bucket(self, unit: str) -> Tensor:
        return self.live[unit] if unit in self.live else self.live[ONE_BUCKET]

    def _reduced(self, unit: str) -> Tensor:
        """The bucket, or its copy in the reduce dtype."""
        return self.live.get(buffer_of(unit, "cast"), self._bucket(unit))

    def _views(self, unit: str) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter of the bucket with the view of its gradient in it."""
        bucket = self._buckets[int(unit.rsplit(".", 1)[1])]
        pieces = torch.split(self._bucket(unit), [parameter.numel for parameter in bucket])
        return [
            (self.model.get_parameter(p.fqn), piece.view(p.shape))
            for p, piece in zip(bucket, pieces, strict=True)
        ]

    def _fill(self, op: Op) -> None:
        """Copy gradients into the bucket and divide them by the number of ranks; where the bucket
        is cast, divide the cast copy."""
        self._filled.add(op.unit)
        reduce, ranks = DTYPES[self.scenario.precision.reduce], self.process_group.size()
        casts = reduce != self._dtype
        for parameter, view in self._views(op.unit):
            if parameter.grad is None:  # unused on this rank: zeros, without a tensor of them
                view.zero_()
            elif casts:
                view.copy_(parameter.grad)
            else:
                torch.mul(parameter.grad, 1 / ranks, out=view)
        if casts:
            self.live[buffer_of(op.unit, "cast")] = self._bucket(op.unit).to(reduce).div_(ranks)

    def _cast_back(self, op: Op) -> None:
        cast = self.live.pop(buffer_of(op.unit, "cast"))
        self._bucket(op.unit).copy_(cast)
        self.streams.free(cast, op.stream)

    def _copy_back(self, unit: str) -> None:
        """Copy averaged gradients from the bucket into the parameters' own."""
        self._filled.remove(unit)
        for parameter, view in self._views(unit):
            if parameter.grad is not None:
                parameter.grad.copy_(view)

    def _stepped_gradients(self) -> dict[str, Tensor | None]:
        return {fqn: self.model.get_parameter(fqn).grad for fqn in self.optimizer.stepped}

    def _step(self) -> None:
        """Step parameters with a gradient, or their master copies, which are then cast back."""
        stepped = self.optimizer.stepped
        parameters = {fqn: self.model.get_parameter(fqn).data for fqn in stepped}
        self.optimizer.step(self._stepped_gradients(), parameters)

    def expected_step(self) -> dict[str, Tensor]:
        """The parameters after the next step, as a new optimizer makes them from the same state."""
        return self.optimizer.expected_step(self._stepped_gradients())

    def held(self) -> Mapping[str, int]:
        """Bytes of this rank's parameters, gradients and optimizer states with master copies."""
        parameters = list(self.model.parameters())
        views = self.scenario.options.gradient_as_bucket_view
        gradients = [] if views else [parameter.grad for parameter in parameters]
        states = [*self.optimizer.stepped.values(), *self.optimizer.states()]
        return held_bytes(
            parameters=parameters, gradients=gradients, states=states, device=self.device
        )

    def gradients(self) -> dict[str, Tensor]:
        """Copies of every gradient before the optimizer's step; for parity."""
        named = self.model.named_parameters()
        return {fqn: p.grad.clone() for fqn, p in named if p.grad is not None}

    def parameters(self, stepped: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Copies of every parameter as the optimizer has it; for parity.

        With `stepped`, earlier copies of the stepped ones take their place.
        """
        own = self.optimizer.stepped
        others = {
            fqn: p.detach() for fqn, p in self.model.named_parameters() if fqn not in own
        }
        tensors = {**(own if stepped is None else stepped), **others}
        return {fqn: tensor.clone() for fqn, tensor in tensors.items()}
