"""`zsim show --time` in words: ops that differ in their micro-batch alone are one line, and no time
is lost by it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from zsim.analysis.causes.why import Why, name
from zsim.analysis.simulated_step import explain_step
from zsim.cli.main import main
from zsim.cli.reports import time_report
from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import Execution
from zsim.engine.simulate_step import simulate_step
from zsim.io.units import format_time
from zsim.ir.ops import COLLECTIVES, Kernel, Op
from zsim.scenario import scenario
from zsim.scenario.plan import Planned, plan, planned
from zsim.scenario.scenario import Scenario

TEXT = """
model = { preset = "gpt-tiny" }
batch = { micro_batch = 1, sequence_length = 16, accumulation = 5 }
cluster = { preset = "dgx-h100", nodes = 2 }
strategy = { name = "fsdp2", sync = "every" }
optimizer = { name = "adamw", implementation = "fused" }
"""


def reported(planned: Planned, *, hosted_ns: int = 0) -> tuple[Why, list[str]]:
    """Reasons for the length of the step, and the report on it."""
    step = time_report.timed(planned)
    why = explain_step(planned.scenario, planned.program, step.timeline)
    helps = time_report.hiding(planned)
    lines = time_report.lines(
        why, helps, step=time_report.whole(step), hosted_ns=hosted_ns,
        host_bound=time_report.host_bound(planned.program.of_rank(0).steady, step.costs),
    )
    return why, list(lines)


def test_an_op_of_every_micro_batch_is_one_line_with_the_time_of_all() -> None:
    case = scenario.parse(TEXT.encode(), where="report.toml")
    program = plan(case, device="cuda")
    why, lines = reported(Planned(case, program))
    exposed = [
        re.match(r"    (\w+ \S+) +([\d.]+ \w+) of ([\d.]+ \w+) +(.*)", line) for line in lines
    ]
    rows = [row for row in exposed if row]

    times = Counter(name(each.op) for each in why.exposed)
    assert max(times.values()) >= 5, "the scenario repeats collectives"
    keys = [(row[1], re.sub(r";.*| in \d+ ops", "", row[4])) for row in rows]
    assert len(set(keys)) == len(keys), "no two lines say the same"
    repeated = [
        row for row in rows if (match := re.search(r" in (\d+) ops$", row[4])) and int(match[1]) > 1
    ]
    assert repeated
    for row in rows:
        alike = [
            each for each in why.exposed
            if name(each.op) == row[1] and row[4].startswith(each.reason)
        ]
        after = re.search(r" after (.*?)(?:;| in \d+ ops|$)", row[4])
        alike = [each for each in alike if each.waited_for == (after[1] if after else "")]
        assert format_time(sum(each.exposed_ns for each in alike)) == row[2]
        assert format_time(sum(each.duration_ns for each in alike)) == row[3]
    waited = dict(
        match.groups() for line in lines
        if (match := re.match(r" +waiting for the host to issue (\w+) +(.*)", line))
    )
    assert {link.op.kind in COLLECTIVES for link in why.critical_path if link.waited_ns} == {True}
    assert waited == {"collectives": format_time(sum(link.waited_ns for link in why.critical_path))}
    assert why.host_bound


def test_a_host_that_only_issues_collectives_late_keeps_no_kernels_waiting() -> None:
    """The first all-gather begins when it is issued, and compute when that has ended: the path
    waits for the host, compute does not."""
    text = TEXT.replace("gpt-tiny", "llama-3.2-1b").replace("sequence_length = 16, accumulation "
                                                            "= 5", "sequence_length = 4096")
    case = scenario.parse(text.encode(), where="report.toml")
    program = plan(case, device="cuda")
    why, lines = reported(Planned(case, program))
    first = why.critical_path[0]

    assert (first.op.kind, first.waited_for, first.waited_ns > 0, why.host_bound_ns) == (
        "all_gather", "the host", True, 0,
    )
    assert lines[0].endswith("; compute never waits for the host")
    (waited,) = (line.split() for line in lines if "waiting for" in line)
    assert waited == [
        "waiting", "for", "the", "host", "to", "issue", "collectives",
        *format_time(first.waited_ns).split(),
    ]


def hosted_ns(case: Scenario) -> int:
    """The time of rank 0's kernels on the host, waits for its memory included."""
    program = plan(case, device="cuda")
    costs = Costs(cluster=case.cluster, execution=case.executed)
    timeline = simulate_step(program, costs=costs)
    return time_report.hosted_ns(program.of_rank(0).steady, costs, timeline.ranks[0])


