"""The run of one rank: a scenario observed or executed, its numerics, and its step time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zreal import torch_private
from zreal.executor.executor import RANKS, execute
from zreal.meters.cache import cache_record
from zreal.meters.measured_step import TrainedRank
from zreal.meters.recording import record
from zreal.meters.step_time import METHOD, timed
from zreal.modules import emulation
from zreal.modules.own.own_module import OwnModel
from zreal.observer.observer import observe
from zreal.observer.subjects import deepspeed_engine
from zreal.observer.subjects.table import SUBJECTS
from zreal.processes.rank_device import HOST_ID, start_group, take_device, tell_hosts_apart
from zreal.processes.rank_settings import settle
from zreal.processes.rank_status import BUILDING, NO_COLLECTIVE, REFERENCE
from zreal.processes.reference_cost import SAMPLES, num_steps
from zreal.processes.rendezvous import rendezvous
from zreal.rank.faults import RankFaults
from zreal.rank.numerics import rank_numerics
from zreal.tracing.own_scenario import with_module
from zreal.zero.measured_zero import train_own
from zsim.errors import ArgumentError, BackendUnavailableError, listed
from zsim.io.units import format_bytes
from zsim.ir.run import RankRun
from zsim.models.torch_versions import IDLE_UNTIL_ALL_RAN, NEWEST, version_of
from zsim.models.training_options import Device
from zsim.runs import saved
from zsim.runs.modes import NumericsMode
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, parse
from zsim.strategies import STRATEGIES

RENDEZVOUS_S = 60.0
"""Seconds that ranks may take to meet, beyond the run's own timeout."""

Keep = Callable[[dict[str, Any]], None]


def interpreter_of(scenario: Scenario, choice: str | None) -> str:
    """The user's choice, or "observer" where torch has the strategy itself, else "executor".

    ArgumentError where the chosen one cannot run the strategy, BackendUnavailableError where
    none can with this torch.
    """
    _require_version(scenario)
    deepspeed_engine.require(scenario)
    _require_nothing_kept(scenario)
    if scenario.optimizer.name == "adamw8bit":
        raise ArgumentError(
            where="optimizer.name", expected="adamw or sgd in a real run", found="adamw8bit",
            remedy="use the backend sim: a compiled step is simulated only",
        )
    able = [
        name
        for name, table in (("observer", SUBJECTS), ("executor", RANKS))
        if scenario.strategy in table
    ]
    if not able:
        raise BackendUnavailableError(
            where=f"strategy {scenario.strategy}",
            expected="an interpreter that runs it for real",
            found="none",
            remedy="add a line to RANKS in zreal/executor/executor.py or to SUBJECTS in "
                   "zreal/observer/subjects/table.py, or use the backend sim",
        )
    if choice is None:
        return able[0]
    if choice not in able:
        raise ArgumentError(
            where="interpreter", expected=f"{listed(able)} for {scenario.strategy}",
            found=choice,
        )
    return choice


def _require_nothing_kept(scenario: Scenario) -> None:
    """ArgumentError for an own module whose first forward leaves tensors in it: every step holds
    them, and no strategy counts them."""
    model = scenario.model
    if not isinstance(model, OwnModel):
        return
    kept = model.buffer_nbytes - sum(nbytes for _, nbytes in model.buffers)
    if kept > 0:
        raise ArgumentError(
            where=f"module {model.own.name}",
            expected="a forward that keeps no tensor in the module, as memory is measured without "
                     "buffers",
            found=f"{format_bytes(kept)} that the first one keeps",
            remedy="make what it keeps in __init__, by register_buffer(…, persistent=False)",
        )


def _require_version(scenario: Scenario) -> None:
    """BackendUnavailableError where this torch leaves a group open of which some modules run."""
    installed, partly = version_of(torch.__version__), IDLE_UNTIL_ALL_RAN
    if (
        installed in partly.versions
        and STRATEGIES[scenario.strategy].library == partly.library
        and scenario.model.waits_for_idle
    ):
        raise BackendUnavailableError(
            where=f"strategy {scenario.strategy}",
            expected=f"torch {NEWEST}, or units of which all modules run",
            found=f"torch {torch.__version__}: {partly.meaning}",
            remedy="upgrade torch, or leave each unused block a unit of its own",
        )


