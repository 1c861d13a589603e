"""`import zsim`: what is public, that it is light, and that its examples run as they are printed.

A change of this file's tables is a change of what users rely on.
"""

import doctest
import inspect
import json
import re
import subprocess
import sys

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.cli.main import main
from zsim.scenario import scenario as scenario_module
from zsim.scenario.derived import derived

TABLES = (
    "description, model, batch, cluster, strategy, precision, optimizer, offload, "
    "activation_checkpointing, wrapping, execution, faults, allocator, frozen, checkpoint, "
    "steps, seed, expect, lint"
)
REAL = "ranks, all_ranks, interpreter, timeout_s"
PARTS = "where, expected, found, remedy"
SIGNATURES = {
    **dict.fromkeys(
        ("ArgumentError", "BackendUnavailableError", "DeadlockError", "RankError", "SavedRunError",
         "UnitError", "ZsimError"),
        PARTS,
    ),
    "Bytes": "size", "Candidate": None,
    "Comparison": "checks, predicted, measured, replaced, required", "Duration": "time, band",
    "Exported": None, "Fit": None, "GiB": "number", "Imported": None, "JitteredSteps": None,
    "KiB": "number", "LintFinding": None, "MiB": "number",
    "Plan": None, "Run": "record, scenario, warnings, device_memory",
    "Scenario": f"{TABLES}, name, folder", "ScenarioError": "problems",
    "Sweep": None, "Why": None,
    "compare": "predicted, measured, require", "export_config": "scenario, kind",
    "import_config": "path, kind, model, cluster, settings, recipe, drop", "fit": "scenario, say",
    "jitter": "scenario, seeds", "lint": "scenario, ignore",
    "load": "path", "load_run": "path", "ms": "number",
    "plan_for": "scenario, nodes, micro_batches, global_batch, tokens, days, price, budget, "
                "goal, vary, say",
    "run": f"scenario, backend, {REAL}, module, numerics, device",
    "simulate": "scenario, ranks, all_ranks",
    "sweep": "scenario, axes, on, workers, out, say",
    "validate": f"scenario, against, {REAL}, require, cluster, module, numerics, device, "
                "testbed, compute",
    "why": "run",
}
"""Public names and their parameters; None where users read an object and make none."""
MEMBERS = {
    "Run": "backend collectives device_memory expectations exposed_communication faults figures "
           "fits hfu late memory mfu needed_memory ok peak_memory plot_memory plot_timeline ranks "
           "record save scenario spans step_time to_dict to_json to_pandas warnings world_size",
    "Comparison": "agreement agrees checks measured of_two_scenarios ok predicted replaced "
                  "required to_dict to_json",
    "Candidate": "dropped instead memory name scenario step_time step_time_band_ns step_time_ns "
                 "to_dict to_json",
    "Exported": "files kind text unsaid",
    "Imported": "assumed ignored kind scenario to_dict",
    "Fit": "candidates reason recommended refused scenario to_dict to_json",
    "JitteredSteps": "clean_ns error_ns first_seed largest_ns mean_ns quantile_ns rows scenario "
                     "times_ns to_dict to_json",
    "Why": "after_ns at_ends_ns before_ns by_reason critical_path exposed exposed_ns host_bound "
           "host_bound_ns off_device rank step_ns to_dict to_json",
    "LintFinding": "cost cost_bytes cost_ns fact gathered_bytes remedy rule to_dict why",
    "Scenario": "batch checkpoint checkpointing cluster description executed executed_on execution "
                "expandable_segments expect faults files fingerprint folder gradient_dtype "
                "lint_ignore mesh model name offload optimizer options precision seed steps "
                "strategy sync tables to_dict to_json to_toml with_ work "
                "world_size wrapping",
    "Plan": "alike front options reasons recommended refused request scenario space "
            "to_dict to_json to_pandas",
    "Sweep": "axes best front num_resumed plot rows to_csv to_dict to_jsonl to_pandas write",
}
SMALL = zsim.Scenario(
    model={"preset": "gpt-tiny"}, batch={"micro_batch": 2, "sequence_length": 64},
    cluster={"preset": "cpu-gloo", "ranks": 4}, strategy={"name": "fsdp2"},
)


def own(kind):
    """The public members of a class, without those of int."""
    there = {*dir(kind), *getattr(kind, "__dataclass_fields__", ())} - {*dir(int)}
    return sorted(member for member in there if member[0] != "_")


def test_what_is_public_is_listed_here():
    assert set(zsim.__all__) == {"__version__", *SIGNATURES}
    assert dir(zsim) == sorted(zsim.__all__)


