"""What one rank runs: a scenario, observed or executed, with its parity to the single-process
reference.

Also the entry point under a cluster's own launcher: `torchrun … -m zreal.worker SCENARIO --save
measured.json`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from zreal import torch_private
from zreal.executor.executor import RANKS, execute
from zreal.meters import step_time
from zreal.modules import reference as numerics
from zreal.modules.optimizers import largest_difference
from zreal.observer.observer import observe
from zreal.observer.subjects import Subject
from zreal.observer.subjects.table import SUBJECTS
from zreal.processes.rank_status import REFERENCE
from zsim.errors import BackendUnavailableError, ZsimError
from zsim.io import files
from zsim.ir.run import Numerics, RankRun, Run
from zsim.models.training_options import Device
from zsim.runs import saved
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario, load, parse

RENDEZVOUS_S = 60.0
SAMPLES = 3
"""Last steps of which the lowest peak is the steady one where other threads, as gloo's, may hold a
buffer a moment too long."""

Keep = Callable[[dict[str, Any]], None]


class InterpreterError(ZsimError):
    """An interpreter that cannot run the scenario's strategy."""


class LauncherError(ZsimError):
    """A cluster's launcher that is not there, or that started another world than the scenario's."""


def interpreter_of(scenario: Scenario, asked: str | None) -> str:
    """"observer" where torch has the strategy itself, else "executor"; InterpreterError when the
    one asked for has not."""
    can = [
        name
        for name, table in (("observer", SUBJECTS), ("executor", RANKS))
        if scenario.strategy in table
    ]
    if not can:
        raise BackendUnavailableError(
            where=f"strategy {scenario.strategy}",
            expected="an interpreter that runs it for real",
            found="none",
            remedy="add a line to RANKS in zreal/executor/executor.py or to SUBJECTS in "
                   "zreal/observer/subjects/table.py, or use --backend sim",
        )
    if asked is None:
        return can[0]
    if asked not in can:
        raise InterpreterError(
            where="--interpreter", expected=f"{' or '.join(can)} for {scenario.strategy}",
            found=asked,
        )
    return asked


def run_rank(
    scenario: Scenario,
    *,
    rank: int,
    interpreter: str,
    device: Device,
    parity: bool,
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[RankRun], None] = lambda _: None,
) -> RankRun:
    """Run `scenario` on this rank of an existing process group; with `parity`, compare parameters
    with the reference and time steps."""
    samples = SAMPLES if parity else 1
    steps = max(3, scenario.steps, 2 + samples)
    if interpreter == "observer":
        seen = observe(
            scenario,
            rank=rank,
            steps=steps,
            samples=samples,
            device=device,
            progress=progress,
            keep=keep,
            gradients=parity,
        )
        run, losses, plain_step = seen.run, seen.losses, seen.plain_step
        assert seen.subject is not None
        assert plain_step is not None
        parameters, gradients = _parameters_and_gradients(seen.subject) if parity else ({}, {})
        initial, step_difference = dict[str, Tensor](), None
    else:
        program = plan(scenario, device=device)
        done = execute(
            scenario,
            program,
            rank=rank,
            steps=steps,
            samples=samples,
            device=device,
            progress=progress,
            keep=keep,
            gradients=parity,
        )
        run, losses, parameters, gradients = done.run, done.losses, done.parameters, done.gradients
        plain_step = done.plain_step
        initial, step_difference = done.initial, done.step_difference
    if not parity:
        return run
    numbers = _numerics(
        scenario, steps, losses, parameters, gradients, initial, step_difference, progress=progress
    )
    del parameters, gradients, initial
    # At the end, since parameters move on: what they were compared with is what the watched steps
    # made of them.
    return replace(
        run, numerics=numbers, step_time_ns=step_time.step_time_ns(plain_step, device=device)
    )


