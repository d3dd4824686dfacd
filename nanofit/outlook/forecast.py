"""What a run will cost and give, and what is wrong with it: told by plan.py and by train.py."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from nanofit.learning.chunks import chunk_rows
from nanofit.machine.cards import Card, known_card
from nanofit.machine.measured import CardReport, MeasuredStep, reports_of, usual
from nanofit.outlook.roofline import Step, tokens_per_s
from nanofit.outlook.scaling import (
    FADING_EPOCHS,
    LIKE_NEW_EPOCHS,
    Band,
    Recipe,
    expected_band,
    expected_loss,
)
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import compact, duration

WEEK_S = 7 * 86400


class PublishedRun(NamedTuple):
    """A speed that somebody measured on a card."""

    card: str
    tokens_per_s: float
    step: Step


# GPT-2 124M in nanoGPT, compiled, in bfloat16; the slower card first.
_NANOGPT = Step(
    n_layer=12,
    n_embd=768,
    block_size=1024,
    vocab_size=50304,
    lookup_parameters=1024 * 768,  # positions
    micro_batch_size=8,
    passes=64,
    returns_logits=True,
)
PUBLISHED_RUNS = (
    PublishedRun("GeForce RTX 4070", 56_100, _NANOGPT),
    # The middle of what was told from 2023 to 2025; most had nanoGPT's default of 12 × 40.
    PublishedRun("GeForce RTX 4090", 108_000, replace(_NANOGPT, micro_batch_size=12, passes=40)),
)
COMPILE_GAIN = 1.65  # published: 1.5 to 1.85


@dataclass(frozen=True)
class Forecast:
    """A run in numbers; what cannot be known is None."""

    parameters: int  # as the law counts them
    steps: int
    tokens_per_step: int
    decay_end: int | None = None  # the step at which the learning rate is at its end
    unique_tokens: int | None = None
    tokens_per_s: float | None = None
    watts: float | None = None
    recipe: Recipe | None = None  # None: the law knows nothing of such data

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float | None:
        return self.unique_tokens and self.tokens / self.unique_tokens

    @property
    def seconds(self) -> float | None:
        return self.tokens_per_s and self.tokens / self.tokens_per_s

    @property
    def kwh(self) -> float | None:
        return self.watts and self.seconds and self.watts * self.seconds / 3.6e6

    @property
    def loss(self) -> float | None:
        return self._of_law(expected_loss)

    @property
    def band(self) -> Band | None:
        return self._of_law(expected_band)

    def band_before_decay(self, undecayed_share: float) -> Band | None:
        """The band for a run whose learning rate has still so much of its decay before it."""
        return self._of_law(partial(expected_band, lr_share=undecayed_share))

    def with_steps(self, steps: int) -> "Forecast":
        return replace(self, steps=steps, decay_end=self.decay_end and steps)

    def with_epochs(self, epochs: float) -> "Forecast":
        return self.with_steps(max(round(epochs * self.unique_tokens / self.tokens_per_step), 1))

    def outlook(self) -> Iterator[str]:
        """The lines a run opens with: time and loss, as far as they can be known, and warnings."""
        told = []
        if self.seconds:
            told.append(f"about {duration(self.seconds)} on this card")
        if band := self.band:
            told.append(
                f"final loss {band.low:.2f} to {band.high:.2f} if the text is like FineWeb's"
            )
        if told:
            yield f"plan    {', '.join(told)}"
        for warning in self.warnings():
            yield f"warning {warning}; see python plan.py"

    def warnings(self) -> Iterator[str]:
        """What its owner should know before it starts."""
        if self.epochs and self.epochs > LIKE_NEW_EPOCHS:
            better = self.with_epochs(LIKE_NEW_EPOCHS)
            faded = f"{LIKE_NEW_EPOCHS} repeats fade"
            if self.epochs > FADING_EPOCHS:
                faded = f"{FADING_EPOCHS} they are waste"
            yield (
                f"{self.epochs:.3g} epochs over {compact(self.unique_tokens)} tokens: past {faded}"
                f"; {LIKE_NEW_EPOCHS} epochs are {better.steps} steps"
            )
        if self.seconds and self.seconds > WEEK_S:
            yield f"{duration(self.seconds)} of training; --hours=24 would end its decay in a day"
        if self.decay_end is not None and self.decay_end > self.steps:
            yield (
                f"the learning rate decays until step {self.decay_end}, but the run ends at "
                f"{self.steps}; use --lr_decay_iters={self.steps}"
            )

    def _of_law(self, law):
        if self.recipe is None:
            return None
        return law(self.parameters, self.tokens, self.unique_tokens, self.recipe)


def step_of(
    shape: GPTConfig,
    loss: str,
    *,
    micro_batch_size: int,
    sequences_per_step: int,
    muon_steps: int = 0,
) -> Step:
    """A step of a run of ours, as far as its time depends on it."""
    looked_up = shape.vocab_size if shape.is_modern else shape.block_size
    return Step(
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        block_size=shape.block_size,
        vocab_size=shape.vocab_size,
        lookup_parameters=looked_up * shape.n_embd,
        head_is_embedding=not shape.is_modern,
        is_rotary=shape.is_modern,
        muon_steps=muon_steps,
        micro_batch_size=micro_batch_size,
        passes=-(-sequences_per_step // micro_batch_size),
        chunk_rows=chunk_rows(shape.n_embd, fused=True) if loss == "chunked" else None,
    )


def predicted_tokens_per_s(card: Card, step: Step, *, compiled: bool = True) -> float:
    """Training speed in half precision: by the step's FLOPs and bytes, and what others reached."""
    best = tokens_per_s(step, peak_flops=card.peak_flops, bytes_per_s=card.bytes_per_s)
    return expected_share(card) * best / (1 if compiled else COMPILE_GAIN)


def expected_share(card: Card) -> float:
    """The share of its roofline speed that a card should reach.

    What such cards were measured to reach or, if none was, by the published runs: the larger card
    reached less of it; a card between the two is taken to be between them.
    """
    return measured_share(card) or _share_by_published(card)


def measured_share(card: Card, reports: list[CardReport] | None = None) -> float | None:
    """What owners of such a card measured with compiled models; None if nobody did."""
    reports = reports_of(card.name) if reports is None else reports
    steps = [step for report in reports for step in report.steps if step.compiled and step.survived]
    best = dict(peak_flops=card.peak_flops, bytes_per_s=card.bytes_per_s)
    return usual([one.tokens_per_s / tokens_per_s(measured_step(one), **best) for one in steps])


def measured_step(one: MeasuredStep) -> Step:
    """What was done to measure it."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    return step_of(
        GPTConfig(**{name: getattr(one, name) for name in names}),
        "chunked",
        micro_batch_size=one.micro_batch_size,
        sequences_per_step=one.passes * one.micro_batch_size,
    )


def _share_by_published(card: Card) -> float:
    (slow, slow_share), (fast, fast_share) = (
        (known_card(run.card), reached_share(run)) for run in PUBLISHED_RUNS
    )
    position = math.log(card.peak_flops / slow.peak_flops, fast.peak_flops / slow.peak_flops)
    position = min(max(position, 0), 1)
    return slow_share ** (1 - position) * fast_share**position


def reached_share(run: PublishedRun) -> float:
    """Of the speed that FLOPs and bytes give at the figures of the maker.

    It may exceed 1: cards clock higher than their makers promise, and caches save some traffic.
    """
    card = known_card(run.card)
    return run.tokens_per_s / tokens_per_s(
        run.step, peak_flops=card.peak_flops, bytes_per_s=card.bytes_per_s
    )
