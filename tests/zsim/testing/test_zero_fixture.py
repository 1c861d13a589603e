"""The marker `zero` and the fixtures: ids, selection, ranks, the Run, the comparison, mistakes."""

import pytest

import zsim
from tests.support.plugin_sessions import PARITY
from zsim.testing.case import scaled

pytest_plugins = ["pytester"]

BOTH = '''
@pytest.mark.zero(
    scenario="scenarios/zero3-mlp-4.toml", world_size=[2, 4], backend=["sim", "twin"]
)
def test_step(zero):
    run = zero.run()
    assert isinstance(run, zsim.Run)
    assert f"{run.backend}-{run.world_size}" in zero.item.name
    assert run.scenario == zero.scenario
'''


def names(result):
    """Names of the tests that a session collects."""
    lines = [line for line in result.stdout.lines if "::" in line]
    return [line.partition("::")[2] for line in lines]


def test_the_marker_makes_a_test_for_each_backend_and_world_size(sessions):
    sessions.scenario("zero3-mlp-4")
    sessions.backends()
    sessions.tests(BOTH)
    told, _ = sessions.outcomes()
    assert told == {
        f"test_user::test_step[{name}]": "passed" for name in ("sim-2", "sim-4", "twin-2", "twin-4")
    }


def test_markers_and_names_select_backends_and_world_sizes(sessions):
    sessions.backends()
    sessions.tests(BOTH)
    for arguments, selected in {
        ("-m", "backend_sim"): ["test_step[sim-2]", "test_step[sim-4]"],
        ("-m", "not backend_sim and world_2"): ["test_step[twin-2]"],
        ("-k", "twin-4"): ["test_step[twin-4]"],
    }.items():
        assert names(sessions.run("--collect-only", "-q", *arguments)) == selected


def test_without_a_backend_in_the_marker_those_of_the_option_are_taken(sessions):
    sessions.backends()
    sessions.tests("def test_one(zero): pass\n\n@pytest.mark.zero(world_size=2)\n"
                   "def test_two(zero): pass\n")
    assert names(sessions.run("--collect-only", "-q")) == ["test_one[sim]", "test_two[sim-2]"]
    result = sessions.run("--collect-only", "-q", "--zero-backend=twin,sim,twin")
    assert names(result) == ["test_one[twin]", "test_one[sim]", "test_two[twin-2]",
                             "test_two[sim-2]"]


def test_the_fixture_scenario_is_the_markers_with_the_ranks_of_the_test(sessions):
    sessions.scenario("zero3-mlp-4")
    sessions.tests(
        "@pytest.mark.zero(scenario='scenarios/zero3-mlp-4.toml', world_size=[2, 4])\n"
        "def test_it(scenario, cluster, scenario_dir, request):\n"
        "    assert scenario.name == 'zero3-mlp-4'\n"
        "    assert cluster is scenario.cluster and cluster.kind == 'cpu'\n"
        "    assert (scenario_dir / 'zero3-mlp-4.toml').is_file()\n"
        "    assert f'sim-{scenario.world_size}' in request.node.name\n"
    )
    sessions.run().assert_outcomes(passed=2)


def test_the_keywords_of_a_nearer_marker_win_one_by_one(sessions):
    sessions.backends()
    sessions.tests(
        "pytestmark = pytest.mark.zero(backend='twin', world_size=[2, 4])\n\n"
        "@pytest.mark.zero(world_size=8)\nclass TestOfClass:\n    def test_a(self, zero): pass\n\n"
        "def test_b(zero): pass\n"
    )
    assert names(sessions.run("--collect-only", "-q")) == [
        "TestOfClass::test_a[twin-8]", "test_b[twin-2]", "test_b[twin-4]"
    ]


def test_a_fixture_of_the_users_own_called_zero_is_left_alone(sessions):
    sessions.tests(
        "@pytest.fixture\ndef zero(): return 0\n\n@pytest.fixture\ndef compare(): return 1\n\n"
        "def test_own(zero, compare): assert (zero, compare) == (0, 1)\n"
    )
    result = sessions.run("-v")
    result.stdout.fnmatch_lines(["test_user.py::test_own PASSED*"])


