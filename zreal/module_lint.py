"""Lint of a torch module on its mesh: mistakes of units and shards that run, or fail only later.

It looks at parameters and units, wrapped already or not, and runs nothing. What a whole step costs
is `zsim.lint`'s to find, on a scenario with the module in its model's place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from zreal.tracing.units.param_groups import find_units
from zsim.analysis.lint.finding import LintFinding
from zsim.analysis.lint.unit_rules import told_of_empty
from zsim.cluster.cluster import ClusterSpec
from zsim.cluster.cluster_presets import load_cluster
from zsim.engine.costs.op_costs import Costs
from zsim.errors import ArgumentError, listed
from zsim.io.arguments import described
from zsim.io.units import counted, format_bytes
from zsim.ir.sharding import num_filled, padded_size
from zsim.models.spec import ROOT

MOST_PADDING, MOST_IN_ROOT, LEAST_SAVED = 0.1, 1 / 3, 0.25
"""Shares from which padding, the root, and the time that larger units save are worth a finding."""
WRAPPED = (FSDPModule, FullyShardedDataParallel)
Shapes = list[tuple[str, torch.Size, int]]
"""Name, shape and bytes of an element of each parameter of a unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCase:
    """A module's parameters by unit, the names of tied ones, and the mesh's axes."""

    units: dict[str, Shapes]
    ties: list[list[tuple[str, str]]]
    """Names of one parameter that several names have, each with its unit."""
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    costs: Costs

    @property
    def shards(self) -> int:
        """Ranks that share a parameter: the last axis of the mesh."""
        return self.sizes[-1]

    def nbytes(self, unit: str) -> int:
        """Bytes of a unit's parameters, unpadded."""
        return sum(shape.numel() * size for _, shape, size in self.units[unit])

    @property
    def total(self) -> int:
        """Bytes of all parameters, each once."""
        return sum(map(self.nbytes, self.units))

    def gather_ns(self, nbytes: int) -> int:
        """Nanoseconds of an all-gather of so many bytes over the shards, alone."""
        return self.costs.collective_ns("all_gather", nbytes, tuple(range(self.shards)))


