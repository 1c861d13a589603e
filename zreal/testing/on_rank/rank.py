"""The fixture `rank`: index, device and meshes of this rank, its log, and equality on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zreal.testing.on_rank.collective_checks import CollectiveChecks
from zreal.testing.on_rank.equality import (
    Forms,
    Part,
    differing_element,
    differing_part,
    digested,
    parts,
    report,
    tensor_bytes,
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Rank:
    """A rank of a test that runs on several. The default process group is there already."""

    index: int
    world_size: int
    device: torch.device
    backend: str
    _folder: Path
    _store: dist.Store
    _checks: CollectiveChecks
    _meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<rank {self.index} of {self.world_size}>"

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with the axis dp_shard."""
        return self.mesh_of(dp_shard=self.world_size)

    def mesh_of(self, **axes: int) -> DeviceMesh:
        """The mesh with these axes, as `dp_replicate=2, dp_shard=2`. All ranks must ask for it."""
        shape = tuple(axes.items())
        if shape not in self._meshes:
            self._meshes[shape] = init_device_mesh(
                self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes)
            )
        return self._meshes[shape]

    def log(self, *values: object) -> None:
        """Write a line to this rank's log, which a failing test shows."""
        with (self._folder / f"rank_{self.index}.log").open("a", encoding="utf-8") as file:
            file.write(" ".join(map(str, values)) + "\n")

    def assert_all_equal(self, value: object) -> None:
        """Assert that all ranks hold the same value, bit for bit; on all of them, or on none.

        AssertionError on every rank names the ranks in the minority, and the first part of the
        value that differs. All ranks must call it.
        """
        __tracebackhide__ = True
        own = dict(parts(value))
        exchange = self._exchange()
        texts = exchange(json.dumps([digested(path, part) for path, part in own.items()]))
        forms = differing_part([[Part(*part) for part in json.loads(text)] for text in texts])
        if forms:
            raise AssertionError(report(forms) + self._element(forms, own, exchange))

    def _exchange(self) -> Callable[[str], list[str]]:
        """The function that gives each rank's text to all; every rank calls it as often."""
        number = self._checks.enter("assert_all_equal", "", ranks=range(self.world_size))
        round_ = iter(range(9))

        def exchange(text: str) -> list[str]:
            key = f"equal/{number}/{next(round_)}"
            self._store.set(f"{key}/{self.index}", text)
            return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]

        return exchange

    def _element(
        self, forms: Forms, own: dict[str, Any], exchange: Callable[[str], list[str]]
    ) -> str:
        """The first element that differs, as a line, where a tensor differs in nothing else."""
        tensor = own.get(forms[0][0].path)
        form = f"{tensor.dtype} {tensor.shape}" if isinstance(tensor, torch.Tensor) else ""
        alike = set(exchange(form)) == {form} and len({part.path for part, _ in forms}) == 1
        if not alike or not isinstance(tensor, torch.Tensor):
            return ""
        files = [self._folder / f"equal_{ranks[0]}" for _, ranks in forms[:2]]
        for file, (_, ranks) in zip(files, forms, strict=False):
            if self.index == ranks[0]:
                file.write_bytes(tensor_bytes(tensor))
        exchange("written")
        index, *values = differing_element([file.read_bytes() for file in files], like=tensor)
        first, second = (ranks[0] for _, ranks in forms[:2])
        return (
            f"\n  first at {index}: {values[0]} on rank {first}, {values[1]} on rank {second}"
        )
