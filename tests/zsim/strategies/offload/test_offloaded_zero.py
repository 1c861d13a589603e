"""zero1, zero2 and zero3 with states in host memory: what crosses the link, what lives where, and
the least time of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.cluster.cluster import ClusterSpec
from zsim.errors import ScenarioError
from zsim.ir.host_ledger import replay_host
from zsim.ir.laws import program_laws
from zsim.ir.ops import Op
from zsim.ir.program import Program
from zsim.ir.program import parse as parse_program
from zsim.memory.fits import assess
from zsim.runs.backend import RunOptions
from zsim.runs.simulator import SimBackend
from zsim.scenario.derived import derived
from zsim.scenario.plan import plan, planned
from zsim.scenario.scenario import Scenario, parse
from zsim.strategies.flat_buffer.groups import flat_groups

CPU = 'optimizer = "cpu"'
BOTH = f'{CPU}, parameters = "cpu"'
FORMS = [("zero1", CPU), ("zero2", CPU), ("zero3", CPU), ("zero3", BOTH)]
COUNTER = 4
"""Bytes of AdamW's step counter, one for each group."""


def scenario(
    strategy: str = "zero3", offload: str = CPU, *, precision: str = "bf16", accumulation: int = 1,
    cluster: str = 'preset = "dgx-a100"', model: str = 'preset = "gpt-tiny"', more: str = "",
    optimizer: str = 'implementation = "fused"', sync: str = "every",
) -> Scenario:
    text = f"""
model = {{ {model} }}
batch = {{ micro_batch = 1, sequence_length = 16, accumulation = {accumulation} }}
cluster = {{ {cluster} }}
strategy = {{ name = "{strategy}", sync = "{sync}" }}
precision = {{ parameters = "{precision}", reduce = "fp32" }}
optimizer = {{ {optimizer} }}
offload = {{ {offload} }}
{more}
"""
    return parse(text.encode(), where="offload.toml")


def shards(case: Scenario) -> dict[str, int]:
    """The elements of a rank's shard of each group, padding included."""
    groups = flat_groups(
        case.model, grouping=case.options.grouping, num_shards=case.mesh.dp_shard,
        dtype=case.precision.parameters,
    )
    return {group.fqn: group.layout.shard_numel for group in groups}


def crossings(program: Program, direction: str) -> list[tuple[str, int]]:
    """(unit, bytes) of each copy of rank 0's steady step."""
    return [
        (op.unit, kernel.nbytes) for op in program.of_rank(0).steady for kernel in op.kernels
        if kernel.operator == direction
    ]


def steps(program: Program) -> list[Op]:
    return [op for op in program.of_rank(0).steady if op.kind == "optimizer"]


@pytest.mark.parametrize(("strategy", "offload"), FORMS)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_each_gradient_goes_to_the_host_once_in_float32(
    strategy: str, offload: str, accumulation: int, sync: str, precision: str
) -> None:
    case = scenario(strategy, offload, accumulation=accumulation, sync=sync, precision=precision)
    program = plan(case, device="cuda")
    program_laws.require_lawful(program, where="offload")
    assert parse_program(str(program)) == program
    sent = crossings(program, "to_host")
    assert sorted(sent) == sorted((unit, 4 * numel) for unit, numel in shards(case).items())
    assert all(op.micro_batch == accumulation - 1 for op in program.of_rank(0).steady
               if op.stream == "to_host")


@pytest.mark.parametrize(("strategy", "offload"), FORMS[:3])
def test_each_stepped_shard_returns_once_in_the_dtype_of_compute(
    strategy: str, offload: str
) -> None:
    case = scenario(strategy, offload)
    program = plan(case, device="cuda")
    assert crossings(program, "to_device") == [
        (unit, 2 * numel) for unit, numel in shards(case).items()
    ]
    assert [op.unit for op in steps(program)] == list(shards(case))


def test_with_parameters_offloaded_a_shard_comes_before_each_of_its_all_gathers() -> None:
    case = scenario(offload=BOTH, accumulation=2)
    program, numels = plan(case, device="cuda"), shards(case)
    gathers = [op.unit for op in program.of_rank(0).steady if op.kind == "all_gather"]
    assert crossings(program, "to_device") == [(unit, 2 * numels[unit]) for unit in gathers]
    steady = program.of_rank(0).steady
    for op in steady:
        if op.kind == "all_gather":
            (copied,) = op.waits
            assert (steady[copied].stream, steady[copied].unit) == ("to_device", op.unit)


