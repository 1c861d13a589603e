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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, takewhile

from zsim.errors import ZsimError

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

_FIRST_ADDRESS = 0x5000_0000_0000
_ADDRESS_SPACE = LARGE_SEGMENT * 2**16
"""Bytes of address space of an expandable segment; torch reserves 9/8 of the device's memory, the
replay more than any device has. Segments start at whole pages, so that addresses count pages."""


class DeviceFullError(ZsimError):
    """The device has no memory for a block even when all that is cached is given back."""

    exit_code = 1
    repeats = False
    """True if five micro-batches fill the device as any larger number does."""


def round_size(nbytes: int) -> int:
    """`nbytes`, at least 1, as the allocator counts them: rounded up to 512 B."""
    return -(-nbytes // MIN_BLOCK) * MIN_BLOCK


def segment_size(size: int) -> int:
    """Bytes that cudaMalloc is asked for when no free block holds the rounded `size`."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(slots=True, eq=False)
class Block:
    """`size` rounded bytes from `address`, of which `requested` were asked for (0: it is free);
    neighbours in the segment.

    Only in expandable segments a block may be address space without memory behind it: not `mapped`.
    """

    address: int
    size: int
    pool: Pool
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None
    mapped: bool = True


@dataclass(slots=True, eq=False)
class Pool:
    """The blocks of one stream and one class of size. `free` is sorted as torch's set is: by size,
    then by address."""

    stream: str
    small: bool
    page: int
    """The size of the pieces in which its expandable segment grows."""
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)
    """Address space that its expandable segment can still use, by address."""
    reserved: int = 0

    def put(self, block: Block) -> None:
        """`block` is free, or is address space, from now on."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: Block) -> None:
        """`block` is no longer among those that were put."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


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
    _next_address: int = _FIRST_ADDRESS

    def allocate(self, nbytes: int, stream: str) -> Block:
        """A live block for `nbytes`, at least 1, from the pool of `stream`: the best fit, or a new
        one from the device.

        DeviceFullError where `capacity` is exceeded although the cache was released.
        """
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL_SIZE
        pool = self.pools.get((stream, small)) or self._open(stream, small)
        free, index = pool.free, bisect_left(pool.free, (size,))
        if self.expandable_segments:
            index = _growing(free, index)
        block = free.pop(index)[2] if index < len(free) else self._grow(pool, size)
        remaining = block.size - size
        if remaining >= MIN_BLOCK if small or self.expandable_segments else remaining > SMALL_SIZE:
            rest = _cut(block, size)
            insort(free, (remaining, rest.address, rest))
        block.requested = nbytes
        self.active += block.size
        self.allocated += nbytes
        return block

    def free(self, block: Block) -> None:
        """`block` returns to its pool, one with its free neighbours."""
        self.active -= block.size
        self.allocated -= block.requested
        block.requested = 0
        self._settle(block)

    def release(self) -> tuple[tuple[int, int, Pool], ...]:
        """Give back what no live block needs, as torch.cuda.empty_cache does: segments that are
        free as a whole, and whole free pages of expandable ones. Returns (address, bytes, pool) of
        each piece."""
        freed: list[tuple[int, int, Pool]] = []
        for pool in self.pools.values():
            for _, _, block in tuple(pool.free):
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
        pools = {key: replace(pool, free=[], unmapped=[]) for key, pool in self.pools.items()}
        own, twins = replace(
            self, heads={}, pools=pools, taken=list(self.taken), freed=list(self.freed)
        ), dict[Block, Block]()
        for address, head in self.heads.items():
            pool, before = pools[head.pool.stream, head.pool.small], None
            for block in _chain(head):
                twin = Block(
                    block.address, block.size, pool, block.requested, before, None, block.mapped
                )
                if before is not None:
                    before.next = twin
                before = twins[block] = twin
            own.heads[address] = twins[head]
        for key, pool in self.pools.items():
            pools[key].free = [(size, at, twins[block]) for size, at, block in pool.free]
            pools[key].unmapped = [(at, twins[block]) for at, block in pool.unmapped]
        return own, twins

    def forget(self) -> None:
        """Let go of all blocks, after which nothing can be asked.

        Neighbours and pools hold one another. Only Python's collector would find that nobody needs
        them, and it hardly runs where one Program is planned after another.
        """
        for head in self.heads.values():
            for block in _chain(head):
                block.previous = None
        for pool in self.pools.values():
            pool.free.clear()
            pool.unmapped.clear()
        self.heads.clear()

    def segments(self) -> Iterator[tuple[Block, ...]]:
        """The blocks of each contiguous piece of reserved memory, by address; together they are
        `reserved` bytes."""
        for head in self.heads.values():
            for mapped, blocks in groupby(_chain(head), key=lambda block: block.mapped):
                if mapped:
                    yield tuple(blocks)

    @property
    def num_segments(self) -> int:
        """Contiguous pieces of reserved memory."""
        if not self.expandable_segments:
            return len(self.heads)
        return sum(1 for _ in self.segments())

    def _open(self, stream: str, small: bool) -> Pool:
        pool = self.pools[stream, small] = Pool(
            stream, small, SMALL_SEGMENT if small else LARGE_SEGMENT
        )
        return pool

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
            free = takewhile(lambda block: not block.requested, _chain(first))
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
            pool.put(_cut(space, nbytes))
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
        middle = block if begin == block.address else _cut(block, begin - block.address)
        if middle is not block:
            pool.put(block)
        if end < middle.address + middle.size:
            pool.put(_cut(middle, end - middle.address))
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
            _absorb(previous, block)
            block = previous
        if following is not None and not following.requested and following.mapped is mapped:
            pool.take(following)
            _absorb(block, following)
        if mapped:
            insort(pool.free, (block.size, block.address, block))
        else:
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


def _growing(free: list[tuple[int, int, Block]], index: int) -> int:
    """The index of the best fit in `free`, sorted by size, from `index` on. A block that address
    space follows counts as large as it can grow, so a larger one that cannot grow comes first."""
    while index + 1 < len(free) and _room(free[index + 1][2]) < _room(free[index][2]):
        index += 1
    return index


def _chain(head: Block) -> Iterator[Block]:
    """`head` and all blocks behind it."""
    block: Block | None = head
    while block is not None:
        yield block
        block = block.next


def _room(block: Block) -> int:
    """Bytes that the free `block` has, with what it can grow by."""
    return block.size + (0 if block.next is None or block.next.mapped else block.next.size)


def _cut(block: Block, size: int) -> Block:
    """Shorten `block` to `size`; the rest, a block behind it of the same kind."""
    following = block.next
    rest = Block(
        block.address + size, block.size - size, block.pool, 0, block, following, block.mapped
    )
    if following is not None:
        following.previous = rest
    block.next, block.size = rest, size
    return rest


def _absorb(block: Block, following: Block) -> None:
    """`block` grows over its neighbour `following`, which is no more."""
    block.size += following.size
    block.next = following.next
    if block.next is not None:
        block.next.previous = block
