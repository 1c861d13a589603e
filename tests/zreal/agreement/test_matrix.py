"""Memory of every strategy with its options against real steps on the fake process group: each
byte, each collective.

The whole matrix (`-m slow`) takes some fifteen minutes; what it measured is recorded in
tests/measured/memory_matrix.json, which `ZSIM_UPDATE_MEASURED=1` writes anew. The suite predicts
all of the record again and measures five draws.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases.memory_matrix import TRACED, matrix
from tests.support.folders import MEASURED
from tests.support.installed_torch import TORCH
from tests.zreal.tracing.traced_subject import Subject
from tests.zreal.tracing.user_modules import DEEP, SHARING
from zreal import torch_private
from zreal.tracing.trace import trace
from zsim.autograd.traced.model import FAMILY
from zsim.autograd.traced.traced_file import save
from zsim.ir.ledger_replay import replay
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES
from zsim.ir.program import PHASES, RankProgram
from zsim.ir.run import CollectiveRecord, PhaseRecord
from zsim.models.torch_versions import TorchVersion, version_of
from zsim.runs.backend import RunOptions
from zsim.runs.registry import find
from zsim.scenario.parts.assemble import DTYPES
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse

RECORD = MEASURED / "memory_matrix.json"
USER_MODULES = {name: (DEEP | SHARING)[name] for name in TRACED}
COMMUNICATED = ("communication", "unsharded_parameters", "unsharded_gradients")
OPTIONS = (
    'bf16", reduce = "fp32"', 'bf16", reduce = "bf16"', 'fp16", reduce = "fp32"',
    'fp16", reduce = "fp16"', 'fp32", reduce = "bf16"', 'autocast = "bf16"', 'autocast = "fp16"',
    'attention = "math"', "find_unused_parameters", "traced = ", "clip_norm", "forward_prefetch",
    "backward_prefetch", 'all_reduce = "last"', "offload", "gradient_as_bucket_view",
    "bucket_cap_mb", "lookahead = 2", "use_orig_params = true", 'sharding = "grad_op"',
    'backward_prefetch = "post"', 'backward_prefetch = "none"', "forward_prefetch = true",
    "limit_all_gathers = false",
    *(f"reshard_after_forward = {value}" for value in ('"auto"', "true", "false")), 'sync = "last"',
    'every = "all"', 'ends = "apart"', "nested = ", "wrapping = { every = 3", "frozen = ",
    "unused = ", "uses = 2", 'order = "stack"', "forwards = 2", "loss_dtype", "tied = true",
    'mode = "full", every = 2', "recompute = ", 'save = ["linear"]',
    'save = ["linear", "attention"]', "save_every", "momentum",
    *(
        f'name = "adamw"{how}'
        for how in (" }", ', implementation = "for-loop"', ', implementation = "fused"')
    ),
)
"""Pieces of a scenario's text, each of which some draws must have."""
Bytes = list[int]
"""Start, peak and end of a phase."""

RESIDUES: Mapping[str, Callable[[Scenario, str], Bytes]] = {}
"""Bytes that a phase's prediction lacks, by name, each with a rule that computes them. Nothing else
may differ."""




def test_the_digests_of_the_record_are_those_of_its_scenarios() -> None:
    rows = recorded()["rows"]
    assert [row["digest"] for row in rows] == [digest(row["text"]) for row in rows]


def test_the_record_is_of_what_hypothesis_draws() -> None:
    """Another version of hypothesis draws other scenarios, but as many, and no two alike."""
    record = recorded()
    drawn = [digest(text) for text in matrix()]
    assert len(set(drawn)) == len(drawn) == len(record["rows"])
    if record["provenance"]["hypothesis"] == version("hypothesis"):
        assert [row["digest"] for row in record["rows"]] == drawn


def test_the_matrix_has_each_strategy_at_each_world_size_and_peaks_in_collectives() -> None:
    rows = recorded()["rows"]
    kind = re.compile(r'ranks = (\d+) }\n(?:.*\n)*?strategy = { name = "(\w+)"')
    pairs = {match.groups() for row in rows if (match := kind.search(row["text"]))}
    assert (len(rows), len(pairs)) == (302 + 81 + 100 + 36 + 27, 7 * 7 + 6 + 1)
    assert sum(row["most"] in COMMUNICATED for row in rows) >= 50


