"""The backend nccl: one process per rank on this machine's GPUs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from zreal.backends.gloo import GlooBackend
from zreal.backends.requirements import require_cuda, require_torch
from zsim.errors import BackendUnavailableError
from zsim.ir.run import RunRecord
from zsim.models.training_options import Device
from zsim.runs.backend import (
    Capabilities,
    Gpus,
    RunOptions,
)
from zsim.scenario.scenario import Scenario


class NcclBackend(GlooBackend):
    """One process per rank on this machine's CUDA devices, with NCCL collectives between them."""

    name = "nccl"
    device: Device = "cuda"

    def capabilities(self) -> Capabilities:
        """Capabilities of gloo; BackendUnavailableError where there is no CUDA device."""
        require_torch(self.name)
        require_cuda(self.name, remedy="use the backend gloo or fake here")
        import torch

        return replace(
            super().capabilities(), faults=(),
            gpus=Gpus(
                name=torch.cuda.get_device_name(0), count=torch.cuda.device_count(),
                driver=_driver(), nccl=".".join(map(str, torch.cuda.nccl.version())),
            ),
        )

    def run(self, scenario: Scenario, *, options: RunOptions) -> RunRecord:
        """Run as gloo does; BackendUnavailableError for more ranks than devices.

        NCCL refuses two ranks on one device unless their NCCL_HOSTID differ.
        """
        import torch

        from zreal.processes.host_memory import require_device_memory
        from zreal.processes.rank_device import HOST_ID, present_nbytes

        devices = torch.cuda.device_count()
        if scenario.world_size > devices and HOST_ID not in os.environ:
            raise BackendUnavailableError(
                where="backend nccl",
                expected=f"{scenario.world_size} CUDA devices, one per rank",
                found=f"{devices} on this machine",
                remedy="start it on a cluster: torchrun … -m zreal.worker SCENARIO --save RUN.json",
            )
        on_each = -(-scenario.world_size // devices)
        present = present_nbytes(torch.device("cuda", 0)) // on_each
        require_device_memory(scenario, backend=self.name, present_nbytes=present)
        return super().run(scenario, options=options)


def _driver() -> str:
    """The first line of what NVIDIA's driver says of its version; "" where it says nothing."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(errors="replace").partition("\n")[0]
    except OSError:
        return ""
