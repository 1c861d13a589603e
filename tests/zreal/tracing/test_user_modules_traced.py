"""Users' modules, to the byte: values that pass units by, losses of every kind, one buffer alone.
Chains of blocks have none of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.cases.sampling import one_in
from tests.zreal.agreement.test_matrix import predicted
from tests.zreal.tracing.user_steps import DDP, FSDP1, FSDP2, HSDP, KEPT, Exact
from zreal.tracing.trace import trace
from zsim.autograd.traced.model import HookVariant, check
from zsim.autograd.traced.traced_file import save
from zsim.errors import ZsimError
from zsim.ir.ops import Alloc, Free
from zsim.models.checkpointing import Checkpointing
from zsim.scenario.scenario import parse

WIDTH = 16


class Layers(nn.Module):
    """Four linears that `run` calls; the loss is the sum of what it returns."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layers, x).sum()


def past_one(layers: nn.ModuleList, x: Tensor) -> Tensor:
    first = layers[0](x)
    second = layers[1](first)
    return first + layers[3](layers[2](second))


def past_two(layers: nn.ModuleList, x: Tensor) -> Tensor:
    first = layers[0](x)
    second = layers[1](first)
    return layers[3](layers[2](second) + first) + second


def bent(layers: nn.ModuleList, x: Tensor) -> Tensor:
    first = functional.silu(layers[0](x))
    second = functional.silu(layers[1](first))
    return layers[3](functional.silu(layers[2](second)) + first) + second


def down_and_up(layers: nn.ModuleList, x: Tensor) -> Tensor:
    """A U-Net's way: what is kept on the way down is joined to what comes back, and cut."""
    first = layers[0](x)
    second = layers[1](first)
    joined = torch.cat((layers[2](second), first), 1)
    return layers[3](joined[..., :WIDTH])


def to_all(layers: nn.ModuleList, x: Tensor) -> Tensor:
    first = layers[0](x)
    return layers[1](first) * layers[2](first) * layers[3](first)


