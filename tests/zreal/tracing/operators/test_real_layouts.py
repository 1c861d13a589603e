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
from tests.support.installed_torch import TORCH
from tests.zreal.tracing.test_user_modules_traced import DDP, FSDP2, differences
from zreal.tracing.fakes.real_layouts import RULES, as_real

WIDTH = 8
SHAPES = {3: (2, 6, WIDTH), 4: (2, 6, 4, WIDTH), 5: (2, 6, 4, 5, WIDTH)}
ORDERS = {
    3: ((0, 1, 2), (0, 2, 1), (2, 1, 0)), 4: ((0, 1, 2, 3), (0, 1, 3, 2), (0, 2, 3, 1)),
    5: ((0, 1, 2, 3, 4), (0, 1, 2, 4, 3), (0, 2, 3, 4, 1)),
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


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(functional, name)
        for name in (
            "relu", "gelu", "silu", "mish", "elu", "celu", "selu", "leaky_relu", "hardtanh"
        )
    },
    **{
        name: getattr(functional, name)
        for name in ("relu6", "hardswish", "hardsigmoid", "softplus", "softsign", "softshrink")
    },
    **{
        name: getattr(functional, name)
        for name in (
            "hardshrink", "tanhshrink", "logsigmoid", "instance_norm", "normalize", "dropout"
        )
    },
    **{
        name: getattr(torch, name)
        for name in ("sigmoid", "tanh", "exp", "abs", "sin", "erf", "tril", "clone", "nan_to_num")
    },
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "threshold": lambda x: functional.threshold(x, 0.1, 0), "softmax": lambda x: x.softmax(-1),
    "softmax, dim 1": lambda x: x.softmax(1), "log_softmax": lambda x: x.log_softmax(-1),
    "log_softmax, dim 1": lambda x: x.log_softmax(1), "glu": lambda x: functional.glu(x, -1),
    "glu, dim 1": lambda x: functional.glu(x, 1),
    "prelu": lambda x: functional.prelu(x, ones(6, like=x)),
    "layer_norm": lambda x: functional.layer_norm(
        x, (WIDTH,), ones(WIDTH, like=x), ones(WIDTH, like=x)
    ),
    "rms_norm": lambda x: functional.rms_norm(x, (WIDTH,), ones(WIDTH, like=x)),
    "batch_norm": normed,
    "group_norm": lambda x: functional.group_norm(x, 2, ones(6, like=x), ones(6, like=x)),
    "pow": lambda x: x.pow(3), "pow, number first": lambda x: 2.0**x,
    "clamp": lambda x: x.clamp(0, 1), "where": lambda x: torch.where(x > 0, x, 0.0),
    "maximum": lambda x: torch.maximum(x, x * 0.5), "xlogy": lambda x: torch.xlogy(x, x + 1),
    "xlogy, number last": lambda x: torch.xlogy(x, 2.0),
    "xlogy, number first": lambda x: torch.xlogy(2.0, x + 1),
    "lerp": lambda x: torch.lerp(x, x * x, 0.5), "masked_fill": lambda x: x.masked_fill(x > 0, 0),
    "cumsum": lambda x: x.cumsum(1), "flip": lambda x: x.flip(1), "roll": lambda x: x.roll(1, 1),
    "amax": lambda x: x.amax(1), "max": lambda x: x.max(1).values, "mean": lambda x: x.mean(1),
    "std": lambda x: x.std(-1), "logsumexp": lambda x: x.logsumexp(-1),
    "cat": lambda x: torch.cat((x, x * 2), 1),
    "gather": lambda x: x.gather(1, torch.zeros(x.shape, dtype=torch.int64)),
    "index_select": lambda x: x.index_select(1, torch.arange(3)),
    "scatter_add": lambda x: x.scatter_add(1, torch.zeros(x.shape, dtype=torch.int64), x * 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "pad": lambda x: functional.pad(x, (1, 1)),
    "linear": lambda x: functional.linear(x, ones(5, WIDTH, like=x), ones(5, like=x)),
    "matmul": lambda x: x @ ones(WIDTH, WIDTH, like=x),
    "mse_loss": lambda x: functional.mse_loss(x, x * 2, reduction="none"),
    "smooth_l1_loss": lambda x: functional.smooth_l1_loss(x, x * 2, reduction="none"),
    "huber_loss": lambda x: functional.huber_loss(x, x * 2, reduction="none"),
    "binary_cross_entropy": lambda x: functional.binary_cross_entropy(
        x.sigmoid(), x.detach().clamp(0, 1), reduction="none"
    ),
    "mul, a mask first": lambda x: (x > 0.5).transpose(1, 2).contiguous().transpose(1, 2) * x,
    "sub": lambda x: x - x.sin(), "rsub": lambda x: torch.rsub(x, x.sin()),
    "div": lambda x: x / x.exp(), "pow, tensors": lambda x: x.exp() ** x,
    "minimum": lambda x: torch.minimum(x, x.sin()), "fmax": lambda x: torch.fmax(x, x.sin()),
    "atan2": lambda x: torch.atan2(x, x.exp()), "hypot": lambda x: torch.hypot(x, x.exp()),
    "fmod": lambda x: torch.fmod(x, x.exp()), "remainder": lambda x: torch.remainder(x, x.exp()),
    "copysign": lambda x: torch.copysign(x, x.exp()),
    "logaddexp": lambda x: torch.logaddexp(x, x.exp()),
    "logical_and": lambda x: x * torch.logical_and(x, x.exp()),
    "comparisons": lambda x: x * (x > x.exp()) + x * (x == x.exp()),
    "addcmul": lambda x: torch.addcmul(x, x.exp(), x.sin()),
    "addcdiv": lambda x: torch.addcdiv(x, x.exp(), x.exp()),
    "clamp, tensors": lambda x: torch.clamp(x, x * 0.5, x * 2),
    "where, tensors": lambda x: torch.where(x > 0, x, x.exp()),
    "polar": lambda x: torch.polar(x, x.exp()).abs(),
    "complex": lambda x: torch.complex(x, x.exp()).abs(), "rrelu": functional.rrelu,
    "soft_margin_loss": lambda x: functional.soft_margin_loss(
        x, x.detach().sign(), reduction="none"
    ),
    "l1_loss": lambda x: functional.l1_loss(x, x.exp(), reduction="none"),
    "cosine_similarity": lambda x: functional.cosine_similarity(x, x.exp(), dim=-1),
    "kl_div": lambda x: functional.kl_div(x.log(), x.detach(), reduction="none"),
}
OF_THREE: dict[str, Callable[[Tensor], Tensor]] = {
    "conv1d": lambda x: functional.conv1d(x, ones(6, 6, 3, like=x), ones(6, like=x), padding=1),
    "avg_pool1d": lambda x: functional.avg_pool1d(x, 3, 1, 1),
    "max_pool1d": lambda x: functional.max_pool1d(x, 3, 1, 1),
    "interpolate, linear": lambda x: functional.interpolate(x, scale_factor=2, mode="linear"),
}
OF_FOUR: dict[str, Callable[[Tensor], Tensor]] = {
    "conv2d": lambda x: functional.conv2d(x, ones(6, 6, 3, 3, like=x), ones(6, like=x), padding=1),
    "max_pool2d": lambda x: functional.max_pool2d(x, 3, 1, 1),
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 3, 1, 1),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, 2),
    "interpolate, bilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"),
    "pad, reflect": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "pad, replicate": lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x[:, :4], 2),
    "channel_shuffle": lambda x: functional.channel_shuffle(x, 2),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x * 2, x * 3),
}
OF_FIVE: dict[str, Callable[[Tensor], Tensor]] = {
    "pad, reflect": lambda x: functional.pad(x, (1, 1, 1, 1, 1, 1), mode="reflect"),
    "pad, replicate": lambda x: functional.pad(x, (1, 1, 1, 1, 1, 1), mode="replicate"),
    "max_pool3d": lambda x: functional.max_pool3d(x, 2),
    "interpolate, trilinear": lambda x: functional.interpolate(x, scale_factor=2, mode="trilinear"),
}
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": normed, "group_norm": lambda x: functional.group_norm(x, 2, ones(6), ones(6)),
    "layer_norm": lambda x: functional.layer_norm(x, (WIDTH,), ones(WIDTH), ones(WIDTH)),
}
CASES = [
    *((3, name, run) for name, run in {**FUNCTIONS, **OF_THREE}.items()),
    *((4, name, run) for name, run in OF_FOUR.items()),
    *((5, name, run) for name, run in OF_FIVE.items()),
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


class AsGiven(TorchDispatchMode):
    """Inside, every call is kept with what it was given and with its result, as they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.is_mutable:
            self.recorded.append((func, args, kwargs or {}, result))
        return result


def as_given(run: Callable[[], Tensor]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]:
    """Calls of `run` with what they were given and made."""
    with AsGiven() as seen:
        run()
    return seen.recorded


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
        keeps = (
            1 if name in ("log_sigmoid_forward", "_prelu_kernel_backward") else None
        )  # what comes second is read element by element
        made += 1
        if real[:keeps] != fake[:keeps]:
            wrong.append(
                (name, [t.stride() for t in tree_leaves(args) if isinstance(t, Tensor)], real, fake)
            )
    return made, wrong


def named(value: Any) -> str:
    return str(value) if isinstance(value, int | str) else ""


LAID_OTHERWISE = {"2.11": ("pad, reflect", "pad, replicate")}
"""Functions whose results older versions of torch lay as they lie in channels_last."""


@pytest.mark.parametrize(("dims", "name", "run"), CASES, ids=named)
def test_every_result_lies_as_the_real_one_does(
    dims: int, name: str, run: Callable[[Tensor], Tensor]
) -> None:
    if name in LAID_OTHERWISE.get(TORCH, ()):
        pytest.skip(f"torch {TORCH} keeps channels_last here, and its fake kernel does not")
    made, wrong = differing(calls(run, torch.rand(SHAPES[dims])))
    assert made
    assert wrong == []


NOT_OF_TWO_BYTES = {"polar", "complex"}


@pytest.mark.parametrize(
    "name", one_in(3, [name for name in FUNCTIONS if name not in NOT_OF_TWO_BYTES])
)
def test_every_result_of_two_bytes_lies_as_the_real_one_does(name: str) -> None:
    made, wrong = differing(calls(FUNCTIONS[name], torch.rand(SHAPES[3]).to(torch.bfloat16)))
    assert made
    assert wrong == []


OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in (
            "mul", "add", "sub", "div", "pow", "maximum", "fmod", "eq", "rsub", "xlogy",
            "logical_and",
        )
    },
    "where": lambda a, b: torch.where(a > 0, a, b), "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "clamp": lambda a, b: torch.clamp(a, b, b), "masked_fill": lambda a, b: a.masked_fill(b > 0, 0),
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


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm_keeps_norms_as_real_ones_are(dim: int, dtype: torch.dtype) -> None:
    def run(x: Tensor) -> Tensor:
        return torch._weight_norm(x[0], ones(*((6, 1) if dim == 0 else (1, WIDTH)), like=x), dim)

    made, wrong = differing(calls(run, torch.rand(SHAPES[3]).to(dtype)))
    assert made
    assert wrong == []


class Residual(nn.Module):
    """An activation whose result is pooled over transposed tokens, so that gradients lie otherwise
    than what it was given."""

    def __init__(self, activate: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.activate = activate

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(self.activate(x))
        return self.activate(x).transpose(1, 2).mean(-1).pow(2).mean()


@pytest.mark.parametrize("name", [
    "elu", "hardswish", "relu6", "selu", "softplus", "log_softmax", "logsigmoid", "layer_norm",
    "gelu",
])
def test_a_step_in_which_gradients_lie_otherwise_than_values_is_exact(
    name: str, tmp_path: Any
) -> None:
    def data() -> tuple[Tensor, ...]:
        return (torch.rand(2, 64, WIDTH),)

    assert differences(lambda: Residual(FUNCTIONS[name]), data, DDP, tmp_path, ranks=2) == {}


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


@pytest.mark.parametrize("name", ["gelu", "silu", "softplus", "relu"])
@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
def test_a_step_in_which_a_gradient_is_expanded_is_exact(
    name: str, parameters: str, tmp_path: Any
) -> None:
    def data() -> tuple[Tensor, ...]:
        return (torch.rand(2, 256, WIDTH),)

    assert differences(
        lambda: Summed(FUNCTIONS[name]), data, FSDP2, tmp_path, ranks=2, parameters=parameters
    ) == {}
