"""Small Programs and what can be read off them, for tests that hold Programs against formulas."""

from __future__ import annotations

from dataclasses import replace

from zsim.autograd.lowering.lower_model import lower
from zsim.cluster.collectives import ring
from zsim.ir.ledger import Ledger
from zsim.ir.mesh import Mesh
from zsim.ir.ops import COLLECTIVES, Alloc, Free, Op
from zsim.ir.program import Program
from zsim.models.checkpointing import NO_CHECKPOINTING, Checkpointing
from zsim.models.families.gpt import GptSizes, build
from zsim.models.spec import ModelSpec, ParamGroup
from zsim.models.training_options import Batch, Precision
from zsim.strategies import ddp
from zsim.strategies.building.training import Training


def small_model() -> ModelSpec:
    """Three transformer blocks."""
    sizes = GptSizes(num_layers=3, hidden_size=64, num_heads=4, vocabulary=256)
    return build(sizes, name="small", sequence_length=64)


def one_unit(model: ModelSpec) -> ModelSpec:
    """`model` with all its parameters in the root's param group."""
    modules = tuple(replace(module, unit="root") for module in model.modules)
    return replace(
        model, modules=modules, units=(ParamGroup(fqn="root", parameters=model.parameters),)
    )


def small_training(
    model: ModelSpec | None = None, *, checkpointing: Checkpointing = NO_CHECKPOINTING,
    accumulation: int = 1,
) -> Training:
    """The small model, or `model`, in bf16, reduced in bf16; every dim 0 divides by 8, so that
    nothing is padded."""
    model = model or small_model()
    batch = Batch(micro_batch=1, sequence_length=64, accumulation=accumulation)
    assert all(parameter.shape[0] % 8 == 0 for parameter in model.parameters)
    return Training(
        model=model,
        modules=lower(model, batch=batch, dtype="bfloat16", checkpointing=checkpointing),
        batch=batch, precision=Precision(parameters="bfloat16", reduce="bfloat16"),
    )


def steady(program: Program) -> tuple[Op, ...]:
    """The steady step of rank 0."""
    return program.of_rank(0).steady


def sent(program: Program, axis: str = "dp_shard") -> int:
    """Bytes that rank 0 sends over rings of `axis` in the steady step."""
    size = program.mesh.size(axis)
    return sum(
        ring.bytes_sent(op.kind, op.nbytes, group_size=size) for op in steady(program)
        if op.kind in COLLECTIVES and op.group == axis
    )


def parameter_bytes(training: Training) -> int:
    """fΨ with f = 2."""
    return 2 * training.model.num_parameters


def peak_unsharded_bytes(program: Program) -> int:
    """The most bytes of unsharded parameters alive in the steady step."""
    live: dict[str, int] = {}
    peak = 0
    for event in (event for op in steady(program) for event in op.memory):
        if isinstance(event, Alloc) and event.kind == "unsharded_parameters":
            live[event.buffer] = event.nbytes
        elif isinstance(event, Free):
            live.pop(event.buffer, None)
        peak = max(peak, sum(live.values()))
    return peak


def ddp_bytes(training: Training, n: int) -> int:
    """Bytes that rank 0 sends in the steady step of the DDP Program on `n` ranks."""
    program = ddp.plan(training, mesh=Mesh(dp_replicate=n), options=ddp.Options())
    return sent(program, "dp_replicate")


def model_state_bytes_before_the_optimizer(program: Program) -> int:
    """Bytes of parameters, gradients and optimizer states of rank 0 when the steady step's
    optimizer begins."""
    rank = program.of_rank(0)
    until = next(op.index for op in rank.steady if op.kind == "optimizer")
    ledger = Ledger()
    for op in (*rank.construction, *rank.first, *rank.steady[:until]):
        ledger.apply(op)
    return sum(ledger.by_kind[kind] for kind in ("parameters", "gradients", "optimizer_states"))