@pytest.mark.parametrize("name", [name for name, names in SIGNATURES.items() if names])
def test_the_parameters_of(name):
    assert ", ".join(inspect.signature(getattr(zsim, name)).parameters) == SIGNATURES[name]


@pytest.mark.parametrize(("name", "members"), MEMBERS.items())
def test_the_members_of(name, members):
    kind = getattr(zsim, name)
    assert own(kind) == members.split()


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_public_name_is_documented(name):
    assert len(getattr(zsim, name).__doc__ or "") > 20


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_that_is_called_or_computed_is_documented(name):
    kind = getattr(zsim, name)
    members = {member: inspect.getattr_static(kind, member, None) for member in own(kind)}
    computed = {
        member: value for member, value in members.items()
        if isinstance(value, property) or inspect.isfunction(value)
    }
    assert [member for member, value in computed.items() if not value.__doc__] == []


def test_with_takes_the_tables_that_a_scenario_is_made_of():
    signature = inspect.signature(zsim.Scenario.with_)
    assert ", ".join(signature.parameters) == f"self, {TABLES}, name"


def test_importing_it_loads_nothing_but_the_standard_library():
    code = "import sys; old = {*sys.modules}; import zsim; print(*{*sys.modules} - old)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True,
                          text=True, check=True)
    tops = {name.partition(".")[0] for name in done.stdout.split()}
    assert tops - set(sys.stdlib_module_names) == {"zsim"}
    loaded = {name for name in done.stdout.split() if name.startswith("zsim")}
    assert loaded == {"zsim", "zsim.version"}


def test_type_checkers_see_every_name_and_no_other(tmp_path):
    source = (ROOT / "zsim" / "__init__.py").read_text()
    for name in SIGNATURES:
        assert f" import {name} as {name}\n" in source
    assert "\nif not TYPE_CHECKING:" in source.partition("def __getattr__")[0]
    assert "\ndef __getattr__" not in source


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'zsim' has no attribute 'simulte'"):
        zsim.simulte  # noqa: B018 (reading it is the test)


def test_the_page_of_examples(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = ROOT / "zsim" / "README.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted > 0
    assert failed == 0
    assert len(page.read_text().splitlines()) <= 120


@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.gloo), 1])
def test_the_other_examples_of_the_page(block, monkeypatch, tmp_path):
    """They have no output to be held to: they run, and so do the tests that they define."""
    source = (ROOT / "zsim" / "README.md").read_text().split("```python\n")[1 + block]
    if "validate" in source:
        pytest.importorskip("torch")
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    large = SMALL.with_(model={"preset": "llama-3-8b"}, cluster={"preset": "dgx-h100"})
    (tmp_path / "train.toml").write_text(large.to_toml())
    monkeypatch.chdir(tmp_path)
    there = {"zsim": zsim}
    exec(source.partition("```")[0], there)
    for name in there:
        if name.startswith("test_"):
            there[name]()


def examples(page):
    """The Python of a page: the sources of its doctests and its blocks, in order."""
    text, fence = page.read_text(), r"^```(pycon|python)\n(.*?)^```$"
    blocks = re.findall(fence, text, re.DOTALL | re.MULTILINE)
    parser = doctest.DocTestParser()
    return [
        source
        for language, block in blocks
        for source in (
            [block] if language == "python"
            else [example.source for example in parser.get_examples(block)]
        )
    ]


def test_the_examples_of_the_page_are_typed(tmp_path):
    """mypy --strict takes them as a user's own file."""
    api = pytest.importorskip("mypy.api")
    source = "".join(["import zsim\n", *examples(ROOT / "zsim" / "README.md")])
    assert "zsim.simulate(" in source
    file = tmp_path / "page.py"
    file.write_text(source)
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}"]
    printed, _, code = api.run([*options, str(file)])
    assert code == 0, printed


FILES = sorted((ROOT / "scenarios").rglob("*.toml"))


@pytest.mark.parametrize("file", FILES[::7], ids=lambda file: file.stem)
def test_a_file_its_tables_and_its_text_are_one_scenario(file):
    from_file = zsim.load(file)
    rebuilt = zsim.Scenario(**from_file.tables, name=file.stem, folder=file.parent)
    copy = scenario_module.parse(
        from_file.to_toml().encode(), where=f"{file.stem}.toml", folder=file.parent
    )
    for other in (rebuilt, copy):
        assert other == from_file
        assert other.fingerprint == from_file.fingerprint
        assert other.files == from_file.files


