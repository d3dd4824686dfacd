"""Loss, tokens/s, MFU -> the console, metrics.jsonl, and whoever else is to know.

Only here are numbers read from the device: when a line is due, or without waiting for them.
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from nanofit.machine.device import Peek
from nanofit.outlook.scaling import Band
from nanofit.run.spikes import LossWatch, SkipWatch
from nanofit.run.trackers import Sink
from nanofit.run.words import changed_numbers, is_warning, sentence
from nanofit.terminal import Progress, compact

LIVE_S = 1.0  # between looks at the loss for the live line
WARNING = "yellow"
TIMED_STEPS = 10  # that tell the speed of a run
_TAIL_BYTES = 2**20  # of the records, in which the newest are
OUTSIDE_EVALUATIONS = 3  # in a row, before it is called unusual
CAUSES = {
    "above": "a changed effective batch, a learning rate too high or too low, text without "
    "separators between documents, or text harder than FineWeb",
    "below": "text easier than FineWeb or with repeats, or validation text among the training text",
}


class Log:
    """What a run tells about itself. In processes other than the main one it only keeps silent."""

    def __init__(
        self,
        folder: Path,
        *,
        is_main: bool,
        log_interval: int,
        first_step: int,
        last_step: int | None,
        tokens_per_step: int,
        flops_per_token: float,
        peak_flops: float | None,
        seconds_before: float = 0.0,
        watch: LossWatch | SkipWatch | None = None,
        peek: Callable[[Tensor], Peek] | None = None,
        bytes_per_token: float | None = None,
        sinks: Sequence[Sink] = (),
    ):
        self._is_main, self._interval = is_main, log_interval
        self._tokens_per_step, self._flops_per_token = tokens_per_step, flops_per_token
        self._peak_flops, self._sinks = peak_flops, sinks
        self._bytes_per_token = bytes_per_token  # of the text to validate on
        self._started = time.monotonic() - seconds_before
        self._mark = (first_step, time.monotonic())
        self._path = folder / "metrics.jsonl"
        self._records = _Records(self._path) if is_main else None
        self.divergence: str | None = None  # in words, once it is certain
        self.is_suspect = False
        self._watch, self._unseen = watch or LossWatch(), None
        self._expected: Callable[[int], Band | None] = lambda steps_done: None
        self._outside = 0  # evaluations in a row: above zero above the band, below zero below it
        self._judged = False
        self._timed: tuple[int, float] | None = None
        self._peek, self._peeked = peek, None  # what is on its way for the live line, and its step
        self._live_mark = self._mark
        self._last_told: dict[str, str] = {}  # the last sentence of each event
        self._ends = last_step is not None
        self._progress = Progress(
            "training", last_step or 10**9, done=first_step, every_s=float("inf"), quiet=not is_main
        )

    def __enter__(self) -> "Log":
        self._progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._progress.__exit__(*error)
        for sink in self._sinks:
            sink.close()
            self._pass_on(sink)
        if self._records:
            self._records.close()

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run so far, earlier launches included."""
        return time.monotonic() - self._started

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step, once enough of them were timed since the last event."""
        if self._timed is None or self._timed[0] < TIMED_STEPS:
            return None
        return self._timed[1] / self._timed[0]

    @property
    def live_note(self) -> str:
        """The loss and speed that the live line shows."""
        return self._progress.note

    def expect(self, expected: Callable[[int], Band | None], last_step: int | None = None) -> None:
        """Tell which losses are normal after so many steps, and where the run ends."""
        self._expected = expected
        if last_step is not None:
            self._progress.total, self._ends = last_step, True

    def say(self, text: str) -> None:
        self._progress.line(text)

    def tell(
        self, step: int, text: str, *, is_warning: bool = False, bold: Sequence[str] = ()
    ) -> None:
        """Say what happened at a step, in a column of its own."""
        width = len(str(self._progress.total)) if self._ends else 5
        style = WARNING if is_warning else ""
        self._progress.line(f"step {step:<{width}}  {text}", style=style, bold=bold)

    def stepped(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Tell of a finished step, if a line is due."""
        self._progress.update(step + 1)
        self._unseen = (step, loss, grad_norm)
        if not self._is_main:
            return
        if step % self._interval:
            self._refresh(step + 1, loss)
            return
        values = {"loss": loss.item(), "lr": lr, "grad_norm": grad_norm.item()}
        values |= self._speed(step + 1)
        band = self._expected(step + 1)
        self._write("step", step, step + 1, values | _band_values(band))
        self._show(step + 1, values["loss"], values["tokens_per_s"])
        told = f"{values['loss']:.4f}"
        line = f"loss {told:<7}{_band_text(band)}  lr {lr:.2e}  norm {values['grad_norm']:.2f}"
        if self._progress.is_live:  # which tells the rest
            line += f"  {compact(values['tokens_per_s'])} tok/s"
        else:
            line += f"  {self._speed_text(values['tokens_per_s'])}"
            line += f"  eta {self._progress.eta()}" if self._ends else ""
        self.tell(step, line, bold=[told])
        self.diverged(look=True)

    def _refresh(self, steps_done: int, loss: Tensor) -> None:
        """Keep the live line fresh: show a loss that has arrived, and now and then send for one."""
        if not self._progress.is_live or self._peek is None:
            return
        if self._peeked is None and time.monotonic() - self._live_mark[1] >= LIVE_S:
            self._peeked = (steps_done, self._peek(loss))
        if self._peeked is not None and self._peeked[1].ready():
            (peeked_step, peek), (first, since) = self._peeked, self._live_mark
            seconds = max(time.monotonic() - since, 1e-9)
            speed = (peeked_step - first) * self._tokens_per_step / seconds
            self._show(peeked_step, peek.value(), speed)

    def _show(self, steps_done: int, loss: float, tokens_per_s: float) -> None:
        self._progress.update(
            self._progress.done, f"loss {loss:.4f}  {self._speed_text(tokens_per_s)}"
        )
        self._peeked, self._live_mark = None, (steps_done, time.monotonic())

    def _speed_text(self, tokens_per_s: float) -> str:
        told = f"{compact(tokens_per_s)} tok/s"
        if self._peak_flops is None:
            return told
        return f"{told}  mfu {tokens_per_s * self._flops_per_token / self._peak_flops:.1%}"

    def diverged(self, *, look: bool) -> bool:
        """Whether divergence is certain; with `look` the last step is looked at first."""
        if look and self._unseen and self._is_main:
            (step, loss, grad_norm), self._unseen = self._unseen, None
            sight = self._watch.look(loss, grad_norm)
            self.divergence = self.divergence or sight.divergence
            self.is_suspect = sight.is_suspect
            if sight.skipped:
                self.event(step + 1, "spikes skipped", updates=sight.skipped)
        return self.divergence is not None

    @property
    def recent_losses(self) -> tuple[float, ...]:
        return self._watch.recent

    def went_back(self, recent_losses: Sequence[float]) -> None:
        """The run was put back to where it was sound."""
        self.divergence, self.is_suspect, self._unseen = None, False, None
        self._watch.restart(recent_losses)

    def began(self, step: int, described: dict[str, Any]) -> None:
        """Record what is launched."""
        self._write("run", step, step, described)

    def evaluated(self, step: int, val_loss: float) -> None:
        band, values = self._expected(step), {"val_loss": val_loss}
        told = f"{val_loss:.4f}"
        line = f"validation loss {told}{_band_text(band)}"
        if self._bytes_per_token:
            values["bits_per_byte"] = val_loss / math.log(2) / self._bytes_per_token
            line += f"  {values['bits_per_byte']:.4f} bits a byte"
        self._write("eval", step, step, values | _band_values(band))
        self.tell(step, line, bold=[told])
        self._judge(step, val_loss, band)
        self.restart_clock(step)

    def _judge(self, step: int, val_loss: float, band: Band | None) -> None:
        """Say once, with the usual causes, that a run has long been outside its band."""
        if band is None:
            return
        side = (val_loss > band.high) - (val_loss < band.low)
        self._outside = side + (self._outside if side * self._outside > 0 else 0)
        if abs(self._outside) >= OUTSIDE_EVALUATIONS and not self._judged:
            self._judged = True
            where = "above" if side > 0 else "below"
            self.event(step, f"loss {where} what is normal", causes=CAUSES[where])

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """Keep a text that the model wrote; show how it begins."""
        self._write("sample", step, step, {"prompt": prompt, "text": text})
        begin, *more = (prompt + text).strip().splitlines() or [""]
        self.tell(step, f"sample  {begin}{' ...' if more else ''}")
        self.restart_clock(step)

    def event(self, step: int, name: str, **details: Any) -> None:
        """Something happened that explains the curve or the speed."""
        self._write("event", step, step, {"name": name, **details})
        if self._is_main and (told := sentence(name, details)):
            bold = changed_numbers(self._last_told.get(name, told), told)
            self.tell(step, told, is_warning=is_warning(name, details), bold=bold)
            self._last_told[name] = told
        self.restart_clock(step)
        self._progress.restart_clock()
        self._timed = None

    def note(self, step: int, name: str, **details: Any) -> None:
        """Something happened beside the run, which went on meanwhile."""
        self._write("event", step, step, {"name": name, **details})
        self.tell(step, sentence(name, details))

    def restart_clock(self, step: int) -> None:
        """Leave what was done since the last step out of the speed."""
        self._mark = self._live_mark = (step, time.monotonic())
        self._peeked = None

    def _speed(self, steps_done: int) -> dict[str, float]:
        first, since = self._mark
        self._mark = (steps_done, time.monotonic())
        steps, seconds = steps_done - first, max(self._mark[1] - since, 1e-9)
        tokens_per_s = steps * self._tokens_per_step / seconds
        # What comes first after an event may be slow, and is not counted.
        before = self._timed
        self._timed = (0, 0.0) if before is None else (before[0] + steps, before[1] + seconds)
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
        # json writes floats as repr does: in full.
        if told := self._records.write(json.dumps(record)):
            self._progress.line(told, style=WARNING)
        for sink in self._sinks:
            sink.write(record)
            self._pass_on(sink)

    def _pass_on(self, sink: Sink) -> None:
        """Say what a sink has to tell its owner."""
        if news := sink.news():
            self._progress.line(news.text, style=WARNING if news.is_warning else "")