def test_each_option_is_drawn_often_enough() -> None:
    texts = [row["text"] for row in recorded()["rows"]]
    assert {
        option: count for option in OPTIONS if (count := sum(option in text for text in texts)) < 8
    } == {}
    assert sum(bool(re.search(r"reshard_after_forward = \d", text)) for text in texts) >= 8


@pytest.mark.parametrize(
    "part", [0, 2, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 3, 4))]
)
def test_recorded_peaks_are_predicted_to_the_byte(part: int) -> None:
    """A fifth of the record each, where each strategy takes its turn."""
    record = recorded()
    rows, by = record["rows"][part::5], version_of(record["provenance"]["torch"])
    models = [model for row in rows if (model := scenario(row["text"]).model).family != FAMILY]
    assert min(len({module.path for module in model.blocks}) for model in models) >= 6
    assert {row["digest"]: complaints for row in rows if (complaints := wrong(row, by=by))} == {}


@pytest.mark.parametrize("index", range(5))
def test_a_draw_is_measured_as_it_is_predicted(index: int) -> None:
    texts = [
        text for text in matrix() if any(f"ranks = {ranks} }}" in text for ranks in (1, 2, 3, 4, 8))
    ]
    assert wrong(measured(texts[index * len(texts) // 5])) == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_matrix_is_measured_as_it_is_predicted() -> None:
    rows = []
    for number, text in enumerate(texts := matrix(), start=1):
        rows.append(measured(text))
        print(  # noqa: T201
            f"{number} of {len(texts)}: {rows[-1]['digest']} {wrong(rows[-1]) or 'exact'}",
            flush=True,
        )
    if os.environ.get("ZSIM_UPDATE_MEASURED"):
        write(rows)
    assert [row["digest"] for row in rows if wrong(row)] == []
    assert [(row["digest"], row["ranks"]) for row in rows] == [
        (row["digest"], row["ranks"]) for row in recorded()["rows"]
    ]


def scenario(text: str) -> Scenario:
    """A draw as a user's file would be read, beside the trace that it names."""
    for module, parameters in re.findall(r'traced = "(\w+)-(\w+).json"', text):
        return parse(text.encode(), where="matrix.toml", folder=traced_beside(module, parameters))
    return parse(text.encode(), where="matrix.toml")


@cache
def traced_beside(module: str, parameters: str) -> Path:
    """A folder with the trace of one of the users' modules, as torch runs it while a dispatch mode
    watches."""
    folder, user = Path(tempfile.mkdtemp()), USER_MODULES[module]
    name = f"{module}-{parameters}"
    model = trace(
        user.make, user.data(), units=user.all_units, dtype=DTYPES[parameters], sums_in_place=False,
        name=name,
    )
    save(model, folder / f"{name}.json")
    return folder


def digest(text: str) -> str:
    """Name of a draw."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def predicted(
    case: Scenario, *, ranks: tuple[int, ...], by: TorchVersion = TORCH
) -> list[dict[str, PhaseRecord]]:
    """The phases of `ranks` on the CPU, which is what is measured: what the simulator's Run has of
    them, without its times."""
    program = plan(case, device="cpu", torch=by)
    return [phases(program.of_rank(rank), program.mesh) for rank in ranks]


def phases(program: RankProgram, mesh: Mesh) -> dict[str, PhaseRecord]:
    """Collectives and memory of one rank in each phase."""
    memory = replay(program, timeline=False)
    return {
        name: PhaseRecord(
            collectives=tuple(
                CollectiveRecord(
                    op=op.kind, nbytes=op.nbytes, group=op.group, group_size=mesh.size(op.group)
                )
                for op in program.phase(name)
                if op.kind in COLLECTIVES
            ),
            memory=memory[name],
        )
        for name in PHASES
    }


def most(case: Scenario) -> str:
    """The kind of memory that has the most of rank 0's steady peak, as predicted: no meter sees
    kinds."""
    by_kind = predicted(case, ranks=(0,))[0]["steady"].memory.by_kind
    return max(by_kind, key=lambda kind: by_kind[kind])


def measured(text: str) -> dict[str, Any]:
    """A row of the record: the first and the last rank's phases."""
    case = scenario(text)
    if case.model.family == FAMILY:
        by, by_rank = (
            "observer",
            {rank: traced_phases(case, rank) for rank in sorted({0, case.world_size - 1})},
        )
    else:
        run = find("fake").run(case, options=RunOptions())
        by, by_rank = run.interpreter, {rank.rank: rank.phases for rank in run.ranks}
    ranks = [
        {"rank": rank, **{name: figures(phases[name]) for name in PHASES}}
        for rank, phases in by_rank.items()
    ]
    return {"digest": digest(text), "text": text, "measured_by": by, "ranks": ranks}


def traced_phases(case: Scenario, rank: int) -> Mapping[str, PhaseRecord]:
    """Phases of the real module of a traced one, on the fake process group under torch's own
    strategy."""
    with torch_private.fake_group(rank=rank, world_size=case.world_size):
        real = Subject(USER_MODULES[case.model.name.partition("-")[0]], case)
        first, _, steady = (real.step() for _ in range(3))
    return {"construction": real.construction, "first": first, "steady": steady}


def figures(phase: PhaseRecord) -> dict[str, Any]:
    """Start, peak and end, those of its parts (forward, backward, …), the collectives: how many,
    their bytes, the digest of their order."""
    orders = [[c.op, c.nbytes, c.group.partition(":")[0], c.group_size] for c in phase.collectives]
    parts = [
        [part.name, part.micro_batch, part.start_bytes, part.peak_bytes]
        for part in phase.memory.parts
    ]
    return {
        "parts": parts,
        "bytes": [phase.memory.start_bytes, phase.memory.peak_bytes, phase.memory.end_bytes],
        "collectives": [
            len(orders), sum(c.nbytes for c in phase.collectives), digest(json.dumps(orders))
        ],
    }


def wrong(row: dict[str, Any], *, by: TorchVersion = TORCH) -> list[str]:
    """Differences of the simulator's prediction from the row, less the residues."""
    case = scenario(row["text"])
    ranks = predicted(case, ranks=tuple(rank["rank"] for rank in row["ranks"]), by=by)
    complaints = []
    for simulated, real in zip(ranks, row["ranks"], strict=True):
        for name in PHASES:
            ours, theirs = figures(simulated[name]), real[name]
            lacking = [
                sum(parts)
                for parts in zip(
                    [0, 0, 0], *(rule(case, name) for rule in RESIDUES.values()), strict=True
                )
            ]
            if [ours_ + more for ours_, more in zip(ours["bytes"], lacking, strict=True)] != theirs[
                "bytes"
            ]:
                complaints.append(f"rank {real['rank']} {name}: {ours['bytes']} predicted, "
                                  f"{theirs['bytes']} measured")
            if ours["parts"] != theirs["parts"]:
                different = [
                    pair for pair in zip(ours["parts"], theirs["parts"], strict=False)
                    if pair[0] != pair[1]
                ]
                complaints.append(f"rank {real['rank']} {name}: parts {different[:3]} predicted "
                                  f"and measured")
            if ours["collectives"] != theirs["collectives"]:
                complaints.append(
                    f"rank {real['rank']} {name}: collectives {ours['collectives']}, "
                    f"{theirs['collectives']}"
                )
    return complaints


def recorded() -> dict[str, Any]:
    """The committed record."""
    table: dict[str, Any] = json.loads(RECORD.read_text())
    return table


def write(rows: list[dict[str, Any]]) -> None:
    """The record with its provenance and, by draw, what was predicted otherwise; one row per line.
    """
    provenance = {name: version(name) for name in ("torch", "hypothesis")} | {
        "python": platform.python_version()
    }
    provenance |= {"draws": str(len(rows)), "inexact": str(sum(bool(wrong(row)) for row in rows))}
    lines = ",\n".join(
        json.dumps(row | {"most": most(scenario(row["text"])), "differences": wrong(row)})
        for row in rows
    )
    RECORD.write_text(f'{{"provenance": {json.dumps(provenance)},\n"rows": [\n{lines}\n]}}\n')
