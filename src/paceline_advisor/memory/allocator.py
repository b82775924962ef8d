"""Model of the memory that PyTorch takes from a GPU for the tensors that a program allocates and frees.

A model of its caching allocator, by its rules (c10/cuda/CUDACachingAllocator.cpp). A request is rounded up to 512
bytes. Blocks of up to 1 MiB are cut from segments of 2 MiB, larger ones from segments of 20 MiB, and those of 10 MiB or
more get one of their own, rounded up to 2 MiB. A free block is used again by the request that it fits best, is split if
enough is left, and joined with its free neighbours when it is let go. Segments are given back only when the device
refuses another. Each stream has blocks of its own. What ``PYTORCH_ALLOC_CONF`` changes of this is in
:class:`Settings`.
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
INTERVALS = 16
"""Sizes from 1 MiB on, each interval twice the one before, for which ``roundup_power2_divisions`` is told apart."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What of PyTorch's allocator can be set.

    Attributes:
        expandable: ``expandable_segments``: one segment for each pool grows.
        max_split: ``max_split_size_mb``, in bytes: larger blocks are not split; None for no limit.
        divisions: ``roundup_power2_divisions``: into how many parts the way from a power of two to the next is cut, to
            which a request is rounded up; one number for each interval, 0 or 1 for multiples of 512.
    """

    expandable: bool = False
    max_split: int | None = None
    divisions: tuple[int, ...] = ()

    def rounded(self, size: int) -> int:
        """Bytes that a request of ``size`` bytes is given at least."""
        parts = self._parts(size)
        if parts <= 1 or size <= SMALLEST_BLOCK * parts or size & (size - 1) == 0:
            return rounded(size)
        step = (1 << size.bit_length() - 1) // parts
        return -(-size // step) * step if step else size

    def _parts(self, size: int) -> int:
        if not self.divisions or size <= 0:
            return 0
        interval = size.bit_length() - MIB.bit_length()
        return self.divisions[min(max(interval, 0), len(self.divisions) - 1)]


PLAIN = Settings()


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
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]

    def best(self, size: int) -> Block | None:
        place = bisect_left(self.free, (size, 0))
        return self.blocks[self.free[place][1]] if place < len(self.free) else None


class CachingAllocator:
    """Follows the requests of a program.

    Args:
        limit: Bytes that the device has for it; None for as many as it asks for.
        settings: How it works.

    Attributes:
        allocated: Bytes of blocks in use now, as ``torch.cuda.memory_allocated`` counts them.
        reserved: Bytes taken from the device now, as ``torch.cuda.memory_reserved`` counts them.
        peak_allocated: The most of the first.
        peak_reserved: The most of the second.
    """

    def __init__(self, *, limit: int | None = None, settings: Settings = PLAIN) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._limit = limit
        self._settings = settings
        self._expandable = settings.expandable
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
        size = self._settings.rounded(size)
        key = stream, size <= _LARGEST_SMALL
        pool = self._pools.setdefault(key, _Pool(key[1]))
        block = pool.best(size)
        if block is None or self._is_kept_from(size, block):
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

    def _is_kept_from(self, size: int, block: Block) -> bool:
        """Whether a block that is not to be split is too large for a request."""
        most = self._settings.max_split
        if most is None:
            return False
        return block.size >= (most if size < most else size + _LARGE_SEGMENT)

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
            for block in [each for each in pool.blocks.values() if each.before is None and each.after is None]:
                pool.remove(block)
                self.reserved -= block.size

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if block.pool.is_small or self._expandable:
            if left < SMALLEST_BLOCK:
                return
        elif left <= _LARGEST_SMALL or (self._settings.max_split is not None and size >= self._settings.max_split):
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
