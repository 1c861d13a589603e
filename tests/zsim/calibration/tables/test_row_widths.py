"""By how much each thing that a row leaves open widens its band: to the digit, so that no width can
be lost."""

from __future__ import annotations

from dataclasses import replace
from math import hypot
from pathlib import Path

import pytest

from tests.zsim.calibration.tables.test_measurements import (
    FMS,
    FOUNDRY,
    MEGATRON,
    NANOTRON,
    TITAN,
    table,
)
from tests.zsim.calibration.tables.test_row_checks import read, step
from zsim.calibration import accuracy, memory_pressure
from zsim.calibration.accuracy import Predicted
from zsim.engine import error_bands
from zsim.engine.costs import Costs
from zsim.engine.step import simulate_step
from zsim.scenario import scenario
from zsim.scenario.plan import plan

NODES = {"n_gpus": "64", "dp": "64"}
OPEN: list[tuple[dict[str, str], dict[str, str], float]] = [
    (MEGATRON, {"framework": "NeMo"}, 0.15), (TITAN, {"framework": "trainer of ours"}, 0.15),
    (
        FMS | {"interconnect": "EFA 400 Gbps/node"}, {"interconnect": "RoCE 400 Gbps/node"},
        hypot(0.05, 0.0),
    ),
    (FMS | {"interconnect": "EFA 400 Gbps/node"}, {"interconnect": "400 Gbps/node"}, 0.05),
    (
        FMS | {"interconnect": "InfiniBand 1600 Gbps/node"},
        {"interconnect": "InfiniBand 500 Gbps/node"}, 0.05,
    ),
    (MEGATRON | NODES, {"intra_node": "Infinity Fabric"}, 0.1),
    (MEGATRON | {"gpu": "A100-80GB"}, {"gpu": "A100"}, 0.05),
    (MEGATRON, {"gpus_per_node": "4"}, 0.05),
    (MEGATRON | {"gpu": "A100-80GB"}, {"gpu": "A800-80GB"}, 0.3),
    (NANOTRON, {"colour": "blue"}, 0.1), (FMS, {"activation_checkpointing": ""}, 0.0),
]


@pytest.mark.parametrize(
    ("row", "change", "width"), OPEN, ids=[" ".join(change.values()) for _, change, _ in OPEN]
)
def test_what_a_row_leaves_open_widens_its_band_by_so_much(
    tmp_path: Path, row: dict[str, str], change: dict[str, str], width: float
) -> None:
    plain, made = step(tmp_path, row).widened, step(tmp_path, row | change).widened
    assert made == pytest.approx(hypot(plain, width))


def test_a_network_that_nobody_describes_is_wider_by_a_tenth_and_covers_the_other_presets(
    tmp_path: Path
) -> None:
    said = step(tmp_path, MEGATRON | NODES | {"inter_node": "InfiniBand 1600 Gbps/node"})
    unsaid = step(tmp_path, MEGATRON | NODES)
    assert unsaid.widened == pytest.approx(hypot(said.widened, 0.1, 0.05))
    assert {scenario.parse(text.encode(), where="x").cluster.name for text in unsaid.otherwise} == {
        "p4de", "a100-80-4hdr", "a100-80-roce"
    }
    assert said.otherwise == ()


@pytest.mark.parametrize(
    ("words", "reading", "others"),
    [
        ("100 Gbps Ethernet", (12.0, "tcp"), {(12.0, "roce"), (96.0, "tcp"), (96.0, "roce")}),
        ("100 GbE", (12.0, "tcp"), {(12.0, "roce"), (96.0, "tcp"), (96.0, "roce")}),
        ("100 Gbps Ethernet per GPU", (96.0, "tcp"), {(96.0, "roce")}),
        ("EFA 400 Gbps", (48.0, "efa"), {(192.0, "efa")}),
        ("TCP 100 Gbps", (12.0, "tcp"), {(96.0, "tcp")}),
        ("TCP/IP 100 Gbps", (12.0, "tcp"), {(96.0, "tcp")}),
        ("TCP 100 Gb/s", (12.0, "tcp"), {(96.0, "tcp")}),
        ("100 Gbit/s Ethernet", (12.0, "tcp"), {(12.0, "roce"), (96.0, "tcp"), (96.0, "roce")}),
        ("InfiniBand HDR", (192.0, "ib"), {(24.0, "ib")}),
        ("InfiniBand 12.5 GB/s", (96.0, "ib"), {(12.0, "ib")}),
        ("InfiniBand HDR per GPU", (192.0, "ib"), set()),
        ("TCP 100 Gb/s/node", (12.0, "tcp"), set()),
        ("8x HDR InfiniBand", (192.0, "ib"), set()),
        ("RoCE 1600 Gb/s", (192.0, "roce"), set()),
        ("RoCE 1600 Gbps", (192.0, "roce"), set()),
        ("RoCE 100 Gbps Ethernet per node", (12.0, "roce"), set()),
        ("EFA 400 Gbps/node", (48.0, "efa"), set()),
    ],
)
def test_words_that_may_mean_two_networks_are_both(
    tmp_path: Path, words: str, reading: tuple[float, str], others: set[tuple[float, str]]
) -> None:
    made = step(tmp_path, FMS | {"interconnect": words})
    found = [_network(text) for text in (made.scenario, *made.otherwise)]
    assert found[0] == reading
    assert set(found[1:]) == others
    assert any("which its words may mean as well" in text for text in made.assumed) is bool(others)


