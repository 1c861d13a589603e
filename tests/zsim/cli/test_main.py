"""The command line: exit codes, one JSON object on standard output, words instead of tracebacks."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.cli.main import main
from zsim.io.system.signals import Terminated
from zsim.io.units import format_time
from zsim.ir.run import Numerics, RankRun, RunRecord
from zsim.models.families import load_preset, presets
from zsim.runs import registry, saved
from zsim.runs.backend import Capabilities, RunOptions
from zsim.scenario.scenario import Scenario

FSDP2 = str(ROOT / "scenarios/parity/fsdp2-mlp-4.toml")
ZERO3 = str(ROOT / "scenarios/parity/zero3-mlp-4.toml")
RUN_KEYS = {
    "schema_version", "scenario", "backend", "world_size", "step_time_ns",
    "tokens_per_second_per_gpu", "mfu", "hfu", "compute_ns", "communication_ns",
    "exposed_communication_ns", "bytes_sent_per_rank", "collectives", "step_time_band_ns",
    "peak_memory_bytes", "peak_first_step_bytes", "peak_memory_by_kind", "expectations",
    "provenance",
}


class Echo:
    """A backend that measures what the simulator predicts, with numerics, and `extra` bytes more at
    the steady peak."""

    name = "echo"
    extra = 0

    def capabilities(self) -> Capabilities:
        return Capabilities(memory=True, numerics=True, time=False, device="cpu")

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        run = registry.SimBackend("cpu").run(
            scenario, options=replace(options, all_ranks=options.ranks is None)
        )
        ranks = tuple(self.measured(rank, scenario) for rank in run.ranks)
        return replace(
            run, backend=self.name, interpreter="observer", representatives=(), ranks=ranks
        )

    def measured(self, rank: RankRun, scenario: Scenario) -> RankRun:
        steady = rank.phases["steady"]
        memory = replace(
            steady.memory, peak_bytes=steady.memory.peak_bytes + self.extra, by_kind={}
        )
        losses = (1.0, 0.9, 0.8)
        numerics = Numerics(
            losses=losses, largest_relative_difference=0.0, largest_gradient_difference=0.0,
            steps=3, dtype=scenario.precision.narrowest, reference_losses=losses,
        )
        return replace(
            rank, phases={**rank.phases, "steady": replace(steady, memory=memory)},
            numerics=numerics,
        )


class Fat(Echo):
    """A backend that measures far more memory than is predicted."""

    name = "fat"
    extra = 10**9


class Thin(Echo):
    """A backend whose steady peak is below what its steady step begins with."""

    name = "thin"
    extra = -(10**9)


class Broken(Echo):
    """A backend that breaks down in a way of its own."""

    name = "broken"

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        raise KeyError("flurb")


class Interrupted(Echo):
    """A backend during whose run a signal ends the command."""

    name = "interrupted"
    by: type[BaseException] = KeyboardInterrupt

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        raise self.by


@pytest.fixture(autouse=True)
def offered(monkeypatch):
    """The backends of this file, and one whose package is missing."""
    values = {
        name.lower(): f"{__name__}:{name}"
        for name in ("Echo", "Fat", "Thin", "Broken", "Interrupted")
    }
    values["gone"] = "a_package_that_is_not_there:Backend"
    entries = [
        EntryPoint(name=name, value=value, group=registry.GROUP) for name, value in values.items()
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Echo.__module__])


def output(capsys, *arguments: str, code: int = 0):
    """The one JSON object that the command prints on standard output."""
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_run_prints_one_object_with_the_stable_keys(capsys):
    printed = output(capsys, "run", ZERO3)
    assert set(printed) >= RUN_KEYS
    about = (printed["scenario"], printed["backend"], printed["world_size"])
    assert about == ("zero3-mlp-4", "sim", 4)
    assert printed["collectives"]["all_gather"]["count"] == 8
    assert printed["expectations"][0] == {
        "name": "all_gathers", "expected": "8", "found": "8", "ok": True
    }
    assert sum(printed["peak_memory_by_kind"].values()) == printed["peak_memory_bytes"]


def test_several_scenarios_and_folders_print_runs(capsys):
    printed = output(capsys, "run", FSDP2, str(ROOT / "scenarios/memory"))
    assert set(printed) == {"schema_version", "runs"}
    assert printed["runs"][0]["scenario"] == "fsdp2-mlp-4"
    assert len(printed["runs"]) > 3


def test_a_failed_expectation_exits_1(capsys, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(Path(ZERO3).read_text().replace("all_gathers = 8", "all_gathers = 9"))
    printed = output(capsys, "run", str(file), code=1)
    assert printed["expectations"][0]["ok"] is False
    assert main(["run", str(file)]) == 1
    assert "FAILED all_gathers: 9, found 8" in capsys.readouterr().out


def test_validate_compares_and_exits_0_when_all_agrees(capsys):
    printed = output(capsys, "validate", FSDP2, "--against", "echo")
    assert printed["ok"] is True
    assert [(check["name"], check["status"]) for check in printed["checks"]] == [
        ("collective order", "ok"), ("bytes", "ok"), ("groups", "unsupported"),
        ("peak memory, construction", "ok"), ("peak memory, first", "ok"),
        ("peak memory, steady", "ok"), ("memory at rest", "ok"), ("memory of parts", "ok"),
        ("memory by kind", "ok"), ("numerics", "ok"), ("step time", "unsupported"),
        ("exposed communication", "unsupported"), ("time by unit", "unsupported"),
    ]
    assert set(printed["checks"][0]) == {
        "name", "status", "predicted", "measured", "relative_error", "detail", "band_ns"
    }


def test_validate_prints_how_exactly_each_thing_agrees(capsys):
    assert main(["validate", FSDP2, "--against", "echo"]) == 0
    text = capsys.readouterr().out
    assert "exact    " in text
    assert text.splitlines()[-1].startswith("  agrees in order, bytes")


@pytest.mark.quality
def test_validate_exits_1_when_memory_differs(capsys):
    printed = output(capsys, "validate", FSDP2, "--against", "fat", code=1)
    assert [check["name"] for check in printed["checks"] if check["status"] == "failed"] == [
        "peak memory, steady"
    ]


@pytest.mark.quality
@pytest.mark.parametrize("command", [["run", "--backend"], ["validate", "--against"]])
def test_a_run_that_breaks_a_law_is_refused(capsys, command):
    printed = output(capsys, command[0], FSDP2, command[1], "thin", code=1)
    assert "peaks are the highest points: rank 0: steady: a peak of" in printed["error"][0]


def test_validate_says_that_it_replaced_the_cluster(capsys):
    scenario = str(ROOT / "scenarios/published/llama-3-8b-8-h100.toml")
    assert (
        "dgx-h100 replaced" in output(capsys, "validate", scenario, "--against", "echo")["replaced"]
    )


def test_saved_runs_compare(capsys, tmp_path):
    assert main(["run", FSDP2, "--save", str(tmp_path / "a.json")]) == 0
    assert main(["run", FSDP2, "--backend", "echo", "--save", str(tmp_path / "b.json")]) == 0
    capsys.readouterr()
    assert (
        output(capsys, "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"))["ok"] is True
    )
    assert saved.load(tmp_path / "b.json").provenance["sees"] == "memory numerics"


def test_one_scenario_that_is_given_twice_is_run_once_and_still_among_runs(capsys):
    assert [run["scenario"] for run in output(capsys, "run", FSDP2, FSDP2)["runs"]] == [
        "fsdp2-mlp-4"
    ]


def test_several_runs_are_saved_into_a_folder(tmp_path):
    assert main(["run", FSDP2, ZERO3, "--save", str(tmp_path / "runs")]) == 0
    assert sorted(file.name for file in (tmp_path / "runs").iterdir()) == [
        "fsdp2-mlp-4.json", "zero3-mlp-4.json"
    ]


def test_a_trace_is_written(tmp_path, capsys):
    assert main(["run", FSDP2, "--trace", str(tmp_path / "t.json")]) == 0
    note = f"wrote {tmp_path / 't.json'}; open it in ui.perfetto.dev"
    assert note in capsys.readouterr().err.splitlines()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize("what", ["models", "clusters", "devices", "strategies", "backends"])
def test_list_names_what_there_is(capsys, what):
    printed = output(capsys, "list", what)
    assert all(set(row) == {"name", "about"} for row in printed[what])
    assert printed[what]


def test_list_scenarios_describes_those_below_the_folder(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = {row["name"] for row in output(capsys, "list")["scenarios"]}
    assert "scenarios/parity/zero3-mlp-4.toml" in names


def test_list_outside_a_checkout_names_the_scenarios_that_come_with_zsim(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    names = [row["name"] for row in output(capsys, "list", "scenarios")["scenarios"]]
    assert len(names) == len([*(ROOT / "scenarios").rglob("*.toml")])
    small = next(name for name in names if name.endswith("/parity/zero3-mlp-4.toml"))
    assert main(["run", small]) == 0
    assert main(["run", "nope.toml"]) == 2
    assert "`zsim new` makes one" in capsys.readouterr().err


def test_list_schema_is_the_json_schema(capsys):
    assert main(["list", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        (ROOT / "scenarios/schema.json").read_text()
    )


def test_listed_models_say_at_which_sequence_length_their_parameters_count(capsys):
    """Only models whose number of parameters follows from the scenario's own length say so."""
    assert main(["list", "models"]) == 0
    listed = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines()[1:])
    counted = "at a sequence length of 2,048, whose positions are learned; "
    for name in presets():
        here, there = (
            load_preset(name, sequence_length=length).num_parameters for length in (2048, 64)
        )
        assert listed[name].startswith(
            f"{here:,} parameters {counted}" if here != there else f"{here:,} parameters; "
        )


