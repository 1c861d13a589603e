"""torch's caching allocator for CUDA as a state machine: which bytes of the device it holds for
those that are asked for.

Constants and rules come from c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp of
torch 2.13 at default settings: no max_split_size, no garbage collection, no rounding to powers of
two. A free returns a block at once to the pool of its own stream. It knows no Program and no clock.
The addresses that cudaMalloc returns, which decide among free blocks of equal size, are assumed:
each segment lies above all earlier ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, takewhile

from zsim.errors import ZsimError
from zsim.ir.buffers import Buffer
from zsim.ir.ledger import allocated_again, not_live
from zsim.ir.ops import Alloc, Free, MemoryEvent
from zsim.memory.allocator.blocks import ADDRESS_BITS, Block, Pool, absorb, chain, cut

MIN_BLOCK = 512
"""Every size is rounded up to a multiple of this (kMinBlockSize)."""
SMALL_SIZE = 2**20
"""The largest rounded size that is served from a small pool (kSmallSize)."""
SMALL_SEGMENT = 2 * 2**20
"""Bytes of a small pool's segment, and of a page of its expandable segments (kSmallBuffer)."""
LARGE_SEGMENT = 20 * 2**20
"""Bytes of a large pool's segment for a size below `MIN_LARGE`, and of a page of its expandable
segments (large_segment_size)."""
MIN_LARGE = 10 * 2**20
"""Least size for which a segment is as large as the block, rounded up to `ROUND_LARGE`
(kMinLargeAlloc)."""
ROUND_LARGE = 2 * 2**20
"""The granularity of segments made for one large block (kRoundLarge)."""

_BELOW_BLOCK, _WHOLE_BLOCKS = MIN_BLOCK - 1, -MIN_BLOCK
_ONE = Buffer("block")
"""The buffer of a block that is asked for alone."""
_FIRST_ADDRESS = 0x5000_0000_0000
_ADDRESS_SPACE = LARGE_SEGMENT * 2**16
"""Bytes of address space of an expandable segment; torch reserves 9/8 of the device's memory, the
replay more than any device has. Segments start at whole pages, so that addresses count pages."""


class DeviceFullError(ZsimError):
    """The device has no memory for a block even when all that is cached is given back."""

    exit_code = 1
    repeats = False
    """True if five micro-batches fill the device as any larger number does."""


