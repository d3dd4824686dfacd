"""Where the memory of a training step goes, what a card has for it, and what could be saved."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT, GPTConfig
from nanofit.config import RunConfig, TrainConfig
from nanofit.device import describe_device, find_card
from nanofit.fit import usable_bytes
from nanofit.footprint import Line, footprint, total
from nanofit.memory import (
    Need,
    Setup,
    Simulation,
    need_of,
    saved_by_8_bits,
    simulate,
)
from nanofit.optim import build_optimizer
from nanofit.overhead import ASSUMED, Overhead, overhead_of
from nanofit.picture import draw
from nanofit.savers import extra_time, savers_of, without_savers
from nanofit.terminal import parse_size

COLUMNS = 100
LARGEST_TENSORS = 5


@dataclass(frozen=True)
class Budget:
    """The memory of a card and who has a claim on it."""

    card: str
    total_bytes: int
    others_bytes: int | None  # what other programs use; None if that is not known
    run: RunConfig
    overhead: Overhead = ASSUMED

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.overhead.context_bytes - (self.others_bytes or 0)

    @property
    def reserve_bytes(self) -> int:
        return self.free_bytes - usable_bytes(self.free_bytes, self.run)

    @property
    def limit_bytes(self) -> int:
        """What the run may use, as autofit decides it."""
        limit = usable_bytes(self.free_bytes, self.run)
        asked = self.run.memory_limit
        return limit if asked is None else min(limit, parse_size(asked))


def budget_of(gpu: str | None, vram_bytes: int | None, run: RunConfig) -> Budget | None:
    """The budget of a card by name, by size, or of this machine; None if there is no card."""
    if gpu is not None:
        card = find_card(gpu)
        total_bytes = vram_bytes or card.memory_mib * 2**20
        return Budget(card.name, total_bytes, None, run, overhead_of(card.name))
    if vram_bytes is not None:
        return Budget("a card of this size", vram_bytes, None, run)
    if not torch.cuda.is_available() or run.device in ("cpu", "mps"):
        return None
    device = describe_device("cuda" if run.device == "auto" else run.device)
    overhead = overhead_of(device.name)
    used_bytes = device.memory_bytes - device.memory().free_bytes()  # its context included
    others_bytes = max(used_bytes - overhead.context_bytes, 0)
    return Budget(device.name, device.memory_bytes, others_bytes, run, overhead)


def dtype_of(gpu: str | None, run: RunConfig) -> str:
    """The precision a run would have: where a card has no bfloat16, float16 instead."""
    if gpu is None and torch.cuda.is_available():
        return describe_device("cuda", run.dtype).precision
    best = "bfloat16" if gpu is None or find_card(gpu).has_bfloat16 else "float16"
    return best if run.dtype in ("auto", "bfloat16") else run.dtype


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
    with FakeTensorMode():
        model = GPT(shape)
        groups = [group["params"] for group in build_optimizer(model, TrainConfig()).param_groups]
    decayed, others = ([p.numel() for p in group] for group in groups)
    return Counts(
        parameters=model.num_params(),
        without_positions=model.num_params(positions=False),
        decayed_tensors=len(decayed),
        decayed_parameters=sum(decayed),
        other_tensors=len(others),
        other_parameters=sum(others),
    )


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
    simulation: Simulation
    choices: tuple[Choice, ...]

    @property
    def stage(self) -> str:
        return _stage(self.setup)

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
        """What the step's tensors are: by arithmetic, or with savers by simulation."""
        if replace(self.setup, optimizer_bits=32) == without_savers(self.setup):
            return footprint(self.setup, self.micro_batch_size)
        sizes = self.simulation.components_at_peak()
        return [Line(component, "simulated", size) for component, size in sizes.most_common()]

    @cached_property
    def own_lines(self) -> list[Line]:
        """All that counts against the limit."""
        peak = self.simulation.peak_bytes
        slack, in_segments = (
            self.simulation.replay(expandable_segments=expandable).peak_reserved_bytes - peak
            for expandable in (True, False)
        )
        told = f"reserved but not allocated; {_mib(in_segments)} without expandable segments"
        lines = [*self.tensor_lines, Line("allocator slack", told, slack)]
        if self.setup.optimizer_bits == 8:
            saved = saved_by_8_bits(self.setup.shape)
            lines.append(Line("8-bit moments", "instead of 32-bit ones", -saved))
        told = f"cuBLAS and the like, {self.overhead.source}"
        return [*lines, Line("library workspace", told, self.overhead.library_bytes)]

    @property
    def lines(self) -> list[Line]:
        """The whole process, by component."""
        told = f"of any process, {self.overhead.source}"
        return [*self.own_lines, Line("CUDA context", told, self.overhead.context_bytes)]

    @property
    def left_bytes(self) -> int | None:
        """What the step leaves of the limit; None without a card."""
        return self.budget and self.budget.limit_bytes - total(self.own_lines)

    def largest(self, choice: Choice) -> int | None:
        """The largest micro-batch under the limit; None without a card."""
        if self.budget is None:
            return None
        return choice.need.largest(self.budget.limit_bytes - self.overhead.library_bytes)

    def as_json(self) -> dict[str, Any]:
        peak, budget = self.simulation.peak_bytes, self.budget
        return {
            "stage": self.stage,
            "dtype": self.setup.dtype,
            "micro_batch_size": self.micro_batch_size,
            "parameters": vars(self.counts),
            "components": [line._asdict() for line in self.lines],
            "simulated_peak_bytes": peak,
            "arithmetic_peak_bytes": total(self.tensor_lines),
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
                for buffer in self.simulation.alive_at_peak[:LARGEST_TENSORS]
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
        }


