"""Sizes, shapes, parameters, meshes and units that are small, awkward and legal."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from zsim.ir.mesh import Mesh
from zsim.models.spec import ROOT, Parameter, ParamGroup

DTYPES = ("float32", "bfloat16", "float16")
PRIMES = (2, 3, 5, 7, 13, 31)


@dataclass(frozen=True, slots=True)
class DrawnParameter:
    """A parameter by name, shape and dtype; `tied_to` names the one whose memory it shares."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    tied_to: str = ""


def world_sizes(most: int = 17) -> st.SearchStrategy[int]:
    """Numbers of ranks up to `most`: one, primes and powers of two among them."""
    return st.integers(1, most)


def numels() -> st.SearchStrategy[int]:
    """Numbers of elements: none, one, primes, anything up to 5,000."""
    return st.one_of(st.sampled_from([0, 1, *PRIMES, 97]), st.integers(0, 5000))


def shapes(world: int | None = None, *, dims: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of one to `dims` dims: dim 0 is none, one, a prime, below or around `world`."""
    near = [] if world is None else [max(0, world - 1), world, world + 1, 2 * world]
    rows = st.one_of(st.sampled_from([0, 1, *PRIMES, *near]), st.integers(0, 40))
    others = st.lists(st.integers(0, 8), max_size=dims - 1)
    return st.tuples(rows, others).map(lambda drawn: (drawn[0], *drawn[1]))


@st.composite
def parameters(draw: st.DrawFn, world: int | None = None) -> tuple[DrawnParameter, ...]:
    """Lists of one to six parameters, of which later ones may share the memory of an earlier."""
    drawn: list[DrawnParameter] = []
    for index in range(draw(st.integers(1, 6))):
        name = f"p{index}"
        tied = draw(st.sampled_from([None, None, None, *drawn]))
        if tied is not None:
            drawn.append(DrawnParameter(name, tied.shape, tied.dtype, tied.tied_to or tied.name))
        else:
            dtype = draw(st.sampled_from(DTYPES))
            drawn.append(DrawnParameter(name, draw(shapes(world)), dtype))
    return tuple(drawn)


@st.composite
def param_groups(draw: st.DrawFn) -> tuple[ParamGroup, ...]:
    """One to four units with one to four parameters each, named as torch would."""
    sizes = draw(st.lists(st.lists(shapes(), min_size=1, max_size=4), min_size=1, max_size=4))
    return tuple(
        ParamGroup(
            fqn=f"blocks.{unit}",
            parameters=tuple(
                Parameter(fqn=f"blocks.{unit}.p{index}", shape=shape)
                for index, shape in enumerate(unit_shapes)
            ),
        )
        for unit, unit_shapes in enumerate(sizes)
    )


@st.composite
def unit_trees(draw: st.DrawFn, depth: int = 3) -> dict[str, tuple[str, ...]]:
    """Units in units, from the root: each unit's name with those that lie directly in it."""
    tree: dict[str, tuple[str, ...]] = {}
    ahead = [(ROOT, 0)]
    while ahead:
        name, level = ahead.pop()
        number = draw(st.integers(0, 3 if level < depth else 0))
        prefix = "" if name == ROOT else f"{name}."
        tree[name] = tuple(f"{prefix}{index}" for index in range(number))
        ahead += [(inner, level + 1) for inner in tree[name]]
    return tree


def meshes(most: int = 16) -> st.SearchStrategy[Mesh]:
    """Meshes of replicas and shards with at most `most` ranks."""
    sizes = st.sampled_from(
        [(r, s) for r in range(1, most + 1) for s in range(1, most + 1) if r * s <= most]
    )
    return sizes.map(lambda size: Mesh(dp_replicate=size[0], dp_shard=size[1]))
