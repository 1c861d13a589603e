"""The optimizer of one executed rank and the tensors that it steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zreal.meters.held_memory import state_tensors
from zreal.modules.optimizers import expected_step, make_optimizer, set_gradients, write_back
from zsim.models.training_options import Optimizer


@dataclass(slots=True)
class RankOptimizer:
    """torch's optimizer over `stepped`: parameters, shards of them, or float32 master copies.

    torch's optimizer is made at the first step, as its states then are.
    """

    settings: Optimizer
    stepped: dict[str, Tensor] = field(default_factory=dict)
    """Tensors by the name of their parameter or flat buffer."""
    torch_optimizer: torch.optim.Optimizer | None = None

    def step(
        self, gradients: Mapping[str, Tensor | None], parameters: Mapping[str, Tensor]
    ) -> None:
        """Step every tensor with a gradient, and cast stepped master copies into `parameters`."""
        handed = {name: grad for name, grad in gradients.items() if grad is not None}
        tensors = [self.stepped[name] for name in handed]
        set_gradients(self.settings, tensors, list(handed.values()))
        if self.torch_optimizer is None:
            self.torch_optimizer = make_optimizer(self.settings, list(self.stepped.values()))
        self.torch_optimizer.step()
        write_back(self.settings, [parameters[name] for name in handed], tensors)

    def copies(self) -> dict[str, Tensor]:
        """Copies of the stepped tensors as they are now."""
        return {name: tensor.detach().clone() for name, tensor in self.stepped.items()}

    def expected_step(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The tensors after the next step, as a new optimizer makes them from the same state."""
        states = self.torch_optimizer.state if self.torch_optimizer is not None else {}
        return expected_step(self.settings, self.stepped, gradients, states=states)

    def states(self) -> list[Tensor]:
        """The tensors in the optimizer's state; none before the first step."""
        return [] if self.torch_optimizer is None else state_tensors(self.torch_optimizer)
