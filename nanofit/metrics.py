"""Loss, tokens/s, MFU -> the console, metrics.jsonl, Weights & Biases.

Only here are numbers read from the device, and only when a line is due.
"""

import json
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from nanofit.terminal import Progress, compact, duration


class Log:
    """What a run tells about itself. In processes other than the main one it only keeps silent."""

    def __init__(
        self,
        folder: Path,
        *,
        is_main: bool,
        log_interval: int,
        first_step: int,
        last_step: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        seconds_before: float = 0.0,
        sinks: tuple = (),
    ):
        self._is_main, self._interval = is_main, log_interval
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._peak_flops, self._sinks = peak_flops, sinks
        self._started = time.monotonic() - seconds_before
        self._mark = (first_step, time.monotonic())
        self._file = _open_records(folder / "metrics.jsonl") if is_main else None
        self._progress = Progress(
            "training", last_step, done=first_step, every_s=float("inf"), quiet=not is_main
        )

    def __enter__(self) -> "Log":
        self._progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._progress.__exit__(*error)
        for sink in self._sinks:
            sink.close()
        if self._file:
            with suppress(OSError):  # what a full disk has not taken by now is lost
                self._file.close()

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run so far, earlier launches included."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        self._progress.line(text)

    def stepped(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Tell of a finished step, if a line is due."""
        self._progress.update(step + 1)
        if not self._is_main or step % self._interval:
            return
        values = {"loss": loss.item(), "lr": lr, "grad_norm": grad_norm.item()}
        values |= self._speed(step + 1)
        self._write("step", step, step + 1, values)
        speed = f"tok/s {compact(values['tokens_per_s'])}"
        if "mfu" in values:
            speed += f"  mfu {values['mfu']:.1%}"
        self._progress.update(step + 1, f"loss {values['loss']:.4f}  {speed}")
        self.say(
            f"step {step}  loss {values['loss']:.4f}  lr {lr:.2e}  "
            f"norm {values['grad_norm']:.2f}  {speed}  eta {self._progress.eta()}"
        )

    def evaluated(self, step: int, val_loss: float) -> None:
        self._write("eval", step, step, {"val_loss": val_loss})
        self.say(f"step {step}  val_loss {val_loss:.4f}")
        self.restart_clock(step)

    def event(self, step: int, name: str, **details: Any) -> None:
        """Something happened that explains the curve or the speed."""
        self._write("event", step, step, {"name": name, **details})
        told = "  ".join(
            f"{key} {duration(value) if key.endswith('seconds') else value}"
            for key, value in details.items()
        )
        self.say(f"step {step}  {name}  {told}".rstrip())
        self.restart_clock(step)

    def restart_clock(self, step: int) -> None:
        """Leave what was done since the last step out of the speed."""
        self._mark = (step, time.monotonic())

    def _speed(self, steps_done: int) -> dict[str, float]:
        first, since = self._mark
        self._mark = (steps_done, time.monotonic())
        tokens_per_s = (
            (steps_done - first) * self._tokens_per_step / max(self._mark[1] - since, 1e-9)
        )
        if self._peak_flops is None:
            return {"tokens_per_s": tokens_per_s}
        mfu = tokens_per_s * self._flops_per_token / self._peak_flops
        return {"tokens_per_s": tokens_per_s, "mfu": mfu}

    def _write(self, kind: str, step: int, steps_done: int, values: dict[str, Any]) -> None:
        if not self._is_main:
            return
        tokens = steps_done * self._tokens_per_step
        record = {"kind": kind, "step": step, "tokens": tokens, "seconds": self.seconds}
        assert not record.keys() & values.keys(), "a detail must not replace what every record has"
        record |= {name: _json_value(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(record) + "\n")  # json writes floats as repr does: in full
            self._file.flush()
        except OSError as error:  # it stays in the buffer, to be written when there is space
            self.say(f"metrics.jsonl could not be written ({error.strerror}); going on")
        for sink in self._sinks:
            sink.write(record)


class WandbSink:
    """Sends records to Weights & Biases; a failure there ends the sending, never the run."""

    def __init__(self, project: str, name: str, config: dict[str, Any], folder: Path, say):
        self._say = say
        self._run = self._guarded(
            lambda: _wandb().init(project=project, name=name, config=config, dir=str(folder))
        )

    def write(self, record: dict[str, Any]) -> None:
        if self._run:
            numbers = {k: v for k, v in record.items() if isinstance(v, int | float)}
            self._guarded(lambda: self._run.log(numbers, step=record["step"]))

    def close(self) -> None:
        if self._run:
            self._guarded(lambda: self._run.finish())

    def _guarded(self, call):
        try:
            return call()
        # Whatever a tracker does wrong, training goes on; an unanswered login raises the second.
        except (Exception, KeyboardInterrupt) as error:
            self._say(f"wandb failed ({type(error).__name__}: {error}); going on without it")
            self._run = None


def _open_records(path: Path) -> TextIO:
    """Open for appending, without a last record that a crash cut short: every line is whole."""
    if path.exists() and path.stat().st_size:
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return path.open("a", encoding="utf-8")


def _wandb():
    import wandb

    return wandb


def _json_value(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
