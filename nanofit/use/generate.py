"""Logits -> tokens, one at a time."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from model import GPT, KVCache

Choose = Callable[[Tensor, Tensor], Tensor]  # logits (B, V) and what came before (B, T) -> (B)


class Context:
    """The tokens (B, T) so far, and what a model keeps of them to go on from there.

    Past `block_size` the window slides, every position changes, and nothing can be kept.
    """

    def __init__(self, model: GPT, tokens: Tensor, *, use_cache: bool = True):
        self._model, self._block_size = model, model.config.block_size
        self._cache = KVCache(model) if use_cache else None
        self.tokens = tokens[:, -self._block_size :]

    def __len__(self) -> int:
        return self.tokens.size(1)

    def append(self, tokens: Tensor) -> None:
        """Put these (B, n) after the others."""
        self.tokens = torch.cat([self.tokens, tokens], dim=1)

    def cut(self, length: int) -> None:
        """Take back what comes after so many tokens."""
        self.tokens = self.tokens[:, :length]

    def next_logits(self) -> Tensor:
        """Of the token that follows (B, V)."""
        cache = self._cache
        if cache is None or len(self) > self._block_size:
            return self._model.next_logits(self.tokens[:, -self._block_size :])
        cache.length = min(cache.length, len(self) - 1)  # logits come of a token that is seen now
        return self._model.next_logits(self.tokens[:, cache.length :], cache)


@torch.inference_mode()
def generate(
    model: GPT, prompt: Tensor, choose: Choose, *, max_new_tokens: int, use_cache: bool = True
) -> Iterator[Tensor]:
    """Yield the tokens (B) that follow a prompt (B, T), as they come."""
    model.eval()
    context = Context(model, prompt, use_cache=use_cache)
    for _ in range(max_new_tokens):
        token = choose(context.next_logits(), context.tokens)  # (B)
        context.append(token[:, None])
        yield token


def choose_token(
    logits: Tensor,
    before: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Draw the next token of each row (B) from logits (B, V); temperature 0 takes the likeliest.

    In the order and by the definitions of Hugging Face. With a generator for each row, what is
    drawn for one does not depend on the others.
    """
    logits = logits.float()
    if before is not None and repetition_penalty != 1:
        of_before = logits.gather(1, before)
        factor = torch.where(of_before < 0, repetition_penalty, 1 / repetition_penalty)
        logits = logits.scatter(1, before, of_before * factor)
    if temperature < 1e-4:  # smaller ones overflow
        return logits.argmax(dim=-1)
    probabilities, tokens = (logits / temperature).softmax(dim=-1).sort(descending=True)
    if top_k is not None:
        probabilities[:, top_k:] = 0
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    if top_p is not None:
        likelier = probabilities.cumsum(dim=-1) - probabilities
        likelier[:, 0] = -1  # the likeliest token always stays
        probabilities[likelier >= top_p] = 0
    return tokens.gather(1, _drawn(probabilities, generator)).squeeze(1)


def _drawn(
    probabilities: Tensor, generator: torch.Generator | Sequence[torch.Generator] | None
) -> Tensor:
    if not isinstance(generator, Sequence):
        return torch.multinomial(probabilities, 1, generator=generator)
    rows = zip(probabilities.split(1), generator, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in rows])
