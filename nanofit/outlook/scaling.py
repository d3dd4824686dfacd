"""Expected loss, useful epochs, and what suits a model, its data and its budget: arithmetic alone.

The law is the data-constrained one of Muennighoff et al. (2023, arXiv:2305.16264): a repeated token
teaches less than a new one. It is set to published runs on FineWeb with GPT-2's vocabulary, blocks
of 1024 tokens and a learning rate that has decayed to its end; it knows no other data.
"""

import math
from typing import Literal, NamedTuple

Recipe = Literal["plain", "modern"]

# Muennighoff et al.: one exponent for parameters and tokens, and the repeats after which a token's
# worth has faded to 1/e. The paper's floor is 1.869; this one fits FineWeb with GPT-2's recipe
# (124M parameters, 10.26B tokens: 3.272).
EXPONENT, PER_PARAMETERS, PER_TOKENS, FLOOR = 0.35266, 520.8, 1487.7, 2.105
FADING_REPEATS = 15.388

# The modern recipe (Muon, RoPE, QK-norm and their like) at 124M parameters, fitted to published
# logs (1.70B tokens: 3.279). For other sizes it moves as the plain one does.
MODERN_FLOOR, MODERN_PER_TOKENS, MODERN_EXPONENT = 2.997, 0.367, 0.497
MODERN_PARAMETERS = 124e6

# AdamW with a tuned learning rate ends 0.05 (10B tokens: 3.227) to 0.07 (6.44B: 3.280) below the
# plain curve. Nobody knows whether yours is tuned: so much to either side is normal.
BAND = 0.07

# Before the learning rate has decayed the loss lies above the annealed curve. The points do not say
# how far: this is our allowance at the full learning rate, not a published figure.
UNDECAYED_ALLOWANCE = 0.25

GPT2_VOCABULARY = 50257
FEWEST_TOKENS = 0.2e9  # the points begin at 0.65B; a third of that is as far as we dare go
LIKE_NEW_EPOCHS, FADING_EPOCHS = 4, 16  # Muennighoff et al., section 6

# Tokens per parameter of the matrix products that give the least loss for the compute: 12·L·C² of
# the blocks and V·C of the head.
OPTIMAL_TOKENS_PER_WEIGHT = 10.5
WEIGHT_DECAY_PER_RATIO = 0.57  # of parameters to unique tokens; fits data-limited AdamW runs

# The run whose rates the modern recipe takes over: modded-nanogpt's track 3, on new data alone.
PUBLISHED_WIDTH, PUBLISHED_TOKENS_PER_STEP = 768, 524_288
PUBLISHED_TOKENS = 3250 * PUBLISHED_TOKENS_PER_STEP

# The batch that suits a run grows so with its tokens (Bergsma et al. 2025, arXiv:2505.13738).
BATCH_EXPONENT = 0.383


class Band(NamedTuple):
    """Losses between which a run is normal."""

    low: float
    high: float


def effective_tokens(tokens: float, unique_tokens: float | None) -> float:
    """New tokens that would teach as much as `tokens` drawn from `unique_tokens`."""
    if unique_tokens is None or tokens <= unique_tokens:
        return tokens
    repeats = tokens / unique_tokens - 1
    return unique_tokens * (1 + FADING_REPEATS * (1 - math.exp(-repeats / FADING_REPEATS)))


def expected_loss(
    parameters: float,
    tokens: float,
    unique_tokens: float | None = None,
    recipe: Recipe = "plain",
) -> float | None:
    """Validation loss at the end of a run; None where there is too little to tell from."""
    is_known = effective_tokens(tokens, unique_tokens) >= FEWEST_TOKENS
    return trend(parameters, tokens, unique_tokens, recipe) if is_known else None


def trend(
    parameters: float,
    tokens: float,
    unique_tokens: float | None = None,
    recipe: Recipe = "plain",
) -> float:
    """The law as far as it goes and beyond, where it is good for comparing shapes alone."""
    tokens = effective_tokens(tokens, unique_tokens)
    by_size = PER_PARAMETERS / parameters**EXPONENT
    if recipe == "plain":
        return FLOOR + by_size + PER_TOKENS / tokens**EXPONENT
    by_size -= PER_PARAMETERS / MODERN_PARAMETERS**EXPONENT
    return MODERN_FLOOR + by_size + MODERN_PER_TOKENS * (tokens / 1e9) ** -MODERN_EXPONENT


