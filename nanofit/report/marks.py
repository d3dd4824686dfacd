"""What happened to a run, for its curve: each event in words, with the place where it happened."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from nanofit.report.history import History, Record
from nanofit.run.words import details_of, is_warning, sentence
from nanofit.terminal import redacted

MOST_MARKS = 200  # more are told together
LONGEST_VALUE = 120  # of a setting, in characters
KINDS = {  # of events; what is not named here is "other"
    "not compiled yet": "stage",
    "evaluation shrunk": "batch",
    "waiting for memory": "batch",
    "spikes skipped": "spike",
    "diverged": "spike",
    "loss above what is normal": "spike",
    "loss below what is normal": "spike",
    "rolled back": "recovery",
    "went back": "recovery",
    "data changed": "data",
    "machine changed": "launch",
    "resumed": "launch",
    "stopped": "launch",
}
UNMARKED = {"started", "finished", "saved", "stage measured"}


class Mark(NamedTuple):
    """Something that happened, and where."""

    step: int
    tokens: float
    seconds: float
    kind: str
    text: str
    is_warning: bool = False


def marks_of(history: History) -> list[Mark]:
    """What happened, in order; of very many events those that lie together are one mark."""
    marks = list(_marks(history))
    if len(marks) <= MOST_MARKS:
        return marks
    width = max(mark.tokens for mark in marks) / MOST_MARKS or 1
    groups: dict[float, list[Mark]] = {}
    for mark in marks:
        groups.setdefault(mark.tokens // width, []).append(mark)
    return [_together(group) for group in groups.values()]


def shortened(value: Any) -> str:
    """A setting as text; what is no plain value is none of ours."""
    if isinstance(value, dict | list):
        return "…"
    text = f"{value:g}" if isinstance(value, float) else redacted(str(value))
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"


def _marks(history: History) -> Iterator[Mark]:
    stage, launch = None, None
    for record in history.story:
        place = record["step"], record["tokens"], record["seconds"]
        if record["kind"] == "run":
            if launch and (changes := list(_changes(launch, record))):
                kind = "data" if launch["data"] != record["data"] else "launch"
                yield Mark(*place, kind, f"launched with {', '.join(changes)}", True)
            launch = record
        elif record["name"] not in UNMARKED:
            details = details_of(record)
            kind = KINDS.get(record["name"], "other")
            if record["name"] == "stage":
                kind = "batch" if stage == details.get("now") else "stage"
                stage = details.get("now")
            if text := _in_words(record["name"], details):
                yield Mark(*place, kind, text, _is_warning(record["name"], details))


def _changes(before: Record, now: Record) -> Iterator[str]:
    """In what a launch differs from the one before it."""
    for part in ("settings", "data", "machine"):
        for name, value in now[part].items():
            old = before[part].get(name)
            if old != value:
                yield f"{name} {shortened(value)} (was {shortened(old)})"


def _in_words(name: str, details: dict[str, Any]) -> str:
    try:
        return sentence(name, details)
    except (AttributeError, KeyError, TypeError, ValueError):  # details of another version
        return name


def _is_warning(name: str, details: dict[str, Any]) -> bool:
    try:
        return is_warning(name, details)
    except (AttributeError, KeyError):
        return False


def _together(marks: list[Mark]) -> Mark:
    first, *others = marks
    if not others:
        return first
    text = f"{first.text}; and {len(others)} more until step {marks[-1].step:,}"
    return first._replace(text=text, is_warning=any(mark.is_warning for mark in marks))
