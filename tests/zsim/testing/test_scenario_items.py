"""Scenario files as tests: those that are collected, what fails, and the words for it."""

import pytest

from tests.support.folders import ROOT
from tests.support.plugin_sessions import PARITY
from zsim.scenario.scenario import load
from zsim.testing.plugin.scenario_items import is_scenario

pytest_plugins = ["pytester"]

BAD = 'model = { preset = "gpt-tny" }\nstrategy = { name = "fsdp3" }\nspeed = 3\n'


def test_a_folder_of_scenarios_is_a_session_of_tests(sessions):
    sessions.scenario("zero3-mlp-4")
    sessions.scenario("ddp-mlp-2", to="scenarios/deeper")
    told, result = sessions.outcomes("scenarios")
    assert told == {
        "scenarios.deeper.ddp-mlp-2.toml::sim": "passed",
        "scenarios.zero3-mlp-4.toml::sim": "passed",
    }
    assert result.ret == 0


def test_an_id_names_scenario_and_backend_and_selects_them(sessions):
    sessions.scenario("zero3-mlp-4")
    sessions.scenario("ddp-mlp-2")
    result = sessions.run("scenarios/zero3-mlp-4.toml::sim", "-v")
    result.stdout.fnmatch_lines(["scenarios/zero3-mlp-4.toml::sim PASSED*", "*1 passed*"])


def test_an_expectation_that_does_not_hold_is_told_with_what_is_behind_it(sessions):
    sessions.scenario(
        "zero3-mlp-4", expect={"peak_memory": "<= 100 KiB", "all_gathers": 3, "step_time": "<= 9 s"}
    )
    result = sessions.run("scenarios")
    lines = result.stdout.lines
    first = lines.index("peak_memory: expected <= 100 KiB, found 212,872 B")
    assert lines[first : first + 12] == [
        "peak_memory: expected <= 100 KiB, found 212,872 B", "on rank 0 in backward blocks.1:",
        "     66,816 B  unsharded_parameters  blocks.0 and 1 like it",
        "     50,792 B  optimizer_states      root",
        "     33,408 B  unsharded_gradients   blocks.1",
        "     25,056 B  parameters            blocks.0 and 2 like it",
        "     18,560 B  temporaries           blocks.1", "     18,240 B  in 8 rows more",
        "all_gathers: expected 3, found 8", "all_gather of rank 0, by unit:",
        "     2 each of blocks.0, blocks.1, blocks.2 and 1 more",
        "in all: all_gather 8, reduce_scatter 4",
    ]
    assert "step_time" not in result.stdout.str()
    assert result.ret == 1


def test_a_file_that_does_not_parse_is_one_failing_test_and_the_others_run(sessions):
    sessions.scenario("zero3-mlp-4")
    bad = sessions.path / "scenarios" / "bad.toml"
    bad.write_text(BAD)
    sessions.backends()
    told, result = sessions.outcomes("scenarios", "--zero-backend=sim,twin")
    assert told == {
        "scenarios.bad.toml::unreadable": "failure", "scenarios.zero3-mlp-4.toml::sim": "passed",
        "scenarios.zero3-mlp-4.toml::twin": "passed",
    }
    with pytest.raises(Exception, match="speed: unknown key") as caught:
        load(bad)
    problems = str(caught.value).replace(f"{bad}: ", "scenarios/bad.toml: ").splitlines()
    assert len(problems) == 5
    assert [line for line in problems if line not in result.stdout.lines] == []
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model = 3\nstrategy = " + "[" * 99, "not TOML: "),
        ("model = 3\nstrategy =\n", "not TOML: "),
        ("model = 3\nbatch = 4\n# " + "x" * 300_000, "expected at most 262,144 bytes, found more"),
        ("model = 3\nbatch = 4\nmodel = 5", "not TOML: "),
    ],
    ids=["deep", "broken", "too large", "twice"],
)
def test_bad_files_are_told_in_the_words_of_the_command_line(sessions, text, problem):
    file = sessions.path / "scenarios" / "bad.toml"
    file.parent.mkdir()
    file.write_text(text)
    result = sessions.run("scenarios")
    first = "scenarios/bad.toml: "
    assert any(line.startswith(first) and problem in line for line in result.stdout.lines)
    result.assert_outcomes(failed=1)


def test_a_scenario_that_does_not_fit_its_device_fails_unless_that_is_meant(sessions):
    table = {"cluster": {"preset": "dgx-h100", "ranks": 4}, "model": {"preset": "llama-3-8b"}}
    sessions.scenario("ddp-gpt-4", **table)
    result = sessions.run("scenarios")
    result.stdout.fnmatch_lines(
        ["memory: OOM: needs * GiB (* to *) of 79.11 GiB; expect.fits = false says that this is *"]
    )
    result.assert_outcomes(failed=1)
    sessions.scenario("ddp-gpt-4", **table, expect={"fits": False})
    sessions.run("scenarios").assert_outcomes(passed=1)


