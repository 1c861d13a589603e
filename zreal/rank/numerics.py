"""Numerics of one rank: its training against the same steps of a single process, which every rank
repeats, or rank 0 alone for all."""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zreal.meters.measured_step import TrainedRank
from zreal.modules.numerics import reference
from zreal.modules.numerics.parity import gradient_differences, largest, relative_differences
from zreal.modules.optimizers import largest_difference
from zreal.modules.own.own_module import OwnModel
from zreal.processes.reference_cost import available_cores, num_steps, reference_cost
from zsim.ir.program import RankProgram
from zsim.ir.run import Numerics
from zsim.models.training_options import Device
from zsim.runs import saved
from zsim.runs.modes import NumericsMode
from zsim.scenario.plan import plan
from zsim.scenario.scenario import Scenario
from zsim.strategies.replicated.construction import BUFFERS

SHARE_OF_DEVICE = 0.8
"""Most of a GPU's free memory that the reference may take by the estimate; else it is on the CPU.
"""


def rank_numerics(
    scenario: Scenario, trained: TrainedRank, *, rank: int, mode: NumericsMode, device: Device
) -> Numerics | None:
    """The numerics of this rank; None without a reference, or where ranks draw random numbers of
    their own. Ranks wait for rank 0 where it alone trains the reference."""
    own = scenario.model if isinstance(scenario.model, OwnModel) else None
    if mode == "none" or (own is not None and own.draws):
        return None
    buffers: list[list[Tensor]] = []
    if own is not None:  # forward of other models changes none
        buffers = [[] for _ in range(scenario.world_size)]
        dist.all_gather_object(buffers, trained.buffers)
    compared = partial(_against_reference, scenario, trained, buffers, device=device)
    if mode == "full" or scenario.world_size == 1:
        return compared()
    return _against_rank_0(trained, compared, rank=rank)


def _against_reference(
    scenario: Scenario, trained: TrainedRank, buffers: list[list[Tensor]], *, device: Device
) -> Numerics:
    """Differences between the steps of this world and the same steps of a single process; `buffers`
    are those of all ranks before the step that makes gradients."""
    steps, on = num_steps(scenario), _device_of_reference(scenario, device)
    stepped_in = next(iter(trained.parameters.values())).dtype
    process = reference.SingleProcess(
        scenario, stepped_in=stepped_in, device=on,
        synchronised=broadcasts_of_buffers(plan(scenario, device=device).of_rank(0)),
    )
    expected = process.train(steps)
    difference, parameter = largest(relative_differences(trained.parameters, expected))
    gradients = process.gradients_at(trained.parameters, buffers=buffers)
    gradient_difference, gradient = largest(gradient_differences(trained.gradients, gradients))
    return Numerics(
        losses=tuple(trained.losses),
        largest_relative_difference=difference,
        largest_gradient_difference=gradient_difference,
        furthest_parameter=parameter,
        furthest_gradient=gradient,
        steps=steps,
        dtype=scenario.precision.narrowest,
        reference_losses=expected.losses,
        initial_difference=_initial_difference(trained.initial, expected),
        step_difference=trained.step_difference,
    )


def broadcasts_of_buffers(program: RankProgram) -> frozenset[int]:
    """Micro-batches before whose forward rank 0's buffers are broadcast, as by DDP."""
    return frozenset(
        op.micro_batch for op in program.steady if op.kind == "broadcast" and op.unit == BUFFERS
    )


def _against_rank_0(
    trained: TrainedRank, against_reference: Callable[[], Numerics], *, rank: int
) -> Numerics:
    """Rank 0's differences to the reference, and infinite ones where this rank's bits are not those
    of rank 0."""
    digests = (digest(trained.parameters), digest(trained.gradients))
    answer: list[Any] = [None]
    if rank == 0:
        with _all_cores():
            numbers = against_reference()
        answer = [(saved.as_table(numbers), digests)]
    dist.broadcast_object_list(answer, src=0)
    table, expected = answer[0]
    numbers = saved.from_table(Numerics, table)
    same_parameters, same_gradients = (
        own == wanted for own, wanted in zip(digests, expected, strict=True)
    )
    if not same_parameters:
        numbers = replace(
            numbers,
            largest_relative_difference=math.inf,
            furthest_parameter="some parameter, by its bits,",
        )
    if not same_gradients:
        numbers = replace(
            numbers,
            largest_gradient_difference=math.inf,
            furthest_gradient="some parameter, by its bits,",
        )
    return replace(numbers, losses=tuple(trained.losses), step_difference=trained.step_difference)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names and bits of all tensors."""
    summed = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous()
        summed.update(f"{name} {tensor.dtype} {flat.numel()};".encode())
        # numpy is an extra, and torch has no other view of bytes
        bits = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
        summed.update(bits)
    return summed.hexdigest()


@contextmanager
def _all_cores() -> Iterator[None]:
    """Inside, torch computes on every core, since all other ranks wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(available_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device_of_reference(scenario: Scenario, device: Device) -> Device:
    """This rank's GPU where it has room for the reference, else the CPU."""
    if device == "cpu":
        return "cpu"
    free, _ = torch.cuda.mem_get_info()
    nbytes = reference_cost(scenario, device=device).nbytes
    return "cuda" if nbytes <= SHARE_OF_DEVICE * free else "cpu"


def _initial_difference(
    initial: Mapping[str, Tensor], expected: reference.Reference
) -> float | None:
    """Largest difference between the stepped parameters and the reference's before the first step;
    None where the interpreter has none."""
    if not initial:
        return None
    reshaped = {
        name: initial[name].reshape(tensor.shape)
        for name, tensor in expected.initial.items()
        if name in initial
    }
    return largest_difference(reshaped, expected.initial)