def problems(**tables):
    with pytest.raises(zsim.ScenarioError) as caught:
        SMALL.with_(**tables)
    return str(caught.value)


@pytest.mark.parametrize(
    "tables",
    [
        {"strategy": {"dp_shrad": 4}}, {"batch": {"micro_batch": 0}, "optimizer": {"name": "adam"}},
        {"wrapping": {"every": 99}}, {"cluster": {"preset": "dgx-h1000"}},
        {"expect": {"peak_memory": "<= 40 G"}},
    ],
    ids=lambda tables: next(iter(tables)),
)
def test_python_and_files_have_one_text_for_each_mistake(tables):
    bad = scenario_module.scenario_tables.merged(SMALL.tables, tables)
    with pytest.raises(zsim.ScenarioError) as caught:
        scenario_module.parse(scenario_module.scenario_tables.to_toml(bad).encode(), where="x.toml")
    assert problems(**tables) == str(caught.value).replace("x.toml: ", "Scenario: ")


def test_what_no_file_can_hold_is_refused_by_key():
    assert problems(seed=2**80) == (
        "Scenario: seed: expected an integer of at most 64 bits, found a longer one"
    )


def test_tables_that_are_missing_or_unknown_are_told_as_of_a_file():
    written = zsim.Scenario(**SMALL.tables).to_toml()
    for tables, text in (({}, ""), ({**SMALL.tables, "moedl": {}}, f"{written}moedl = {{}}")):
        with pytest.raises(zsim.ScenarioError) as from_file:
            scenario_module.parse(text.encode(), where="Scenario")
        with pytest.raises(zsim.ScenarioError) as from_python:
            zsim.Scenario(**tables)
        assert str(from_python.value) == str(from_file.value)
    assert problems(moedl={}) == "Scenario: moedl: unknown key, did you mean model?"
    assert problems(batch=None) == (
        "Scenario: batch: expected a table, as batch = { micro_batch = 1 }, found nothing"
    )
    assert problems(optimizer={"name": "adam"}) == (
        'Scenario: optimizer.name: expected adamw, sgd or adamw8bit, found "adam"; '
        "did you mean adamw?"
    )


@pytest.mark.parametrize(("name", "found"), [
    (5, "5"), (None, "None"), ("", '""'), ("a\n\x1b[31m", r'"a\n\u001b[31m"'),
    (ROOT.parent / "x", f'the path "{ROOT.parent / "x"}"'),
])
def test_names_and_folders_are_checked_with_the_tables(name, found):
    said = f"Scenario: name: expected text in one line, found {found}"
    assert problems(name=name) == said
    with pytest.raises(zsim.ScenarioError) as caught:
        zsim.Scenario(**SMALL.tables | {"steps": 0}, name=name, folder=5)
    assert str(caught.value).splitlines() == [
        said, "Scenario: folder: expected a path, found 5",
        "Scenario: steps: expected at least 1, found 0",
    ]


def test_a_scenario_keeps_the_name_of_its_file_whatever_that_is(tmp_path):
    (tmp_path / "a\n.toml").write_text(SMALL.to_toml())
    scenario = zsim.load(tmp_path / "a\n.toml")
    assert scenario.with_(seed=7).name == scenario.name == "a\n"
    assert scenario.with_(name="b").name == "b"


def test_with_removes_what_is_none():
    changed = SMALL.with_(
        activation_checkpointing={"mode": "full"}, expect={"all_gathers": 3}, seed=7, steps=2,
        frozen=["wte.weight"], description="a",
    )
    none = dict.fromkeys(changed.tables.keys() - SMALL.tables.keys())
    assert len(none) == 6
    assert changed.with_() == changed
    assert changed.with_(**none).tables == SMALL.tables


def test_with_merges_key_by_key_and_takes_another_way_whole():
    tuned = SMALL.with_(strategy={"forward_prefetch": 1}, batch={"accumulation": 2})
    assert tuned.tables["strategy"] == {"name": "fsdp2", "forward_prefetch": 1}
    assert tuned.tables["batch"] == {"micro_batch": 2, "sequence_length": 64, "accumulation": 2}
    assert tuned.with_(strategy={"forward_prefetch": None}, batch={"accumulation": None}) == SMALL
    assert tuned.with_(strategy={"name": "ddp"}).tables["strategy"] == {"name": "ddp"}
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "feed_forward": 64,
             "vocabulary": 100}
    other = SMALL.with_(model={"family": "llama", "sizes": sizes})
    assert other.tables["model"] == {"family": "llama", "sizes": sizes}
    assert other.with_(model={"preset": "gpt-tiny"}) == SMALL
    assert SMALL.tables["batch"] == {"micro_batch": 2, "sequence_length": 64}


