"""One rank's real memory under zero1, zero2 and zero3: flat buffers, freed and gathered again as
the Program says.

Buffers bear the names that the Program gives them. Each op is carried out by its kind and the
buffers it allocates and frees; when it is carried out is the executor's business, which reads it
from the Program too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zreal import torch_private
from zreal.meters.held import held, state_tensors
from zreal.modules.clipping import Clipping
from zreal.modules.initial_values import DTYPES
from zreal.modules.modules import Model
from zreal.modules.optimizers import hand_back, hand_over, make_optimizer, stepped_again
from zsim.errors import ProgramError
from zsim.ir.ops import Alloc, Free, Op
from zsim.models.spec import Module
from zsim.scenario.scenario import Scenario
from zsim.strategies.building import clipping
from zsim.strategies.building.kernels import MASTER_DTYPE
from zsim.strategies.building.parameters import used_parameters
from zsim.strategies.flat_buffer.groups import FlatGroup, flat_groups

MASTER = DTYPES[MASTER_DTYPE]


@dataclass(slots=True)
class FlatRank:
    """The model of one rank, its param groups as flat buffers, and the optimizer of its shards."""

    scenario: Scenario
    model: Model
    process_group: dist.ProcessGroup
    looking_away: Callable[[], AbstractContextManager[None]] = nullcontext
    """Around collectives: copies that the backend makes inside (gloo's reduce-scatter does) are not
    the strategy's."""
    keeps_whole_gradients: bool = False
    """Whether whole gradients live until the optimizer has stepped, as in ZeRO-1."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    _groups: dict[str, FlatGroup] = field(default_factory=dict)
    _stepped: dict[str, Tensor] = field(default_factory=dict)
    _optimizer: torch.optim.Optimizer | None = None
    _clipping: Clipping = field(default_factory=Clipping)

    def __post_init__(self) -> None:
        groups = flat_groups(
            self.scenario.model,
            granularity=self.scenario.options.granularity,
            num_shards=self.process_group.size(),
            dtype=self.scenario.precision.parameters,
        )
        self._groups = {group.fqn: group for group in groups}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and kept gradients."""
        return DTYPES[self.scenario.precision.parameters]

    @property
    def gradient_scale(self) -> float:
        """What the loss's gradient begins with: each rank's share of the mean, as reductions sum.
        """
        return 1 / self.process_group.size()

    def begin(self, *, first: bool) -> None:
        """A step begins; nothing changes between steps."""

    def construct(self, op: Op) -> None:
        """Make a group's flat buffer, or free it where only the shard is kept; the model itself
        exists already."""
        if op.kind == "copy":
            self._flatten(op)
        elif op.kind == "free":
            self._free(op)

    def _flatten(self, op: Op) -> None:
        """float32 parameters become one flat buffer; 2-byte ones are views of a rounded copy of it.
        """
        group, made, unit = self._groups[op.unit], _allocated(op), op.unit
        exact = torch.zeros(group.layout.padded_numel, dtype=MASTER, device=self._device)
        for parameter, view in self._views(group, exact):
            view.copy_(parameter.data)
            parameter.data = view
        flat = exact.to(self.dtype)
        for parameter, view in self._views(group, flat):
            parameter.data = view
        kept = "unsharded" if f"{unit}:unsharded" in made else "parameters"
        self.buffers[f"{unit}:{kept}"] = flat
        if kept == "unsharded":
            self.buffers[f"{unit}:parameters"] = self._own(unit, flat).clone()
        if group.trained:
            self._stepped[unit] = self._shard(unit)
        if f"{unit}:master" in made:
            self._stepped[unit] = self.buffers[f"{unit}:master"] = self._own(unit, exact).clone()

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _views(self, group: FlatGroup, flat: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter of `group` with its place in `flat`."""
        pieces = torch.split(flat[: group.layout.numel], list(group.layout.numels))
        return [
            (self.model.get_parameter(p.fqn), piece.view(p.shape))
            for p, piece in zip(group.group.parameters, pieces, strict=True)
        ]

    def _own(self, unit: str, full: Tensor) -> Tensor:
        """This rank's slice of a whole buffer."""
        size = self._groups[unit].layout.shard_numel
        return full.narrow(0, self.process_group.rank() * size, size)

    def _shard(self, unit: str) -> Tensor:
        """This rank's parameters: a buffer of its own where they are sharded, else a slice of the
        whole."""
        kept = self.buffers[f"{unit}:parameters"]
        return (
            kept if kept.numel() == self._groups[unit].layout.shard_numel else self._own(unit, kept)
        )

    def enter(self, module: Module, *, backward: bool) -> None:
        """Before `module` computes: ProgramError if a parameter is not there; backward makes
        missing gradients."""
        used = set(used_parameters(module))
        for unit, group in self._groups.items():
            if not any(parameter.fqn in used for parameter in group.group.parameters):
                continue
            full = self.buffers.get(f"{unit}:unsharded", self.buffers[f"{unit}:parameters"])
            if group.layout.numel and full.untyped_storage().size() == 0:
                raise ProgramError(
                    where=f"{'backward' if backward else 'forward'} of {module.fqn}",
                    expected=f"{unit} to be unsharded",
                    found="it sharded",
                    remedy="the Program must all-gather it first",
                )
            if backward and group.trained and f"{unit}:gradients" not in self.buffers:
                flat = torch.zeros_like(full)
                self.buffers[f"{unit}:gradients"] = flat
                for parameter, view in self._views(group, flat):
                    parameter.grad = view

    def perform(self, op: Op) -> None:
        """Carry out one op that is not compute."""
        match op.kind:
            case "all_gather":
                self._all_gather(op)
            case "copy" if op.stream == "reduce_scatter" and f"{op.unit}:reduce_output" in self.buffers:  # noqa: E501
                self._keep_output(op)
            case "copy" if op.stream != "compute":
                self._put_back(op)
            case "copy":
                source = self.buffers[f"{op.unit}:gradients"]
                self.buffers[f"{op.unit}:reduce_input"] = source.to(
                    DTYPES[self.scenario.precision.reduce]
                )
            case "optimizer" if op.unit == clipping.NORMS:
                self._clipping = Clipping()
                self._clipping.measure(
                    [*map(self._gradient, self._stepped)], sharded=self.process_group.size() > 1
                )
            case "all_reduce" if op.unit == clipping.NORMS:
                self._clipping.reduce(self.process_group)
            case "optimizer" if op.unit == clipping.CLIP:
                self._clipping.clip(
                    [*map(self._gradient, self._stepped)],
                    max_norm=self.scenario.optimizer.clip_norm,
                )
                self._clipping = Clipping()
            case "all_reduce" | "reduce_scatter" if not _allocated(op):
                self._reduce_in_place(op)
            case "reduce_scatter":
                self._reduce_scatter(op)
            case "free":
                self._free(op)
            case "optimizer":
                self._step()
            case _:
                raise ProgramError(
                    where=f"op {op.index}", expected="an op of zero1, zero2 or zero3", found=op.kind
                )

    def _all_gather(self, op: Op) -> None:
        full = self.buffers.get(f"{op.unit}:unsharded", self.buffers[f"{op.unit}:parameters"])
        full.untyped_storage().resize_(full.numel() * full.element_size())
        torch_private.all_gather(full, self._shard(op.unit), group=self.process_group)

    def _reduce_in_place(self, op: Op) -> None:
        """Sum over ranks, of the gradient or a copy of it."""
        buffer = self.buffers.get(f"{op.unit}:reduce_input", self.buffers[f"{op.unit}:gradients"])
        with self.looking_away():
            if op.kind == "all_reduce":
                dist.all_reduce(buffer, group=self.process_group)
            else:
                torch_private.reduce_scatter(
                    self._own(op.unit, buffer), buffer, group=self.process_group
                )

    def _put_back(self, op: Op) -> None:
        """Cast back what has been reduced, all of it or this rank's slice, and leave zeros
        elsewhere if the Program fills."""
        gradients = self.buffers[f"{op.unit}:gradients"]
        source = self.buffers.pop(f"{op.unit}:reduce_input", None)
        if source is not None and op.stream == "all_reduce":
            gradients.copy_(source)
        elif source is not None:
            self._own(op.unit, gradients).copy_(self._own(op.unit, source))
        if source is not None:
            release(source)
        if any(kernel.operator == "fill" for kernel in op.kernels):
            size = self._groups[op.unit].layout.shard_numel
            start = self.process_group.rank() * size
            gradients[:start].zero_()
            gradients[start + size :].zero_()

    def _reduce_scatter(self, op: Op) -> None:
        """Sum over ranks into the gradient shard, or into an output from which it is made."""
        made, unit = _allocated(op), op.unit
        source = self.buffers.pop(f"{unit}:reduce_input", self.buffers[f"{unit}:gradients"])
        output = source.new_empty(self._groups[unit].layout.shard_numel)
        with self.looking_away():
            torch_private.reduce_scatter(output, source, group=self.process_group)
        if source is not self.buffers[f"{unit}:gradients"]:
            release(source)
        self.buffers[
            f"{unit}:reduce_output" if f"{unit}:reduce_output" in made else f"{unit}:gradient_shard"
        ] = output

    def _keep_output(self, op: Op) -> None:
        """A reduction's output becomes the gradient shard, in its dtype, or is added to the one
        that is there."""
        output = self.buffers.pop(f"{op.unit}:reduce_output")
        if f"{op.unit}:gradient_shard" in _allocated(op):
            self.buffers[f"{op.unit}:gradient_shard"] = output.to(self.dtype, copy=True)
        else:
            self.buffers[f"{op.unit}:gradient_shard"].add_(output)
        release(output)

    def _free(self, op: Op) -> None:
        """Free what the Program frees: gathered parameters keep their place but no memory,
        gradients go."""
        for event in op.memory:
            if isinstance(event, Free):
                unit, what = event.buffer.rsplit(":", 1)
                release(self.buffers[event.buffer])
                if what != "unsharded":
                    del self.buffers[event.buffer]
                if what == "gradients":
                    for parameter in self._groups[unit].group.parameters:
                        self.model.get_parameter(parameter.fqn).grad = None

    def _gradient(self, unit: str) -> Tensor:
        """This rank's shard of a group's gradient."""
        shard = self.buffers.get(f"{unit}:gradient_shard")
        return self._own(unit, self.buffers[f"{unit}:gradients"]) if shard is None else shard

    def _step(self) -> None:
        """The optimizer's step on this rank's shards; stepped master copies are cast into the
        parameters."""
        settings, tensors = self.scenario.optimizer, list(self._stepped.values())
        hand_over(settings, tensors, [self._gradient(unit) for unit in self._stepped])
        if self._optimizer is None:
            self._optimizer = make_optimizer(settings, tensors)
        self._optimizer.step()
        hand_back(settings, [self._shard(unit) for unit in self._stepped], tensors)

    def stepped(self) -> dict[str, Tensor]:
        """Copies of this rank's shards as the optimizer has them: master copies where there are
        some."""
        return {unit: tensor.detach().clone() for unit, tensor in self._stepped.items()}

    def stepped_again(self) -> dict[str, Tensor]:
        """What the step that comes next must make of the shards: that of a new optimizer, from the
        same state and gradients."""
        gradients = {unit: self._gradient(unit) for unit in self._stepped}
        states = self._optimizer.state if self._optimizer is not None else {}
        return stepped_again(self.scenario.optimizer, self._stepped, gradients, states=states)

    def held(self) -> Mapping[str, int]:
        """Bytes of this rank's parameters, gradients (whole ones in ZeRO-1, and where nothing is
        sharded) and optimizer states."""
        assert self._optimizer is not None
        whole = self.keeps_whole_gradients or self.process_group.size() == 1
        kept = (":gradients", ":gradient_shard") if whole else (":gradient_shard",)
        named = self.buffers.items()
        masters = [tensor for name, tensor in named if name.endswith(":master")]
        return held(
            parameters=[tensor for name, tensor in named if name.endswith(":parameters")],
            gradients=[tensor for name, tensor in named if name.endswith(kept)],
            states=[*masters, *state_tensors(self._optimizer)],
        )

    def parameters(self, stepped: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Every parameter whole, in the dtype that is stepped if it is, gathered from the ranks;
        for parity.

        With `stepped` those groups as they were when these copies were made of them.
        """
        shards = self._stepped if stepped is None else stepped
        return self._gathered({unit: shards.get(unit, self._shard(unit)) for unit in self._groups})

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient whole, gathered from the ranks before the optimizer's step; for parity."""
        return self._gathered({unit: self._gradient(unit) for unit in self._stepped})

    def _gathered(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        for unit, shard in shards.items():
            group = self._groups[unit]
            full = shard.new_empty(group.layout.padded_numel)
            torch_private.all_gather(full, shard, group=self.process_group)
            whole |= {
                parameter.fqn: view.clone()
                for parameter, (_, view) in zip(
                    group.group.parameters, self._views(group, full), strict=True
                )
            }
        return whole


def release(tensor: Tensor) -> None:
    """Free a tensor's memory now; waiting for its last reference would wait for gloo's threads to
    drop theirs."""
    tensor.untyped_storage().resize_(0)


def _allocated(op: Op) -> set[str]:
    return {event.buffer for event in op.memory if isinstance(event, Alloc)}
