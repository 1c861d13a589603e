"""Names of buffers are composed and read in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from inspect import getmembers, isfunction
from pathlib import Path

import pytest

from tests.support.folders import ROOT
from zsim.ir import buffers

MAKES = {name for name, _ in getmembers(buffers, isfunction)} | {"Buffer"}
"""Calls that make a name of a buffer."""
TAKES = {"Alloc", "HostAlloc", "Free", "alloc", "drop"}
"""Calls that take one."""
READS = {"split", "partition", "rpartition", "startswith", "endswith", "removeprefix",
         "removesuffix"}


def is_composed(name: ast.expr) -> bool:
    """True for a text put together of others."""
    parts = list(ast.walk(name)) if isinstance(name, ast.JoinedStr | ast.BinOp) else []
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)


def breaches(source: str) -> Iterator[int]:
    """The lines that compose a name of a buffer of text, or take apart that of an event."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        names = node.args if called in MAKES else node.args[:1] if called in TAKES else []
        if any(map(is_composed, names)):
            yield node.lineno
        if called in READS and isinstance(node.func, ast.Attribute):
            read = node.func.value
            if isinstance(read, ast.Attribute) and read.attr == "buffer":
                yield node.lineno


@pytest.mark.parametrize("package", ["zsim", "zreal"])
def test_no_name_of_a_buffer_is_made_or_read_elsewhere(package: str) -> None:
    files = [file for file in (ROOT / package).rglob("*.py") if file != Path(buffers.__file__)]
    elsewhere = {
        str(file.relative_to(ROOT)): lines for file in files
        if (lines := list(breaches(file.read_text(encoding="utf-8"))))
    }
    assert len(files) > 50
    assert elsewhere == {}


@pytest.mark.parametrize(
    "line",
    [
        'Alloc(f"{fqn}.gradient", "gradients", 4)', 'Free(fqn + ".gradient")',
        'buffer_of(f"bucket.{number}", "flat")', 'buffer_of(unit, f"padding.{rank}")',
        'Buffer(f"norm.{number}")',
        'event.buffer.endswith(".step")', 'step.alloc(f"{fqn}.cast", "communication", 4)',
    ],
)
def test_a_name_made_or_read_elsewhere_is_seen(line: str) -> None:
    assert list(breaches(line)) == [1]


def test_names_are_read_back() -> None:
    assert buffers.parameter_and_state(buffers.state_of("optimizer", 3, "exp_avg")) == (
        3, "exp_avg"
    )
    assert buffers.parameter_and_state(buffers.norm_part("stack")) is None
    shard = buffers.on_host(buffers.buffer_of("blocks.0", "shard"))
    assert buffers.is_on_host(shard)
    assert not buffers.is_on_host(buffers.on_host("cast", moved=False))
    assert buffers.is_state(buffers.state_of("optimizer", 0, buffers.STEP), buffers.STEP)
