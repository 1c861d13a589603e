"""Results of operators on fake tensors: in the layout and the dtype that real ones have, whatever
layouts go in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.support.cases.sampling import one_in
from tests.support.watched_calls import WatchedCalls
from tests.zreal.tracing.user_steps import FSDP2, Exact
from zreal.tracing.errors import UntraceableError
from zreal.tracing.fakes.real_layouts import RULES, as_real
from zreal.tracing.trace import trace

WIDTH = 8
SHAPES = {3: (2, 6, WIDTH), 4: (2, 6, 4, WIDTH)}
ORDERS = {
    3: ((0, 1, 2), (0, 2, 1), (2, 1, 0)), 4: ((0, 1, 2, 3), (0, 1, 3, 2), (0, 2, 3, 1)),
}
"""Orders of the dimensions in memory, the slowest first: as new, transposed, and for images
channels last."""
EXPANDED: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t[..., :1].expand(t.shape), lambda t: t.flatten()[0].expand(t.shape),
)
"""Expansions that gradients of sums and means have: over one dimension or all of them."""


def ones(*shape: int, like: Tensor | None = None) -> Tensor:
    return torch.ones(shape, requires_grad=True, dtype=None if like is None else like.dtype)


def normed(x: Tensor) -> Tensor:
    return functional.batch_norm(x, torch.zeros(6), torch.ones(6), ones(6), ones(6), training=True)


def one_by_one(*names: str) -> dict[str, Callable[[Tensor], Tensor]]:
    return {name: getattr(functional, name, getattr(torch, name, None)) for name in names}  # type: ignore[misc]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **one_by_one(
        "relu", "gelu", "silu", "relu6", "hardswish", "softplus", "instance_norm", "normalize",
        "dropout", "sigmoid", "tanh", "exp", "sin", "tril", "clone", "logsigmoid", "elu",
        "leaky_relu", "hardsigmoid", "mish",
    ),
    **{
        name: lambda x, name=name: getattr(functional, name)(x, x * 2, reduction="none")
        for name in ("mse_loss", "smooth_l1_loss", "huber_loss")
    },
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(
        x.sigmoid(), x.detach().clamp(0, 1), reduction="none"
    ),
    "soft_margin_loss": lambda x: functional.soft_margin_loss(
        x, x.detach().sign(), reduction="none"
    ),
    "softmax": lambda x: x.softmax(-1), "log_softmax, dim 1": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: functional.layer_norm(
        x, (WIDTH,), ones(WIDTH, like=x), ones(WIDTH, like=x)
    ),
    "rms_norm": lambda x: functional.rms_norm(x, (WIDTH,), ones(WIDTH, like=x)),
    "batch_norm": normed,
    "group_norm": lambda x: functional.group_norm(x, 2, ones(6, like=x), ones(6, like=x)),
    "pow": lambda x: x.pow(3), "pow, number first": lambda x: 2.0**x,
    "pow, tensors": lambda x: x.exp() ** x, "clamp": lambda x: x.clamp(0, 1),
    "where": lambda x: torch.where(x > 0, x, x.exp()), "rsub": lambda x: torch.rsub(x, x.sin()),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0), "cumsum": lambda x: x.cumsum(1),
    "roll": lambda x: x.roll(1, 1), "max": lambda x: x.max(1).values, "mean": lambda x: x.mean(1),
    "cat": lambda x: torch.cat((x, x * 2), 1),
    "gather": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.int64)),
    "pad": lambda x: functional.pad(x, (1, 1)),
    "linear": lambda x: functional.linear(x, ones(5, WIDTH, like=x), ones(5, like=x)),
    "mul, a mask first": lambda x: (x > 0.5).transpose(1, 2).contiguous().transpose(1, 2) * x,
    "comparisons": lambda x: x * (x > x.exp()) + x * (x == x.exp()),
    "addcmul": lambda x: torch.addcmul(x, x.exp(), x.sin()),
}
OF_FOUR: dict[str, Callable[[Tensor], Tensor]] = {
    "conv2d": lambda x: functional.conv2d(x, ones(6, 6, 3, 3, like=x), ones(6, like=x), padding=1),
    "max_pool2d": lambda x: functional.max_pool2d(x, 3, 1, 1),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, 2),
    "interpolate, bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x[:, :4], 2),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x * 2, x * 3),
    "batch_norm": normed,
}
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": normed, "group_norm": lambda x: functional.group_norm(x, 2, ones(6), ones(6)),
    "layer_norm": lambda x: functional.layer_norm(x, (WIDTH,), ones(WIDTH), ones(WIDTH)),
}
CASES = [
    *((3, name, run) for name, run in FUNCTIONS.items()),
    *((4, name, run) for name, run in OF_FOUR.items()),
]
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class Calls(TorchDispatchMode):
    """Inside, every call of an operator that makes something is kept, with copies of what it was
    given."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not func.is_view and not func._schema.is_mutable:
            given = tree_map_only(
                Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs or {})
            )
            self.recorded.append((func, *given))
        return func(*args, **(kwargs or {}))


