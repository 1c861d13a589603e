"""Rows that differ from those published in one cell: each changes its scenario, is named as
assumed, or is skipped with the reason."""

from __future__ import annotations

from math import hypot
from pathlib import Path

import pytest

from tests.zsim.calibration.tables.test_measurements import (
    FMS,
    FOUNDRY,
    MEGATRON,
    NANOTRON,
    ROWS,
    TITAN,
    found,
    reason,
    table,
)
from zsim.calibration.rows.records import RowError
from zsim.calibration.rows.records import column as named
from zsim.calibration.tables import Step
from zsim.calibration.vocabulary.gpu import part_of
from zsim.scenario import scenario
from zsim.scenario.scenario import Scenario

LLAMA_1B = 2048 * 131072 + 16 * (4 * 2048**2 + 3 * 2048 * 8192 + 2 * 2048) + 2048
AXES = [
    "tp", "cp_size", "tensor_parallel", "pipeline-parallel-size", "Expert Parallel Degree",
    "num_pp", "ulysses",
]
MPT_1B = 24 * (12 * 2048**2 + 13 * 2048) + 2 * 2048 + 50368 * 2048 + 2048 * 2048


def step(tmp_path: Path, row: dict[str, str]) -> Step:
    (made,) = found(table(tmp_path / "t.csv", row))
    assert isinstance(made, Step), made
    return made


def read(made: Step) -> Scenario:
    return scenario.parse(made.scenario.encode(), where="row")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("A100-SXM4-80GB (400W)", "a100-80"),
        ("H100 80GB HBM3 (1965 MHz)", "h100-80"),
        ("H100-SXM5-80GB 96 vCPU", "h100-80"),
        ("H100-96GB HBM2e (2.4 TB/s, 500W cap)", "h100-96"),
        ("a100_40gb", "a100-40"),
        ("NVIDIA A100-SXM-40GB", "a100-40"),
        ("A100-40", "a100-40"),
        ("8xA100 40G", "a100-40"),
        ("A100", "a100-80"),
        ("H200 SXM 141GB", "h200-141"),
        ("B200 (p6-b200)", "b200-180"),
        ("H100 (80GB, NVLink 900 GB/s)", "h100-80"),
        ("NVIDIA L40S", "l40s-48"),
        ("H800", "h100-80"),
        ("A800-80GB", "a100-80"),
    ],
)
def test_a_gpu_is_the_part_that_its_tokens_name(name: str, device: str) -> None:
    assert part_of(name).device == device


@pytest.mark.parametrize(
    "name",
    [
        "H100 NVL 94GB",
        "A100 80GB PCI-E",
        "A100 PCIe",
        "H100 PCI Express",
        "GH200",
        "GB200 NVL72",
        "H100-80GB 350W",
        "H100 96GB HBM3",
        "H100 MIG 3g.40gb",
        "H100/A100",
        "H100 64GB",
        "V100",
        "",
    ],
)
def test_a_part_that_no_preset_is_of_is_refused(name: str) -> None:
    with pytest.raises(RowError, match="gpu: expected an A100 SXM of 80 GB"):
        part_of(name)


@pytest.mark.parametrize("source", ROWS)
@pytest.mark.parametrize("column", AXES)
def test_any_spelling_of_another_axis_is_skipped_by_name(
    tmp_path: Path, source: str, column: str
) -> None:
    assert reason(tmp_path, ROWS[source] | {column: "4"}) == (
        f"{named(column)} = 4: only data parallelism is simulated"
    )
    assert (
        step(tmp_path, ROWS[source] | {column: "1"}).assumed == step(tmp_path, ROWS[source]).assumed
    )


