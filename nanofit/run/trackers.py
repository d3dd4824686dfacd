"""Records for others: a report, Weights & Biases, TensorBoard.

They get each record once metrics.jsonl has it, and never hold up the run: a report is written by a
child, a tracker in a thread of its own. What fails or hangs there is told, and the run goes on.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nanofit.files import PROJECT, atomic_write
from nanofit.run.words import OF_ALL_EVENTS, WENT_BACK, details_of, sentence
from nanofit.settings.config import RunConfig
from nanofit.terminal import first_line

REPORT = "report.html"
MOST_WAITING = 10_000  # records: a tracker that is so far behind hangs
CLOSE_S = 60.0  # for what has to be sent in the end
_TAIL_BYTES = 2**24  # of metrics.jsonl, in which what was measured last is

Record = dict[str, Any]


class News(NamedTuple):
    """What the owner of a run should know of a sink."""

    text: str
    is_warning: bool


class Sink(Protocol):
    """Where records go besides metrics.jsonl."""

    def write(self, record: Record) -> None: ...

    def news(self) -> News | None:
        """Each once."""

    def close(self) -> None: ...


def open_sinks(run: RunConfig, config: dict[str, Any], first_step: int) -> Iterator[Sink]:
    """Those that were asked for; the report comes first, for others send it on."""
    folder = Path(run.out_dir)
    if run.report:
        yield ReportWriter(folder)
    if run.wandb_log:
        name = run.wandb_run_name or folder.resolve().name
        yield Background("wandb", partial(Wandb, run.wandb_project, name, config, folder))
    if run.tensorboard_log:
        yield Background("tensorboard", partial(TensorBoard, folder, first_step))


class ReportWriter:
    """Has report.py write the run's page at every evaluation, if it is done with the last one."""

    def __init__(self, folder: Path):
        self._folder, self._child, self._is_told = folder, None, False

    def write(self, record: Record) -> None:
        if record["kind"] == "eval" and self._has_ended():
            self._start()

    def news(self) -> News | None:
        page = self._folder / REPORT
        if self._is_told or self._child is None or not self._has_ended() or not page.exists():
            return None
        self._is_told = True
        return News(f"report  {page}", is_warning=False)

    def close(self) -> None:
        """Write it once more, with all there is to tell."""
        self._wait()
        self._start()
        self._wait()

    def _has_ended(self) -> bool:
        return self._child is None or self._child.poll() is not None

    def _start(self) -> None:
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        words = [sys.executable, PROJECT / "report.py", self._folder, "--quiet"]
        with suppress(OSError):  # there is no room for another process: the next one will do
            # In a session of its own: Ctrl-C is meant for the run, which waits for its last page.
            self._child = subprocess.Popen(words, **quiet, start_new_session=True)
            if hasattr(os, "setpriority"):  # not on Windows
                os.setpriority(os.PRIO_PROCESS, self._child.pid, 19)  # the run comes first

    def _wait(self) -> None:
        if self._child:
            try:
                self._child.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._child.kill()


class Tracker(Protocol):
    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class Background:
    """Lets a tracker work in a thread of its own, until it fails or hangs."""

    def __init__(self, name: str, start: Callable[[], Tracker]):
        self._name, self._is_over = name, False
        self._news: News | None = None
        self._tracker: Tracker | None = None
        self._guarded(lambda: setattr(self, "_tracker", start()))  # which may ask for a login
        self._waiting: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        if self._is_over:
            return
        self._waiting.put(record)
        if self._waiting.qsize() > MOST_WAITING:
            self._end(f"is {MOST_WAITING:,} records behind")

    def news(self) -> News | None:
        told, self._news = self._news, None
        return told

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._end(f"did not finish within {CLOSE_S:.0f} s")

    def _work(self) -> None:
        while not self._is_over and (record := self._waiting.get()) is not None:
            self._guarded(partial(self._tracker.write, record))
        if not self._is_over:
            self._guarded(self._tracker.close)

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        # Whatever a tracker does wrong, training goes on; an unanswered login raises the second.
        except (Exception, KeyboardInterrupt) as error:
            way_out = f"; pip install {self._name}" if isinstance(error, ImportError) else ""
            self._end(f"failed ({type(error).__name__}: {first_line(error)}{way_out})")

    def _end(self, why: str) -> None:
        self._is_over = True
        self._news = News(f"{self._name} {why}; going on without it", is_warning=True)