def explain(
    shape: GPTConfig,
    learn: TrainConfig,
    run: RunConfig,
    budget: Budget | None,
    *,
    dtype: str,
    note: Callable[[str], None],
) -> Explanation:
    """Simulate what a config needs, in both stages, with and without savers.

    `note` is told what is being done: it may take a minute, the first time.
    """
    setup = Setup(
        shape,
        dtype=dtype,
        compiled=run.compile,
        loss=run.loss,
        recompute=run.recompute,
        activation_memory_budget=run.activation_memory_budget,
        optimizer_bits=run.optimizer_bits,
    )
    note(f"simulating a step, {_stage(setup)}")
    simulation = simulate(setup, learn.batch_size)
    choices = []
    for compiled in (False, True):
        plain = replace(without_savers(setup), compiled=compiled)
        for saver, changed in [(None, plain), *savers_of(plain)]:
            note(f"simulating a step, {_stage(plain)}, {saver or 'no saver'}")
            choices.append(Choice(_stage(plain), saver, need_of(changed), extra_time(changed)))
    return Explanation(
        setup=setup,
        micro_batch_size=learn.batch_size,
        counts=count_parameters(shape),
        budget=budget,
        simulation=simulation,
        choices=tuple(choices),
    )


def _stage(setup: Setup) -> str:
    return "compiled" if setup.compiled else "eager"


# What a person sees


def show(told: Explanation) -> None:
    on_terminal = sys.stdout.isatty()
    width = min(Console().width, COLUMNS) if on_terminal else COLUMNS
    console = Console(width=width, highlight=False, force_terminal=on_terminal)
    with console.capture() as captured:
        for title, content in _sections(told):
            console.print(f"\n{title}", style="bold")
            for part in content:
                console.print(Padding(part, (0, 0, 0, 2)))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _sections(told: Explanation) -> Iterator[tuple[str, list[Table | Text]]]:
    yield "The step", [_rows(_step_rows(told))]
    yield "Where the memory goes, at the peak", [_component_table(told), _two_routes(told)]
    yield "The largest tensors at the peak", [_tensor_table(told)]
    yield "The card", [_rows(_card_rows(told))]
    yield "What would change it", [_choice_table(told), _WHAT_TIME_MEANS]
    limit = told.budget and told.budget.limit_bytes
    yield "The second step, allocation by allocation", [draw(told.simulation, limit)]


def _step_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    shape, counts = told.setup.shape, told.counts
    yield (
        "model",
        f"{counts.parameters:,} parameters: {shape.n_layer} layers, {shape.n_head} heads, "
        f"{shape.n_embd} wide, vocabulary {shape.vocab_size}",
    )
    yield (
        "as nanoGPT",
        f"{counts.without_positions / 1e6:.2f}M parameters without positions; decayed: "
        f"{counts.decayed_tensors} tensors with {counts.decayed_parameters:,}, not decayed: "
        f"{counts.other_tensors} with {counts.other_parameters:,}",
    )
    tokens = told.micro_batch_size * shape.block_size
    yield (
        "micro-batch",
        f"{told.micro_batch_size} × {shape.block_size} = {tokens:,} tokens, {told.setup.dtype}, "
        f"{told.stage}, {told.setup.loss} loss",
    )


