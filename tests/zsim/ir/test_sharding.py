"""Shard math by its laws: every element held once, padding never read, any change of shards
reversible."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.ir.sharding import (
    Dim0Layout,
    FlatLayout,
    Interval,
    Piece,
    Transfer,
    greedy_owners,
    padded_size,
    reshard,
    shard,
    shard_size,
    shards,
)
from zsim.models.spec import Parameter, ParamGroup
from zsim.strategies.flat_buffer.groups import regroup
from zsim.testing.strategies import numels, param_groups, shapes, world_sizes


def gathered(local: list[list[int | None]], layout: FlatLayout) -> list[int | None]:
    """Elements that an all-gather of the padded shards delivers, without the padding."""
    return [element for row in local for element in row][: layout.numel]


def split(elements: list[int], layout: FlatLayout) -> list[list[int | None]]:
    """The padded shard of every rank; None is padding."""
    padded: list[int | None] = [*elements, *([None] * (layout.padded_numel - layout.numel))]
    size = layout.shard_numel
    return [padded[rank * size : (rank + 1) * size] for rank in range(layout.num_shards)]


@given(n=numels(), count=world_sizes())
def test_shards_hold_each_element_once_and_in_order(n: int, count: int) -> None:
    held = [index for part in shards(n, count) for index in range(part.start, part.stop)]
    assert held == list(range(n))


@given(n=numels(), count=world_sizes())
def test_no_shard_is_larger_than_the_padded_one(n: int, count: int) -> None:
    assert padded_size(n, count) == shard_size(n, count) * count
    assert 0 <= padded_size(n, count) - n < max(1, count)
    assert all(part.numel <= shard_size(n, count) for part in shards(n, count))


@given(n=numels(), count=world_sizes())
def test_shards_follow_the_rule_of_torch_chunk(n: int, count: int) -> None:
    size = -(-n // count)
    chunks = [min(size, n - start) for start in range(0, n, size)] if n else []
    assert [part.numel for part in shards(n, count)] == chunks + [0] * (count - len(chunks))


def test_with_fewer_elements_than_ranks_the_last_shards_are_empty() -> None:
    assert shards(3, 5) == (
        Interval(0, 1), Interval(1, 2), Interval(2, 3), Interval(3, 3), Interval(3, 3),
    )


def test_five_elements_on_four_ranks_leave_the_last_rank_empty() -> None:
    assert shards(5, 4) == (Interval(0, 2), Interval(2, 4), Interval(4, 5), Interval(5, 5))


def test_nothing_is_shared_out_as_nothing() -> None:
    assert shards(0, 3) == (Interval(0, 0),) * 3


@given(shape=shapes(), count=world_sizes())
def test_rows_of_a_dim0_layout_add_up_to_the_parameter(shape: tuple[int, ...], count: int) -> None:
    layout = Dim0Layout(shape=shape, num_shards=count)
    numel = Parameter(fqn="p", shape=shape).numel
    assert sum(layout.local_numel(rank) for rank in range(count)) == numel
    assert layout.padded_numel == layout.shard_numel * count >= numel
    assert all(layout.local_numel(rank) <= layout.shard_numel for rank in range(count))


def test_a_dim0_layout_pads_rows_and_not_elements() -> None:
    layout = Dim0Layout(shape=(5, 3), num_shards=4)
    assert (layout.shard_numel, layout.padded_numel) == (6, 24)
    assert [layout.local_numel(rank) for rank in range(4)] == [6, 6, 3, 0]


@given(sizes=st.lists(numels(), max_size=6), count=world_sizes())
def test_the_pieces_of_a_flat_layout_hold_each_parameter_once(sizes: list[int], count: int) -> None:
    layout = FlatLayout(numels=tuple(sizes), num_shards=count)
    held: list[list[int]] = [[] for _ in sizes]
    for rank in range(count):
        for piece in layout.pieces(rank):
            held[piece.parameter] += range(piece.interval.start, piece.interval.stop)
    assert held == [list(range(size)) for size in sizes]


@given(sizes=st.lists(numels(), max_size=6), count=world_sizes())
def test_a_piece_lies_in_its_rank_s_shard_where_the_flat_buffer_has_it(
    sizes: list[int], count: int
) -> None:
    layout = FlatLayout(numels=tuple(sizes), num_shards=count)
    local = split(list(range(layout.numel)), layout)
    for rank in range(count):
        for piece in layout.pieces(rank):
            start = sum(sizes[: piece.parameter])
            elements = local[rank][piece.offset : piece.offset + piece.interval.numel]
            assert elements == list(
                range(start + piece.interval.start, start + piece.interval.stop)
            )


@given(sizes=st.lists(numels(), max_size=6), count=world_sizes())
def test_padding_is_never_read_back(sizes: list[int], count: int) -> None:
    layout = FlatLayout(numels=tuple(sizes), num_shards=count)
    assert gathered(split(list(range(layout.numel)), layout), layout) == list(range(layout.numel))
    assert all(
        piece.offset + piece.interval.numel <= layout.local(r).numel for r in range(count)
        for piece in layout.pieces(r)
    )


def test_a_flat_layout_cuts_across_parameters() -> None:
    layout = FlatLayout(numels=(5, 0, 4), num_shards=2)
    assert layout.pieces(0) == (Piece(0, Interval(0, 5), 0),)
    assert layout.pieces(1) == (Piece(2, Interval(0, 4), 0),)
    assert FlatLayout(numels=(2, 4), num_shards=2).pieces(0) == (
        Piece(0, Interval(0, 2), 0), Piece(1, Interval(0, 1), 2),
    )


def moved(local: list[list[int]], n: int, *, old: int, new: int) -> list[list[int]]:
    """The shards after the transfers of `reshard`, read from and written to local offsets."""
    out: list[list[int]] = [[] for _ in range(new)]
    for transfer in reshard(n, old=old, new=new):
        start = shard(n, num_shards=old, rank=transfer.source).start
        begin, end = transfer.interval.start - start, transfer.interval.stop - start
        out[transfer.destination] += local[transfer.source][begin:end]
    return out


@given(n=numels(), old=world_sizes(), new=world_sizes())
def test_resharding_there_and_back_changes_nothing(n: int, old: int, new: int) -> None:
    before = [list(range(part.start, part.stop)) for part in shards(n, old)]
    after = moved(before, n, old=old, new=new)
    assert after == [list(range(part.start, part.stop)) for part in shards(n, new)]
    assert moved(after, n, old=new, new=old) == before


@given(n=numels(), count=world_sizes())
def test_resharding_to_the_same_number_moves_nothing_between_ranks(n: int, count: int) -> None:
    assert all(
        transfer.source == transfer.destination for transfer in reshard(n, old=count, new=count)
    )


def test_four_shards_become_two_by_pairs() -> None:
    assert reshard(8, old=4, new=2) == (
        Transfer(0, 0, Interval(0, 2)), Transfer(1, 0, Interval(2, 4)),
        Transfer(2, 1, Interval(4, 6)), Transfer(3, 1, Interval(6, 8)),
    )


@given(
    units=param_groups(),
    cap=st.one_of(st.sampled_from(["unit", "parameter"]), st.integers(1, 10_000)),
)
def test_regrouping_keeps_every_parameter_once_and_in_order(
    units: tuple[ParamGroup, ...], cap: str | int
) -> None:
    groups = regroup(units, granularity=cap, element_nbytes=4)  # type: ignore[arg-type]
    before = [parameter for unit in units for parameter in unit.parameters]
    assert [parameter for group in groups for parameter in group.parameters] == before
    assert len({group.fqn for group in groups}) == len(groups)


def test_a_bucket_closes_once_it_has_reached_its_cap() -> None:
    parameters = tuple(Parameter(fqn=f"p{index}", shape=(10,)) for index in range(5))
    units = (
        ParamGroup(fqn="a", parameters=parameters[:2]),
        ParamGroup(fqn="b", parameters=parameters[2:]),
    )
    assert regroup(units, granularity=100, element_nbytes=4) == (
        ParamGroup(fqn="p0", parameters=parameters[:3]),
        ParamGroup(fqn="p3", parameters=parameters[3:]),
    )
    assert regroup(units, granularity="unit") == units
    assert [group.fqn for group in regroup(units, granularity="parameter")] == [
        "p0", "p1", "p2", "p3", "p4"
    ]


@pytest.mark.parametrize(("sizes", "ranks", "owners"), [
    ((), 2, ()), ((4, 4, 4, 4), 2, (0, 1, 0, 1)), ((1, 10, 2, 9), 2, (0, 0, 1, 1)),
    ((5,), 3, (0,)), ((0, 0, 3), 2, (1, 1, 0)),
])
def test_greedy_owners_take_the_largest_first(
    sizes: tuple[int, ...], ranks: int, owners: tuple[int, ...]
) -> None:
    assert greedy_owners(sizes, num_ranks=ranks) == owners


@given(sizes=st.lists(numels(), max_size=20), ranks=world_sizes())
def test_greedy_ownership_is_uneven_by_at_most_the_largest_parameter(
    sizes: list[int], ranks: int
) -> None:
    totals = [0] * ranks
    for size, owner in zip(sizes, greedy_owners(sizes, num_ranks=ranks), strict=True):
        totals[owner] += size
    assert sum(totals) == sum(sizes)
    assert max(totals) - min(totals) <= max(sizes, default=0)