CHANGES: list[tuple[dict[str, str], dict[str, str], str, object]] = [
    (FOUNDRY, {"attn_impl": "torch"}, "execution.attention_kernels", "flash2"),
    (FOUNDRY, {"attn_impl": "flash"}, "execution.attention_kernels", "flash2"),
    (FOUNDRY, {"precision": "amp_fp16"}, "precision.reduce", "float16"),
    (FOUNDRY, {"mp_mode": "FULL"}, "precision.autocast", "bfloat16"),
    (FOUNDRY, {"sharding": "SHARD_GRAD_OP"}, "options.sharding", "grad_op"),
    (FOUNDRY, {"sharding": "NO_SHARD"}, "strategy", "ddp"),
    (
        FOUNDRY,
        {
            "sharding": "HYBRID_SHARD", "n_gpus": "16", "global_batch_seqs": "",
            "tokens_per_s_per_gpu": "",
        },
        "mesh.dp_replicate", 2,
    ),
    (FOUNDRY, {"interconnect": "1600 Gbps/node RoCE"}, "cluster.name", "a100-40-roce"),
    (FOUNDRY, {"grad_accum": "", "global_batch_seqs": "512"}, "batch.accumulation", 8),
    (TITAN, {"precision": "bf16 compute, bf16 reduce"}, "precision.reduce", "bfloat16"),
    (
        TITAN, {"precision": "bf16 (fp8 linears), fp32 reduce", "float8": ""}, "execution.float8",
        True,
    ),
    (TITAN, {"technique": "DDP", "dp_shard": ""}, "strategy", "ddp"),
    (TITAN, {"technique": "HSDP", "dp_shard": "", "n_gpus": "64"}, "mesh.dp_replicate", 8),
    (TITAN, {"technique": "FSDP, no reshard"}, "options.reshard_after_forward", False),
    (TITAN, {"dp_shard": ""}, "mesh.dp_shard", 8),
    (TITAN, {"global_batch": "64"}, "batch.accumulation", 4),
    (TITAN, {"activation_checkpointing": "selective 1/4"}, "checkpointing.every", 4),
    (TITAN, {"activation_checkpointing": "selective (option 3)"}, "checkpointing.every", 3),
    (TITAN, {"activation_checkpointing": "selective, every other layer"}, "checkpointing.every", 2),
    (TITAN, {"activation_checkpointing": "every third block"}, "checkpointing.every", 3),
    (TITAN, {"activation_checkpointing": "selective"}, "checkpointing.save_every", 2),
    (FMS, {"activation_checkpointing": "selective"}, "checkpointing.every", 2),
    (
        TITAN, {"activation_checkpointing": "selective op (default AC config)"},
        "checkpointing.save_every", 2,
    ),
    (TITAN, {"activation_checkpointing": "op"}, "checkpointing.save_every", 2),
    (TITAN, {"activation_checkpointing": "per-op"}, "checkpointing.mode", "selective"),
    (TITAN, {"activation_checkpointing": "layer 2"}, "checkpointing.every", 2),
    (TITAN, {"activation_checkpointing": "layer=3"}, "checkpointing.every", 3),
    (FMS, {"sharding": "ZeRO-2"}, "options.sharding", "grad_op"),
    (FMS, {"sharding": "ZeRO-2"}, "mesh.dp_replicate", 1),
    (FMS, {"sharding": "zero3"}, "options.sharding", "full"),
    (FMS, {"activation_checkpointing": "selective p=0.25"}, "checkpointing.every", 4),
    (FMS, {"activation_checkpointing": "selective 1/3"}, "checkpointing.every", 3),
    (FMS, {"activation_checkpointing": "full"}, "checkpointing.every", 1),
    (FMS, {"activation_checkpointing": "1/2"}, "checkpointing.every", 2),
    (FMS, {"attention": "SDPA math"}, "model.blocks", "math"),
    (FMS, {"vocab_size": "128256"}, "model.num_parameters", 6_738_415_616 + 2 * 96256 * 4096),
    (FMS, {"precision": "bf16 mixed, fp32 reduce"}, "precision.reduce", "float32"),
    (FMS, {"n_gpus": "16"}, "mesh.dp_replicate", 2),
    (FMS, {"grad_accum": "", "global_batch_seqs": "512"}, "batch.accumulation", 2),
    (FMS, {"interconnect": "400 Gbps/node"}, "cluster.name", "p4de"),
    (FMS, {"interconnect": "TCP 100 Gbps/node"}, "cluster.nccl.fabric", "tcp"),
    (FMS, {"interconnect": "100 GbE RDMA per node"}, "cluster.nccl.fabric", "roce"),
    (
        FMS, {"model": "llama2-34b", "mfu_frac": "", "tokens_per_s_per_gpu": "700"},
        "model.num_parameters", 33_743_970_304,
    ),
    (NANOTRON, {"activation_checkpointing": "full"}, "checkpointing.mode", "full"),
    (NANOTRON, {"precision": "bf16"}, "precision.reduce", "bfloat16"),
    (NANOTRON, {"zero_stage": "1.0", "status": "OK"}, "strategy", "zero1"),
    (NANOTRON, {"zero_stage": "2"}, "strategy", "zero2"),
    (NANOTRON, {"zero_stage": "3"}, "strategy", "zero3"),
    (NANOTRON, {"interconnect": "NVLink 8/node; EFA 3200 Gbps/node"}, "cluster.name", "p5"),
    (
        MEGATRON, {"n_gpus": "64", "dp": "64", "inter_node_gbps_per_node": "800"}, "cluster.name",
        "a100-80-4hdr",
    ),
    (
        MEGATRON, {"n_gpus": "64", "dp": "64", "inter_node_gbps_per_node": "1600"}, "cluster.name",
        "dgx-a100",
    ),
    (
        MEGATRON, {"n_gpus": "64", "dp": "64", "inter_node_gbps_per_node": "400"}, "cluster.name",
        "p4de",
    ),
    (MEGATRON, {"activation_checkpointing": "none"}, "checkpointing.mode", "none"),
]


