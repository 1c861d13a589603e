"""Views that units read in place of their parameters when they run again under FSDP1.

FSDP1 unshards a unit for each run of its forward, and each time makes new views of the flat
parameter. Here they are leaves that share the memory of the unit's own parameters, so that every
run makes gradients of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from zsim.models.spec import ParamGroup
from zsim.strategies.flat_parameter.views import view


class RunViews:
    """The leaves of all later runs; `runs` says how many each unit has. To be made where tensors
    have no memory."""

    def __init__(
        self, groups: Sequence[ParamGroup], own: Mapping[str, nn.Parameter], runs: Mapping[str, int]
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        """The leaves, by the name of the view."""
        self._begun = Counter[str]()
        self._own: dict[str, dict[int, nn.Parameter]] = {}
        self._instead: dict[tuple[str, int], dict[int, nn.Parameter]] = {}
        for group in groups:
            for run in range(2, runs.get(group.fqn, 1) + 1):
                made = {
                    p.fqn: nn.Parameter(own[p.fqn].detach(), requires_grad=own[p.fqn].requires_grad)
                    for p in group.parameters
                }
                self.parameters |= {view(fqn, run): leaf for fqn, leaf in made.items()}
                self._instead[group.fqn, run] = {id(own[fqn]): leaf for fqn, leaf in made.items()}
                self._own.setdefault(group.fqn, {}).update(
                    {id(leaf): own[fqn] for fqn, leaf in made.items()}
                )

    def put(self, unit: str, module: nn.Module) -> None:
        """A run of the `unit`, which is `module`, begins."""
        self._begun[unit] += 1
        _replace(module, self._instead.get((unit, self._begun[unit]), {}))

    def put_back(self, unit: str, module: nn.Module) -> None:
        """The run is over, and the module has its own parameters again."""
        _replace(module, self._own.get(unit, {}))


def _replace(module: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    for part in module.modules() if others else ():
        for name, parameter in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(parameter) in others:
                setattr(part, name, others[id(parameter)])