def _network(text: str) -> tuple[float, str]:
    cluster = scenario.parse(text.encode(), where="x").cluster
    assert cluster.nccl is not None
    return cluster.path(tuple(range(128))).bytes_per_s / 1e9, cluster.nccl.fabric


def _predicted(tmp_path: Path, row: dict[str, str]) -> Predicted:
    table(tmp_path / "t.csv", row)
    (found,) = accuracy.accuracy(tmp_path).rows
    return found


def test_a_band_covers_what_else_its_row_may_mean(tmp_path: Path) -> None:
    """Of 100 Gbit/s a node, and of eight times that: the band of one reading reaches over the
    prediction of the other."""
    one = _predicted(tmp_path, FMS | {"interconnect": "TCP 100 Gbps"})
    fast = _predicted(tmp_path, FMS | {"interconnect": "TCP 100 Gbps per GPU"})
    assert one.predicted > 1.3 * fast.predicted
    assert one.band[0] * one.predicted == pytest.approx(fast.band[0] * fast.predicted, rel=0.02)
    assert one.band[1] == pytest.approx(
        _predicted(tmp_path, FMS | {"interconnect": "TCP 100 Gbps per node"}).band[1], rel=0.02
    )


def test_fewer_links_between_gpus_are_those_of_their_own_node_alone(tmp_path: Path) -> None:
    fewer, all_of_them = (
        read(step(tmp_path, FOUNDRY | {"gpu": gpu})).cluster for gpu in ("h800", "h100_80gb")
    )
    assert (fewer.device, fewer.name) == (all_of_them.device, "hgx-h800")
    assert fewer.path(tuple(range(8))).bytes_per_s == 160 * 10**9
    assert all_of_them.path(tuple(range(8))).bytes_per_s == 360 * 10**9
    slower, usual = (
        _predicted(tmp_path, FOUNDRY | {"gpu": gpu, "micro_batch": "1", "grad_accum": "64"})
        for gpu in ("h800", "h100_80gb")
    )
    assert slower.predicted > usual.predicted
    assert slower.band[1] > 1.25


def test_only_a_network_of_several_nodes_is_shared_with_others(tmp_path: Path) -> None:
    """Of nanotron's cluster: its band is that of its collectives, 0.3 to 3 times their time."""
    many = NANOTRON | {
        "n_gpus": "64", "dp": "64", "nodes": "8", "interconnect": "EFA 3200 Gbps/node",
        "tokens_per_s_per_gpu": "30000",
    }
    alone, shared = step(tmp_path, NANOTRON), step(tmp_path, many)
    assert (alone.shared, shared.shared) == (False, True)
    wide, narrow = (accuracy.predict(replace(shared, shared=said)) for said in (True, False))
    assert isinstance(wide, Predicted)
    assert isinstance(narrow, Predicted)
    assert wide.band[1] > narrow.band[1] + 0.2


MANY = NANOTRON | {"n_gpus": "64", "dp": "64", "nodes": "8", "tokens_per_s_per_gpu": "30000"}
OTHERS = {
    True: (
        *(
            "NVLink 8/node; EFA 3200 Gbps/node (HF AWS p5 cluster)", "AWS p5", "EFA",
            "shared InfiniBand NDR 3200 Gbps/node",
        ),
        *("IB 3200 Gbps/node, congested", "", "NVLink 8/node", "3200 Gbps/node"),
    ),
    False: (
        *(
            "NVLink 8/node; dedicated InfiniBand 3200 Gbps/node", "NVLink 8/node; 8x NDR400",
            "InfiniBand NDR 3200 Gbps/node",
        ),
        *(
            "1600 Gbps/node", "EFA 3200 Gbps/node, not shared", "RoCE 400 Gb/s per GPU",
            "IB 3200 Gbps/node without congestion",
        ),
        "100 GbE per node",
    ),
}


