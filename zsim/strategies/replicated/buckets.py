"""ReplicatedModel: a model under DDP, with its buckets and the order in which gradients are ready.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

from zsim.autograd.lowered import Accumulated, ParameterGradient
from zsim.autograd.lowering.lower_model import loss_buffers
from zsim.ir.buffers import bucket_of, buffer_of
from zsim.ir.ops import Alloc, Kernel
from zsim.models.spec import ModelSpec, Parameter
from zsim.models.training_options import DTYPE_NBYTES
from zsim.strategies.building.backward_events import (
    Backwards,
    Cut,
    InTurn,
    InTwo,
    Split,
    accumulated_after_sums,
    late_weights,
    recomputed_in_turn,
    until_recomputed,
)
from zsim.strategies.building.kernels import (
    MASTER_DTYPE,
    accumulate_kernel,
    fill_kernel,
    move_gradients,
)
from zsim.strategies.building.parameters import named_parameters, trained_parameters
from zsim.strategies.building.training import Training

AXIS = "dp_replicate"
MASTER_NBYTES = DTYPE_NBYTES[MASTER_DTYPE]
USED = "used_parameters"
"""The map that says of each parameter in a bucket whether it has been used."""

Bucket = tuple[Parameter, ...]


def ready_order(training: Training) -> Bucket:
    """The parameters in the order in which their gradients are ready: a tied one with its last
    gradient of backward.

    Of a linear the bias is ready before the weight, whose gradient is transposed by a further node.
    Where gradients of several uses are summed, that order is the tape's already. So it is where the
    tape says when each is accumulated.
    """
    parameters = {parameter.fqn: parameter for parameter in training.model.parameters}
    last = late_weights(training)
    late = {
        op.weight: op.bias
        for m in training.model.modules
        for op in m.operators
        if op.weight in last
    }
    events = [
        event.fqn
        for module in training.modules[::-1]
        for event in module.backward.memory
        if isinstance(event, Accumulated)
        or (isinstance(event, ParameterGradient) and not event.accumulation_is_marked)
    ]
    follows = dict(pairwise(events))
    ready = {
        fqn: index + (1.5 if late.get(fqn) == follows.get(fqn, "") else 0)
        for index, fqn in enumerate(events)
    }
    return tuple(parameters[fqn] for fqn in sorted(ready, key=lambda fqn: ready[fqn]))


def reduced_parameters(model: ModelSpec) -> Bucket:
    """Parameters in buckets, in the order of `named_parameters()`: all that are not frozen, used or
    not."""
    return tuple([parameter for parameter in named_parameters(model) if parameter.requires_grad])


@dataclass(frozen=True, kw_only=True)
class ReplicatedModel:
    """A Training under DDP: its buckets once rebuilt, and whether gradients are views of them.

    `finds_unused`: the buckets are never rebuilt, and ranks tell one another which parameters they
    have used.
    """

    training: Training
    rebuilt: tuple[Bucket, ...]
    num_replicas: int
    views: bool
    finds_unused: bool = False

    @property
    def dtype(self) -> str:
        """The dtype of parameters and gradients."""
        return self.training.precision.parameters

    @property
    def has_master(self) -> bool:
        """True where the optimizer steps a float32 copy of the parameters."""
        return self.dtype != MASTER_DTYPE and self.training.precision.master

    @cached_property
    def trained(self) -> Bucket:
        """The parameters that get gradients: no optimizer steps others."""
        return trained_parameters(self.training.model)

    @cached_property
    def reduced(self) -> Bucket:
        """The parameters in buckets; for one that is not used, the bucket holds zeros."""
        return reduced_parameters(self.training.model)

    @property
    def numel(self) -> int:
        """Elements of all gradients."""
        return sum([parameter.numel for parameter in self.trained])

    @property
    def nbytes(self) -> int:
        """Bytes of all buckets."""
        return sum([parameter.numel for parameter in self.reduced]) * DTYPE_NBYTES[self.dtype]

    @property
    def storages(self) -> tuple[Alloc, ...]:
        """Storages of the rebuilt buckets, one for each, in the order in which they are reduced."""
        element = DTYPE_NBYTES[self.dtype]
        sizes = (
            element * sum([parameter.numel for parameter in bucket]) for bucket in self.rebuilt
        )
        return tuple(
            Alloc(bucket_of(number), "communication", nbytes)
            for number, nbytes in enumerate(sizes)
        )

    @property
    def used_nbytes(self) -> int:
        """Bytes of the map of used parameters: an int32 for each in a bucket."""
        return DTYPE_NBYTES["int32"] * len(self.reduced)

    @cached_property
    def uses(self) -> Counter[str]:
        """Number of gradients that autograd makes of each parameter in one backward."""
        events = (event for module in self.training.modules for event in module.backward.memory)
        return Counter(event.fqn for event in events if isinstance(event, ParameterGradient))

    @cached_property
    def losses(self) -> frozenset[str]:
        """The buffers of the losses, one for each forward."""
        model = self.training.model
        size = len(model.modules) // model.forwards
        return frozenset(
            buffer_of(last.fqn, last.operators[-1].output)
            for last in model.modules[size - 1 :: size]
        )

    @cached_property
    def turns(self) -> dict[str, int]:
        """Index of each module in backward."""
        return {module.fqn: turn for turn, module in enumerate(self.training.modules[::-1])}

    @cached_property
    def nbytes_of(self) -> dict[str, int]:
        """Bytes of each parameter's gradient."""
        element = DTYPE_NBYTES[self.dtype]
        return {
            parameter.fqn: parameter.numel * element for parameter in self.training.model.parameters
        }

    @cached_property
    def adding_kernels(self) -> dict[str, tuple[Kernel, ...]]:
        """Backward kernels by module, with additions to gradients of earlier micro-batches that it
        completes."""
        last: dict[str, list[Kernel]] = {}
        for fqn, module in self.last_module.items():
            numel = self.nbytes_of[fqn] // DTYPE_NBYTES[self.dtype]
            last.setdefault(module, []).append(accumulate_kernel(numel, of=self.dtype))
        return {m.fqn: (*m.backward.kernels, *last.get(m.fqn, ())) for m in self.training.modules}

    def copying_kernels(self, bucket: Bucket) -> tuple[Kernel, ...]:
        """Copies of the gradients in `bucket`, one for each."""
        trained = self.with_gradient
        moved = partial(move_gradients, source=self.dtype, target=self.dtype, reduced_in=self.dtype)
        return tuple([moved(parameter.numel) for parameter in bucket if parameter.fqn in trained])

    def filling_kernels(self, bucket: Bucket) -> tuple[Kernel, ...]:
        """Kernels that complete `bucket`: copies of its gradients, and zeros for missing ones."""
        trained = self.with_gradient
        return (
            *self.copying_kernels(bucket),
            *[fill_kernel(p.numel, dtype=self.dtype) for p in bucket if p.fqn not in trained],
        )

    @cached_property
    def with_gradient(self) -> frozenset[str]:
        """The fqns of the parameters with a gradient."""
        return self.training.model.trained

    @property
    def casts(self) -> bool:
        """True where gradients are reduced in another dtype than their own."""
        return self.training.precision.reduce != self.dtype

    @cached_property
    def readiness(self) -> dict[str, int]:
        """Index of each parameter in the order in which gradients are ready."""
        return {parameter.fqn: index for index, parameter in enumerate(ready_order(self.training))}

    @cached_property
    def backwards(self) -> Backwards[InTwo]:
        """The memory of each module's backward, up to the end of its recomputation and after it."""
        return self._backwards(until_recomputed)

    @cached_property
    def backwards_in_turn(self) -> Backwards[InTurn]:
        """The same, split at calls of units in the block too."""
        return self._backwards(recomputed_in_turn)

    def _backwards(self, split: Split[Cut]) -> Backwards[Cut]:
        return Backwards(
            split, accumulated_after_sums(self.training), late_weights(self.training),
            held_by_caller=loss_buffers(self.training.model),
        )

    @cached_property
    def last_module(self) -> dict[str, str]:
        """Module in whose backward each parameter's last gradient is made or accumulated, by
        parameter."""
        return {
            event.fqn: module.fqn
            for module in self.training.modules[::-1]
            for event in module.backward.memory
            if isinstance(event, ParameterGradient | Accumulated)
        }
