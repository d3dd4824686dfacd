"""The allocator against hand-worked examples, a slow model of it, and torch's own constants."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanofit.memory import allocator
from nanofit.memory.allocator import MIB, Allocator, OutOfMemory, rounded

# Around every size at which a rule changes, and any others.
SIZES = st.one_of(
    st.builds(
        lambda base, offset: max(base + offset, 0),
        st.sampled_from([0, 512, MIB, 2 * MIB, 10 * MIB, 19 * MIB, 20 * MIB]),
        st.integers(-1, 1),
    ),
    st.integers(1, 2 * MIB),
    st.integers(1, 45 * MIB),
)
# Negative: free one of those allocated; which one is a matter of the number.
EVENTS = st.lists(st.one_of(SIZES, SIZES, st.integers(-50, -1)), max_size=60)
LIMITS = st.sampled_from([None, 30 * MIB, 64 * MIB, 101 * MIB])


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest, of 1 MiB, is not worth a block
    ],
)
def test_first_allocation_takes_the_segment_of_its_size(size, allocated, reserved):
    memory = Allocator()
    memory.allocate("tensor", size)
    assert (memory.allocated_bytes, memory.reserved_bytes) == (allocated, reserved)
    memory.free("tensor")
    assert (memory.allocated_bytes, memory.reserved_bytes) == (0, reserved)


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2 * MIB), (MIB + 1, 20 * MIB), (20 * MIB, 20 * MIB), (20 * MIB + 1, 40 * MIB)],
)
def test_expandable_segments_grow_by_whole_pages(size, reserved):
    memory = Allocator(expandable_segments=True)
    memory.allocate("tensor", size)
    assert (memory.allocated_bytes, memory.reserved_bytes) == (rounded(size), reserved)


def test_small_tensors_share_a_segment_until_it_is_full():
    memory = Allocator()
    for number in range(4096):  # of 512 bytes: 2 MiB
        memory.allocate(number, 1)
    assert memory.reserved_bytes == 2 * MIB
    memory.allocate("one more", 1)
    assert memory.reserved_bytes == 4 * MIB


def test_freed_neighbours_become_one_block():
    memory = Allocator()
    for name in "abc":
        memory.allocate(name, 6 * MIB)  # all three in 20 MiB
    for name in "acb":
        memory.free(name)
    memory.allocate("all", 20 * MIB)
    assert memory.reserved_bytes == 20 * MIB


def test_the_smallest_sufficient_block_is_taken():
    memory = Allocator()
    for size in (40, 24, 32):
        memory.allocate(size, size * MIB)
    for size in (40, 24, 32):
        memory.free(size)
    for size in (31, 23, 39):  # each in the block it nearly fills: the others stay whole
        memory.allocate(("again", size), size * MIB)
    assert memory.reserved_bytes == 96 * MIB


def test_cached_segments_are_given_back_when_the_limit_would_be_passed():
    memory = Allocator(limit_bytes=40 * MIB)
    memory.allocate("first", 30 * MIB)
    memory.free("first")
    memory.allocate("larger", 34 * MIB)
    assert (memory.retries, memory.reserved_bytes) == (1, 34 * MIB)
    with pytest.raises(OutOfMemory) as error:
        memory.allocate("too much", 10 * MIB)
    assert error.value.requested_bytes == 10 * MIB
    assert error.value.allocated_bytes == error.value.reserved_bytes == 34 * MIB
    assert memory.retries == 2


def test_expandable_segments_save_what_fragmentation_loses():
    def replay(memory):
        memory.allocate("large", 40 * MIB)
        memory.free("large")
        memory.allocate("within it", 12 * MIB)
        memory.allocate("next", 30 * MIB)  # 28 MiB are left in the segment

    with pytest.raises(OutOfMemory) as error:
        replay(Allocator(limit_bytes=64 * MIB))
    assert (error.value.allocated_bytes, error.value.reserved_bytes) == (12 * MIB, 40 * MIB)
    expandable = Allocator(limit_bytes=64 * MIB, expandable_segments=True)
    replay(expandable)
    assert (expandable.allocated_bytes, expandable.reserved_bytes) == (42 * MIB, 60 * MIB)
    assert expandable.retries == 0  # the free 28 MiB were at the end and grew


def test_free_pages_within_an_expandable_segment_are_used_elsewhere():
    memory = Allocator(limit_bytes=100 * MIB, expandable_segments=True)
    for name in "abcde":
        memory.allocate(name, 20 * MIB)  # a page each
    memory.free("b")
    memory.free("d")
    memory.allocate("two pages", 40 * MIB)  # at the end: the free ones are not neighbours
    assert (memory.retries, memory.reserved_bytes) == (1, 100 * MIB)


@pytest.mark.parametrize("expandable_segments", [False, True])
@given(events=EVENTS, limit=LIMITS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_event_has_the_outcome_of_a_model_without_blocks(expandable_segments, events, limit):
    quick = Allocator(limit_bytes=limit, expandable_segments=expandable_segments)
    slow = Intervals(limit, expandable_segments)
    assert replay(quick, events) == replay(slow, events)


@given(events=EVENTS, limit=LIMITS, expandable_segments=st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_bytes_add_up_whatever_is_allocated_and_freed(events, limit, expandable_segments):
    memory = Allocator(limit_bytes=limit, expandable_segments=expandable_segments)
    sizes, largest_sum = {}, 0
    for key, size in numbered(events, sizes):
        if size is None:
            memory.free(key)
        else:
            try:
                memory.allocate(key, size)
            except OutOfMemory:
                continue
            sizes[key] = rounded(size)
        total = sum(sizes.values())
        largest_sum = max(largest_sum, total)
        rests = 0 if expandable_segments else MIB * sum(size > MIB for size in sizes.values())
        assert total <= memory.allocated_bytes <= total + rests
        assert memory.allocated_bytes <= memory.reserved_bytes <= (limit or float("inf"))
        assert_no_overlap(memory)
    assert memory.peak_allocated_bytes >= largest_sum
    if expandable_segments:
        assert memory.peak_allocated_bytes == largest_sum
    assert memory.peak_reserved_bytes >= memory.peak_allocated_bytes
    for key in sizes:
        memory.free(key)
    assert memory.allocated_bytes == 0


def test_constants_are_those_of_the_installed_torch():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    text = header.read_text()

    def constant(pattern):
        return int(re.search(pattern, text)[1])

    assert constant(r"kMinBlockSize = (\d+)") == allocator.BLOCK
    assert constant(r"kSmallSize = (\d+)") == allocator.SMALL
    assert constant(r"kSmallBuffer = (\d+)") == allocator.SMALL_SEGMENT
    assert constant(r"kMinLargeAlloc = (\d+)") == allocator.OWN_SEGMENT
    assert constant(r"kRoundLarge = (\d+)") == allocator.SEGMENT_STEP
    assert constant(r"large_segment_size_\{(\d+)\}") == allocator.LARGE_SEGMENT


def assert_no_overlap(memory):
    held = [pool_and_block for pool_and_block in memory._blocks.values() if pool_and_block]
    spans = sorted((id(pool), block.address, block.size) for pool, block in held)
    for (pool, address, size), (next_pool, next_address, _) in pairwise(spans):
        assert pool != next_pool or address + size <= next_address


def numbered(events, live):
    """(key, size) of each allocation and (key, None) of each free; `live` holds what can be freed.

    The caller adds to `live` what was allocated; what is freed is taken from it here.
    """
    for number, event in enumerate(events):
        if event >= 0:
            yield number, event
        elif live:
            key = sorted(live)[event % len(live)]
            del live[key]
            yield key, None


def replay(memory, events):
    """What each event left allocated and reserved, or that it died."""
    outcome, live = [], {}
    for key, size in numbered(events, live):
        try:
            if size is None:
                memory.free(key)
            else:
                memory.allocate(key, size)
                live[key] = size
            outcome.append((memory.allocated_bytes, memory.reserved_bytes, memory.retries))
        except OutOfMemory:
            outcome.append("out of memory")
    return outcome


class Intervals:
    """The same rules told of addresses: no links, no lists kept; all is found anew each time.

    A pool is the segments or pages it has (start -> end) and the allocations (start, end) in it;
    what is free is the difference.
    """

    ENDLESS = 2**60

    def __init__(self, limit, expandable):
        self.limit, self.expandable = limit or self.ENDLESS, expandable
        self.ranges = {"small": {}, "large": {}}
        self.taken = {"small": {}, "large": {}}  # key -> (start, end)
        self.retries, self.next_start = 0, 0

    @property
    def allocated_bytes(self):
        return sum(e - s for taken in self.taken.values() for s, e in taken.values())

    @property
    def reserved_bytes(self):
        return sum(e - s for ranges in self.ranges.values() for s, e in ranges.items())

    def free(self, key):
        for taken in self.taken.values():
            taken.pop(key, None)

    def allocate(self, key, size_bytes):
        if size_bytes == 0:
            return
        size = (size_bytes + 511) // 512 * 512
        pool = "small" if size <= MIB else "large"
        place = self.best_fit(pool, size) or self.new_place(pool, size)
        if not place:
            self.retries += 1
            self.release()
            place = self.new_place(pool, size)
        if not place:
            raise OutOfMemory(requested_bytes=size, allocated_bytes=0, reserved_bytes=0)
        start, end = place
        keeps_rest = pool == "large" and not self.expandable and end - start - size <= MIB
        self.taken[pool][key] = (start, end if keeps_rest else start + size)

    def best_fit(self, pool, size):
        free = sorted((e - s, s) for s, e in self.free_runs(pool) if e - s >= size)
        while len(free) > 1 and self.growth(pool, free[1]) < self.growth(pool, free[0]):
            free.pop(0)
        return (free[0][1], sum(free[0])) if free else None

    def growth(self, pool, run):
        length, start = run
        if not self.expandable:
            return length
        following = [s for s, _ in self.mapped_runs(pool) if s > start + length]
        if start + length in {e for _, e in self.mapped_runs(pool)}:
            return min(following, default=self.ENDLESS) - start
        return length

    def new_place(self, pool, size):
        if self.expandable:
            return self.map_pages(pool, size)
        segment = 2 * MIB if pool == "small" else max(20 * MIB, size)
        if size >= 10 * MIB:
            segment = (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.reserved_bytes + segment > self.limit:
            return None
        start, self.next_start = self.next_start, self.next_start + segment
        self.ranges[pool][start] = start + segment
        return start, start + segment

    def map_pages(self, pool, size):
        """At the lowest hole between allocations that is long enough and not all mapped."""
        page = 2 * MIB if pool == "small" else 20 * MIB
        pages = self.ranges[pool]
        edges = [(0, 0), *sorted(self.taken[pool].values()), (self.ENDLESS, self.ENDLESS)]
        for (_, start), (end, _) in pairwise(edges):
            last = min(end, start + size) - 1
            missing = [p for p in range(start // page, last // page + 1) if p * page not in pages]
            if end - start >= size and missing:
                break
        for run in consecutive(missing):  # each run is mapped whole or not at all
            if self.reserved_bytes + len(run) * page > self.limit:
                return None
            pages.update({p * page: (p + 1) * page for p in run})
        return next((s, e) for s, e in self.free_runs(pool) if s <= start < e)

    def release(self):
        for pool, ranges in self.ranges.items():
            for start, end in list(ranges.items()):
                if not any(s < end and start < e for s, e in self.taken[pool].values()):
                    del ranges[start]

    def mapped_runs(self, pool):
        """Ranges, those that touch joined; segments are never joined."""
        runs = []
        for start, end in sorted(self.ranges[pool].items()):
            if self.expandable and runs and runs[-1][1] == start:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((start, end))
        return runs

    def free_runs(self, pool):
        for start, end in self.mapped_runs(pool):
            for taken_start, taken_end in sorted(self.taken[pool].values()):
                if start <= taken_start < end:
                    if start < taken_start:
                        yield start, taken_start
                    start = taken_end
            if start < end:
                yield start, end


def consecutive(numbers):
    runs = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
