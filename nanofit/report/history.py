"""metrics.jsonl -> what a run has been through, as far as it counts.

A launch that goes on from a checkpoint repeats what came after it: then the later record counts.
"""

import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from nanofit.run.words import WENT_BACK
from nanofit.terminal import InputError

Record = dict[str, Any]

_COMMON = {"step": int, "tokens": int, "seconds": float}
_VALUES = {  # what a record of a kind must have to be of use
    "run": {"settings": dict, "data": dict, "machine": dict, "plan": dict, "memory": dict},
    "step": {"loss": float, "lr": float, "grad_norm": float, "tokens_per_s": float},
    "eval": {"val_loss": float},
    "event": {"name": str},
    "sample": {"prompt": str, "text": str},
}
_EXPECTED = {kind: _COMMON | values for kind, values in _VALUES.items()}
_MAY_BE_NONE = {"loss", "grad_norm", "val_loss"}  # what was no number
_TOO_LARGE = 2**63
_LONGEST_LINE = 2**20  # characters
_MOST_PROMPTS = 1000  # of a step, that are told from each other
_MOST_RECORDS = 100_000  # of evaluations, of samples, and of launches and events together
LONGEST_SAMPLE = 2000  # characters of a prompt and of what follows it
_COLUMNS = (*_EXPECTED["step"], "mfu", "expected_low", "expected_high")


class Steps:
    """The records of steps, by column: of hundreds of thousands each value takes eight bytes.

    What a record does not have, or what was no number, is nan.
    """

    def __init__(self):
        self._columns = {name: array("d") for name in _COLUMNS}

    def __len__(self) -> int:
        return len(self._columns["step"])

    def __getitem__(self, name: str) -> array:
        return self._columns[name]

    def add(self, record: Record) -> None:
        """Add a record; the steps from its own on, if there are any, were done again."""
        if len(self) and record["step"] <= self["step"][-1]:
            self.forget_from(record["step"])
        for name, column in self._columns.items():
            value = record.get(name)
            column.append(value if _is_number(value, float) else math.nan)

    def forget_from(self, step: int) -> None:
        kept = bisect_left(self["step"], step)
        for column in self._columns.values():
            del column[kept:]


@dataclass
class History:
    """The records of a run by kind; of steps and evaluations each once, in order."""

    folder: Path
    story: list[Record] = field(default_factory=list)  # launches and events, as they came
    steps: Steps = field(default_factory=Steps)
    evaluations: list[Record] = field(default_factory=list)
    samples: list[Record] = field(default_factory=list)
    damaged_lines: int = 0  # or too many to be a run's

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def runs(self) -> list[Record]:
        """One for each launch."""
        return [record for record in self.story if record["kind"] == "run"]

    @property
    def events(self) -> list[Record]:
        return [record for record in self.story if record["kind"] == "event"]

    @property
    def run(self) -> Record | None:
        """The newest launch; None if the run is older than such records."""
        return next((one for one in reversed(self.story) if one["kind"] == "run"), None)

    def best(self) -> Record | None:
        """The evaluation with the lowest loss."""
        sound = [record for record in self.evaluations if record["val_loss"] is not None]
        return min(sound, key=lambda record: record["val_loss"], default=None)


def read_history(folder: Path) -> History:
    """What a run's folder tells of it; a line that a crash cut short is counted and left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise InputError(
            f"no metrics.jsonl in {folder}; give the out_dir of a run, which train.py writes to"
        )
    history = History(folder)
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in _lines(file):
                record = _parsed(line)
                if record is None or not _add(history, record):
                    history.damaged_lines += 1
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    if not (history.story or history.steps or history.evaluations):
        raise InputError(f"{path} has no record of a run; train first")
    return history


def number_in(values: Record, name: str, otherwise: float | None = None) -> float | None:
    """A value that is a number one can reckon with; else what is given instead."""
    value = values.get(name)
    return value if _is_number(value, float) else otherwise


def _lines(file: TextIO) -> Iterator[str]:
    """Line by line; of one that is too long to be a record nothing but that there is one."""
    while line := file.readline(_LONGEST_LINE):
        is_whole = line.endswith("\n") or len(line) < _LONGEST_LINE
        yield line if is_whole else ""
        while not is_whole and (rest := file.readline(_LONGEST_LINE)):
            is_whole = rest.endswith("\n")


def _parsed(line: str) -> Record | None:
    """A record, if it is one; kinds that are not known here are a newer version's."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
        return None
    for name, kind in _EXPECTED.get(record["kind"], _COMMON).items():
        if name not in record or not _is_a(record[name], kind, name):
            return None
    return record


def _is_a(value: Any, kind: type, name: str) -> bool:
    if value is None:
        return name in _MAY_BE_NONE
    return _is_number(value, kind) if kind in (int, float) else isinstance(value, kind)


def _is_number(value: Any, kind: type) -> bool:
    return type(value) in (int, kind) and abs(value) < _TOO_LARGE  # nor is it nan


def _add(history: History, record: Record) -> bool:
    """Add a record; False if there are more of its kind than any run has."""
    kind, step = record["kind"], record["step"]
    if kind == "run" or (kind == "event" and record["name"] in WENT_BACK):
        history.steps.forget_from(step)
        for records in (history.evaluations, history.samples):  # at a step it has not been learned
            records[:] = [one for one in records if one["step"] <= step]
    if kind == "step":
        history.steps.add(record)
        return True
    if kind == "sample":
        record = record | {name: record[name][:LONGEST_SAMPLE] for name in ("prompt", "text")}
    lists = {"eval": history.evaluations, "sample": history.samples}
    records = history.story if kind in ("run", "event") else lists.get(kind, [])
    if kind in lists and _takes_place(record, records):
        return True
    if len(records) < _MOST_RECORDS:
        records.append(record)
        return True
    return False


def _takes_place(record: Record, records: list[Record]) -> bool:
    """Whether this was told before, and now counts instead; as after a resume."""
    for place in reversed(range(max(len(records) - _MOST_PROMPTS, 0), len(records))):
        if records[place]["step"] != record["step"]:
            return False
        if records[place].get("prompt") == record.get("prompt"):
            records[place] = record
            return True
    return False
