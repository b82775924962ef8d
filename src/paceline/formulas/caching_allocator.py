"""How much memory does PyTorch take from a GPU for the tensors that a program makes and lets go of?

A model of its caching allocator, by its rules (c10/cuda/CUDACachingAllocator.cpp). A request is rounded up to 512
bytes. Blocks of up to 1 MiB are cut from segments of 2 MiB, larger ones from segments of 20 MiB, and those of 10 MiB or
more get one of their own, rounded up to 2 MiB. A free block is used again by the request that it fits best, is split if
enough is left, and joined with its free neighbours when it is let go. Segments are given back only when the device
refuses another. Each stream has blocks of its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20
SMALLEST_BLOCK = 512
_LARGEST_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB
_SEGMENT_STEP = 2 * MIB


class DoesNotFitError(Exception):
    """The device has no room for a request, also after every unused segment was given back."""


def rounded(size: int) -> int:
    """Bytes that a request of ``size`` bytes is given at least: a multiple of 512."""
    return max(SMALLEST_BLOCK, -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK) if size > 0 else 0


def segment_size(size: int) -> int:
    """Bytes that are taken from the device for a rounded request, if no free block fits it."""
    if size <= _LARGEST_SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_STEP) * _SEGMENT_STEP


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment.

    Attributes:
        address: Where it begins; only the order matters.
        size: Bytes.
    """

    address: int
    size: int
    pool: _Pool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks of one stream and kind, the smallest first and of equal ones the lowest address."""

    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block), key=lambda each: each[:2])

    def remove(self, block: Block) -> None:
        del self.free[self._place(block.size, block.address)]

    def best(self, size: int) -> Block | None:
        place = self._place(size, 0)
        return self.free[place][2] if place < len(self.free) else None

    def _place(self, size: int, address: int) -> int:
        return bisect_left(self.free, (size, address), key=lambda each: each[:2])


class CachingAllocator:
    """Follows the requests of a program.

    Args:
        limit: Bytes that the device has for it; None for as many as it asks for.
        expandable: Whether one segment for each pool grows, as with ``expandable_segments:True``.

    Attributes:
        allocated: Bytes of blocks in use now, as ``torch.cuda.memory_allocated`` counts them.
        reserved: Bytes taken from the device now, as ``torch.cuda.memory_reserved`` counts them.
        peak_allocated: The most of the first.
        peak_reserved: The most of the second.
    """

    def __init__(self, *, limit: int | None = None, expandable: bool = False) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._limit = limit
        self._expandable = expandable
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._last: dict[tuple[int, bool], Block] = {}
        self._end = 0

    def allocate(self, size: int, stream: int = 0) -> Block | None:
        """A block of at least so many bytes; None for a tensor without elements, which has none.

        Raises:
            DoesNotFitError: If the device has no room for it.
        """
        if size <= 0:
            return None
        size = rounded(size)
        key = stream, size <= _LARGEST_SMALL
        pool = self._pools.setdefault(key, _Pool(key[1]))
        block = pool.best(size)
        if block is None:
            block = self._grow(key, size) if self._expandable else self._take(segment_size(size), pool)
        else:
            pool.remove(block)
        self._split(block, size)
        block.is_free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block | None) -> None:
        """Let go of a block."""
        if block is None:
            return
        self.allocated -= block.size
        block.is_free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                block.pool.remove(neighbour)
                _join(block, neighbour)
        self._note_last(block)
        block.pool.add(block)

    def _take(self, size: int, pool: _Pool) -> Block:
        if not self._has_room(size):
            self._give_back()
            if not self._has_room(size):
                raise DoesNotFitError(f"{self.reserved} of {self._limit} bytes are taken, and {size} more are needed")
        self._reserve(size)
        block = Block(self._end, size, pool)
        # A gap, since neighbouring segments are not joined.
        self._end += size + SMALLEST_BLOCK
        return block

    def _grow(self, key: tuple[int, bool], size: int) -> Block:
        """Lengthen a pool's only segment by what its free end lacks."""
        pool, last = self._pools[key], self._last.get(key)
        tail = last if last is not None and last.is_free else None
        lacking = size - (tail.size if tail else 0)
        step = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        more = -(-lacking // step) * step
        if not self._has_room(more):
            raise DoesNotFitError(f"{self.reserved} of {self._limit} bytes are taken, and {more} more are needed")
        self._reserve(more)
        if tail is not None:
            pool.remove(tail)
            tail.size += more
            return tail
        # Far from the other pools' segments, which grow too.
        start = (last.address + last.size) if last else (len(self._last) + 1) << 50
        block = Block(start, more, pool, before=last)
        if last is not None:
            last.after = block
        self._last[key] = block
        return block

    def _has_room(self, size: int) -> bool:
        return self._limit is None or self.reserved + size <= self._limit

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        """Return the segments of which nothing is in use."""
        for pool in self._pools.values():
            whole = [each for each in pool.free if each[2].before is None and each[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            pool.free = [each for each in pool.free if each[2].before is not None or each[2].after is not None]

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < SMALLEST_BLOCK if block.pool.is_small or self._expandable else left <= _LARGEST_SMALL:
            return
        rest = Block(block.address + size, left, block.pool, is_free=True, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        self._note_last(rest)
        block.pool.add(rest)

    def _note_last(self, block: Block) -> None:
        if self._expandable and block.after is None:
            self._last = {key: block if self._pools[key] is block.pool else last for key, last in self._last.items()}


def _join(block: Block, neighbour: Block) -> None:
    """Make one of two free blocks that lie side by side."""
    block.size += neighbour.size
    if neighbour is block.before:
        block.address, block.before = neighbour.address, neighbour.before
        if block.before is not None:
            block.before.after = block
    else:
        block.after = neighbour.after
        if block.after is not None:
            block.after.before = block
