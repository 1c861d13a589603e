"""The caching allocator against rules worked out by hand, against a naive one that scans all
blocks, and its laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.memory.allocator.blocks import Block
from zsim.memory.allocator.caching_allocator import (
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    SMALL_SIZE,
    CachingAllocator,
    DeviceFullError,
    segment_size,
)

KIB, MIB = 2**10, 2**20
SIZES = st.one_of(
    st.integers(1, 4096),
    st.sampled_from([
        512, SMALL_SIZE, SMALL_SIZE + 1, 10 * MIB - 512, 10 * MIB, 19 * MIB, 19 * MIB - 512,
        20 * MIB,
    ]),
    st.integers(1, 40 * MIB),
)
STEPS = st.lists(
    st.tuples(SIZES, st.sampled_from(["compute", "all_gather"]), st.integers(0, 10**6)), max_size=60
)
"""(bytes, stream, choice): an even choice allocates, an odd one frees one of the live blocks."""


def round_size(nbytes: int) -> int:
    """`nbytes`, at least 1, rounded up to 512 B."""
    return -(-nbytes // 512) * 512


def pieces(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """(size, whether it lives) of the blocks of each segment."""
    return [
        [(block.size, block.requested > 0) for block in segment] for segment in allocator.segments()
    ]


def state(allocator: CachingAllocator) -> tuple[int, int, int]:
    return allocator.reserved, allocator.active, allocator.allocated


def run(
    allocator: CachingAllocator, steps: list[tuple[int, str, int]], live: list[Block] | None = None
):
    """Do `steps`; yields the live blocks after each."""
    live = [] if live is None else live
    for nbytes, stream, choice in steps:
        if choice % 2 and live:
            allocator.free(live.pop(choice % len(live)))
        else:
            live.append(allocator.allocate(nbytes, stream=stream))
        yield live


@pytest.mark.parametrize(("nbytes", "rounded", "segment"), [
    (1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB),
    (MIB + 1, MIB + 512, 20 * MIB), (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
    (10 * MIB - 1, 10 * MIB, 10 * MIB), (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    (30 * MIB, 30 * MIB, 30 * MIB),
])
def test_a_size_is_rounded_to_512_bytes_and_its_segment_is_2_mib_20_mib_or_its_own(
    nbytes, rounded, segment
):
    allocator = CachingAllocator()
    block = allocator.allocate(nbytes, stream="compute")
    assert (round_size(nbytes), segment_size(rounded), allocator.reserved) == (
        rounded, segment, segment,
    )
    assert block.size - rounded in (0, segment - rounded)


def test_a_small_block_is_split_off_when_512_bytes_remain():
    allocator = CachingAllocator()
    allocator.allocate(MIB, stream="compute")
    allocator.allocate(MIB - 512, stream="compute")
    assert pieces(allocator) == [[(MIB, True), (MIB - 512, True), (512, False)]]
    allocator.allocate(3, stream="compute")
    assert pieces(allocator) == [[(MIB, True), (MIB - 512, True), (512, True)]]
    assert state(allocator) == (2 * MIB, 2 * MIB, 2 * MIB - 512 + 3)


def test_a_large_block_is_split_off_only_when_more_than_1_mib_remains():
    allocator = CachingAllocator()
    allocator.allocate(19 * MIB, stream="compute")
    assert (pieces(allocator), allocator.active) == ([[(20 * MIB, True)]], 20 * MIB)
    allocator.allocate(19 * MIB - 512, stream="compute")
    assert pieces(allocator)[1] == [(19 * MIB - 512, True), (MIB + 512, False)]


def test_the_smallest_free_block_that_is_large_enough_is_used_and_of_equal_ones_the_lowest():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(nbytes * MIB, stream="compute") for nbytes in (16, 12, 14, 12)]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(11 * MIB, stream="compute") is blocks[1]
    assert allocator.allocate(11 * MIB, stream="compute") is blocks[3]
    assert allocator.allocate(11 * MIB, stream="compute") is blocks[2]
    assert allocator.reserved == 54 * MIB


def test_a_block_returns_to_the_pool_of_its_own_stream_and_size_class_and_no_other_stream_uses_it():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB, stream="all_gather"))
    allocator.allocate(12 * MIB, stream="compute")
    allocator.allocate(MIB, stream="all_gather")
    assert {name: pool.reserved for name, pool in allocator.pools.items()} == {
        ("all_gather", False): 12 * MIB, ("compute", False): 12 * MIB,
        ("all_gather", True): 2 * MIB,
    }


def test_a_freed_block_becomes_one_with_its_free_neighbours_on_both_sides():
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(4 * MIB, stream="compute") for _ in range(3))
    assert pieces(allocator) == [[(4 * MIB, True)] * 3 + [(8 * MIB, False)]]
    allocator.free(first)
    allocator.free(third)
    assert pieces(allocator) == [[(4 * MIB, False), (4 * MIB, True), (12 * MIB, False)]]
    allocator.free(second)
    assert pieces(allocator) == [[(20 * MIB, False)]]


def test_fragments_that_no_block_fits_into_make_reserved_grow_past_what_lives():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(5 * MIB, stream="compute") for _ in range(8)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(6 * MIB, stream="compute")
    assert state(allocator) == (60 * MIB, 26 * MIB, 26 * MIB)


def test_an_expandable_segment_grows_by_pages_and_blocks_reach_across_them():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(12 * MIB, stream="compute")
    assert pieces(allocator) == [[(12 * MIB, True), (8 * MIB, False)]]
    allocator.allocate(12 * MIB, stream="compute")
    assert pieces(allocator) == [[(12 * MIB, True), (12 * MIB, True), (16 * MIB, False)]]
    allocator.allocate(MIB, stream="compute")
    assert [segment[0].pool.page for segment in allocator.segments()] == [20 * MIB, 2 * MIB]
    assert allocator.reserved == 42 * MIB


def test_an_expandable_segment_is_mapped_only_as_far_as_its_last_free_block_is_short():
    allocator = CachingAllocator(expandable_segments=True, capacity=40 * MIB)
    allocator.allocate(12 * MIB, stream="compute")
    allocator.allocate(
        24 * MIB, stream="compute"
    )  # 8 MiB of the first page are free, so that one more page does
    assert pieces(allocator) == [[(12 * MIB, True), (24 * MIB, True), (4 * MIB, False)]]
    assert allocator.reserved == 40 * MIB


def test_what_releasing_gives_back_is_told_piece_by_piece():
    allocator = CachingAllocator()
    small, large = (
        allocator.allocate(1, stream="compute"), allocator.allocate(30 * MIB, stream="all_gather"),
    )
    allocator.allocate(2 * MIB, stream="compute")
    allocator.free(small)
    allocator.free(large)
    released = [(address, nbytes, pool.stream) for address, nbytes, pool in allocator.release()]
    assert released == [
        (small.address, 2 * MIB, "compute"), (large.address, 30 * MIB, "all_gather")
    ]
    assert allocator.release() == ()


def test_in_an_expandable_segment_a_remainder_of_512_bytes_is_split_off_a_large_block():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(20 * MIB - 512, stream="compute")
    assert pieces(allocator) == [[(20 * MIB - 512, True), (512, False)]]


def test_the_end_of_an_expandable_segment_is_used_after_a_larger_hole():
    allocator = CachingAllocator(expandable_segments=True)
    hole = allocator.allocate(9 * MIB, stream="compute")
    allocator.allocate(3 * MIB, stream="compute")
    assert pieces(allocator) == [[(9 * MIB, True), (3 * MIB, True), (8 * MIB, False)]]
    allocator.free(hole)
    assert allocator.allocate(6 * MIB, stream="compute").address == hole.address
    assert pieces(allocator) == [
        [(6 * MIB, True), (3 * MIB, False), (3 * MIB, True), (8 * MIB, False)]
    ]


def test_releasing_gives_back_whole_free_segments_and_keeps_those_in_use():
    allocator = CachingAllocator()
    whole, part = (
        allocator.allocate(30 * MIB, stream="compute"),
        allocator.allocate(4 * MIB, stream="compute"),
    )
    allocator.free(whole)
    allocator.release()
    assert (pieces(allocator), allocator.reserved) == (
        [[(4 * MIB, True), (16 * MIB, False)]], 20 * MIB,
    )
    allocator.free(part)
    allocator.release()
    assert (pieces(allocator), state(allocator)) == ([], (0, 0, 0))


def test_releasing_unmaps_whole_free_pages_whose_hole_is_mapped_again_first():
    allocator = CachingAllocator(expandable_segments=True)
    low, middle, high = (
        allocator.allocate(nbytes * MIB, stream="compute") for nbytes in (10, 50, 20)
    )
    allocator.free(middle)
    allocator.release()
    assert pieces(allocator) == [[(10 * MIB, True), (10 * MIB, False)], [(20 * MIB, True)]]
    again = allocator.allocate(15 * MIB, stream="compute")
    assert again.address == low.address + 10 * MIB
    assert high.address == low.address + 60 * MIB
    assert pieces(allocator) == [
        [(10 * MIB, True), (15 * MIB, True), (15 * MIB, False)], [(20 * MIB, True)]
    ]
    assert allocator.reserved == 60 * MIB


def test_a_full_device_has_the_cache_released_before_it_is_called_full():
    allocator = CachingAllocator(capacity=40 * MIB)
    allocator.free(allocator.allocate(20 * MIB, stream="compute"))
    allocator.allocate(30 * MIB, stream="all_gather")
    assert (allocator.num_releases, allocator.reserved) == (1, 30 * MIB)
    with pytest.raises(DeviceFullError, match="expected 20,971,520 B within 41,943,040 B, found "
                                              "31,457,280 B reserved"):
        allocator.allocate(20 * MIB, stream="compute")


class Naive:
    """The rules without any index: segments as lists of [address, size, requested], scanned from
    end to end."""

    def __init__(self) -> None:
        self.segments: list[tuple[tuple[str, bool], list[list[int]]]] = []
        self.top = 0

    def allocate(self, nbytes: int, stream: str) -> tuple[int, int]:
        size = round_size(nbytes)
        pool = (stream, size <= MIB)
        fits = [
            (piece[1], piece[0], blocks)
            for name, blocks in self.segments
            for piece in blocks
            if name == pool and not piece[2] and piece[1] >= size
        ]
        if not fits:
            space = (
                2 * MIB
                if size <= MIB
                else 20 * MIB
                if size < 10 * MIB
                else -(-size // (2 * MIB)) * 2 * MIB
            )
            self.segments.append((pool, [[self.top, space, 0]]))
            fits = [(space, self.top, self.segments[-1][1])]
            self.top += space
        length, address, blocks = min(fits, key=lambda fit: fit[:2])
        position = next(index for index, piece in enumerate(blocks) if piece[0] == address)
        if length - size >= 512 if pool[1] else length - size > MIB:
            blocks.insert(position + 1, [address + size, length - size, 0])
            blocks[position][1] = size
        blocks[position][2] = nbytes
        return address, blocks[position][1]

    def free(self, address: int) -> None:
        for _, blocks in self.segments:
            for piece in blocks:
                if piece[0] == address and piece[2]:
                    piece[2] = 0
            for index in range(len(blocks) - 1, 0, -1):
                if not blocks[index][2] and not blocks[index - 1][2]:
                    blocks[index - 1][1] += blocks.pop(index)[1]


@given(STEPS)
def test_every_block_lies_where_the_naive_allocator_puts_it(steps):
    allocator, naive = CachingAllocator(), Naive()
    base, count = 0x5000_0000_0000, 0
    placed: list[int] = []
    for live in run(allocator, steps):
        if len(live) > count:
            nbytes, stream = steps[len(placed)][:2]
            assert naive.allocate(nbytes, stream) == (live[-1].address - base, live[-1].size)
        else:
            addresses = {block.address - base for block in live}
            gone = {p[0] for _, blocks in naive.segments for p in blocks if p[2]} - addresses
            for address in gone:
                naive.free(address)
        placed.append(0)
        count = len(live)
    assert pieces(allocator) == [[(p[1], p[2] > 0) for p in blocks] for _, blocks in naive.segments]


def check(allocator: CachingAllocator, live: list[Block]) -> None:
    """Blocks tile their segments without overlap, no two free ones are neighbours, and all sums
    agree."""
    segments = sorted(allocator.segments(), key=lambda segment: segment[0].address)
    end = 0
    for segment in segments:
        assert segment[0].address >= end
        for block, following in zip(segment, segment[1:], strict=False):
            assert (block.address + block.size, block.next) == (following.address, following)
            assert block.requested or following.requested
        end = segment[-1].address + segment[-1].size
    blocks = [block for segment in segments for block in segment]
    assert {id(block) for block in blocks if block.requested} == {id(block) for block in live}
    assert sum(block.size for block in blocks) == allocator.reserved
    assert allocator.reserved == sum(pool.reserved for pool in allocator.pools.values())
    for pool in allocator.pools.values():
        free = [b for b in blocks if b.pool is pool and not b.requested]
        assert pool.free == [b.sort_key for b in sorted(free, key=lambda b: (b.size, b.address))]
        assert pool.blocks == {b.sort_key: b for b in free}
    assert not any(block.sort_key for block in live)
    assert allocator.active == sum(block.size for block in live)
    assert allocator.allocated == sum(block.requested for block in live)
    assert allocator.reserved >= allocator.active >= allocator.allocated


@given(STEPS, st.booleans())
def test_blocks_tile_their_segments_and_free_ones_have_no_free_neighbour_after_every_step(
    steps, expandable
):
    allocator, reserved = CachingAllocator(expandable_segments=expandable), 0
    for live in run(allocator, steps):
        check(allocator, live)
        assert allocator.reserved >= reserved
        reserved = allocator.reserved


@given(STEPS, st.booleans())
def test_the_peak_is_the_state_with_most_active_bytes_for_the_first_time(steps, expandable):
    allocator, highest, most = CachingAllocator(expandable_segments=expandable), (0, 0, 0), 0
    for _ in run(allocator, steps):
        if allocator.active > highest[1]:
            highest = state(allocator)
        most = max(most, allocator.reserved)
    peak = allocator.peak
    assert (peak.active, peak.allocated) == highest[1:]
    assert peak.most_reserved == most


@given(STEPS, st.booleans(), st.integers(1, 7))
def test_the_same_holds_when_the_cache_is_released_now_and_then(steps, expandable, every):
    allocator = CachingAllocator(expandable_segments=expandable)
    for index, live in enumerate(run(allocator, steps)):
        if index % every == 0:
            allocator.release()
        check(allocator, live)


@given(STEPS, st.booleans())
def test_when_everything_is_freed_each_segment_is_one_free_block_and_a_release_leaves_nothing(
    steps, expandable
):
    allocator = CachingAllocator(expandable_segments=expandable)
    live = ([], *run(allocator, steps))[-1]
    for block in live:
        allocator.free(block)
    assert all(len(segment) == 1 and not segment[0].requested for segment in allocator.segments())
    assert (allocator.active, allocator.allocated) == (0, 0)
    allocator.release()
    assert (list(allocator.segments()), allocator.reserved) == ([], 0)


@given(st.lists(SIZES, max_size=40))
def test_expandable_segments_reserve_the_live_bytes_rounded_up_to_a_page_when_nothing_is_freed(
    sizes
):
    allocator = CachingAllocator(expandable_segments=True)
    for nbytes in sizes:
        allocator.allocate(nbytes, stream="compute")
    rounded = [round_size(nbytes) for nbytes in sizes]
    small, large = (
        sum(size for size in rounded if (size <= SMALL_SIZE) is kind) for kind in (True, False)
    )
    expected = (
        -(-small // SMALL_SEGMENT) * SMALL_SEGMENT + -(-large // LARGE_SEGMENT) * LARGE_SEGMENT
    )
    assert state(allocator) == (expected, sum(rounded), sum(sizes))


@given(STEPS, st.booleans(), st.integers(1, 80))
def test_a_capacity_is_never_exceeded_and_nothing_is_refused_before_a_release(
    steps, expandable, mebibytes
):
    allocator = CachingAllocator(expandable_segments=expandable, capacity=mebibytes * MIB)
    try:
        for live in run(allocator, steps):
            check(allocator, live)
            assert allocator.reserved <= mebibytes * MIB
    except DeviceFullError:
        assert allocator.num_releases > 0


def whole(allocator: CachingAllocator) -> tuple[object, ...]:
    """All that an allocator has, with the addresses."""
    return (
        *state(allocator), allocator.taken, allocator.freed,
        [(b.address, b.size, b.requested) for blocks in allocator.segments() for b in blocks],
        {key: pool.free for key, pool in allocator.pools.items()},
        {key: [at for at, _ in pool.unmapped] for key, pool in allocator.pools.items()},
        replace(allocator.peak),
    )


@given(STEPS, STEPS, st.booleans())
def test_a_copy_goes_on_as_the_allocator_does_and_neither_moves_the_other(
    before, after, expandable
):
    allocator = CachingAllocator(expandable_segments=expandable)
    live = ([], *run(allocator, before))[-1]
    copy, twins = allocator.copy()
    copied, own = whole(allocator), [twins[block] for block in live]
    assert whole(copy) == copied
    for living in run(copy, after, own):
        check(copy, living)
    assert whole(allocator) == copied
    for living in run(allocator, after, live):
        check(allocator, living)
    assert whole(copy) == whole(allocator)


@pytest.mark.parametrize("index", [0, 1])
def test_a_segment_of_which_a_part_lives_is_not_given_back(index: int) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(3 * 2**20, "compute") for _ in range(2)]
    allocator.free(blocks[index])
    before = allocator.reserved
    assert (allocator.release(), allocator.reserved) == ((), before)
    allocator.free(blocks[1 - index])
    assert [nbytes for _, nbytes, _ in allocator.release()] == [before]
    assert allocator.reserved == 0