def cut(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = functional.pad(layer(x)[..., :12], (0, 4))
    return x


SKIPS = {run.__name__: run for run in (past_two, bent, down_and_up, to_all, cut)}


class Teacher(nn.Module):
    """Four linears, of which those at `frozen` places run under no_grad beside the others."""

    def __init__(self, frozen: tuple[int, ...]) -> None:
        super().__init__()
        self.frozen = frozen
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for index in frozen:
            self.layers[index].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index in self.frozen:
                with torch.no_grad():
                    told = layer(x)
                x = (x - told).abs()
            else:
                x = layer(x).relu()
        return x.sum()


@pytest.mark.parametrize(
    ("frozen", "strategy"),
    [((0,), FSDP2), ((1, 2), KEPT), ((0, 3), DDP), ((3,), FSDP2)],
)
def test_frozen_units_that_run_under_no_grad(
    frozen: tuple[int, ...], strategy: str, exact: Exact
) -> None:
    """Such units are gathered in forward and have no backward; a unit after them prefetches them
    all the same."""
    exact(lambda: Teacher(frozen), inputs, strategy)


class Twice(nn.Module):
    """A frozen unit that runs under no_grad and with a gradient, in either order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).relu()
        for kind in self.order:
            with torch.set_grad_enabled(kind == "g"):
                told = self.layers[1](x)
            x = x + told
        return self.layers[3](self.layers[2](x)).sum()


@pytest.mark.parametrize("order", ["ng", "gn", "gg", "nn"])
def test_a_frozen_unit_that_runs_under_no_grad_and_with_a_gradient(
    order: str, exact: Exact
) -> None:
    exact(lambda: Twice(order), inputs, FSDP2)


def test_a_trained_unit_under_no_grad_is_refused_with_what_to_do() -> None:
    def make() -> nn.Module:
        teacher = Teacher((2,))
        return teacher.requires_grad_(True)

    with pytest.raises(
        ZsimError,
        match=r"layers\.2: expected the gradient of the unit's output.*no_grad must be frozen",
    ):
        trace(make, inputs(), units=["layers.2"])


class Regression(nn.Module):
    def __init__(self, loss: Callable[..., Tensor], reduction: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.loss, self.reduction = loss, reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        losses = self.loss(x.sigmoid(), target, reduction=self.reduction)
        return losses.sum() if self.reduction == "none" else losses


LOSSES = {
    loss.__name__: loss
    for loss in (
        functional.mse_loss, functional.smooth_l1_loss, functional.binary_cross_entropy,
        functional.soft_margin_loss, functional.l1_loss, functional.huber_loss,
    )
}


class Buffered(nn.Module):
    def __init__(self, buffers: tuple[tuple[torch.dtype, int], ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for index, (dtype, numel) in enumerate(buffers):
            self.register_buffer(f"buffer_{index}", torch.ones(numel, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


BUFFERS = {
    "a mask": ((torch.bool, 4096),), "rates": ((torch.float32, 1000),),
    "places": ((torch.int64, 3000),), "two of one": ((torch.float32, 500), (torch.float32, 700)),
    "one of each": ((torch.bool, 4096), (torch.int64, 500), (torch.float32, 77)),
}


def inputs() -> tuple[Tensor, ...]:
    return (torch.randn(6, WIDTH),)


@pytest.mark.parametrize(
    ("name", "strategy"), one_in(3, product(SKIPS, [FSDP2, KEPT, DDP, HSDP, FSDP1]))
)
def test_values_that_pass_units_by(name: str, strategy: str, exact: Exact) -> None:
    exact(lambda: Layers(SKIPS[name]), inputs, strategy)


@pytest.mark.parametrize("name", SKIPS)
def test_values_that_pass_units_by_with_parameters_cast_and_reduced_apart(
    name: str, exact: Exact
) -> None:
    exact(lambda: Layers(SKIPS[name]), inputs, FSDP2, parameters="bf16", accumulation=2)


@pytest.mark.parametrize(("name", "reduction"), one_in(5, product(LOSSES, ["mean", "sum", "none"])))
def test_losses_whose_single_number_keeps_the_room_of_all(
    name: str, reduction: str, exact: Exact
) -> None:
    def data() -> tuple[Tensor, Tensor]:
        return torch.randn(6, WIDTH), torch.randint(2, (6, WIDTH)).float()

    exact(lambda: Regression(LOSSES[name], reduction), data, FSDP2)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_some_losses_make_those_of_all_elements_beside_on_a_device(
    name: str, reduction: str
) -> None:
    """Source alone, for no CUDA is here: bytes that live in the operator only."""
    data = (torch.randn(6, WIDTH), torch.randint(2, (6, WIDTH)).float())
    units = [f"layers.{index}" for index in range(4)]
    model = trace(lambda: Regression(LOSSES[name], reduction), data, units=units, device="cuda")
    events = model.lowered[-1].forward.memory
    brief = [
        event.nbytes
        for event, after in pairwise(events)
        if isinstance(event, Alloc) and after == Free(event.buffer)
    ]
    beside = reduction == "mean" and name in ("mse_loss", "smooth_l1_loss", "huber_loss")
    assert brief == [6 * WIDTH * 4] * beside


@pytest.mark.parametrize(
    ("name", "strategy"), one_in(3, product(BUFFERS, [DDP, 'name = "zero_redundancy"']))
)
def test_a_single_buffer_of_its_dtype_is_broadcast_as_it_is(
    name: str, strategy: str, exact: Exact
) -> None:
    for ranks in (1, 2):
        exact(lambda: Buffered(BUFFERS[name]), inputs, strategy, ranks=ranks)


class Unfolding(nn.Module):
    """Patches out of an image, and an image of patches: overlapping ones are more than the image,
    few of them less."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        patches = functional.unfold(x, self.kernel, stride=self.stride)
        return functional.fold(patches * 2, x.shape[-2:], self.kernel, stride=self.stride).sum()


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (1, 3), (2, 2)])
def test_folding_begins_with_room_for_what_it_reads(kernel: int, stride: int, exact: Exact) -> None:
    exact(lambda: Unfolding(kernel, stride), lambda: (torch.randn(2, 4, 8, 8),), FSDP2)


@pytest.mark.parametrize("loss", [Tensor.sum, lambda output: output.square().sum()])
def test_products_say_how_their_first_factor_lies(loss: Callable[[Tensor], Tensor]) -> None:
    """Backward of a linear multiplies as torch's own does: the weight's gradient is of the
    transposed gradient of the output."""
    model = trace(lambda: Layers(past_one), inputs(), units=["layers.0"], loss=loss)
    (linear,) = (module for module in model.lowered if module.fqn == "layers.0")
    products = {
        (kernel.shape, kernel.transposed)
        for kernel in (*linear.forward.kernels, *linear.backward.kernels) if kernel.shape
    }
    assert products == {((1, 6, WIDTH, WIDTH), False), ((1, WIDTH, WIDTH, 6), True)}