def segment_size(size: int) -> int:
    """Bytes that cudaMalloc is asked for when no free block holds the rounded `size`."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(slots=True)
class Peak:
    """The allocator's bytes when most were active for the first time, and the most that it had
    reserved."""

    active: int
    allocated: int
    most_reserved: int

    def rise(self, active: int, allocated: int) -> None:
        """The bytes at a higher point."""
        self.active, self.allocated = active, allocated


@dataclass(slots=True)
class CachingAllocator:
    """The state of the allocator on one device. Always `reserved` >= `active` >= `allocated`, in
    bytes."""

    expandable_segments: bool = False
    capacity: int | None = None
    """Bytes that the device has for it; None: as many as it asks for."""
    reserved: int = 0
    """Bytes taken from the device."""
    active: int = 0
    """Bytes of live blocks, which are rounded up and may hold a remainder too small to be split
    off."""
    allocated: int = 0
    """Bytes asked for by what lives."""
    num_releases: int = 0
    """Times that the device was full and the allocator gave all cached segments back to it (torch's
    num_alloc_retries)."""
    heads: dict[int, Block] = field(default_factory=dict)
    """The first block of each segment, by its address."""
    pools: dict[tuple[str, bool], Pool] = field(default_factory=dict)
    taken: list[tuple[int, int]] = field(default_factory=list)
    """(address, bytes) of each piece of memory as it was taken from the device."""
    freed: list[int] = field(default_factory=list)
    """Bytes of each piece of memory as it was given back."""
    peak: Peak = field(default_factory=lambda: Peak(0, 0, 0))
    """Since the beginning, or since `begin_peak`."""
    _next_address: int = _FIRST_ADDRESS

    def allocate(self, nbytes: int, stream: str) -> Block:
        """A live block for `nbytes`, at least 1, from the pool of `stream`: the best fit, or a new
        one from the device.

        DeviceFullError where `capacity` is exceeded although the cache was released.
        """
        live = dict[str, Block | None]()
        self.follow((Alloc(_ONE, "temporaries", nbytes),), stream, live)
        block = live[_ONE]
        assert block is not None
        return block

    def free(self, block: Block) -> None:
        """`block` returns to its pool, one with its free neighbours."""
        self.follow((Free(_ONE),), block.pool.stream, {_ONE: block})

    def follow(
        self, events: Iterable[MemoryEvent], stream: str, live: dict[str, Block | None]
    ) -> None:
        """Allocate from the pools of `stream`, and free, as `events` say, and note the peak; `live`
        has the blocks of live buffers, None for one of no bytes.

        ProgramError where a buffer is allocated twice or freed without being live; DeviceFullError
        as of `allocate`. Tens of thousands of events pass here, so all is one loop of local names.
        """
        pools, peak, expandable = self.pools, self.peak, self.expandable_segments
        small, large = pools.get((stream, True)), pools.get((stream, False))
        active, allocated, highest = self.active, self.allocated, peak.active
        try:
            for event in events:
                if type(event) is Alloc:
                    nbytes, buffer = event.nbytes, event.buffer
                    if buffer in live:
                        raise allocated_again(buffer)
                    if not nbytes:
                        live[buffer] = None
                        continue
                    size = (nbytes + _BELOW_BLOCK) & _WHOLE_BLOCKS
                    pool = small if size <= SMALL_SIZE else large
                    if pool is None:
                        pool = self._pool(stream, small=size <= SMALL_SIZE)
                    free = pool.free
                    index = bisect_left(free, size << ADDRESS_BITS)
                    if expandable:
                        index = pool.growing(index)
                    if index < len(free):
                        block = pool.blocks.pop(free.pop(index))
                    else:
                        self.active = active
                        block = self._grow(pool, size)
                    remaining = block.size - size
                    if remaining >= pool.least:
                        following, address = block.next, block.address + size
                        sort_key = remaining << ADDRESS_BITS | address
                        rest = pool.blocks[sort_key] = block.next = Block(
                            address, remaining, pool, 0, block, following, True, sort_key
                        )
                        if following is not None:
                            following.previous = rest
                        block.size = size
                        insort(free, sort_key)
                    else:
                        size += remaining
                    block.sort_key, block.requested = 0, nbytes
                    active += size
                    allocated += nbytes
                    live[buffer] = block
                else:
                    buffer = event.buffer
                    if buffer not in live:
                        raise not_live(buffer)
                    held = live.pop(buffer)
                    if held is None:
                        continue
                    if active > highest:  # it is highest before a free, or at the end
                        highest = active
                        peak.rise(active, allocated)
                    block, size, following, previous = held, held.size, held.next, held.previous
                    free, blocks = block.pool.free, block.pool.blocks
                    active -= size
                    allocated -= block.requested
                    block.requested = 0
                    if following is not None and (sort_key := following.sort_key):
                        del free[bisect_left(free, sort_key)], blocks[sort_key]
                        size += following.size
                        following = block.next = following.next
                        if following is not None:
                            following.previous = block
                    if previous is not None and (sort_key := previous.sort_key):
                        del free[bisect_left(free, sort_key)], blocks[sort_key]
                        size += previous.size
                        previous.next = following
                        if following is not None:
                            following.previous = previous
                        block = previous
                    block.size = size
                    block.sort_key = sort_key = size << ADDRESS_BITS | block.address
                    blocks[sort_key] = block
                    insort(free, sort_key)
        finally:
            self.active, self.allocated = active, allocated
        if active > highest:
            peak.rise(active, allocated)

    def begin_peak(self) -> None:
        """Forget the peak, as torch.cuda.reset_peak_memory_stats does."""
        self.peak = Peak(self.active, self.allocated, self.reserved)

    def release(self) -> tuple[tuple[int, int, Pool], ...]:
        """Give back what no live block needs, as torch.cuda.empty_cache does: segments that are
        free as a whole, and whole free pages of expandable ones. Returns (address, bytes, pool) of
        each piece."""
        freed: list[tuple[int, int, Pool]] = []
        for pool in self.pools.values():
            for block in [pool.blocks[sort_key] for sort_key in pool.free]:
                if self.expandable_segments:
                    freed += self._unmap(block)
                elif block.previous is None and block.next is None:
                    pool.take(block)
                    del self.heads[block.address]
                    self._count(pool, -block.size)
                    freed.append((block.address, block.size, pool))
        self.freed += [nbytes for _, nbytes, _ in freed]
        return tuple(freed)

    def copy(self) -> tuple[CachingAllocator, dict[Block, Block]]:
        """The allocator as it is, to go on in another way, and its own block for each of these."""
        pools = {
            key: replace(pool, free=[], blocks={}, unmapped=[]) for key, pool in self.pools.items()
        }
        own, twins = replace(
            self, heads={}, pools=pools, taken=list(self.taken), freed=list(self.freed),
            peak=replace(self.peak),
        ), dict[Block, Block]()
        for address, head in self.heads.items():
            pool, before = pools[head.pool.stream, head.pool.small], None
            for block in chain(head):
                twin = Block(
                    block.address, block.size, pool, block.requested, before, None, block.mapped
                )
                if before is not None:
                    before.next = twin
                before = twins[block] = twin
                if not block.requested:
                    pool.put(twin)
            own.heads[address] = twins[head]
        return own, twins

    def forget(self) -> None:
        """Let go of all blocks, after which nothing can be asked.

        Neighbours and pools hold one another. Only Python's collector would find that nobody needs
        them, and it hardly runs where one Program is planned after another.
        """
        for head in self.heads.values():
            for block in chain(head):
                block.previous = None
        for pool in self.pools.values():
            pool.free.clear()
            pool.blocks.clear()
            pool.unmapped.clear()
        self.heads.clear()

    def segments(self) -> Iterator[tuple[Block, ...]]:
        """The blocks of each contiguous piece of reserved memory, by address; together they are
        `reserved` bytes."""
        for head in self.heads.values():
            for mapped, blocks in groupby(chain(head), key=lambda block: block.mapped):
                if mapped:
                    yield tuple(blocks)

    @property
    def num_segments(self) -> int:
        """Contiguous pieces of reserved memory."""
        if not self.expandable_segments:
            return len(self.heads)
        return sum(1 for _ in self.segments())

    def _pool(self, stream: str, *, small: bool) -> Pool:
        """The pool of `stream` for small or large blocks."""
        splits = small or self.expandable_segments
        return self.pools.setdefault((stream, small), Pool(
            stream, small, SMALL_SEGMENT if small else LARGE_SEGMENT,
            MIN_BLOCK if splits else SMALL_SIZE + MIN_BLOCK,
        ))

    def _grow(self, pool: Pool, size: int) -> Block:
        """A free block of at least `size` with memory from the device, in no pool."""
        if block := self._from_device(pool, size):
            return block
        self.num_releases += 1
        self.release()
        if block := self._from_device(pool, size):
            return block
        state = f"{self.reserved:,} B reserved, {self.active:,} B of them live"
        raise DeviceFullError(
            where="allocator", expected=f"{size:,} B within {self.capacity:,} B", found=state
        )

    def _from_device(self, pool: Pool, size: int) -> Block | None:
        """Grow the pool as `_grow` does; None when the device is full."""
        block = self._expandable_block(pool, size) if self.expandable_segments else None
        have = 0 if block is None or not block.mapped else block.size
        nbytes = -(-(size - have) // pool.page) * pool.page if block else segment_size(size)
        if self.capacity is not None and self.reserved + nbytes > self.capacity:
            return None
        if block is None:
            block = self._new_segment(pool, nbytes, space=nbytes)
            self._taken(block, nbytes)
            return block
        while not block.mapped or block.size < size:
            missing = size - block.size if block.mapped else size
            block = self._map(block.next if block.mapped and block.next else block, missing)
        pool.take(block)
        return block

    def _expandable_block(self, pool: Pool, size: int) -> Block:
        """The lowest block in which `size` bytes fit when memory is mapped: free blocks and address
        space in a row."""
        for _, space in pool.unmapped:
            before = space.previous
            first = before if before is not None and not before.requested else space
            free = takewhile(lambda block: not block.requested, chain(first))
            if any(room >= size for room in accumulate(block.size for block in free)):
                return first
        space = self._new_segment(pool, _ADDRESS_SPACE, space=_ADDRESS_SPACE)
        space.mapped = False
        pool.put(space)
        return space

    def _map(self, space: Block, missing: int) -> Block:
        """Put memory behind the first pages of `space`, as many as `missing` bytes need; the free
        block that results."""
        pool = space.pool
        pool.take(space)
        nbytes = min(space.size, -(-missing // pool.page) * pool.page)
        if nbytes < space.size:
            pool.put(cut(space, nbytes))
        space.mapped = True
        self._taken(space, nbytes)
        return self._settle(space)

    def _unmap(self, block: Block) -> list[tuple[int, int, Pool]]:
        """Give back the whole pages of a free block, if there are any; what is left of it at both
        ends stays free."""
        pool, page = block.pool, block.pool.page
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return []
        pool.take(block)
        middle = block if begin == block.address else cut(block, begin - block.address)
        if middle is not block:
            pool.put(block)
        if end < middle.address + middle.size:
            pool.put(cut(middle, end - middle.address))
        middle.mapped = False
        self._count(pool, begin - end)
        self._settle(middle)
        return [(begin, end - begin, pool)]

    def _settle(self, block: Block) -> Block:
        """Put `block`, which is not live, into its pool, one with neighbours of its kind; what it
        has become."""
        pool, mapped, previous, following = block.pool, block.mapped, block.previous, block.next
        if previous is not None and not previous.requested and previous.mapped is mapped:
            pool.take(previous)
            absorb(previous, block)
            block = previous
        if following is not None and not following.requested and following.mapped is mapped:
            pool.take(following)
            absorb(block, following)
        pool.put(block)
        return block

    def _new_segment(self, pool: Pool, nbytes: int, *, space: int) -> Block:
        head = self.heads[self._next_address] = Block(self._next_address, nbytes, pool)
        self._next_address += space
        return head

    def _taken(self, block: Block, nbytes: int) -> None:
        self.taken.append((block.address, nbytes))
        self._count(block.pool, nbytes)

    def _count(self, pool: Pool, nbytes: int) -> None:
        self.reserved += nbytes
        pool.reserved += nbytes
        self.peak.most_reserved = max(self.peak.most_reserved, self.reserved)
