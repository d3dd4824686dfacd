"""What a run says to a person: a sentence for each event. Programs read metrics.jsonl instead."""

import re
from collections.abc import Callable
from typing import Any

from nanofit.terminal import compact, duration

WARNINGS = {
    "data changed",
    "diverged",
    "evaluation shrunk",
    "loss above what is normal",
    "loss below what is normal",
    "not compiled yet",
    "rolled back",
    "save failed",
    "spikes skipped",
    "waiting for memory",
    "went back",
}
BEGINNINGS = ("the run begins", "resumed")  # reasons of a first stage, told by the event before it
EXPECTED = ("compiled in ", "memory was quiet")  # how reasons begin that are no trouble
WENT_BACK = {"rolled back", "went back"}  # events at the step from which all is done again
OF_ALL_EVENTS = ("kind", "step", "tokens", "seconds", "name")
NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*[kMB]?(?!\w)")


def details_of(event: dict[str, Any]) -> dict[str, Any]:
    """What a record of an event tells beside its name and place."""
    return {name: value for name, value in event.items() if name not in OF_ALL_EVENTS}


def sentence(name: str, details: dict[str, Any]) -> str:
    """An event in words, or in keys and values if nobody wrote any; empty if it was said before."""
    if name in SENTENCES:
        return SENTENCES[name](**details)
    told = "  ".join(f"{key} {_value(key, value)}" for key, value in details.items())
    return f"{name}  {told}".rstrip()


def is_warning(name: str, details: dict[str, Any]) -> bool:
    """Whether an event is one that its reader may want to do something about."""
    if name == "stage":
        return not details["reason"].startswith((*BEGINNINGS, *EXPECTED))
    return name in WARNINGS


def changed_numbers(before: str, now: str) -> list[str]:
    """The numbers of a sentence that the one before it did not have."""
    known = set(NUMBER.findall(before))
    return [number for number in dict.fromkeys(NUMBER.findall(now)) if number not in known]


def _began(
    how: str,
    micro_batch: int,
    compiled_micro_batch: int | None = None,
    limit_mib: int | None = None,
    savers: str | None = None,
) -> str:
    told = f"{how} in eager: {_batch(micro_batch)}"
    if compiled_micro_batch not in (None, micro_batch):
        told += f", {compiled_micro_batch} once compiled"
    if savers is not None:
        told += f", with {savers}"
    return told if limit_mib is None else f"{told}, within {limit_mib:,} MiB"


def _stage(
    now: str, micro_batch: int, passes: int, reason: str, next_try_step: int | None = None
) -> str:
    if reason in BEGINNINGS:
        return ""
    return f"{reason}: now {now}, {_batch(micro_batch, passes)}{_later(next_try_step)}"


def _measured(
    now: str,
    micro_batch: int,
    passes: int,
    tokens_per_s: float,
    peak_mib: int,
    times_faster: float | None = None,
) -> str:
    told = f"{now}: {_batch(micro_batch, passes)}, {compact(tokens_per_s)} tokens/s"
    if times_faster is not None:
        told += f" ({times_faster:g} × eager)"
    return f"{told}, peak {peak_mib:,} MiB"


def _skipped(updates: int) -> str:
    return f"skipped {_count(updates, 'update')} whose gradient exploded"


def _unusual(where: str, causes: str) -> str:
    return f"the loss has long been {where} what is normal for such a run; usual causes: {causes}"


def _rolled_back(left_out_steps: int) -> str:
    left_out = _count(left_out_steps, "step")
    return f"rolled back to this step; the data of the {left_out} that led astray are left out"


def _evaluation_shrunk(micro_batch: int, reason: str, next_try_step: int) -> str:
    return f"{reason} in the evaluation: now {_batch(micro_batch)} there{_later(next_try_step)}"


SENTENCES: dict[str, Callable[..., str]] = {
    "started": lambda **fit: _began("started", **fit),
    "resumed": lambda **fit: _began("resumed", **fit),
    "data changed": lambda **splits: f"goes on with other data: {_each(splits)}",
    "machine changed": lambda **names: f"goes on elsewhere: {_each(names)}",
    "stage": _stage,
    "stage measured": _measured,
    "not compiled yet": lambda reason, next_try_step: (
        f"not compiled yet: {reason}; tried again at step {next_try_step}"
    ),
    "evaluation shrunk": _evaluation_shrunk,
    "waiting for memory": lambda pause_seconds, reason: (
        f"{reason}: waiting {duration(pause_seconds)} for other programs to give some back"
    ),
    "spikes skipped": _skipped,
    "loss above what is normal": lambda causes: _unusual("above", causes),
    "loss below what is normal": lambda causes: _unusual("below", causes),
    "saved": lambda path, mib, took: f"saved {path}, {mib:,} MiB in {took:.2g} s",
    "save failed": lambda reason: f"NOT SAVED, going on and trying again: {reason}",
    "diverged": lambda reason: f"diverged: {reason.rstrip(',')}",
    "rolled back": _rolled_back,
    "went back": lambda reason: f"went back to this step: {reason}",
    "length fixed": lambda max_iters, hours: (
        f"length fixed by the speed so far: {max_iters} steps end in {hours:g} hours"
    ),
}


def _batch(micro_batch: int, passes: int = 1) -> str:
    told = f"{_count(micro_batch, 'sequence')} a pass"
    return told if passes == 1 else f"{told}, {passes} passes a step"


def _later(next_try_step: int | None) -> str:
    return "" if next_try_step is None else f"; more is tried again at step {next_try_step}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number:,} {what}s"


def _each(told: dict[str, str]) -> str:
    return "; ".join(f"{name} {what}" for name, what in told.items())


def _value(key: str, value: Any) -> Any:
    return duration(value) if key.endswith("seconds") else value
