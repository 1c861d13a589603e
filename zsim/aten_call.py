"""One aten call of eager torch as the tape sees it, and the sizes that an operator's calls follow from."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.training import Batch, Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One differentiable aten call.

    `inputs` are values that may need a gradient; `output` is a value of `nbytes` of new memory. `saves` are values kept for
    backward, `keeps` (name, bytes) further tensors kept, `scratch` bytes that live during the call only, `drops` values of the
    same operator that nobody but autograd needs after this call.

    `gradients` lists what backward makes, in order: an input's name, or a parameter's fqn; `backward_scratch` lives until they are
    made. `passes` are inputs that get the output's gradient itself, without a copy. `summed` are those of the `gradients` that
    are sums over broadcast dimensions, which the engine makes when the node is done, with the sizes of what it makes on the way.

    A `view` makes no memory: its output, and `also` its further outputs of the same node, are the storage of its first input.
    `turns` are inputs whose gradients come with their last two dimensions exchanged: a linear copies such a one before it multiplies.
    With `moved` 0 the call is no kernel of its own: its work is counted with the operator's main ones.

    `weights` are copies of parameters that it reads, and saves only where one of its inputs needs a gradient. A `cached` output
    is one that autocast's cache holds besides. `dtype` is that of its work, "" for the model's.

    Who needs no gradient changes what is saved and made (`zsim.needed`): `crossed` calls, products, save each of `saves` for the
    gradient of the other factor; a `joint` backward makes all gradients or none. One that `packs` saves a parameter, which costs
    nothing but makes a recomputation reach the call; one that is not `differentiable` has no backward.
    """

    operator: str
    inputs: tuple[str, ...]
    output: str
    nbytes: int
    saves: tuple[str, ...] = ()
    keeps: tuple[tuple[str, int], ...] = ()
    scratch: int = 0
    drops: tuple[str, ...] = ()
    backward_scratch: tuple[int, ...] = ()
    gradients: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    summed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    view: bool = False
    also: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    cached: bool = False
    dtype: str = ""
    flops: int = 0
    backward_flops: int = 0
    moved: int = 0
    backward_moved: int = 0
    crossed: bool = False
    joint: bool = False
    packs: bool = False
    differentiable: bool = True


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an operator's calls are sized by: tokens of one micro-batch, sequences, tokens per sequence, bytes per element.

    `device` decides which kernels there are: on CUDA norms are fused and keep their statistics in float32. `softmax_nbytes` are
    those of an element of a softmax where that runs in another dtype, else 0.
    """

    batch: Batch
    nbytes: int
    device: Device = "cpu"
    softmax_nbytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch.micro_batch * self.batch.sequence_length