def test_a_host_that_steps_itself_is_told_apart_from_one_that_launches_too_slowly() -> None:
    """Larger kernels, or a compiler, do not help a step that waits for the host's optimizer."""
    offloaded = TEXT.replace('"fsdp2"', '"fsdp2", offload = true')
    sentences = []
    for text in (TEXT, offloaded):
        case = scenario.parse(text.encode(), where="report.toml")
        program = plan(case, device="cuda")
        hosted = hosted_ns(case)
        assert (hosted > 0) == (text is offloaded)
        _, lines = reported(Planned(case, program), hosted_ns=hosted)
        sentences += [line for line in lines if "bound by" in line or "the host's own" in line]
    assert len(sentences) == 2
    assert "execution.compile" in sentences[0]
    assert "optimizer" in sentences[1]
    assert "execution.compile" not in sentences[1]


@pytest.mark.parametrize(("execution", "told"), [
    ({}, "bound by 1 thread a rank; more help (OMP_NUM_THREADS, execution.host_threads), or"),
    ({"host_threads": 2}, "bound by 2 threads a rank"),
    ({"host_threads": 14}, "bound by its memory's bandwidth; more nodes help, or"),
])
def test_a_step_on_the_host_is_told_what_bounds_it(
    execution: dict[str, int], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's loop takes 13 GB/s of a rank's 46 with torchrun's one thread, and 27 with two."""
    case = Scenario(
        model={"preset": "gpt-small"}, batch={"micro_batch": 1, "sequence_length": 64},
        cluster={"preset": "dgx-h100"}, strategy={"name": "zero2"},
        precision={"parameters": "bf16"}, optimizer={"implementation": "for-loop"},
        offload={"optimizer": "cpu"}, execution=execution,
    )
    time_report.show(planned(case))
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("cores", "told"), [
    (0, "bound by 1 thread a rank; more help (OMP_NUM_THREADS, execution.host_threads)"),
    (4, "bound by its 4 cores; more nodes help"), (8, "bound by its 8 cores; more nodes help"),
])
def test_ranks_without_a_core_to_spare_are_not_told_to_take_more_threads(
    cores: int, told: str
) -> None:
    """Half a core a rank is no thread; and a file may leave cores out."""
    cluster = load_cluster("dgx-h100")
    node = replace(cluster, host=replace(cluster.host, cores=cores))
    step = Op(
        index=0, kind="optimizer", unit="step", stream="host",
        kernels=(Kernel("adamw.fused", 0, 28, "float32", location="host"),),
    )
    assert time_report.host_bound([step], Costs(node, Execution(torchrun=True))) == told


