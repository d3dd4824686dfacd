"""An answer of the doctor's: how things are and, where they are not well, what to do."""

from dataclasses import dataclass
from typing import Literal

from nanofit.terminal import InputError


@dataclass(frozen=True)
class Finding:
    """What was found on a topic; a problem would stop a run, or spoil it."""

    topic: str
    text: str
    remedy: str = ""
    state: Literal["ok", "warning", "problem"] = "ok"


def warning(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic, text, remedy, "warning")


def problem(topic: str, text: str, remedy: str) -> Finding:
    return Finding(topic, text, remedy, "problem")


def refusal(topic: str, error: InputError | str) -> Finding:
    """What a run would be refused with; after its last semicolon such a line tells the way out."""
    text, _, remedy = str(error).rpartition("; ")
    return problem(topic, text or remedy, remedy if text else "")
