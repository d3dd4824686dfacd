"""Logits -> text, one token at a time."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model import GPT, KVCache


@torch.inference_mode()
def generate(
    model: GPT,
    prompt: Tensor,
    choose: Callable[[Tensor], Tensor],
    *,
    max_new_tokens: int,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yield the tokens (B) that follow a prompt (B, T), as they come.

    Past `block_size` the window slides, every position changes, and nothing can be kept.
    """
    model.eval()
    block_size = model.config.block_size
    context = prompt[:, -block_size:]
    cache = KVCache(model) if use_cache else None
    for _ in range(max_new_tokens):
        fits = cache is not None and context.size(1) <= block_size
        unseen = context[:, cache.length :] if fits else context[:, -block_size:]
        token = choose(model.next_logits(unseen, cache if fits else None))  # (B)
        context = torch.cat([context, token[:, None]], dim=1)
        yield token


def choose_token(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the next token of each row (B) from logits (B, V); temperature 0 takes the likeliest."""
    if temperature < 1e-4:  # smaller ones overflow
        return logits.argmax(dim=-1)
    probabilities, tokens = (logits.float() / temperature).softmax(dim=-1).sort(descending=True)
    if top_k is not None:
        probabilities[:, top_k:] = 0
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        before[:, 0] = -1  # the likeliest token always stays
        probabilities[before >= top_p] = 0
    drawn = torch.multinomial(probabilities, 1, generator=generator)
    return tokens.gather(1, drawn).squeeze(1)
