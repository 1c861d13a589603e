"""Files of one rank in place of NVMe drives: tensors mapped from files that have no name any more.

A file is unlinked as soon as it is mapped, so that nothing is left behind however a rank ends.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from zreal.processes.rank_folder import require_room


@dataclass(slots=True)
class SwappedFiles:
    """Mapped tensors by the Program's names."""

    live: dict[str, Tensor] = field(default_factory=dict)

    def make(self, name: str, source: Tensor) -> Tensor:
        """A file with the elements of `source`, as a tensor.

        BackendUnavailableError where the folder for temporary files has no room for it.
        """
        nbytes = source.numel() * source.element_size()
        require_room(nbytes)
        if not nbytes:  # there are no empty maps
            made = torch.empty(0, dtype=source.dtype)
        else:
            handle, path = tempfile.mkstemp(prefix="zsim-drive-")
            os.close(handle)
            made = torch.from_file(path, shared=True, size=source.numel(), dtype=source.dtype)
            Path(path).unlink()
            made.copy_(source)
        self.live[name] = made
        return made