def test_a_predicted_time_is_printed_with_its_band(capsys):
    band = output(capsys, "run", FSDP2)["step_time_band_ns"]
    assert main(["run", FSDP2]) == 0
    text = capsys.readouterr().out
    assert f"({format_time(band[0])} to {format_time(band[1])}, assumed)" in text


def test_show_prints_the_mesh_and_the_memory(capsys):
    assert main(["show", ZERO3, "--memory"]) == 0
    text = capsys.readouterr().out
    assert "dp_shard=4" in text
    assert "peak" in text
    assert output(capsys, "show", ZERO3, "--memory")["memory"]


def test_show_prints_the_routes_of_each_group_that_communicates(capsys, tmp_path):
    path = tmp_path / "routes.toml"
    path.write_text("""
model = { preset = "mlp-tiny" }
batch = { micro_batch = 1 }
cluster = { preset = "p4d", nodes = 3 }
faults = [{ kind = "slow_link", node = 1, nic = 3, bandwidth = "5 GB/s" }]
strategy = { name = "hsdp", dp_replicate = 2, dp_shard = 12 }
""")
    shown = output(capsys, "show", str(path))["routes"]
    assert [(way["group"], way["num_ranks"], len(way["hops"])) for way in shown] == [
        ("dp_shard", 12, 2), ("dp_replicate", 2, 1)
    ]
    assert main(["show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    mesh = next(at for at, line in enumerate(lines) if line.startswith("  mesh"))
    assert lines[mesh + 1 : mesh + 4] == [
        "    dp_shard      node1.gpu4 → switch → gpu5, fabric 240.0 GB/s, 3.400 us",
        "                  node1.gpu6 → pcie3 → nic3 → rail3 → node2.nic3 → pcie3 → gpu6, "
        "rail 5.0 GB/s (ring 10.0 GB/s), 14.000 us",
        "    dp_replicate  gpu2 → switch → gpu6 → pcie3 → nic3 → rail3 → node1.nic3 → pcie3 → "
        "gpu6, rail 5.0 GB/s (ring 2.5 GB/s), 17.400 us",
    ]


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["rnu", FSDP2], 2, "did you mean run?"),
    (["list", "models", "clusters"], 2, "unknown argument clusters; one at a time"),
    (["run", FSDP2, "--al-ranks"], 2, "did you mean --all-ranks?"),
    (["run", FSDP2, "--qq"], 2, "\nzsim: run: unknown option --qq; `zsim run --help` names what "
                                "there is\n"),
    (["run", FSDP2, "--bogus"], 2, "usage: zsim run "),
    (["run", FSDP2, "--bogus"], 2, "unknown option --bogus"),
    (["validate", FSDP2, "--backend", "fake"], 2, "unknown option --backend fake; "
                                                  "an option of run and calibrate\n"),
    (["validate", FSDP2, "--compute", "emulate"], 2,
     "zsim: --compute: expected real or emulated, found 'emulate'; did you mean "
     "emulated?\n"),
    (["run", FSDP2, "--timeout", "nan"], 2, "zsim: --timeout: expected seconds between 0 "
                                            "and 86400, found nan"),
    (["run"], 2, "SCENARIO"), (["run", "none.toml"], 2, "none.toml: no such file"),
    (["run", FSDP2, "--backend", "ech"], 2, "did you mean echo?"),
    (["validate", FSDP2, "--against", "ech"], 2, "zsim: --against: expected broken, "),
    (["run", FSDP2, "--backend", "gone"], 3, "pip install 'zsim[real]'"),
    (["validate", FSDP2, "--against", "sim"], 2, "zsim: --against: expected a backend "
                                                 "that runs for real, found sim"),
    (["run", FSDP2, "--ranks", "0-2"], 2, "zsim: --ranks: expected ranks as 0,7, found "
                                          "'0-2'\n"),
    (["run", FSDP2, "--save"], 2, "zsim: --save: expected one argument, found none\n"),
    (["compare", "none.json", "none.json"], 2, "none.json: expected a saved Run"),
    (["list", "wishes"], 2, "zsim: zsim list: expected scenarios, models, "),
])
def test_bad_usage_is_answered_in_words(capsys, arguments, code, message):
    assert main(arguments) == code
    assert message in capsys.readouterr().err


