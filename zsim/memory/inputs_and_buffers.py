"""Inputs and buffers: the user's own device memory, for a micro-batch's tensors and the module's
buffers.

No strategy makes, shards or frees them, and real runs are measured without them; the device has to
have room for them all the same.
"""

from __future__ import annotations

from zsim.autograd.traced.model import TracedModel
from zsim.memory.non_torch import NonTorchMemory
from zsim.models.training_options import DTYPE_NBYTES
from zsim.scenario.scenario import Scenario
from zsim.strategies import STRATEGIES

INDEX = DTYPE_NBYTES["int64"]
BATCH = (
    "the batch: inputs and targets of one micro-batch; at most those of a step, and of the next "
    "that is loaded meanwhile"
)
BUFFERS = "the module's buffers, and what its first forward left in it; counted for no strategy"


def belongings(scenario: Scenario) -> tuple[NonTorchMemory, ...]:
    """The batch, and the module's buffers where it has some; their bytes follow from shapes."""
    batch, buffers = _micro_batch_nbytes(scenario), _buffer_nbytes(scenario)
    at_most = (scenario.batch.accumulation + 1) * batch
    return tuple(
        NonTorchMemory(
            name=name, nbytes=nbytes, low=nbytes, high=high, provenance="source code",
            source=source, confirmed=True,
        )
        for name, nbytes, high, source in (
            ("inputs", batch, at_most, BATCH), ("buffers", buffers, buffers, BUFFERS)
        )
        if nbytes
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