MISTAKES = {
    "backend='glo'": 'backend: expected fake, gloo, nccl or sim, found "glo"; did you mean '
                     "gloo?",
    "backend=['sim', 5]": 'marker zero: backend: expected a backend or a list, as ["sim", "gloo"], '
                          "found a list",
    "backend=[]": 'marker zero: backend: expected a backend or a list, as ["sim", "gloo"], found a '
                  "list",
    "world_size=0": "marker zero: world_size: expected numbers of ranks, as 4 or [2, 4], found 0",
    "world_size=[]": "marker zero: world_size: expected numbers of ranks, as 4 or [2, 4], found a "
                     "list",
    "world_size='2'": 'marker zero: world_size: expected numbers of ranks, as 4 or [2, 4], found '
                      '"2"',
    "world_size=True": "marker zero: world_size: expected numbers of ranks, as 4 or [2, 4], found "
                       "True",
    "wold_size=2": 'marker zero: expected the keywords scenario, world_size and backend, found '
                   '"wold_size"; @pytest.mark.zero(backend=[…])',
    "'gloo'": 'marker zero: expected the keywords scenario, world_size and backend, found "gloo"; '
              "@pytest.mark.zero(backend=[…])",
    "scenario=5": "marker zero: scenario: expected a Scenario or the path of its file, found 5",
}


@pytest.mark.parametrize(("arguments", "problem"), MISTAKES.items())
def test_a_mistake_in_the_marker_is_its_own_tests_error(sessions, arguments, problem):
    """Other tests of the session run; the error names file and test, and nothing else."""
    sessions.tests(
        f"@pytest.mark.zero({arguments})\ndef test_step(zero): pass\n\n"
        "def test_other(): pass\n"
    )
    result = sessions.run()
    assert f"test_user.py::test_step: {problem}" in result.stdout.lines
    assert "Traceback" not in result.stdout.str()
    assert "During handling" not in result.stdout.str()
    result.assert_outcomes(passed=1, errors=1)


def test_a_mistake_in_the_marker_of_a_test_with_parameters_is_an_error_of_each(sessions):
    sessions.tests(
        "class TestOfClass:\n"
        "    @pytest.mark.parametrize('size', [1, 2])\n"
        "    @pytest.mark.zero(backend='simm')\n"
        "    def test_step(self, size, zero): pass\n\n"
        "    def test_other(self): pass\n"
    )
    result = sessions.run()
    result.stdout.fnmatch_lines([
        f"test_user.py::TestOfClass::test_step[[]{size}[]]: backend: *did you mean sim?"
        for size in (1, 2)
    ])
    result.assert_outcomes(passed=1, errors=2)


def test_a_marker_without_the_fixture_is_a_mistake_too(sessions):
    sessions.tests("@pytest.mark.zero(backend='sim')\ndef test_step(): pass\n")
    result = sessions.run()
    result.stdout.fnmatch_lines([
        "test_user.py::test_step: marker zero: expected the fixture zero or compare among the "
        "arguments, found neither"
    ])
    result.assert_outcomes(errors=1)


def test_a_scenario_is_a_path_a_scenario_or_the_markers(sessions):
    sessions.scenario("zero3-mlp-4")
    sessions.scenario("ddp-mlp-2", to="tests")
    (sessions.path / "tests" / "test_user.py").write_text(
        "import pytest\nimport zsim\n\n@pytest.mark.zero(scenario='ddp-mlp-2.toml')\n"
        "def test_step(zero):\n"
        "    assert zero.run().record.scenario == 'ddp-mlp-2'\n"
        "    assert zero.run('scenarios/zero3-mlp-4.toml').record.scenario == 'zero3-mlp-4'\n"
        "    other = zero.scenario.with_(batch={'micro_batch': 1}, name='other')\n"
        "    assert zero.run(other).record.scenario == 'other'\n"
    )
    sessions.run("tests").assert_outcomes(passed=1)


