"""Groups of the mesh: each kind of group tiles the ranks, and ranks share what their group's name
says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.ir.mesh import Mesh

meshes = st.builds(Mesh, dp_replicate=st.integers(1, 6), dp_shard=st.integers(1, 12))


@given(mesh=meshes, data=st.data())
def test_groups_tile_the_ranks(mesh, data):
    parts = [
        f"dp_shard{of}{n}" for n in range(1, mesh.dp_shard + 1) if mesh.dp_shard % n == 0
        for of in ":/"
    ]
    name = data.draw(st.sampled_from(["world", "dp_shard", "dp_replicate", *parts]))

    groups = mesh.groups(name)

    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    assert {len(group) for group in groups} == {mesh.size(name)}
    assert all(mesh.group(name, rank) == group for group in groups for rank in group)


@given(mesh=meshes)
def test_ranks_of_an_axis_share_all_other_coordinates(mesh):
    for rank in range(mesh.world_size):
        replicate, shard = mesh.coordinate(rank)
        assert [mesh.coordinate(other) for other in mesh.group("dp_shard", rank)] == [
            (replicate, index) for index in range(mesh.dp_shard)
        ]
        assert [mesh.coordinate(other) for other in mesh.group("dp_replicate", rank)] == [
            (index, shard) for index in range(mesh.dp_replicate)
        ]


@pytest.mark.parametrize(("name", "wanted"), [
    ("world", tuple(range(8))), ("dp_shard", (4, 5, 6, 7)), ("dp_shard:2", (6, 7)),
    ("dp_replicate", (2, 6)), ("dp_shard/2", (4, 6)), ("world/4", (2, 6)),
])
def test_rank_6_of_a_mesh_of_2_by_4_is_in(name, wanted):
    assert Mesh(dp_replicate=2, dp_shard=4).group(name, 6) == wanted


@pytest.mark.parametrize(
    "name",
    ["", "tp", "dp_shard:", "dp_shard:3", "dp_shard:0", "dp_shard:-2", "dp_shard:x", "dp_shard/3",
     "shape"],
)
def test_a_name_that_is_no_group_is_a_key_error(name):
    with pytest.raises(KeyError):
        Mesh(dp_replicate=2, dp_shard=4).group(name, 0)


@pytest.mark.parametrize(("mesh", "text"), [
    (Mesh(), "mesh of one rank"), (Mesh(dp_shard=4), "mesh dp_shard=4 (4 ranks)"),
    (Mesh(dp_replicate=2, dp_shard=4), "mesh dp_replicate=2 × dp_shard=4 (8 ranks)"),
])
def test_a_mesh_reads_as_its_axes(mesh, text):
    assert str(mesh) == text


@given(st.integers(1, 5), st.integers(1, 6))
def test_a_rank_is_in_its_group_at_its_place_and_groups_tile_the_world(replicate, shard):
    mesh = Mesh(dp_replicate=replicate, dp_shard=shard)
    parts = [f"dp_shard{of}{n}" for n in range(1, shard + 1) if shard % n == 0 for of in ":/"]
    for name in ("world", "dp_replicate", "dp_shard", *parts):
        for rank in range(mesh.world_size):
            assert mesh.group(name, rank)[mesh.position(name, rank)] == rank
        assert sorted(rank for group in mesh.groups(name) for rank in group) == list(
            range(mesh.world_size)
        )
