"""A first scenario, the state of the machine, a shell's completion, and two scenarios compared."""

from __future__ import annotations

import json
import re
import subprocess
from xml.etree import ElementTree as Xml

import pytest

from zsim import load
from zsim.cli.main import main
from zsim.cli.options import COMMANDS
from zsim.cli.parser import parser, read

NEW = ["new", "--model", "gpt-tiny", "--cluster", "cpu-gloo", "--ranks", "2",
       "--sequence-length", "64"]
SCENARIO = """\
model = { preset = "mlp-tiny" }
batch = { micro_batch = MICRO }
cluster = { preset = "dgx-h100" }
strategy = { name = "STRATEGY" }
EXPECT
"""


def written(folder, name, *, micro=4, strategy="fsdp2", expect=""):
    """The path of a small scenario."""
    text = SCENARIO.replace("MICRO", str(micro)).replace("STRATEGY", strategy)
    (folder / name).write_text(text.replace("EXPECT", expect))
    return str(folder / name)


def test_without_a_command_help_is_printed(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: zsim ")


def test_new_writes_a_scenario_that_runs(tmp_path, capsys):
    out = str(tmp_path / "mine.toml")
    assert main([*NEW, "--strategy", "zero2", "-o", out]) == 0
    assert main(["run", out]) == 0
    scenario = load(out)
    assert (scenario.strategy, scenario.world_size, scenario.batch.micro_batch) == ("zero2", 2, 1)
    assert main([*NEW, "--strategy", "zero2", "-o", out]) == 2
    assert "expected a new file" in capsys.readouterr().err


def test_new_asks_each_question_until_its_answer_does_and_takes_enter_for_the_default(
    tmp_path, monkeypatch, capsys
):
    answers = iter(["llama-tyni\n", "llama-tiny\n", "cpu-gloo\n", "4\n", "4k\n", "32\n", "\n"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.readline", lambda: next(answers), raising=False)
    out = tmp_path / "mine.toml"
    assert main(["new", "-o", str(out)]) == 0
    told = capsys.readouterr().err
    assert told.count("? ") == 7
    assert 'note: batch.sequence_length: expected a whole number, found "4k"' in told
    assert load(out).tables["strategy"] == {"name": "fsdp2"}
    assert load(out).world_size == 4


@pytest.mark.parametrize(("cluster", "size", "precision"), [
    ("pcie-box", "1 GPU", {"autocast": "bf16"}), ("cpu-gloo", "1", None),
])
def test_new_proposes_a_plain_module_for_one_rank(
    tmp_path, monkeypatch, capsys, cluster, size, precision
):
    answers = iter(["gpt-tiny\n", f"{cluster}\n", f"{size}\n", "32\n", "\n"])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.readline", lambda: next(answers), raising=False)
    out = tmp_path / "mine.toml"
    assert main(["new", "-o", str(out)]) == 0
    assert "zero_redundancy" in (told := capsys.readouterr().err)
    assert told.split("? It is ")[1].partition("\n")[0].partition("] ")[0].endswith("[single")
    tables = load(out).tables
    assert (tables["strategy"], tables.get("precision")) == ({"name": "single"}, precision)
    assert tables["cluster"] == {"preset": cluster, "ranks": 1}


def test_ranks_asked_of_new_are_some_gpus_of_a_node(tmp_path):
    out = str(tmp_path / "mine.toml")
    asked = ["new", "--model", "gpt-2-124m", "--cluster", "dgx-a100", "--sequence-length", "64"]
    assert main([*asked, "--ranks", "2", "--strategy", "ddp", "-o", out]) == 0
    assert load(out).world_size == 2


def test_new_without_a_terminal_names_the_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert main(["new", "-o", str(tmp_path / "x.toml"), "--model", "gpt-tiny"]) == 2
    assert "--cluster, --nodes, --sequence-length, --strategy" in capsys.readouterr().err


def test_a_folder_that_is_made_for_a_result_is_told_before_the_work(tmp_path, capsys):
    folder = tmp_path / "not" / "there"
    out = str(folder / "mine.toml")
    assert main([*NEW, "--strategy", "ddp", "-o", out]) == 0
    assert f"note: -o: makes the folder {folder}, which is not there" in capsys.readouterr().err
    assert main(["run", out, "--save", str(tmp_path / "run.json")]) == 0
    assert "makes the folder" not in capsys.readouterr().err


@pytest.mark.parametrize(("change", "said"), [
    (["--strategy", "fsdp9"], "zsim new: strategy.name: expected single, ddp, zero1"),
    (["--strategy", "ddp", "--model", "gpt-tyni"], "did you mean gpt-tiny?"),
    (["--strategy", "ddp", "--ranks", "many"], "cluster.ranks: expected a whole number"),
])
def test_answers_that_do_not_do_are_named_and_nothing_is_written(tmp_path, change, said, capsys):
    out = tmp_path / "x.toml"
    assert main([*NEW, "-o", str(out), *change]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_doctor_tells_what_runs_and_how_to_get_the_rest(capsys):
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    able = {each["name"]: each for each in told["backends"]}
    assert able["sim"]["able"] is True
    assert all(each["able"] == (not each["reason"]) for each in told["backends"])
    installed = {each["name"]: each for each in told["extras"]}
    assert installed["test"]["packages"]["hypothesis"]["installed"]
    assert main(["doctor"]) == 0
    assert "backends that run here" in capsys.readouterr().out


@pytest.mark.parametrize(("typed", "completed"), [
    (("zsim", "va"), "validate"), (("zsim", "run", "--js"), "--json"),
    (("zsim", "list", "sche"), "schema"), (("zsim", "import", "--sequence"), "--sequence-length"),
])
def test_bash_completes_commands_options_and_choices(typed, completed, capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = " ".join(f"'{part}'" for part in typed)
    asked = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(typed) - 1}; _zsim; " \
            'echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [completed]


def test_fish_knows_every_command_and_its_options(capsys):
    assert main(["completion", "fish"]) == 0
    script = capsys.readouterr().out
    commands = parser().commands()
    assert [name for name in commands if f"-a {name}\n" not in script] == []
    assert "-n '__fish_seen_subcommand_from run' -l backend" in script


def test_diff_tells_each_figure_with_its_band(tmp_path, capsys):
    base, head = written(tmp_path, "a.toml"), written(tmp_path, "b.toml", strategy="zero2")
    assert main(["diff", base, head]) == 0
    assert "a (fsdp2) → b (zero2)" in capsys.readouterr().out
    assert main(["diff", base, head, "--json"]) == 0
    told = {each["name"]: each for each in json.loads(capsys.readouterr().out)["figures"]}
    assert told["peak of torch"]["change"] in ("less", "more")
    assert told["step time"]["base_band"][0] < told["step time"]["base"]
    assert told["reduce_scatters"]["change"] == "same"


def test_a_change_within_the_bands_is_not_distinguishable(tmp_path, capsys):
    fused = 'optimizer = { name = "adamw", implementation = "fused" }'
    base, head = written(tmp_path, "a.toml"), written(tmp_path, "b.toml", expect=fused)
    assert main(["diff", base, head, "--json"]) == 0
    told = {each["name"]: each for each in json.loads(capsys.readouterr().out)["figures"]}
    assert told["step time"]["change"] == "not distinguishable"


def test_diff_fails_where_the_head_breaks_its_expectations_and_says_so_in_both_formats(tmp_path):
    base = written(tmp_path, "a.toml")
    head = written(tmp_path, "b.toml", expect="[expect]\nall_gathers = 1\nfits = true")
    markdown, junit = tmp_path / "d.md", tmp_path / "d.xml"
    done = main(["diff", base, head, "--markdown", str(markdown), "--junit", str(junit)])
    assert done == 1
    assert "**Broken:** all\\_gathers: expected 1, found 7" in markdown.read_text()
    assert "| memory verdict | FITS | FITS | same |" in markdown.read_text()
    suite = Xml.parse(junit).getroot()
    failed = [case.get("name") for case in suite if len(case)]
    assert failed == ["b: all_gathers"]
    cases = {case.get("name") for case in suite}
    assert {"b: memory verdict", "b: step time", "b: sent per rank", "b: fits"} < cases
    assert len(suite) == int(suite.get("tests")) == 10


def test_diff_fails_a_figure_that_grows_by_more_than_it_may(tmp_path, capsys):
    files = [written(tmp_path, "a.toml"), written(tmp_path, "b.toml", micro=64)]
    junit = tmp_path / "d.xml"
    assert main(["diff", *files]) == 0
    assert main(["diff", *files, "--fail-if", "sent:+0%,peak:+900%"]) == 0
    assert main(["diff", *files, "--fail-if", "sent:+0%,peak:+2%", "--junit", str(junit)]) == 1
    assert "BROKEN peak of torch: peak" in capsys.readouterr().out
    assert [case.get("name") for case in Xml.parse(junit).getroot() if len(case)] == [
        "b: peak of torch"
    ]
    assert main(["diff", *files, "--fail-if", "peak:2%"]) == 2
    assert '--fail-if: expected limits as "peak:+2%,step:+5%"' in capsys.readouterr().err


def test_compare_of_two_scenarios_names_the_command_that_does(tmp_path, capsys):
    file = written(tmp_path, "a.toml")
    assert main(["compare", file, file]) == 2
    assert "`zsim diff` compares two scenarios" in capsys.readouterr().err


def test_compare_of_two_simulations_names_them_by_strategy_and_compares(tmp_path, capsys):
    runs = []
    for name, strategy in (("a", "fsdp2"), ("b", "zero2")):
        file = written(tmp_path, f"{name}.toml", strategy=strategy)
        runs.append(str(tmp_path / f"{name}.json"))
        assert main(["run", file, "--save", runs[-1]]) == 0
    capsys.readouterr()
    assert main(["compare", *runs]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("a (fsdp2) against b (zero2), both simulated, 8 ranks\n")
    assert "not the same strategy: fsdp2 in the first, zero2 in the second" in printed
    assert "peak of torch" in printed
    assert "FAILED" not in printed
    assert main(["compare", *runs, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["base"], told["head"], told["ok"]) == ("a", "b", True)
    assert "sent per rank" in [each["name"] for each in told["figures"]]
    assert main(["compare", *runs, "--require", "memory"]) == 1  # they were held to nothing


@pytest.mark.parametrize("command", [
    ["run"], ["show"], ["fit"], ["plan"], ["lint"], ["checkpoint"], ["validate"],
])
def test_a_config_of_another_tool_is_known_by_every_command(tmp_path, command, capsys):
    config = tmp_path / "ds_config.json"
    config.write_text('{"zero_optimization": {"stage": 2}}')
    assert main([*command, str(config)]) == 2
    told = "".join(capsys.readouterr())  # lint's own report names it among the linted files
    assert f"found a config of deepspeed; `zsim import deepspeed {config}`" in told


@pytest.mark.parametrize(("no_color", "green"), [("", True), ("1", False)])
def test_a_terminal_wraps_values_cuts_no_name_and_has_colours_unless_told_not_to(
    tmp_path, monkeypatch, capsys, no_color, green
):
    file = written(tmp_path, "a.toml")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["run", file]) == 0
    printed = capsys.readouterr().out
    assert ("\033[32mFITS\033[0m" in printed) is green
    assert max(len(line.replace("\033[32m", "").replace("\033[0m", ""))
               for line in printed.splitlines()) <= 60
    monkeypatch.chdir(tmp_path)
    assert main(["list", "scenarios"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    names = [line.strip() for line in lines if ".toml" in line]
    assert all(load(f"{head.removeprefix('scenarios, in ')}/{name}") for name in names[:3])


def test_sizes_are_for_people_and_bytes_are_asked_for(tmp_path, monkeypatch, capsys):
    file = written(tmp_path, "a.toml")
    (tmp_path / "a.toml").write_text(
        (tmp_path / "a.toml").read_text().replace("mlp-tiny", "gpt-2-124m")
        .replace("{ micro_batch = 4 }", "{ micro_batch = 4, sequence_length = 1024 }")
    )
    assert main(["run", file]) == 0
    assert not re.search(r"\d,\d{3},\d{3} B", capsys.readouterr().out)
    assert main(["run", "-v", file]) == 0
    exact = re.findall(r"([\d.,]+) GiB \(([\d,]+) B\)", capsys.readouterr().out)
    assert len(exact) > 3
    assert all(f"{int(n.replace(',', '')) / 2**30:,.2f}" == told for told, n in exact)


@pytest.mark.parametrize("command", [
    ["run"], ["lint"], ["fit"], ["show", "--memory"], ["doctor"], ["list"],
])
def test_lines_fit_80_columns_where_columns_says_so(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    of_a_file = [] if command[0] in ("doctor", "list") else [written(tmp_path, "a.toml")]
    assert main([*command, *of_a_file]) in (0, 1)
    long = [line for line in capsys.readouterr().out.splitlines() if len(line) > 80]
    assert all(" " not in line.strip() for line in long)  # a name is not cut


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_below_each_help_is_a_command_line(name, capsys):
    parts = COMMANDS[name].example.split()
    options = read(parts[1:])
    assert (parts[0], options.command) == ("zsim", name)
    assert main([name, "--help"]) == 0
    assert f"example: {' '.join(parts)}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("nodes", "replicas"), [(1, 2), (4, 4)])
def test_new_has_a_mesh_for_hsdp(tmp_path, nodes, replicas):
    out = tmp_path / "new.toml"
    asked = ["new", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--sequence-length", "64"]
    assert main([*asked, "--nodes", str(nodes), "--strategy", "hsdp", "-o", str(out)]) == 0
    assert load(out).mesh.dp_replicate == replicas
