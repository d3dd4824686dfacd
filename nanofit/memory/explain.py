"""Where the memory of a training step goes, what a card has for it, and what could be saved."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from nanofit.machine.overhead import ASSUMED, Overhead, collective_bytes
from nanofit.memory.budget import Budget
from nanofit.memory.course import Buffer, Course, Need
from nanofit.memory.ledger import BYTES, covers, saved_by_8_bits
from nanofit.memory.need import course_of, need_of
from nanofit.memory.savers import extra_time, savers_of, without_savers
from nanofit.memory.setup import Setup
from nanofit.memory.several import Way, fewest_cards, room_bytes, ways_of
from nanofit.settings.config import Settings
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError

LARGEST_TENSORS = 5
MOST_KINDS = 2  # of tensors, told of a component


@dataclass(frozen=True)
class Counts:
    """The parameters as nanoGPT counts them."""

    parameters: int
    without_positions: int
    decayed_tensors: int
    decayed_parameters: int
    other_tensors: int
    other_parameters: int


def count_parameters(shape: GPTConfig) -> Counts:
    weights = shape.weights()
    sizes = {name: prod(size) for name, size in weights.items()}
    decayed = [sizes[name] for name, size in weights.items() if len(size) == 2]
    return Counts(
        parameters=shape.parameters,
        without_positions=shape.parameters - sizes.get("transformer.wpe.weight", 0),
        decayed_tensors=len(decayed),
        decayed_parameters=sum(decayed),
        other_tensors=len(weights) - len(decayed),
        other_parameters=shape.parameters - sum(decayed),
    )


class Line(NamedTuple):
    """One component of a step's memory."""

    component: str
    formula: str
    size_bytes: int


def total(lines: list[Line]) -> int:
    return sum(line.size_bytes for line in lines)


def lines_of(course: Course) -> list[Line]:
    """What is there at the peak, by component and part of the model, the largest first."""
    groups: dict[str, list[Buffer]] = {}
    for buffer in course.alive_at_peak:
        name = f"{buffer.component}: {buffer.part}" if buffer.part else buffer.component
        groups.setdefault(name, []).append(buffer)
    lines = [
        Line(name, _formula(buffers), sum(buffer.size_bytes for buffer in buffers))
        for name, buffers in groups.items()
    ]
    return sorted(lines, key=lambda line: -line.size_bytes)


def _formula(buffers: list[Buffer]) -> str:
    """How many there are of which shape, or how many numbers where shapes are many."""
    kinds = Counter((buffer.shape, buffer.dtype) for buffer in buffers)
    dtypes = {dtype for _, dtype in kinds}
    if len(kinds) > MOST_KINDS and len(dtypes) == 1:
        numbers = sum(count * prod(shape) for (shape, _), count in kinds.items())
        return f"{numbers:,} × {BYTES[dtypes.pop()]} B"
    largest = sorted(kinds, key=lambda kind: -kinds[kind] * prod(kind[0]) * BYTES[kind[1]])
    told = [
        " × ".join(f"{number:,}" for number in (kinds[shape, dtype], *shape))
        + f" × {BYTES[dtype]} B"
        for shape, dtype in largest[:MOST_KINDS]
    ]
    return " + ".join(told) + (" + ..." if len(kinds) > MOST_KINDS else "")


@dataclass(frozen=True)
class Choice:
    """A stage with or without a saver, and what it needs."""

    stage: str
    saver: str | None
    need: Need
    extra_time: float  # of a step's FLOPs