SKIPPED = {"kind": "skipped_collective", "rank": 1, "at": "all_gather blocks.1"}
SLOW = {"kind": "slow_rank", "rank": 2, "factor": 2.0}


@pytest.mark.parametrize(("faults", "expect", "told"), [
    ([SKIPPED], {"ends": False, "at_fault": 1}, []),
    ([SKIPPED], {"ends": False}, []),
    ([SLOW], {"ends": True, "at_fault": 2}, []),
    ([SKIPPED], {"ends": False, "at_fault": 0},
     ["at_fault: expected rank 0, found rank 1", "rank 1, op *skipped_collective: rank 1, at *"]),
    ([SKIPPED], {}, ["rank 1, op *skipped_collective: rank 1, at *"]),
    ([SLOW], {"ends": False}, ["ends: expected false, found true"]),
    ([SLOW], {"at_fault": 3}, ["at_fault: expected rank 3, found rank 2"]),
])
def test_a_fault_whose_end_is_expected_is_a_passing_test(sessions, faults, expect, told):
    sessions.scenario("zero3-mlp-4", faults=faults, expect=expect or None)
    result = sessions.run("scenarios")
    result.stdout.fnmatch_lines(told)
    result.assert_outcomes(**{"failed" if told else "passed": 1})


def test_other_toml_files_are_no_tests(sessions):
    sessions.scenario("zero3-mlp-4")
    for name, text in {
        "pyproject.toml": '[tool.x]\nmodel = 3\nbatch = 1\n',
        "scenarios/pyproject.toml": (PARITY / "ddp-mlp-2.toml").read_text(),
        "scenarios/other.toml": '[tool.x]\nmodel = 3\nbatch = 1\n[tool.y]\nstrategy = 3\n',
        "scenarios/few.toml": 'model = 3\nname = "x"\n',
    }.items():
        (sessions.path / name).write_text(text)
    told, _ = sessions.outcomes(".", "--zero-backend=sim")
    assert told == {"scenarios.zero3-mlp-4.toml::sim": "passed"}


FOLDERS = ("scenarios", "tests/benchmarks", "tests/user_project/scenarios")
"""Folders of this checkout with scenarios."""


def test_the_look_tells_scenarios_from_all_other_toml_files_of_this_checkout():
    files = [
        file for file in ROOT.rglob("*.toml")
        if not any(part.startswith(".") for part in file.relative_to(ROOT).parts)
    ]
    scenarios = {file for file in files if is_scenario(file)}
    expected = {
        file for file in files
        if any(ROOT / folder in file.parents for folder in FOLDERS)
    }
    assert scenarios == expected
    assert len(files) > len(scenarios) > 70


@pytest.mark.parametrize("text", [
    "[model]\npreset = 'gpt-tiny'\n[batch]\nmicro_batch = 1\n",
    "\ufeff# words\n  model = {}\n\"batch\" = {}\n", "[ model ]\nname = 1\n[[strategy]]\n",
])
def test_every_way_to_write_a_table_is_seen(tmp_path, text):
    file = tmp_path / "s.toml"
    file.write_text(text)
    assert is_scenario(file)


def test_a_file_that_cannot_be_read_counts_so_that_a_test_says_why(tmp_path):
    assert is_scenario(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "text", ["model = {\n", "\0", "a" + ".a" * 9000 + " = 1", "x = " + "[" * 9000], ids=range(4)
)
def test_a_file_that_is_no_toml_fails_and_the_others_run(sessions, text):
    sessions.scenario("ddp-mlp-2")
    (sessions.path / "scenarios" / "bad.toml").write_text(text)
    told, result = sessions.outcomes("scenarios")
    assert told == {
        "scenarios.bad.toml::unreadable": "failure", "scenarios.ddp-mlp-2.toml::sim": "passed",
    }
    result.stdout.fnmatch_lines(["scenarios/bad.toml: *"])


@pytest.mark.parametrize("text", ["", "[modle]\n[bacth]\n"])
def test_a_file_without_tables_of_a_scenario_is_told_by_name_and_fails_where_it_is_named(
    sessions, text
):
    sessions.scenario("ddp-mlp-2")
    (sessions.path / "scenarios" / "bad.toml").write_text(text)
    result = sessions.run("scenarios", "-q")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([
        "*scenarios/bad.toml: expected two of the tables batch, cluster, model, strategy, found "
        "fewer; name the file itself to see its mistakes"
    ])
    named = sessions.run("scenarios/bad.toml")
    named.assert_outcomes(failed=1)
    named.stdout.fnmatch_lines(["scenarios/bad.toml: *"])