def test_a_test_without_a_scenario_is_told_where_to_name_it(sessions):
    sessions.tests("def test_step(zero): zero.run()\n\ndef test_other(zero): zero.run('x.toml')\n")
    result = sessions.run()
    result.stdout.fnmatch_lines([
        "E * test_user.py::test_step[[]sim[]]: expected a scenario, found none; "
        "zero.run(scenario), or @pytest.mark.zero(scenario=…)",
        "E * *x.toml: no such file; *",
    ])
    result.assert_outcomes(failed=2)


def test_a_backend_that_is_not_available_skips_the_test_before_it_begins(sessions):
    sessions.backends()
    sessions.tests("@pytest.mark.zero(backend='absent')\ndef test_step(zero): 1 / 0\n")
    sessions.run().assert_outcomes(skipped=1)
    sessions.run("--zero-require-backend").assert_outcomes(errors=1)
    sessions.pytester.makeini("[pytest]\nzero_require_backend = true\n")
    result = sessions.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["backend absent: expected an interconnect, found none (--zero-require-backend)"]
    )


def test_a_rank_that_fails_raises_its_error_without_frames_of_the_framework(sessions):
    sessions.scenario("zero3-mlp-4")
    sessions.backends()
    sessions.tests(
        "@pytest.mark.zero(scenario='scenarios/zero3-mlp-4.toml', backend='failing')\n"
        "def test_told(zero): zero.run()\n\n"
        "@pytest.mark.zero(scenario='scenarios/zero3-mlp-4.toml', backend='failing')\n"
        "def test_caught(zero):\n    with pytest.raises(zsim.RankError): zero.run()\n"
    )
    result = sessions.run("--zero-timeout=2.5")
    result.stdout.fnmatch_lines([
        "E   *RunError: rank 1 within 2.5 s: expected steps, found ValueError",
        "E   Traceback of rank 1",
    ])
    assert "zsim/runs" not in result.stdout.str()
    result.assert_outcomes(passed=1, failed=1)


def test_the_seed_of_the_option_is_that_of_every_scenario(sessions):
    sessions.scenario("zero3-mlp-4")
    sessions.tests("@pytest.mark.zero(scenario='scenarios/zero3-mlp-4.toml')\n"
                   "def test_step(zero): assert zero.run().scenario.seed == 17\n")
    sessions.run("--zero-seed=17").assert_outcomes(passed=1)


def test_the_option_gives_the_ranks_of_tests_whose_marker_names_none(sessions):
    sessions.scenario("zero3-mlp-4")
    marker = "@pytest.mark.zero(scenario='scenarios/zero3-mlp-4.toml'{})\n"
    sessions.tests(
        marker.format("") + "def test_step(zero): assert zero.run().scenario.world_size in (2, 8)\n"
        + marker.format(", world_size=3") + "def test_named(zero): pass\n"
    )
    told, _ = sessions.outcomes("test_user.py", "--zero-world-size=2,8")
    assert told == {
        f"test_user::{test}": "passed"
        for test in ("test_step[sim-2]", "test_step[sim-8]", "test_named[sim-3]")
    }


@pytest.mark.parametrize(("option", "problem"), [
    ("--zero-world-size=2,x", "--zero-world-size: expected numbers of ranks, as 2,4, found 2,x"),
    ("--zero-seed=-1", "--zero-seed: expected a whole number from 0 to 2,147,483,648, found "
                       "-1"),
    ("--zero-seed=x", "--zero-seed: expected a whole number from 0 to 2,147,483,648, found x"),
    ("--zero-timeout=soon", "--zero-timeout: expected seconds between 0 and 86400, found "
                            '"soon"'),
    ("--zero-timeout=nan", "--zero-timeout: expected seconds between 0 and 86400, found nan"),
    ("--zero-timeout=0", "--zero-timeout: expected seconds between 0 and 86400, found 0.0"),
    ("--zero-artifacts=file", "file/run.json: expected a file that can be written, found "),
])
def test_options_that_cannot_be_read_are_usage_errors(sessions, option, problem):
    (sessions.path / "file").write_text("")
    result = sessions.run(option)
    assert problem in result.stderr.str()
    assert result.ret == pytest.ExitCode.USAGE_ERROR


