"""Traces of a GPU, made by hand in the profiler's form, and traces that are none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from zsim.cli.main import main
from zsim.ir.run import Span
from zsim.runs.kineto import trace_file
from zsim.runs.kineto.to_run import to_run
from zsim.runs.kineto.trace_file import KinetoError

Row = dict[str, Any]


def row(name: str, cat: str, ts: float, dur: float, tid: object = 1, **args: Any) -> Row:
    return {
        "ph": "X", "name": name, "cat": cat, "pid": 7, "tid": tid, "ts": ts, "dur": dur,
        "args": args,
    }


def kernel(
    number: int, name: str, launched: float, ts: float, dur: float, **args: Any
) -> list[Row]:
    """A kernel on stream 7, or NCCL's on stream 16, and the call that launched it."""
    stream, thread = (16 if name.startswith("nccl") else 7), args.pop("thread", 1)
    return [
        row("cudaLaunchKernel", "cuda_runtime", launched, 2, thread, correlation=number),
        row(name, "kernel", ts, dur, stream, correlation=number, stream=stream, device=0, **args),
    ]


def nccl(kind: str, numel_in: int, numel_out: int) -> Row:
    return {
        "Collective name": kind, "In msg nelems": numel_in, "Out msg nelems": numel_out,
        "Group size": 2, "dtype": "BFloat16", "Process Group Name": "0",
        "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]",
    }


def fsdp2_step(at: float, number: int) -> list[Row]:
    """One unit, gathered and computed, reduced behind its backward, and the optimizer."""
    return [
        row(f"ProfilerStep#{number}", "user_annotation", at, 1000),
        row("FSDP::pre_forward (layers.0)", "user_annotation", at + 10, 40),
        row("FSDP::all_gather (layers.0)", "user_annotation", at + 12, 20),
        *kernel(10 * number + 1, "ncclDevKernel_AllGather_RING_LL", at + 15, at + 20, 100,
                **nccl("_allgather_base", 512, 1024)),
        row("FSDP::post_forward (layers.0)", "user_annotation", at + 80, 10),
        *kernel(10 * number + 2, "ampere_bf16_gemm", at + 60, at + 130, 200),
        row("FSDP::pre_backward (layers.0)", "user_annotation", at + 100, 5, 2),
        row("autograd::engine::evaluate_function: MmBackward0", "cpu_op", at + 110, 30, 2),
        *kernel(10 * number + 3, "ampere_bf16_gemm_dgrad", at + 120, at + 330, 300, thread=2),
        row("FSDP::post_backward_accumulate (layers.0)", "user_annotation", at + 150, 2, 2),
        row("FSDP::post_backward_reduce (layers.0)", "user_annotation", at + 155, 30, 2),
        *kernel(10 * number + 4, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", at + 160,
                at + 600, 150, thread=2, **nccl("_reduce_scatter_base", 1024, 512)),
        row("Optimizer.step#AdamW.step", "user_annotation", at + 300, 50),
        *kernel(10 * number + 5, "multi_tensor_apply_kernel", at + 310, at + 760, 40),
    ]


def trace(tmp_path: Path, rows: list[Row], *, rank: int = 0, **more: Any) -> Path:
    table = {
        "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
        "distributedInfo": {
            "backend": "nccl", "rank": rank, "world_size": 2, "pg_count": 1,
            "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}],
        },
        "traceEvents": rows, **more,
    }
    path = tmp_path / f"rank{rank}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(table).encode()))
    return path


def test_the_last_step_of_a_gpu_is_told_by_its_kernels(tmp_path: Path) -> None:
    path = trace(tmp_path, [*fsdp2_step(1000, 3), *fsdp2_step(2000, 4)])
    run = to_run([trace_file.read(path)], name="mine", scenario=None)
    (rank,) = run.ranks
    assert (run.step_time_ns, rank.step_times_ns) == (780_000, (1_000_000, 780_000))
    assert [(s.name, s.stream, s.start_ns, s.end_ns, s.nbytes) for s in rank.spans] == [
        ("all_gather layers.0", "all_gather", 0, 100_000, 2048),
        ("forward layers.0", "compute", 110_000, 310_000, 0),
        ("backward layers.0", "compute", 310_000, 610_000, 0),
        ("reduce_scatter layers.0", "reduce_scatter", 580_000, 730_000, 2048),
        ("optimizer root", "compute", 740_000, 780_000, 0),
    ]
    assert rank.groups == {"dp_shard": (0, 1)}
    assert (run.provenance["device"], run.provenance["ranks"]) == ("NVIDIA H100 80GB HBM3", "0")
    assert isinstance(rank.spans[0], Span)


def test_the_command_tells_where_the_time_went(tmp_path: Path, capsys) -> None:
    traces = [str(trace(tmp_path, fsdp2_step(1000, 3), rank=rank)) for rank in (0, 1)]
    assert main(["import", "kineto", *traces, "--save", str(tmp_path / "run.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "rank0, rank 0: step of 780.000 us; compute 540.000 us, communication 250.000 us, of it "
        "exposed 220.000 us, 28.2%"
    )
    assert "  all_gather          1 of 2,048 B in 100.000 us" in lines
    assert main(["compare", str(tmp_path / "run.json"), str(tmp_path / "run.json")]) == 0
    assert "agrees in order and bytes" in capsys.readouterr().out


def without(rows: list[Row], key: str) -> list[Row]:
    return [
        {**each, "args": {k: v for k, v in each["args"].items() if k != key}} for each in rows
    ]


@pytest.mark.parametrize(("rows", "told"), [
    (fsdp2_step(0, 1)[1:], "call profiler.step() after each training step"),
    (without(fsdp2_step(0, 1), "Collective name"), "Collective name, In msg nelems and dtype"),
    ([row("x", "kernel", -1, 1)], "ts, dur and args of event 0"),
    ([row("x", "kernel", float("inf"), 1)], "ts, dur and args of event 0"),
    ([{**row("x", "kernel", 1, 1), "args": []}], "ts, dur and args of event 0"),
])
def test_a_trace_that_lacks_something_says_what(rows: list[Row], told: str, tmp_path) -> None:
    with pytest.raises(KinetoError) as refusal:
        to_run([trace_file.read(trace(tmp_path, rows))], name="mine", scenario=None)
    assert told in str(refusal.value)


@pytest.mark.parametrize(("data", "told"), [
    (b"\x80\x04pickle", "no JSON"), (b"[]", "other JSON"), (b"\x1f\x8bbroken", "can be read"),
    (b'{"traceEvents": [], "traceEvents": []}', "twice"), (b"[" * 99_999, "no JSON"),
    (b'{"traceEvents": [], "distributedInfo": {"rank": 5, "world_size": 2}}', "world_size"),
    (b'{"traceEvents": [], "distributedInfo": []}', "distributedInfo"),
])
def test_a_file_that_is_no_trace_is_refused(data: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(data)
    with pytest.raises(KinetoError) as refusal:
        trace_file.read(tmp_path / "t.json")
    assert told in str(refusal.value)


def test_a_trace_beyond_the_limit_is_not_unpacked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(trace_file, "MAX_BYTES", 1000)
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(b" " * 100_000))
    with pytest.raises(KinetoError, match="at most 1,000 B"):
        trace_file.read(tmp_path / "t.json.gz")


def test_traces_of_one_rank_twice_are_refused(tmp_path: Path, capsys) -> None:
    path = str(trace(tmp_path, fsdp2_step(1000, 3)))
    assert main(["import", "kineto", path, path]) == 2
    assert "one trace of each rank" in capsys.readouterr().err
