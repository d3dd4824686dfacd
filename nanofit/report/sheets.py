"""The tables of a report: losses, stages, memory, what was planned and what came of it."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nanofit.report.history import WENT_BACK, History, Record, number_in
from nanofit.report.marks import shortened
from nanofit.report.outcome import Outcome, Reached
from nanofit.terminal import compact, duration

MIB = 2**20
UNKNOWN = "–"
MOST_EVALUATIONS = 12  # in a table


def evaluation_sheet(history: History) -> dict[str, Any]:
    """Validation losses; of many so many as tell the story."""
    best, shown = history.best(), some_of(history.evaluations, MOST_EVALUATIONS)
    rows = [row for row in history.evaluations if row is best or any(row is one for one in shown)]
    return sheet_of(
        ("step", "tokens", "time", "nats a token", "bits a byte", "expected"),
        (
            (
                *told_place(row),
                _number(row["val_loss"], ".4f") + (" (best)" if row is best else ""),
                _number(number_in(row, "bits_per_byte"), ".4f"),
                _band(number_in(row, "expected_low"), number_in(row, "expected_high")),
            )
            for row in rows
        ),
    )


def some_of(values: Sequence[Any], most: int) -> list[Any]:
    """So many of them, from first to last."""
    places = np.linspace(0, len(values) - 1, min(len(values), most)).round()
    return [values[int(place)] for place in places]


def told_place(record: Record) -> tuple[str, str, str]:
    """Where in a run something was: step, tokens, time."""
    return f"{record['step']:,}", compact(record["tokens"]), duration(record["seconds"])


@dataclass
class Stage:
    """A way of computing: how long, how fast, with how much memory."""

    name: str
    micro_batch: str
    passes: str
    spans: list[tuple[int, float]] = field(default_factory=list)  # of steps: first, and one after
    peak_mib: float | None = None


def stages_of(history: History) -> list[Stage]:
    """Each way in which a run computed, in the order in which it first did."""
    entered: list[tuple[int, tuple]] = []  # step and stage, as far as it counts
    peaks: dict[tuple, float] = {}
    for event in history.events:
        key = tuple(_told(event.get(name)) for name in ("now", "micro_batch", "passes"))
        if event["name"] == "stage":
            entered = [*_before(event["step"], entered), (event["step"], key)]
        elif event["name"] == "stage measured" and (peak := number_in(event, "peak_mib")):
            peaks[key] = max(peaks.get(key, 0), peak)
        elif event["name"] in WENT_BACK and entered:  # it goes on as it is
            entered = [*_before(event["step"], entered), (event["step"], entered[-1][1])]
    stages = {key: Stage(*key, peak_mib=peaks.get(key)) for _, key in entered}
    ends = [step for step, _ in entered[1:]] + [math.inf]
    for (step, key), end in zip(entered, ends, strict=False):  # there may be none
        stages[key].spans.append((step, end))
    return list(stages.values())


def stage_sheet(history: History) -> dict[str, Any]:
    return sheet_of(
        ("stage", "micro-batch", "tokens/s", "MFU", "peak MiB", "from step", "steps logged"),
        (
            (
                stage.name,
                f"{stage.micro_batch} × {stage.passes}",
                _number(_median(speeds), compact),
                _number(_median(_inside(history, "mfu", stage.spans)), ".1%"),
                _number(stage.peak_mib, ",.0f"),
                f"{stage.spans[0][0]:,}",
                f"{len(speeds):,}",
            )
            for stage in stages_of(history)
            for speeds in [_inside(history, "tokens_per_s", stage.spans)]
        ),
    )


class StageMemory(NamedTuple):
    """What a stage was expected to need, by component, and what it needed."""

    stage: str
    micro_batch: str
    components: dict[str, float]  # bytes
    measured_bytes: float | None


def memory_of(history: History) -> list[StageMemory]:
    found = []
    planned = history.run["memory"].get("stages") if history.run else None
    for name, stage in planned.items() if isinstance(planned, dict) else ():
        components = stage.get("components") if isinstance(stage, dict) else None
        if not isinstance(components, dict):
            continue
        sizes = {part: number_in(components, part) for part in components}
        sizes = {part: size for part, size in sizes.items() if size}
        peaks = [
            number_in(event, "peak_mib", 0) * MIB
            for event in history.events
            if event["name"] == "stage measured"
            and str(event.get("now")).startswith(name)
            and event.get("micro_batch") == stage.get("micro_batch")
        ]
        measured = max(peaks, default=None)
        found.append(StageMemory(name, _told(stage.get("micro_batch")), sizes, measured))
    return found


def plan_sheet(history: History, outcome: Outcome) -> dict[str, Any]:
    """What the run was expected to be, and how wrong that was."""
    rows = list(_plan_rows(history, outcome))
    return sheet_of(("", "planned", "happened", "error"), rows)


def _plan_rows(history: History, outcome: Outcome) -> Iterator[tuple[str, str, str, str]]:
    plan = history.run["plan"] if history.run else {}
    seconds, is_over = outcome.seconds, outcome.state == "finished"
    if not is_over:
        is_known = outcome.seconds_left is not None and outcome.state != "begun"
        seconds = seconds + outcome.seconds_left if is_known else None
    planned = number_in(plan, "seconds")
    name = "time" if is_over else "time, at this pace"
    yield name, _number(planned, duration), _number(seconds, duration), _error(planned, seconds)
    planned, speed = number_in(plan, "tokens_per_s"), _median(history.steps["tokens_per_s"])
    yield "tokens/s", _number(planned, compact), _number(speed, compact), _error(planned, speed)
    reached = outcome.reached
    if reached:
        yield (
            f"{reached.of} loss at step {reached.step:,}",
            _band(reached.low, reached.high),
            f"{reached.loss:.3f}",
            _off_the_middle(reached),
        )
    if not is_over:
        band = _band(number_in(plan, "loss_low"), number_in(plan, "loss_high"))
        yield "loss at the end", band, UNKNOWN, UNKNOWN
    yield from _memory_rows(history)


def _memory_rows(history: History) -> Iterator[tuple[str, str, str, str]]:
    """On a card what the allocator holds is measured, on a CPU the process with all it loaded."""
    machine = history.run["machine"] if history.run else {}
    on_cpu = str(machine.get("device")).startswith("CPU")
    for name, micro_batch, components, measured in memory_of(history):
        forecast = sum(components.values())
        yield (
            f"memory, {name}, {micro_batch} a pass" + ", the whole process" * on_cpu,
            f"{forecast / MIB:,.0f} MiB",
            _number(measured and measured / MIB, ",.0f", " MiB"),
            UNKNOWN if on_cpu else _error(forecast, measured),
        )


def sheet_of(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> dict[str, Any]:
    return {"columns": list(columns), "rows": [list(row) for row in rows]}


def _before(step: int, entered: list[tuple[int, tuple]]) -> list[tuple[int, tuple]]:
    return [one for one in entered if one[0] < step]


def _inside(history: History, name: str, spans: list[tuple[int, float]]) -> np.ndarray:
    """The values of the steps in some spans."""
    steps = np.array(history.steps["step"])
    is_inside = np.zeros(len(steps), dtype=bool)
    for first, after in spans:
        is_inside |= (steps >= first) & (steps < after)
    return np.array(history.steps[name])[is_inside]


def _median(values: Sequence[float]) -> float | None:
    known = np.array(values)
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else None


def _error(planned: float | None, happened: float | None) -> str:
    return f"{happened / planned - 1:+.1%}" if planned and happened else UNKNOWN


def _off_the_middle(reached: Reached) -> str:
    if not reached.where:
        return UNKNOWN
    off = round(reached.loss - (reached.low + reached.high) / 2, 2)
    return f"{off + 0.0:+.2f}, {reached.where}"  # zero has no minus


def _band(low: float | None, high: float | None) -> str:
    return UNKNOWN if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _number(value: float | None, shown: Any, unit: str = "") -> str:
    if value is None:
        return UNKNOWN
    return (shown(value) if callable(shown) else format(value, shown)) + unit


def _told(value: Any) -> str:
    return UNKNOWN if value is None else shortened(value)
