"""What cards did: reports that doctor.py has written on them, and that their owners sent.

Those in measured.json take the place of what is assumed; `bench/cards.py --doctor` puts them there.
"""

import json
import math
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from nanofit.files import atomic_write, read_small
from nanofit.machine.cards import known_card

PLACE = Path(__file__).with_name("measured.json")
_LETTERS, _LONGEST = r"\w .,:()+-", 64  # what a name or a version may look like
_LARGEST = 2**50


@dataclass(frozen=True)
class MeasuredStep:
    """A few steps of one model: what was forecast of their memory, and what they took."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    micro_batch_size: int
    passes: int
    compiled: bool
    survived: bool  # else what was measured is 0
    forecast_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    spilled_bytes: int  # to the host's memory
    tokens_per_s: float


@dataclass(frozen=True)
class CardReport:
    """What is known of a card by having trained on it; nothing tells whose it is."""

    card: str  # as in the table of cards or, if it is not there, as its driver reports it
    memory_mib: int
    capability: str
    watts: float  # that it may draw; 0 if nobody told
    dtype: str
    system: str
    driver: str
    cuda: str
    torch: str
    context_bytes: int  # of a process; 0 if nobody told
    library_bytes: int  # what cuBLAS and the like take
    steps: tuple[MeasuredStep, ...]

    @classmethod
    def told(cls, facts: Any) -> "CardReport":
        """A report as somebody sent it, its card found in the table; ValueError if it is none."""
        steps = facts.get("steps") if isinstance(facts, dict) else None
        if not isinstance(steps, list | tuple):
            raise ValueError("it is no report of doctor.py --measure")
        read = tuple(MeasuredStep(**_checked(MeasuredStep, one)) for one in steps)
        report = cls(**_checked(cls, {**facts, "steps": read}))
        known = known_card(report.card, report.memory_mib)
        return replace(report, card=known.name) if known else report


def in_words(text: str | None) -> str:
    """A name or a version as a report may have it."""
    return re.sub(f"[^{_LETTERS}]", "-", text or "")[:_LONGEST]


def _checked(kind: type, facts: Any) -> dict[str, Any]:
    """Facts that have the fields of a kind, with values they can have."""
    if not isinstance(facts, dict) or facts.keys() != {field.name for field in fields(kind)}:
        raise ValueError(f"it does not have the parts of a {kind.__name__}")
    for field in fields(kind):
        value = facts[field.name]
        if field.type is float and type(value) is int:
            value = float(value)
        if field.type in (int, float, bool, str) and type(value) is not field.type:
            raise ValueError(f"its {field.name} is no {field.type.__name__}")
        if type(value) is str and value != in_words(value):
            raise ValueError(f"its {field.name} is no name")
        if type(value) in (int, float) and not 0 <= value < _LARGEST:  # nan is not, either
            raise ValueError(f"its {field.name} is no number that can be measured")
    return facts


def read_report(path: Path) -> CardReport:
    """OSError if it cannot be read, ValueError if it is no report."""
    try:
        return CardReport.told(json.loads(read_small(path)))
    except RecursionError:
        raise ValueError("it is no report of doctor.py --measure") from None


@cache
def kept_reports() -> tuple[CardReport, ...]:
    """All that were sent and kept."""
    return tuple(map(CardReport.told, json.loads(read_small(PLACE))))


def keep_reports(reports: list[CardReport]) -> None:
    """Add reports to those that are kept, each of them once."""
    every = dict.fromkeys((*kept_reports(), *reports))
    with atomic_write(PLACE) as temporary:
        told = json.dumps([asdict(report) for report in every], indent=1)
        temporary.write_text(f"{told}\n", encoding="utf-8")
    kept_reports.cache_clear()


def reports_of(card: str) -> list[CardReport]:
    """Those of a card, by the name in the table of cards."""
    return [report for report in kept_reports() if report.card == card]


def usual(values: list[float]) -> float | None:
    """Their geometric mean; None if there are none."""
    known = [value for value in values if value > 0]
    return math.exp(math.fsum(map(math.log, known)) / len(known)) if known else None