def test_errors_are_one_json_object_as_well(capsys):
    printed = output(capsys, "run", "a.toml", "b.toml", code=2)
    assert printed["exit_code"] == 2
    assert [problem.split(":")[0] for problem in printed["error"]] == ["a.toml", "b.toml"]


def test_what_a_backend_cannot_give_is_refused_before_the_run(capsys):
    assert main(["run", FSDP2, "--backend", "echo", "--trace", "t.json"]) == 2
    assert ("--trace: expected a backend that records time, as sim and gloo do, found echo"
            in capsys.readouterr().err)


@pytest.mark.parametrize("arguments", [["--ranks", "x"], ["--save", ""], ["--bogus"]])
def test_arguments_that_cannot_be_read_are_one_object_too(arguments, capsys):
    assert main(["run", FSDP2, "--json", *arguments]) == 2
    streams = capsys.readouterr()
    printed = json.loads(streams.out)
    assert printed["exit_code"] == 2
    assert streams.err.splitlines()[-1] == f"zsim: {printed['error'][0]}"


EFFICIENT = (
    'model = { preset = "gpt-tiny", attention = "efficient" }\nbatch = { micro_batch = 1, '
    'sequence_length = 8 }\n'
    'cluster = { preset = "%s", ranks = 2 }\nstrategy = { name = "fsdp2" }\n'
)


