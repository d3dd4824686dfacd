"""The speed of a training step on many cards, by arithmetic, and how well that predicts real runs.

    python bench/roofline.py

Nothing is measured here. nanofit/outlook/roofline.py counts what a step computes and moves; the
makers of the cards tell how fast they do that; others have measured what some cards really reach.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.figures import Figure, record
from nanofit.fit.search import sizes_for
from nanofit.machine.cards import Card, find_card, known_card
from nanofit.memory.budget import budget_of
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.outlook.forecast import (
    PUBLISHED_RUNS,
    PublishedRun,
    expected_share,
    predicted_tokens_per_s,
    reached_share,
    step_of,
)
from nanofit.outlook.roofline import PARTS, Step, seconds_by_part
from nanofit.settings.config import Settings, load_config
from nanofit.terminal import run_script

CONFIGS = {"124M": "config/train_gpt2_124m.py", "77M": "config/train_fineweb.py"}
CARDS = "3050 laptop, 2060, 4060, 2080 Ti, 3060, 4070, 4080, T4, 3090, 4090, 5090".split(", ")


class Check(NamedTuple):
    """A published run, and FLOPs of a token of it by 6N + 12LCT."""

    name: str
    run: PublishedRun
    flops_per_token: float

    @property
    def card(self) -> Card:
        return known_card(self.run.card)

    @property
    def efficiency(self) -> float:
        return self.run.tokens_per_s * self.flops_per_token / self.card.peak_flops


ON_4070, ON_4090 = PUBLISHED_RUNS
NANOCHAT_D12 = Step(
    n_layer=12,
    n_embd=768,
    block_size=2048,
    vocab_size=32768,
    lookup_parameters=7 * 32768 * 768,  # of tokens, and of values in every other layer
    head_is_embedding=False,
    micro_batch_size=8,
    passes=32,
)
CHECKS = (
    Check("nanoGPT 124M", ON_4070, 855e6),
    Check("nanoGPT 124M", ON_4090, 855e6),
    Check("nanochat d12", PublishedRun("GeForce RTX 4070", 55_700, NANOCHAT_D12), 887e6),
)
# 90 ms for a step of 16 × 1024 tokens, in Karpathy's "Let's reproduce GPT-2 (124M)".
ON_A100 = Check(
    "build-nanogpt 124M",
    PublishedRun(
        "A100-SXM4-80GB", 16_384 / 0.090, replace(ON_4070.step, micro_batch_size=16, passes=1)
    ),
    855e6,
)


def main(_: Sequence[str]) -> None:
    print("## Against published runs\n")
    print(
        "| run | card | tokens/s, measured | of its peak | of its roofline | one efficiency | "
        "one share | two efficiencies | two shares |\n|---|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    for line in _checks():
        print(line)
    for model, path in CONFIGS.items():
        print(f"\n## {model}, ours, compiled, in half precision\n")
        print(
            "| card | TFLOPS | GB/s | micro-batch | " + " | ".join(PARTS) + " | share | tokens/s |"
            "\n|---|" + "--:|" * (len(PARTS) + 5)
        )
        for line in _forecasts(load_config([path])):
            print(line)


def _checks() -> Iterator[str]:
    """Each run with the errors of four ways to predict it; the first two know all three at once."""
    efficiency = math.exp(fmean(math.log(check.efficiency) for check in CHECKS))
    share = math.exp(fmean(math.log(reached_share(check.run)) for check in CHECKS))
    errors = []
    for check in (*CHECKS, ON_A100):
        reached = reached_share(check.run)
        nearest = min(
            CHECKS[:2],
            key=lambda one, card=check.card: abs(math.log(one.card.peak_flops / card.peak_flops)),
        )
        ratios = (
            efficiency / check.efficiency,
            share / reached,
            nearest.efficiency / check.efficiency,
            expected_share(check.card) / reached,
        )
        errors.append([ratio - 1 for ratio in ratios])
        yield (
            f"| {check.name} | {check.run.card} | {check.run.tokens_per_s / 1e3:.1f}k | "
            f"{check.efficiency:.0%} | {reached:.0%} | "
            + " | ".join(f"{error:+.0%}" for error in errors[-1])
            + " |"
        )
    largest = [max(abs(error) for error in way) for way in zip(*errors[: len(CHECKS)], strict=True)]
    cells = " | ".join(f"{error:.0%}" for error in largest)
    _record(largest)
    yield f"| largest error of the first three | | | | | {cells} |"


def _record(largest: list[float]) -> None:
    one_efficiency, *_, two_shares = (100 * error for error in largest)
    name = "predicted speed of three published runs: largest error"
    both = {"ours": two_shares, "other": one_efficiency, "of": "one efficiency for all"}
    how = {"command": "make bench-roofline", "conditions": "arithmetic, no card was asked"}
    record("roofline", [Figure(name, **both, unit="%")], **how)


def _forecasts(settings: Settings) -> Iterator[str]:
    shape, learn, run = settings
    for name in CARDS:
        card = find_card(name)
        size = _micro_batch(card, settings)
        step = step_of(
            shape, run.loss, micro_batch_size=size, sequences_per_step=learn.sequences_per_step
        )
        parts = seconds_by_part(step, peak_flops=card.peak_flops, bytes_per_s=card.bytes_per_s)
        busy_s = sum(parts.values())
        yield (
            f"| {card.name} | {card.peak_flops / 1e12:.1f} | {card.bandwidth_gb_s} | {size} | "
            + " | ".join(f"{seconds / busy_s:.1%}" for seconds in parts.values())
            + f" | {expected_share(card):.2f} | {predicted_tokens_per_s(card, step) / 1e3:.1f}k |"
        )


def _micro_batch(card: Card, settings: Settings) -> int:
    """The config's, or the largest that should fit if that is less."""
    shape, learn, run = settings
    setup = Setup(shape, dtype=run.dtype, loss=run.loss, compiled=True)
    budget = budget_of(card.name, None, run)
    room_bytes = budget.limit_bytes - budget.overhead.library_bytes
    sizes = [size for size in sizes_for(learn.sequences_per_step) if size <= learn.batch_size]
    fits = need_of(setup).largest(room_bytes)
    return max(size for size in sizes if size <= fits)


if __name__ == "__main__":
    run_script(main)
