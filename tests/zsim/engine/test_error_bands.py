"""Bands: shares of a step and their widths by hand, published steps within them, and the more is
assumed the wider they are."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import hypot, inf
from typing import Any

import pytest

from tests.published import errors
from tests.support.cases.sampling import one_in
from tests.support.folders import ROOT
from zsim.calibration.accuracy import percentile
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.cluster.devices import PresetFigure, Provenance
from zsim.engine.bands import error_bands
from zsim.engine.bands.error_bands import GROWTH
from zsim.engine.bands.step_shares import OVERLAP, StepShare, StepShares
from zsim.engine.costs.op_costs import Costs
from zsim.engine.execution import EAGER, Execution
from zsim.engine.simulate import simulate
from zsim.engine.simulate_step import simulate_step
from zsim.ir.mesh import Mesh
from zsim.ir.ops import Kernel, Op, OpKind
from zsim.ir.program import Program, RankProgram
from zsim.runs.backend import RunOptions
from zsim.runs.figures import metrics
from zsim.runs.simulator import SimBackend
from zsim.scenario import scenario
from zsim.scenario.plan import plan

TEXT = """
model = { preset = "gpt-small", attention = "sdpa" }
batch = { micro_batch = 512, sequence_length = 1024 }
cluster = { preset = "CLUSTER", nodes = NODES, ranks = RANKS }
strategy = { name = "fsdp2", dp_shard = RANKS }
precision = { parameters = "bf16", reduce = "fp32" }
"""
EVERY = {"mpt_llm_foundry.csv": 5, "vtrain_megatron_ds_a100.csv": 15}
"""Steps between the rows that are taken of a large file; the README's table is of all rows."""


def step_shares(cluster: str, *, nodes: int = 1, ranks: int = 8, more: str = "") -> StepShares:
    text = (
        (TEXT + more)
        .replace("CLUSTER", cluster)
        .replace("NODES", str(nodes))
        .replace("RANKS", str(ranks))
    )
    asked = scenario.parse(text.encode(), where="x.toml")
    costs, program = (
        Costs(cluster=asked.cluster, execution=asked.executed),
        plan(asked, device=asked.cluster.kind),
    )
    return error_bands.step_shares(program, simulate_step(program, costs=costs), costs=costs)


def width(shares: StepShares) -> float:
    """The width of a step's band, but for pauses of its host."""
    low, high = replace(shares, paused=0.0).factors
    return high - low


def made_of(
    compute: tuple[float, float], network: tuple[float, float], host: tuple[float, float], *,
    hidden: float = 0.0, spare: float = 0.0, issuing: float = 0.0,
) -> StepShares:
    """Shares of (share, width) each."""
    shares = [StepShare(share=share, width=wide) for share, wide in (compute, network, host)]
    return StepShares(
        compute=shares[0], network=shares[1], host=shares[2], hidden=hidden, spare=spare,
        issuing=issuing,
    )


def test_parts_of_a_step_add_up_by_their_squares() -> None:
    """Downwards 0.6·0.1 of compute, 0.3·0.2 of network, 0.1·0.5 of the host; upwards rates are that
    much lower, collectives longer."""
    shares = made_of((0.6, 0.1), (0.3, 0.2), (0.1, 0.5))
    upper = hypot(0.06 / 0.9, 0.06, 0.05 / 0.5)
    assert shares.factors == (pytest.approx(1 - 0.0097**0.5), pytest.approx(1 + upper))


def test_shares_are_of_the_whole_step_and_everything_is_somewhere() -> None:
    for cluster in ("dgx-h100", "p4d", "pcie-box"):
        shares = step_shares(cluster, nodes=2, ranks=16)
        assert shares.compute.share + shares.network.share + shares.host.share == pytest.approx(1)
        assert min(shares.compute.share, shares.network.share, shares.host.share) >= 0