@pytest.mark.parametrize(
    ("row", "change", "place", "value"), CHANGES,
    ids=[f"{place}-{value}" for _, _, place, value in CHANGES],
)
def test_a_cell_changes_its_scenario(
    tmp_path: Path, row: dict[str, str], change: dict[str, str], place: str, value: object
) -> None:
    asked: object = read(step(tmp_path, row | change))
    for name in place.split("."):
        asked = getattr(asked, name)
    if place == "model.blocks":
        asked = next(one.implementation for one in asked[0].operators if one.kind == "attention")  # type: ignore[index]
    assert asked == value


@pytest.mark.parametrize(
    ("row", "change", "words"),
    [
        (FOUNDRY, {"attn_impl": "torch"}, "explicit attention, its softmax in the model's dtype"),
        (
            FOUNDRY, {"n_params_formula_ok": "False"},
            "parameters by the sizes, of which the source says",
        ),
        (
            FOUNDRY, {"learned_pos_emb": "False"},
            "learned positions, of which the row's model has none",
        ),
        (MEGATRON, {"gpus_per_node": "4"}, "a node of 4 GPUs as part of"),
        (FOUNDRY, {"colour": "blue"}, "colour = 'blue' changes nothing: the column is not known"),
        (
            FOUNDRY, {"notes": "power capped at 300 W"},
            "notes = 'power capped at 300 W' changes nothing: it is not understood",
        ),
        (
            NANOTRON, {"comment": "OOM at first"},
            "comment = 'OOM at first' changes nothing: it is not understood",
        ),
        (MEGATRON, {"n_gpus": "64", "dp": "64"}, "1600 Gbit/s of network a node, as dgx-a100 has"),
        (
            MEGATRON, {"n_gpus": "64", "dp": "64", "inter_node_gbps_per_node": "200"},
            "200 Gbit/s a node as slower links of dgx-a100",
        ),
        (
            FMS, {"interconnect": "400 Gbps/node InfiniBand"},
            "400 Gbit/s a node as slower links of dgx-a100",
        ),
        (MEGATRON, {"framework": "NeMo"}, "NeMo as Megatron-DeepSpeed"),
        (MEGATRON, {"intra_node": "Infinity Fabric"}, "NVLink between the GPUs of a node"),
        (TITAN, {"framework": "trainer of ours"}, "trainer of ours as torchtitan"),
        (
            FMS, {"activation_checkpointing": ""},
            "as the source usually has them, for the row does not say: activation_checkpointing",
        ),
        (
            NANOTRON,
            {"n_gpus": "16", "dp": "16", "nodes": "2", "interconnect": "RoCE 3200 Gbps/node"},
            "roce in place of the ib",
        ),
    ],
)
def test_what_no_scenario_says_is_named_as_assumed_and_widens_the_band(
    tmp_path: Path, row: dict[str, str], change: dict[str, str], words: str
) -> None:
    made = step(tmp_path, row | change)
    assert any(one.startswith(words) for one in made.assumed)
    assert made.widened >= 0.05


def test_a_row_that_says_attention_of_its_own_is_not_said_to_run_tritons(tmp_path: Path) -> None:
    assert not any(
        "Triton" in words for words in step(tmp_path, FOUNDRY | {"attn_impl": "torch"}).assumed
    )


