"""What a run will cost and give, and what is wrong with it: told by plan.py and by train.py."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from nanofit.device import Card, known_card
from nanofit.scaling import (
    FADING_EPOCHS,
    LIKE_NEW_EPOCHS,
    Band,
    Recipe,
    expected_band,
    expected_loss,
)
from nanofit.terminal import compact, duration

WEEK_S = 7 * 86400

# Share of the dense peak that published runs of GPT-2 124M reached, compiled, in half precision,
# by 6N + 12LCT per token. nanochat's d12 on an RTX 4070 reached 85 %.
PUBLISHED_EFFICIENCY = {
    "GeForce RTX 4070": 0.82,  # nanoGPT, 56.1k tokens/s
    "GeForce RTX 4090": 0.56,  # 108k tokens/s, the middle of what was told from 2023 to 2025
}
COMPILE_GAIN = 1.65  # published: 1.5 to 1.85


@dataclass(frozen=True)
class Forecast:
    """A run in numbers; what cannot be known is None."""

    parameters: int
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


def efficiency_of(card: Card) -> tuple[float, str]:
    """The share of its peak that a card should reach, and the card it was measured on."""
    measured = min(
        PUBLISHED_EFFICIENCY,
        key=lambda name: abs(math.log(known_card(name).peak_flops / card.peak_flops)),
    )
    return PUBLISHED_EFFICIENCY[measured], measured


def predicted_tokens_per_s(card: Card, flops_per_token: float, *, compiled: bool = True) -> float:
    """Training speed in half precision, from the card's peak and what others reached."""
    efficiency, _ = efficiency_of(card)
    return card.peak_flops * efficiency / flops_per_token / (1 if compiled else COMPILE_GAIN)
