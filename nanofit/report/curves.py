"""What a run measured, as columns to draw: no more points than a screen can show, and every spike.

A long run is cut into stretches; of each are kept the steps at which loss, gradient norm and speed
were lowest and highest, and one whose loss was no number.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from nanofit.report.history import History, Steps, number_in

Columns = dict[str, list[float | None]]

STRETCHES = 1000  # of all runs of a report together
FEWEST_STRETCHES = 100  # of a run
SPIKY = ("loss", "grad_norm", "tokens_per_s")
DRAWN = ("tokens", "seconds", *SPIKY, "lr", "mfu", "expected_low", "expected_high")
REACH = 0.005  # of a run, to either side
FEW_STEPS = 4  # to either side, where there are enough in all
DIGITS = {"tokens": 15, "seconds": 9}
ENOUGH_DIGITS = 6


def curve_of(steps: Steps, stretches: int = STRETCHES) -> Columns:
    """The steps of a run; `typical` is the loss without its noise. Unknown columns are left out."""
    columns = {name: np.array(steps[name]) for name in DRAWN}
    rows = kept_rows(columns, SPIKY, stretches)
    drawn = {name: values[rows] for name, values in columns.items()}
    drawn["typical"] = typical(columns["loss"], rows, _reach(steps))
    return _told(drawn)


def recent_loss(steps: Steps) -> float | None:
    """Where the typical loss ends; None if there was no number of late."""
    if not len(steps):
        return None
    loss = typical(np.array(steps["loss"]), [len(steps) - 1], _reach(steps))[0]
    return float(loss) if np.isfinite(loss) else None


def evaluations_of(history: History, stretches: int = STRETCHES) -> Columns:
    """Validation losses, in nats a token and in bits a byte."""
    names = ("tokens", "seconds", "val_loss", "bits_per_byte")
    columns = {name: _column(history.evaluations, name) for name in names}
    rows = kept_rows(columns, ("val_loss",), stretches)
    return _told({name: values[rows] for name, values in columns.items()})


def typical(values: np.ndarray, rows: Sequence[int], reach: int) -> np.ndarray:
    """For some rows the mean of the middle half of the values up to `reach` away: spikes are not.

    At the beginning no further ahead than back, for there the loss falls fast.
    """
    found = np.full(len(rows), np.nan)
    for place, row in enumerate(rows):
        back = min(row, reach)
        around = values[row - back : row + back + 1]
        around = around[np.isfinite(around)]
        if len(around):
            quarter = len(around) // 4
            ends = quarter, len(around) - quarter - 1
            found[place] = np.partition(around, ends)[quarter : len(around) - quarter].mean()
    return found


def kept_rows(columns: Mapping[str, np.ndarray], spiky: Sequence[str], stretches: int) -> list[int]:
    """The rows that show all that can be seen; all, if there are not that many."""
    length = len(columns[spiky[0]])
    if length <= 2 * len(spiky) * stretches:
        return list(range(length))
    kept = {0, length - 1}
    edges = np.linspace(0, length, stretches + 1).astype(int)
    for first, after in pairwise(edges):
        for name in spiky:
            values = columns[name][first:after]
            is_number = np.isfinite(values)
            kept.add(int(first + np.where(is_number, values, np.inf).argmin()))
            kept.add(int(first + np.where(is_number, values, -np.inf).argmax()))
            if not is_number.all():
                kept.add(int(first + is_number.argmin()))
    return sorted(kept)


def _reach(steps: Steps) -> int:
    return max(round(len(steps) * REACH), min(FEW_STEPS, len(steps) // 20))


def _told(columns: dict[str, np.ndarray]) -> Columns:
    return {
        name: [_rounded(value, DIGITS.get(name, ENOUGH_DIGITS)) for value in values.tolist()]
        for name, values in columns.items()
        if np.isfinite(values).any()
    }


def _rounded(value: float, digits: int) -> float | None:
    if not np.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() else short


def _column(records: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([number_in(record, name, np.nan) for record in records], dtype=float)