@pytest.mark.parametrize("cluster", ["dgx-b200", "dgx-h200", "pcie-box", "grand-teton-h100"])
def test_hardware_that_nobody_has_measured_has_a_wider_band_than_calibrated_hardware(
    cluster: str
) -> None:
    known = step_shares("dgx-h100")
    assert step_shares(cluster).compute.width > 1.5 * known.compute.width
    assert width(step_shares(cluster)) > 1.2 * width(known)


def test_eight_bits_and_compiled_kernels_are_less_certain_and_a_network_wider_than_none() -> None:
    plain = step_shares("dgx-h100")
    compiled = step_shares("dgx-h100", more="execution = { compile = true }")
    assert width(compiled) > width(plain)
    # fewer kernels of other widths besides
    assert compiled.compute.width == pytest.approx(hypot(plain.compute.width, 0.05), abs=0.01)
    float8 = step_shares("dgx-h100", more="execution = { float8 = true }")
    assert float8.compute.width > plain.compute.width
    assert step_shares("p4d", nodes=4, ranks=32).network.width > plain.network.width


def test_collectives_that_are_hidden_only_just_widen_the_upper_side() -> None:
    """All of the step is under compute; at the upper end 1.3 times as much communication sticks out
    by 0.3, or finds spare compute. Kernels beside it may lose more than they are said to."""
    assert made_of((1.0, 0.0), (0.0, 0.3), (0.0, 0.5), hidden=1.0).factors == (
        1.0, pytest.approx(1 + hypot(0.3, OVERLAP)),
    )
    assert made_of((1.0, 0.0), (0.0, 0.3), (0.0, 0.5), hidden=0.7, spare=0.3).factors == (
        1.0, pytest.approx(1 + 0.7 * OVERLAP),
    )


def test_more_nodes_than_were_fitted_widen_the_upper_side_with_each_doubling() -> None:
    bands = {
        nodes: step_shares("dgx-h100", nodes=nodes, ranks=8 * nodes) for nodes in (8, 16, 32)
    }
    assert [bands[nodes].growth / GROWTH for nodes in bands] == [0, 1, 2]
    for shares in bands.values():
        low, high = replace(shares, growth=0.0).factors
        assert shares.factors == (low, pytest.approx(high + shares.growth))


def test_pauses_of_a_gpu_s_host_widen_the_upper_side_by_as_much_on_any_long_step() -> None:
    """Nine of ten of the steps that two GPUs took lie no further above the fastest of their run."""
    for ranks in (1, 8):
        shares = step_shares("dgx-h100", ranks=ranks)
        low, high = shares.factors
        _, steady = replace(shares, paused=0.0).factors
        assert (high - 1) ** 2 - (steady - 1) ** 2 == pytest.approx(shares.paused**2)
        assert low == replace(shares, paused=0.0).factors[0]
    assert step_shares("cpu-gloo", ranks=2).paused == 0.0
    excess, shortest = [], inf
    for name in ("gpu", "gpu_h100"):
        record = json.loads((ROOT / f"tests/measured/{name}.json").read_text())
        for row in record["steps"]["measured"]:
            times = row["measured"]["step_times_ns"]
            excess += [ns - min(times) for ns in times]
            shortest = min(shortest, *times)
    assert shortest == pytest.approx(error_bands.PAUSED_NS, rel=0.02)
    assert len(excess) == 89
    assert percentile(excess, 90) == pytest.approx(error_bands.PAUSE_NS, rel=0.02)


def test_a_host_that_is_hidden_only_just_widens_the_upper_side() -> None:
    """The host issues for 0.8 of the step, and nobody waits for it; half as fast it takes 1.6. At
    0.4 it stays hidden."""
    assert made_of((1.0, 0.0), (0.0, 0.0), (0.0, 0.5), issuing=0.8).factors == (
        1.0, pytest.approx(1.6),
    )
    assert made_of((1.0, 0.0), (0.0, 0.0), (0.0, 0.5), issuing=0.4).factors == (1.0, 1.0)
    assert made_of((0.8, 0.0), (0.0, 0.0), (0.2, 0.5), issuing=0.9).factors == (
        pytest.approx(0.9), pytest.approx(1.8),
    )


