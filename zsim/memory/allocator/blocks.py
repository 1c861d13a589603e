"""Blocks of memory in the order of their addresses, and pools of free ones in the order of size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

ADDRESS_BITS = 52
"""Bits of an address. No replay takes 4 PiB, though no address is used again."""


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
    sort_key: int = 0
    """Size and address of a free block as one number, by which it is sorted; 0 for any other."""


@dataclass(slots=True, eq=False)
class Pool:
    """The blocks of one stream and one class of size. Free ones are in the order of torch's set: by
    size, then by address."""

    stream: str
    small: bool
    page: int
    """The size of the pieces in which its expandable segment grows."""
    least: int
    """The smallest remainder of a block that is split off."""
    free: list[int] = field(default_factory=list)
    """The sort keys of the free blocks."""
    blocks: dict[int, Block] = field(default_factory=dict)
    """The free blocks by their sort keys."""
    unmapped: list[tuple[int, Block]] = field(default_factory=list)
    """Address space that its expandable segment can still use, by address."""
    reserved: int = 0

    def put(self, block: Block) -> None:
        """`block` is free, or is address space, from now on."""
        if block.mapped:
            block.sort_key = block.size << ADDRESS_BITS | block.address
            self.blocks[block.sort_key] = block
            insort(self.free, block.sort_key)
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: Block) -> None:
        """`block` is no longer among those that were put."""
        if block.mapped:
            del self.free[bisect_left(self.free, block.sort_key)], self.blocks[block.sort_key]
            block.sort_key = 0
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def growing(self, index: int) -> int:
        """The index of the best fit among free blocks, from `index` on. A block that address space
        follows counts as large as it can grow, so a larger one that cannot grow comes first."""
        free, blocks = self.free, self.blocks
        while index + 1 < len(free) and room(blocks[free[index + 1]]) < room(blocks[free[index]]):
            index += 1
        return index


def chain(head: Block) -> Iterator[Block]:
    """`head` and all blocks behind it."""
    block: Block | None = head
    while block is not None:
        yield block
        block = block.next


def room(block: Block) -> int:
    """Bytes that the free `block` has, with what it can grow by."""
    return block.size + (0 if block.next is None or block.next.mapped else block.next.size)


def cut(block: Block, size: int) -> Block:
    """Shorten `block` to `size`; the rest, a block behind it of the same kind."""
    following = block.next
    rest = Block(
        block.address + size, block.size - size, block.pool, 0, block, following, block.mapped
    )
    if following is not None:
        following.previous = rest
    block.next, block.size = rest, size
    return rest


def absorb(block: Block, following: Block) -> None:
    """`block` grows over its neighbour `following`, which is no more."""
    block.size += following.size
    block.next = following.next
    if block.next is not None:
        block.next.previous = block
