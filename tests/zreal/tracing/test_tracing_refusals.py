"""Refusals of modules that cannot be traced: each by name, never counted as zero bytes."""

from __future__ import annotations

import logging
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zreal import torch_private
from zreal.tracing.errors import UntraceableError
from zreal.tracing.storage_log import StorageLog
from zreal.tracing.trace import trace
from zreal.tracing.units.unit_hooks import Boundaries, Visit

X = (torch.ones(4, 8),)


class Plain(nn.Module):
    """Linear layers in a list, and what a test wants to do at the end of forward."""

    def __init__(self, act: Callable[[Any, Tensor], Any] = lambda module, x: x) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.first = nn.Linear(8, 8)
        self.act = act

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.act(self, x)


@torch.library.custom_op("zsim_test::unknown", mutates_args=())
def unknown(x: Tensor) -> Tensor:
    return x.clone()


class Looked(nn.Module):
    """A table of which rows are looked up, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 8, sparse=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x))


def tied() -> nn.Module:
    module = Plain()
    module.layers[2].weight = module.layers[0].weight
    return module


def cast(*, bias: torch.dtype) -> Callable[[], nn.Module]:
    """Made with one parameter in another dtype, as under FakeTensorMode none can be changed."""

    def make() -> nn.Module:
        module = Plain()
        module.layers[1].bias = nn.Parameter(
            torch.zeros(8, dtype=bias), requires_grad=bias != torch.int8
        )
        return module

    return make


def keeps(module: Any, x: Tensor) -> Tensor:
    module.last = x.detach() * 2
    return x


@pytest.mark.parametrize(("make", "units", "message"), [
    (lambda: Plain(lambda m, x: x * x.sum().item()), None,
     "aten::_local_scalar_dense: expected operators whose outcome"),
    (lambda: Plain(lambda m, x: x if x.sum() > 0 else -x), None,
     "expected operators whose outcome needs no data"),
    (lambda: Plain(lambda m, x: x[x > 0]), None,
     "expected shapes that follow from those of the inputs"),
    (lambda: Plain(lambda m, x: unknown(x)), None,
     "zsim_test::unknown: expected operators that FakeTensorMode knows"),
    (lambda: Plain(lambda m, x: x @ torch.ones(3, 3)), None,
     "aten::mm: expected operators that run on these inputs"),
    (lambda: Plain(lambda m, x: {}["no"]), None,
     "root: expected a module that runs on these inputs, found KeyError"),
    (lambda: Plain(lambda m, x: (x, x)), None,
     "loss: expected a tensor, or an output with .loss, found an output of type tuple"),
    (lambda: Plain(lambda m, x: x.sum().detach()), None,
     "loss: expected one number that depends on the parameters, found one without a gradient"),
    (lambda: torch.jit.script(nn.Linear(8, 8)), None,
     "RecursiveScriptModule: expected modules of Python, which hooks can watch"),
    (lambda: Plain(keeps), None,
     "mul: expected memory that is free again after backward, found 128 B"),
    (lambda: nn.ReLU(), None, "ReLU: expected a module with parameters, found none"),
    (lambda: Plain(), ["layers.7"],
     "layers.7: expected the fqn of a module in the model, found none of that name"),
    (lambda: Plain(), ["layers", "layers.0", "layers.1", "layers.2"],
     "layers: expected a unit with parameters of its own, found none"),
    (lambda: Plain(), ["layers", "layers.0"],
     "layers.0: expected units that run one after another, or in the one they are part "
     "of, found a run of it inside root"),
    (lambda: Plain(), ["layers"],
     "layers: expected every unit to run in forward, found a unit that did not run"),
    (tied, None,
     "weight: expected a parameter of one unit, found one tied between layers.0 "
     "and layers.2"),
    (tied, ["layers.0"],
     "layers.2.weight: expected a parameter of one unit, found one tied between layers.0 "
     "and root"),
    (lambda: Plain().requires_grad_(False), None,
     "loss: expected one number that depends on the parameters, found one without a gradient"),
    (lambda: nn.Sequential(OrderedDict({"a b": nn.Linear(8, 8)})), [],
     "'a b.weight': expected a name without blanks"),
])
@pytest.mark.filterwarnings("ignore:.*the whole model is one unit")
def test_what_cannot_be_traced_is_refused_by_name(
    make: Callable[[], nn.Module], units: Any, message: str
) -> None:
    with pytest.raises(UntraceableError, match=re.escape(message)):
        trace(make, X, units=units)


def of_another_width(module: Any, x: Tensor) -> Tensor:
    return x * torch.ones(3)


@pytest.mark.parametrize(
    "make", [lambda: Plain(of_another_width), lambda: of_another_width(None, torch.ones(4, 8))]
)
def test_a_refusal_is_all_that_is_said_and_torchs_log_is_as_it_was(
    make: Callable[[], nn.Module], capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would log the traceback of an operator that fails on fake tensors, besides raising it,
    in some thirty lines."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(
        log, "handlers", [logging.StreamHandler(sys.stderr)]
    )  # torch's own writes to the stderr of its import
    with pytest.raises(UntraceableError, match="Attempting to broadcast a dimension of length 3"):
        trace(make, X, units=["layers.0"])
    assert capfd.readouterr().err == ""
    assert log.filters == []
    with torch_private.fake_mode(), pytest.raises(RuntimeError, match="Attempting to broadcast"):
        of_another_width(None, torch.ones(4, 8))
    assert "failed while attempting to run meta for aten.mul.Tensor" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*the whole model is one unit")
def test_sparse_gradients_are_refused_with_the_operator_that_makes_them_and_what_to_do() -> None:
    message = (
        "^aten::_sparse_coo_tensor_with_dims_and_tensors: expected dense tensors, .* found one of "
        "layout sparse_coo; .* not modelled: use sparse=False"
    )
    with pytest.raises(UntraceableError, match=message):
        trace(Looked, [((4, 6), "int64")])


@pytest.mark.parametrize(("module", "inputs", "options", "message"), [
    (Plain, X, {"dtype": "bf16"},
     "dtype: expected float32, bfloat16 or float16, found 'bf16'"),
    (Plain, X, {"device": "tpu"}, "device: expected cpu or cuda, found 'tpu'"),
    (Plain().double(), X, {},
     "layers.0.weight: expected parameters in float32, "
     "bfloat16 or float16, found float64; cast"),
    (Plain().double(), X, {"dtype": "float32"},
     "layers.0.weight: expected parameters in float32, found float64; cast the"),
    (Plain().bfloat16(), X, {"dtype": "float32"},
     "found bfloat16; cast the module, or ask for bfloat16: precision.parameters of a scenario"),
    (Plain().bfloat16(), X, {"dtype": "float16"},
     "expected parameters in float16 or float32, found bfloat16"),
    *(
        (
            cast(bias=bias), X, {"dtype": dtype},
            f"layers.1.bias: expected parameters of one "
            f"dtype, as most are float32, found {dtype_and_remedy}",
        )
        for bias, dtype_and_remedy in (
            (torch.bfloat16, "bfloat16; mixed dtypes are not modelled: cast the module first"),
            (torch.int8, "int8; mixed dtypes are not modelled: make it a buffer"),
            (torch.complex64, "complex64; mixed dtypes are not modelled: make it a buffer"),
        )
        for dtype in (None, "float32", "bfloat16")
    ),
    (lambda: {}["no"], X, {}, "found KeyError: 'no'; make the module beforehand"),
    (lambda: 3, X, {},
     "module: expected a module, or a function without arguments that "
     "makes one, found one that makes int"),
    (nn.Linear, X, {},
     "required positional arguments: 'in_features' and 'out_features'; "
     "wrap it in a function without arguments, as lambda: MyModel(config)"),
    (3, X, {},
     "module: expected a module, or a function without arguments that makes one, found int"),
    (Plain, [((-1, 8), "float32")], {},
     "inputs[0]: expected a shape of whole numbers, none below 0, found (-1, 8)"),
    (Plain, [(("a", 8), "float32")], {},
     "inputs[0]: expected a shape of whole numbers, none below 0, found ('a', 8)"),
    (lambda: nn.LSTM(8, 8), [((3, 4, 8), "float32")], {},
     "a recurrent layer: expected operators whose memory follows from"),
    (lambda: nn.GRU(8, 8), [((3, 4, 8), "float32")], {"device": "cuda"},
     "a recurrent layer: expected operators whose memory"),
    (lambda: nn.EmbeddingBag(8, 8), [((3, 4), "int64")], {},
     "an embedding bag: expected operators whose memory follows from their shapes"),
])
@pytest.mark.filterwarnings("ignore:.*the whole model is one unit")
def test_what_is_given_wrongly_is_refused_by_name(
    module: Any, inputs: Any, options: Any, message: str
) -> None:
    with pytest.raises(UntraceableError, match=re.escape(message)):
        trace(
            module, inputs, **options,
            loss=lambda output: (output[0] if isinstance(output, tuple) else output).sum(),
        )


def test_a_unit_that_is_recomputed_together_with_more_is_refused() -> None:
    class Checkpointed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(
                    lambda y, layer=layer: layer(y).sin(), self.first(x), use_reentrant=False
                )
            return x

    with pytest.raises(
        UntraceableError, match=r"^layers.2: expected a unit that is recomputed in its own backward"
    ):
        trace(Checkpointed, X)


def test_gradients_taken_by_forward_through_a_unit_are_refused_and_within_one_traced() -> None:
    class Penalized(Plain):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layers[0](x)
            (slope,) = torch.autograd.grad((hidden**2).sum(), hidden, create_graph=True)
            return self.layers[1](slope)

    expected = (
        "^layers.0: expected a unit whose gradients are taken when forward is over.*"
        "no units make the whole model one"
    )
    with pytest.raises(UntraceableError, match=expected):
        trace(Penalized, X, units=["layers.0", "layers.1"])
    assert trace(Penalized, X, units=[]).units


def test_a_backward_that_leaves_the_order_of_units_is_refused() -> None:
    boundaries = Boundaries(StorageLog(), model=nn.Identity(), units={}, dtype=None)
    visits = [
        visit for index in range(2)
        for visit in (Visit(f"layers.{index}", begins=True, needs_gradient=True), Visit("root"))
    ]
    boundaries.visits += visits
    boundaries.begin_backward(torch.ones(1, requires_grad=True).sum())
    boundaries.visits[1:] = visits  # as if their hooks were in its graph
    with pytest.raises(
        UntraceableError,
        match=r"^layers.0: expected units whose backward runs in the reverse order",
    ):
        boundaries.gradient_arrives(1, torch.ones(1))


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning", "ignore:.*the whole model is one "
                                                               "unit")
def test_a_lazy_module_is_traced_once_it_has_run_and_refused_before() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 4))

    for given in (make, make()):
        with pytest.raises(
            UntraceableError,
            match=r"run it on a batch so that its lazy parameters get their shapes, and give it itself$",  # noqa: E501
        ):
            trace(given, X, loss=torch.sum)
    module = make()
    module(*X)
    assert trace(module, X, loss=torch.sum).num_parameters == 8 * 8 + 8 + 2 * 8 + 8 * 4 + 4


@pytest.mark.filterwarnings("ignore:.*the whole model is one unit")
def test_a_cast_in_the_function_is_taken_or_refused_with_what_to_do() -> None:
    """torch swaps fake parameters where nothing else refers to them, and what does is up to what
    ran before."""
    try:
        assert trace(lambda: Plain().to(torch.bfloat16), X).dtype == "bfloat16"
    except UntraceableError as error:
        assert (
            "leave the cast (.to, .bfloat16 and the like) out of it and give dtype=, or make the "
            "module beforehand"
            in str(error)
        )


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_a_norm_that_keeps_outputs_in_its_module_is_refused_with_the_one_that_does_not(
    norm: str
) -> None:
    def make(utilities: Any) -> nn.Module:
        return nn.Sequential(getattr(utilities, norm)(nn.Linear(8, 8)), nn.Linear(8, 4))

    says = r"as torch\.nn\.utils\.weight_norm and spectral_norm do, for which torch\.nn\.utils\.parametrizations has others"  # noqa: E501
    with pytest.raises(UntraceableError, match=says):
        trace(lambda: make(nn.utils), X, units=["0"], loss=torch.sum)
    assert trace(lambda: make(nn.utils.parametrizations), X, units=["0"], loss=torch.sum).modules
