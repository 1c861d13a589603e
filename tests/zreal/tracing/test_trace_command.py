"""`zsim trace` makes models of any kind of transformers' causal models, and of the user's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zsim import load, plan_for, simulate
from zsim.autograd.traced import traced_file
from zsim.cli.main import main
from zsim.models.training_options import Batch

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128,
}
KINDS = {
    "gemma3_text": {"head_dim": 16}, "mixtral": {"num_local_experts": 4},
}
SCENARIO = """\
model = { SOURCE }
batch = { micro_batch = 2, sequence_length = 32 }
cluster = { preset = "dgx-h100" }
strategy = { name = "fsdp2" }
precision = { parameters = "bf16", reduce = "fp32" }
"""
MODULE = """\
import torch

class TwoLayers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.sum()

def fails():
    raise KeyError("no such size")

class Lone(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.only = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.only(x).sum()

NUMBER = 3

def build():
    return {"module": Lone(), "inputs": [torch.ones(2, 8)]}
"""


def config(folder: Path, kind: str, **sizes: object) -> str:
    """The name of a small config.json as `zsim trace` takes it."""
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind} | SIZES | sizes))
    return f"hf:{file}"


def run(folder: Path, source: str) -> object:
    """The simulated Run of a scenario with this model."""
    (folder / "scenario.toml").write_text(SCENARIO.replace("SOURCE", source))
    return simulate(load(folder / "scenario.toml"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_beyond_those_that_are_simulated_is_traced_and_runs(tmp_path, kind, capsys):
    transformers = pytest.importorskip("transformers")
    name, out = config(tmp_path, kind, **KINDS[kind]), str(tmp_path / "model.json")
    arguments = [name, "--input", "2x32", "--dtype", "bf16", "-o", out, "--json"]
    assert main(["trace", *arguments]) == 0
    told = json.loads(capsys.readouterr().out)
    with __import__("torch").device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(name.removeprefix("hf:"))
        )
    assert told["num_parameters"] == sum(p.numel() for p in made.parameters())
    assert told["units"] == ["root", "model.layers.0", "model.layers.1"]
    traced = run(tmp_path, 'traced = "model.json"')
    assert traced.collectives["all_gather"].count == 5
    assert traced.peak_memory > 0


def test_a_trace_says_the_same_as_the_kind_that_is_simulated(tmp_path):
    pytest.importorskip("transformers")
    name, out = config(tmp_path, "llama"), str(tmp_path / "model.json")
    assert main(["trace", name, "--input", "2x32", "--dtype", "bf16", "-o", out]) == 0
    traced, own = run(tmp_path, 'traced = "model.json"'), run(
        tmp_path, 'huggingface = "config.json"'
    )
    assert traced.peak_memory == own.peak_memory
    assert traced.collectives == own.collectives


def test_a_module_of_the_users_own_is_imported_from_where_the_command_runs(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("torch")
    (tmp_path / "mine_of_trace.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["--input", "x=4x8:float32", "--checkpointing", "-o", "model.json"]
    assert main(["trace", "mine_of_trace:TwoLayers", *arguments]) == 0
    assert "TwoLayers: 144 parameters in 2 units" in capsys.readouterr().out
    plain = [each for each in arguments if each != "--checkpointing"]
    assert main(["trace", "mine_of_trace:Lone", *plain]) == 0
    said = capsys.readouterr().err
    assert "\nnote: Lone has no ModuleList" in said
    assert "Warning" not in said
    assert main(["trace", "mine_of_trace:fails", *arguments]) == 2
    assert "KeyError" in capsys.readouterr().err
    assert main(["trace", "mine_of_trace:Nothing", *arguments]) == 2
    assert capsys.readouterr().err.count("has no attribute 'Nothing'") == 1
    assert main(["trace", "mine_of_trace:NUMBER", *arguments]) == 2
    assert "expected a class or function without arguments, found int" in capsys.readouterr().err
    assert main(["trace", "mine_of_trace:build", *arguments]) == 2
    assert "expected a torch.nn.Module, found dict; name its class" in capsys.readouterr().err
    wrong = ["--input", "x=4x9:fp32", "-o", "model.json"]
    assert main(["trace", "mine_of_trace:TwoLayers", *wrong]) == 2
    line = 1 + MODULE.splitlines().index("            x = layer(x).relu()")
    assert f"mine_of_trace.py, line {line}, in forward)" in capsys.readouterr().err


def test_one_file_has_several_sizes_each_as_a_trace_of_its_own(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    (tmp_path / "mine_of_sizes.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    several = ["--input", "x=BxSx8:float32", "--micro-batch", "1,2,3", "--sequence-length", "5,32"]
    assert main(["trace", "mine_of_sizes:TwoLayers", *several, "-o", "model.json", "--json"]) == 0
    sizes = [[b, s] for b in (1, 2, 3) for s in (5, 32)]
    assert json.loads(capsys.readouterr().out)["sizes"] == sizes
    for b, s in sizes:
        alone = ["--input", "x=BxSx8:float32", "--micro-batch", f"{b}", "--sequence-length", f"{s}"]
        assert main(["trace", "mine_of_sizes:TwoLayers", *alone, "-o", "alone.json"]) == 0
        asked = traced_file.load("model.json", batch=Batch(micro_batch=b, sequence_length=s))
        assert traced_file.dump(asked) == Path("alone.json").read_text()
    (tmp_path / "scenario.toml").write_text(
        SCENARIO.replace("SOURCE", 'traced = "model.json"').replace('"bf16"', '"fp32"')
    )
    planned = plan_for(load("scenario.toml"), micro_batches=(1, 2, 4), global_batch=96)
    assert {option.scenario.batch.micro_batch for option in planned.options} == {1, 2}
    assert any("found 4 x 32; name it in --micro-batch" in reason for _, reason in planned.refused)


def test_units_are_named_by_fqn_or_by_a_star_for_all_of_a_list(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    (tmp_path / "mine_of_units.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def units(module: str, names: str) -> list[str]:
        arguments = ["--input", "x=4x8:float32", "-o", "model.json", "--json"]
        assert main(["trace", f"mine_of_units:{module}", *arguments, "--units", names]) == 0
        return json.loads(capsys.readouterr().out)["units"]

    assert units("TwoLayers", "layers.1") == ["root", "layers.1"]
    assert units("TwoLayers", "layers.*") == ["layers.0", "layers.1"]
    assert units("Lone", "only") == ["only"]
    assert units("TwoLayers", "none") == ["root"]
    assert main(["trace", "mine_of_units:TwoLayers", "--input", "4x8:float32", "-o", "m.json",
                 "--units", "layer.1"]) == 2
    assert "layer.1: expected the fqn of a module in the model" in (said := capsys.readouterr().err)
    assert "did you mean layers.1?" in said


def test_new_takes_a_traced_models_batch_and_asks_among_its_lengths(
    tmp_path, monkeypatch, capsys
):
    pytest.importorskip("torch")
    (tmp_path / "mine_of_new.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = ["--input", "x=BxSx8:float32", "--micro-batch", "2,3", "--sequence-length"]
    assert main(["trace", "mine_of_new:TwoLayers", *asked, "5,32", "-o", "two.json"]) == 0
    assert main(["trace", "mine_of_new:TwoLayers", *asked, "5", "-o", "one.json"]) == 0
    answers = iter(["two.json\n", "cpu-gloo\n", "2\n", "20\n", "32\n", "ddp\n"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.readline", lambda: next(answers), raising=False)
    assert main(["new", "-o", "a.toml"]) == 0
    assert "Tokens of a sequence? Traced are 5, 32. [5]" in capsys.readouterr().err
    batch = load("a.toml").batch
    assert (batch.micro_batch, batch.sequence_length) == (2, 32)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    options = ["--cluster", "cpu-gloo", "--ranks", "2", "--strategy", "ddp"]
    assert main(["new", "--model", "one.json", *options, "-o", "b.toml"]) == 0
    assert load("b.toml").batch.sequence_length == 5


@pytest.mark.parametrize(("arguments", "said"), [
    (["hf:nowhere.json", "--input", "BxS"], "--micro-batch: expected sizes of B in the inputs"),
    (["hf:nowhere.json", "--micro-batch", "1,2"], "--input: expected B in an input's shape"),
    (["mine_of_trace"], "expected mymodel:MyModel, or hf:config.json"),
    (["hf:nowhere.json"], "expected a config.json, found no such file"),
    (["no_such_module:M"], "ModuleNotFoundError"),
    (["hf:nowhere.json", "--input", "2y3"], "--input: expected sizes and a dtype"),
    (["hf:nowhere.json", "--input", "0x3"], "--input: expected sizes and a dtype"),
    (["hf:nowhere.json", "--input", "2x3:complex64"], "--input: expected sizes and a dtype"),
])
def test_what_cannot_be_traced_is_named(tmp_path, arguments, said, capsys):
    pytest.importorskip("transformers")
    inputs = [] if "--input" in arguments else ["--input", "2x3"]
    out = str(tmp_path / "model.json")
    assert main(["trace", *arguments, *inputs, "-o", out]) == 2
    assert said in capsys.readouterr().err
    assert not Path(out).exists()