@pytest.mark.parametrize(
    ("row", "change", "words"),
    [
        (FOUNDRY, {"precision": "fp32"}, "precision: expected bf16, fp16 or fp8"),
        (
            FOUNDRY, {"precision": "amp_fp8"},
            "precision: A100 SXM of 40 GB has no products of 8 bits",
        ),
        (FOUNDRY, {"attn_impl": "magic"}, "attn_impl: expected SDPA flash, math"),
        (
            FOUNDRY, {"attn_impl": "flash3"},
            "attn_impl: FlashAttention 3 has no kernels for A100 SXM of 40 GB",
        ),
        (
            FOUNDRY, {"attn_impl": "Flash-Attention v3"},
            "attn_impl: FlashAttention 3 has no kernels for A100 SXM of 40 GB",
        ),
        (
            FOUNDRY, {"interconnect": "PCIe Gen4, no NVLink"},
            "interconnect: expected GPUs joined by NVLink",
        ),
        (FOUNDRY, {"n_layers": "1000000"}, "layers: expected at most 1,000, found 1,000,000"),
        (
            FOUNDRY, {"sharding": "NO_SHARD", "reshard_after_forward": "True"},
            "reshard_after_forward: contradicts sharding = NO_SHARD",
        ),
        (FOUNDRY, {"gpus_per_node": "4"}, "gpus_per_node: expected nodes of 8, found 4"),
        (FOUNDRY, {"interconnect": "PCIe Gen4"}, "interconnect: expected GPUs joined by NVLink"),
        (
            FOUNDRY, {"grad_accum": "", "global_batch_seqs": "500"},
            "global_batch_seqs: 500 is no multiple of 64",
        ),
        (
            MEGATRON, {"n_gpus": "64", "dp": "64", "inter_node_gbps_per_node": "3200"},
            "network: expected at most one of a preset",
        ),
        (
            MEGATRON, {"n_gpus": "8", "dp": "8", "gpus_per_node": "4"},
            "gpus_per_node: expected nodes of 8, found 4",
        ),
        (
            MEGATRON, {"activation_checkpointing": "selective"},
            "activation_checkpointing: expected full or none",
        ),
        (NANOTRON, {"nodes": "4"}, "nodes: expected 1 nodes of 8 for 8 GPUs, found 4"),
        (NANOTRON, {"precision": "fp32"}, "precision: expected products in bf16 or fp16"),
        (NANOTRON, {"zero_stage": "4"}, "zero_stage: expected 0, 1, 2 or 3"),
        (TITAN, {"precision": "fp32"}, "precision: expected products in bf16 or fp16"),
        (
            TITAN, {"technique": "FSDP + TP"},
            "technique = FSDP + TP: only data parallelism is simulated",
        ),
        (TITAN, {"technique": "DDP"}, "dp_shard: 8 contradicts technique = DDP"),
        (
            TITAN, {"float8": "rowwise", "gpu": "A100-80GB"},
            "float8: A100 SXM of 80 GB has no products of 8 bits",
        ),
        (TITAN, {"global_batch": "24"}, "global_batch: 24 is no multiple of 16"),
        (
            TITAN, {"activation_checkpointing": "selective 2/3"},
            "activation_checkpointing: expected selective op",
        ),
        (FMS, {"precision": "fp8"}, "precision: expected products in bf16 or fp16"),
        (FMS, {"precision": "pure bf16"}, "precision: expected one dtype of compute"),
        (
            FMS, {"attention": "ring"},
            "attention: ring attention splits sequences over GPUs, and "
            "only data parallelism is simulated",
        ),
        (
            FMS, {"attention": "FA3"},
            "attention: FlashAttention 3 has no kernels for A100 SXM of 80 GB",
        ),
        (FMS, {"optimizer": "Lion"}, "optimizer: expected AdamW"),
        (FMS, {"n_gpus": "12"}, "n_gpus: expected whole nodes of 8 for HSDP"),
    ],
)
def test_what_cannot_be_mapped_is_skipped_by_name(
    tmp_path: Path, row: dict[str, str], change: dict[str, str], words: str
) -> None:
    assert reason(tmp_path, row | change).startswith(words)


