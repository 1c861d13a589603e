"""Published steps with states in host memory and on drives, and what is predicted of them: `python
-m tests.published.offload`.

Rows are facts, in `offload.csv`. What a row leaves open is decided here, with the reason. No
constant was fitted to them.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.host import Drives
from zsim.engine.costs.host_work import threads_of
from zsim.ir.run import RunRecord, band_of
from zsim.runs.backend import RunOptions
from zsim.runs.figures.metrics import band_ns
from zsim.runs.simulator import SimBackend
from zsim.scenario.derived import derived
from zsim.scenario.scenario import Scenario

RAW = Path(__file__).with_name("offload.csv")
FLOPS_PER_TOKEN = 8
"""FLOPs of a token and parameter, recomputation included, as DeepSpeed's examples count them."""
ADAM = {"optimizer": "cpu", "adam": "deepspeed"}
ON_DRIVES = {
    "optimizer": "nvme", "parameters": "cpu", "adam": "deepspeed",
    "activations": "checkpoint_inputs", "pipeline_read": True, "pipeline_write": True,
    "buffer_count": 12,
}
QWEN = {"vocabulary": 151_936, "tied": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run as tables of a scenario, with what of it is `assumed`."""

    tables: Mapping[str, Any]
    assumed: str
    machine: Callable[[ClusterSpec], ClusterSpec] = lambda cluster: cluster
    kept: Mapping[str, Any] | None = None
    """The tables of the run to whose time this one's is compared; None where there is none."""
    threads: int | None = None
    """Threads of each rank that the run's own software gave; None where it is not known."""

    def scenario(self, *, threads: int | None = None) -> Scenario:
        """The scenario, with `threads` of each rank instead of those of the run."""
        told = {"execution": {"host_threads": threads or self.threads}}
        made = Scenario(**{**self.tables, **told})
        return derived(made, cluster=self.machine(made.cluster))


def llama(num_layers: int, hidden_size: int, num_heads: int, **sizes: Any) -> dict[str, Any]:
    """A model of the family; the rest of its sizes by name."""
    return {"family": "llama", "sizes": {
        "num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads, **sizes,
    }}


def gpt(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    """A GPT of Megatron's examples: its vocabulary padded, 1,024 positions."""
    return {"family": "gpt", "sizes": {
        "num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads,
        "vocabulary": 50_304, "max_positions": 1024,
    }}


def trained(
    model: Mapping[str, Any], cluster: Mapping[str, Any], strategy: str, *, tokens: int,
    micro_batch: int = 1, dtype: str = "bf16", step: str = "fused", **more: Any,
) -> dict[str, Any]:
    """Tables of a scenario; `step` is the optimizer's implementation."""
    return {
        "model": model, "batch": {"micro_batch": micro_batch, "sequence_length": tokens},
        "cluster": cluster, "strategy": {"name": strategy},
        "precision": {"parameters": dtype, "reduce": dtype},
        "optimizer": {"implementation": step}, **more,
    }


def dgx_2(cluster: ClusterSpec) -> ClusterSpec:
    """16 V100 behind PCIe Gen3, four below a switch; two Xeon with six channels of DDR4-2666.

    ZeRO-Infinity's slides have 12 GB/s of a path, 64 from the host to all GPUs and 28 from drives.
    Writing is taken to be as fast.
    """
    links = cluster.links
    return replace(
        cluster, devices_per_node=16, host_memory_bandwidth=154 * 10**9,
        links=replace(
            links, host=replace(links.host, bandwidth=12 * 10**9),
            fabric=replace(links.fabric, bandwidth=120 * 10**9),
        ),
        host=replace(cluster.host, cores=48, devices_per_switch=4, duplex=0.89),
        drives=Drives(read=28 * 10**9, write=28 * 10**9, capacity=30 * 10**12),
    )


def xeon_4210r(cluster: ClusterSpec) -> ClusterSpec:
    """Ten cores with six channels of DDR4-2400, 60 % of 115 GB/s."""
    return replace(
        cluster, host_memory_bandwidth=69 * 10**9, host=replace(cluster.host, cores=10)
    )


LLAMA_7B = trained({"preset": "llama-2-7b"}, {"preset": "dgx-a100", "ranks": 4}, "deepspeed2",
                   tokens=2048)
QWEN_72B = trained(
    llama(80, 8192, 64, num_kv_heads=8, feed_forward=29_568, vocabulary=152_064, qkv_bias=True),
    {"preset": "dgx-a100", "nodes": 4}, "deepspeed3", tokens=8192,
    activation_checkpointing={"mode": "full"},
)
QWEN_06B = trained(
    llama(28, 1024, 16, num_kv_heads=8, head_dim=128, feed_forward=3072, **QWEN),
    {"preset": "dgx-h100", "ranks": 1}, "zero1", tokens=4096,
)
V100 = {"preset": "dgx-a100", "device": "v100-32", "nodes": 2}
RECOMPUTED = {"activation_checkpointing": {"mode": "full"}, "dtype": "fp16"}


def qwen3_4b(step: str) -> Case:
    """prime-rl's run, by a step of torch's."""
    return Case(
        tables=trained(
            llama(36, 2560, 32, num_kv_heads=8, head_dim=128, feed_forward=9728, **QWEN),
            {"preset": "dgx-h100", "ranks": 1}, "zero2", tokens=2048, step=step,
            offload={"optimizer": "cpu"},
        ),
        assumed="an H100's server for one with an RTX PRO 6000; the step less forward and "
                "backward; one thread, as its launcher sets it",
        threads=1,
    )


def torchtune(threads: int | None) -> Case:
    """A recipe of torchtune's, which sets as many threads as a rank has cores."""
    tables = trained(
        {"preset": "llama-3-70b"}, {"preset": "dgx-a100"}, "fsdp2", tokens=256, micro_batch=2,
        activation_checkpointing={"mode": "full"},
    )
    tables["strategy"] |= {"offload": True}
    tables["precision"] |= {"master": False}
    return Case(
        tables=tables, threads=threads,
        assumed="two sequences of 256 tokens a GPU, FSDP2 for FSDP1" + (
            "" if threads else "; twice the time of the other, as told, with torchrun's one thread"
        ),
    )


def on_dgx_2(model: Mapping[str, Any], micro_batch: int, **more: Any) -> Case:
    """A row of ZeRO-Infinity's table 1: its sizes and batches, as remembered."""
    return Case(
        tables=trained(
            model, V100, "deepspeed3", tokens=1024, micro_batch=micro_batch, **RECOMPUTED, **more
        ),
        assumed="sizes and batches of ZeRO-Infinity's table 1, states where that has them, inputs "
                "of blocks on the host where they have no room" if more else
                "sizes, batch and states of ZeRO-Infinity's table 1",
        machine=dgx_2,
    )


SEQUENCE = "a sequence of 2,048 tokens a GPU"
CASES = {
    "Llama 2 7B, nothing offloaded": Case(tables=LLAMA_7B, assumed=SEQUENCE),
    "Llama 2 7B, optimizer offloaded": Case(
        tables=LLAMA_7B | {"offload": ADAM}, assumed=f"{SEQUENCE}, stage 2"
    ),
    "Qwen 2.5 3B, optimizer offloaded": Case(
        tables=trained(
            llama(36, 2048, 16, num_kv_heads=2, feed_forward=11_008, qkv_bias=True, **QWEN),
            {"preset": "dgx-a100-40", "ranks": 2}, "deepspeed2", tokens=2048, offload=ADAM,
        ),
        assumed=f"{SEQUENCE}; 64 threads, as `--bind_cores_to_rank` divides 128 cores",
        threads=64,
    ),
    "Qwen 72B, nothing offloaded": Case(
        tables=QWEN_72B, assumed="a sequence of 8,192 tokens a GPU"
    ),
    "Qwen 72B, all offloaded": Case(
        tables=QWEN_72B | {"offload": ADAM | {"parameters": "cpu"}},
        assumed="a sequence of 8,192 tokens a GPU",
    ),
    "Qwen3 4B, fused step": qwen3_4b("fused"), "Qwen3 4B, default step": qwen3_4b("for-loop"),
    "Qwen3 0.6B, optimizer offloaded": Case(
        tables=QWEN_06B | {"offload": {"optimizer": "cpu"}}, kept=QWEN_06B,
        assumed="any batch, as the difference of two runs; Megatron's step, which is torch's "
                "fused; one thread, as Ray sets it",
        threads=1,
    ),
    "Llama 3 70B, all offloaded": torchtune(16), "Llama 3 70B, threads not set": torchtune(None),
    "GPT 1.35B, optimizer offloaded": Case(
        tables=trained(
            gpt(24, 2048, 16), {"preset": "pcie-box", "device": "rtx-4090-24", "ranks": 1},
            "zero2", tokens=1024, dtype="fp16", offload=ADAM,
        ),
        assumed="24 layers of 2,048; stage 2, as deepspeed3 needs two ranks",
        machine=xeon_4210r,
    ),
    "GPT 10B, nothing offloaded": on_dgx_2(gpt(50, 4096, 16), 8),
    "GPT 50B, optimizer on drives": on_dgx_2(gpt(62, 8192, 32), 26, offload=ON_DRIVES),
    "GPT 100B, optimizer on drives": on_dgx_2(gpt(125, 8192, 32), 24, offload=ON_DRIVES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A published time of `part`, and the predicted one, with its band, in seconds."""

    run: str
    gpus: str
    part: str
    published: float
    at_least: bool
    predicted: float
    low: float
    high: float
    threads: int
    """Threads of each rank in the prediction."""
    by_one_thread: float

    @property
    def error(self) -> float:
        """Share by which the prediction is longer."""
        return self.predicted / self.published - 1

    @property
    def in_band(self) -> bool:
        return self.low <= self.published <= self.high


@cache
def simulated(run: str, *, threads: int | None, kept: bool = False) -> RunRecord:
    """The simulated run of a case, or of that without offloading which it is compared to."""
    case = CASES[run]
    if kept:
        assert case.kept is not None
        case = replace(case, tables=case.kept)
    return SimBackend().run(case.scenario(threads=threads), options=RunOptions())


def taken(run: str, part: str, *, threads: int | None = None) -> float:
    """Seconds of a part: of the whole step, of its backward, of what comes behind that, or of what
    offloading adds."""
    record = simulated(run, threads=threads)
    assert record.step_time_ns is not None
    spans = record.ranks[0].spans
    begin = min(span.start_ns for span in spans if span.kind == "backward")
    end = max(span.end_ns for span in spans if span.kind == "backward")
    nanoseconds = {
        "step": record.step_time_ns, "backward": end - begin,
        "optimizer": record.step_time_ns - end,
    }
    if part == "added":
        without = simulated(run, threads=threads, kept=True).step_time_ns
        assert without is not None
        return (record.step_time_ns - without) / 10**9
    return nanoseconds[part] / 10**9


def rows() -> Iterator[Row]:
    """Every published row with its prediction. The band of a part has the whole step's distances.
    """
    with RAW.open(encoding="utf-8", newline="") as file:
        published = list(csv.DictReader(file))
    for row in published:
        run, part, amount = row["run"], row["part"], float(row["published"])
        record, case = simulated(run, threads=None), CASES[run].scenario()
        if row["unit"] == "TFLOP/s":
            tokens = case.batch.micro_batch * case.batch.sequence_length
            flops = FLOPS_PER_TOKEN * case.model.num_parameters * tokens
            amount = flops / (amount * 10**12)
        step, predicted = record.step_time_ns, taken(run, part)
        assert step is not None
        low, high = band_ns(step, band_of(record))
        yield Row(
            run=run, gpus=row["gpus"], part=part, published=amount,
            at_least=row["least"] == "yes", predicted=predicted,
            low=max(0.0, predicted - (step - low) / 10**9), high=predicted + (high - step) / 10**9,
            threads=int(threads_of(case.cluster, case.executed)),
            by_one_thread=taken(run, part, threads=1),
        )


def seconds(value: float) -> str:
    """Three figures, without an exponent."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def line(row: Row) -> str:
    """The table's line."""
    least = "more than " if row.at_least else ""
    return (
        f"| {row.run} | {row.gpus} | {row.part} | {least}{seconds(row.published)} | "
        f"{seconds(row.predicted)} | {100 * row.error:+.0f} % | {seconds(row.low)} to "
        f"{seconds(row.high)} | {'yes' if row.in_band else '**no**'} | "
        f"{row.threads} | {seconds(row.by_one_thread)} |"
    )


def decided() -> Iterator[str]:
    """Assumptions of each run, in a line of a table."""
    return (f"| {run} | {case.assumed} |" for run, case in CASES.items())


if __name__ == "__main__":
    sys.stdout.writelines(f"{each}\n" for each in (*map(line, rows()), "", *decided()))
