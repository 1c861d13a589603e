"""Refusal of modules that ask for the dtype of a parameter that is sharded.

Both FSDPs keep shards in float32, whatever compute runs in; strategies that shard none have the
parameters' own dtype. A module that casts its input to the dtype of a unit's weight while that
unit does not run computes something else under each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from zreal.tracing.errors import refuse
from zreal.tracing.units.unit_hooks import Boundaries
from zsim.models.spec import ROOT, ParamGroup

_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_CASTS = (Tensor.to, Tensor.type_as)
"""Methods that may take a tensor in place of a dtype."""


class ShardedDtypes(TorchFunctionMode):
    """Inside, it is an UntraceableError to ask for the dtype of a parameter whose unit is not
    running."""

    def __init__(
        self, groups: Iterable[ParamGroup], parameters: Mapping[str, Tensor], boundaries: Boundaries
    ) -> None:
        super().__init__()
        self._boundaries = boundaries
        self._owners = {
            id(parameters[p.fqn]): (group.fqn, p.fqn)
            for group in groups
            if group.fqn != ROOT
            for p in group.parameters
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        sources = args[:1] if func == _DTYPE else args[1:2] if func in _CASTS else ()
        for tensor in sources:
            unit, fqn = self._owners.get(id(tensor), ("", ""))
            if unit and not self._boundaries.is_running(unit):
                raise refuse(
                    fqn, "a dtype that no module asks for while the parameter is sharded",
                    f"one that is asked for while {unit} does not run",
                    "name the dtype in the module, as by x.to(torch.bfloat16)",
                )
        return func(*args, **(kwargs or {}))
