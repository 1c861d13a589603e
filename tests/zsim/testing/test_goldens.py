"""Golden files beside a test: written, held to, and told by their difference."""

import pytest

import zsim
from tests.support.plugin_sessions import PARITY
from zsim.ir.program import parse
from zsim.testing.goldens import MOST_LINES, difference, golden_text

pytest_plugins = ["pytester"]

TEST = '''
@pytest.mark.zero(scenario="scenarios/zero3-mlp-4.toml", world_size=[2, 4])
def test_step(zero):
    zero.golden(zero.run())
    zero.golden(zero.program(), name="program")
'''


def test_golden_files_are_written_when_asked_and_held_to_after_that(sessions):
    file = sessions.scenario("zero3-mlp-4")
    sessions.tests(TEST)
    result = sessions.run()
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines([
        "no golden file *golden/test_user/test_step[[]sim-2[]].txt; --zero-update-golden writes *"
    ])
    sessions.run("--zero-update-golden").assert_outcomes(passed=2)
    written = sorted(path.name for path in (sessions.path / "golden/test_user").iterdir())
    assert written == ["test_step[sim-2].program.txt", "test_step[sim-2].txt",
                       "test_step[sim-4].program.txt", "test_step[sim-4].txt"]
    sessions.run().assert_outcomes(passed=2)
    changed = zsim.load(file).with_(batch={"micro_batch": 8}, expect=None)
    file.write_text(changed.to_toml())
    result = sessions.run("-k", "sim-2")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        "another text than *test_step[[]sim-2[]].txt; --zero-update-golden writes it anew",
        "--- golden", "+++ now", "-  activations * B", "+  activations * B",
    ])


def test_two_golden_files_of_a_test_need_names(sessions):
    sessions.tests("def test_step(zero):\n    zero.golden('a')\n    zero.golden('b')\n")
    result = sessions.run("--zero-update-golden")
    result.stdout.fnmatch_lines([
        "E * golden: expected a name for each golden file of a test, found none twice; *"
    ])


def test_a_golden_program_reads_as_one():
    run = zsim.simulate(zsim.load(PARITY / "zero3-mlp-4.toml"))
    lines = golden_text(run).splitlines()
    assert lines[:3] == [
        f"scenario zero3-mlp-4, {run.scenario.fingerprint}", "backend sim (simulator), 4 ranks",
        "collectives of a step",
    ]
    assert "  in all                                     212,872 B" in lines
    assert lines[-2].startswith("step time ")
    assert golden_text("text") == "text"
    with pytest.raises(zsim.ArgumentError, match="expected a Run, a Program or a text, found 3"):
        golden_text(3)


def test_the_program_is_that_of_the_backends_devices(sessions):
    table = {"cluster": {"preset": "dgx-h100", "ranks": 4}}
    sessions.scenario("zero3-mlp-4", **table)
    sessions.backends()
    sessions.tests(
        "from pathlib import Path\n"
        "@pytest.mark.zero(scenario='scenarios/zero3-mlp-4.toml', backend=['sim', 'twin'])\n"
        "def test_step(zero):\n    Path(zero.backend).write_text(str(zero.program()))\n"
    )
    sessions.run().assert_outcomes(passed=2)
    on_gpu, on_cpu = (parse((sessions.path / name).read_text()) for name in ("sim", "twin"))
    assert on_gpu.mesh == on_cpu.mesh
    assert on_gpu != on_cpu


def test_long_differences_and_odd_files_are_told(tmp_path):
    file = tmp_path / "golden.txt"
    file.write_text("\n".join(map(str, range(200))))
    lines = difference(file, "other", update=False).splitlines()
    assert len(lines) == MOST_LINES + 2
    assert lines[-1].startswith("… and ")
    file.write_bytes(b"a\r\n")
    assert difference(file, "a\n", update=False) == ""  # a checkout may have such ends of lines
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(zsim.ZsimError, match="expected a golden file, found 'utf-8'"):
        difference(file, "a", update=False)