@pytest.mark.parametrize(("strategy", "offload"), FORMS)
@pytest.mark.parametrize(("precision", "each", "pinned"), [("bf16", 18, 6), ("fp32", 16, 8)])
def test_the_host_has_eighteen_bytes_of_each_element_or_sixteen(
    strategy: str, offload: str, precision: str, each: int, pinned: int
) -> None:
    """Copy, gradient, two states; and in two bytes what goes to the device."""
    case = scenario(strategy, offload, precision=precision)
    own = sum(shards(case).values())
    records = replay_host(plan(case, device="cuda").of_rank(0))
    assert records["steady"].peak_bytes == each * own + COUNTER * len(shards(case))
    assert records["first"].end_bytes == records["steady"].end_bytes
    assert records["steady"].pinned_bytes == pinned * own
    unpinned = scenario(strategy, f"{offload}, pin_memory = false", precision=precision)
    records = replay_host(plan(unpinned, device="cuda").of_rank(0))
    assert records["steady"].pinned_bytes == 0
    answer = assess(planned(case)).host
    assert answer is not None
    assert answer.offloaded_bytes == 8 * (each * own + COUNTER * len(shards(case)))


@pytest.mark.parametrize(("strategy", "offload"), FORMS)
def test_no_optimizer_state_is_left_on_the_device(strategy: str, offload: str) -> None:
    steady = SimBackend().run(scenario(strategy, offload), options=RunOptions()).ranks[0]
    held = steady.phases["steady"].memory.held
    assert held["optimizer_states"] == 0
    assert (held["parameters"] == 0) == (offload == BOTH)
    assert held["offloaded"] > 0


def test_the_host_clips_what_it_steps() -> None:
    case = scenario(optimizer='implementation = "fused", clip_norm = 1.0')
    assert [(op.unit, op.stream) for op in steps(plan(case, device="cuda"))][:3] == [
        ("gradient_norm", "host"), ("gradient_clip", "host"), (next(iter(shards(case))), "host")
    ]


def step_ns(case: Scenario, cluster: ClusterSpec | None = None, *, all_ranks: bool = False) -> int:
    run = SimBackend(cluster=cluster).run(case, options=RunOptions(all_ranks=all_ranks))
    assert run.step_time_ns is not None
    return run.step_time_ns


@pytest.mark.parametrize(("strategy", "offload"), FORMS)
def test_ranks_in_step_are_as_fast_as_all_of_them(strategy: str, offload: str) -> None:
    case = scenario(strategy, offload, cluster='preset = "dgx-a100", nodes = 2')
    assert step_ns(case) == step_ns(case, all_ranks=True)


@given(
    form=st.sampled_from(FORMS), precision=st.sampled_from(["bf16", "fp32"]),
    adam=st.sampled_from(["torch", "deepspeed"]), pinned=st.booleans(),
    accumulation=st.integers(1, 2), times=st.integers(2, 8),
    which=st.sampled_from(["memory", "link", "threads"]),
)
@settings(max_examples=20, deadline=None)
def test_a_faster_host_slows_no_step_and_none_is_faster_than_its_bytes(
    form: tuple[str, str], precision: str, adam: str, pinned: bool, accumulation: int, times: int,
    which: str,
) -> None:
    """A node's memory reads and writes 28 bytes an element of all its ranks. The link of a switch
    carries what its devices copy one way. A kernel's time alone is rounded up to a nanosecond,
    which eight ranks that share memory stretch by up to eight."""
    strategy, offload = form
    case = scenario(
        strategy, f'{offload}, adam = "{adam}", pin_memory = {str(pinned).lower()}',
        precision=precision, accumulation=accumulation, more="execution = { interference = false }",
    )
    cluster, took = case.cluster, step_ns(case)
    links, host = cluster.links, cluster.host
    faster = {
        "memory": replace(cluster, host_memory_bandwidth=times * cluster.host_memory_bandwidth),
        "link": replace(cluster, links=replace(
            links, host=replace(links.host, bandwidth=times * links.host.bandwidth)
        )),
        "threads": replace(
            cluster, host=replace(host, thread_bandwidth=times * host.thread_bandwidth)
        ),
    }[which]
    own, program = sum(shards(case).values()), plan(case, device="cuda")
    hosted = [each for op in program.of_rank(0).steady for each in op.kernels
              if each.location == "host"]
    assert step_ns(case, faster) <= took + 8 * len(hosted)
    assert took >= 28 * own * 8 * 10**9 // cluster.host_memory_bandwidth
    for direction in ("to_host", "to_device"):
        nbytes = sum(
            nbytes for end in ("", "_pageable")
            for _, nbytes in crossings(program, direction + end)
        )
        assert took >= host.devices_per_switch * nbytes * 10**9 // links.host.bandwidth


