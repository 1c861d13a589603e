"""`zsim doctor`: what is installed, what can run here, and how to get the rest."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from zsim import api
from zsim.cli import terminal
from zsim.errors import ZsimError
from zsim.io.units import counted, format_bytes
from zsim.runs import registry
from zsim.runs.backend import RunOptions
from zsim.version import __version__

USES = {
    "calibrate": "zsim calibrate fits constants", "plot": "plots of accuracy and of Runs",
    "real": "real ranks: validate, run --backend gloo, nccl, fake", "sweep": "zsim sweep on "
    "several processes, Parquet", "huggingface": "real runs of models of transformers",
    "import": "YAML configs in zsim import", "deepspeed": "real runs of DeepSpeed's own strategies",
    "notebook": "plots and data frames of Runs", "report": "zsim report",
    "test": "the project's own tests",
}
"""The use of each extra."""
_REQUIREMENT = re.compile(
    r"(?P<name>[\w.-]+)(?P<versions>[^;]*)(?:;.*extra == [\"'](?P<extra>\w+))?"
)


def run(options: argparse.Namespace) -> int:
    """`zsim doctor`: 0; what is missing is no error."""
    machine, extras, backends = _machine(), list(_extras()), list(_backends())
    if options.json:
        terminal.write_json({"machine": machine, "extras": extras, "backends": backends})
        return 0
    terminal.table("this machine", list(machine.items()))
    terminal.table("backends that run here", [
        (each["name"], "yes" if each["able"] else f"no: {each['reason']}") for each in backends
    ])
    terminal.table("optional parts", [
        (each["name"], f"{each['use']}: " + (
            f"missing {', '.join(each['missing'])}; pip install 'zsim[{each['name']}]'"
            if each["missing"] else "installed"
        )) for each in extras
    ])
    return 0


def _machine() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not of every system
        memory = 0
    return {
        "zsim": __version__, "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": counted(cores or 1, "core"), "memory": format_bytes(memory) if memory else "–",
        "folder": sys.prefix,
    }


def _extras() -> Iterator[dict[str, Any]]:
    """Each extra with its packages, and those that are missing."""
    packages: dict[str, dict[str, str]] = {}
    try:
        requirements = metadata.requires("zsim") or []
    except metadata.PackageNotFoundError:  # run from a folder, and not installed
        requirements = []
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match and match["extra"]:
            packages.setdefault(match["extra"], {})[match["name"]] = match["versions"].strip()
    for extra, needed in packages.items():
        found_versions = {name: _version(name) for name in needed}
        yield {
            "name": extra, "use": USES.get(extra, ""),
            "packages": {
                name: {"needed": needed[name], "installed": version}
                for name, version in found_versions.items()
            },
            "missing": [name for name, version in found_versions.items() if version is None],
        }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _backends() -> Iterator[dict[str, Any]]:
    """Each backend, and the reason for which it cannot run here."""
    for name in registry.names():
        try:
            api.open_backend(name, RunOptions())
            reason = ""
        except ZsimError as error:
            reason = str(error)
        yield {"name": name, "able": not reason, "reason": reason}