def _numerics(
    scenario: Scenario,
    steps: int,
    losses: list[float],
    parameters: dict[str, Tensor],
    gradients: dict[str, Tensor],
    initial: dict[str, Tensor],
    step_difference: float | None,
    *,
    progress: Callable[[str], None],
) -> Numerics:
    """How far `steps` steps took this rank's world from where they take a single process."""
    progress(REFERENCE)
    reference = numerics.reference(
        scenario, steps=steps, stepped_in=next(iter(parameters.values())).dtype
    )
    difference, furthest = numerics.largest(numerics.relative_differences(parameters, reference))
    expected = numerics.gradients_at(scenario, parameters, step=steps)
    gradient, of = numerics.largest(numerics.gradient_differences(gradients, expected))
    return Numerics(
        losses=tuple(losses),
        largest_relative_difference=difference,
        largest_gradient_difference=gradient,
        furthest_parameter=furthest,
        furthest_gradient=of,
        steps=steps,
        dtype=scenario.precision.narrowest,
        reference_losses=reference.losses,
        initial_difference=_initial_difference(initial, reference),
        step_difference=step_difference,
    )


def _initial_difference(found: dict[str, Tensor], reference: numerics.Reference) -> float | None:
    """How far what is stepped began from the model that the reference began with; None where nobody
    kept it."""
    if not found:
        return None
    began = {
        name: found[name].reshape(want.shape)
        for name, want in reference.initial.items()
        if name in found
    }
    return largest_difference(began, reference.initial)


def _parameters_and_gradients(subject: Subject) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Every parameter and every gradient whole, on every rank."""
    if subject.whole is not None:
        return subject.whole("parameters"), subject.whole("gradients")
    gradients = {
        name: p.grad for name, p in subject.module.named_parameters() if p.grad is not None
    }
    return _whole(_stepped(subject)), _whole(gradients)


def _stepped(subject: Subject) -> dict[str, Tensor]:
    """What the optimizer steps, by the names of the module's parameters; after it those that it
    does not step."""
    named = dict(subject.module.named_parameters())
    stepped = {name: p for name, p in named.items() if p.requires_grad}
    masters = dict(zip(stepped, subject.masters, strict=True)) if subject.masters else stepped
    return {**masters, **{name: p for name, p in named.items() if name not in stepped}}


def _whole(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every parameter whole, on every rank, under the model's own fqns."""
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p)
        .detach()
        .cpu()
        for name, p in parameters.items()
    }


def _c10d_backend(scenario: Scenario, device: Device) -> str:
    """What the process group is made of: norms of offloaded gradients are all-reduced in host
    memory, which NCCL cannot."""
    if device == "cpu":
        return "gloo"
    clips_on_host = getattr(scenario.options, "offload", False) and scenario.optimizer.clip_norm
    return "cpu:gloo,cuda:nccl" if clips_on_host else "nccl"


def gloo_rank(
    arguments: dict[str, Any], *, rank: int, world_size: int, port: int,
    progress: Callable[[str], None], keep: Keep,
) -> dict[str, Any]:
    """One rank of a gloo or NCCL run that zreal.processes.launch started. Returns its RankRun as a
    table, and keeps it by phase."""
    torch.set_num_threads(1)
    device: Device = arguments["device"]
    scenario = parse(
        arguments["text"].encode(), where=arguments["where"], folder=Path(arguments["folder"])
    )
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        _c10d_backend(scenario, device),
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=arguments["timeout_s"] + RENDEZVOUS_S),
    )
    run = run_rank(
        scenario,
        rank=rank,
        interpreter=arguments["interpreter"],
        device=device,
        parity=True,
        progress=progress,
        keep=lambda so_far: keep(saved.as_table(so_far)),
    )
    dist.barrier()
    dist.destroy_process_group()
    table: dict[str, Any] = saved.as_table(run)
    return table


