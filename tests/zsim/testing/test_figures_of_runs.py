"""Figures of a Run are the numbers that they were, and know why they are what they are."""

import copy
import pickle
import re

import pytest

import zsim
from tests.support.folders import ROOT
from zsim.testing.explanations import comparison_lines

pytest_plugins = ["pytester"]

LLAMA = zsim.load(ROOT / "scenarios/published/llama-3-8b-8-h100.toml")
SMALL = zsim.load(ROOT / "scenarios/parity/fsdp2-gpt-4.toml")


def test_a_peak_is_an_int_of_bytes_and_a_share_a_float():
    run = zsim.simulate(SMALL)
    assert run.peak_memory == run.figures.peak_memory_bytes
    assert repr(run.peak_memory) == "2,533,528 B (2.42 MiB)"
    assert type(run.peak_memory + 1) is int
    exposed = run.exposed_communication
    assert exposed == run.figures.exposed_communication_ns
    assert exposed.fraction == run.figures.exposed_share
    assert 0 < exposed.fraction < 1


def test_collectives_are_counted_by_kind_and_are_a_mapping_still():
    run = zsim.simulate(SMALL)
    assert dict(run.collectives) == dict(run.figures.collectives)
    assert run.collectives.count("all_gather") == run.collectives["all_gather"].count == 9
    assert run.collectives.count("broadcast") == 0
    with pytest.raises(zsim.ArgumentError) as caught:
        run.collectives.count("allgather")
    assert str(caught.value) == (
        'collectives.count: expected all_gather, all_reduce, all_to_all, broadcast or '
            'reduce_scatter, '
        'found "allgather"; did you mean all_gather?'
    )
    with pytest.raises(zsim.ArgumentError, match="found 3"):
        run.collectives.count(3)


def test_figures_are_copied_and_pickled_with_their_run():
    run = zsim.simulate(SMALL)
    for figure in (run.peak_memory, run.exposed_communication, run.collectives.count("all_gather")):
        assert copy.copy(figure).run is run
        again = pickle.loads(pickle.dumps(figure))
        assert again == figure
        assert again.run == run
    assert pickle.loads(pickle.dumps(run.collectives)) == run.collectives


def test_a_figure_of_no_run_explains_nothing():
    assert comparison_lines("==", 1, 2) is None
    assert comparison_lines("<", zsim.GiB(1), zsim.GiB(2)) is None
    assert comparison_lines("<", type(zsim.simulate(SMALL).peak_memory)(3), 2) is None


def test_a_peak_tells_what_lives_there():
    run = zsim.simulate(LLAMA)
    assert comparison_lines("<=", run.peak_memory, zsim.GiB(10)) == [
        "65,214,545,808 B (60.74 GiB) <= 10,737,418,240 B (10.00 GiB)",
        "50.74 GiB too much; on rank 0 in backward root:",
        "    41.16 GiB  activations           blocks.0 and 31 like it",
        "     7.48 GiB  optimizer_states      root", "     3.91 GiB  temporaries           root",
        "     3.25 GiB  parameters            blocks.0 and 31 like it",
        "     2.08 GiB  activations           root", "     2.85 GiB  in 3 rows more",
    ]
    assert comparison_lines(">=", 10, run.peak_memory)[:2] == [
        "10 B >= 65,214,545,808 B (60.74 GiB)", "60.74 GiB too much; on rank 0 in backward root:"
    ]
    assert comparison_lines(">=", run.peak_memory, zsim.GiB(70))[1] == (
        "on rank 0 in backward root:"
    )


def test_exposed_communication_tells_its_reasons_and_its_collectives():
    run = zsim.simulate(LLAMA)
    why = zsim.why(run)
    share = run.exposed_communication.fraction
    first, second, *rows = comparison_lines("<", share, 0.001)
    assert first == f"{100 * share:.2f} % of the step < 0.10 % of the step"
    assert second.endswith(f"on rank {why.rank}:")
    reasons = [*why.by_reason][:2]
    assert [row.split(maxsplit=2)[2] for row in rows[:2]] == reasons
    assert rows[2].split(maxsplit=2)[2].startswith("reduce_scatter root: a dependency")
    assert comparison_lines("<", run.exposed_communication, 5)[0] == (
        f"{run.exposed_communication} < 5 ns"
    )