@pytest.mark.parametrize("key", ["norms", "loss"])
def test_a_trace_has_its_own_calls_and_takes_no_other(key: str, tmp_path: Path) -> None:
    save(trace(lambda: Layers(past_one), inputs(), units=["layers.0"]), tmp_path / "one.json")
    text = f"""
model = {{ traced = "one.json" }}
batch = {{ micro_batch = 6 }}
cluster = {{ preset = "cpu-gloo", ranks = 2 }}
strategy = {{ name = "fsdp2" }}
execution = {{ {key} = "composite" }}
"""
    with pytest.raises(ZsimError, match=f"execution.{key}: expected fused, for a trace has the "
                                        f"calls that its module makes"):
        parse(text.encode(), where="traced.toml", folder=tmp_path)


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 1000)])

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers[0](x), targets)


def test_a_loss_of_targets_reads_one_logarithm_of_each_row_and_its_backward_writes_all() -> None:
    model = trace(Classes, (torch.randn(64, WIDTH), torch.randint(1000, (64,))), units=["layers.0"])
    kernels = [
        kernel for module in model.lowered
        for kernel in (*module.forward.kernels, *module.backward.kernels)
    ]
    forward, backward = (each.nbytes for each in kernels if each.operator == "nll_loss")
    logits, targets = 64 * 1000 * 4, 64 * 8
    assert targets < forward < 2 * targets
    assert logits < backward < logits + 2 * targets


class Normed(nn.Module):
    """A linear whose activations are normed over channels, transposed, as PointNet and convolutions
    over time have them."""

    def __init__(self, bent: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.bent, self.wide, self.norm = bent, nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.bent(self.norm(self.wide(x).transpose(1, 2))).transpose(1, 2)


class Norms(nn.Module):
    def __init__(self, bent: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed(bent) for _ in range(4))

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(x.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("strategy", [FSDP2, DDP])
@pytest.mark.parametrize("bent", [functional.relu, functional.gelu])
def test_norms_of_transposed_activations_lie_as_new_tensors_do(
    bent: Callable[[Tensor], Tensor], strategy: str, exact: Exact
) -> None:
    """The next reshape then needs a copy, which fake tensors alone would not show."""

    def data() -> tuple[Tensor, ...]:
        return torch.randn(4, 8, WIDTH), torch.randint(WIDTH, (4, 8))

    exact(lambda: Norms(bent), data, strategy)


def test_a_name_that_no_scenario_could_load_is_refused_when_it_is_given() -> None:
    with pytest.raises(ZsimError, match="name: expected one without blanks, commas and bars, "
                                        "found 'my model'"):
        trace(lambda: Layers(past_one), inputs(), name="my model")


class Strict(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            raise TypeError(f"no linear of {x.dtype}")
        return super().forward(x)


class Needs(nn.Module):
    """Units that only fully_shard's cast of their inputs lets run in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Strict(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).float()).sum()


def test_where_a_module_runs_with_hooks_alone_its_own_error_is_told(tmp_path: Path) -> None:
    save(
        trace(Needs, inputs(), units=["layers.0", "layers.1"], dtype="bfloat16", device="cpu"),
        tmp_path / "needs.json",
    )
    text = """
model = { traced = "needs.json" }
batch = { micro_batch = 6, sequence_length = 1 }
cluster = { preset = "cpu-gloo", ranks = 2 }
strategy = { name = "ddp" }
precision = { parameters = "bf16", reduce = "fp32" }
"""
    with pytest.raises(
        ZsimError,
        match=r"without the hooks of fully_shard.*found layers\.0: .*no linear of torch\.float32",
    ):
        predicted(parse(text.encode(), where="needs.toml", folder=tmp_path), ranks=(0,))
    assert predicted(
        parse(text.replace("ddp", "fsdp2").encode(), where="needs.toml", folder=tmp_path),
        ranks=(0,),
    )


@pytest.mark.parametrize("change", ["twice", "of a checkpointing that was not traced"])
def test_a_file_with_two_forms_for_one_strategy_is_refused(change: str) -> None:
    model = trace(lambda: Layers(past_one), inputs(), units=["layers.0"])
    variant = HookVariant(
        unit_hooks="none",
        checkpointing=Checkpointing(mode="none" if change == "twice" else "full"), lowered=(),
    )
    with pytest.raises(ZsimError, match="one form for each way of autograd"):
        check(replace(model, hook_variants=(variant, variant) if change == "twice" else (variant,)))
