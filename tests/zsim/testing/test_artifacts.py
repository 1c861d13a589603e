"""Artifacts and properties of each test, in one process and in several."""

import gzip
import json

import pytest

import zsim
from tests.support.plugin_sessions import outcomes, properties
from zsim.testing.plugin.names_of_tests import MOST_CHARACTERS, file_name, folder_of

pytest_plugins = ["pytester"]

TEST = '''
@pytest.mark.zero(scenario="scenarios/zero3-mlp-4.toml", world_size=[2, 4])
def test_step(zero):
    print("said by the test")
    zero.run()
    run = zero.run(zero.scenario.with_(seed=5))
    assert run.peak_memory < 9
'''


def files(folder):
    """Files below a folder, sorted."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_each_test_has_a_folder_with_its_runs_traces_and_log(sessions):
    sessions.scenario("zero3-mlp-4")
    sessions.tests(TEST)
    sessions.run("test_user.py", "--zero-artifacts=kept").assert_outcomes(failed=2)
    kept = sessions.path / "kept"
    each = ["log.txt", "zero3-mlp-4.2.json", "zero3-mlp-4.2.trace.json.gz", "zero3-mlp-4.json",
            "zero3-mlp-4.trace.json.gz"]
    assert files(kept) == [
        f"test_user.py/test_step[sim-{size}]/{name}" for size in (2, 4) for name in each
    ]
    folder = kept / "test_user.py" / "test_step[sim-4]"
    assert zsim.load_run(folder / "zero3-mlp-4.json").world_size == 4
    assert json.loads(gzip.decompress((folder / each[4]).read_bytes()))["traceEvents"]
    log = (folder / "log.txt").read_text()
    assert log.startswith("test_user.py::test_step[sim-4] setup: passed, ")
    assert "assert 212,872 B < 9 B\n" in log
    assert "-- Captured stdout call\nsaid by the test\n" in log


def test_what_ranks_had_ended_before_one_failed_is_kept(sessions):
    sessions.scenario("ddp-mlp-2")
    sessions.backends()
    sessions.run("scenarios", "--zero-backend=failing", "--zero-artifacts=kept")
    folder = sessions.path / "kept" / "scenarios" / "ddp-mlp-2.toml" / "failing"
    assert files(folder) == ["ddp-mlp-2.incomplete.json", "ddp-mlp-2.trace.json.gz", "log.txt"]
    assert not zsim.load_run(folder / "ddp-mlp-2.incomplete.json").complete


def test_without_the_option_nothing_is_written(sessions):
    sessions.scenario("zero3-mlp-4")
    before = files(sessions.path)
    sessions.run("scenarios", "-p", "no:cacheprovider")
    assert files(sessions.path) == before


def test_junit_properties_tell_backend_ranks_peak_and_time(sessions):
    sessions.scenario("zero3-mlp-4")
    told, _ = sessions.outcomes("scenarios")
    run = zsim.simulate(zsim.load(sessions.path / "scenarios" / "zero3-mlp-4.toml"))
    assert [*told] == ["scenarios.zero3-mlp-4.toml::sim"]
    assert properties(sessions.path / "outcomes.xml", "sim") == [
        ("scenario", "zero3-mlp-4"), ("backend", "sim"), ("world_size", "4"),
        ("peak_memory_bytes", "212872"), ("step_time_ns", str(int(run.step_time))),
    ]


def test_xdist_changes_nothing(sessions):
    pytest.importorskip("xdist")
    for name in ("zero3-mlp-4", "ddp-mlp-2", "fsdp2-gpt-4"):
        sessions.scenario(name)
    sessions.tests(TEST)
    (sessions.path / "scenarios" / "ruff.toml").write_text("")
    zsim.simulate(zsim.load(sessions.path / "scenarios/ddp-mlp-2.toml")).save(
        sessions.path / "before.json"
    )
    reports = {}
    for name, arguments in {"one": (), "two": ("-p", "xdist", "-n", "2")}.items():
        report = sessions.path / f"{name}.xml"
        result = sessions.run_apart(
            "scenarios", "test_user.py", f"--zero-artifacts={name}", f"--junitxml={report}",
            "--zero-compare=before.json", "--zero-fail-if=peak:+0%", *arguments,
        )
        result.assert_outcomes(passed=3, failed=2)
        result.stdout.fnmatch_lines(["1 unchanged", "no saved Run of fsdp2-gpt-4, zero3-mlp-4, *"])
        assert result.stdout.str().count("scenarios/ruff.toml: expected two of the tables") == 1
        reports[name] = outcomes(report), files(sessions.path / name)
    assert reports["one"] == reports["two"]
    assert len(reports["one"][1]) == 3 * 3 + 2 * 5


def test_xdist_leaves_alone_what_the_command_line_does_not_name(sessions):
    pytest.importorskip("xdist")
    sessions.scenario("ddp-mlp-2")
    sessions.tests("def test_of_the_user(): pass\n")
    result = sessions.run_apart("-p", "xdist", "-n", "1")
    result.assert_outcomes(passed=1)


def test_names_of_files_are_those_of_tests_where_they_can_be():
    assert file_name("test_step[sim-2]") == "test_step[sim-2]"
    odd = [file_name(text) for text in ("a b", "a/b", "a\nb", "..", "", "a" * 500, "é")]
    assert len(set(odd)) == len(odd)
    assert all(name.isascii() and name[0] != "." and "/" not in name for name in odd)
    assert max(map(len, odd)) <= MOST_CHARACTERS + 7
    assert folder_of("tests/../x/test_a.py::TestB::test_c[../..]").parts[:3] == (
        "tests", file_name(".."), "x"
    )
