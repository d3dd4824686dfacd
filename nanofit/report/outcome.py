"""Where a run is, or how it ended: its state, the loss it has reached, the time it still takes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanofit.report.curves import recent_loss
from nanofit.report.history import History, Record, number_in
from nanofit.terminal import duration

ENDINGS = ("finished", "stopped", "diverged")
RECENT_STEPS = 500  # that tell the time of those to come


class Reached(NamedTuple):
    """A loss and what is normal for it."""

    of: str  # validation or training
    step: int
    loss: float
    low: float | None
    high: float | None

    @property
    def where(self) -> str:
        """Above, below or inside its band; empty if there is none."""
        if self.low is None or self.high is None:
            return ""
        return "above" if self.loss > self.high else "below" if self.loss < self.low else "inside"

    def __str__(self) -> str:
        told = f"{self.of} loss {self.loss:.3f}"
        if self.where:
            told += f", {self.where} the expected {self.low:.2f} to {self.high:.2f}"
        return told


@dataclass(frozen=True)
class Outcome:
    """A run so far; what is not known is None."""

    state: str  # begun, running or one of the endings
    steps: int
    last_step: int | None
    seconds: float
    seconds_left: float | None
    reached: Reached | None
    reason: str = ""  # of a divergence

    @property
    def share(self) -> float | None:
        return min(self.steps / self.last_step, 1.0) if self.last_step else None

    def verdict(self) -> str:
        """The run in a line."""
        told = self._verdict()
        return told[:1].upper() + told[1:]

    def _verdict(self) -> str:
        where = f"step {self.steps:,}"
        if self.last_step:
            where += f" of {self.last_step:,}"
        if self.state == "diverged":
            return f"{where}: {self.reason}"
        if self.state == "finished":
            where = f"{self.steps:,} steps in {duration(self.seconds)}"
        if self.state == "begun":
            of_all = f" of {self.last_step:,}" if self.last_step else ""
            where = f"no step{of_all} is done"
        told = f"{where}: {self.reached}" if self.reached else where
        left = self.state != "finished" and self.seconds_left
        return f"{told}; about {duration(left)} to go" if left else told

    @property
    def advice(self) -> str:
        """What to do next, if anything."""
        if self.state == "diverged":
            return (
                "Continue with --on_spike=rollback or skip, or start again with a lower "
                "--learning_rate in another --out_dir."
            )
        return "The same command continues it." if self.state == "stopped" else ""


def outcome_of(history: History) -> Outcome:
    launch = newest_launch(history)
    steps, last_step, last_name = _steps_done(history, launch), _last_step(history, launch), ""
    if launch and launch[-1]["kind"] == "event":
        last_name = launch[-1]["name"]
    state = last_name if last_name in ENDINGS else "running" if len(history.steps) else "begun"
    reason = launch[-1].get("reason") if state == "diverged" else None
    left = number_in(history.run["plan"], "seconds") if history.run and state == "begun" else None
    if last_step is not None and (step_seconds := _step_seconds(history, launch)):
        left = max(last_step - steps, 0) * step_seconds
    return Outcome(
        state=state,
        steps=steps,
        last_step=last_step,
        seconds=newest(history)["seconds"],
        seconds_left=left,
        reached=_reached(history),
        reason=str(reason or "the loss diverged").rstrip(","),
    )


def newest_launch(history: History) -> list[Record]:
    """The record of the newest launch, and the events since."""
    story = history.story
    starts = [index for index, record in enumerate(story) if record["kind"] == "run"]
    return story[starts[-1] :] if starts else story


def newest(history: History) -> Record:
    """What was recorded last, as far as step and time go."""
    ends = [*history.story[-1:], *history.evaluations[-1:]]
    if len(history.steps):
        ends.append({name: history.steps[name][-1] for name in ("step", "tokens", "seconds")})
    return max(ends, key=lambda record: record["seconds"])


def heard_at(history: History) -> float | None:
    """When that was, in seconds since 1970."""
    started = history.run and number_in(history.run, "time")
    if not started:
        return None
    return started + newest(history)["seconds"] - history.run["seconds"]


def _steps_done(history: History, launch: list[Record]) -> int:
    ends = [record["step"] for record in (*launch[-1:], *history.evaluations[-1:])]
    if len(history.steps):
        ends.append(int(history.steps["step"][-1]) + 1)
    return max(ends)


def _last_step(history: History, launch: list[Record]) -> int | None:
    """Where the run ends: as planned, or as its speed has fixed it."""
    steps = history.run and number_in(history.run["plan"], "steps")
    for record in launch:
        if record.get("name") == "length fixed":
            steps = number_in(record, "max_iters", steps)
    return int(steps) if steps else None


def _step_seconds(history: History, launch: list[Record]) -> float | None:
    """The time of a step of late, with all that comes between steps."""
    since = max((one["step"] for one in launch if one.get("name") == "stage"), default=0)
    step, seconds = (np.array(history.steps[name][-RECENT_STEPS:]) for name in ("step", "seconds"))
    if np.count_nonzero(step >= since) > 1:
        step, seconds = step[step >= since], seconds[step >= since]
    if len(step) < 2 or seconds[-1] <= seconds[0]:
        return None
    return (seconds[-1] - seconds[0]) / (step[-1] - step[0])


def _reached(history: History) -> Reached | None:
    """The newest validation loss, else the typical training loss of late."""
    for record in reversed(history.evaluations):
        if record["val_loss"] is not None:
            band = (number_in(record, name) for name in ("expected_low", "expected_high"))
            return Reached("validation", record["step"], record["val_loss"], *band)
    loss = recent_loss(history.steps)
    if loss is None:
        return None
    band = (history.steps[name][-1] for name in ("expected_low", "expected_high"))
    band = (None if np.isnan(value) else value for value in band)
    return Reached("training", int(history.steps["step"][-1]), loss, *band)