@deepspeed_engine.files_removed()
def run_rank(
    scenario: Scenario, *, rank: int, interpreter: str, device: Device,
    numerics: NumericsMode | None,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[RankRun], None] = lambda _: None,
    emulated: Mapping[str, list[int]] | None = None,
) -> RankRun:
    """Run `scenario` on this rank of an existing process group.

    `numerics`: the ranks that train a single-process reference to compare with; None on a fake
    group, whose steps are not timed either. Timers take the place of compute in timed steps, where
    `emulated` has nanoseconds by module.
    """
    is_fake = numerics is None
    samples = 1 if is_fake else SAMPLES
    steps = max(3, scenario.steps) if is_fake else num_steps(scenario)
    interpret: Callable[..., TrainedRank] = observe
    if interpreter == "executor":
        is_own = isinstance(scenario.model, OwnModel)
        executed = partial(execute, program=plan(scenario, device=device))
        interpret = train_own if is_own else executed
    faults = RankFaults(scenario, rank=rank, device=device)
    with faults.active():
        trained = interpret(
            scenario, rank=rank, steps=steps, samples=samples, device=device,
            progress=faults.announced(progress), keep=keep,
            parity=numerics in ("full", "sampled"),
        )
    if numerics is None:
        return replace(trained.run, cache=cache_record(trained.plain_step, device=device))
    if numerics != "none":
        progress(REFERENCE)
    compared = rank_numerics(scenario, trained, rank=rank, mode=numerics, device=device)
    # Timed last, as it moves parameters on. The tensors for parity are no longer needed.
    plain_step, run = faults.slowed(trained.plain_step), trained.run
    recorder, model, units = trained.recorder, trained.model, trained.units
    emulation.start(trained.module, emulated or {})
    del trained
    cache = cache_record(plain_step, device=device)
    step = timed(plain_step, device=device)
    recording = record(
        plain_step, device=device, root=model, units=units, describe=recorder.described,
        planned=plan(scenario, device=device).of_rank(rank).steady, number=len(step.times_ns),
    )
    return replace(
        run, numerics=compared, cache=cache, step_time_ns=step.ns, bytes_sent=step.bytes_sent,
        step_times_ns=step.times_ns, others_share=step.others_share, spans=recording.spans,
        recorded_step_ns=recording.step_ns, recorded_at_ns=recording.at_ns,
        recorded_times_ns=recording.times_ns,
    )


def c10d_backend(scenario: Scenario, device: Device) -> str:
    """The backend of the process group on `device`.

    Norms of offloaded gradients are all-reduced in host memory, which NCCL cannot do.
    """
    if device == "cpu":
        return "gloo"
    offloads = STRATEGIES[scenario.strategy].offloads(scenario.options)
    clips_on_host = offloads and scenario.optimizer.clip_norm
    return "cpu:gloo,cuda:nccl" if clips_on_host else "nccl"


def launched_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Keep,
) -> dict[str, Any]:
    """Run one rank of a gloo or nccl run that zreal.processes.launch started.

    Returns its RankRun as a table, and hands the table so far to `keep` after each phase.
    """
    settle()
    device: Device = arguments["device"]
    if device == "cuda":
        tell_hosts_apart(rank)
    own = take_device(device, local_rank=rank)
    scenario = parse(
        arguments["text"].encode(), where=arguments["where"], folder=Path(arguments["folder"])
    )
    if arguments.get("module"):
        progress(f"{BUILDING} {arguments['module']}")
        scenario = with_module(
            scenario, arguments["module"], device=device, like=arguments["fingerprint"]
        )
        progress(NO_COLLECTIVE)
    store = rendezvous(rank=rank, world_size=world_size, port=port)
    start_group(
        c10d_backend(scenario, device), store=store, rank=rank, world_size=world_size,
        device=own, timeout=timedelta(seconds=arguments["timeout_s"] + RENDEZVOUS_S),
    )
    run = run_rank(
        scenario, rank=rank, interpreter=arguments["interpreter"], device=device,
        numerics=arguments["numerics"], progress=progress,
        keep=lambda so_far: keep(saved.as_table(so_far)),
        emulated=arguments.get("emulated"),
    )
    dist.barrier()
    dist.destroy_process_group()
    table: dict[str, Any] = saved.as_table(run)
    return table


def fake_rank(
    scenario: Scenario, *, rank: int, interpreter: str, device: Device = "cpu",
    progress: Callable[[str], None] = lambda _: None,
) -> RankRun:
    """Run one rank of any world in this process: real memory and compute, collectives that move
    nothing."""
    with torch_private.fake_group(rank=rank, world_size=scenario.world_size):
        return run_rank(
            scenario, rank=rank, interpreter=interpreter, device=device, numerics=None,
            progress=progress,
        )


def provenance(scenario: Scenario, *, device: str) -> dict[str, str]:
    """Versions, device, seed and scenario with which a reader can repeat the run."""
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seed": str(scenario.seed),
        "steps": str(scenario.steps),
        "strategy": scenario.strategy,
        "fingerprint": scenario.fingerprint,
        "computes_in": scenario.precision.narrowest,
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity")
                     else os.cpu_count()),
    } | _module_provenance(scenario) | (
        {"nccl_hostid": os.environ[HOST_ID]} if device == "cuda" and HOST_ID in os.environ else {}
    )


def _module_provenance(scenario: Scenario) -> dict[str, str]:
    """The function that made the user's own module, if it is one. Also the reason for building it
    whole, and that it draws random numbers, as dropout does."""
    if not isinstance(scenario.model, OwnModel):
        return {}
    name, whole = scenario.model.own.name, scenario.model.own.whole
    texts = {"module": name, "built_whole": whole, "draws": name if scenario.model.draws else ""}
    return {key: text for key, text in texts.items() if text}


def slowest_step_time(ranks: tuple[RankRun, ...]) -> tuple[int | None, dict[str, str]]:
    """Step time of a Run in ns, which is its slowest rank's, and its provenance; None where a rank
    has no step time."""
    times = [rank.step_time_ns for rank in ranks if rank.step_time_ns is not None]
    is_known = bool(times) and len(times) == len(ranks)
    return (max(times), {"timed": METHOD}) if is_known else (None, {})