def test_a_step_that_is_all_network_is_as_uncertain_as_that_and_not_twice() -> None:
    """0.2 of compute under 1.0 of communication, of which 0.8 are exposed: 0.3 of 1.0 more or less.
    """
    assert made_of((0.2, 0.0), (0.8, 0.3), (0.0, 0.5), hidden=0.2).factors == (
        pytest.approx(0.7), pytest.approx(1 + hypot(0.3, 0.2 * OVERLAP)),
    )


def test_on_a_network_with_traffic_of_others_all_communication_may_be_longer_or_shorter() -> None:
    """0.4 of communication under compute and 0.1 exposed: three times as long 0.2 and 0.8 more,
    less the 0.3 that can still hide some."""
    shares = made_of((0.9, 0.0), (0.1, 0.1), (0.0, 0.5), hidden=0.4, spare=0.3)
    assert shares.on_shared_network(0.5, 3.0) == (
        pytest.approx(0.9), pytest.approx(1 + hypot(0.2 + 0.8 - 0.3, 0.4 * OVERLAP)),
    )
    assert shares.on_shared_network(1.0, 1.0) == shares.factors


def test_what_is_exposed_at_the_ends_grows_as_it_is() -> None:
    """0.1 of 0.5 is exposed though compute has room for all: a first gather, 0.3 of which is 0.03;
    at best it is gone."""
    shares = made_of((0.9, 0.0), (0.1, 0.3), (0.0, 0.5), hidden=0.4, spare=0.5)
    assert shares.factors == (pytest.approx(0.9), pytest.approx(1 + hypot(0.03, 0.4 * OVERLAP)))


