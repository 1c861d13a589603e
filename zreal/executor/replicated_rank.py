"""One rank's real memory under our ddp Program: whole parameters, gradients averaged in buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from zreal import torch_private
from zreal.meters.held import held, state_tensors
from zreal.modules.initial_values import DTYPES
from zreal.modules.modules import Model
from zreal.modules.optimizers import hand_back, hand_over, make_optimizer, stepped_again
from zsim.autograd import lower_model
from zsim.errors import ProgramError
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
    """The model of one rank, the buckets that its gradients are averaged in, and its optimizer of
    everything.

    2-byte parameters are rounded copies of the float32 ones that the optimizer steps.
    """

    scenario: Scenario
    model: Model
    process_group: dist.ProcessGroup
    looking_away: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around collectives: copies that the backend makes inside are not the strategy's."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    _buckets: tuple[buckets.Bucket, ...] = ()
    _stepped: dict[str, Tensor] = field(default_factory=dict)
    _optimizer: torch.optim.Optimizer | None = None
    _full: set[str] = field(default_factory=set)
    """Buckets that hold this backward's gradients."""

    def __post_init__(self) -> None:
        finds = self.scenario.options.find_unused_parameters
        self._buckets = self._later_buckets if finds else (buckets.ready_order(self._training),)
        reduced = buckets.reduced_parameters(self.scenario.model)
        self._stepped = {p.fqn: self.model.get_parameter(p.fqn).data for p in reduced}
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
        """What the loss's gradient begins with: buckets are divided by the number of ranks, as
        torch does."""
        return 1.0

    def begin(self, *, first: bool) -> None:
        """A step begins; when buckets are rebuilt the Program says."""

    @property
    def _later_buckets(self) -> tuple[buckets.Bucket, ...]:
        return ddp.buckets(self._training, self.scenario.options)

    def construct(self, op: Op) -> None:
        """Check and broadcast parameters, make the bucket, as the Program says."""
        match op.kind:
            case "all_gather":
                mine = torch.full((1,), len(self._stepped), device=self._device)
                everyone = mine.new_empty(self.process_group.size())
                torch_private.all_gather(everyone, mine, group=self.process_group)
            case "broadcast":
                self._broadcast(op)
            case "alloc" if op.unit == ONE_BUCKET:
                self._allocate(op)
                if self.scenario.options.find_unused_parameters:
                    for place, device in (("host", torch.device("cpu")), ("device", self._device)):
                        self.buffers[f"{buckets.USED}:{place}"] = torch.zeros(
                            len(self._stepped), dtype=torch.int32, device=device
                        )

    def _used_parameters(self) -> Tensor:
        """Which of the parameters in buckets have a gradient, as the ranks tell one another."""
        gradients = [self.model.get_parameter(fqn).grad for fqn in self._stepped]
        return torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32)

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.scenario.precision.parameters]

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _broadcast(self, op: Op) -> None:
        """Rank 0's parameters in one piece, with buffers of their dtype; other broadcasts carry as
        much of what every rank has alike."""
        if op.unit != "parameters":
            width: torch.dtype = getattr(torch, op.dtype)
            numbers = torch.zeros(op.nbytes // width.itemsize, dtype=width, device=self._device)
            dist.broadcast(numbers, 0, group=self.process_group)
            return
        buffers = [buffer for buffer in self.model.buffers() if buffer.dtype == self._dtype]
        parameters = [tensor.data for tensor in (*self.model.parameters(), *buffers)]
        joined = torch.cat([tensor.flatten() for tensor in parameters])
        dist.broadcast(
            joined, dist.get_global_rank(self.process_group, 0), group=self.process_group
        )
        parts = torch.split(joined, [tensor.numel() for tensor in parameters])
        for tensor, part in zip(parameters, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    def enter(self, module: Module, *, backward: bool) -> None:
        """Nothing to check: every rank has every parameter."""

    def perform(self, op: Op) -> None:
        """Carry out one op that is not compute."""
        match op.kind:
            case "alloc" | "broadcast":
                self._rebuild(op)
            case "copy" if op.stream == "callback":
                self._uncast(op.unit)
            case "copy" if op.unit in self._full:
                self._copy_back(op.unit)
            case "copy":
                self._fill(op)
            case "all_reduce" if op.unit == buckets.USED:
                used = self._used_parameters().to(self._device)
                with self.looking_away():
                    dist.all_reduce(used, group=self.process_group)
            case "all_reduce":
                with self.looking_away():
                    dist.all_reduce(self._reduced(op.unit), group=self.process_group)
            case "optimizer" if op.unit == clipping.CLIP:
                clip_grad_norm_(self.model.parameters(), self.scenario.optimizer.clip_norm)
            case "optimizer":
                self._step()
            case "free" if op.unit == ONE_BUCKET:
                # what DDP holds while it reduces inside backward is gone here, where buckets are
                # reduced between modules
                pass
            case "free":
                for parameter in self.model.parameters():
                    parameter.grad = None
            case _:
                raise ProgramError(where=f"op {op.index}", expected="an op of ddp", found=op.kind)

    def _rebuild(self, op: Op) -> None:
        if op.kind == "broadcast":
            self._broadcast(op)
            return
        del self.buffers[ONE_BUCKET]
        self._buckets = self._later_buckets
        self._allocate(op)

    def _allocate(self, op: Op) -> None:
        """The storages of buckets that the op makes."""
        made = [
            event
            for event in op.memory
            if isinstance(event, Alloc) and not event.buffer.startswith(f"{buckets.USED}:")
        ]
        for event in made:
            numel = event.nbytes // self._dtype.itemsize
            self.buffers[event.buffer] = torch.empty(numel, dtype=self._dtype, device=self._device)

    def _bucket(self, unit: str) -> Tensor:
        return self.buffers[unit] if unit in self.buffers else self.buffers[ONE_BUCKET]

    def _reduced(self, unit: str) -> Tensor:
        return self.buffers.get(f"{unit}:cast", self._bucket(unit))

    def _parts(self, unit: str) -> list[tuple[nn.Parameter, Tensor]]:
        bucket = self._buckets[int(unit.rsplit(".", 1)[1])]
        pieces = torch.split(self._bucket(unit), [parameter.numel for parameter in bucket])
        return [
            (self.model.get_parameter(p.fqn), piece.view(p.shape))
            for p, piece in zip(bucket, pieces, strict=True)
        ]

    def _fill(self, op: Op) -> None:
        """Divide gradients by the number of ranks as they are copied in; where the bucket is cast,
        when that is done."""
        self._full.add(op.unit)
        reduce, ranks = DTYPES[self.scenario.precision.reduce], self.process_group.size()
        casts = reduce != self._dtype
        for parameter, part in self._parts(op.unit):
            if parameter.grad is None:  # unused: zeros, and no tensor made for them
                part.zero_()
            elif casts:
                part.copy_(parameter.grad)
            else:
                torch.mul(parameter.grad, 1 / ranks, out=part)
        if casts:
            self.buffers[f"{op.unit}:cast"] = self._bucket(op.unit).to(reduce).div_(ranks)

    def _uncast(self, unit: str) -> None:
        cast = self.buffers.pop(f"{unit}:cast")
        self._bucket(unit).copy_(cast)
        cast.untyped_storage().resize_(0)

    def _copy_back(self, unit: str) -> None:
        self._full.remove(unit)
        for parameter, part in self._parts(unit):
            if parameter.grad is not None:
                parameter.grad.copy_(part)

    def _step(self) -> None:
        """The optimizer's step on parameters that have a gradient, or on their master copies, which
        are cast back."""
        settings, named = (
            self.scenario.optimizer,
            [(self.model.get_parameter(fqn), tensor) for fqn, tensor in self._stepped.items()],
        )
        stepped = [
            (parameter, gradient, tensor)
            for parameter, tensor in named
            if (gradient := parameter.grad) is not None
        ]
        tensors = [tensor for _, _, tensor in stepped]
        hand_over(settings, tensors, [gradient for _, gradient, _ in stepped])
        if self._optimizer is None:
            self._optimizer = make_optimizer(settings, list(self._stepped.values()))
        self._optimizer.step()
        hand_back(settings, [parameter.data for parameter, _, _ in stepped], tensors)

    def stepped(self) -> dict[str, Tensor]:
        """Copies of the parameters as the optimizer has them: master copies where there are some.
        """
        return {fqn: tensor.detach().clone() for fqn, tensor in self._stepped.items()}

    def stepped_again(self) -> dict[str, Tensor]:
        """What the step that comes next must make of the parameters: that of a new optimizer, from
        the same state and gradients."""
        gradients = {fqn: self.model.get_parameter(fqn).grad for fqn in self._stepped}
        states = self._optimizer.state if self._optimizer is not None else {}
        return stepped_again(self.scenario.optimizer, self._stepped, gradients, states=states)

    def held(self) -> Mapping[str, int]:
        """Bytes of this rank's parameters, gradients and optimizer states, master copies among
        them."""
        assert self._optimizer is not None
        parameters = list(self.model.parameters())
        gradients = [
            parameter.grad
            for parameter in parameters
            if not self.scenario.options.gradient_as_bucket_view
        ]
        states = [*self._stepped.values(), *state_tensors(self._optimizer)]
        return held(parameters=parameters, gradients=gradients, states=states)

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient, before the optimizer's step frees it; for parity."""
        named = self.model.named_parameters()
        return {fqn: p.grad.clone() for fqn, p in named if p.grad is not None}

    def parameters(self, stepped: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Every parameter, in the dtype that is stepped if it is; with `stepped` as it was when
        these copies were made of them."""
        kept = {
            fqn: p.detach() for fqn, p in self.model.named_parameters() if fqn not in self._stepped
        }
        return {
            fqn: tensor.clone()
            for fqn, tensor in (
                *(self._stepped if stepped is None else stepped).items(), *kept.items()
            )
        }
