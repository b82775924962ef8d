"""Model of the GPU memory that PyTorch reserves for the tensors that a program allocates and frees.

It follows the rules of the caching allocator (c10/cuda/CUDACachingAllocator.cpp). A request is rounded up to a multiple
of 512 bytes. Blocks of up to 1 MiB are cut from segments of 2 MiB, larger ones from segments of 20 MiB. Those of 10 MiB
or more get a separate segment, rounded up to a multiple of 2 MiB. A request reuses the best-fitting free block, which
is split if enough is left; a freed block is merged with free neighbours. Segments are returned only when the device has
no memory for another. Each stream has separate blocks. :class:`AllocatorSettings` has the options of
``PYTORCH_ALLOC_CONF``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

from paceline_advisor import frozen

MIB = 2**20
SMALLEST_BLOCK = 512
_LARGEST_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB
_SEGMENT_STEP = 2 * MIB
INTERVALS = 16
"""Number of size intervals that ``roundup_power2_divisions`` distinguishes: between powers of two, from 1 MiB on."""

Pool = tuple[int, bool]
"""A stream, and whether the pool has the stream's small blocks; otherwise it has the large ones."""


@frozen
class AllocatorSettings:
    """Options of PyTorch's allocator.

    Attributes:
        expandable: ``expandable_segments``: each pool has one segment that grows.
        max_split: ``max_split_size_mb``, in bytes: blocks of this size or larger are not split; None for no limit.
        divisions: ``roundup_power2_divisions``: requests are rounded up to the next boundary when the interval between
            two powers of two is divided into so many parts. One number per interval; 0 or 1 for multiples of 512.
    """

    expandable: bool = False
    max_split: int | None = None
    divisions: tuple[int, ...] = ()

    def rounded(self, size: int) -> int:
        """Return the minimum size, in bytes, of a block for a request of ``size`` bytes."""
        parts = 0
        if self.divisions and size > 0:
            parts = self.divisions[min(max(size.bit_length() - MIB.bit_length(), 0), len(self.divisions) - 1)]
        if parts <= 1 or size <= SMALLEST_BLOCK * parts or size & (size - 1) == 0:
            return rounded(size)
        step = (1 << size.bit_length() - 1) // parts
        return -(-size // step) * step if step else size


PLAIN = AllocatorSettings()


class DoesNotFitError(Exception):
    """The device has no memory for a request, even after freeing every unused segment."""


def rounded(size: int) -> int:
    """Return the minimum size of a block for a request of ``size`` bytes: a multiple of 512."""
    return max(SMALLEST_BLOCK, -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK) if size > 0 else 0


def segment_size(size: int) -> int:
    """Return the bytes reserved from the device for a rounded request, if no free block fits it."""
    if size <= _LARGEST_SMALL:
        return _SMALL_SEGMENT
    if size < _OWN_SEGMENT:
        return _LARGE_SEGMENT
    return -(-size // _SEGMENT_STEP) * _SEGMENT_STEP


@dataclass(frozen=True, slots=True)
class AllocatedBlock:
    """An allocated part of a segment.

    Attributes:
        address: Its start address; only the order matters.
        size: Bytes.
        pool: The pool within which it may be merged once free.
    """

    address: int
    size: int
    pool: Pool


class CachingAllocator:
    """Simulates the allocator for the requests of a program.

    Args:
        limit: Bytes available on the device; None for unlimited.
        settings: Options of the allocator.

    Attributes:
        allocated: Bytes of blocks in use now, as ``torch.cuda.memory_allocated`` counts them.
        reserved: Bytes taken from the device now, as ``torch.cuda.memory_reserved`` counts them.
        peak_allocated: Peak of ``allocated``.
        peak_reserved: Peak of ``reserved``.
    """

    def __init__(self, *, limit: int | None = None, settings: AllocatorSettings = PLAIN) -> None:
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._limit = limit
        self._settings = settings
        # Sizes and addresses of free blocks, smallest first and, among equal ones, lowest address first.
        self._free: defaultdict[Pool, list[tuple[int, int]]] = defaultdict(list)
        self._sizes: dict[int, int] = {}  # free blocks by start address
        self._begins: dict[int, int] = {}  # free blocks by end address
        self._segments: dict[int, int] = {}  # sizes by start address
        self._ends: dict[Pool, int] = {}  # expandable segments
        self._end = 0

    def allocate(self, size: int, stream: int = 0) -> AllocatedBlock | None:
        """Allocate a block of at least this many bytes; returns None for a tensor without elements.

        Raises:
            DoesNotFitError: If it does not fit on the device.
        """
        if size <= 0:
            return None
        size = self._settings.rounded(size)
        pool = stream, size <= _LARGEST_SMALL
        free = self._free[pool]
        place = bisect_left(free, (size, 0))
        if place < len(free) and not self._is_kept_from(size, free[place][0]):
            taken, address = free[place]
            self._remove(pool, address)
        elif self._settings.expandable:
            address, taken = self._grow(pool, size)
        else:
            address, taken = self._end, segment_size(size)
            self._reserve(taken)
            self._segments[address] = taken
            # A gap, since neighbouring segments are not merged.
            self._end += taken + SMALLEST_BLOCK
        if self._is_split(size, taken - size, is_small=pool[1]):
            self._add(pool, address + size, taken - size)
            taken = size
        self.allocated += taken
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return AllocatedBlock(address, taken, pool)

    def free(self, block: AllocatedBlock | None) -> None:
        """Free a block, and merge it with free neighbours."""
        if block is None:
            return
        self.allocated -= block.size
        begin, end = block.address, block.address + block.size
        if begin in self._begins:
            begin = self._begins[begin]
            self._remove(block.pool, begin)
        if end in self._sizes:
            end += self._remove(block.pool, end)
        self._add(block.pool, begin, end - begin)

    def _is_kept_from(self, size: int, block: int) -> bool:
        """Whether a free block is too large for a request, because it must not be split."""
        most = self._settings.max_split
        return most is not None and block >= (most if size < most else size + _LARGE_SEGMENT)

    def _is_split(self, size: int, left: int, *, is_small: bool) -> bool:
        if is_small or self._settings.expandable:
            return left >= SMALLEST_BLOCK
        most = self._settings.max_split
        return left > _LARGEST_SMALL and (most is None or size < most)

    def _grow(self, pool: Pool, size: int) -> tuple[int, int]:
        """Extend a pool's only segment by the size missing at its free end; return that end's start and size."""
        # Far from the segments of other pools, which grow too.
        end = self._ends.get(pool, (len(self._ends) + 1) << 50)
        begin = self._begins.get(end, end)
        step = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        more = -(-(size - (end - begin)) // step) * step
        self._reserve(more)
        if begin < end:
            self._remove(pool, begin)
        self._ends[pool] = end + more
        return begin, end + more - begin

    def _reserve(self, size: int) -> None:
        if self._limit is not None and self.reserved + size > self._limit:
            self._give_back()
            if self.reserved + size > self._limit:
                raise DoesNotFitError(f"{self.reserved} of {self._limit} bytes are taken, and {size} more are needed")
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        """Return the unused segments."""
        for pool, free in self._free.items():
            for size, address in list(free):
                if self._segments.get(address) == size:
                    self._remove(pool, address)
                    del self._segments[address]
                    self.reserved -= size

    def _add(self, pool: Pool, address: int, size: int) -> None:
        insort(self._free[pool], (size, address))
        self._sizes[address], self._begins[address + size] = size, address

    def _remove(self, pool: Pool, address: int) -> int:
        """Remove a block from the free ones, and return its size."""
        size = self._sizes.pop(address)
        del self._begins[address + size]
        free = self._free[pool]
        del free[bisect_left(free, (size, address))]
        return size