def test_a_count_tells_which_units_issue_them():
    run = zsim.simulate(LLAMA)
    assert comparison_lines("==", run.collectives.count("all_gather"), 66) == [
        "65 == 66", "all_gather of rank 0, by unit:", "     1 of root",
        "     2 each of blocks.0, blocks.1, blocks.2 and 29 more",
        "in all: all_gather 65, reduce_scatter 33",
    ]
    assert comparison_lines("==", run.collectives.count("broadcast"), 1) == [
        "0 == 1", "in all: all_gather 65, reduce_scatter 33"
    ]


@pytest.mark.parametrize("file", sorted((ROOT / "scenarios").rglob("*.toml"))[::9], ids=str)
def test_every_explanation_fits_into_what_pytest_prints(file):
    run = zsim.simulate(zsim.load(file))
    exposed = run.exposed_communication
    for figure in (run.peak_memory, exposed, exposed.fraction, run.collectives.count("all_gather")):
        lines = comparison_lines("<", figure, -1)
        assert 2 <= len(lines) <= 8
        assert sum(map(len, lines)) <= 640


def test_reports_of_failing_checks_end_at_the_users_own_line(sessions):
    sessions.scenario("fsdp2-mlp-4")
    sessions.tests(
        "from zsim.testing import assert_units, check_laws, check_sharding\n"
        "RUN = zsim.simulate(zsim.load('scenarios/fsdp2-mlp-4.toml'))\n"
        "def test_units():\n    assert_units(RUN, ['root'])\n"
        "def test_counts():\n    RUN.collectives.count('allgather')\n"
        "def test_laws():\n    check_laws(RUN, without=['no such law'])\n"
        "def test_shards():\n    check_sharding(lambda rows, rank, world: rows, sum)\n"
    )
    result = sessions.run()
    result.assert_outcomes(failed=4)
    ends = [line for line in result.outlines if re.match(r"\S+\.py:\d+: ", line)]
    assert [line.partition(":")[0] for line in ends] == ["test_user.py"] * 4


def test_a_failing_assertion_shows_what_is_behind_it(sessions):
    sessions.scenario("fsdp2-gpt-4")
    sessions.tests(
        "@pytest.mark.zero(scenario='scenarios/fsdp2-gpt-4.toml')\n"
        "def test_fits(zero):\n    assert zero.run().peak_memory <= zsim.MiB(2)\n\n"
        "@pytest.mark.zero(scenario='scenarios/fsdp2-gpt-4.toml')\n"
        "def test_counts(zero):\n    assert zero.run().collectives.count('all_gather') == 65\n\n"
        "@pytest.mark.zero(scenario='scenarios/fsdp2-gpt-4.toml')\n"
        "def test_overlaps(zero):\n"
        "    assert zero.run().exposed_communication.fraction < 0.1\n"
    )
    result = sessions.run()
    result.stdout.fnmatch_lines([
        "E * assert 2,533,528 B (2.42 MiB) <= 2,097,152 B (2.00 MiB)",
        "E * 436,376 B too much; on rank 0 in backward blocks.3:",
        "E *   890,880 B  activations           blocks.0 and 2 like it",
        "E *  524,424 B  in 8 rows more", "E * assert 9 == 65", "E *   1 of root",
        "E *   2 each of blocks.0, blocks.1, blocks.2 and 1 more",
        "E * assert 37.44 % of the step < 10.00 % of the step",
        "E * longer than the compute over it",
    ])
    assert "Full output truncated" not in result.stdout.str()
    result.assert_outcomes(failed=3)


def test_a_real_peak_is_explained_by_the_simulated_one(sessions):
    sessions.scenario("fsdp2-gpt-4")
    sessions.backends()
    sessions.tests("@pytest.mark.zero(scenario='scenarios/fsdp2-gpt-4.toml', backend='twin')\n"
                   "def test_fits(zero):\n    assert zero.run().peak_memory <= zsim.MiB(2)\n")
    sessions.run().stdout.fnmatch_lines([
        "E * 436,376 B too much; 2.42 MiB simulated, on rank 0 in backward blocks.3:"
    ])
