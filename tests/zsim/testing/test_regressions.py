"""Runs of a session held to saved ones: limits, what is compared with what, and bad input."""

import json
import shutil

import pytest

import zsim
from tests.support.plugin_sessions import PARITY
from zsim.analysis.growth import FIGURES, Limit, LimitError, parse_limits

pytest_plugins = ["pytester"]


@pytest.fixture
def saved(sessions):
    """Two scenarios, and their Runs in the folder `before`."""
    for name in ("zero3-mlp-4", "ddp-mlp-2"):
        zsim.simulate(zsim.load(sessions.scenario(name))).save(
            sessions.path / "before" / f"{name}.json"
        )
    return sessions


def lighten(sessions, name="zero3-mlp-4"):
    """Edit the saved Run of a scenario: peak and time were a tenth less, without spans."""
    file = sessions.path / "before" / f"{name}.json"
    table = json.loads(file.read_text())
    table["run"]["step_time_ns"] = table["run"]["step_time_ns"] * 9 // 10
    for rank in table["run"]["ranks"]:
        rank["spans"] = []
        memory = rank.get("phases", {}).get("steady", {}).get("memory")
        if memory:
            memory["peak_bytes"] = memory["peak_bytes"] * 9 // 10
            memory["by_kind"], memory["timeline"], memory["parts"] = {}, [], []
    file.write_text(json.dumps(table))


def test_runs_that_have_not_changed_pass_and_are_counted(saved):
    result = saved.run("scenarios", "--zero-compare=before", "--zero-fail-if=peak:+0%,step:+0%")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([f"*zsim: Runs against {saved.path / 'before'}*", "2 unchanged"])


def test_growth_beyond_a_limit_fails_with_both_figures(saved):
    lighten(saved)
    result = saved.run(
        "scenarios", "--zero-compare=before", "--zero-fail-if=peak:+2%,step:+50%,sent:+0%"
    )
    result.assert_outcomes(passed=1, failed=1)
    file = saved.path / "before" / "zero3-mlp-4.json"
    lines = result.stdout.lines
    first = lines.index(f"zero3-mlp-4 is worse than {file}")
    assert lines[first + 1] == "  peak 212,872 B, was 191,584 B: +11.11%, more than +2 %"
    (text,) = [line for line in lines if line.startswith("zero3-mlp-4 on sim: ")]
    assert text == (
        "zero3-mlp-4 on sim: peak 212,872 B, was 191,584 B: +11.11%, more than +2 %; "
        "step 6.151 ms, was 5.536 ms: +11.11%; sent 304,656 B, was 304,656 B: +0.00%"
    )
    assert "1 unchanged" in lines


def test_without_limits_growth_is_told_and_fails_nothing(saved):
    lighten(saved)
    result = saved.run("scenarios", "--zero-compare=before/zero3-mlp-4.json")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([
        "zero3-mlp-4 on sim: peak 212,872 B, was 191,584 B: +11.11%; step *: +11.11%",
        "0 unchanged", "no saved Run of ddp-mlp-2, on the same backend and ranks",
    ])


def test_runs_of_tests_are_held_to_saved_ones_too(saved):
    lighten(saved)
    saved.tests(
        "@pytest.mark.zero(scenario='scenarios/zero3-mlp-4.toml', world_size=[4, 2])\n"
        "def test_step(zero): zero.run()\n"
    )
    result = saved.run("test_user.py", "--zero-compare=before", "--zero-fail-if", "peak:+1%", "-v")
    result.stdout.fnmatch_lines([
        "test_user.py::test_step[[]sim-4[]] FAILED*", "test_user.py::test_step[[]sim-2[]] PASSED*",
        "no saved Run of zero3-mlp-4, on the same backend and ranks",
    ])


def test_ini_options_hold_a_session_as_the_command_line_does(saved):
    lighten(saved)
    saved.pytester.makeini("[pytest]\nzero_compare = before\nzero_fail_if = peak:+2%\n")
    saved.run("scenarios").assert_outcomes(passed=1, failed=1)
    saved.run("scenarios", "--zero-fail-if=peak:+12%").assert_outcomes(passed=2)


def test_growth_of_an_edited_scenario_is_told_and_fails_by_the_limits(saved):
    changed = zsim.load(PARITY / "zero3-mlp-4.toml").with_(batch={"micro_batch": 8}, expect=None)
    (saved.path / "scenarios" / "zero3-mlp-4.toml").write_text(changed.to_toml())
    told = saved.run("scenarios", "--zero-compare=before")
    told.assert_outcomes(passed=2)
    told.stdout.fnmatch_lines([
        "zero3-mlp-4 on sim: the scenario has changed since; peak *, was 212,872 B: +*%; step *",
        "1 unchanged",
    ])
    result = saved.run("scenarios", "--zero-compare=before", "--zero-fail-if=peak:+2%,step:+900%")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([
        f"zero3-mlp-4 is worse than {saved.path / 'before' / 'zero3-mlp-4.json'}: the scenario has "
        "changed since", "  peak *, was 212,872 B: +*%, more than +2 %",
    ])


