"""Resharding by its laws, in every layout that a checkpoint has. Each wanted element is read once,
padding never. From n to m to n ranks is the identity but for padding."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.analysis.checkpoints.pieces import Files, by_rows, everywhere, flat, whole
from zsim.analysis.checkpoints.reshard import CheckpointError, reads
from zsim.ir.sharding import reshard

PAD = -1
RANKS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13])
SHAPES = st.lists(
    st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5
)
"""Shapes of which many have fewer rows than there are ranks, or a prime number of them."""

Cut = Callable[[list[tuple[int, ...]], int], Files]


def in_one_buffer(shapes: list[tuple[int, ...]], num_ranks: int) -> Files:
    return flat([[prod(shape) for shape in shapes]], num_ranks)


def in_two_buffers(shapes: list[tuple[int, ...]], num_ranks: int) -> Files:
    numels = [prod(shape) for shape in shapes]
    return flat([numels[:1], numels[1:]], num_ranks)


def as_deepspeed_stages_1_and_2(shapes: list[tuple[int, ...]], num_ranks: int) -> Files:
    return flat([[prod(shape) for shape in shapes]], num_ranks, alignment=2)


def as_deepspeed_stage_3(shapes: list[tuple[int, ...]], num_ranks: int) -> Files:
    return flat([[prod(shape)] for shape in shapes], num_ranks)


def in_turn(shapes: list[tuple[int, ...]], num_ranks: int) -> Files:
    numels = [prod(shape) for shape in shapes]
    return whole(numels, [index % num_ranks for index in range(len(numels))], num_ranks)


CUTS: list[Cut] = [
    by_rows, in_one_buffer, in_two_buffers, as_deepspeed_stages_1_and_2, as_deepspeed_stage_3,
    in_turn,
]


def contents(files: Files) -> list[list[tuple[int, int] | int]]:
    """Files whose elements are (parameter, index), with padding between and behind them."""
    made = []
    for pieces in files:
        size = max((piece.offset + piece.interval.numel for piece in pieces), default=0)
        data: list[tuple[int, int] | int] = [PAD] * (size + 1)
        for piece in pieces:
            for index in range(piece.interval.numel):
                assert data[piece.offset + index] == PAD
                data[piece.offset + index] = (piece.parameter, piece.interval.start + index)
        made.append(data)
    return made


def moved(
    data: list[list[tuple[int, int] | int]], saved: Files, wanted: Files
) -> list[list[tuple[int, int] | int]]:
    """Files of `wanted` filled from `data`, those of `saved`, read by read; no element twice."""
    made: list[list[tuple[int, int] | int]] = [[PAD] * len(each) for each in contents(wanted)]
    for read in reads(saved, wanted):
        for index in range(read.interval.numel):
            assert made[read.rank][read.destination + index] == PAD
            made[read.rank][read.destination + index] = data[read.file][read.source + index]
    return made


@pytest.mark.parametrize("cut", CUTS)
@given(shapes=SHAPES, num_ranks=RANKS)
def test_files_hold_each_element_once(
    cut: Cut, shapes: list[tuple[int, ...]], num_ranks: int
) -> None:
    held = [element for data in contents(cut(shapes, num_ranks)) for element in data]
    elements = [(at, index) for at, shape in enumerate(shapes) for index in range(prod(shape))]
    assert sorted(element for element in held if isinstance(element, tuple)) == elements


@pytest.mark.parametrize("cut", CUTS)
@given(shapes=SHAPES, old=RANKS, new=RANKS)
def test_from_n_to_m_to_n_ranks_is_the_identity_but_for_padding(
    cut: Cut, shapes: list[tuple[int, ...]], old: int, new: int
) -> None:
    saved, wanted = cut(shapes, old), cut(shapes, new)
    there = moved(contents(saved), saved, wanted)
    assert there == contents(wanted)
    assert moved(there, wanted, saved) == contents(saved)


@given(
    shapes=SHAPES, old=RANKS, new=RANKS, before=st.sampled_from(CUTS), after=st.sampled_from(CUTS)
)
def test_a_checkpoint_of_one_layout_can_be_read_in_another(
    shapes: list[tuple[int, ...]], old: int, new: int, before: Cut, after: Cut
) -> None:
    saved, wanted = before(shapes, old), after(shapes, new)
    assert moved(contents(saved), saved, wanted) == contents(wanted)


@given(numel=st.integers(1, 200), old=RANKS, new=RANKS)
def test_of_one_buffer_the_reads_are_the_transfers_of_shard_math(
    numel: int, old: int, new: int
) -> None:
    made = reads(flat([[numel]], old), flat([[numel]], new))
    assert [(read.file, read.rank, read.interval) for read in made] == [
        (move.source, move.destination, move.interval) for move in reshard(numel, old=old, new=new)
    ]


@given(shapes=SHAPES, old=RANKS, new=RANKS)
def test_replicated_parameters_are_read_whole_by_every_rank(
    shapes: list[tuple[int, ...]], old: int, new: int
) -> None:
    wanted = everywhere(shapes, new)
    made = reads(in_turn(shapes, old), wanted)
    assert sum(read.interval.numel for read in made) == new * sum(map(prod, shapes))
    assert all(read.stored == read.interval.numel for read in made)


def test_deepspeed_pads_groups_to_twice_the_ranks() -> None:
    """7 parameters on two ranks: 8 elements, 4 each; on four ranks 8, 2 each."""
    assert [[p.interval.numel for p in file] for file in flat([[7]], 2, alignment=2)] == [[4], [3]]
    assert [[p.interval.numel for p in file] for file in flat([[5]], 4, alignment=2)] == [
        [2], [2], [1], [],
    ]


def test_a_lost_file_is_told_by_the_elements_that_it_had() -> None:
    saved = by_rows([(6, 2), (4,)], 3)
    with pytest.raises(CheckpointError) as caught:
        reads((saved[0], (), saved[2]), by_rows([(6, 2), (4,)], 2))
    assert str(caught.value) == (
        "rank 0, parameter 0: expected elements 4 to 6 in some file, found no file that has them"
    )