COMPARED = '''
@pytest.mark.zero(scenario="scenarios/ddp-mlp-2.toml")
def test_same(compare):
    comparison = compare()
    assert comparison.predicted.backend == "sim"
    assert comparison.ok

@pytest.mark.zero(scenario="scenarios/ddp-mlp-2.toml")
def test_run(zero, compare):
    assert compare(zero.run()).ok
'''


def test_compare_fails_with_the_verdict(sessions):
    sessions.scenario("ddp-mlp-2")
    sessions.backends()
    sessions.tests(COMPARED)
    told, result = sessions.outcomes("test_user.py", "--zero-backend=sim,twin,twisted")
    assert told == {
        "test_user::test_same[twin]": "passed", "test_user::test_same[twisted]": "failure",
        "test_user::test_run[twin]": "passed", "test_user::test_run[twisted]": "failure",
    }
    result.stdout.fnmatch_lines([
        "ddp-mlp-2: sim against twisted (executor), 2 ranks",
        "  bytes                      FAILED *", "  DIFFERS: bytes*",
    ])


def test_compare_has_nothing_to_do_on_the_simulator_alone_and_says_so(sessions):
    sessions.scenario("ddp-mlp-2")
    sessions.tests(COMPARED)
    result = sessions.run("-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["SKIPPED *compare: nothing to compare on sim, which predicts; *"])
    sessions.run("--zero-require-backend").assert_outcomes(failed=2)


def test_compare_fails_where_an_aspect_that_is_required_was_not_checked(sessions):
    sessions.scenario("ddp-mlp-2")
    sessions.backends()
    sessions.tests("@pytest.mark.zero(scenario='scenarios/ddp-mlp-2.toml', backend='twin')\n"
                   "def test_time(compare): compare(require=('time',))\n")
    result = sessions.run()
    result.stdout.fnmatch_lines(["  agrees in *FAILED: --require time"])
    result.assert_outcomes(failed=1)


@pytest.mark.parametrize(("name", "world_size", "mesh"), [
    ("zero3-mlp-4", 2, (1, 2)), ("fsdp2-gpt-4", 8, (1, 8)), ("hsdp-gpt-2x2", 8, (4, 2)),
    ("hsdp-gpt-2x2", 4, (2, 2)), ("fsdp1-gpt-2x2", 8, (4, 2)), ("ddp-mlp-2", 6, (6, 1)),
    ("zero-redundancy-gpt-4", 2, (2, 1)), ("zero3-uneven-2x2", 8, (4, 2)),
    ("fsdp1-gpt-4", 8, (1, 8)), ("zero2-gpt-4-accumulate-every", 12, (1, 12)),
])
def test_a_scenario_on_other_ranks_fills_the_outermost_axis_anew(name, world_size, mesh):
    scenario = zsim.load(PARITY / f"{name}.toml")
    other = scaled(scenario, world_size)
    assert other.mesh.shape == mesh
    assert other.world_size == other.cluster.num_ranks == world_size
    assert other.model == scenario.model
    assert (other.expect == ()) == (world_size != scenario.world_size)


def test_gpus_fill_nodes_one_after_another():
    large = zsim.Scenario(
        model={"preset": "gpt-tiny"}, batch={"micro_batch": 1, "sequence_length": 8},
        cluster={"preset": "dgx-h100", "nodes": 2}, strategy={"name": "fsdp2", "dp_shard": 16},
    )
    sizes = {size: scaled(large, size) for size in (1, 4, 8, 12, 16, 64)}
    assert {size: case.world_size for size, case in sizes.items()} == {size: size for size in sizes}
    assert [case.cluster.num_nodes for case in sizes.values()] == [1, 1, 1, 2, 2, 8]


def test_ranks_that_the_inner_axis_does_not_divide_are_refused():
    with pytest.raises(zsim.ScenarioError, match="strategy.dp_shard: expected a divisor of the"):
        scaled(zsim.load(PARITY / "hsdp-gpt-2x2.toml"), 3)