def has_ended(folder: Path, step: int) -> bool:
    """Whether a run told of its end at a step; True where no records are left to say."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return True
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        lines = file.read().splitlines()
    end = {"kind": "event", "step": step, "name": "finished"}
    return any(end.items() <= record.items() for record in map(_record, lines))


def _record(line: bytes) -> dict[str, Any]:
    """What a line holds; nothing if it is not whole."""
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict):
            return record
    return {}


class _Records:
    """The lines of a file; what a full disk does not take waits, in order, until it does."""

    def __init__(self, path: Path):
        self._path, self._waiting, self._is_refused = path, bytearray(), False
        self._open()

    def write(self, line: str) -> str | None:
        """Add a line after those that wait; what its owner should know of it."""
        self._waiting += line.encode() + b"\n"
        return self._write_down()

    def close(self) -> None:
        """What a full disk has not taken by now is lost."""
        self._write_down()
        with suppress(OSError):
            self._file.close()

    def _write_down(self) -> str | None:
        try:
            told = self._in_place()
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            was_told, self._is_refused = self._is_refused, True
            told = f"{self._path.name} could not be written ({error.strerror}); going on"
            return None if was_told else told
        self._is_refused = False
        return told

    def _in_place(self) -> str | None:
        """Begin the file anew if somebody has removed it."""
        if self._path.exists() and not self._file.closed:
            return None
        self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        return f"{self._path} was removed; begun anew"

    def _open(self) -> None:
        """Without a last line that a crash cut short: every line is whole."""
        if self._path.exists() and self._path.stat().st_size:
            os.truncate(self._path, _whole_lines_bytes(self._path))
        self._file = self._path.open("ab", buffering=0)  # a buffer loses what it has no room for


def _whole_lines_bytes(path: Path) -> int:
    """Where the last whole line ends; of a large file only its end is read."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - _TAIL_BYTES, 0)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def _band_values(band: Band | None) -> dict[str, float]:
    return {"expected_low": band.low, "expected_high": band.high} if band else {}


def _band_text(band: Band | None) -> str:
    return f" (normal {band.low:.2f}-{band.high:.2f})" if band else ""


def _json_value(value: Any) -> Any:
    """JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _json_value(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
