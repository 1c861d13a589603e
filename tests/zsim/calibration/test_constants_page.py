"""The page of constants has every constant of time and memory, with the value that it has."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest

from tests.published.convert import llm_foundry
from tests.support.folders import ROOT
from zsim import autograd, calibration, cluster, engine, memory
from zsim.autograd import aten
from zsim.cluster.cluster_presets import clusters, load_cluster
from zsim.cluster.collectives.nccl.constants import CONSTANTS
from zsim.cluster.devices import devices, load_device

TEXT = (ROOT / "zsim" / "calibration" / "CONSTANTS.md").read_text(encoding="utf-8")
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in TEXT.splitlines() if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}
NAMED = {*re.findall(r"`([\w.]+)`", TEXT)}
FEW = 12
"""Most numbers of a constant that the page has one by one."""
A100, H100 = load_cluster("dgx-a100"), load_cluster("dgx-h100")


def modules(package: ModuleType) -> Iterator[ModuleType]:
    """A package and all that is in it."""
    yield package
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield importlib.import_module(each.name)


def numbers(value: Any) -> list[float]:
    """The numbers in a constant, however it is nested."""
    if isinstance(value, bool):
        return []
    if isinstance(value, int | float):
        return [value]
    if isinstance(value, Mapping):
        return [number for each in value.values() for number in numbers(each)]
    if isinstance(value, tuple | list):
        return [number for each in value for number in numbers(each)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return [number for field in fields for number in numbers(getattr(value, field.name))]
    return []


def constants(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Name and value of each constant with a number that a module defines."""
    for node in ast.parse(inspect.getsource(module)).body:
        targets = (
            node.targets if isinstance(node, ast.Assign)
            else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Name) and re.fullmatch(r"[A-Z][A-Z0-9_]*", each.id):
                    value = getattr(module, each.id)
                    if numbers(value):
                        yield f"{module.__name__}.{each.id}".removeprefix("zsim."), value


OF_MODEL = {
    name: value
    for package in (engine, cluster, aten, memory, calibration) for module in modules(package)
    for name, value in constants(module)
}


def as_written(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.4g}"


def test_the_model_has_some_two_hundred_constants_in_code() -> None:
    """Enough that no package has got lost."""
    assert autograd.__name__ == "zsim.autograd"
    assert 200 < len(OF_MODEL) < 300


@pytest.mark.parametrize("name", OF_MODEL)
def test_every_constant_in_code_is_on_the_page(name: str) -> None:
    above = {name.rsplit(".", parts)[0] for parts in range(1, name.count("."))}
    assert name in NAMED or above & NAMED


def test_the_page_names_no_constant_that_is_gone() -> None:
    packages = ("engine.", "cluster.", "autograd.", "memory.", "calibration.")
    code = {name for name in NAMED if name.startswith(packages)}
    names = {".".join(name.split(".")[:parts]) for name in OF_MODEL for parts in range(1, 7)}
    assert code - names == set()


@pytest.mark.parametrize(
    "name", [name for name in OF_MODEL if name in ROWS and re.search(r"\d", ROWS[name][0])]
)
def test_values_in_code_are_those_of_the_page(name: str) -> None:
    values = numbers(OF_MODEL[name])
    written = re.findall(r"\d+(?:\.\d+)?", ROWS[name][0])
    if len(values) <= FEW and not re.search(r"\d to \d", ROWS[name][0]):
        assert {as_written(value) for value in values} <= {*written}
    else:
        ends = sorted(map(float, written))
        assert (min(values), max(values)) == (ends[0], ends[-1])


@pytest.mark.parametrize("name", ["launch_us", "reached", "idle", "nics", "fast_nics"])
def test_values_of_nccl_are_those_of_the_page(name: str) -> None:
    values = {f"{value:g}" for value in numbers(getattr(CONSTANTS, name))}
    assert values <= {*re.findall(r"\d+(?:\.\d+)?", ROWS[name][0])}


def test_every_field_of_nccl_s_constants_has_a_row() -> None:
    assert {field.name for field in dataclasses.fields(CONSTANTS)} <= ROWS.keys()


def preset_keys() -> set[str]:
    """Keys of all figures of presets."""
    of_devices = {figure.key for name in devices() for figure in load_device(name).figures}
    return of_devices | {
        figure.key for name in clusters() for figure in load_cluster(name).figures
    }


def test_every_key_of_a_preset_has_a_row_and_every_row_a_key() -> None:
    rows = {
        name for name in ROWS
        if name.split(".")[0] in (
            "device", "links", "host", "drives", "file_system", "overheads", "power"
        )
    }
    assert rows == preset_keys() | {"power"}


@pytest.mark.parametrize("key", sorted(preset_keys()))
def test_values_of_presets_are_those_of_the_page(key: str) -> None:
    for spec, written in zip((A100, H100), ROWS[key][:2], strict=True):
        known = {figure.key: figure.text for figure in (*spec.device.figures, *spec.figures)}
        assert known.get(key, "") == written


def test_values_of_published_tables_are_those_of_the_page() -> None:
    assert ROWS["llm_foundry.STEP_OVERHEAD"][0] == llm_foundry.STEP_OVERHEAD
    assert ROWS["llm_foundry.MICRO_BATCH_OVERHEAD"][0] == llm_foundry.MICRO_BATCH_OVERHEAD
