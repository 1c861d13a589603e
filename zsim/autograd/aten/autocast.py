"""torch.autocast around a forward over float32 parameters: the dtype of each operator, and the
casts between them.

Observed on the CPU with torch 2.13. For CUDA read from torch/include/ATen/autocast_mode.h and the
dispatcher's autocast kernels.

- Products of matrices and fused attention run in the narrow dtype.
- Losses run in float32, and softmax too on CUDA alone.
- Sums run in the wider dtype of the two.
- Everything else runs in its input's dtype: norms read the residual stream, which stays float32.

A weight is cast once; the copy stays in autocast's cache until forward ends. A frozen weight, or a
view, is not cached: it is cast at each use, as activations are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from zsim.autograd.aten import operator_calls as eager
from zsim.autograd.aten.attention import attention
from zsim.autograd.aten.call import Call, Sizes
from zsim.ir.ops import CAST_LOGITS
from zsim.models.operators import Operator
from zsim.models.training_options import DTYPE_NBYTES, Batch, Device

WIDE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Autocast:
    """The dtype of products, and the batch and device that calls are sized for."""

    dtype: str
    batch: Batch
    device: Device
    uncached: frozenset[str] = frozenset()
    """Parameters that need no gradient, or are no leaves of autograd: their copies are not cached.
    """
    cache: dict[str, str] = field(default_factory=dict)
    """The copy that forward made of each parameter."""

    def calls(self, operator: Operator, dtypes: dict[str, str]) -> tuple[Call, ...]:
        """The aten calls of `operator`, casts included; `dtypes` has those of the module's values
        so far and learns its output's."""
        made = tuple(self._calls(operator, dtypes))
        dtypes[operator.output] = made[-1].dtype
        return made

    def _calls(self, op: Operator, dtypes: dict[str, str]) -> Iterator[Call]:
        match op.kind:
            case "linear":
                yield from self._linear(op, dtypes)
            case "attention":
                sizes = Sizes(
                    self.batch, DTYPE_NBYTES[self.dtype], self.device,
                    softmax_nbytes=self._softmax_nbytes,
                )
                for call in attention(op, sizes):
                    yield replace(call, dtype=call.dtype or self.dtype)
            case "cast":
                plain = eager.calls(
                    op, batch=self.batch, dtype=dtypes[op.inputs[0]], device=self.device
                )
                yield from (replace(call, dtype=op.dtype) for call in plain)
            case "residual":
                yield self._residual(op, dtypes)
            case "cross_entropy":
                yield from self._cross_entropy(op, dtypes)
            case _:
                yield from self._in(dtypes.get(op.inputs[0], WIDE), op)

    @property
    def _softmax_nbytes(self) -> int:
        return DTYPE_NBYTES[WIDE] if self.device == "cuda" else DTYPE_NBYTES[self.dtype]

    def _in(self, dtype: str, op: Operator) -> tuple[Call, ...]:
        """The calls of `op` as it runs in `dtype`."""
        return tuple(
            replace(call, dtype=dtype)
            for call in eager.calls(op, batch=self.batch, dtype=dtype, device=self.device)
        )

    def _numel(self, features: int) -> int:
        return self.batch.micro_batch * self.batch.sequence_length * features

    def _cast(
        self, source: str, target: str, numel: int, *, to: str, operator: str = "cast"
    ) -> Call:
        """A copy of `numel` elements in the other of the two dtypes, of which autograd keeps
        nothing."""
        moved, widens = numel * (DTYPE_NBYTES[WIDE] + DTYPE_NBYTES[self.dtype]), to == WIDE
        return Call(
            operator=operator,
            inputs=(source,),
            output=target,
            nbytes=numel * DTYPE_NBYTES[to],
            gradients=(source,),
            moved=moved,
            backward_moved=moved,
            singly=numel if widens else 0,
            backward_singly=0 if widens else numel,
            dtype=to,
        )

    def _linear(self, op: Operator, dtypes: dict[str, str]) -> Iterator[Call]:
        """Arguments are cast from the last to the first, as C++ compilers evaluate them: bias,
        weight, input."""
        (source,), names = (
            op.inputs,
            {
                fqn: f"{op.output}.{part}"
                for fqn, part in ((op.weight, "weight"), (op.bias, "bias"))
                if fqn
            },
        )
        for fqn, numel in (
            (op.bias, op.out_features), (op.weight, op.in_features * op.out_features)
        ):
            if fqn:
                from_cache = fqn in self.cache
                if fqn not in self.uncached:
                    names[fqn] = self.cache.setdefault(fqn, names[fqn])
                cast = self._cast(fqn, names[fqn], numel, to=self.dtype)
                yield replace(
                    cast,
                    inputs=(),
                    parameters=(fqn,),
                    cached=fqn not in self.uncached,
                    from_cache=from_cache,
                )
        if dtypes[source] != self.dtype:
            names[source] = f"{op.output}.input"
            yield self._cast(source, names[source], self._numel(op.in_features), to=self.dtype)
        (call,) = self._in(self.dtype, op)
        x = names.get(source, source)
        yield replace(
            call,
            inputs=(x,),
            saves=(x, names[op.weight]),
            gradients=tuple(names.get(name, name) for name in call.gradients),
            summed=tuple((names.get(name, name), way) for name, way in call.summed),
            parameters=(),
            weights=tuple(names[fqn] for fqn in call.parameters),
        )

    def _residual(self, op: Operator, dtypes: dict[str, str]) -> Call:
        """A sum in the wider dtype; backward casts the gradient of the narrower part, as the engine
        does for any node."""
        wide = WIDE if WIDE in (dtypes[value] for value in op.inputs) else self.dtype
        (call,) = self._in(wide, op)
        narrow = tuple(value for value in op.inputs if dtypes[value] != wide)
        if not narrow:
            return call
        return replace(
            call, gradients=narrow,
            passes=tuple(value for value in op.inputs if value not in narrow),
            moved=self._numel(op.out_features)
            * (2 * DTYPE_NBYTES[WIDE] + DTYPE_NBYTES[self.dtype]),
            backward_moved=self._numel(op.out_features)
            * (DTYPE_NBYTES[WIDE] + DTYPE_NBYTES[self.dtype]),
        )

    def _cross_entropy(self, op: Operator, dtypes: dict[str, str]) -> Iterator[Call]:
        """Casts of logits on the CPU; on CUDA log_softmax is told to keep their dtype, and what
        nll_loss reads is cast."""
        logits, numel = op.inputs[0], self._numel(op.out_features)
        if dtypes[logits] == WIDE:
            yield from self._in(WIDE, op)
            return
        loss = self._in(WIDE, op)
        if self.device == "cpu":
            yield self._cast(logits, f"{op.output}.input", numel, to=WIDE, operator=CAST_LOGITS)
            yield from (_reading(call, logits, f"{op.output}.input") for call in loss)
            return
        log_softmax, _ = self._in(dtypes[logits], op)
        yield log_softmax
        source = log_softmax.output
        yield self._cast(source, f"{op.output}.input", numel, to=WIDE, operator=CAST_LOGITS)
        yield _reading(loss[1], log_softmax.output, f"{op.output}.input")


def _reading(call: Call, source: str, other: str) -> Call:
    """`call` with `other` in the place of the value `source`."""

    def named(values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(other if value == source else value for value in values)

    return replace(
        call, inputs=named(call.inputs), saves=named(call.saves), gradients=named(call.gradients)
    )