def fake_rank(scenario: Scenario, *, rank: int, interpreter: str) -> RankRun:
    """One rank of any world in this process: real memory and real compute, collectives that move
    nothing."""
    with torch_private.fake_group(rank=rank, world_size=scenario.world_size):
        return run_rank(scenario, rank=rank, interpreter=interpreter, device="cpu", parity=False)


def provenance(scenario: Scenario, *, device: str) -> dict[str, str]:
    """What a reader needs to repeat the run."""
    return {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seed": str(scenario.seed),
        "steps": str(scenario.steps),
        "strategy": scenario.strategy,
        "fingerprint": scenario.fingerprint,
        "computes_in": scenario.precision.narrowest,
    }


def timed(ranks: tuple[RankRun, ...]) -> tuple[int | None, dict[str, str]]:
    """The step time of a Run, which is its slowest rank's, and what its provenance says of it; None
    where a rank has not come so far."""
    times = [rank.step_time_ns for rank in ranks]
    known = [found for found in times if found is not None]
    return (
        (max(known), {"timed": step_time.WORDS})
        if known and len(known) == len(times)
        else (None, {})
    )


def main(arguments: list[str] | None = None) -> int:
    """Run under torchrun: every rank runs the scenario, rank 0 writes the Run."""
    parser = argparse.ArgumentParser(prog="zreal.worker", description=main.__doc__)
    parser.add_argument("scenario")
    parser.add_argument("--save", required=True, type=Path)
    parser.add_argument("--interpreter", choices=("observer", "executor"))
    options = parser.parse_args(arguments)
    scenario = load(options.scenario)
    interpreter = interpreter_of(scenario, options.interpreter)
    rank = _rank_under_torchrun(scenario)
    files.require(options.save, kind="a Run")
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(_c10d_backend(scenario, device))
    mine = run_rank(scenario, rank=rank, interpreter=interpreter, device=device, parity=True)
    gathered: list[Any] = [None] * scenario.world_size
    dist.all_gather_object(gathered, saved.as_table(mine))
    if rank == 0:
        ranks = tuple(saved.from_table(RankRun, table) for table in gathered)
        step_time_ns, how_timed = timed(ranks)
        run = Run(
            scenario=scenario.name, backend="nccl" if device == "cuda" else "gloo",
            interpreter=interpreter, world_size=scenario.world_size, mesh=scenario.mesh,
            ranks=ranks, step_time_ns=step_time_ns,
            provenance=provenance(scenario, device=device)
            | how_timed
            | {"sees": "memory numerics"},
        )
        saved.save(run, options.save)
    dist.destroy_process_group()
    return 0


def _rank_under_torchrun(scenario: Scenario) -> int:
    """This process's rank; LauncherError when there is no launcher or it started another number of
    ranks."""
    started = os.environ.get("WORLD_SIZE")
    numbers = ("WORLD_SIZE", "RANK", "MASTER_PORT")
    known = (
        all(os.environ.get(name, "").isdecimal() for name in numbers)
        and "MASTER_ADDR" in os.environ
    )
    if started is None or not known or not 0 < int(os.environ["MASTER_PORT"]) < 2**16:
        remedy = (
            f"torchrun --nproc-per-node {scenario.world_size} -m zreal.worker SCENARIO --save "
            f"RUN.json"
        )
        expected = "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from a launcher"
        raise LauncherError(where="zreal.worker", expected=expected, found="none", remedy=remedy)
    if int(started) != scenario.world_size:
        expected = f"{scenario.world_size} ranks, as the scenario's mesh has"
        raise LauncherError(
            where=scenario.name, expected=expected, found=started,
            remedy="start as many, or change the mesh",
        )
    rank = int(os.environ["RANK"])
    if rank >= scenario.world_size:
        raise LauncherError(
            where="zreal.worker", expected=f"a RANK below {scenario.world_size}", found=str(rank)
        )
    return rank


if __name__ == "__main__":
    try:
        code = main()
    except ZsimError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Python's own way out ends with SIGABRT where a thread of gloo still runs
