"""One row of nccl-tests' output."""

from __future__ import annotations

from dataclasses import dataclass

from zsim.errors import Caveat


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """A collective as nccl-tests prints it: bytes of the full message, out-of-place microseconds.

    `gpu` is the device's name. `nvls` is False where a variable switched NVLS off.
    """

    op: str
    gpu: str
    num_ranks: int
    num_nodes: int
    nbytes: int
    microseconds: float
    nvls: bool = True
    caveats: tuple[Caveat, ...] = ()
    source: str = ""
    line: int = 0