@pytest.mark.parametrize(
    ("row", "change", "words"),
    [
        (MEGATRON, {"step_time_s": "0.406"}, "step_time_s: 0.406 contradicts 0.3"),
        (MEGATRON, {"iter_time_ms": "0.3"}, "2.731e+07 tokens a second of one GPU are"),
        (
            MEGATRON, {"tokens_per_s_per_gpu_derived": "1"},
            "tokens_per_s_per_gpu_derived: 1 contradicts 27306.7",
        ),
        (MEGATRON, {"n_params_derived": "1"}, "n_params_derived: 1 contradicts 7.1"),
        (FOUNDRY, {"step_time_s_derived": "99"}, "step_time_s_derived: 99 contradicts 6.80138"),
        (FOUNDRY, {"n_params": "999"}, "n_params: 999 contradicts"),
        (FOUNDRY, {"expansion_ratio": "8"}, "expansion_ratio: 8 contradicts model = mpt-"),
        (FOUNDRY, {"expansion_ratio": "3.5"}, "expansion_ratio: 3.5 contradicts model = mpt-"),
        (FOUNDRY, {"seqs_per_s": "154171"}, "seqs_per_s: 154171 contradicts 75.2"),
        (
            FOUNDRY, {"global_batch_tokens": "512"},
            "global_batch_tokens: 512 contradicts 1.04858e+06",
        ),
        (
            FOUNDRY, {"mfu_pct": "0.5623", "peak_tflops_used": "312"},
            "mfu_pct: 0.5623 contradicts 56.2",
        ),
        (NANOTRON, {"tokens_per_s_total": "1"}, "tokens_per_s_total: 1 contradicts 321200"),
        (
            NANOTRON, {"tokens_per_s_per_gpu": "321200", "tokens_per_s_total": "321200"},
            "tokens_per_s_total: 321200 contradicts 2.5696e+06",
        ),
        (NANOTRON, {"tokens_per_s_per_gpu": "321200"}, "3.212e+05 tokens a second of one GPU are"),
        (NANOTRON, {"tokens_per_s_per_gpu": "40.15"}, "40.15 tokens a second of one GPU are"),
        (
            NANOTRON, {"config_consistent": "False"},
            "config_consistent: False, so the source itself says",
        ),
        (NANOTRON, {"mfu_pct": "3.92"}, "mfu_pct: 3.92 contradicts 39.2"),
        (
            NANOTRON, {"peak_mem_gb": "-1"},
            "peak_mem_gb: expected bytes that something took, found '-1'",
        ),
        (
            TITAN, {"peak_mem_gib": "0.0"},
            "peak_mem_gib: expected bytes that something took, found '0.0'",
        ),
        (
            NANOTRON, {"model": "llama-70B"},
            "model: llama-70B contradicts the row's sizes, which make 1,34",
        ),
        (
            NANOTRON, {"model": "llama 0.5b"},
            "model: llama 0.5b contradicts the row's sizes, which make 1,34",
        ),
        (
            TITAN, {"tokens_per_s_range": "1000-2000"},
            "tokens_per_s_range: 1000-2000 contradicts 6667 tokens a second of each GPU",
        ),
        (
            TITAN, {"tokens_per_s_range": "6,900 to 7,000"},
            "tokens_per_s_range: 6,900 to 7,000 contradicts 6667",
        ),
        (TITAN, {"tokens_per_s_per_gpu": "6.667"}, "6.667 tokens a second of one GPU are"),
        (FMS, {"mfu_frac": "57"}, "mfu_frac: 57 contradicts 0.5"),
        (FMS, {"hfu_frac": "0.057"}, "hfu_frac: 0.057 contradicts 0.5"),
        (FOUNDRY, {"hfu_pct": "75", "peak_tflops_used": "312"}, "hfu_pct: 75 contradicts 56.2"),
        (TITAN, {"mfu_pct": "0.39"}, "mfu_pct: 0.39 contradicts 39"),
    ],
)
def test_a_row_that_contradicts_itself_is_skipped_by_name(
    tmp_path: Path, row: dict[str, str], change: dict[str, str], words: str
) -> None:
    assert reason(tmp_path, row | change).startswith(words)


@pytest.mark.parametrize(
    ("row", "change"),
    [
        (NANOTRON, {"model": "llama-1B"}), (NANOTRON, {"model": "ours, 2.5B"}),
        (TITAN, {"tokens_per_s_range": "6,500 - 6,660"}),
    ],
)
def test_what_a_row_rounds_or_names_roughly_contradicts_nothing(
    tmp_path: Path, row: dict[str, str], change: dict[str, str]
) -> None:
    assert step(tmp_path, row | change).seconds == step(tmp_path, row).seconds