def test_an_attention_without_a_kernel_is_refused_with_its_file_before_anything_runs(
    tmp_path, capsys
):
    file = tmp_path / "odd.toml"
    file.write_text(EFFICIENT % "cpu-gloo")
    assert main(["run", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"zsim: {file}: model.attention: memory-efficient "
                                              f"attention has no kernel on a CPU")


def test_of_several_scenarios_one_that_cannot_run_stops_no_other(tmp_path, capsys):
    """Fine on its own cluster, and not on the CPU that the backend plans for."""
    file = tmp_path / "odd.toml"
    file.write_text(EFFICIENT % "dgx-a100")
    assert main(["run", FSDP2, str(file), ZERO3, "--backend", "echo", "--json"]) == 2
    streams = capsys.readouterr()
    printed = json.loads(streams.out)
    assert [run["scenario"] for run in printed["runs"]] == ["fsdp2-mlp-4", "zero3-mlp-4"]
    assert [error["scenario"] for error in printed["errors"]] == ["odd"]
    assert "memory-efficient attention has no kernel on a CPU" in streams.err


def test_paths_that_cannot_be_are_words_and_no_tracebacks(tmp_path, capsys):
    assert main(["run", "a" * 300]) == 2
    assert "cannot be looked up: File name too long" in capsys.readouterr().err
    file = tmp_path / "nul.toml"
    file.write_text('model = { traced = "a\\u0000b" }\nbatch = { micro_batch = 1 }\ncluster = { '
                    'preset = "cpu-gloo", ranks = 2 }\n'
                    'strategy = { name = "fsdp2" }\n')
    assert main(["run", str(file)]) == 2
    assert "expected a traced model, found a path that cannot be one" in capsys.readouterr().err
    assert main(["show", FSDP2, "--snapshot", str(tmp_path / "new" / "folder" / "mem.pickle")]) == 0
    assert (tmp_path / "new" / "folder" / "mem.pickle").stat().st_size > 0
    assert main(["show", FSDP2, "--snapshot", "/dev/full"]) == 2
    assert "/dev/full: expected room for " in capsys.readouterr().err


def test_a_full_output_is_words_and_no_traceback():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zsim", "run", FSDP2, "--json"], stdout=full,
            stderr=subprocess.PIPE, text=True,
        )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "zsim: standard output: No "
                                                                  "space left on device")


