"""Parameters that need a gradient and get none, as a pooler's: gathered with their unit, never
reduced. Held to torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.zreal.tracing.user_steps import DDP, FSDP1, FSDP2, HSDP, KEPT, Exact, differences
from zreal.tracing.trace import trace
from zsim.autograd.traced.traced_file import dump, parse, save
from zsim.cli.main import main
from zsim.errors import ZsimError

WIDTH = 16
PREFETCH = f"{FSDP2}, forward_prefetch = 1, backward_prefetch = 2"
ADAMW = 'name = "adamw", implementation = "foreach"'


class Block(nn.Module):
    """A linear, and beside it parameters of a kind: never read, read where nothing is kept, or read
    into what is dropped."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.beside = nn.Linear(WIDTH, 24) if kind else None
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        if self.kind == "dropped":
            self.beside(y)
        elif self.kind == "detached":
            y = y + self.beside(y).detach().sum(-1, keepdim=True)
        elif self.kind == "bias":
            y = y + torch.nn.functional.linear(y, self.beside.weight).sum(-1, keepdim=True)
        return y


class Aside(nn.Module):
    """Four blocks and a head; `kinds` says what each has beside its linear, the last one what the
    root has."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for kind in kinds[:4])
        self.head = Block(kinds[4])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().pow(2).mean()


class Pooled(nn.Module):
    """Layers, of which one whole is read into what is dropped, detached or thresholded: its unit
    runs and has no backward."""

    def __init__(self, pooled: int, how: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.pooled, self.how = pooled, how

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            y = layer(x)
            if index != self.pooled:
                x = x + y
            elif self.how == "detached":
                x = x + y.detach()
            elif self.how == "compared":
                x = x * (y > 0)
        return x.float().pow(2).mean()


KINDS = {
    "never read": ("unread", "", "", "unread", ""), "the root's": ("", "", "", "", "unread"),
    "dropped": ("", "dropped", "", "", "dropped"),
    "detached": ("detached", "", "detached", "", "detached"),
    "a bias": ("", "bias", "bias", "", ""),
}


def inputs() -> tuple[Tensor, ...]:
    return (torch.randn(6, WIDTH),)


@pytest.mark.parametrize(
    ("name", "strategy", "parameters"),
    [
        (name, (FSDP2, KEPT, HSDP)[index % 3], ("fp32", "bf16")[index % 2])
        for index, name in enumerate(KINDS)
    ],
)
def test_such_parameters_of_units_that_are_trained(
    name: str, strategy: str, parameters: str, exact: Exact
) -> None:
    exact(lambda: Aside(KINDS[name]), inputs, strategy, parameters=parameters)


@pytest.mark.parametrize(
    ("pooled", "how", "strategy", "accumulation"),
    [
        (0, "dropped", FSDP2, 1), (1, "detached", KEPT, 2), (3, "compared", HSDP, 1),
        (1, "compared", PREFETCH, 2), (3, "dropped", FSDP2, 2),
    ],
)
def test_whole_units_that_run_for_nothing(
    pooled: int, how: str, strategy: str, accumulation: int, exact: Exact
) -> None:
    exact(lambda: Pooled(pooled, how), inputs, strategy, accumulation=accumulation)


def test_no_optimizer_keeps_states_of_them(exact: Exact) -> None:
    """Nor are their gradients accumulated where another micro-batch follows."""
    exact(lambda: Aside(KINDS["a bias"]), inputs, FSDP2, optimizer=ADAMW, accumulation=2)


class Encoder(transformers.BertModel):
    """BERT with its pooler, of which the loss reads the last hidden state."""

    def __init__(self) -> None:
        sizes = {
            "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100,
            "max_position_embeddings": 32,
        }
        super().__init__(transformers.BertConfig(num_hidden_layers=4, **sizes))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(input_ids=ids).last_hidden_state.float().pow(2).mean()


def test_the_pooler_of_a_bert_that_no_loss_reads(exact: Exact) -> None:
    def ids() -> tuple[Tensor, ...]:
        return (torch.randint(0, 100, (2, 16)),)

    exact(Encoder, ids, FSDP2, layers="encoder.layer")


def test_a_file_says_so_and_keeps_it() -> None:
    model = trace(lambda: Aside(KINDS["a bias"]), inputs())
    assert model.not_in_loss == ("layers.1.beside.bias", "layers.2.beside.bias")
    assert parse(dump(model).encode()) == model
    lies = dump(model).replace(
        '{"fqn":"layers.0.linear.bias","shape":[16]}',
        '{"fqn":"layers.0.linear.bias","shape":[16],"in_loss":false}',
    )
    with pytest.raises(
        ZsimError,
        match=r"layers\.0\.linear\.bias: expected no gradient of a parameter that is frozen or not in the loss",  # noqa: E501
    ):
        parse(lies.encode())


@pytest.mark.parametrize(
    ("strategy", "says"),
    [(DDP, "DDP waits for a gradient"), (FSDP1, "the loss does not depend on layers.0.beside")],
)
def test_strategies_that_need_every_gradient_refuse_it_by_name(
    strategy: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(ZsimError, match=f"model.traced: .*{says}"):
        differences(lambda: Aside(KINDS["never read"]), inputs, strategy, tmp_path, ranks=2)


class Empty(nn.Module):
    """Layers that hold a parameter without elements, frozen or not, and read it or not."""

    def __init__(self, shape: tuple[int, ...], *, trained: bool, read: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for layer in self.layers:
            layer.empty = nn.Parameter(torch.zeros(shape), requires_grad=trained)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum() + (self.layers[0].empty.sum() if self.read else 0)


@pytest.mark.parametrize(("shape", "trained"), [((0,), True), ((0, WIDTH), False)])
def test_parameters_without_elements(shape: tuple[int, ...], trained: bool, exact: Exact) -> None:
    def make() -> nn.Module:
        return Empty(shape, trained=trained, read=False)

    exact(make, inputs, FSDP2)


def test_an_empty_parameter_that_is_trained_is_refused_as_that() -> None:
    with pytest.raises(
        ZsimError,
        match=r"layers.0.empty: expected elements in what is trained, found an empty parameter; freeze it",  # noqa: E501
    ):
        trace(lambda: Empty((0, 3), trained=True, read=True), inputs(), units=[])


def test_fit_names_the_reason_why_ddp_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(trace(lambda: Aside(KINDS["dropped"]), inputs(), name="aside"), tmp_path / "aside.json")
    text = (
        'model = { traced = "aside.json" }\nbatch = { micro_batch = 6 }\ncluster = { preset = '
        '"cpu-gloo", ranks = 2 }\n'
    )
    (tmp_path / "aside.toml").write_text(f'{text}strategy = {{ name = "fsdp2" }}\n')
    assert main(["fit", str(tmp_path / "aside.toml")]) == 0
    said = " ".join("".join(capsys.readouterr()).split())
    assert "ddp cannot be: model.traced: DDP waits for a gradient of each parameter" in said
    assert "find_unused_parameters" not in said
    assert main(["show", str(tmp_path / "aside.toml")]) == 0
    assert "description" not in "".join(capsys.readouterr())