@pytest.mark.parametrize(("strategy", "offload"), FORMS)
def test_copies_into_pageable_memory_hold_the_host_up_and_are_never_faster_than_pinned_ones(
    strategy: str, offload: str
) -> None:
    """Such a copy is the host's own work, though no op of the device is awaited before it."""
    model = 'preset = "gpt-2-124m", num_layers = 2'
    pinned, pageable = (
        SimBackend().run(
            scenario(strategy, f"{offload}, pin_memory = {flag}", model=model),
            options=RunOptions(),
        )
        for flag in ("true", "false")
    )
    assert (pageable.step_time_ns or 0) > (pinned.step_time_ns or 0) > 0
    for rank in pageable.ranks:
        own = [
            span for span in rank.spans
            if span.stream == "host" and span.kind in ("copy", "optimizer")
        ]
        assert all(a.end_ns <= b.start_ns for a, b in zip(own, own[1:], strict=False))


@pytest.mark.parametrize(("strategy", "offload", "more", "complaint"), [
    ("ddp", CPU, "", "offload.optimizer: expected strategy zero1, zero2, zero3, deepspeed1, "
                     "deepspeed2 or deepspeed3, found ddp"),
    ("zero2", BOTH, "", "offload.parameters: expected strategy zero3 or deepspeed3, found zero2"),
    ("fsdp2", CPU, "", "offload.optimizer: unknown to fsdp2; its option strategy.offload = true "
                       "moves all sharded states"),
    ("zero3", 'parameters = "cpu"', "",
     'offload.parameters: expected with offload.optimizer = "cpu", found without'),
    ("zero3", "pin_memory = false", "",
     'offload.pin_memory: expected with offload.optimizer = "cpu", found without'),
])
def test_what_a_strategy_cannot_offload_is_refused_by_name(
    strategy: str, offload: str, more: str, complaint: str
) -> None:
    with pytest.raises(ScenarioError) as refused:
        scenario(strategy, offload, more=more)
    assert f"offload.toml: {complaint}" in str(refused.value).splitlines()


def test_one_rank_has_no_parameters_to_offload_and_sgd_no_adam() -> None:
    alone = 'preset = "cpu-gloo", ranks = 1'
    with pytest.raises(ScenarioError, match="expected ranks to shard over, found one"):
        scenario(offload=BOTH, cluster=alone)
    with pytest.raises(ScenarioError, match=r'offload.adam: expected torch with sgd'):
        scenario(offload=f'{CPU}, adam = "deepspeed"', optimizer='name = "sgd"')
    with pytest.raises(ScenarioError, match="the host steps float32 copies"):
        scenario().with_(precision={"master": False})


LARGE = 'preset = "llama-3-405b"'


def test_more_pinned_memory_than_the_host_has_is_refused_with_what_is_needed() -> None:
    """6 of 405e9 parameters' 18 bytes, on one node of 2 TB."""
    with pytest.raises(ScenarioError) as refused:
        scenario(offload=BOTH, model=LARGE)
    assert (
        "offload.toml: offload.pin_memory: expected at most 1.82 TiB, the host memory of a node of "
        "dgx-a100, found 2.21 TiB of 8 ranks; shard over more ranks, or pin nothing"
    ) in str(refused.value)


def test_a_step_that_fits_the_device_may_have_no_room_on_the_host() -> None:
    case = scenario(offload=f"{BOTH}, pin_memory = false", model=LARGE)
    answer = assess(planned(case))
    assert answer.host is not None
    assert (answer.on_device, answer.host.verdict, answer.verdict) == ("FITS", "OOM", "OOM")
    assert str(answer.host).startswith("OOM on the host: 8 ranks of a node need 6.68 TiB of")


def test_a_cluster_that_does_not_say_its_host_memory_has_no_verdict_of_it() -> None:
    case = scenario()
    silent = replace(case.cluster, host=replace(case.cluster.host, memory=0))
    answer = assess(planned(derived(case, cluster=silent)))
    assert answer.host is not None
    assert (answer.host.verdict, answer.verdict) == ("UNKNOWN", "FITS")