def test_kinds_of_memory_that_a_backend_does_not_see_are_null_and_not_zero(capsys):
    assert main(["run", FSDP2, "--backend", "echo", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["peak_memory_by_kind"].values()) == {None}
    assert printed["peak_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("by", "code", "said"),
    [(KeyboardInterrupt, 130, "interrupted"), (Terminated, 143, "ended by SIGTERM")],
)
def test_a_command_that_a_signal_ends_says_so_and_has_its_exit_code(
    by, code, said, monkeypatch, capsys
):
    monkeypatch.setattr(Interrupted, "by", by)
    assert main(["run", FSDP2, "--backend", "interrupted"]) == code
    assert capsys.readouterr().err.splitlines()[-1] == f"zsim: {said}"


def test_a_place_that_cannot_be_written_is_refused_before_the_run(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert (
        main(["run", FSDP2, "--backend", "broken", "--save", str(tmp_path / "file" / "run.json")])
        == 2
    )
    assert "expected a file that can be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"), [("run", "--save"), ("run", "--trace"), ("validate", "--save")]
)
def test_a_file_in_place_of_a_folder_of_results_is_refused_once(tmp_path, capsys, command, option):
    (tmp_path / "x.json").write_text("{}")
    backend = [] if option == "--trace" else ["--backend" if command == "run" else "--against"]
    backend += ["broken"] if backend else []
    refused = output(
        capsys, command, FSDP2, ZERO3, *backend, option, str(tmp_path / "x.json"), code=2
    )
    (problem,) = refused["error"]
    assert problem.endswith(f"found {tmp_path / 'x.json'}, which is a file; name another")


@pytest.mark.parametrize(
    "file", sorted((ROOT / "scenarios/faults").glob("*.toml")), ids=lambda file: file.stem
)
def test_a_scenario_with_faults_keeps_what_it_expects(file, capsys):
    expectations = output(capsys, "run", str(file))["expectations"]
    assert {expectation["ok"] for expectation in expectations} == {True}


def test_scenarios_of_one_name_cannot_share_a_folder_of_results(tmp_path, capsys):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.toml").write_text(Path(FSDP2).read_text())
    assert (
        main(["run", str(tmp_path / "a"), str(tmp_path / "b"), "--save", str(tmp_path / "out")])
        == 2
    )
    assert "found several called x" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"), [("run", "--save"), ("run", "--trace"), ("show", "--snapshot")],
)
def test_a_scenario_is_not_written_over(tmp_path, capsys, command, option):
    path = tmp_path / "mine.toml"
    path.write_text(Path(FSDP2).read_text())
    alias = tmp_path / "alias.toml"
    alias.symlink_to(path)
    for target in (path, alias, tmp_path / ".." / tmp_path.name / "mine.toml"):
        assert main([command, str(path), option, str(target)]) == 2
        assert f"{option}: expected a file of its own" in capsys.readouterr().err
    assert path.read_text() == Path(FSDP2).read_text()


