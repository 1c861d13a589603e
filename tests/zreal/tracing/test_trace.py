"""Tracing a module: it agrees with the built-in families and leaves the module alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from tests.support.cases.sampling import one_in
from zreal import torch_private
from zreal.modules import modules
from zreal.modules.numerics import batches
from zreal.tracing.trace import trace
from zsim.autograd.lowered import Accumulated, LoweredModule, NodeOver, ParameterGradient
from zsim.autograd.lowering.lower_model import lower
from zsim.autograd.traced.model import TracedModel, TracedModelError
from zsim.autograd.traced.traced_file import dump, parse
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Alloc, Free
from zsim.ir.program import PHASES
from zsim.models.families import load_preset
from zsim.models.spec import ROOT, ModelSpec
from zsim.models.training_options import Batch, Device, Dtype, Precision
from zsim.strategies import STRATEGIES
from zsim.strategies.building.training import Training

FAMILIES = [
    ("mlp-tiny", None), ("mlp-uneven", None), ("gpt-tiny", "explicit"), ("gpt-tiny", "sdpa")
]


def family(name: str, attention: str | None) -> tuple[ModelSpec, Batch]:
    length = 1 if name.startswith("mlp") else 16
    spec = load_preset(name, sequence_length=length, num_layers=None, attention=attention)
    return spec, Batch(micro_batch=2, sequence_length=length)


@cache
def traced(
    name: str, attention: str | None, *, dtype: Dtype = "float32", **options: Any
) -> TracedModel:
    spec, batch = family(name, attention)
    data = batches.inputs(spec, batch, seed=0, rank=0, step=0, micro_batch=0)
    return trace(modules.build(spec, seed=0), data, dtype=dtype, **options)


def records(
    spec: ModelSpec, batch: Batch, *, name: str, dtype: Dtype, device: Device = "cpu",
    autocast: Dtype | Literal["none"] = "none",
) -> list[tuple[int, int, int]]:
    """Start, peak and end of every phase of every distinct rank on a mesh of two along each axis.
    """
    strategy = STRATEGIES[name]
    training = Training(
        model=spec,
        modules=lower(
            spec, batch=batch, dtype=dtype, device=device, autocast=autocast,
            casts_input=strategy.casts_input and dtype != "float32",
        ),
        batch=batch, precision=Precision(parameters=dtype, autocast=autocast), device=device,
    )
    mesh = Mesh(**dict.fromkeys(strategy.axes, 2))
    program = strategy.plan(training, mesh=mesh, options=strategy.options())
    phases = (replay(rank, timeline=False)[phase] for rank in program.ranks for phase in PHASES)
    return [(record.start_bytes, record.peak_bytes, record.end_bytes) for record in phases]


def events(lowered: tuple[LoweredModule, ...]) -> list[tuple[str, str | int]]:
    """Every memory event of forward and backward: births by size, deaths by the size of what dies.
    """
    nbytes: dict[str, int] = {}
    changes: list[tuple[str, str | int]] = []
    passes = [module.forward for module in lowered] + [module.backward for module in lowered[::-1]]
    for event in (event for computation in passes for event in computation.memory):
        if isinstance(event, Accumulated | NodeOver):
            continue
        if isinstance(event, Alloc):
            nbytes[event.buffer] = event.nbytes
        changes.append(
            ("gradient", event.fqn)
            if isinstance(event, ParameterGradient)
            else ("-" if isinstance(event, Free) else "+", nbytes[event.buffer])
        )
    return changes


# -- the built-in families


@pytest.mark.parametrize(
    ("name", "attention", "dtype", "strategy"),
    one_in(3, [
        (*pair, dtype, strategy) for pair in FAMILIES for dtype in ("float32", "bfloat16")
        for strategy in STRATEGIES
    ]),
)
def test_a_traced_family_peaks_where_the_family_does(
    name: str, attention: str, dtype: Dtype, strategy: str
) -> None:
    spec, batch = family(name, attention)
    casts = STRATEGIES[strategy].casts_input
    model = traced(name, attention, dtype=dtype, casts_input=casts, sums_in_place=False)
    assert records(model, batch, name=strategy, dtype=dtype) == records(
        spec, batch, name=strategy, dtype=dtype
    )


@pytest.mark.parametrize(
    ("name", "dtype", "strategy"),
    one_in(2, itertools.product(
        ["gpt-tiny", "llama-tiny"], ["float32", "bfloat16"], ["ddp", "zero3", "fsdp2"]
    )),
)
def test_traced_with_the_kernels_of_cuda_it_peaks_where_the_family_does_there(
    name: str, dtype: Dtype, strategy: str
) -> None:
    spec, batch = family(name, "sdpa")
    model = traced(
        name, "sdpa", dtype=dtype, casts_input=STRATEGIES[strategy].casts_input, device="cuda"
    )
    assert model.devices == ("cuda",)
    expected = records(spec, batch, name=strategy, dtype=dtype, device="cuda")
    assert records(model, batch, name=strategy, dtype=dtype, device="cuda") == expected


@pytest.mark.filterwarnings("ignore:.*None of the inputs have requires_grad")
def test_kernels_of_cuda_are_found_inside_torch_and_in_what_checkpointing_runs_again() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = trace(Attention, [((2, 8, 16), "float32")], dtype="bfloat16", device="cuda")
    operators = [
        k.operator for module in model.lowered for k in (*module.forward.kernels, *module.recompute)
    ]
    assert operators.count("_scaled_dot_product_flash_attention") == 4
    assert operators.count("native_dropout") == 12
    assert not {"bernoulli_", "_safe_softmax"} & set(operators)
    assert nn.functional.dropout.__name__ == "dropout"


def test_a_trace_stands_for_the_devices_whose_kernels_it_shows() -> None:
    _, batch = family("gpt-tiny", "sdpa")
    with pytest.raises(TracedModelError, match='expected a trace with the kernels that torch '
                                               'takes on CUDA.*--device cuda'):
        lower(traced("gpt-tiny", "sdpa"), batch=batch, dtype="float32", device="cuda")
    assert traced("mlp-tiny", None).devices == ("cpu", "cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mlp-tiny", "mlp-uneven"])
def test_a_traced_mlp_is_the_family_event_for_event(name: str, dtype: Dtype) -> None:
    spec, batch = family(name, None)
    lowered = lower(spec, batch=batch, dtype=dtype, casts_input=dtype != "float32")
    assert events(traced(name, None, dtype=dtype, sums_in_place=False).lowered) == events(lowered)


@pytest.mark.parametrize(
    ("name", "attention"), [*FAMILIES, ("llama-tiny", "explicit"), ("llama-tiny", "sdpa")]
)
def test_flops_of_a_traced_family_are_those_of_the_family(name: str, attention: str) -> None:
    spec, batch = family(name, attention)

    def flops(lowered: tuple[LoweredModule, ...]) -> list[int]:
        return [
            sum(k.flops for m in lowered for k in getattr(m, side).kernels)
            for side in ("forward", "backward")
        ]

    assert flops(traced(name, attention).lowered) == flops(
        lower(spec, batch=batch, dtype="float32")
    )


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_gradients_are_added_in_place_where_torch_does_so_when_nobody_watches(name: str) -> None:
    spec, batch = family(name, "sdpa")
    loss = modules.build(spec, seed=0)(
        *batches.inputs(spec, batch, seed=0, rank=0, step=0, micro_batch=0)
    )
    with profile(acc_events=True) as profiled:
        loss.backward()
    in_place = sum(entry.count for entry in profiled.key_averages() if entry.key == "aten::add_")
    births = [
        sum(sign == "+" for sign, _ in events(traced(name, "sdpa", sums_in_place=chosen).lowered))
        for chosen in (False, True)
    ]
    assert births[0] - births[1] == in_place


def test_a_traced_model_is_the_same_after_a_file() -> None:
    model = traced("gpt-tiny", "sdpa", dtype="bfloat16")
    assert parse(dump(model).encode()) == model


# -- the module, its units and its inputs


class Plain(nn.Module):
    """Linear layers in a list, with a hook for what a test wants to do in forward."""

    def __init__(
        self, act: Callable[[Any, Tensor], Tensor] = lambda module, x: x, *, layers: int = 3
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.act(self, x)


X = (torch.ones(4, 8),)


def test_the_module_is_left_as_it_was() -> None:
    module = Plain()
    before = {fqn: (id(p), p.clone()) for fqn, p in module.named_parameters()}
    trace(module, X, dtype="bfloat16")
    assert all(p.dtype == torch.float32 for p in module.parameters())
    assert all(
        id(p) == before[fqn][0] and torch.equal(p, before[fqn][1])
        for fqn, p in module.named_parameters()
    )
    assert not any(p.grad is not None for p in module.parameters())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


def test_a_module_on_meta_and_a_function_that_makes_it_are_traced_alike() -> None:
    with torch.device("meta"):
        meta = Plain()
    assert (
        trace(meta, X)
        == trace(Plain, X)
        == trace(Plain(), [((4, 8), "float32")])
        == trace(Plain, {"x": X[0]})
    )


def test_the_dtype_is_by_default_that_of_the_module() -> None:
    half = Plain().to(torch.bfloat16)
    assert trace(half, X) == trace(half, X, dtype="bfloat16") == trace(Plain, X, dtype="bfloat16")
    assert (trace(half, X).dtype, trace(Plain, X).dtype, trace(Plain().half(), X).dtype) == (
        "bfloat16", "float32", "float16",
    )


def test_units_are_the_longest_list_or_those_that_are_chosen() -> None:
    def units(chosen: Any) -> list[str]:
        return [unit.fqn for unit in trace(Plain, X, units=chosen).units]

    assert units(None) == ["layers.0", "layers.1", "layers.2"]
    assert units(["layers.1"]) == [ROOT, "layers.1"]
    assert units(["layers.2", "layers.0"]) == [ROOT, "layers.0", "layers.2"]
    assert units(lambda fqn, module: fqn.endswith("2")) == [ROOT, "layers.2"]


def test_experts_are_no_units_though_they_are_more_than_the_layers() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([expert(x) for expert in self.experts]).mean(0)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Mixture() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum()

    assert [unit.fqn for unit in trace(Layers, X).units] == ["layers.0", "layers.1"]


def test_by_default_a_unit_has_parameters_and_is_called() -> None:
    """torch lists hold activations beside layers, and lists of what a stage calls one by one."""
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([
                nn.ModuleList([nn.Linear(8, 8), nn.ReLU()]), nn.Identity(), nn.Linear(8, 8),
                nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(8), "drop": nn.Dropout()})]),
            ])

        def forward(self, x: Tensor) -> Tensor:
            (linear, activate), same, other, ((names),) = self.stages
            return names["drop"](names["norm"](other(same(activate(linear(x)))))).sum()

    assert [unit.fqn for unit in trace(Stages, X).units] == [
        "stages.0.0", "stages.2", "stages.3.0.norm"
    ]


def test_a_module_left_whole_runs_with_a_warning_of_its_cost() -> None:
    with pytest.warns(
        UserWarning,
        match=r"Linear has no ModuleList, so the whole model is one unit.*288 B as they are",
    ):
        model = trace(lambda: nn.Linear(8, 8), X)
    assert [unit.fqn for unit in model.units] == [ROOT]


def test_buffers_inputs_and_what_forward_leaves_behind_are_told_apart() -> None:
    def caches(module: Any, x: Tensor) -> Tensor:
        if not hasattr(module, "cache"):
            module.cache = torch.zeros(8)
        return (x + module.cache + module.offset).sum()

    def make() -> nn.Module:
        module = Plain(caches)
        module.register_buffer("offset", torch.zeros(8, dtype=torch.float64))
        return module

    model = trace(make, X)
    assert (model.buffer_nbytes, model.input_nbytes) == (8 * 8 + 8 * 4, 4 * 8 * 4)


def test_what_checkpointing_runs_again_is_told_from_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, *, again: bool) -> None:
            super().__init__()
            self.again = again
            parts = (nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8)) for _ in range(3))
            self.layers = nn.ModuleList(parts)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
            return x

    plain, again = (trace(Checkpointed(again=chosen), X).lowered for chosen in (False, True))
    names = [
        [kernel.operator for kernel in module.recompute] for module in again if module.unit != ROOT
    ]
    # torch stops before the last, whose output nobody needs
    assert names == [["addmm", "gelu"]] * 3
    assert not any(module.recompute for module in plain)
    flops = [
        sum(k.flops for m in lowered for k in m.backward.kernels) for lowered in (plain, again)
    ]
    assert flops[0] == flops[1]


def test_values_that_follow_from_shapes_or_small_integer_inputs_may_decide() -> None:
    def decides(module: Any, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[0])
        return x.exp() if bool((places.diff() == 1).all()) else x

    taken = trace(lambda: Plain(decides), X)
    assert "exp" in {
        kernel.operator for module in taken.lowered for kernel in module.forward.kernels
    }


def test_values_that_are_the_users_own_are_not_changed() -> None:
    constant, mask = torch.zeros(4), torch.ones(4, dtype=torch.int64)

    def changes(module: Any, x: Tensor) -> Tensor:
        constant.view(4).add_(1)
        module.mask.mul_(2)
        return x * int(module.mask.sum())

    module = Plain(changes)
    module.register_buffer("mask", mask)
    lowered = trace(module, X).lowered
    kernels = [kernel for module in lowered for kernel in module.forward.kernels]
    assert "mul" in {kernel.operator for kernel in kernels}
    assert (constant.tolist(), mask.tolist()) == ([0.0] * 4, [1] * 4)


def test_a_model_of_4_billion_parameters_needs_no_memory() -> None:
    model = trace(Wide, [((1, 4096, 16384), "float32")], dtype="bfloat16")
    assert model.num_parameters == 4 * 4 * 16384 * 16384 + 4 * 4 * 16384


@pytest.mark.slow
def test_a_llama_of_70_billion_parameters_on_the_meta_device_is_traced_in_seconds() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    model = trace(
        module, {"input_ids": ((1, 4096), "int64"), "labels": ((1, 4096), "int64")},
        dtype="bfloat16",
    )
    assert (model.num_parameters, len(model.units)) == (70_553_706_496, 81)


class Wide(nn.Module):
    """4.3 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(4))) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# -- names of torch that may move


def test_fake_tensors_hold_nothing_and_real_ones_can_be_had_beside_them() -> None:
    with torch_private.fake_mode():
        fake = torch.empty(1 << 40)
        with torch_private.real_tensors():
            real = torch.ones(2)
    assert (torch_private.is_fake(fake), torch_private.is_fake(real)) == (True, False)


def test_a_view_is_known_as_one() -> None:
    tensor = torch.ones(2, 3)
    assert (torch_private.is_view(tensor.t()), torch_private.is_view(tensor)) == (True, False)
