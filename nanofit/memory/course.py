"""The course of a step: what is allocated and freed, in order, and what follows from it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from nanofit.memory.allocator import Allocator, OutOfMemory

MOST_SEQUENCES = 4096  # of a micro-batch


@dataclass(eq=False, slots=True)
class Buffer:
    """A piece of memory and what it was for."""

    size_bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    line: str  # of the model's code, as "model.py:137"; empty where it is not known
    component: str
    part: str = ""  # of the model, where the component has several


class Event(NamedTuple):
    buffer: Buffer
    is_birth: bool
    phase: str


@dataclass(frozen=True)
class Course:
    """The life of every buffer over two steps of two micro-batches and one evaluation."""

    events: list[Event]

    @cached_property
    def peak_bytes(self) -> int:
        """The most that is allocated at any time."""
        return max(self.allocated())

    @cached_property
    def alive_at_peak(self) -> list[Buffer]:
        """What fills the memory when most of it is in use, the largest first."""
        alive: dict[Buffer, None] = {}
        for event, allocated in zip(self.events, self.allocated(), strict=True):
            if event.is_birth:
                alive[event.buffer] = None
            else:
                del alive[event.buffer]
            if allocated == self.peak_bytes:
                break
        return sorted(alive, key=lambda buffer: -buffer.size_bytes)

    def components_at_peak(self) -> Counter[str]:
        """The peak's bytes by what they are for."""
        sizes = Counter()
        for buffer in self.alive_at_peak:
            sizes[buffer.component] += buffer.size_bytes
        return sizes

    def allocated(self) -> Iterator[int]:
        """The bytes in use after each event."""
        total = 0
        for buffer, is_birth, _ in self.events:
            total += buffer.size_bytes if is_birth else -buffer.size_bytes
            yield total

    def replay(self, *, limit_bytes: int | None = None, expandable_segments: bool) -> Allocator:
        """The caching allocator after all of it; OutOfMemory, and where, if it does not fit."""
        allocator = Allocator(limit_bytes=limit_bytes, expandable_segments=expandable_segments)
        for buffer, is_birth, phase in self.events:
            if not is_birth:
                allocator.free(buffer)
                continue
            try:
                allocator.allocate(buffer, buffer.size_bytes)
            except OutOfMemory as error:
                error.add_note(f"{phase}: {buffer.component}, {buffer.op}, {buffer.line}")
                raise
        return allocator


class Need(Protocol):
    """Peak memory by micro-batch."""

    def at(self, micro_batch_size: int) -> int: ...

    def largest(self, limit_bytes: float) -> int:
        """The largest micro-batch under a limit; 0 if there is none."""


class Curve(NamedTuple):
    """A need in a straight line."""

    fixed_bytes: int
    bytes_per_sequence: int

    @classmethod
    def through(cls, peaks: dict[int, int]) -> "Curve":
        """The line through the peaks of the smallest and the largest of some sizes."""
        few, many = min(peaks), max(peaks)
        slope = (peaks[many] - peaks[few]) // (many - few)
        return cls(peaks[few] - few * slope, slope)

    def at(self, micro_batch_size: int) -> int:
        return self.fixed_bytes + micro_batch_size * self.bytes_per_sequence

    def largest(self, limit_bytes: float) -> int:
        room = limit_bytes - self.fixed_bytes
        if self.bytes_per_sequence <= 0:
            return MOST_SEQUENCES if room >= 0 else 0
        return max(int(room // self.bytes_per_sequence), 0)
