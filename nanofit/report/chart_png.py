"""The main curve of a report as a PNG, by matplotlib, which is optional."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanofit.terminal import compact

COLOURS = ("#0b5fc2", "#c2410c", "#0f766e", "#86319c", "#8a6100", "#a3164f")
DASHES = ("-", "--", ":", "-.")
MUTED = "#66645d"
LONG_RUN = 2000  # steps, of which the first tenth would flatten the rest
MOST_MARKERS = 60
LONGEST_TITLE = 110


class Line(NamedTuple):
    """A line of the picture; a label is written where it ends."""

    tokens: Sequence[float]
    losses: np.ndarray
    style: dict[str, Any]
    label: str = ""
    is_noise: bool = False  # single steps, whose heights do not count


def save_png(report: dict[str, Any], path: Path) -> None:
    """Draw losses against tokens; ImportError if there is no matplotlib."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # nobody asked how it finds its fonts
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes, (first, *_) = figure.add_subplot(), report["runs"]
    lines = list(_lines(report["runs"]))
    for line in lines:
        axes.plot(line.tokens, line.losses, **line.style)
    if lines and first["steps"] > LONG_RUN:
        _fit_the_end(axes, lines)
    _draw_band(axes, first["curve"])
    _draw_marks(axes, first["marks"])
    _label_ends(axes, [line for line in lines if line.label])
    title = f"{first['name']}: {first['verdict']}"
    axes.set_title(title[:LONGEST_TITLE], loc="left", pad=20, parse_math=False)
    axes.set(xlabel="tokens", ylabel="loss, nats a token")
    axes.xaxis.set_major_formatter(lambda tokens, _: compact(tokens))
    axes.grid(color="#e2e0d9", lw=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may have characters that no font here has
        figure.savefig(path, dpi=120, format="png")


def _lines(runs: Sequence[dict[str, Any]]) -> Iterator[Line]:
    is_alone = len(runs) == 1
    for index, run in enumerate(runs):
        curve, evaluations = run["curve"], run["evaluations"]
        colour = COLOURS[index % len(COLOURS)]
        if "loss" in curve:
            faint = {"color": colour, "lw": 0.6, "alpha": 0.35}
            yield Line(curve["tokens"], _numbers(curve["loss"]), faint, is_noise=True)
            style = {"color": colour, "lw": 2, "ls": DASHES[index % len(DASHES)]}
            label = "training" if is_alone else run["name"]
            yield Line(curve["tokens"], _numbers(curve["typical"]), style, label)
        if "val_loss" in evaluations:
            tokens, losses = evaluations["tokens"], _numbers(evaluations["val_loss"])
            style = {"color": COLOURS[1] if is_alone else colour, "lw": 1.3, "ls": (0, (4, 3))}
            if len(tokens) <= MOST_MARKERS:
                style |= {"marker": "o", "ms": 4, "mfc": "white"}
            yield Line(tokens, losses, style, "validation" if is_alone else "")
    low_and_high = ("expected_low", "expected_high")
    for name in low_and_high:
        if name in runs[0]["curve"]:
            curve, style = runs[0]["curve"], {"color": COLOURS[0], "lw": 0.8, "ls": ":"}
            label = "expected" if name == "expected_high" else ""
            yield Line(curve["tokens"], _numbers(curve[name]), style, label)


def _fit_the_end(axes: Any, lines: Sequence[Line]) -> None:
    """Heights for all but the first tenth; spikes of single steps leave the picture at its top."""
    last = max(line.tokens[-1] for line in lines)
    late = [(line, line.losses[np.array(line.tokens) >= last / 10]) for line in lines]
    late = [(line, losses[np.isfinite(losses)]) for line, losses in late]
    lows = [losses.min() for _, losses in late if len(losses)]
    highs = [losses.max() for line, losses in late if len(losses) and not line.is_noise]
    if highs and (low := min(lows)) < (high := max(highs)):
        room = 0.05 * (high - low)
        axes.set_ylim(low - room, high + room)


def _draw_band(axes: Any, curve: dict[str, Any]) -> None:
    if "expected_low" in curve and "expected_high" in curve:
        low, high = _numbers(curve["expected_low"]), _numbers(curve["expected_high"])
        axes.fill_between(curve["tokens"], low, high, color=COLOURS[0], alpha=0.13, lw=0)


def _draw_marks(axes: Any, marks: Sequence[dict[str, Any]]) -> None:
    """Numbered as on the page, where there is room for a number."""
    start, end = axes.get_xlim()
    free_from = start
    for tokens, number in sorted((mark["tokens"], number) for number, mark in enumerate(marks, 1)):
        axes.axvline(tokens, color=MUTED, lw=0.7, ls=":")
        if tokens >= free_from:
            free_from = tokens + 0.02 * (end - start)
            place = (tokens, 1.015)
            axes.annotate(
                str(number), place, xycoords=axes.get_xaxis_transform(), ha="center", size=8
            )


def _label_ends(axes: Any, lines: Sequence[Line]) -> None:
    """At the right of the picture, moved apart where they would cover each other."""
    bottom, top = axes.get_ylim()
    ends = [(line.losses[np.isfinite(line.losses)][-1], line) for line in lines]
    free_from = 0.0
    for loss, line in sorted(ends, key=lambda end: end[0]):
        height = max((loss - bottom) / (top - bottom), free_from)
        free_from = height + 0.04
        axes.annotate(
            line.label,
            (1.01, height),
            xycoords="axes fraction",
            color=line.style["color"],
            va="center",
            parse_math=False,
        )


def _numbers(column: Sequence[float | None]) -> np.ndarray:
    return np.array(column, dtype=float)  # None becomes nan