@pytest.mark.parametrize(("strategy", "offload", "told"), [
    ("deepspeed3", {"optimizer": "nvme", "adam": "deepspeed"}, "reads and writes of drives"),
    ("zero2", {"optimizer": "cpu"}, "the optimizer's step on the host"), ("zero2", {}, ""),
])
def test_a_step_with_hidden_communication_ends_with_the_work_off_the_device_that_lasts(
    strategy: str, offload: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Scenario(
        model={"preset": "llama-3.2-3b"}, batch={"micro_batch": 1, "sequence_length": 4096},
        cluster={"preset": "dgx-h100"}, strategy={"name": strategy}, offload=offload,
        precision={"parameters": "bf16", "reduce": "bf16"},
        optimizer={"implementation": "for-loop"},
    )
    time_report.show(planned(case))
    text = " ".join(capsys.readouterr().out.split())
    ending = r"communication is hidden: [^;]*; what lasts is (.*), ([\d.]+) % of the step$"
    lasting = re.search(ending, text)
    assert bool(lasting) is bool(told)
    if lasting:
        assert lasting[1] == told
        assert 50 < float(lasting[2]) < 100


def test_ranks_of_one_node_share_its_memory_whatever_their_number() -> None:
    """All states are stepped on the node's processors, by one rank or by eight; only a second node
    halves what is left of it."""
    text = """
model.preset = "llama-3.2-1b"
batch = { micro_batch = 1, sequence_length = 512 }
strategy = { name = "fsdp2", offload = true }
execution.host_threads = 112
"""
    hosted = []
    for cluster in ("ranks = 1", "ranks = 2", "ranks = 8", "nodes = 2"):
        case = scenario.parse(
            f'{text}cluster = {{ preset = "dgx-h100", {cluster} }}'.encode(), where="offload.toml"
        )
        hosted.append(hosted_ns(case))
    first, two, eight, nodes = hosted
    assert two == pytest.approx(first, rel=0.01)
    assert eight == pytest.approx(first, rel=0.01)
    assert nodes == pytest.approx(first / 2, rel=0.01)


HYBRID = """
description = "replicas whose all-reduces go over the NICs of the gathers"
model = { preset = "llama-3.2-3b", num_layers = 8 }
batch = { micro_batch = 1, sequence_length = 2048 }
cluster = { preset = "p4d", nodes = 4 }
strategy = { name = "hsdp", dp_shard = 16, dp_replicate = 2 }
precision = { parameters = "bf16", reduce = "bf16" }
"""


class LinksOfTheirOwn(Costs):
    """No collective takes anything from the links of another."""

    def usage(self, ranks: tuple[int, ...]) -> dict[int, dict[str, Fraction]]:
        return {}


def shown_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> tuple[dict[str, Any], list[str]]:
    """The output of `show --time` for a scenario, as JSON and as text."""
    (tmp_path / "told.toml").write_text(text, encoding="utf-8")
    command = ["show", str(tmp_path / "told.toml"), "--time"]
    assert main([*command, "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["time"]
    assert main(command) == 0
    return step, capsys.readouterr().out.splitlines()


def test_what_shared_links_cost_the_step_is_the_step_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = HYBRID.replace(", num_layers = 8", "")
    case = scenario.parse(text.encode(), where="told.toml")
    program = plan(case, device="cuda")
    every = [
        costs(cluster=case.cluster, execution=case.executed) for costs in (Costs, LinksOfTheirOwn)
    ]
    with_others, alone = (simulate_step(program, costs=costs).step_time_ns for costs in every)
    step, lines = shown_times(tmp_path, capsys, text)
    assert step["sharing_ns"] == with_others - alone > 0.1 * alone
    assert f"  +{format_time(with_others - alone)}: collectives share links" in lines
    reasons = step["exposed_by_reason_ns"]
    assert abs(reasons["a shared link"] / step["sharing_ns"] - 1) < 0.1, (
        "nearly all of it is exposed, most of it in queues"
    )
    assert sum(reasons.values()) == sum(each["exposed_ns"] for each in step["exposed"])


def test_one_communicator_shares_its_links_with_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step, lines = shown_times(
        tmp_path, capsys, HYBRID.replace('"hsdp", dp_shard = 16, dp_replicate = 2', '"fsdp2"')
    )
    assert step["sharing_ns"] == 0
    assert step["interference_ns"] > 0
    assert not [line for line in lines if "share links" in line]


@pytest.mark.parametrize("text", [TEXT, HYBRID])
def test_the_step_has_the_band_that_a_run_of_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    step, lines = shown_times(tmp_path, capsys, text)
    assert main(["run", str(tmp_path / "told.toml"), "--json"]) == 0
    run = json.loads(capsys.readouterr().out)
    low, high = run["step_time_band_ns"]
    assert low < step["step_time_ns"] == run["step_time_ns"] < high
    assert (step["step_time_band_ns"], step["calibration"]) == (
        [low, high], run["provenance"]["calibration"],
    )
    assert main(["run", str(tmp_path / "told.toml")]) == 0
    (band,) = (
        line.split("step time")[1].strip() for line in capsys.readouterr().out.splitlines()
        if "step time " in line
    )
    assert f"{format_time(low)} to {format_time(high)}" in band
    assert [line for line in lines if line.startswith(f"step of {band} on rank ")]
