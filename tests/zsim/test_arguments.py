"""Wrong arguments of `import zsim` are told as such: by name, with what was expected and found."""

import pickle
from inspect import signature

import pytest

import zsim
from tests.support.folders import SCENARIOS
from zsim.cli.arguments import OPTIONS, with_options
from zsim.cli.main import main
from zsim.errors import ArgumentError, RankError
from zsim.runs.backend import RunOptions

TABLES = {
    "model": {"preset": "gpt-tiny"}, "batch": {"micro_batch": 2, "sequence_length": 64},
    "cluster": {"preset": "cpu-gloo", "ranks": 4}, "strategy": {"name": "fsdp2"},
}
SMALL = zsim.Scenario(**TABLES)
RUN = zsim.simulate(SMALL)
OF_A_SCENARIO = (zsim.simulate, zsim.run, zsim.validate, zsim.fit)


def refusal(function, *arguments, **options):
    with pytest.raises(ArgumentError) as caught:
        function(*arguments, **options)
    assert pickle.loads(pickle.dumps(caught.value)).where == caught.value.where
    return str(caught.value)


@pytest.mark.parametrize("function", OF_A_SCENARIO, ids=lambda function: function.__name__)
def test_what_is_no_scenario_is_refused_with_the_way_to_one(function):
    expected = "scenario: expected a Scenario, found"
    for wrong, described in (
        ("x.toml", "\"x.toml\"; zsim.load reads a scenario's file"),
        (None, "None; zsim.load or zsim.Scenario makes one"),
        (TABLES, "a dict; zsim.Scenario(**tables) makes one"),
        (RUN, "a Run; take its `scenario`"),
    ):
        assert refusal(function, wrong) == f"{expected} {described}"


@pytest.mark.parametrize("wrong", [SMALL, None, 3, RUN.to_dict()])
def test_what_is_no_run_is_refused(wrong):
    assert refusal(zsim.why, wrong).startswith("run: expected a Run, found ")
    for arguments, where in (((wrong, RUN), "predicted"), ((RUN, wrong), "measured")):
        assert refusal(zsim.compare, *arguments).startswith(f"{where}: expected a Run, or the ")


@pytest.mark.parametrize("wrong", [None, 5, SMALL, RUN, b"run.json"])
def test_what_is_no_path_of_a_run_is_refused(wrong):
    expected = "path: expected the path of a saved Run, found "
    assert refusal(zsim.load_run, wrong).startswith(expected)


def test_a_loaded_run_is_compared_as_the_run_itself(tmp_path):
    RUN.save(tmp_path / "run.json")
    record = zsim.load_run(tmp_path / "run.json")
    assert record == RUN.record
    assert zsim.compare(record, RUN).checks == zsim.compare(RUN, RUN).checks


@pytest.mark.parametrize(("change", "parts"), [
    (
        {"strategy": {"dp_shrad": 4}},
        ("Scenario: strategy.dp_shrad", "a scenario without mistakes", "unknown key",
         "did you mean dp_shard?"),
    ),
    (
        {"model": {"preset": "gpt-tny"}},
        ("Scenario: model.preset", "a scenario without mistakes", 'unknown model "gpt-tny"',
         "did you mean gpt-tiny?"),
    ),
    ({"seed": 1.5}, ("Scenario: seed", "a whole number", "1.5", "write 1 or 2")),
    ({"steps": 2.0}, ("Scenario: steps", "a whole number", "2.0", "write 2")),
    ({"seed": float(2**400)}, ("Scenario: seed", "a whole number", str(float(2**400)), "")),
    (
        {"strategy": {"dp_shard": 3}},
        ("Scenario: cluster", "3, by strategy.dp_shard 3", "4 ranks",
         "leave one axis out of the strategy to fill the cluster"),
    ),
    (
        {"strategy": {"name": "hsdp", "dp_replicate": 3}},
        ("Scenario: strategy.dp_replicate", "a divisor of the cluster's 4 ranks", "3",
         "take another size, or a cluster of a multiple of 3 ranks"),
    ),
    (
        dict.fromkeys(TABLES),
        ("Scenario", "the tables model, batch, cluster and strategy", "none",
         "`zsim list scenarios` names files to begin with"),
    ),
])
def test_an_error_of_a_scenario_has_its_four_parts(change, parts):
    with pytest.raises(zsim.ScenarioError) as caught:
        SMALL.with_(**change)
    error = caught.value
    assert (error.where, error.expected, error.found, error.remedy) == parts


@pytest.mark.parametrize("wrong", [None, 5, SMALL, TABLES, b"x.toml"])
def test_what_is_no_path_is_refused(wrong):
    assert refusal(zsim.load, wrong).startswith("path: expected the path of a scenario's file,")
    assert refusal(RUN.save, wrong).startswith("path: expected a path, found ")


def test_what_is_required_is_some_aspects():
    wrong = refusal(zsim.compare, RUN, RUN, require=("tme",))
    assert wrong.startswith("require: expected some of ")


