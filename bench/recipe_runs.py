"""The arms and runs of bench/recipe.py, and what is known of those that are finished."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.recipe_parts import ALL_CHANGES
from nanofit.files import atomic_write
from nanofit.terminal import InputError

FULL_STEPS, SEEDS = 3000, (1, 2, 3)
LENGTHS = (FULL_STEPS // 4, FULL_STEPS // 2, FULL_STEPS)
CHANGED_STEPS = FULL_STEPS // 4  # of runs that leave a part of the recipe out, or add one
DTYPE = "bfloat16"  # of products, Muon's too, as on a card; weights, moments and sums are float32
SHAPE = dict(n_layer=4, n_head=3, n_embd=192, block_size=256, vocab_size=256)
SEQUENCES, VAL_SEQUENCES = 4, 256  # a step, and of 65,536 tokens to validate on
TOKENS_PER_STEP = SEQUENCES * SHAPE["block_size"]
FULL_TOKENS = FULL_STEPS * TOKENS_PER_STEP
PUBLISHED_TOKENS_PER_STEP, PUBLISHED_BETA2 = 524_288, 0.95

# AdamW's memory of 524,288-token steps would be longer than these runs: a tenth of one, then.
SCALED_BETA2 = PUBLISHED_BETA2 ** (TOKENS_PER_STEP / PUBLISHED_TOKENS_PER_STEP)
BETA2 = min(SCALED_BETA2, 1 - 10 / FULL_STEPS)
TUNED = dict(beta2=BETA2, lr_schedule="wsd", decay_fraction=0.7, min_lr=0.0)
MODERN = dict(arch="modern", bias=True)
# Twelve Newton-Schulz steps would take longer than the learning itself at so few tokens a step.
MUON = dict(optimizer="muon", muon_steps=5)


@dataclass(frozen=True)
class Arm:
    name: str
    settings: dict[str, Any]
    rates: tuple[float, ...]  # the first to be tried, next to each other


PLAIN = Arm("gpt2 + AdamW, as nanoGPT", dict(beta2=0.95, min_lr=None), (1e-3, 2e-3, 4e-3))
BASELINE = Arm("gpt2 + AdamW, tuned", TUNED, (1e-3, 2e-3, 4e-3))
HALF_WAY = Arm("modern + AdamW", {**MODERN, **TUNED}, (1e-3, 2e-3, 4e-3))
OURS = Arm("modern + Muon", {**MODERN, **MUON}, (0.0125, 0.025, 0.05))
ARMS = (PLAIN, BASELINE, HALF_WAY, OURS)


@dataclass(frozen=True)
class Run:
    """One training run; `change` names what is not as in the arm's recipe."""

    arm: str
    rate: float
    steps: int
    seed: int = SEEDS[0]
    change: str = ""

    @property
    def key(self) -> str:
        recipe = f"{self.arm} {self.change}".strip()
        return f"{recipe}, rate {self.rate:g}, {self.steps} steps, seed {self.seed}"


def conditions(text: str, text_bytes: int) -> dict[str, Any]:
    """What all runs have in common, and what makes those of other conditions incomparable."""
    return {
        "text": text,
        "text_bytes": text_bytes,
        "shape": SHAPE,
        "sequences_per_step": SEQUENCES,
        "full_steps": FULL_STEPS,
        "dtype": DTYPE,
        "val_sequences": VAL_SEQUENCES,
        "beta2": BETA2,
    }


class Results:
    """What is known of finished runs, on disk, beside the conditions under which they ran."""

    def __init__(self, path: Path, common: dict[str, Any] | None = None):
        """Without conditions they are those of the file: to read is not to add to it."""
        self.path, self.common = path, common
        self.known: dict[str, dict[str, Any]] = {}
        if not path.exists():
            return
        stored = json.loads(path.read_text(encoding="utf-8"))
        if "conditions" not in stored:
            raise InputError(f"{path} does not say under what conditions its runs ran: add them")
        self.common, self.known = stored["conditions"], stored["runs"]
        here = common or conditions(*(self.common[name] for name in ("text", "text_bytes")))
        differing = [name for name in here if self.common.get(name) != here[name]]
        if differing:
            name = differing[0]
            raise InputError(
                f"{path} holds runs with {name} {self.common.get(name)}, not {here[name]}; they "
                "do not compare: move the file away, or go on as it was begun"
            )

    def add(self, run: Run, result: dict[str, Any]) -> None:
        self.known[run.key] = result
        content = {"conditions": self.common, "runs": self.known}
        with atomic_write(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1), encoding="utf-8")

    def loss(self, run: Run) -> float | None:
        """A run's loss, infinite where it came to nothing; None if there was no such run."""
        found = self.known.get(run.key)
        if found is None:
            return None
        return math.inf if math.isnan(found["val_loss"]) else found["val_loss"]

    def best_rate(self, arm: Arm) -> float | None:
        """The rate with the lowest loss; None while one of its neighbours is still to be tried."""
        return None if self.rates_to_try(arm) else self._best(arm)

    def rates_to_try(self, arm: Arm) -> list[float]:
        """The first rates, and then what lies beyond the best as long as that is at an end."""
        tried = self.losses_by_rate(arm)
        missing = [rate for rate in arm.rates if rate not in tried]
        if missing:
            return missing
        best = self._best(arm)
        return [rate for rate in (best / 2, 2 * best) if rate not in tried]

    def losses_by_rate(self, arm: Arm) -> dict[float, float]:
        """Of a quarter of the full length."""
        runs = [Run(arm.name, arm.rates[0] * 2.0**power, LENGTHS[0]) for power in range(-6, 7)]
        return {run.rate: self.loss(run) for run in runs if self.loss(run) is not None}

    def _best(self, arm: Arm) -> float:
        tried = self.losses_by_rate(arm)
        return min(tried, key=tried.get)


def stages(results: Results) -> Iterator[list[Run]]:
    """What to do next, as soon as it is known; nothing more if the rates do not get known."""
    while rates := [Run(a.name, r, LENGTHS[0]) for a in ARMS for r in results.rates_to_try(a)]:
        yield rates
        if any(run.key not in results.known for run in rates):
            return
    best = {arm.name: results.best_rate(arm) for arm in ARMS}
    for steps in LENGTHS[1:]:
        yield [Run(arm.name, best[arm.name], steps) for arm in reversed(ARMS)]
    for arm in (OURS, BASELINE):
        yield [Run(arm.name, best[arm.name], FULL_STEPS, seed) for seed in SEEDS[1:]]
    changed = partial(Run, OURS.name, best[OURS.name], CHANGED_STEPS)
    yield [
        *(changed(seed) for seed in SEEDS),
        *(changed(change=change) for change in ALL_CHANGES),
    ]
    for arm in (HALF_WAY, PLAIN):
        yield [Run(arm.name, best[arm.name], FULL_STEPS, seed) for seed in SEEDS[1:]]