def test_scenarios_beside_tests_in_python_are_told_by_name(sessions):
    sessions.scenario("ddp-mlp-2").rename(sessions.path / "scenarios" / "UPPER.TOML")
    (sessions.path / "scenarios" / "test_user.py").write_text(WITH_TESTS)
    result = sessions.run("scenarios")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*UPPER.TOML: a scenario beside tests in Python is a test with *"])
    sessions.run("scenarios", "--zero-backend=sim").assert_outcomes(passed=2)


WITH_TESTS = "def test_of_the_user():\n    pass\n"


@pytest.mark.parametrize(("arguments", "ini", "collected"), [
    ((), "", 0),  # the user has named nothing
    (("tests",), "", 0),  # a folder with tests in Python
    ((".",), "", 0),
    (("data",), "", 1),  # a folder with none
    (("tests/a.toml",), "", 1),
    (("tests", "data"), "", 1),
    (("--zero-backend=sim",), "", 2),
    (("tests", "--zero-backend=sim"), "", 1),
    ((), "zero_backend = sim", 2),
    (("tests/test_user.py",), "zero_backend = sim", 0),
])
def test_scenario_files_are_tests_only_where_they_are_asked_for(
    sessions, arguments, ini, collected
):
    sessions.pytester.makeini(f"[pytest]\n{ini}\n")
    for folder in ("tests", "data"):
        sessions.scenario("ddp-mlp-2", to=folder).rename(sessions.path / folder / "a.toml")
    (sessions.path / "tests" / "test_user.py").write_text(WITH_TESTS)
    result = sessions.run(*arguments, "--collect-only", "-q")
    ids = [line for line in result.stdout.lines if "::" in line]
    assert sum(line.endswith("a.toml::sim") for line in ids) == collected


def test_an_unknown_backend_is_a_usage_error(sessions):
    sessions.scenario("ddp-mlp-2")
    for names, wrong in (("glo", '"glo"; did you mean gloo?'), ("sim,,gloo", '""; `zsim list')):
        result = sessions.run("scenarios", f"--zero-backend={names}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        (line,) = [line for line in result.stderr.lines if line.startswith("ERROR: ")]
        assert "ERROR: --zero-backend: expected fake, gloo, nccl or sim, found" in line
        assert wrong in line


def test_a_backend_that_is_not_available_skips_with_its_reason_or_fails(sessions):
    sessions.scenario("ddp-mlp-2")
    sessions.backends()
    result = sessions.run("scenarios", "--zero-backend=sim,absent", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED *backend absent: expected an interconnect, found none*"])
    result = sessions.run("scenarios", "--zero-backend=sim,absent", "--zero-require-backend")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["backend absent: expected an interconnect, found none (--zero-require-backend)"]
    )


def test_a_real_run_is_compared_with_the_simulated_where_both_are_asked_for(sessions):
    sessions.scenario("ddp-mlp-2")
    sessions.backends()
    told, result = sessions.outcomes("scenarios", "--zero-backend=sim,twin,twisted")
    assert told == {
        "scenarios.ddp-mlp-2.toml::sim": "passed", "scenarios.ddp-mlp-2.toml::twin": "passed",
        "scenarios.ddp-mlp-2.toml::twisted": "failure",
    }
    result.stdout.fnmatch_lines([
        "ddp-mlp-2: sim against twisted (executor), 2 ranks",
        "  bytes                      FAILED *", "  DIFFERS: bytes*",
    ])
    sessions.run("scenarios", "--zero-backend=twisted").assert_outcomes(passed=1)


def test_a_rank_that_fails_is_told_in_its_own_words(sessions):
    sessions.scenario("ddp-mlp-2")
    sessions.backends()
    result = sessions.run("scenarios", "--zero-backend=failing", "--zero-timeout=7")
    result.stdout.fnmatch_lines([
        "rank 1 within 7.0 s: expected steps, found ValueError", "Traceback of rank 1"
    ])
    assert "registry.py" not in result.stdout.str()
    result.assert_outcomes(failed=1)


def test_expectations_that_a_backend_cannot_check_never_pass_unsaid(sessions):
    sessions.scenario("ddp-mlp-2", expect={"step_time": "<= 1 ns"})
    sessions.backends()
    asked = ("scenarios", "--zero-backend=timeless", "-rs")
    skipped = sessions.run(*asked)
    skipped.assert_outcomes(skipped=1)
    skipped.stdout.fnmatch_lines(["*timeless measures no step_time of [[]expect[]]*"])
    required = sessions.run(*asked, "--zero-require-backend")
    required.assert_outcomes(failed=1)
    required.stdout.fnmatch_lines(["*timeless measures no step_time*(--zero-require-backend)"])
