"""Lint of modules: wrapped by torch or not, one seeded mistake for each rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zreal
from zreal import torch_private
from zreal.module_lint import RULES
from zsim.errors import ArgumentError


class Blocks(nn.Module):
    """Some blocks of a width between an embedding and a head, which may be tied."""

    def __init__(self, width=4096, blocks=4, vocabulary=64, tied=False):
        super().__init__()
        with torch.device("meta"):
            self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
            self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


MISTAKES = {
    "tied-across-units": (Blocks(tied=True), (8,), ["layers.0", "embedding", "head"]),
    "one-unit": (nn.Linear(4096, 4096, device="meta"), (8,), []),
    "tiny-units": (Blocks(width=64, vocabulary=8), (8,), None),
    "large-root": (Blocks(vocabulary=100_000), (8,), None),
    "padded-shards": (Blocks(width=65, vocabulary=65), (64,), None),
    "empty-shards": (Blocks(vocabulary=4), (8,), None),
    "flat-mesh": (Blocks(), (1, 8), None),
}


def found(module, mesh, **more):
    return [finding.rule for finding in zreal.lint(module, mesh, **more)]


def test_a_good_module_has_no_finding():
    assert zreal.lint(Blocks(), (8,)) == ()
    assert zreal.lint(Blocks(tied=True), (2, 4)) == ()


@pytest.mark.quality
@pytest.mark.parametrize("rule", RULES)
def test_a_seeded_mistake_is_found(rule):
    module, mesh, units = MISTAKES[rule]
    assert rule in found(module, mesh, units=units)
    assert rule not in found(module, mesh, units=units, ignore=[rule])


def test_padding_is_what_fully_shard_gathers():
    """torch pads 65 rows over 64 ranks to 128."""
    module = Blocks(width=65, vocabulary=65, blocks=1)
    (finding,) = [each for each in zreal.lint(module, (64,)) if each.rule == "padded-shards"]
    matrix, bias = 63 * 65 * 4, 63 * 4
    assert finding.gathered_bytes == 3 * matrix + bias


def test_units_are_those_that_torch_has_wrapped():
    with torch_private.fake_group(rank=0, world_size=8):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_replicate",))
        module = Blocks()
        for layer in module.layers[:2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        large, flat = zreal.lint(module, mesh)
    assert large.fact == "the root holds 50% of the parameters"  # with two layers
    assert flat.fact == "a mesh of one axis called dp_replicate"


def test_a_module_whose_root_alone_is_wrapped_is_one_unit():
    with torch_private.fake_group(rank=0, world_size=8):
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_shard",))
        (finding,) = zreal.lint(fully_shard(Blocks(), mesh=mesh), mesh)
    assert finding.rule == "one-unit"


@pytest.mark.quality
def test_ranks_that_hold_nothing_of_a_unit_are_named():
    """Three rows of eight ranks: their padding is below a tenth of what is gathered."""
    with torch.device("meta"):
        layers = [nn.Linear(512, 512) for _ in range(8)]
        module = nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(512, 3)})
    units = [*(f"layers.{i}" for i in range(8)), "head"]
    (finding,) = zreal.lint(module, (2, 8), units=units, ignore=["tiny-units"])
    assert finding.rule == "empty-shards"
    assert finding.fact == "ranks 3 to 7 of 8 hold nothing of unit head (6,156 B)"
    assert finding.gathered_bytes == 5 * (512 + 1) * 4
    assert zreal.lint(module, (3,), units=["head"], ignore=RULES.keys() - {"empty-shards"}) == ()


def test_a_class_in_place_of_a_module_is_refused():
    with pytest.raises(ArgumentError, match="module: expected an nn.Module, found a type; an obj"):
        zreal.lint(nn.Linear, (8,))


@pytest.mark.parametrize("mesh", [(), (2, 2, 2), (0,), ("8",), 8, (True, 8), None])
def test_other_meshes_are_refused(mesh):
    with pytest.raises(ArgumentError, match="mesh: expected one axis of shards"):
        zreal.lint(Blocks(), mesh)


def test_a_name_that_is_no_rule_is_refused():
    with pytest.raises(ArgumentError, match="ignore: expected tied-across-units, .* found tiny"):
        zreal.lint(Blocks(), (8,), ignore=["tiny"])
