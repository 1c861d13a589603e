"""The law of faster links: they never make a step slower than by a part of what its collectives
take of the device's memory.

Without interference faster links make no step slower at all, where no collectives share links
(`test_laws`).

With interference they may. A collective over faster links moves its bytes in less time. Kernels
beside it lose less to its channels and as much to its bytes. But other kernels lie beside it then:
a product has bandwidth to spare, while a copy waits for each of the bytes. NCCL may also take a
ring in place of the switch, which moves more than twice as many bytes. Both are so on devices.

A step loses at most the time that all bytes of its collectives take of the memory, since each byte
is waited for once. Of 1,680 random changes 12 made a step slower, by at most 18 % of that time and
2.2 % of the step. The largest known loss is 3.4 %, of a step in which copies of three streams run
beside backward.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from zsim.cluster.cluster import ClusterSpec
from zsim.engine.costs.op_costs import Costs
from zsim.engine.simulate_step import SETTLED, simulate_step
from zsim.ir.ops import COLLECTIVES, Kernel
from zsim.ir.program import Program
from zsim.scenario import scenario
from zsim.scenario.plan import plan

PART = 0.25
"""Share of the time that the bytes of all collectives take of the memory."""
STREAM = (Kernel("add", 0, 2**32, "bfloat16"),)
KINDS = ("fabric", "pcie", "host", "rail")
STRATEGIES = (
    'name = "ddp", dp_replicate = {ranks}',
    'name = "ddp", dp_replicate = {ranks}, bucket_cap_mb = 5.0',
    'name = "fsdp2", dp_shard = {ranks}', 'name = "hsdp", dp_replicate = {replicas}, dp_shard = 4',
    'name = "fsdp1", dp_shard = {ranks}', 'name = "fsdp1", dp_replicate = {replicas}, dp_shard = 4',
    'name = "zero1", dp_shard = {ranks}', 'name = "zero3", dp_shard = {ranks}, lookahead = 1',
)


def text(
    *, model: str, tokens: int, accumulation: int, cluster: str, nodes: int, strategy: str,
    dtype: str, again: str,
) -> str:
    return f"""
model = {{ preset = "{model}" }}
batch = {{ micro_batch = 1, sequence_length = {tokens}, accumulation = {accumulation} }}
cluster = {{ preset = "{cluster}", nodes = {nodes} }}
strategy = {{ {strategy.format(ranks=8 * nodes, replicas=2 * nodes)} }}
precision = {{ parameters = "{dtype}", reduce = "fp32" }}
optimizer = {{ name = "adamw", implementation = "fused" }}
activation_checkpointing = {{ mode = "{again}" }}
"""


TEXTS = st.builds(
    text, model=st.sampled_from(["gpt-2-124m", "llama-3.2-1b", "mpt-1b"]),
    tokens=st.sampled_from([256, 512, 1024]), accumulation=st.sampled_from([1, 2]),
    cluster=st.sampled_from(["dgx-a100", "p4d", "dgx-h100", "dgx-b200"]),
    nodes=st.sampled_from([1, 2, 4]), strategy=st.sampled_from(STRATEGIES),
    dtype=st.sampled_from(["bf16", "fp32"]), again=st.sampled_from(["none", "full"]),
)
FROM_THE_SWITCH_TO_A_RING = text(
    model="mpt-1b", tokens=1024, accumulation=1, cluster="dgx-h100", nodes=2,
    strategy='name = "ddp", dp_replicate = {ranks}, bucket_cap_mb = 100.0', dtype="bf16",
    again="none",
)
COPIES_OF_THREE_STREAMS = text(
    model="mpt-1b", tokens=512, accumulation=2, cluster="dgx-a100", nodes=1, strategy=STRATEGIES[5],
    dtype="bf16", again="none",
)


def faster(
    cluster: ClusterSpec, kinds: tuple[str, ...], *, factor: float, latency: float = 1.0
) -> ClusterSpec:
    """`cluster` with `factor` times the bandwidth of links of `kinds`, and `latency` times theirs.
    """
    before = {kind: getattr(cluster.links, kind) for kind in kinds}
    sooner = (
        (kind, round(link.bandwidth * factor), round(link.latency * latency))
        for kind, link in before.items()
    )
    after = {
        kind: replace(before[kind], bandwidth=bandwidth, latency=ns)
        for kind, bandwidth, ns in sooner
    }
    return replace(cluster, links=replace(cluster.links, **after))


def in_memory_ns(program: Program, costs: Costs) -> float:
    """Nanoseconds of the device's memory that the bytes of all collectives of a step take, when
    nothing else uses it."""
    total = 0.0
    for op in program.of_rank(0).steady:
        if op.kind in COLLECTIVES:
            asked = op.kind, op.nbytes, program.mesh.group(op.group, 0)
            total += costs.kernel_loss(STREAM, *asked).moving * costs.collective_ns(*asked)
    return total


@settings(max_examples=20)
@given(
    TEXTS, st.sampled_from([1.0, 2.0]), st.sampled_from([("fabric",), ("rail",), KINDS]),
    st.sampled_from([1.0, 1.25, 1.5, 2.0, 4.0, 8.0]), st.sampled_from([1.0, 0.5, 0.1]),
)
@example(FROM_THE_SWITCH_TO_A_RING, 1.0, KINDS, 2.0, 0.1)
@example(COPIES_OF_THREE_STREAMS, 2.0, KINDS, 1.5, 1.0)
def test_faster_links_never_make_a_step_slower_than_by_a_part_of_its_collectives_bytes(
    asked: str, at_first: float, kinds: tuple[str, ...], factor: float, latency: float
) -> None:
    case = scenario.parse(asked.encode(), where="links.toml")
    program = plan(case, device="cuda")
    slow = faster(case.cluster, KINDS, factor=at_first)
    costs, sooner = (
        Costs(cluster, case.executed)
        for cluster in (slow, faster(slow, kinds, factor=factor, latency=latency))
    )
    before, after = (
        simulate_step(program, costs=version).step_time_ns for version in (costs, sooner)
    )
    assert after - before <= PART * in_memory_ns(program, sooner) + SETTLED * before


def test_what_lies_beside_kernels_that_wait_for_its_bytes_costs_more_though_it_is_shorter() -> None:
    """The reason for the law's bound: NCCL leaves the switch for a ring, so a copy waits for more
    bytes."""
    case = scenario.parse(FROM_THE_SWITCH_TO_A_RING.encode(), where="links.toml")
    program = plan(case, device="cuda")
    slow, fast = (
        Costs(each, case.executed)
        for each in (case.cluster, faster(case.cluster, KINDS, factor=2.0, latency=0.1))
    )
    assert in_memory_ns(program, fast) > 2 * in_memory_ns(program, slow)
    assert (
        simulate_step(program, costs=fast).step_time_ns
        > simulate_step(program, costs=slow).step_time_ns
    )