@dataclass(frozen=True)
class Explanation:
    """All there is to say about the memory of a step; sizes in bytes."""

    setup: Setup
    micro_batch_size: int
    counts: Counts
    budget: Budget | None
    course: Course
    written: Course | None  # what was expected of the course, where that was simulated
    choices: tuple[Choice, ...]
    ways: tuple[Way, ...]  # to spread the run over several cards; none for one
    fewest: tuple[Way, ...]  # cards that would do, by their savers

    @property
    def stage(self) -> str:
        return stage_of(self.setup)

    @property
    def is_simulated(self) -> bool:
        return self.written is not None or not covers(self.setup)

    @property
    def title(self) -> str:
        shape = self.setup.shape
        return (
            f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide, micro-batch "
            f"{self.micro_batch_size} × {shape.block_size}, {self.setup.dtype}, {self.stage}"
        )

    @property
    def overhead(self) -> Overhead:
        return self.budget.overhead if self.budget else ASSUMED

    @cached_property
    def tensor_lines(self) -> list[Line]:
        return lines_of(self.course)

    @cached_property
    def own_lines(self) -> list[Line]:
        """All that counts against the limit."""
        peak = self.course.peak_bytes
        slack, in_segments = (
            self.course.replay(expandable_segments=expandable).peak_reserved_bytes - peak
            for expandable in (True, False)
        )
        told = f"reserved but not allocated; {in_segments / 2**20:,.1f} without expandable segments"
        lines = [*self.tensor_lines, Line("allocator slack", told, slack)]
        if self.setup.optimizer_bits == 8 and self.is_simulated:
            saved = saved_by_8_bits(self.setup)
            lines.append(Line("8-bit moments", "instead of 32-bit ones", -saved))
        told = f"{self.overhead.source}: cuBLAS and the like"
        lines.append(Line("library workspace", told, self.overhead.library_bytes))
        if self.setup.world > 1:
            told = "assumed: published of A100s; fewer channels take less"
            lines.append(Line("NCCL's buffers", told, collective_bytes(self.setup.world)))
        return lines

    @property
    def lines(self) -> list[Line]:
        """The whole process, by component."""
        told = f"{self.overhead.source}: of any process"
        return [*self.own_lines, Line("CUDA context", told, self.overhead.context_bytes)]

    @property
    def left_bytes(self) -> int | None:
        """What the step leaves of the limit; None without a card."""
        return self.budget and self.budget.limit_bytes - total(self.own_lines)

    def largest(self, choice: Choice) -> int | None:
        """The largest micro-batch under the limit; None without a card."""
        if self.budget is None:
            return None
        return choice.need.largest(room_bytes(self.budget, self.setup.world))

    def as_json(self) -> dict[str, Any]:
        budget = self.budget
        return {
            "stage": self.stage,
            "dtype": self.setup.dtype,
            "gpus": self.setup.world,
            "is_sharded": self.setup.shard,
            "micro_batch_size": self.micro_batch_size,
            "parameters": vars(self.counts),
            "components": [line._asdict() for line in self.lines],
            "peak_bytes": self.course.peak_bytes,
            "is_simulated": self.is_simulated,
            "written_peak_bytes": self.written and self.written.peak_bytes,
            "budget": budget
            and {
                "card": budget.card,
                "total_bytes": budget.total_bytes,
                "context_bytes": self.overhead.context_bytes,
                "other_programs_bytes": budget.others_bytes,
                "reserve_bytes": budget.reserve_bytes,
                "limit_bytes": budget.limit_bytes,
                "left_bytes": self.left_bytes,
            },
            "largest_tensors": [
                {name: getattr(buffer, name) for name in buffer.__slots__}
                for buffer in self.course.alive_at_peak[:LARGEST_TENSORS]
            ],
            "choices": [
                {
                    "stage": choice.stage,
                    "saver": choice.saver,
                    "peak_bytes": choice.need.at(self.micro_batch_size),
                    "largest_micro_batch_size": self.largest(choice),
                    "extra_time": choice.extra_time,
                }
                for choice in self.choices
            ],
            "ways": [way.as_json() for way in self.ways],
            "fewest_cards": [way.as_json() for way in self.fewest],
        }


def explain(
    settings: Settings,
    budget: Budget | None,
    *,
    dtype: str,
    has_flash: bool = True,
    world: int = 1,
    shard: bool = False,
    is_simulated: bool = False,
    note: Callable[[str], None],
) -> Explanation:
    """What a config needs, in both stages, with and without savers: as written down, or simulated.

    `note` is told what is being done: to simulate takes a minute, the first time.
    """
    shape, learn, run = settings
    setup = Setup(
        shape,
        dtype=dtype,
        compiled=run.compile and not shard,
        loss=run.loss,
        recompute=run.recompute,
        activation_memory_budget=run.activation_memory_budget,
        optimizer=learn.optimizer,
        optimizer_bits=run.optimizer_bits,
        has_flash=has_flash,
        world=world,
        shard=shard,
    )
    if shard and (learn.optimizer == "muon" or run.optimizer_bits == 8):
        raise InputError("--shard needs --optimizer=adamw and --optimizer_bits=32: they can be cut")
    note(f"simulating a step, {stage_of(setup)}")
    is_checked = is_simulated and covers(setup)
    return Explanation(
        setup=setup,
        micro_batch_size=learn.batch_size,
        counts=count_parameters(shape),
        budget=budget,
        course=course_of(setup, learn.batch_size, is_simulated=is_simulated),
        written=course_of(setup, learn.batch_size) if is_checked else None,
        choices=tuple(_choices(setup, is_simulated, note)),
        ways=tuple(ways_of(setup, world, budget)) if world > 1 else (),
        fewest=tuple(fewest_cards(setup, budget)) if budget and world > 1 else (),
    )


def _choices(setup: Setup, is_simulated: bool, note: Callable[[str], None]) -> Iterator[Choice]:
    for compiled in (False,) if setup.shard else (False, True):
        plain = replace(without_savers(setup), compiled=compiled)
        stage = stage_of(plain)
        for saver, changed in [(None, plain), *savers_of(plain)]:
            if changed.shard and changed.optimizer_bits == 8:
                continue  # moments that share their scales cannot be cut
            note(f"simulating a step, {stage}, {saver or 'no saver'}")
            need = need_of(changed, is_simulated=is_simulated)
            yield Choice(stage, saver, need, extra_time(changed))


def stage_of(setup: Setup) -> str:
    return "compiled" if setup.compiled else "eager"