def test_a_scenario_cannot_be_changed_through_its_tables():
    SMALL.tables["batch"]["micro_batch"] = 9
    assert SMALL.tables["batch"]["micro_batch"] == SMALL.batch.micro_batch == 2


def test_parts_and_tables_of_a_derived_scenario_are_in_step():
    for file in FILES[::5]:
        case = zsim.load(file)
        names = ("batch", "optimizer", "checkpointing", "wrapping", "precision", "options", "mesh",
                 "expandable_segments")
        same = derived(case, **{name: getattr(case, name) for name in names})
        assert zsim.Scenario(**same.tables, name=case.name, folder=case.folder) == case


def test_a_run_has_the_json_of_the_command_line(capsys):
    path = "scenarios/parity/fsdp2-mlp-4.toml"
    assert main(["run", str(ROOT / path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    run = zsim.simulate(zsim.load(ROOT / path))
    assert run.to_dict() == json.loads(run.to_json()) == printed
    assert int(run.peak_memory) == printed["peak_memory_bytes"]
    assert [int(run.step_time), *map(int, run.step_time.band)] == [
        printed["step_time_ns"], *printed["step_time_band_ns"]
    ]
    assert 0 < max(nbytes for _, nbytes in run.memory.timeline) <= run.peak_memory
    assert {span.kind for span in run.spans} >= {"all_gather", "forward", "backward"}


def test_a_fit_and_its_reasons_have_the_json_and_the_text_of_the_command_line(capsys):
    path = str(ROOT / "scenarios/parity/fsdp2-mlp-4.toml")
    scenario = zsim.load(path)
    fit, why = zsim.fit(scenario), zsim.why(zsim.simulate(scenario))
    main(["fit", path, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert fit.to_dict() == json.loads(fit.to_json()) == printed
    assert [candidate.to_dict() for candidate in fit.candidates] == printed["candidates"]
    assert json.loads(fit.candidates[0].to_json()) == printed["candidates"][0]
    main(["show", path, "--time", "--json"])
    timed = json.loads(capsys.readouterr().out)["time"]
    reasons = json.loads(why.to_json())
    assert reasons == json.loads(json.dumps(why.to_dict()))
    assert {key: timed[key] for key in reasons} == reasons
    main(["show", path, "--time"])
    assert set(str(why).splitlines()[1:]) <= set(capsys.readouterr().out.splitlines())
    for candidate in fit.candidates:
        assert candidate.name in str(fit)
        assert candidate.step_time == candidate.step_time_ns
        assert candidate.memory.verdict in repr(candidate)


def test_a_scenario_is_made_anew_from_its_dict():
    for file in FILES[::9]:
        scenario = zsim.load(file)
        again = zsim.Scenario(**scenario.to_dict(), name=file.stem, folder=file.parent)
        assert again == scenario
        assert json.loads(scenario.to_json()).keys() == scenario.to_dict().keys()


def test_what_a_notebook_shows_is_short(tmp_path):
    run = zsim.simulate(SMALL)
    run.save(tmp_path / "run.json")
    comparison = zsim.compare(run, tmp_path / "run.json")
    shown = [SMALL, run, comparison, zsim.fit(SMALL), zsim.why(run), run.step_time, run.peak_memory]
    assert [value for value in map(repr, shown) if len(value) > 200] == []
    assert "collective order" in str(comparison)


@pytest.mark.parametrize("wrong", [3, None, "x.toml", {"model": {}}], ids=repr)
@pytest.mark.parametrize("name", sorted(
    name for name, names in SIGNATURES.items() if (names or "").startswith("scenario,")
))
def test_what_is_no_scenario_is_refused_with_the_way_to_one(name, wrong):
    others = {"sweep": ({"steps": [1]},), "export_config": ("accelerate",)}
    with pytest.raises(zsim.ArgumentError, match=r"^scenario: expected a Scenario, found .*zsim\."):
        getattr(zsim, name)(wrong, *others.get(name, ()))


def test_other_arguments_of_a_wrong_type_are_refused_too():
    with pytest.raises(zsim.ArgumentError, match="^ignore: expected rules of .*, found 3"):
        zsim.lint(SMALL, ignore=3)
    with pytest.raises(zsim.ArgumentError, match="^on: expected the name of workers, found 3"):
        zsim.sweep(SMALL, {"steps": [1]}, on=3)