@pytest.mark.parametrize(
    ("row", "column", "says"), [(TITAN, "mfu_pct", 39), (FMS, "mfu_frac", 0.57)]
)
def test_a_utilisation_may_count_other_flops_and_be_no_other_figure(
    tmp_path: Path, row: dict[str, str], column: str, says: float
) -> None:
    """Sources differ by how they count attention and embeddings, at most by a seventh; a fifth more
    or less is of another row."""
    row = {name: value for name, value in row.items() if name != column}
    counted = float(
        reason(tmp_path, row | {column: "1e-3"}).partition(" contradicts ")[2].partition(",")[0]
    )
    assert counted == pytest.approx(says, rel=0.15)
    for share in (0.88, 1.12):
        assert step(tmp_path, row | {column: repr(share * counted)}).seconds > 0
    for share in (0.8, 1.2):
        assert reason(tmp_path, row | {column: repr(share * counted)}).startswith(f"{column}: ")


@pytest.mark.parametrize(
    ("row", "column", "within"),
    [
        (MEGATRON, "params_b_reported", 0.15),
        (MEGATRON, "model_tflops_per_gpu_derived_v51200", 0.05),
        (FOUNDRY, "model_tflops_per_gpu", 0.05),
        (FOUNDRY | {"peak_tflops_used": "312"}, "mfu_pct", 0.1),
        (FOUNDRY | {"peak_tflops_used": "312"}, "hfu_pct", 0.1),
    ],
)
def test_a_figure_may_be_counted_otherwise_by_so_much_and_no_more(
    tmp_path: Path, row: dict[str, str], column: str, within: float
) -> None:
    """What its source counts in or leaves out: embeddings, biases and heads. Beyond it the figure
    is of other sizes or another time."""
    counted = float(
        reason(tmp_path, row | {column: "1e-3"}).partition(" contradicts ")[2].partition(",")[0]
    )
    for share in (1 - 0.9 * within, 1 + 0.9 * within):
        assert step(tmp_path, row | {column: repr(share * counted)}).seconds > 0
    for share in (1 - 1.3 * within, 1 + 1.3 * within):
        assert reason(tmp_path, row | {column: repr(share * counted)}).startswith(f"{column}: ")


def test_a_model_of_another_name_may_have_other_feed_forward_layers(tmp_path: Path) -> None:
    own = FOUNDRY | {
        "model": "ours", "d_model": "768", "n_layers": "12", "n_heads": "12", "vocab_size": "50368",
        "expansion_ratio": "8",
    }
    made = step(tmp_path, {key: value for key, value in own.items() if key != "n_params"})
    assert "feed_forward = 6144" in made.scenario
    assert "feed_forward = 8192" in step(tmp_path, FOUNDRY | {"expansion_ratio": "4.0"}).scenario


def test_figures_that_fit_are_taken(tmp_path: Path) -> None:
    rows = (
        NANOTRON
        | {
            "n_params": str(LLAMA_1B), "tokens_per_s_total": "321200", "mfu_pct": "39.2",
            "config_consistent": "True",
        },
        FOUNDRY
        | {
            "n_params": str(MPT_1B), "seqs_per_s": "75", "mfu_pct": "56.23",
            "peak_tflops_used": "312",
        },
        FOUNDRY | {"n_params": str(MPT_1B - 2048 * 2048), "learned_pos_emb": "False"},
        FOUNDRY
        | {
            "activation_checkpointing": "True", "hfu_pct": f"{56.23 * 4 / 3:.2f}",
            "peak_tflops_used": "312",
        },
        NANOTRON | {"peak_mem_gb": "42.5"},
    )
    assert all(step(tmp_path, row).seconds > 0 for row in rows)


