"""Runs -> all that their report says, in plain values: texts, tables and columns to draw."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanofit.report.curves import FEWEST_STRETCHES, STRETCHES, curve_of, evaluations_of
from nanofit.report.history import History, number_in
from nanofit.report.marks import marks_of
from nanofit.report.outcome import Outcome, heard_at, newest, outcome_of
from nanofit.report.particulars import facts_of, settings_sheets
from nanofit.report.sheets import (
    evaluation_sheet,
    memory_of,
    plan_sheet,
    some_of,
    stage_sheet,
    told_place,
)
from nanofit.terminal import compact, duration

MOST_SAMPLES = 30
LEAST_QUIET_S = 600  # before a run that is silent may have ended
QUIET_GAPS = 5  # or so many times the longest of late between two records


def report_of(histories: Sequence[History], *, made: float) -> dict[str, Any]:
    """The report of some runs; the first one is what it is about, the others are beside it."""
    stretches = max(STRETCHES // len(histories), FEWEST_STRETCHES)
    names = names_of([history.folder for history in histories])
    runs = [_run(one, name, stretches) for one, name in zip(histories, names, strict=True)]
    return {"made": made, "runs": runs, "settings": settings_sheets(histories, names)}


def names_of(folders: Sequence[Path]) -> list[str]:
    """What tells folders apart: their last names, and as many before as that takes."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            break
    return names


def _run(history: History, name: str, stretches: int) -> dict[str, Any]:
    outcome, curve = outcome_of(history), curve_of(history.steps, stretches)
    return {
        "name": name,
        "state": outcome.state,
        "verdict": outcome.verdict(),
        "advice": outcome.advice,
        "share": outcome.share,
        "heard_at": heard_at(history),
        "seconds": outcome.seconds,
        "quiet_after_s": _quiet_after_s(history),
        "steps": len(history.steps),
        "curve": curve,
        "evaluations": evaluations_of(history, stretches),
        "summary": _summary(history, outcome),
        "marks": [
            mark._asdict() | {"told": told_place(mark._asdict())} for mark in marks_of(history)
        ],
        "evaluation_sheet": evaluation_sheet(history),
        "plan": plan_sheet(history, outcome),
        "stages": stage_sheet(history),
        "memory": _memory(history),
        "samples": _samples(history),
        "facts": facts_of(history),
        "notes": list(_notes(history, len(curve.get("tokens", [])))),
    }


def _quiet_after_s(history: History) -> float:
    gaps = np.diff(np.array(history.steps["seconds"][-1000:]))
    return max(LEAST_QUIET_S, QUIET_GAPS * float(gaps.max(initial=0)))


def _summary(history: History, outcome: Outcome) -> str:
    """The main curve in words, for those who do not see it."""
    losses, end = np.array(history.steps["loss"]), newest(history)
    losses, told = losses[np.isfinite(losses)], "No loss yet."
    if len(losses):
        told = (
            f"Training loss from {losses[0]:.2f} to {losses[-1]:.2f} over {compact(end['tokens'])} "
            f"tokens in {duration(end['seconds'])}, at its lowest {losses.min():.2f}."
        )
    if best := history.best():
        told += f" Lowest validation loss {best['val_loss']:.3f} at step {best['step']:,}."
    if outcome.reached and outcome.reached.where:
        return told
    plan = history.run["plan"] if history.run else {}
    low, high = (number_in(plan, f"loss_{end}") for end in ("low", "high"))
    if low is None or high is None:
        return f"{told} What is normal for such a run is not known."
    return f"{told} Expected at the end: {low:.2f} to {high:.2f}."


def _memory(history: History) -> dict[str, Any]:
    """In bytes; the limit is that of the run, the total that of the card."""
    run = history.run or {"memory": {}, "machine": {}}
    return {
        "limit_bytes": number_in(run["memory"], "limit_bytes"),
        "total_bytes": number_in(run["machine"], "memory_bytes"),
        "stages": [stage._asdict() for stage in memory_of(history)],
    }


def _notes(history: History, drawn: int) -> Iterator[str]:
    """What one should know about the drawing."""
    if drawn < len(history.steps):
        yield (
            f"{drawn:,} of {len(history.steps):,} steps are drawn, of each stretch those with the "
            "lowest and highest loss, gradient norm and speed, so that no spike is lost."
        )
    if history.damaged_lines:
        yield f"Damaged lines of metrics.jsonl, left out: {history.damaged_lines:,}."


def _samples(history: History) -> list[dict[str, Any]]:
    """Of many samples some from beginning to end, each time of all prompts."""
    steps = sorted({sample["step"] for sample in history.samples})
    prompts = max(Counter(sample["step"] for sample in history.samples).values(), default=1)
    shown = set(some_of(steps, max(MOST_SAMPLES // prompts, 2)))
    samples = [sample for sample in history.samples if sample["step"] in shown]
    return [
        {
            "told": told_place(sample),
            "prompt": sample["prompt"],
            "text": sample["text"],
        }
        for sample in some_of(samples, 10 * MOST_SAMPLES)  # so many prompts no run has
    ]
