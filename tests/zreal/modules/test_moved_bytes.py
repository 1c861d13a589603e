"""The bytes that rotary positions and masked scores are said to move, against the operands of the
aten calls that torch makes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from zreal.modules.operators import apply
from zsim.autograd.aten.attention import attention, rotary
from zsim.autograd.aten.call import Sizes
from zsim.ir.ops import MASK_SCORES
from zsim.models.operators import Operator
from zsim.models.training_options import Batch

SEQUENCES, LENGTH, HEADS, WIDTH = 2, 64, 4, 32
SIZES = Sizes(Batch(micro_batch=SEQUENCES, sequence_length=LENGTH), 4, "cuda")


class Traffic(TorchDispatchMode):
    """Bytes that moving calls read and write, of tensors other than tables."""

    KERNELS = ("mul", "sub", "add", "neg", "cat")

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.moved = least, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in self.KERNELS:
            read = [
                value for arg in args for value in (arg if isinstance(arg, list) else [arg])
                if isinstance(value, torch.Tensor)
            ]
            large = [each.nbytes for each in (*read, result) if each.nbytes >= self.least]
            self.moved[name] += sum(large)
        return result


def test_rotary_positions_move_nine_tensors_forward_and_ten_backward() -> None:
    """A half that two products read has their gradients added, and the halves are joined."""
    operator = Operator(
        kind="rotary", name="q", inputs=("q",), output="turned", num_heads=HEADS, head_dim=WIDTH
    )
    x = torch.randn(SEQUENCES, LENGTH, HEADS * WIDTH, requires_grad=True)
    with Traffic(x.nbytes // 2) as forward:
        turned = apply(operator, {"q": x}, weight=None, bias=None)
    with Traffic(x.nbytes // 2) as backward:
        turned.backward(torch.ones_like(turned))
    planned = [call for call in rotary(operator, SIZES) if call.moved]
    assert len(planned) == 1
    assert sum(forward.moved.values()) == planned[0].moved == 9 * x.nbytes
    assert sum(backward.moved.values()) == planned[0].backward_moved == 10 * x.nbytes


def test_masked_scores_are_copied_and_the_copy_filled_in_both_directions() -> None:
    operator = Operator(
        kind="attention", name="a", inputs=("q", "k", "v"), output="mixed", num_heads=HEADS,
        num_kv_heads=HEADS, head_dim=WIDTH, implementation="explicit",
    )
    (planned,) = (
        call for call in attention(operator, SIZES) if call.operator == MASK_SCORES
    )
    scores = torch.randn(SEQUENCES, HEADS, LENGTH, LENGTH, requires_grad=True)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        masked = scores.masked_fill(later, float("-inf"))
        masked.backward(torch.ones_like(masked))
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["aten::clone"] == counts["aten::masked_fill_"] == 2  # once in each direction
    assert planned.moved == planned.backward_moved == 4 * scores.nbytes
