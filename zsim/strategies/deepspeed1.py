"""DeepSpeed's ZeRO-1: whole gradients stay until the end of accumulation, and each rank steps its
part of one flat buffer.

Gradients of the last micro-batch are averaged bucket by bucket, as in deepspeed2.py. This happens
after backward in the order of the model, or with `overlap_comm` as they come. The buffer for
buckets is there from the first gradient of all on. Source: deepspeed/runtime/zero/stage_1_and_2.py
of DeepSpeed 0.19; Rajbhandari et al., arXiv 1910.02054, §5.1.
"""

from __future__ import annotations

from dataclasses import replace

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.strategies import deepspeed2
from zsim.strategies.building.training import Training
from zsim.strategies.deepspeed2 import Options
from zsim.strategies.deepspeed_engine.partition import FlatPartition
from zsim.strategies.deepspeed_engine.ranks import of_ranks, step_of
from zsim.strategies.deepspeed_engine.step import PartitionedStep
from zsim.strategies.strategy import Formula

__all__ = ["STRATEGY", "Options", "plan"]


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Programs of one step; ranks whose parts cut parameters alike share one."""
    flat = FlatPartition.of(training, mesh=mesh, options=options)
    step = step_of(flat, in_hooks=options.overlap_comm, drops_others=False)
    forward_backward(step)
    return of_ranks(step, mesh=mesh)


def forward_backward(step: PartitionedStep) -> None:
    """Every micro-batch; only the last one's gradients, which are sums, are averaged."""
    training = step.flat.training
    for step.micro_batch in range(training.batch.accumulation):
        step.step.begin("forward", micro_batch=step.micro_batch)
        for module in training.modules:
            step.forward(module)
        step.step.begin("backward", micro_batch=step.micro_batch)
        for module in training.backward_modules:
            step.backward(module, reduces=step.is_last and step.in_hooks)
        step.end_backward(reduces=step.is_last)


STRATEGY = replace(
    deepspeed2.STRATEGY, plan=plan, formula=Formula("zero1"), syncs=("last",),
    shards_more="deepspeed2",
)
