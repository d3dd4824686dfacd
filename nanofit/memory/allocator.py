"""What torch's CUDA caching allocator makes of a trace of allocations and frees on one stream.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings. "Allocated" and
"reserved" are what torch.cuda.memory_allocated() and memory_reserved() would say.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable

MIB = 2**20
BLOCK = 512  # kMinBlockSize: every size is a multiple of it
SMALL = 1 * MIB  # kSmallSize: the largest size served from the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT = 20 * MIB  # large_segment_size: several sizes below OWN_SEGMENT share one
OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc
SEGMENT_STEP = 2 * MIB  # kRoundLarge


class OutOfMemory(Exception):
    """The card is full, even after all that was only cached has been given back to it."""

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int):
        self.requested_bytes = requested_bytes
        self.allocated_bytes, self.reserved_bytes = allocated_bytes, reserved_bytes
        super().__init__(
            f"no room for {requested_bytes:,} bytes: {allocated_bytes:,} are allocated, "
            f"{reserved_bytes:,} reserved"
        )


class Allocator:
    """Replays allocations and frees; knows what is allocated and reserved, now and at the peak.

    A block of the large pool keeps a remainder of up to 1 MiB, which torch counts as allocated:
    without expandable segments more is allocated than the sum of the rounded sizes.
    """

    def __init__(self, *, limit_bytes: int | None = None, expandable_segments: bool = False):
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.retries = 0
        self._card = _Card(limit_bytes)
        pool = _ExpandablePool if expandable_segments else _SegmentPool
        self._small, self._large = pool(self._card, is_small=True), pool(self._card, is_small=False)
        self._blocks: dict[Hashable, tuple[_Pool, _Block] | None] = {}

    @property
    def reserved_bytes(self) -> int:
        return self._card.taken_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._card.peak_taken_bytes

    def allocate(self, key: Hashable, size_bytes: int) -> None:
        """Find room for a tensor; OutOfMemory if there is none under the limit."""
        assert key not in self._blocks, f"{key} is allocated already"
        if size_bytes == 0:
            self._blocks[key] = None
            return
        size = rounded(size_bytes)
        pool = self._small if size <= SMALL else self._large
        block = pool.find(size) or pool.grow(size) or self._grow_after_release(pool, size)
        if block is None:
            raise OutOfMemory(
                requested_bytes=size_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
            )
        pool.occupy(block, size)
        self._blocks[key] = pool, block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, key: Hashable) -> None:
        """Return a tensor's block to its pool; the card does not get it back."""
        held = self._blocks.pop(key)
        if held is not None:
            pool, block = held
            self.allocated_bytes -= block.size
            pool.put_back(block)

    def _grow_after_release(self, pool: "_Pool", size: int) -> "_Block | None":
        self.retries += 1
        self._large.release()
        self._small.release()
        return pool.grow(size)


def rounded(size_bytes: int) -> int:
    """The bytes of a block that holds so many: a multiple of 512."""
    return _round_up(size_bytes, BLOCK)


class _Card:
    """The memory that segments and pages are taken from."""

    def __init__(self, limit_bytes: int | None):
        self.taken_bytes = self.peak_taken_bytes = 0
        self._limit_bytes = limit_bytes

    def take(self, size: int) -> bool:
        if self._limit_bytes is not None and self.taken_bytes + size > self._limit_bytes:
            return False
        self.taken_bytes += size
        self.peak_taken_bytes = max(self.peak_taken_bytes, self.taken_bytes)
        return True

    def give_back(self, size: int) -> None:
        self.taken_bytes -= size


class _Block:
    """A stretch of a segment, linked to its neighbours."""

    __slots__ = ("address", "is_free", "is_mapped", "next", "previous", "size")

    def __init__(self, address: int, size: int, *, is_mapped: bool = True):
        self.address, self.size = address, size
        self.is_free, self.is_mapped = True, is_mapped
        self.previous: _Block | None = None
        self.next: _Block | None = None

    def cut(self, size: int) -> "_Block":
        """Keep the first `size` bytes; the rest becomes a block of its own."""
        rest = _Block(self.address + size, self.size - size, is_mapped=self.is_mapped)
        rest.previous, rest.next = self, self.next
        if self.next:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def absorb(self, neighbour: "_Block") -> None:
        if neighbour is self.previous:
            self.address, self.previous = neighbour.address, neighbour.previous
            if self.previous:
                self.previous.next = self
        else:
            self.next = neighbour.next
            if self.next:
                self.next.previous = self
        self.size += neighbour.size

    def size_with_growth(self) -> int:
        """The size it can grow to by mapping what follows; an ordinary block's is its size."""
        can_grow = self.next and not self.next.is_mapped
        return self.size + (self.next.size if can_grow else 0)


