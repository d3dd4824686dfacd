"""An explanation of a step's memory as a person sees it: tables, and a picture of characters."""

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nanofit.memory.explain import LARGEST_TENSORS, Explanation, total
from nanofit.memory.picture import draw
from nanofit.memory.setup import Setup
from nanofit.memory.several import room_bytes
from nanofit.terminal import compact

COLUMNS = 100


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
    if told.ways:
        yield f"On {told.setup.world} cards", [_way_table(told), Text(_what_fits(told))]
    yield "What would change it", [_choice_table(told), _WHAT_TIME_MEANS]
    limit = told.budget and told.budget.limit_bytes
    yield "The second step, allocation by allocation", [draw(told.course, limit)]


def _step_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    shape, counts = told.setup.shape, told.counts
    yield (
        "model",
        f"{counts.parameters:,} parameters: {shape.n_layer} layers, {shape.n_head} heads, "
        f"{shape.n_embd} wide, vocabulary {shape.vocab_size}",
    )
    if not shape.is_modern:
        yield (
            "as nanoGPT",
            f"{counts.without_positions / 1e6:.2f}M parameters without positions; decayed: "
            f"{counts.decayed_tensors} tensors with {counts.decayed_parameters:,}, not decayed: "
            f"{counts.other_tensors} with {counts.other_parameters:,}",
        )
    if note := _attention_note(told.setup):
        yield "attention", note
    tokens = told.micro_batch_size * shape.block_size
    yield (
        "micro-batch",
        f"{told.micro_batch_size} × {shape.block_size} = {tokens:,} tokens, {told.setup.dtype}, "
        f"{told.stage}, {told.setup.loss} loss",
    )
    if told.setup.shard:
        parts = f"one of {told.setup.world} parts of weights, gradients and moments on each card"
        yield "sharded", f"{parts}; forecast for the eager stage alone"


def _attention_note(setup: Setup) -> str:
    """What its kernels do that takes more memory than others would; usually nothing."""
    width = setup.shape.n_embd // setup.shape.n_head
    if setup.attention == "math":
        return f"no kernels for heads of {width} in {setup.dtype}: the scores of all pairs are kept"
    if setup.attention == "flash" and width % 8:
        return f"copies heads of {width} to pad them to {-(-width // 8) * 8}, a multiple of 8"
    return ""


def _component_table(told: Explanation) -> Table:
    table = _table("component", "formula", "MiB>", "share>")
    everything = total(told.lines)
    for line in told.lines:
        share = line.size_bytes / everything
        table.add_row(line.component, line.formula, _mib(line.size_bytes), f"{share:.1%}")
    table.add_row("the process", "", _mib(everything), "100 %", style="bold")
    return table


def _two_routes(told: Explanation) -> Text:
    """The sum of the tensors, and how sure it is."""
    peak = told.course.peak_bytes
    if told.written is not None:
        expected = told.written.peak_bytes
        return Text(
            f"The tensors alone: {_mib(peak)} MiB simulated, {_mib(expected)} as written down "
            f"({expected / peak - 1:+.2%})."
        )
    if told.is_simulated:
        return Text(f"The tensors alone: {_mib(peak)} MiB, simulated.")
    return Text(f"The tensors alone: {_mib(peak)} MiB, as written down; --simulate checks it.")


def _tensor_table(told: Explanation) -> Table:
    table = _table("MiB>", "shape", "dtype", "what it is", "made by", "in")
    for buffer in told.course.alive_at_peak[:LARGEST_TENSORS]:
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


def _way_table(told: Explanation) -> Table:
    titles = ("cards", "savers", "held GiB>", "1 sequence GiB>")
    table = _table(*titles, *(["largest micro-batch>"] if told.budget else []))
    before = None
    for way in told.ways:
        table.add_row(
            way.name if way.name != before else "",
            way.savers,
            _gib(way.held_bytes),
            _gib(way.one_sequence_bytes),
            *([str(way.largest)] if told.budget else []),
        )
        before = way.name
    return table


def _what_fits(told: Explanation) -> str:
    """Of each card, in words; and how many cards would do."""
    said = (
        "Of each card, eager, by arithmetic; nothing here was measured. Held are weights,\n"
        "gradients and moments: whole on every card, or in parts that are gathered block by block."
    )
    if told.budget is None:
        return said
    room = _gib(room_bytes(told.budget, told.setup.world))
    said += f"\nTensors may take {room} GiB of each {told.budget.card}."
    parameters, world = compact(told.counts.parameters), told.setup.world
    fits = [way for way in told.ways if way.setup.world == world and way.largest]
    outcome = "does not fit" if not fits else f"fits, {fits[0].name.split(', ')[1]}"
    if fits and fits[0].savers != "none":
        outcome += f" with {fits[0].savers}"
    said += f"\n{parameters} parameters: {outcome}."
    if told.fewest and not any(way.setup.recompute == "off" for way in fits):
        needed = "; ".join(f"{way.setup.world} with savers {way.savers}" for way in told.fewest)
        said += f"\nSharded it takes at least so many cards: {needed}."
    return said


_WHAT_TIME_MEANS = Text(
    "Time: matrix products and attention computed again, as a share of a step's. What memory's\n"
    "speed limits (norms, GELU, 8-bit moments) is not in it. Nothing here was measured."
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


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f}"
