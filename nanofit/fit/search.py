"""The largest micro-batch that survives, found in as few trials as a forecast allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

MOST_FILLER = 0.02  # of a step's sequences, where a micro-batch does not divide them
SMALL_DIVISOR = 0.75  # of an inexact size: no smaller loss of size is worth filler
FORECAST_ERROR = 0.05  # that a forecast is trusted not to exceed, once it was wrong
NEAR = 0.03  # of what a micro-batch may take: so close to the limit it may survive by luck
CHECKS_NEAR_LIMIT = 2  # further trials that a size near the limit must survive


class Trial(Protocol):
    """What a trial of one size tells; `peak_bytes` is None if it died."""

    peak_bytes: int | None


@dataclass(frozen=True)
class Found:
    """The outcome of a search; `size` is 0 if not even one sequence survives."""

    size: int
    trials: dict[int, list[Trial]]
    why: str

    @property
    def trial_count(self) -> int:
        return sum(map(len, self.trials.values()))


def sizes_for(sequences: int) -> list[int]:
    """Micro-batches that cut a step's sequences evenly, or nearly so where those are far apart."""
    sizes, divisor = [], 1
    for size in range(1, sequences + 1):
        if sequences % size == 0:
            divisor = size
            sizes.append(size)
        else:
            filler = -sequences % size
            if divisor < SMALL_DIVISOR * size and filler <= MOST_FILLER * sequences:
                sizes.append(size)
    return sizes


def find_largest(
    sizes: Sequence[int],
    forecast: Callable[[int], float],
    limit_bytes: int,
    attempt: Callable[[int], Trial],
) -> Found:
    """Try the size that should fit, then go up or down by what was measured.

    Done when the largest size that survived is known, and the next one died or was shown by
    measurement not to fit. What survives close to the limit has to do so repeatedly.
    """
    return _Search(sizes, forecast, limit_bytes, attempt).run()


class _Search:
    def __init__(
        self, sizes: Sequence[int], forecast: Callable, limit_bytes: int, attempt: Callable
    ):
        self._sizes, self._forecast = sizes, forecast
        self._limit, self._attempt = limit_bytes, attempt
        self._margin = NEAR * max(limit_bytes - forecast(0), 0)
        self._survived, self._died = -1, len(sizes)  # indices that enclose the answer
        self._peaks: dict[int, int] = {}
        self._trials: dict[int, list[Trial]] = {}
        self._misses = 0  # deaths since something survived

    def run(self) -> Found:
        while self._survived + 1 < self._died and not self._next_is_too_large():
            index = self._next_index()
            if self._survives(self._sizes[index]):
                self._survived, self._misses = index, 0
            else:
                self._died = index
                self._misses += 1
        size = self._sizes[self._survived] if self._survived >= 0 else 0
        return Found(size, self._trials, self._reason())

    def _survives(self, size: int) -> bool:
        checks = 1
        while checks > 0:
            trial = self._attempt(size)
            self._trials.setdefault(size, []).append(trial)
            if trial.peak_bytes is None:
                return False
            is_first = len(self._trials[size]) == 1
            self._peaks[size] = max(trial.peak_bytes, self._peaks.get(size, 0))
            if is_first and trial.peak_bytes > self._limit - self._margin:
                checks += CHECKS_NEAR_LIMIT
            checks -= 1
        return True

    def _next_index(self) -> int:
        """Where the limit should be; after a miss on the safe side of it, then half-way."""
        if self._misses > 1 or (self._misses and self._peaks):
            return (self._survived + self._died) // 2
        room = self._limit * (1 - FORECAST_ERROR if self._misses else 1)
        fitting = [i for i, size in enumerate(self._sizes) if self._estimate(size) <= room]
        guess = fitting[-1] if fitting else 0
        return min(max(guess, self._survived + 1), self._died - 1)

    def _next_is_too_large(self) -> bool:
        if self._survived < 0:
            return False
        return self._estimate(self._sizes[self._survived + 1], trust=self._trust()) > self._limit

    def _estimate(self, size: int, trust: float = 1.0) -> float:
        """Memory of a size, from the largest measured one and the slope."""
        if not self._peaks:
            return self._forecast(size)
        smallest, largest = min(self._peaks), max(self._peaks)
        if smallest < largest:
            slope = (self._peaks[largest] - self._peaks[smallest]) / (largest - smallest)
        else:
            slope = trust * (self._forecast(largest + 1) - self._forecast(largest))
        return self._peaks[largest] + (size - largest) * slope

    def _trust(self) -> float:
        """How much of the forecast slope is certain, seeing how wrong it was where measured."""
        largest = max(self._peaks)
        return max(1 - 2 * abs(self._peaks[largest] / self._forecast(largest) - 1), 0)

    def _reason(self) -> str:
        if self._survived + 1 == len(self._sizes):
            return "it is the whole step"
        following = self._sizes[self._survived + 1]
        if following in self._trials:
            return f"{following} died"
        return f"{following} would need {self._estimate(following) / 2**20:,.0f} MiB"