def lint(
    module: nn.Module, mesh: DeviceMesh | Sequence[int], *, units: Sequence[str] | None = None,
    cluster: str = "dgx-h100", ignore: Collection[str] = (),
) -> tuple[LintFinding, ...]:
    """Findings on `module`, sharded over the last axis of `mesh`, a DeviceMesh or its sizes.

    `units`: names of the modules to be wrapped. By default they are those that fully_shard or FSDP
    wrapped, else the children of the longest ModuleList that is in no other. `cluster`: the preset
    on whose links the time of collectives is predicted. Collectives of a finding are one gather of
    each unit.

    ArgumentError for a mesh of other axes than one or two, and for a name that is no rule's.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            where="module", expected="an nn.Module", found=described(module),
            remedy="an object, as model or MyModel(), not its class",
        )
    unknown = [name for name in ignore if name not in RULES]
    if unknown:
        raise ArgumentError(where="ignore", expected=listed(RULES), found=unknown[0])
    case = _case(module, mesh, units, cluster)
    return tuple(
        replace(finding, rule=name)
        for name, rule in RULES.items() if name not in ignore for finding in rule(case)
    )


def _case(
    module: nn.Module, mesh: DeviceMesh | Sequence[int], units: Sequence[str] | None, preset: str
) -> ModuleCase:
    shape = mesh.shape if isinstance(mesh, DeviceMesh) else mesh
    sizes = tuple(shape) if isinstance(shape, Sequence) else ()
    if len(sizes) not in (1, 2) or not all(
        isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes
    ):
        raise ArgumentError(
            where="mesh", expected="one axis of shards, or one of replicas and one of shards",
            found=repr(sizes) if isinstance(shape, Sequence) else described(shape),
            remedy="as (8,) or (2, 4)",
        )
    names = mesh.mesh_dim_names if isinstance(mesh, DeviceMesh) else None
    wrapped = [fqn for fqn, part in module.named_modules() if isinstance(part, WRAPPED)]
    if units is not None or not wrapped:
        wrapped = list(find_units(module, units))
    wrapped = [fqn for fqn in wrapped if fqn]  # where the root alone is wrapped, it is the one unit
    members: dict[str, Shapes] = {fqn: [] for fqn in (ROOT, *wrapped)}
    tied: dict[int, list[tuple[str, str]]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = max(
            (fqn for fqn in wrapped if name.startswith(f"{fqn}.")), key=len, default=ROOT
        )
        if id(parameter) not in tied:
            members[unit].append((name, parameter.shape, parameter.element_size()))
        tied.setdefault(id(parameter), []).append((name, unit))
    return ModuleCase(
        units={unit: shapes for unit, shapes in members.items() if shapes},
        ties=[names for names in tied.values() if len(names) > 1],
        axes=names or ("",) * len(sizes), sizes=sizes, costs=Costs(cluster=_cluster(preset, sizes)),
    )


def _cluster(preset: str, sizes: tuple[int, ...]) -> ClusterSpec:
    """The preset with as many nodes as the shards need."""
    per_node = load_cluster(preset).devices_per_node
    return load_cluster(preset, nodes=-(-sizes[-1] // per_node))


def _tied_across_units(case: ModuleCase) -> Iterator[LintFinding]:
    for names in case.ties:
        units = dict.fromkeys(unit for _, unit in names)
        if len(units) > 1:
            same = " and ".join(name for name, _ in names)
            yield LintFinding(
                fact=f"{same} are one parameter, in units {' and '.join(units)}",
                why="torch 2.13 refuses a parameter in two groups; earlier ones untie it silently",
                remedy="leave both modules in the root, or untie the weight",
            )


def _one_unit(case: ModuleCase) -> Iterator[LintFinding]:
    if len(case.units) == 1 and case.shards > 1:
        yield LintFinding(
            fact=f"the whole module is one unit of {format_bytes(case.total)}",
            why="a unit is gathered whole, and nothing computes until it is",
            remedy="wrap the blocks, or name them in units=", gathered_bytes=case.total,
        )


def _tiny_units(case: ModuleCase) -> Iterator[LintFinding]:
    """Units of which pairs are gathered a quarter faster than each by itself."""
    blocks = [case.nbytes(unit) for unit in case.units if unit != ROOT]
    if case.shards == 1 or len(blocks) < 2:
        return
    alone = sum(map(case.gather_ns, blocks))
    paired = sum(case.gather_ns(sum(blocks[i : i + 2])) for i in range(0, len(blocks), 2))
    if alone - paired > LEAST_SAVED * alone:
        yield LintFinding(
            fact=f"{counted(len(blocks), 'unit')} of {format_bytes(max(blocks))} at most",
            why="each unit is a collective, and each collective has its latency",
            remedy="give fully_shard a list of several blocks", cost_ns=alone - paired,
        )


def _large_root(case: ModuleCase) -> Iterator[LintFinding]:
    root = case.nbytes(ROOT) if ROOT in case.units else 0
    if len(case.units) > 1 and root > MOST_IN_ROOT * case.total:
        yield LintFinding(
            fact=f"the root holds {root / case.total:.0%} of the parameters",
            why="fully_shard keeps the root gathered from forward to backward",
            remedy="wrap the embedding or the head, if they are not tied", gathered_bytes=root,
        )


def _padded_shards(case: ModuleCase) -> Iterator[LintFinding]:
    """Parameters whose dim 0 does not divide, as fully_shard pads them."""
    padding = sum(_padding(case, unit) for unit in case.units)
    empty = [
        name for shapes in case.units.values() for name, shape, _ in shapes
        if _rows(shape) < case.shards
    ]
    if padding > MOST_PADDING * (case.total + padding):
        few = f"; ranks hold nothing of {counted(len(empty), 'parameter')}" if empty else ""
        yield LintFinding(
            fact=f"{padding / (case.total + padding):.0%} of what is gathered is padding"
                 f"{few}",
            why="fully_shard cuts dim 0 into equal shards and gathers the padding too",
            remedy=f"shard over fewer ranks, or make dim 0 a multiple of {case.shards}",
            gathered_bytes=padding,
        )


def _rows(shape: torch.Size) -> int:
    """Size of dim 0, which fully_shard cuts; 1 for a scalar."""
    return shape[0] if shape else 1


def _padding(case: ModuleCase, unit: str) -> int:
    """Bytes of padding of a unit's parameters."""
    return sum(
        (padded_size(_rows(shape), case.shards) - _rows(shape)) * shape[1:].numel() * size
        for _, shape, size in case.units[unit]
    )


def _empty_shards(case: ModuleCase) -> Iterator[LintFinding]:
    """Units of which some rank holds nothing."""
    filled = {
        unit: max(num_filled(_rows(shape), case.shards) for _, shape, _ in shapes)
        for unit, shapes in case.units.items()
    }
    nbytes = {unit: case.nbytes(unit) for unit in case.units if filled[unit] < case.shards}
    if nbytes:
        yield LintFinding(
            fact=told_of_empty(filled, nbytes, case.shards),
            why="ranks without a part wait for a collective of padding",
            remedy="shard over fewer ranks, or wrap it together with a block",
            gathered_bytes=sum(_padding(case, unit) for unit in nbytes),
        )


def _flat_mesh(case: ModuleCase) -> Iterator[LintFinding]:
    if len(case.sizes) == 2 and 1 in case.sizes:
        yield LintFinding(
            fact=f"a mesh of {case.sizes[0]} × {case.sizes[1]}",
            why="an axis of one rank makes no replicas, or no shards",
            remedy="use a mesh of one axis, or make both larger than 1",
        )
    if len(case.sizes) == 1 and "repl" in case.axes[0]:
        yield LintFinding(
            fact=f"a mesh of one axis called {case.axes[0]}",
            why="fully_shard shards over the only axis of a mesh, whatever its name",
            remedy="give it a mesh of two axes, replicas first, or call the axis a shard's",
        )


RULES: dict[str, Callable[[ModuleCase], Iterator[LintFinding]]] = {
    "tied-across-units": _tied_across_units,
    "one-unit": _one_unit,
    "tiny-units": _tiny_units,
    "large-root": _large_root,
    "padded-shards": _padded_shards,
    "empty-shards": _empty_shards,
    "flat-mesh": _flat_mesh,
}
"""Every rule by its name."""
