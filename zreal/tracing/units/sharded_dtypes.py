"""The dtype that a module reads of a parameter that is not gathered: both FSDPs keep shards in
float32, whatever compute runs in.

Some modules cast their input to the dtype of a unit's weight before that unit has run. Under both
FSDPs they cast it to float32; under strategies that shard none, to the parameters' own dtype. A
unit that has run counts as sharded again, as a block is by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from zreal.modules.initial_values import DTYPES
from zreal.tracing.units.unit_hooks import Boundaries
from zsim.models.spec import ROOT, ParamGroup

SHARDED = DTYPES["float32"]
_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
_CASTS = (Tensor.to, Tensor.type_as)
"""Methods that may take a tensor in place of a dtype."""


class ShardedDtypes(TorchFunctionMode):
    """Inside, `dtype` of a parameter whose unit is not running is float32; `asked` says whether
    anybody has seen so."""

    def __init__(
        self, groups: Iterable[ParamGroup], parameters: Mapping[str, Tensor], boundaries: Boundaries
    ) -> None:
        super().__init__()
        self.asked = False
        self._boundaries = boundaries
        self._owners = {
            id(parameters[p.fqn]): group.fqn
            for group in groups
            if group.fqn != ROOT
            for p in group.parameters
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _DTYPE and self._is_sharded(args[0]):
            self.asked = True
            return SHARDED
        if (
            func in _CASTS
            and len(args) > 1
            and isinstance(args[1], Tensor)
            and self._is_sharded(args[1])
        ):
            self.asked = True
            return args[0].to(SHARDED)
        return func(*args, **(kwargs or {}))

    def _is_sharded(self, tensor: Tensor) -> bool:
        owner = self._owners.get(id(tensor))
        return owner is not None and not self._boundaries.is_running(owner)


@contextmanager
def sharded_dtypes(
    groups: Iterable[ParamGroup], parameters: Mapping[str, Tensor], boundaries: Boundaries, *,
    apply: bool,
) -> Iterator[ShardedDtypes]:
    """The mode, in force if it shall `apply`."""
    mode = ShardedDtypes(groups, parameters, boundaries)
    if not apply:
        yield mode
        return
    with mode:
        yield mode