def test_a_band_is_never_nearer_than_whole_steps_were_to_their_calibration() -> None:
    """Kernels are 0.05 of the step. Steps of the calibration were off by 0.4 all the same, up to 1
    / 0.6 of the prediction."""
    small = made_of((0.05, 0.4), (0.0, 0.0), (0.0, 0.0))
    assert small.factors == (pytest.approx(0.98), pytest.approx(1 + 0.02 / 0.6))
    assert replace(small, least=0.4).factors == (pytest.approx(0.6), pytest.approx(1 / 0.6))
    assert (
        replace(small, least=0.4).on_shared_network(1.0, 1.0) == replace(small, least=0.4).factors
    )
    assert replace(small, least=0.01).factors == small.factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretched:
    """`costs` whose collectives take `factor` times as long."""

    costs: Costs
    factor: float

    def collective_ns(self, kind: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        return round(self.costs.collective_ns(kind, nbytes, ranks) * self.factor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.costs, name)


@pytest.mark.parametrize(
    ("cluster", "nodes", "strategy"),
    one_in(4, [
        (*where, f'name = "{name}"')
        for where in (("p4d", 8), ("p4d", 64), ("dgx-h100", 64), ("dgx-h100", 1))
        for name in ("ddp", "fsdp2", "zero3")
    ]),
)
def test_the_ends_are_those_of_a_step_whose_collectives_are_as_long_as_their_band_allows(
    cluster: str, nodes: int, strategy: str
) -> None:
    text = f"""
model = {{ preset = "mpt-1b" }}
batch = {{ micro_batch = 4, sequence_length = 2048 }}
cluster = {{ preset = "{cluster}", nodes = {nodes} }}
strategy = {{ {strategy} }}
precision = {{ parameters = "bf16" }}
"""
    asked = scenario.parse(text.encode(), where="x.toml")
    costs, program = (
        Costs(cluster=asked.cluster, execution=asked.executed), plan(asked, device="cuda"),
    )
    timeline = simulate(program, costs=costs)
    shares = error_bands.step_shares(program, timeline, costs=costs)
    wide, now = shares.network.width, timeline.step_time_ns
    slower, faster = (
        simulate(program, costs=Stretched(costs=costs, factor=factor)).step_time_ns / now
        for factor in (1 + wide, 1 - wide)
    )
    assert 1 + shares.longer == pytest.approx(slower, abs=0.03)
    assert 1 - shares.shorter <= faster + 0.01


def test_the_run_says_the_same_band() -> None:
    text = TEXT.replace("CLUSTER", "dgx-h100").replace("NODES", "1").replace("RANKS", "8")
    asked = scenario.parse(text.encode(), where="x.toml")
    run = SimBackend().run(asked, options=RunOptions())
    low, high = step_shares("dgx-h100").factors
    assert run.step_time_ns is not None
    assert metrics.figures(run, asked).step_time_band_ns == (
        pytest.approx(run.step_time_ns * low, rel=1e-3),
        pytest.approx(run.step_time_ns * high, rel=1e-3),
    )


def test_nine_of_ten_published_steps_lie_in_their_band() -> None:
    """Each row that is looked at stands for those of its file that are not."""
    inside = total = 0
    for file in errors.STEPS:
        rows, stands_for = errors.predicted(file, EVERY.get(file, 1)), EVERY.get(file, 1)
        inside, total = inside + stands_for * errors.in_band(rows), total + stands_for * len(rows)
    assert total == 170
    assert inside >= 0.9 * total


def test_a_link_whose_bandwidth_is_assumed_widens_what_goes_over_it() -> None:
    """An H800's NVLink is a part of an H100's: nobody has measured it, whatever the curves of
    collectives are off."""
    h800, h100 = step_shares("hgx-h800"), step_shares("dgx-h100")
    assert h800.network.width > 0.3
    assert h800.network.width > 1.3 * h100.network.width
    assert h800.compute.width == pytest.approx(h100.compute.width)


LINEAR = (Kernel("linear", 10**12, 0, "bfloat16", shape=(1, 8192, 8192, 8192)),)
GELU = (Kernel("gelu", 0, 10**9, "bfloat16"),)


def known(cluster: ClusterSpec, **provenance: Provenance) -> ClusterSpec:
    """`cluster` whose constants of these names come from elsewhere."""
    return replace(
        cluster,
        device=replace(
            cluster.device,
            figures=tuple(_from(figure, provenance) for figure in cluster.device.figures),
        ),
    )


def _from(figure: PresetFigure, provenance: dict[str, Provenance]) -> PresetFigure:
    name = figure.key.removeprefix("device.")
    return (
        replace(figure, provenance=provenance[name], width=None) if name in provenance else figure
    )


def forward(
    index: int, kernels: tuple[Kernel, ...], *, kind: OpKind = "forward", stream: str = "compute"
) -> Op:
    return Op(index=index, kind=kind, unit="a", stream=stream, kernels=kernels)


def of_ops(cluster: ClusterSpec, *ops: Op, execution: Execution = EAGER) -> StepShares:
    costs = Costs(cluster=cluster, execution=execution)
    steady = (RankProgram(construction=(), first=(), steady=ops),)
    program = Program(
        mesh=Mesh(dp_shard=cluster.num_ranks), ranks=steady, assignment=(0,) * cluster.num_ranks
    )
    return error_bands.step_shares(program, simulate(program, costs=costs), costs=costs)


@pytest.mark.parametrize(("provenance", "wide"), [
    ("measured", 0.05), ("calibrated", 0.06), ("published", 0.1), ("source code", 0.2),
    ("vendor sheet", 0.3), ("assumed", 0.3),
])
def test_a_kernel_is_as_uncertain_as_where_its_constant_comes_from(
    provenance: Provenance, wide: float
) -> None:
    cluster = known(
        load_cluster("dgx-h100"), matmul_efficiency=provenance, float8_efficiency=provenance
    )
    assert of_ops(cluster, forward(0, LINEAR)).compute.width == pytest.approx(hypot(wide, 0.05))
    assert of_ops(
        cluster, forward(0, LINEAR), execution=Execution(float8=True)
    ).compute.width == pytest.approx(hypot(wide, 0.05, 0.05))
    assert of_ops(
        cluster, forward(0, LINEAR), execution=Execution(compile=True)
    ).compute.width == pytest.approx(hypot(wide, 0.05, 0.05))


def test_a_cpus_constant_that_is_assumed_is_further_off_and_one_that_is_calibrated_is_not() -> None:
    core = load_cluster("cpu-gloo", ranks=2)
    kernels = (replace(LINEAR[0], dtype="float32"),)
    for provenance, wide in (
        ("assumed", 0.4), ("source code", 0.4), ("published", 0.1), ("calibrated", 0.06)
    ):
        assert of_ops(
            known(core, matmul_efficiency=provenance), forward(0, kernels)
        ).compute.width == pytest.approx(wide)


def test_each_time_that_kernels_run_counts() -> None:
    """Nine alike of an assumed constant, and one of a measured one."""
    cluster = known(
        load_cluster("dgx-h100"), matmul_efficiency="assumed", elementwise_efficiency="measured"
    )
    costs = Costs(cluster=cluster)
    products, chain = 9 * costs.compute_ns(LINEAR), costs.compute_ns(GELU)
    shares = of_ops(cluster, *(forward(index, LINEAR) for index in range(9)), forward(9, GELU))
    assert shares.compute.width == pytest.approx(
        hypot(hypot(0.3 * products, 0.05 * chain) / (products + chain), 0.05)
    )


def test_kernels_of_another_stream_are_none_that_compute_is_busy_with() -> None:
    cluster = load_cluster("dgx-h100")
    alone = of_ops(cluster, forward(0, LINEAR))
    beside = of_ops(
        cluster, forward(0, LINEAR),
        forward(1, (Kernel("copy", 0, 10**12, "bfloat16"),), kind="copy", stream="all_gather"),
    )
    assert alone.compute.share == pytest.approx(1, abs=0.05)
    assert beside.compute.share < 0.1 * alone.compute.share


def test_each_time_that_a_collective_runs_counts() -> None:
    """Thirty large ones and a small one, of which far less is known."""
    cluster = load_cluster("dgx-h100")
    large, small = 256 * 2**20, 1024
    sizes = [large] * 30 + [small]
    gathers = [
        Op(index=i, kind="all_gather", unit="a", stream="all_gather", group="dp_shard", nbytes=n)
        for i, n in enumerate(sizes)
    ]
    ranks, costs = tuple(range(8)), Costs(cluster=cluster)
    times = [costs.collective_ns("all_gather", nbytes, ranks) for nbytes in (large, small)]
    widths = [
        error_bands.collective_width("all_gather", nbytes, cluster, cluster.path(ranks))
        for nbytes in (large, small)
    ]
    assert widths[0] < widths[1]
    wanted = (30 * times[0] * widths[0] + times[1] * widths[1]) / (30 * times[0] + times[1])
    assert of_ops(cluster, *gathers).network.width == pytest.approx(wanted)


def test_what_goes_between_nodes_is_as_uncertain_as_their_network_and_not_as_their_nvlink() -> None:
    cluster = load_cluster("dgx-h100", nodes=2)
    inside, between = tuple(range(8)), tuple(range(16))
    unknown = replace(
        cluster,
        figures=tuple(
            replace(
                figure,
                provenance="assumed" if figure.key == "links.fabric.bandwidth" else "published",
            )
            if figure.key in ("links.fabric.bandwidth", "links.rail.bandwidth")
            else figure
            for figure in cluster.figures
        ),
    )
    widths = [
        error_bands.collective_width("all_gather", 2**28, each, each.path(ranks))
        for each in (cluster, unknown) for ranks in (inside, between)
    ]
    assert widths[2] == pytest.approx(hypot(widths[0], 0.3))
    assert widths[3] == widths[1]


def test_a_host_that_is_the_device_hides_nothing_that_it_issues() -> None:
    assert step_shares("cpu-gloo", ranks=2, more="").issuing == 0
    assert step_shares("dgx-h100").issuing > 0