def expected_band(
    parameters: float,
    tokens: float,
    unique_tokens: float | None = None,
    recipe: Recipe = "plain",
    lr_share: float = 0.0,
) -> Band | None:
    """Where the loss of a normal run lies; `lr_share` is how much of the decay is still to come."""
    loss = expected_loss(parameters, tokens, unique_tokens, recipe)
    if loss is None:
        return None
    return Band(loss - BAND, loss + BAND + UNDECAYED_ALLOWANCE * lr_share)


def optimal_tokens(*, n_layer: int, n_embd: int, vocab_size: int) -> float:
    """Tokens at which this model makes the best of the compute; more still lowers the loss."""
    return OPTIMAL_TOKENS_PER_WEIGHT * _product_weights(n_layer, n_embd, vocab_size)


def model_for(flops: float, *, block_size: int, vocab_size: int) -> tuple[int, int, int] | None:
    """Layers, heads and width of the model that `flops` train to its compute-optimal tokens.

    Widths grow with the depth as in GPT-2's smallest model: 64 a layer, in heads of 64. None if
    that is less than two layers.
    """

    def cost(n_layer: int) -> float:
        n_embd = 64 * n_layer
        tokens = optimal_tokens(n_layer=n_layer, n_embd=n_embd, vocab_size=vocab_size)
        per_token = 6 * _product_weights(n_layer, n_embd, vocab_size)
        return tokens * (per_token + 12 * n_layer * n_embd * block_size)

    if flops < cost(2):
        return None
    n_layer = min(range(2, 49), key=lambda depth: abs(math.log(cost(depth) / flops)))
    return n_layer, n_layer, 64 * n_layer


def suited_tokens_per_step(tokens: float) -> float:
    """The batch for a run of so many tokens, from the published one."""
    return PUBLISHED_TOKENS_PER_STEP * (tokens / PUBLISHED_TOKENS) ** BATCH_EXPONENT


def weight_decay_for(parameters: float, unique_tokens: float) -> float:
    """AdamW's weight decay for a run limited by its data."""
    return WEIGHT_DECAY_PER_RATIO * parameters / unique_tokens


class MuonFactors(NamedTuple):
    """By how much the published settings of the modern recipe change for another run."""

    learning_rate: float
    adamw_rates: float  # of embedding and head, which are in units of the learning rate
    weight_decay: float


def muon_factors(
    *, n_embd: int, tokens_per_step: float, tokens: float, unique_tokens: float | None = None
) -> MuonFactors:
    """nanochat's rules: all rates by the root of the batch, AdamW's by that of the width as well.

    Muon's own rate is the same for all widths, as its steps are measured by their largest singular
    value (Yang et al., arXiv:2310.17813). Weight decay keeps the epochs over which weights average
    (Wang and Aitchison, arXiv:2405.13698), so that data seen again do not lessen it. The rules for
    batch and decay were found with AdamW; that they hold for Muon is an assumption, nanochat's as
    well. Depth, gains and biases have no rule here: they keep what was published.
    """
    by_batch = math.sqrt(tokens_per_step / PUBLISHED_TOKENS_PER_STEP)
    tokens_per_epoch = min(tokens, unique_tokens or tokens)
    return MuonFactors(
        learning_rate=by_batch,
        adamw_rates=math.sqrt(PUBLISHED_WIDTH / n_embd),
        weight_decay=by_batch * PUBLISHED_TOKENS / tokens_per_epoch,
    )


def recipe_of(arch: str, optimizer: str, vocab_size: int) -> Recipe | None:
    """Which curve a model follows; None where the law knows nothing of its vocabulary.

    Half of a recipe is none: what is between the two is taken for the plain one.
    """
    if vocab_size < GPT2_VOCABULARY:
        return None
    return "modern" if arch == "modern" and optimizer == "muon" else "plain"


def _product_weights(n_layer: int, n_embd: int, vocab_size: int) -> int:
    return 12 * n_layer * n_embd**2 + vocab_size * n_embd