class _Pool:
    """Blocks of one kind, the free ones by size and then by address."""

    def __init__(self, card: _Card, *, is_small: bool):
        self._card, self._is_small = card, is_small
        self._free: list[tuple[int, int, _Block]] = []

    def find(self, size: int) -> _Block | None:
        """The smallest free block that is large enough; what can still grow is spared."""
        free = self._free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        while (
            index + 1 < len(free)
            and free[index + 1][2].size_with_growth() < free[index][2].size_with_growth()
        ):
            index += 1
        return free[index][2]

    def grow(self, size: int) -> _Block | None:
        """A free block of at least `size` bytes with memory new from the card, if it has any."""
        raise NotImplementedError

    def release(self) -> None:
        """Give to the card what no allocation is in."""
        raise NotImplementedError

    def occupy(self, block: _Block, size: int) -> None:
        """Hand out a free block, without the rest if that is worth a block of its own."""
        self._unlist(block)
        block.is_free = False
        if block.size - size >= self._smallest_rest():
            self._list(block.cut(size))

    def put_back(self, block: _Block) -> None:
        block.is_free = True
        self._merge(block)
        self._list(block)

    def _smallest_rest(self) -> int:
        raise NotImplementedError

    def _merge(self, block: _Block) -> None:
        """Absorb the neighbours that are free and mapped alike."""
        for neighbour in (block.previous, block.next):
            if neighbour and neighbour.is_free and neighbour.is_mapped == block.is_mapped:
                self._unlist(neighbour)
                block.absorb(neighbour)

    def _list(self, block: _Block) -> None:
        insort(self._free, (block.size, block.address, block))

    def _unlist(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]


class _SegmentPool(_Pool):
    """Segments of fixed size by cudaMalloc, taken to lie at ever higher addresses."""

    def __init__(self, card: _Card, *, is_small: bool):
        super().__init__(card, is_small=is_small)
        self._next_address = 0

    def grow(self, size: int) -> _Block | None:
        segment = self._segment_size(size)
        if not self._card.take(segment):
            return None
        block = _Block(self._next_address, segment)
        self._next_address += segment
        self._list(block)
        return block

    def release(self) -> None:
        for _, _, block in list(self._free):
            if block.previous is None and block.next is None:  # a whole segment
                self._unlist(block)
                self._card.give_back(block.size)

    def _segment_size(self, size: int) -> int:
        if self._is_small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < OWN_SEGMENT else _round_up(size, SEGMENT_STEP)

    def _smallest_rest(self) -> int:
        return BLOCK if self._is_small else SMALL + BLOCK


class _ExpandablePool(_Pool):
    """One segment of endless addresses; memory is mapped to them page by page where needed."""

    def __init__(self, card: _Card, *, is_small: bool):
        super().__init__(card, is_small=is_small)
        self._page = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        self._unmapped: list[tuple[int, _Block]] = []  # by address
        self._list(_Block(0, self._page * 2**40, is_mapped=False))

    def grow(self, size: int) -> _Block | None:
        block = self._lowest_room(size)
        if not block.is_mapped and not self._map(block, min(size, block.size)):
            return None
        while block.size < size:  # what follows a free block is not mapped: else they were one
            following = block.next
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        return block

    def release(self) -> None:
        for _, _, block in list(self._free):
            self._unmap_whole_pages(block)

    def _smallest_rest(self) -> int:
        return BLOCK

    def _lowest_room(self, size: int) -> _Block:
        """The first of the free and unmapped blocks in a row that together are large enough."""
        for _, unmapped in self._unmapped:
            previous = unmapped.previous
            first = previous if previous and previous.is_free else unmapped
            end, block = first.address + size, first
            while block.is_free and block.address + block.size < end:
                block = block.next
            if block.is_free:
                return first
        raise AssertionError("the last unmapped block has no end")

    def _map(self, block: _Block, size: int) -> bool:
        """Put memory behind the first `size` bytes, in whole pages; join them to what is free."""
        size = _round_up(size, self._page)
        if not self._card.take(size):
            return False
        self._unlist(block)
        if size < block.size:
            self._list(block.cut(size))
        block.is_mapped = True
        self._merge(block)
        self._list(block)
        return True

    def _unmap_whole_pages(self, block: _Block) -> None:
        begin = _round_up(block.address, self._page)
        size = (block.address + block.size - begin) // self._page * self._page
        if size <= 0:
            return
        self._unlist(block)
        if begin > block.address:
            before, block = block, block.cut(begin - block.address)
            self._list(before)
        if block.size > size:
            self._list(block.cut(size))
        self._card.give_back(size)
        block.is_mapped = False
        self._merge(block)
        self._list(block)

    def _list(self, block: _Block) -> None:
        if block.is_mapped:
            super()._list(block)
        else:
            insort(self._unmapped, (block.address, block))

    def _unlist(self, block: _Block) -> None:
        if block.is_mapped:
            super()._unlist(block)
        else:
            del self._unmapped[bisect_left(self._unmapped, (block.address,))]


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
