"""Hypothesis strategies that several test files share: sizes, shapes and groups that are small,
awkward and legal."""

from __future__ import annotations

from hypothesis import strategies as st

from zsim.models.spec import Parameter, ParamGroup

num_shards = st.integers(1, 17)
"""Ranks of a group: one, primes and powers of two among them."""

numels = st.one_of(st.sampled_from([0, 1, 2, 3, 5, 7, 31, 97]), st.integers(0, 5000))
"""Element counts: none, one, primes, anything."""

shapes = st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple)
"""Shapes of parameters, empty ones and dim 0 smaller than the group included."""

collectives = st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
"""The ops that every collective library knows."""


@st.composite
def param_groups(draw: st.DrawFn) -> tuple[ParamGroup, ...]:
    """A few units with a few parameters each, named as torch would."""
    sizes = draw(st.lists(st.lists(shapes, min_size=1, max_size=4), min_size=1, max_size=4))
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