def as_given(run: Callable[[], Tensor]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    """Calls of `run` with what they were given and made, as it lies."""
    seen: list[Any] = []
    with WatchedCalls(lambda *call: seen.append(call)):
        run()
    return [call for call in seen if not call[0].is_view and not call[0]._schema.is_mutable]


def calls(run: Callable[[Tensor], Tensor], x: Tensor) -> list[Call]:
    """Calls of forward and backward of `run`, with a gradient that has elements of its own."""
    with Calls() as seen:
        result = run(x.requires_grad_())
        result.backward(torch.rand(result.shape).to(result.dtype))
    return seen.recorded


def laid_out(given: Any) -> Iterator[Any]:
    """`given` with its tensors as new, one or two of them in each other order, of which one may be
    expanded."""
    sizes = [
        t.dim() if isinstance(t, Tensor) and t.is_floating_point() else 0
        for t in tree_leaves(given)
    ]
    for orders in product(
        *(range(3 + len(EXPANDED)) if dims in ORDERS else (0,) for dims in sizes)
    ):
        if sum(order > 0 for order in orders) <= 2 and sum(order >= 3 for order in orders) <= 1:
            left = iter(orders)
            yield tree_map(lambda leaf: ordered(leaf, next(left)), given)  # noqa: B023


def ordered(leaf: Any, order: int) -> Any:
    if not order:
        return leaf
    if order >= 3:
        return EXPANDED[order - 3](leaf)
    dims = ORDERS[leaf.dim()][order]
    return (
        leaf.permute(dims).contiguous().permute([dims.index(dim) for dim in range(leaf.dim())])
    )


def described(result: Any) -> list[Any]:
    """Dtype, shape and strides of each tensor but for dimensions of one, whose stride says nothing.
    """
    tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    return [
        (t.dtype, *((n, stride) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1))
        for t in tensors
    ]


def differing(recorded: list[Call]) -> tuple[int, list[Any]]:
    """Number of calls that real tensors could make, and those that fake ones make otherwise."""
    made, wrong = 0, []
    for func, *given in recorded:
        alike = f"{func} {tree_map_only(Tensor, lambda t: (t.dtype, t.shape, t.stride()), given)}"
        if alike not in COMPARED:  # many functions end in the same operators
            COMPARED[alike] = compared(func, *given)
        made += COMPARED[alike][0]
        wrong += COMPARED[alike][1]
    return made, wrong


COMPARED: dict[str, tuple[int, list[Any]]] = {}
MODE = FakeTensorMode()


def faked(tensor: Tensor) -> Tensor:
    """A fake tensor in the layout of `tensor`."""
    return fake_of(tensor.dtype, tuple(tensor.shape), tensor.stride())


@cache
def fake_of(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    with MODE:
        return torch.empty_strided(shape, strides, dtype=dtype)


def compared(func: Any, given: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, list[Any]]:
    """The same as `differing`, for one call in each layout."""
    made, wrong = 0, []
    name = func._schema.name.partition("::")[2]
    for args, kwargs in laid_out((given, options)):
        try:
            real = described(func(*args, **kwargs))
        except RuntimeError:  # what autograd never gives it
            continue
        args, kwargs = tree_map_only(Tensor, faked, (args, kwargs))
        try:
            with MODE:
                fake = described(as_real(func, args, func(*args, **kwargs), device="cpu"))
        except ValueError:
            # whose gradient autograd has made contiguous before
            assert name == "native_group_norm_backward"
            continue
        made += 1
        # what comes second of it is read element by element
        keeps = 1 if name == "log_sigmoid_forward" else None
        if real[:keeps] != fake[:keeps]:
            wrong.append(
                (name, [t.stride() for t in tree_leaves(args) if isinstance(t, Tensor)], real, fake)
            )
    return made, wrong


def named(value: Any) -> str:
    return str(value) if isinstance(value, int | str) else ""


@pytest.mark.parametrize(("dims", "name", "run"), CASES, ids=named)
def test_every_result_lies_as_the_real_one_does(
    dims: int, name: str, run: Callable[[Tensor], Tensor]
) -> None:
    made, wrong = differing(calls(run, torch.rand(SHAPES[dims])))
    assert made
    assert wrong == []


@pytest.mark.parametrize("name", one_in(3, list(FUNCTIONS)))
def test_every_result_of_two_bytes_lies_as_the_real_one_does(name: str) -> None:
    made, wrong = differing(calls(FUNCTIONS[name], torch.rand(SHAPES[3]).to(torch.bfloat16)))
    assert made
    assert wrong == []


OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in ("mul", "add", "sub", "pow", "eq", "rsub")},
    "where": lambda a, b: torch.where(a > 0, a, b), "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float64)


UNKNOWN = {("sub", torch.bool), ("rsub", torch.bool)}


@pytest.mark.parametrize(
    ("name", "first"), one_in(2, [pair for pair in product(OF_TWO, DTYPES) if pair not in UNKNOWN])
)
def test_results_of_mixed_dtypes_lie_as_real_ones_do(name: str, first: torch.dtype) -> None:
    """A CPU casts one of another dtype before it goes through the elements, and an expanded one
    gets room by that."""
    orders, wrong, made = (0, 1, 3, 4), [], 0
    for second, first_order, second_order in product(DTYPES, orders, orders):
        given = [
            ordered(torch.rand(SHAPES[3]).to(dtype), order)
            for dtype, order in ((first, first_order), (second, second_order))
        ]
        try:
            seen = as_given(lambda given=given: OF_TWO[name](*given))
        except (RuntimeError, NotImplementedError):  # no such operator of these dtypes
            continue
        for func, args, kwargs, result in seen:
            fakes, options = tree_map_only(Tensor, faked, (args, kwargs))
            with MODE:
                fake = as_real(func, fakes, func(*fakes, **options), device="cpu")
            made += 1
            if described(fake) != described(result):
                wrong.append((func, second, first_order, second_order))
    assert made
    assert wrong == []


def test_each_rule_is_held_to_real_results() -> None:
    held = {
        func._schema.name.partition("::")[2]
        for dims, _, run in (*CASES, *((4, name, run) for name, run in FUNCTIONS.items()))
        for func, *_ in calls(run, torch.rand(SHAPES[dims]))
    }
    assert set(RULES) - held == set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dims", [3, 4])
def test_norms_of_two_bytes_with_weights_of_four_keep_statistics_of_four(
    dims: int, name: str, dtype: torch.dtype
) -> None:
    recorded = calls(NORMS[name], torch.rand(SHAPES[dims]).to(dtype))
    forward = next(call for call in recorded if call[0]._schema.name == f"aten::native_{name}")
    assert [result[0] for result in described(forward[0](*forward[1], **forward[2]))] == [
        dtype, torch.float32, torch.float32
    ]
    _, wrong = differing(recorded)
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm_keeps_norms_as_real_ones_are(dim: int, dtype: torch.dtype) -> None:
    def run(x: Tensor) -> Tensor:
        return torch._weight_norm(x[0], ones(*((6, 1) if dim == 0 else (1, WIDTH)), like=x), dim)

    made, wrong = differing(calls(run, torch.rand(SHAPES[3]).to(dtype)))
    assert made
    assert wrong == []


@pytest.mark.parametrize("activate", [nn.PReLU(), functional.glu])
def test_an_operator_that_has_no_rule_is_refused_where_its_arguments_are_not_contiguous(
    activate: Callable[[Tensor], Tensor]
) -> None:
    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.activate = nn.Linear(WIDTH, WIDTH), activate

        def forward(self, x: Tensor) -> Tensor:
            return self.activate(self.linear(x))

    x = (torch.rand(2, WIDTH, WIDTH),)
    with pytest.raises(UntraceableError, match=r"_backward: expected arguments that lie contiguou"):
        trace(Activated, x, units=[], loss=Tensor.sum)  # whose gradient is expanded
    assert trace(Activated, x, units=[], loss=lambda y: y.square().sum()).modules


class Summed(nn.Module):
    """An activation of transposed tokens, and their sum: its gradient is expanded."""

    def __init__(self, activate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.activate(x.transpose(0, 2).contiguous().transpose(0, 2)).sum()


@pytest.mark.parametrize("name", ["gelu", "relu"])
@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
def test_a_step_in_which_a_gradient_is_expanded_is_exact(
    name: str, parameters: str, exact: Exact
) -> None:
    def data() -> tuple[Tensor, ...]:
        return (torch.rand(2, 256, WIDTH),)

    exact(lambda: Summed(FUNCTIONS[name]), data, FSDP2, parameters=parameters)
