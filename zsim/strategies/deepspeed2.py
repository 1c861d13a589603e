"""DeepSpeed's ZeRO-2: gradients are averaged bucket by bucket during backward, and each rank keeps
those that reach into its part of one flat buffer.

Every rank holds a buffer of `reduce_bucket_size` elements during backward, whatever the model's
size. A gradient is copied into it when it is ready. Before one that would overflow it the bucket is
all-reduced: DeepSpeed reduces to the owners of slices by one all-reduce. Gradients of later
micro-batches are added to those kept. The step takes a norm, steps the part in float32, and
all-gathers the flat buffer at once. Source: deepspeed/runtime/zero/stage_1_and_2.py of DeepSpeed
0.19; Rajbhandari et al., arXiv 1910.02054, §5.2.
"""

from __future__ import annotations

from zsim.ir.mesh import Mesh
from zsim.ir.program import Program
from zsim.models.spec import ModelSpec
from zsim.strategies.building.training import Training
from zsim.strategies.deepspeed_engine import config_keys
from zsim.strategies.deepspeed_engine import options as engine_options
from zsim.strategies.deepspeed_engine.offload.partitioned import pinned
from zsim.strategies.deepspeed_engine.options import ReplicaOptions
from zsim.strategies.deepspeed_engine.partition import FlatPartition
from zsim.strategies.deepspeed_engine.ranks import num_distinct_ranks, of_ranks, step_of
from zsim.strategies.deepspeed_engine.step import PartitionedStep
from zsim.strategies.strategy import Formula, Strategy

Options = ReplicaOptions


def plan(training: Training, *, mesh: Mesh, options: Options) -> Program:
    """The Programs of one step; ranks whose parts cut parameters alike share one."""
    flat = FlatPartition.of(training, mesh=mesh, options=options)
    step = step_of(flat, in_hooks=True, drops_others=True)
    forward_backward(step)
    return of_ranks(step, mesh=mesh)


def forward_backward(step: PartitionedStep) -> None:
    """Every micro-batch; a full bucket is averaged within backward, the last one at its end."""
    training = step.flat.training
    for step.micro_batch in range(training.batch.accumulation):
        step.step.begin("forward", micro_batch=step.micro_batch)
        for module in training.modules:
            step.forward(module)
        step.step.begin("backward", micro_batch=step.micro_batch)
        for module in training.backward_modules:
            step.backward(module, reduces=True)
        step.end_backward(reduces=True)


def num_groups(options: Options, model: ModelSpec) -> int:
    """Buckets at most, a parameter in each."""
    return len(model.parameters)


STRATEGY = Strategy(
    plan=plan, options=Options, axes=("dp_shard",), formula=Formula("zero2"),
    library="deepspeed", configs=("deepspeed",), wraps_optimizer=True,
    problems=engine_options.problems, model_problems=engine_options.model_problems,
    precision_problems=engine_options.precision_problems,
    steps_two_bytes=False, masters_of_cast=True, hooks=engine_options.HOOKS,
    syncs=("every",), sums_losses=False,
    elsewhere=config_keys.OF_REPLICAS, num_distinct_ranks=num_distinct_ranks,
    num_groups=num_groups, saves="engine", reorders=lambda options: options.round_robin_gradients,
    offloadable=("optimizer",), pinned=pinned,
)
