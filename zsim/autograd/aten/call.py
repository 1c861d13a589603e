"""One aten call of eager torch as the tape sees it, and the sizes that an operator's calls follow
from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from zsim.models.training_options import Batch, Device


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Call:
    """One differentiable aten call.

    Values and bytes:

    - `inputs` may need a gradient; `output` is new memory of `nbytes`.
    - `saves`: values that autograd keeps for backward; `keeps`: further tensors, (name, bytes).
    - `scratch`: bytes that live during the call only.
    - `drops`: values of the same operator that only autograd needs after this call.
    - `view`: `output` and `also`, further outputs of the node, share the first input's storage.

    Backward:

    - `gradients`, in order: an input's name, or a parameter's fqn. `backward_scratch` lives until
      they are made.
    - `passes`: inputs that get the output's gradient itself, without a copy.
    - `summed`: those of the `gradients` that the engine sums over broadcast dimensions when the
      node is done, with the sizes of each sum on the way.
    - `sum_first`: an addition's node makes such a sum as its scratch. The output's gradient goes
      with that node, unless it `passes` on.
    - `turns`: inputs whose gradients have their last two dimensions exchanged; a linear copies such
      a gradient before it multiplies.
    - `crossed`: a product, which saves each of `saves` for the gradient of the other factor.
    - `in_place`: the gradient of its input is made in the value that it saves.
    - `joint`: backward makes all gradients or none.
    - `packs`: it saves a parameter, which costs nothing but makes a recomputation reach the call.
    - `differentiable=False`: it has no backward. `zsim.autograd.requires_grad` decides these.

    Parameters and kernels:

    - `weights`: copies of parameters that it reads, the weight's first. It saves them only where an
      input needs a gradient.
    - `cached`: autocast's cache holds the output too. `from_cache`: an earlier call made it; a
      recomputation, whose cache is its own, makes it anew.
    - `dtype` of its work, "" for the model's. `shape` of its kernel: `zsim.ir.ops.Kernel`.
    - `moved` 0: no kernel of its own; the operator's main kernels count its work.
    - `singly`, and `backward_singly`: elements that its kernels take one by one.
    - `backward_first`: bytes of a kernel in backward before the others.
    - `addmm`: a linear with a bias, frozen or not. `head`: the model's last.
    - `one_node`: a linear that multiplies and adds its `bias`, frozen or not, by itself (Operator,
      ONE_NODE).
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
    from_cache: Final[bool] = False
    dtype: Final[str] = ""
    flops: Final[int] = 0
    backward_flops: Final[int] = 0
    moved: Final[int] = 0
    backward_moved: Final[int] = 0
    singly: Final[int] = 0
    backward_singly: Final[int] = 0
    backward_first: Final[int] = 0
    crossed: Final[bool] = False
    in_place: Final[bool] = False
    joint: Final[bool] = False
    packs: Final[bool] = False
    addmm: Final[bool] = False
    one_node: Final[bool] = False
    bias: Final[str] = ""
    head: Final[bool] = False
    differentiable: Final[bool] = True
    shape: Final[tuple[int, ...]] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an operator's calls: tokens of one micro-batch, sequences, bytes per element.

    `device` chooses the kernels: on CUDA norms are fused and keep their statistics in float32.
    `softmax_nbytes`: bytes of an element of a softmax in another dtype, else 0.
    """

    batch: Batch
    nbytes: int
    device: Device = "cpu"
    softmax_nbytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch.micro_batch * self.batch.sequence_length