class Wandb:
    """Weights & Biases; a run that is continued is continued there as well."""

    def __init__(self, project: str, name: str, config: dict[str, Any], folder: Path):
        import wandb

        self._folder, self._wandb = folder, wandb
        self._run = wandb.init(
            project=project,
            name=name,
            config=config,
            dir=str(folder),
            id=_run_id(folder),
            resume="allow",
        )
        # Steps may come again, after a crash: wandb's own count would refuse them.
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Record) -> None:
        if record["kind"] == "run":
            self._run.config.update(_flat(record), allow_val_change=True)
        else:
            self._run.log(_numbers(record) | dict(_texts(record)))

    def close(self) -> None:
        if (page := self._folder / REPORT).exists():
            artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report")
            artifact.add_file(str(page))
            self._run.log_artifact(artifact)
        self._run.finish()


class TensorBoard:
    """torch's own writer; what a crash made come again is left out.

    What was measured at the first step, which goes with it, is written again, but for what this
    launch measures itself before it goes on.
    """

    def __init__(self, folder: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self._first_step = first_step
        self._measured = _measured_at(first_step, folder / "metrics.jsonl")

    def write(self, record: Record) -> None:
        if record["kind"] == "step" or record["step"] > self._first_step:
            self._write_measured()
        self._measured.pop(_subject(record), None)
        self._write(record)

    def close(self) -> None:
        self._write_measured()
        self._writer.close()

    def _write_measured(self) -> None:
        while self._measured:
            self._write(self._measured.pop(next(iter(self._measured))))

    def _write(self, record: Record) -> None:
        step = record["step"]
        if record["kind"] != "run":
            for name, value in _numbers(record).items():
                if name != "step":
                    self._writer.add_scalar(name, value, step)
        for name, text in _texts(record):  # of one name it shows one text a step
            what = record.get("prompt") or record.get("name")
            self._writer.add_text(f"{name}/{what}" if what else name, text, step)


def _measured_at(step: int, path: Path) -> dict[tuple[str, str], Record]:
    """The evaluation and the samples of a step, as far as the run has not gone back since."""
    found: dict[tuple[str, str], Record] = {}
    for record in _newest(path):
        kind, at = record.get("kind"), record.get("step")
        if at == step and kind in ("eval", "sample"):
            found[_subject(record)] = record
        elif (kind == "run" or record.get("name") in WENT_BACK) and at < step:
            found.clear()
    return found


def _subject(record: Record) -> tuple[str, str]:
    """What is measured, at one step."""
    return record["kind"], record.get("prompt", "")


def _newest(path: Path) -> Iterator[Record]:
    """The last records of a run; lines that are not whole are left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        lines = file.read(_TAIL_BYTES).splitlines()
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                yield record


def _numbers(record: Record) -> dict[str, float]:
    """The numbers of a record; an event's details, which are no curves, under its name."""
    own = {name: value for name, value in record.items() if _is_number(value)}
    if record["kind"] != "event":
        return own
    return {
        name if name in OF_ALL_EVENTS else f"{record['name']}/{name}": value
        for name, value in own.items()
    }


def _texts(record: Record) -> Iterator[tuple[str, str]]:
    if record["kind"] == "event":
        told = sentence(record["name"], details_of(record))
        yield "event", told or record["name"]
    if record["kind"] == "sample":
        yield "sample", record["prompt"] + record["text"]


def _flat(record: Record, prefix: str = "") -> dict[str, Any]:
    """Nested values under names with dots, settings under their own."""
    flat = {}
    for name, value in record.items():
        if name == "settings":
            flat |= value
        elif isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _run_id(folder: Path) -> str:
    """The same at each launch."""
    path = folder / "wandb-id"
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    made = uuid.uuid4().hex[:8]
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as temporary:
        temporary.write_text(made, encoding="utf-8")
    return made