def test_parameters_that_its_source_says_do_not_add_up_are_those_of_the_sizes(
    tmp_path: Path
) -> None:
    """The band is wider by what the model may be larger; the source's own MFU counts what it says,
    and beyond half it is another model."""
    rate = 154171 / 8 * (6 * 1.2 * MPT_1B + 12 * 24 * 2048 * 2048)
    doubted = {
        "n_params_formula_ok": "False", "n_params": str(round(1.2 * MPT_1B)),
        "mfu_pct": f"{100 * rate / 312e12:.2f}",
    }
    words = "parameters by the sizes, of which the source says that they do not add up"
    plain, found = (
        step(tmp_path, FOUNDRY), step(tmp_path, FOUNDRY | doubted | {"peak_tflops_used": "312"}),
    )
    assert found.scenario == plain.scenario
    assert set(found.assumed) - set(plain.assumed) == {words}
    assert found.widened == pytest.approx(hypot(plain.widened, 0.2), rel=1e-3)
    assert reason(tmp_path, FOUNDRY | doubted | {"n_params_formula_ok": "True"}).startswith(
        "n_params: 1.57"
    )
    assert reason(tmp_path, FOUNDRY | doubted | {"n_params": str(2 * MPT_1B)}).startswith(
        "n_params: 2.6"
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("Llama 3.1 8B", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
        ("llama3_1_8b", 8_030_261_248),
        ("llama3.2-1B", 1_235_814_400),
        ("Llama-3.2-3B", 3_212_749_824),
        ("llama2_13b", 13_015_864_320),
    ],
)
def test_a_llama_is_known_however_it_is_spelled(tmp_path: Path, name: str, parameters: int) -> None:
    row = TITAN | {"model": name, "tokens_per_s_per_gpu": str(round(2e14 / 6 / parameters))}
    assert read(step(tmp_path, row)).model.num_parameters == parameters


def test_a_model_of_another_name_is_skipped(tmp_path: Path) -> None:
    assert reason(tmp_path, TITAN | {"model": "llama3.1-9b"}).startswith(
        "model: expected one of llama2-7b"
    )


def test_a_slower_network_is_that_of_every_ring(tmp_path: Path) -> None:
    rates = {}
    for said in ("1600", "800", "600", "200"):
        asked = read(
            step(
                tmp_path, MEGATRON | {"n_gpus": "64", "dp": "64", "inter_node_gbps_per_node": said}
            )
        )
        rates[said] = asked.cluster.path(tuple(range(64))).bytes_per_s
    assert rates == {"1600": 192 * 10**9, "800": 96 * 10**9, "600": 72 * 10**9, "200": 24 * 10**9}


def test_float8_all_gathers_are_not_what_float8_alone_is(tmp_path: Path) -> None:
    """The time is the same, for all-gathers are those of bf16; that it is said, and its band, tell
    the two apart."""
    plain, gathers, none = (
        step(tmp_path, TITAN | {"float8": words})
        for words in ("tensorwise", "tensorwise + fp8 all-gather", "tensorwise, no fp8 all-gather")
    )
    assert plain.scenario == gathers.scenario
    assert gathers.widened > plain.widened == none.widened
    assert len(gathers.assumed) == len(plain.assumed) + 1


@pytest.mark.parametrize("words", ["ZeRO-1", "ZeRO++", "ZeRO"])
def test_stages_of_zero_that_fsdp_has_not_are_refused(tmp_path: Path, words: str) -> None:
    assert reason(tmp_path, FMS | {"sharding": words}).startswith("sharding: expected FSDP, ")


def test_reasons_are_one_line(tmp_path: Path) -> None:
    assert reason(tmp_path, NANOTRON | {"status": "failed\nagain"}) == "status: failed again"


@pytest.mark.parametrize(
    ("change", "words", "wider"),
    [
        (
            {"float8": "rowwise", "gpu": "H100-80GB"},
            "float8 rowwise takes the time of tensorwise", True,
        ),
        (
            {"float8": "tensorwise + fp8 all-gather"},
            "parameters gathered in bf16, which float8 all-gathers move half of", True,
        ),
        ({"float8": "mxfp8", "gpu": "B200"}, "float8 mxfp8 takes the time of tensorwise", True),
        ({"global_batch": "64"}, "4 micro-batches a step, which the global batch makes", False),
        ({"dp_shard": "4"}, "2 replicas of 4 shards, which dp_shard makes", False),
        (
            {"interconnect": "25 GbE", "n_gpus": "16", "dp_shard": "16"},
            "25 Gbit/s a node of tcp; the band covers 25 Gbit/s of roce", False,
        ),
    ],
    ids=[
        "scales of rows", "narrow gathers", "scales of blocks", "micro-batches", "replicas",
        "whose rate",
    ],
)
def test_what_a_row_of_torchtitan_leaves_to_its_mapping_is_said(
    tmp_path: Path, change: dict[str, str], words: str, wider: bool
) -> None:
    found = step(tmp_path, TITAN | change)
    assert [text for text in found.assumed if text.startswith(words)]
    assert (found.widened > step(tmp_path, TITAN | {**change, "float8": "none"}).widened) is wider
