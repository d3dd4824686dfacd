"""Memory over the course of one step, stacked by component: for the terminal and as a PNG."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from rich.text import Text

from nanofit.memory.course import Course
from nanofit.terminal import InputError

# From the bottom up, with the character and the colour of each.
_STYLES = {
    "weights": ("█", "blue"),
    "optimiser state": ("▓", "cyan"),
    "gradients": ("▒", "green"),
    "weights in half precision": ("░", "bright_blue"),
    "activations": ("▚", "yellow"),
    "logits and loss": ("≡", "red"),
    "temporaries": ("·", "magenta"),
}
_COLUMNS, _ROWS = 90, 12
_FINE_COLUMNS = 900  # of a PNG
_SMALLEST_PHASE = 0.13  # of the width, so that its name has room
_LEGEND_COLUMNS = 4
_NEAR = 1.5  # a limit up to so many peaks away is in the picture; one beyond only named


@dataclass(frozen=True)
class Moment:
    """What is in memory at a time, by component."""

    phase: str
    sizes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


def second_step(course: Course) -> list[Moment]:
    """The moments of the second step and the evaluation: the first step has no optimiser state."""
    moments, sizes = [], Counter()
    events, phases = course.events, _phases(course)
    last_birth = max(index for index, event in enumerate(events) if event.is_birth)
    for event, phase in zip(events[: last_birth + 1], phases, strict=False):  # then all is undone
        buffer = event.buffer
        sizes[buffer.component] += buffer.size_bytes if event.is_birth else -buffer.size_bytes
        if phase:
            moments.append(Moment(phase, dict(sizes)))
    return moments


def _phases(course: Course) -> Iterator[str]:
    """For each event the phase it belongs to, as a person calls it; empty in the first step."""
    passes = 0
    for phase, events in groupby(event.phase for event in course.events):
        passes += phase == "forward"
        name = "update"
        if passes < 3:
            name = ""
        elif passes > 4:
            name = "evaluation"
        elif phase in ("forward", "backward"):
            name = f"{phase} {passes - 2}"
        for _ in events:
            yield name


def draw(course: Course, limit_bytes: float | None) -> Text:
    """The step in a few lines of characters, the limit as a line."""
    columns = _highest(second_step(course), _COLUMNS)
    top = _top(course.peak_bytes, limit_bytes)
    picture = Text()
    for row in reversed(range(_ROWS)):
        low, high = top * row / _ROWS, top * (row + 1) / _ROWS
        is_limit = limit_bytes is not None and low < limit_bytes <= high
        picture.append(" limit ┤" if is_limit else f"{high / 2**30:6.2f} ┤")
        for column in columns:
            component = _component_at((low + high) / 2, column)
            character, colour = _STYLES.get(component, ("─" if is_limit else " ", "bold red"))
            picture.append(character, colour)
        picture.append("\n")
    picture.append(f"   GiB └{_axis(columns)}\n        {_labels(columns)}\n")
    for index, component in enumerate(_components(columns)):
        character, colour = _STYLES[component]
        picture.append("\n" if index == _LEGEND_COLUMNS else "  " if index else "")
        picture.append(character * 2, colour)
        picture.append(f" {component}")
    if limit_bytes and limit_bytes > top:
        picture.append(f"\nThe limit, {limit_bytes / 2**30:.2f} GiB, is above the picture.")
    return picture


def _highest(moments: list[Moment], columns: int) -> list[Moment]:
    """One moment for each column, the highest of those it stands for; no phase is too narrow."""
    spans = list(_spans(moments))
    widths = [max(end - start, _SMALLEST_PHASE * len(moments)) for _, start, end in spans]
    found = []
    for (_, start, end), width in zip(spans, widths, strict=True):
        count = round(columns * width / sum(widths))
        edges = [start + column * (end - start) // count for column in range(count + 1)]
        for low, high in pairwise(edges):
            part = moments[low : max(high, low + 1)]
            found.append(max(part, key=lambda moment: moment.total))
    return found


def _top(peak_bytes: int, limit_bytes: float | None) -> float:
    is_near = limit_bytes is not None and limit_bytes <= _NEAR * peak_bytes
    return max(peak_bytes, limit_bytes * 1.02) if is_near else peak_bytes


def _component_at(height: float, moment: Moment) -> str | None:
    for component in _STYLES:
        height -= moment.sizes.get(component, 0)
        if height < 0:
            return component
    return None


def _components(moments: list[Moment]) -> list[str]:
    return [name for name in _STYLES if any(moment.sizes.get(name) for moment in moments)]


def _spans(moments: list[Moment]) -> Iterator[tuple[str, int, int]]:
    """Each phase with its first moment and the one after its last."""
    start = 0
    for phase, group in groupby(moment.phase for moment in moments):
        end = start + len(list(group))
        yield phase, start, end
        start = end


def _axis(columns: list[Moment]) -> str:
    return "".join("┴" + "─" * (end - start - 1) for _, start, end in _spans(columns))


def _labels(columns: list[Moment]) -> str:
    return "".join(phase[: end - start].ljust(end - start) for phase, start, end in _spans(columns))


def save_png(course: Course, limit_bytes: float | None, *, title: str, path: Path) -> None:
    """The same picture, finer."""
    moments = _highest(second_step(course), _FINE_COLUMNS)
    components = _components(moments)
    figure = figure_class()(figsize=(11, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.stackplot(
        range(len(moments)),
        [[moment.sizes.get(name, 0) / 2**30 for moment in moments] for name in components],
        labels=components,
        step="post",
    )
    top = _top(course.peak_bytes, limit_bytes) / 2**30
    if limit_bytes is not None:
        is_inside = limit_bytes / 2**30 <= top
        axes.axhline(limit_bytes / 2**30 if is_inside else 1.08 * top, color="black", ls="--")
        text = f"limit {limit_bytes / 2**30:.2f} GiB{'' if is_inside else ', above the picture'}"
        height = min(limit_bytes / 2**30, 1.08 * top)
        axes.annotate(text, (0, height), (4, 3), textcoords="offset points")
    spans = list(_spans(moments))
    for _, start, _ in spans[1:]:
        axes.axvline(start, color="white", lw=0.7)
    axes.set_xticks([(start + end) / 2 for _, start, end in spans], [name for name, *_ in spans])
    axes.tick_params("x", length=0)
    axes.set(title=title, ylabel="GiB", xlim=(0, len(moments) - 1), ylim=(0, 1.15 * top))
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"--png {path} cannot be written ({error})") from error


def figure_class() -> type:
    """matplotlib's Figure, if matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError(
            "--png needs matplotlib: pip install 'matplotlib>=3.10,<4', or leave --png out"
        ) from None
    return Figure
