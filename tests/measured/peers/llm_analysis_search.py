"""Every setting of one question in llm-analysis, by its own interpreter: the question is JSON on
standard input, the answer JSON on standard output.

llm-analysis prices one setting at a time, so that the search is this loop.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from itertools import product
from typing import Any

EFFICIENCY = 0.5
"""Share of the peak rate that llm-analysis' constants name for training; its default is 1."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Settings that fit, how many were tried, and the seconds that this process computed."""
    from llm_analysis.analysis import ActivationRecomputation, DSZeRO, train

    begun = time.process_time()
    tried, fitting, parameters = 0, [], 0
    for gpus, micro_batch, zero, recomputed in product(
        question["gpus"], question["micro_batches"], DSZeRO, ActivationRecomputation
    ):
        if question["global_batch"] % (gpus * micro_batch):
            continue
        tried += 1
        row = train(
            model_name=question["model"], gpu_name=question["gpu"], log_level="ERROR",
            batch_size_per_gpu=micro_batch, global_batch_size=question["global_batch"],
            seq_len=question["sequence_length"], total_num_gpus=gpus, ds_zero=zero.value,
            activation_recomputation=recomputed.value, flops_efficiency=EFFICIENCY,
        )
        parameters = row["num_params_total"]
        if row["memory_left_per_gpu"] >= 0:
            fitting.append({
                "gpus": gpus,
                "way": f"micro_batch = {micro_batch}, ZeRO {zero.value}, recomputes "
                       f"{recomputed.name.lower()}",
                "bytes": round(row["(weight+op_state+grad+act)_memory_per_gpu"]),
                "step_s": round(row["latency_per_iter"], 4),
            })
    return {
        "version": version("llm-analysis"), "parameters": round(parameters), "tried": tried,
        "fit": len(fitting), "cpu_s": round(time.process_time() - begun, 2),
        "fewest": min(fitting, key=lambda row: (row["gpus"], row["step_s"]), default=None),
        "fastest": min(fitting, key=lambda row: (row["step_s"], row["gpus"]), default=None),
    }


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