@pytest.mark.parametrize(
    ("others", "network"),
    [(others, network) for others, cells in OTHERS.items() for network in cells],
)
def test_others_are_on_the_network_that_the_source_published_or_where_words_say_so(
    tmp_path: Path, others: bool, network: str
) -> None:
    made = step(tmp_path, MANY | {"interconnect": network})
    assert made.shared is others
    assert (
        any(words.startswith("others use the network too: 32 %") for words in made.assumed)
        is others
    )


def test_a_row_that_names_no_network_has_the_published_one_of_its_gpus_and_its_band_covers_one_without_others(  # noqa: E501
    tmp_path: Path
) -> None:
    alone, unsaid, named = (
        _predicted(tmp_path, MANY | {"interconnect": said})
        for said in ("dedicated NDR400", "", "shared NDR400")
    )
    assert unsaid.predicted == pytest.approx(named.predicted, rel=0.01)
    assert unsaid.predicted * unsaid.band[0] < alone.predicted * alone.band[0] * 1.01
    assert not step(tmp_path, MANY | {"gpu": "A100-80GB", "tokens_per_s_per_gpu": "12000"}).shared


CHECKPOINTED = FOUNDRY | {"activation_checkpointing": "True"}
NEW, OLD = {"gpu": "h100_80gb"}, {"gpu": "a100_40gb"}


@pytest.mark.parametrize(
    ("said", "early", "doubted"),
    [
        (NEW | {"measured_by": "2024-01"}, True, False),
        (NEW | {"readme_revision": "5e85bd62d"}, True, False),
        (OLD | {"measured_by": "2023-07"}, False, False),
        (OLD | {"readme_revision": "c6cfb4284"}, False, False),
        (
            OLD
            | {
                "measured_by": "2024-01",
                "attn_impl": "triton (default of submit_benchmarks at 2023-07)",
            },
            False, False,
        ),
        (NEW, True, True), (OLD, False, True),
        (OLD | {"attn_impl": "triton (sweep of 2024-01)"}, True, True),
        (OLD | {"attn_impl": "triton (sweep of 2023-12)"}, False, True),
        (NEW | {"measured_by": "2023-07"}, False, True),
        (OLD | {"measured_by": "2024-01"}, False, True),
        (OLD | {"measured_by": "2025-06"}, True, True),
        (OLD | {"torch_version": "2.1.0"}, True, False),
        (NEW | {"torch_version": "2.0.1"}, False, False),
    ],
)
def test_early_stop_is_decided_by_what_dates_the_software(
    tmp_path: Path, said: dict[str, str], early: bool, doubted: bool
) -> None:
    plain, made = (
        step(tmp_path, row | {"attn_impl": "triton"} | said) for row in (FOUNDRY, CHECKPOINTED)
    )
    assert read(made).checkpointing.early_stop is early
    assert made.widened == pytest.approx(hypot(plain.widened, 0.07 if doubted else 0.0))
    assert any(words.startswith("recomputation") and ", by " in words for words in made.assumed)


KERNELS = [
    ("2.8.0", "composite"), ("2.9", "fused"), ("v2.9.1", "fused"), ("2.10", "fused"),
    ("", "composite"),
]


@pytest.mark.parametrize(("version", "norms"), KERNELS)
def test_rmsnorms_are_of_one_kernel_since_torch_2_9(
    tmp_path: Path, version: str, norms: str
) -> None:
    for row in (FMS, TITAN | {"torch_compile": "False"}):
        assert read(step(tmp_path, row | {"torch_version": version})).executed.norms == norms


SIZES = {"model": "mpt-13b", "d_model": "5120", "n_heads": "40", "n_layers": "40"}
LARGE = SIZES | {"activation_checkpointing": "True", "measured_by": "2023-07"}
RATE = {
    "micro_batch": "1", "grad_accum": "1", "global_batch_seqs": "", "tokens_per_s_per_gpu": "",
    "tokens_per_s": "10000",
}


@pytest.mark.parametrize(
    ("row", "widths"),
    [
        (FOUNDRY, (0.05,)),  # attn_impl is not said
        (FOUNDRY | {"colour": "blue"}, (0.05, 0.1)),
        (FOUNDRY | {"torch_compile": "True"}, (0.05, 0.1)), (TITAN, (0.05,)),
        (TITAN | {"torch_compile": ""}, (0.05, 0.2)),
        (TITAN | {"torch_compile": "", "colour": "blue"}, (0.05, 0.2, 0.1)), (NANOTRON, (0.05,)),
    ],
)
def test_a_band_is_wider_by_all_that_a_row_leaves_open(
    tmp_path: Path, row: dict[str, str], widths: tuple[float, ...]
) -> None:
    """A twentieth for what its source usually has, a tenth for what nobody knows, a fifth where
    nobody says whether it is compiled."""
    assert step(tmp_path, row).widened == pytest.approx(hypot(*widths))