def test_a_session_that_has_compared_nothing_fails(saved):
    (saved.path / "before" / "zero3-mlp-4.json").rename(saved.path / "other.json")
    result = saved.run("scenarios/ddp-mlp-2.toml", "--zero-compare=other.json")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([
        "no saved Run of ddp-mlp-2, on the same backend and ranks",
        "ERROR: --zero-compare: expected a saved Run of some scenario that ran, found none",
    ])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(("path", "problem"), [
    ("none.json", "expected a saved Run, found no such file"),
    ("text.json", "expected a saved Run, found no JSON"),
    ("version.json", "schema_version: expected 1, that of this version, found 99"),
    ("folder", "--zero-compare: expected saved Runs in this folder, found none in folder; "),
])
def test_what_is_no_saved_run_of_this_version_is_a_usage_error(saved, path, problem):
    (saved.path / "folder").mkdir()
    (saved.path / "text.json").write_text("peak: 3")
    table = json.loads((saved.path / "before" / "ddp-mlp-2.json").read_text())
    (saved.path / "version.json").write_text(json.dumps(table | {"schema_version": 99}))
    result = saved.run("scenarios", f"--zero-compare={path}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert problem in result.stderr.str()


def test_a_damaged_run_in_a_folder_fails_the_test_of_its_scenario_alone(saved):
    (saved.path / "before" / "ddp-mlp-2.json").write_text("{")
    result = saved.run("scenarios", "--zero-compare=before")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*ddp-mlp-2.json: expected a saved Run, found no JSON; *"])


@pytest.mark.parametrize(
    "text", ["peak", "peak:2%", "peak:-2%", "peek:+2%", "peak:+2", "peak:+2%,,", "peak:+x%", "  "]
)
def test_limits_that_cannot_be_read_are_usage_errors(saved, text):
    result = saved.run("scenarios", "--zero-compare=before", f"--zero-fail-if={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        'ERROR: --zero-fail-if: expected limits as "peak:+2%,step:+5%", of peak, first_peak, step, '
        "exposed, sent and collectives, found "
    ) in result.stderr.str()


def test_limits_without_a_saved_run_are_a_usage_error(sessions):
    result = sessions.run("--zero-fail-if=peak:+2%")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "--zero-fail-if: expected --zero-compare RUN beside it, found none" in (
        result.stderr.str()
    )


def test_every_figure_has_a_limit():
    text = ",".join(f"{name}:+{number}.5%" for number, name in enumerate(FIGURES))
    assert parse_limits(text, where="--fail-if") == tuple(
        Limit(name, (number + 0.5) / 100) for number, name in enumerate(FIGURES)
    )
    with pytest.raises(LimitError):
        parse_limits("", where="--fail-if")


def test_artifacts_of_one_session_are_the_saved_runs_of_the_next(saved):
    shutil.rmtree(saved.path / "before")
    saved.run("scenarios", "--zero-artifacts=before").assert_outcomes(passed=2)
    lighten(saved, "scenarios/ddp-mlp-2.toml/sim/ddp-mlp-2")
    result = saved.run("scenarios", "--zero-compare=before", "--zero-fail-if=peak:+2%")
    result.assert_outcomes(passed=1, failed=1)


def test_a_limit_of_what_a_backend_does_not_measure_is_told_and_is_no_comparison(sessions):
    sessions.scenario("ddp-mlp-2", optimizer={"name": "sgd"})
    sessions.backends()
    asked = ("scenarios", "--zero-backend=timeless")
    sessions.run(*asked, "--zero-artifacts=before").assert_outcomes(passed=1)
    both = sessions.run(*asked, "--zero-compare=before", "--zero-fail-if=peak:+0%,step:+5%")
    both.assert_outcomes(passed=1)
    (line,) = [each for each in both.stdout.lines if each.startswith("ddp-mlp-2 on timeless: ")]
    assert line.endswith("; step not measured")
    assert "0 unchanged" in both.stdout.lines
    alone = sessions.run(*asked, "--zero-compare=before", "--zero-fail-if=step:+5%")
    assert "ddp-mlp-2 on timeless: step not measured" in alone.stdout.lines
    assert alone.ret == 1