def test_scenarios_that_mean_the_same_are_equal_under_any_name():
    assert zsim.Scenario(**TABLES) == SMALL.with_(name="other")
    assert len({SMALL, SMALL.with_(name="other")}) == 1


def test_a_run_is_hashed_and_its_figures_are_not_edited():
    assert hash(RUN) == hash(zsim.simulate(SMALL))
    with pytest.raises(TypeError, match="does not support item assignment"):
        RUN.collectives["all_gather"] = None


def test_another_folder_is_refused():
    assert refusal(SMALL.with_, folder="x").startswith("with_: folder: expected tables and a name")
    assert refusal(zsim.load, "").startswith("path: expected the path of a scenario's file, found ")


def test_a_cluster_file_that_is_not_there_is_told_by_its_argument():
    pytest.importorskip("torch")
    wrong = refusal(zsim.validate, SMALL, cluster="nope.toml")
    assert wrong.startswith("cluster: nope.toml: expected a cluster's file, found no such file; ")


@pytest.mark.gloo
def test_a_testbed_needs_ranks_that_use_its_network(capsys):
    pytest.importorskip("torch")
    path = str(SCENARIOS / "parity" / "fsdp2-mlp-2.toml")
    assert main(["validate", path, "--against", "fake", "--testbed", "2x1gbit"]) == 2
    assert "expected a backend whose ranks use the network, found fake" in capsys.readouterr().err
    small = zsim.load(path)
    for options, message in (
        ({"testbed": "2x1gbit", "against": "fake"},
         "testbed: expected a backend whose ranks use the network, found fake; --against gloo"),
        ({"testbed": "4x1gbit"},
         "testbed: expected 2 hosts, one for each rank, found 4, 4x1gbit"),
        ({"testbed": "ring"},
         "testbed: expected 4x1gbit, 2x2x1gbit/200mbit or 4x1gbit,3=200mbit, found ring"),
        ({"testbed": 4}, 'testbed: expected a layout as text, found 4; as "4x1gbit"'),
        ({"compute": "fast"}, 'compute: expected real or emulated, found "fast"'),
    ):
        assert refusal(zsim.validate, small, **options) == message


WRONG_OPTIONS = [
    ({"ranks": [0], "all_ranks": True},
     "ranks: expected some ranks or all of them, found ranks together with all_ranks; leave one "
     "of the two out"),
    ({"interpreter": "foo"}, 'interpreter: expected executor or observer, found "foo"'),
    *(({"timeout_s": wrong}, f"timeout_s: expected seconds between 0 and 86400, found {described}")
      for wrong, described in ((0, "0"), (-1, "-1"), (float("nan"), "nan"), ("1", '"1"'),
                           (True, "True"), (10**6, "1000000"), (None, "None"))),
]


@pytest.mark.parametrize(("options", "text"), WRONG_OPTIONS)
def test_options_that_a_run_cannot_have_are_refused_wherever_it_is_started(options, text):
    assert refusal(RunOptions, **options) == text
    assert refusal(zsim.run, SMALL, backend="gloo", **options) == text
    assert refusal(zsim.validate, SMALL, **options) == text


def test_any_sequence_of_ranks_will_do():
    shown = [zsim.simulate(SMALL, ranks=ranks) for ranks in ([0, 1, 1], (1, 0), range(2))]
    assert {tuple(rank.rank for rank in run.ranks) for run in shown} == {(0, 1)}


def test_the_simulator_has_no_interpreter_and_is_not_validated_against():
    assert refusal(zsim.run, SMALL, backend="sim", interpreter="executor") == (
        "interpreter: expected a real backend, found sim"
    )
    assert refusal(zsim.validate, SMALL, against="sim") == (
        "against: expected a backend that runs for real, found sim"
    )


def test_the_command_line_says_its_own_names(tmp_path, capsys):
    (tmp_path / "small.toml").write_text(SMALL.to_toml())
    for options, text in (
        ("--timeout 0", "--timeout: expected seconds between 0 and 86400, found 0.0"),
        ("--timeout x", '--timeout: expected seconds between 0 and 86400, found "x"'),
        ("--ranks 1 --all-ranks", "--ranks: expected some ranks or all of them, found ranks "
                                  "together with --all-ranks; leave one of the two out"),
        ("--ranks 9", "--ranks: expected ranks 0 to 3 of small, found 9"),
        ("--interpreter observer", "--interpreter: expected a real backend, found sim"),
    ):
        assert main(["run", str(tmp_path / "small.toml"), *options.split()]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == f"zsim: {text}"
    slow = RankError(where="ranks [0, 1]", expected="a", found="of all_ranks.toml",
                     remedy="raise timeout_s, or take fewer steps")
    assert with_options(slow) == str(slow).replace("timeout_s", "--timeout")
    names = {*RunOptions.__dataclass_fields__}
    for function in (zsim.run, zsim.validate, zsim.jitter, zsim.plan_for, zsim.sweep):
        names |= {*signature(function).parameters}
    assert {*OPTIONS} <= names