@pytest.mark.parametrize("option", ["--save", "--trace"])
def test_what_a_scenario_names_is_not_written_over(tmp_path, capsys, option):
    config = tmp_path / "config.json"
    sizes = {
        "vocab_size": 32, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": None
    }
    config.write_text(
        json.dumps({
            "model_type": "gpt2", "activation_function": "gelu",
            "architectures": ["GPT2LMHeadModel"], **sizes,
        })
    )
    path = tmp_path / "mine.toml"
    path.write_text(
        'model = { huggingface = "config.json" }\nbatch = { micro_batch = 1, sequence_length = 4 '
        '}\n'
        'cluster = { preset = "cpu-gloo", ranks = 2 }\nstrategy = { name = "fsdp2" }\n'
    )
    assert main(["run", str(path), option, str(tmp_path / "run.json")]) == 0
    assert main(["run", str(path), option, str(config)]) == 2
    assert f"{option}: expected a file of its own" in capsys.readouterr().err
    assert json.loads(config.read_text())["n_layer"] == 2


def test_two_results_are_not_written_to_one_file(tmp_path, capsys):
    assert main(["run", FSDP2, "--save", str(tmp_path / "x"), "--trace", str(tmp_path / "x")]) == 2
    assert "--trace: expected a file of its own" in capsys.readouterr().err


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zsim {zsim.__version__}\n"


def test_a_trace_is_named_as_what_opens_it_wants(capsys, tmp_path):
    scenario = str(ROOT / "scenarios/parity/fsdp2-mlp-2.toml")
    assert main(["run", scenario, "--trace", str(tmp_path / "x.txt")]) == 2
    assert ("expected a file that ends in .json or .json.gz, found .txt; name it x.json.gz"
            in capsys.readouterr().err)
    assert main(["run", scenario, "--trace", str(tmp_path / "x.json")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_one_rank_is_no_ranks(capsys, tmp_path):
    text = (ROOT / "scenarios/parity/ddp-mlp-2.toml").read_text()
    alone = text.partition("[expect]")[0].replace("ranks = 2", "ranks = 1")
    (tmp_path / "one.toml").write_text(alone.replace("dp_replicate = 2", "dp_replicate = 1"))
    for command in ("run", "show"):
        assert main([command, str(tmp_path / "one.toml")]) == 0
        printed = capsys.readouterr().out
        assert " 1 rank" in printed or "of one rank" in printed
        assert " 1 ranks" not in printed


def test_detail_on_the_command_line_replaces_the_scenario_s(tmp_path, capsys):
    file, trace = "scenarios/rings/fsdp2-gpt-2-124m-8-pcie.toml", tmp_path / "rings.json"
    assert main(["run", file, "--detail", "flows", "--json"]) == 0
    assert "detail" not in json.loads(capsys.readouterr().out)["provenance"]
    assert main(["run", file, "--trace", str(trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["provenance"]["detail"] == "steps"
    assert any(event.get("cat") == "hop" for event in json.loads(trace.read_text())["traceEvents"])
    assert main(["run", file]) == 0
    assert "rings as steps        all collectives\n" in capsys.readouterr().out


def test_detail_is_of_the_simulator_alone_and_what_is_too_large_is_refused(capsys):
    mlp, large = "scenarios/parity/fsdp2-mlp-4.toml", "scenarios/scale/fsdp2-gpt-1024.toml"
    assert main(["run", mlp, "--detail", "steps", "--backend", "fake"]) == 2
    assert capsys.readouterr().err == (
        "zsim: --detail: expected --backend sim, which simulates, found fake\n"
    )
    assert main(["run", large, "--detail", "steps"]) == 2
    assert "expected at most 4,000,000 events, found 19,903,488" in capsys.readouterr().err
