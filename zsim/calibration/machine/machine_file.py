"""The file of the present machine: its cluster as `--cluster FILE` reads it, in the user's cache.

A machine is told by its processor, its cores and its torch: another torch has another host cost.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zsim.calibration.fitting.write_cluster import preset_tables
from zsim.calibration.machine.attention_fit import KINDS
from zsim.calibration.machine.fit import FittedMachine, constants
from zsim.cluster.cluster import ClusterSpec
from zsim.ir.order.launch_queue import IN_CALLER
from zsim.runs.backend import Gpus
from zsim.scenario.tables import in_line

PRESET = "cpu-gloo"
CACHE = "ZSIM_CACHE"
"""The environment variable that names another folder than the user's cache."""


def processor() -> str:
    """The processor's name and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_model_name()}, {cores} cores"


def _model_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()[:80]
    except OSError:
        pass
    return platform.processor()[:80] or platform.machine()


def torch_version() -> str:
    """The version of the torch that is installed; "no torch" without one."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "no torch"


def fingerprint(gpus: Gpus | None = None) -> str:
    """Twelve hex digits that tell this machine from others: processor, cores, torch, Python, and
    its GPUs' name, number, driver and NCCL."""
    facts = [processor(), platform.machine(), torch_version(), platform.python_version()]
    if gpus is not None:
        facts += (gpus.name, str(gpus.count), gpus.driver, gpus.nccl)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12]


def cached(world_size: int, gpus: Gpus | None = None) -> Path:
    """The file of this machine with `world_size` ranks at work, there or to come.

    On GPUs it is one file for any number of ranks, since they share none.
    """
    folder = os.environ.get(CACHE) or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = f"{world_size}-ranks" if gpus is None else "gpus"
    return Path(folder) / "zsim" / "machines" / f"{fingerprint(gpus)}-{name}.toml"


def beside_others(path: Path) -> Path:
    """The file of a measurement beside other work, which one run uses and the next one replaces."""
    return path.with_suffix(".busy.toml")


def text(fitted: FittedMachine, *, world_size: int, date: str, seconds: float) -> str:
    """The machine's cluster as TOML, each constant with its provenance, and how good they are."""
    about = f"{processor()}, torch {torch_version()}, {world_size} ranks, {date}"
    cluster, device = preset_tables(PRESET)
    values = constants(fitted)
    source = f"zsim calibrate --here on {about}"
    how = {
        "provenance": "calibrated", "width": f"{100 * fitted.width:.1f} %", "source": source,
    }
    device |= {name: {"value": value, **how} for name, value in values["device"].items()}
    attention = {name: {"value": value, **how} for name, value in values["attention"].items()}
    device["attention"] = dict.fromkeys(KINDS, attention)
    for name, value in values["overheads"].items():
        cluster["overheads"][name] = {"value": value, "provenance": "calibrated", "source": source}
    device["launch_queue"] = {
        "value": str(IN_CALLER), "provenance": "source code",
        "source": "operators of a CPU run in their caller",
    }
    cluster["description"] = f"This machine: {about}"
    cluster["device"] = device
    return "\n".join((*_head(fitted, about, seconds), *_sections(cluster), *_times(fitted))) + "\n"


def _head(fitted: FittedMachine, about: str, seconds: float) -> Iterator[str]:
    """Comments: where and how it was measured, and how well each model is predicted by the
    others."""
    sizes = sorted(map(abs, fitted.errors))
    middle, largest = sizes[len(sizes) // 2], sizes[-1]
    yield f"# calibrated on {about}, in {seconds:.0f} s"
    yield (
        f"# steps without communication, each predicted by the others: median error "
        f"{middle:.1%}, largest {largest:.1%}; spread of equal steps {fitted.spread:.1%}"
    )
    if fitted.busy:
        yield f"# doubtful: {fitted.busy} meanwhile, so the band is {fitted.width:.0%} wide"
    yield ""


def _sections(cluster: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A table of TOML: its values first, then the tables in it, under their whole names."""
    inner = {
        key: value for key, value in cluster.items()
        if isinstance(value, dict) and "value" not in value
    }
    own = {key: value for key, value in cluster.items() if key not in inner}
    if prefix and own:
        yield f"[{prefix}]"
    for key, value in own.items():
        yield f"{key} = {in_line(value)}"
    if own:
        yield ""
    for key, value in inner.items():
        yield from _sections(value, f"{prefix}.{key}" if prefix else key)


def _times(fitted: FittedMachine) -> Iterator[str]:
    for times in fitted.times:
        yield "[[times]]"
        yield f'collective = "{times.collective}"'
        yield f"ranks = {times.ranks}"
        yield f"bytes = {in_line([f'{nbytes} B' for nbytes, _ in times.points])}"
        yield f"times = {in_line([f'{ns} ns' for _, ns in times.points])}"
        yield f'width = "{100 * times.width:.1f} %"'
        yield 'provenance = "measured"'
        yield f"source = {in_line(times.source)}"
        yield ""


def load(path: Path, *, world_size: int) -> ClusterSpec:
    """The cluster in the file at `path` with `world_size` ranks; ScenarioError for anything odd in
    it."""
    from zsim.scenario.parts import cluster_file

    return cluster_file.load(str(path), folder=None, nodes=1, ranks=world_size)
