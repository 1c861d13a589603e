"""Step times over seeds of a jitter, held against the closed form of the largest delay."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import pytest

import zsim
from tests.support.folders import SCENARIOS
from zsim.cli.main import main
from zsim.errors import ArgumentError, DeadlockError
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario

MLP = zsim.load(SCENARIOS / "parity/fsdp2-mlp-4.toml")
SIGMAS = 4.0
"""Standard errors by which a mean may be off: one in 16,000 is, and seeds are fixed."""


def jittery(ranks: int, **keys: Any) -> Scenario:
    return MLP.with_(
        cluster={"ranks": ranks}, strategy={"dp_shard": ranks}, expect=None,
        faults=[{"kind": "jitter", "mean": "1 ms", **keys}],
    )


@pytest.mark.parametrize("distribution", ["exponential", "uniform"])
@pytest.mark.parametrize("ranks", [1, 2, 8, 24])
def test_the_mean_step_grows_with_the_ranks_as_the_largest_delay_does(
    ranks: int, distribution: str
) -> None:
    steps = zsim.jitter(jittery(ranks, distribution=distribution), seeds=200)
    assert steps.largest_ns is not None
    assert abs(steps.mean_ns - steps.largest_ns) <= SIGMAS * steps.error_ns
    harmonic = sum(1 / n for n in range(1, ranks + 1))
    largest = harmonic if distribution == "exponential" else 2 * ranks / (ranks + 1)
    assert steps.largest_ns == pytest.approx(steps.clean_ns + 1_000_000 * largest)
    assert steps.clean_ns == zsim.simulate(jittery(ranks).with_(faults=None)).step_time


def test_each_doubling_of_the_ranks_costs_as_much_again() -> None:
    means = {ranks: zsim.jitter(jittery(ranks), seeds=200) for ranks in (4, 8, 16)}
    for ranks in (4, 8):
        fewer, more = means[ranks], means[2 * ranks]
        growth = (more.mean_ns - more.clean_ns) - (fewer.mean_ns - fewer.clean_ns)
        error = SIGMAS * (fewer.error_ns**2 + more.error_ns**2) ** 0.5
        # H(2n) - H(n) is below ln 2, by 1/4n
        assert abs(growth - 1_000_000 * log(2)) <= error + 1_000_000 / (4 * ranks)


def test_quantiles_are_those_of_the_largest_exponential_delay() -> None:
    """P(largest ≤ t) = (1 - exp(-t))^n, so half of the seeds lie below its median."""
    steps = zsim.jitter(jittery(8), seeds=400)
    median = steps.clean_ns - 1_000_000 * log(1 - 0.5 ** (1 / 8))
    below = sum(time <= median for time in steps.times_ns)
    assert abs(below - 200) <= SIGMAS * (400 * 0.25) ** 0.5
    assert steps.quantile_ns(0.5) <= steps.quantile_ns(0.95) <= steps.quantile_ns(1.0)
    assert steps.quantile_ns(1.0) == max(steps.times_ns)


def test_seeds_follow_the_scenarios_own_and_are_those_of_single_runs() -> None:
    steps = zsim.jitter(jittery(4, seed=7), seeds=3)
    alone = [zsim.simulate(jittery(4, seed=seed)).step_time for seed in (7, 8, 9)]
    assert list(steps.times_ns) == alone


def test_delays_of_single_ops_have_no_closed_form_and_hide_in_part() -> None:
    steps = zsim.jitter(jittery(4, each="op"), seeds=50)
    assert steps.largest_ns is None
    ops = sum(bool(op.kernels) for op in plan(MLP, device="cpu").of_rank(0).steady)
    assert steps.clean_ns < steps.mean_ns < steps.clean_ns + ops * 1_000_000 * 2.1  # H(4)


def test_what_has_no_jitter_or_is_too_much_is_refused() -> None:
    with pytest.raises(ArgumentError, match="expected a jitter fault, found no"):
        zsim.jitter(MLP)
    with pytest.raises(ArgumentError, match=r"seeds: expected a whole number from 1 to 10,000"):
        zsim.jitter(jittery(4), seeds=0)
    with pytest.raises(ArgumentError, match="take fewer seeds"):
        zsim.jitter(jittery(1024), seeds=10_000)
    with pytest.raises(ArgumentError, match="expected above 0 and up to 1"):
        zsim.jitter(jittery(2), seeds=1).quantile_ns(0)
    failing = jittery(4).with_(faults=[
        {"kind": "jitter", "mean": "1 ms"}, {"kind": "failure", "rank": 1, "at": "backward root"}
    ])
    with pytest.raises(DeadlockError):
        zsim.jitter(failing, seeds=2)
    at_the_end = failing.with_(faults=[
        {"kind": "jitter", "mean": "1 ms"}, {"kind": "failure", "rank": 1, "at": "optimizer root"}
    ])
    with pytest.raises(DeadlockError, match="expected the rank to finish"):
        zsim.jitter(at_the_end, seeds=2)


def test_the_command_prints_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shaky.toml"
    file.write_text(jittery(4).to_toml())
    assert main(["run", str(file), "--seeds", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step of shaky under jitter, 20 seeds from 0 on"
    assert [line.split("  ")[1] for line in lines[1:]] == [
        "clean step", "mean", "50% within", "95% within", "99% within", "longest", "closed form"
    ]
    assert main(["run", str(file), "--seeds", "20", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    steps = zsim.jitter(jittery(4), seeds=20)
    assert told["times_ns"] == list(steps.times_ns)
    assert told["quantiles_ns"]["0.95"] == steps.quantile_ns(0.95)
    assert main(["run", str(file), "--seeds", "3", "--backend", "gloo"]) == 2
    assert "zsim: --seeds: expected the backend sim" in capsys.readouterr().err
