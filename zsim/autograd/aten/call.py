"""One aten call of eager torch as the tape sees it, and the sizes that an operator's calls follow
from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zsim.models.training_options import Batch, Device


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Call:
    """One differentiable aten call.

    `inputs` are values that may need a gradient; `output` is a value of `nbytes` of new memory.
    `saves` are values kept for backward, `keeps` (name, bytes) further tensors kept, `scratch`
    bytes that live during the call only, `drops` values of the same operator that nobody but
    autograd needs after this call.

    `gradients` lists what backward makes, in order: an input's name, or a parameter's fqn;
    `backward_scratch` lives until they are made. `passes` are inputs that get the output's gradient
    itself, without a copy. `summed` are those of the `gradients` that are sums over broadcast
    dimensions, which the engine makes when the node is done, with the sizes of what it makes on the
    way. `sum_first`: the scratch is such a sum, made by the node of an addition; the output's
    gradient is over with that node, unless it `passes` on, before a node of its own makes the
    `gradients`.

    A `view` makes no memory: its output, and `also` its further outputs of the same node, are the
    storage of its first input. `turns` are inputs whose gradients come with their last two
    dimensions exchanged: a linear copies such a one before it multiplies. With `moved` 0 the call
    is no kernel of its own: its work is counted with the operator's main ones.

    `weights` are copies of parameters that it reads, the weight's first, and saves only where one
    of its inputs needs a gradient. A `cached` output is one that autocast's cache holds besides;
    one that is `found` there was made by an earlier call, and is made anew only when a region is
    recomputed, as each recomputation has a cache of its own. `dtype` is that of its work, "" for
    the model's.

    `shape` is that of its kernel (`zsim.ir.ops.Kernel`).

    Who needs no gradient changes what is saved and made (`zsim.autograd.requires_grad`): `crossed`
    calls, products, save each of `saves` for the gradient of the other factor; a `joint` backward
    makes all gradients or none. One that `packs` saves a parameter, which costs nothing but makes a
    recomputation reach the call; one that is not `differentiable` has no backward. An `addmm` is a
    linear with a bias, frozen or not.
    """

    operator: Final[str]
    inputs: Final[tuple[str, ...]]
    output: Final[str]
    nbytes: Final[int]
    saves: Final[tuple[str, ...]] = ()
    keeps: Final[tuple[tuple[str, int], ...]] = ()
    scratch: Final[int] = 0
    drops: Final[tuple[str, ...]] = ()
    backward_scratch: Final[tuple[int, ...]] = ()
    gradients: Final[tuple[str, ...]] = ()
    passes: Final[tuple[str, ...]] = ()
    summed: Final[tuple[tuple[str, tuple[int, ...]], ...]] = ()
    sum_first: Final[bool] = False
    view: Final[bool] = False
    also: Final[tuple[str, ...]] = ()
    turns: Final[tuple[str, ...]] = ()
    parameters: Final[tuple[str, ...]] = ()
    weights: Final[tuple[str, ...]] = ()
    cached: Final[bool] = False
    found: Final[bool] = False
    dtype: Final[str] = ""
    flops: Final[int] = 0
    backward_flops: Final[int] = 0
    moved: Final[int] = 0
    backward_moved: Final[int] = 0
    crossed: Final[bool] = False
    joint: Final[bool] = False
    packs: Final[bool] = False
    addmm: Final[bool] = False
    differentiable: Final[bool] = True
    shape: Final[tuple[int, ...]] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an operator's calls are sized by: tokens of one micro-batch, sequences, tokens per
    sequence, bytes per element.

    `device` decides which kernels there are: on CUDA norms are fused and keep their statistics in
    float32. `softmax_nbytes` are those of an element of a softmax where that runs in another dtype,
    else 0.
    """

    batch: Batch
    nbytes: int
    device: Device = "cpu"
    softmax_nbytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch.micro_batch * self.batch.sequence_length
