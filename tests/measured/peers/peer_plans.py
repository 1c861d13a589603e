"""Two questions to `zsim plan` and to llm-analysis, in one run: does it fit, on how few GPUs, and
how fast? `python -m tests.measured.peers.peer_plans --peer VENV/bin/python --out FILE`.

`--peer` is a Python with llm-analysis. SimuMax and Calculon of their papers are on no package
index (the `calculon` there is another project), and are not asked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import zsim
from tests.measured.peers import llm_analysis_search
from zsim.analysis.planner.option import Option

MICRO_BATCHES = (1, 2, 4)
QUESTIONS: tuple[dict[str, Any], ...] = (
    {
        "name": "GPT-2 XL, 512 sequences of 1,024 tokens a step, on 1 to 8 A100 of 40 GB",
        "sequence_length": 1024, "global_batch": 512, "gpus": (1, 2, 4, 8),
        "model": {"family": "gpt", "sizes": {"num_layers": 48, "hidden_size": 1600, "num_heads": 25,
                  "vocabulary": 50257, "max_positions": 1024}},
        "cluster": "dgx-a100-40", "strategy": "ddp",
        "peer": {"model": "gpt2-xl", "gpu": "a100-sxm-40gb"},
    },
    {
        "name": "Llama 2 70B, 1,024 sequences of 4,096 tokens a step, on 8 to 256 H100",
        "sequence_length": 4096, "global_batch": 1024, "gpus": (8, 16, 32, 64, 128, 256),
        "model": {"preset": "llama-2-70b"}, "cluster": "dgx-h100", "strategy": "fsdp2",
        "peer": {"model": "upstage_Llama-2-70b-instruct-v2", "gpu": "h100-sxm-80gb"},
    },
)


def answered(question: dict[str, Any]) -> dict[str, Any]:
    """zsim's answer: what one plan finds fewest and fastest, and what each way of asking takes."""
    gpus = question["gpus"]
    scenario = zsim.Scenario(
        model=question["model"], strategy={"name": question["strategy"]},
        batch={"micro_batch": 1, "sequence_length": question["sequence_length"]},
        cluster={"preset": question["cluster"], "nodes": 1, "ranks": min(8, gpus[-1])},
        precision={"parameters": "bf16", "reduce": "fp32"}, name="question",
    )
    asked: dict[str, Any] = {
        "micro_batches": MICRO_BATCHES, "global_batch": question["global_batch"],
    }
    if gpus[-1] > 8:
        asked["nodes"] = [number // 8 for number in gpus]
    else:
        asked["vary"] = {"cluster.ranks": list(gpus)}
    begun, wall = _cpu_s(), time.perf_counter()
    plan = zsim.plan_for(scenario, **asked)
    cpu_s, wall_s = _cpu_s() - begun, time.perf_counter() - wall
    begun = _cpu_s()
    smallest = zsim.plan_for(scenario, goal="smallest", **asked)
    smallest_s = _cpu_s() - begun
    assert plan.recommended
    assert smallest.recommended
    fitting = [each for each in plan.options if each.memory.verdict == "FITS"]
    return {
        "parameters": scenario.model.num_parameters, "tried": len(plan.reasons) + 1,
        "simulated": len(plan.options), "fit": len(fitting),
        "cpu_s": round(cpu_s, 2), "wall_s": round(wall_s, 2),
        "smallest_alone_cpu_s": round(smallest_s, 2),
        "fewest": _row(smallest.recommended), "fastest": _row(plan.recommended),
        "not_told_apart": len(plan.alike),
    }


def _cpu_s() -> float:
    """Seconds that this process and those that it forked have computed."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def _row(option: Option) -> dict[str, Any]:
    low, high = option.step_time_band_ns
    return {
        "gpus": option.gpus, "way": option.name.split(", ", 1)[1],
        "bytes": option.memory.needed.nbytes, "step_s": round(option.step_time_ns / 1e9, 4),
        "step_band_s": [round(low / 1e9, 4), round(high / 1e9, 4)],
    }


def peer_answer(python: Path, question: dict[str, Any]) -> dict[str, Any]:
    """llm-analysis' answer to the same question, and the seconds of its whole process."""
    keys = ("sequence_length", "global_batch", "gpus")
    asked = {**{key: question[key] for key in keys}, **question["peer"],
             "micro_batches": MICRO_BATCHES}
    begun = time.perf_counter()
    done = subprocess.run(
        [str(python), llm_analysis_search.__file__], input=json.dumps(asked), text=True,
        check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )
    return {**json.loads(done.stdout), "wall_s": round(time.perf_counter() - begun, 2)}


def main() -> int:
    """Write the record; 0, or 2 where the peer is not installed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--peer", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    asked = options.parse_args()
    imported = asked.peer.exists() and subprocess.run(
        [str(asked.peer), "-c", "import llm_analysis"], check=False, stderr=subprocess.DEVNULL
    )
    if not imported or imported.returncode:
        sys.stderr.write(f"--peer {asked.peer}: expected a Python that has llm-analysis; make one "
                         f"by python -m venv, then pip install llm-analysis\n")
        return 2
    rows = [
        {"question": question["name"], "zsim": answered(question),
         "llm-analysis": peer_answer(asked.peer, question)}
        for question in QUESTIONS
    ]
    asked.out.write_text(json.dumps({
        "provenance": {"zsim": zsim.__version__, "micro_batches": MICRO_BATCHES,
                       "llm_analysis_share_of_peak": llm_analysis_search.EFFICIENCY},
        "rows": rows,
    }, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