def _component_table(told: Explanation) -> Table:
    table = _table("component", "formula", "MiB>", "share>")
    everything = total(told.lines)
    for line in told.lines:
        share = line.size_bytes / everything
        table.add_row(line.component, line.formula, _mib(line.size_bytes), f"{share:.1%}")
    table.add_row("the process", "", _mib(everything), "100 %", style="bold")
    return table


def _two_routes(told: Explanation) -> Text:
    told_of, simulated = total(told.tensor_lines), told.simulation.peak_bytes
    if told_of == simulated:
        return Text(f"The tensors alone: {_mib(simulated)} MiB.")
    return Text(
        f"The tensors alone: {_mib(told_of)} MiB by these formulas, {_mib(simulated)} MiB "
        f"simulated ({told_of / simulated - 1:+.2%})."
    )


def _tensor_table(told: Explanation) -> Table:
    table = _table("MiB>", "shape", "dtype", "what it is", "made by", "in")
    for buffer in told.simulation.alive_at_peak[:LARGEST_TENSORS]:
        shape = " × ".join(str(size) for size in buffer.shape)
        op = buffer.op.removeprefix("aten::").removeprefix("aten.")
        cells = shape, buffer.dtype, buffer.component, op, buffer.line or "-"
        table.add_row(_mib(buffer.size_bytes), *cells)
    return table


def _card_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    budget = told.budget
    if budget is None:
        yield "none", "add a card with --gpu 'RTX 4070' or --vram 12GB to see what is left on it"
        return
    yield "total", f"{_mib(budget.total_bytes):>10} MiB  {budget.card}"
    yield "CUDA context", f"{_mib(-told.overhead.context_bytes):>10}      {told.overhead.source}"
    if budget.others_bytes is None:
        yield "other programs", f"{'?':>10}      not known: a desktop may take 2,000 MiB and more"
    else:
        yield "other programs", f"{_mib(-budget.others_bytes):>10}"
    reserve = budget.run.memory_reserve
    why = "memory_reserve" if reserve else "for the unforeseen: 5 % + 128 MiB (memory_reserve)"
    yield "reserve", f"{_mib(-budget.reserve_bytes):>10}      {why}"
    why = "memory_limit" if budget.run.memory_limit else "what the run may use"
    yield "limit", f"{_mib(budget.limit_bytes):>10} MiB  {why}"
    yield "this step", f"{_mib(-total(told.own_lines)):>10}      all of the table but the context"
    outcome = "left" if told.left_bytes >= 0 else "lacking"
    yield outcome, f"{_mib(abs(told.left_bytes)):>10} MiB"


def _choice_table(told: Explanation) -> Table:
    titles = ["stage", "saver", "peak GiB>", "change>", "time>"]
    table = _table(*titles, *(["largest micro-batch>"] if told.budget else []))
    plain = {choice.stage: choice for choice in told.choices if choice.saver is None}
    for choice in told.choices:
        peak = choice.need.at(told.micro_batch_size)
        saved = peak - plain[choice.stage].need.at(told.micro_batch_size)
        table.add_row(
            "" if choice.saver else choice.stage,
            choice.saver or "none",
            f"{peak / 2**30:.2f}",
            f"{saved / 2**30:+.2f}" if choice.saver else "",
            f"{choice.extra_time:+.0%}" if choice.saver else "",
            *([str(told.largest(choice))] if told.budget else []),
        )
    return table


_WHAT_TIME_MEANS = Text(
    "Time: matrix products and attention computed again, as a share of a step's. What memory's\n"
    "speed limits (norms, GELU, 8-bit moments) is not in it. All figures are simulated."
)


def _table(*titles: str) -> Table:
    """A table without lines; columns whose title ends in > are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in titles:
        justify = "right" if title.endswith(">") else "left"
        table.add_column(title.removesuffix(">"), justify=justify)
    return table


def _rows(rows: Iterator[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=14, no_wrap=True)
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, Text(value))
    return grid


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f}"