def test_a_device_that_is_nearly_full_may_take_longer(tmp_path: Path) -> None:
    """13 B parameters in fp32 with their gradients and two states, 16 B of each, over 8 devices of
    40 GiB: three fifths of each."""
    full, roomy = (
        _predicted(tmp_path, FOUNDRY | LARGE | RATE | {"gpu": gpu})
        for gpu in ("a100_40gb", "a100_80gb")
    )
    assert full.assumed[-1] == (
        "parameters, gradients and optimizer states fill 60 % of the device's memory: such steps "
        "run longer"
    )
    assert "fill" not in roomy.assumed[-1]
    costs = accuracy._simulated(step(tmp_path, FOUNDRY | LARGE | RATE).scenario, "x", shared=False)
    widened = step(tmp_path, FOUNDRY | LARGE | RATE).widened
    assert full.band[0] == pytest.approx(costs.factors[0] / (1 + widened))
    assert full.band[1] == pytest.approx(costs.factors[1] * (1 + hypot(widened, 0.2)))


def test_what_cannot_fit_has_the_widest_band(tmp_path: Path) -> None:
    large = {
        "d_model": "8192", "n_heads": "64", "n_layers": "80", "model": "mpt-70b",
        "activation_checkpointing": "False",
    }
    found = _predicted(tmp_path, FOUNDRY | LARGE | large | RATE | {"tokens_per_s": "2000"})
    assert found.assumed[-1].startswith("as mapped it cannot fit")
    assert found.band[0] < 0.75
    assert found.band[1] > 1.3


def test_what_is_allocated_near_the_end_of_memory_is_cautioned_of() -> None:
    text = """
model = { preset = "mpt-1b" }
batch = { micro_batch = 16, sequence_length = 2048 }
cluster = { preset = "dgx-a100-40" }
strategy = { name = "fsdp2", dp_shard = 8 }
precision = { parameters = "bf16" }
"""
    asked = scenario.parse(text.encode(), where="x.toml")
    program = plan(asked, device="cuda")
    (needed,) = {memory_pressure.needed(rank) for rank in program.ranks}
    words = {
        share: [one.words for one in memory_pressure.found(program, int(needed / share))]
        for share in (0.89, 0.91, 1.01)
    }
    assert words[0.89] == []
    assert words[0.91] == ["near out of memory: 91 % of the device are allocated at once"]
    assert words[1.01][0].startswith("as mapped it cannot fit")


def test_float8_without_compile_gains_nothing(tmp_path: Path) -> None:
    """torchao casts in a dozen kernels, and asks for torch.compile; compiled, torchtitan's own row
    is 28 % faster than without."""
    times = {}
    for compiled in ("True", "False"):
        for recipe in ("tensorwise", "none"):
            times[compiled, recipe] = _predicted(
                tmp_path, TITAN | {"torch_compile": compiled, "float8": recipe}
            )
    assert times["False", "tensorwise"].predicted > 0.97 * times["False", "none"].predicted
    assert times["True", "tensorwise"].predicted < 0.85 * times["True", "none"].predicted
    assert any(
        words.startswith("casts to float8 in kernels of their own")
        for words in times["False", "tensorwise"].assumed
    )
    widths = [
        step(tmp_path, TITAN | {"torch_compile": "False", "float8": recipe}).widened
        for recipe in ("tensorwise", "none")
    ]
    assert widths[0] == pytest.approx(hypot(widths[1], 0.15))


def test_the_host_and_software_are_as_uncertain_as_the_bands_say() -> None:
    """Half of what waits for the host, twice as long at the upper end; a twentieth more of compiled
    kernels and of those of 8 bits."""
    assert _parts().host.width == 0.5
    plain = _parts().compute.width
    assert _parts("execution = { compile = true }").compute.width == pytest.approx(
        plain + 0.05, abs=0.02
    )


def _parts(more: str = "") -> error_bands.Parts:
    text = f"""
model = {{ preset = "gpt-small", num_layers = 2 }}
batch = {{ micro_batch = 32, sequence_length = 1024 }}
cluster = {{ preset = "dgx-h100" }}
strategy = {{ name = "fsdp2", dp_shard = 8 }}
precision = {{ parameters = "bf16" }}
{more}
"""
    asked = scenario.parse(text.encode(), where="x.toml")
    costs, program = (
        Costs(cluster=asked.cluster, execution=asked.executed), plan(asked, device="cuda"),
    )
    return error_bands.parts(program, simulate_step(program, costs=costs), costs=costs)
