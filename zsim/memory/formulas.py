"""Model-state bytes by the formula of the literature (Rajbhandari et al. 2020, ZeRO, arXiv
1910.02054), as the waterfall's first step quotes it. The simulator itself counts buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zsim.ir.sharding import shard_size

ZeroStage = Literal["ddp", "zero1", "zero2", "zero3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes per parameter: the parameter and gradient of compute, and the optimizer's states with
    its master copy."""

    parameter: int
    gradient: int
    optimizer: int


def model_state_bytes(
    num_parameters: int, *, stage: ZeroStage, num_ranks: int, state: StateBytes,
    num_trained: int | None = None, num_whole: int = 0,
) -> int:
    """Bytes of parameters, gradients and optimizer states on one rank; what is sharded is padded to
    equal shards.

    Of `num_trained` parameters there are gradients and states, of all when it is None. Of zero3's
    parameters `num_whole` are not sharded.
    """
    trained = num_parameters if num_trained is None else num_trained
    optimizer = trained if stage == "ddp" else shard_size(trained, num_ranks)
    gradient = trained if stage in ("ddp", "zero1") else shard_size(trained, num_ranks)
    whole = num_whole if stage == "zero3" else num_parameters
    parameter = whole + shard_size(num_parameters - whole, num_ranks)
    return state.parameter * parameter + state.gradient * gradient + state.optimizer * optimizer
