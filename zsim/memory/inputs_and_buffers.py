"""Inputs and buffers: device memory of the user's trainer, for a micro-batch's tensors, the
module's buffers and what adds up gradients.

No strategy makes, shards or frees them, and real runs are measured without them; the device has to
have room for them all the same.
"""

from __future__ import annotations

from zsim.autograd.traced.model import TracedModel
from zsim.memory.non_torch import NonTorchMemory
from zsim.models.training_options import DTYPE_NBYTES
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES
from zsim.strategies.building.parameters import trained_parameters

INDEX = DTYPE_NBYTES["int64"]
BATCH = (
    "the batch: inputs and targets of one micro-batch; at most those of a step, and of the next "
    "that is loaded meanwhile"
)
GRADIENT = DTYPE_NBYTES["float32"]
GRADIENTS = (
    "the float32 buffer of execution.accumulation, less the gradients counted in its place; all "
    "of it where none live at the peak"
)
BUFFERS = "the module's buffers, and what its first forward left in it; counted for no strategy"


def belongings(scenario: Scenario) -> tuple[NonTorchMemory, ...]:
    """The batch, and the module's buffers where it has some; their bytes follow from shapes.

    Gradients that are added up in float32 lie in a buffer that zero1, zero2 and zero3 make. With
    torch's own strategies, or fused into products, it is the trainer's.
    """
    batch, buffers = _micro_batch_nbytes(scenario), _buffer_nbytes(scenario)
    at_most = (scenario.batch.accumulation + 1) * batch
    exact = tuple(
        NonTorchMemory(
            name=name, nbytes=nbytes, low=nbytes, high=high, provenance="source code",
            source=source, confirmed=True,
        )
        for name, nbytes, high, source in (
            ("inputs", batch, at_most, BATCH), ("buffers", buffers, buffers, BUFFERS)
        )
        if nbytes
    )
    in_program = scenario.execution.accumulation == "eager" or (
        scenario.execution.accumulation == "fp32" and STRATEGIES[scenario.strategy].is_own
    )
    return exact if in_program else (*exact, _buffer_of(scenario))


def _buffer_of(scenario: Scenario) -> NonTorchMemory:
    """The float32 buffer of gradients: banded, as it takes the place of other buffers."""
    numel = sum(parameter.numel for parameter in trained_parameters(scenario.model))
    counted = DTYPE_NBYTES[scenario.precision.parameters]
    return NonTorchMemory(
        name="gradient_buffer", nbytes=(GRADIENT - counted) * numel, low=0, high=GRADIENT * numel,
        provenance="assumed", source=GRADIENTS,
    )


def _buffer_nbytes(scenario: Scenario) -> int:
    model = scenario.model
    return (
        model.buffer_nbytes
        if isinstance(model, TracedModel)
        else sum(nbytes for _, nbytes in model.buffers)
    )


def _micro_batch_nbytes(scenario: Scenario) -> int:
    """A token and its target are an index each; an mlp takes numbers, in the dtype in which its
    strategy wants them, and a class."""
    model, batch = scenario.model, scenario.batch
    if isinstance(model, TracedModel):
        return model.input_nbytes
    if "tokens" in model.first_operator.inputs:
        return 2 * INDEX * batch.micro_batch * batch.sequence_length * batch.forwards
    dtype = (
        scenario.precision.stepped
        if STRATEGIES[scenario.strategy].casts_input
        else scenario.precision.parameters
    )
    row = model.first_operator.in_features * DTYPE_NBYTES[dtype] + INDEX
    return row * batch.micro_batch * batch.forwards
