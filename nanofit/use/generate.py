"""Logits -> text, one token at a time."""

import codecs
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from model import GPT, KVCache
from nanofit.data.tokenizer import END_OF_TEXT, gpt2
from nanofit.machine.device import Device, describe_device
from nanofit.machine.memory import is_out_of_memory
from nanofit.terminal import InputError


def write_text(
    checkpoint: Path,
    prompt: str,
    *,
    device: str,
    dtype: str,
    seeds: range,
    max_new_tokens: int,
    **how_to_choose: float | None,
) -> None:
    """Print what follows a prompt, once for each seed, as it comes."""
    described = describe_device(device, dtype)
    if described.note:
        print(described.note, file=sys.stderr)
    with _shortage_in_one_line(described):
        _write(checkpoint, prompt, described, seeds, max_new_tokens, **how_to_choose)


@contextmanager
def _shortage_in_one_line(device: Device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory on {device.name}; end what else uses it, or sample with --device=cpu"
        ) from error


def _write(
    checkpoint: Path,
    prompt: str,
    described: Device,
    seeds: range,
    max_new_tokens: int,
    **how_to_choose: float | None,
) -> None:
    model = GPT.from_checkpoint(checkpoint).to(described.torch_device)
    tokens = gpt2().encode(prompt, allowed_special="all") or [END_OF_TEXT]
    if max(tokens) >= model.config.vocab_size:
        raise InputError("the model's vocabulary is too small for GPT-2's tokens")
    for number, seed in enumerate(seeds, 1):
        if len(seeds) > 1:
            print(f"--- sample {number} of {len(seeds)}, seed {seed}")
        print(prompt, end="", flush=True)
        generator = torch.Generator(described.torch_device).manual_seed(seed % 2**63)
        choose = partial(choose_token, generator=generator, **how_to_choose)
        for piece in _pieces(model, tokens, described, choose, max_new_tokens=max_new_tokens):
            print(piece, end="", flush=True)
        print()


def _pieces(
    model: GPT, tokens: list[int], device: Device, choose: Callable, *, max_new_tokens: int
) -> Iterator[str]:
    """The text that follows, in pieces as they come; it ends with the document."""
    idx = torch.tensor([tokens], device=device.torch_device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
    with device.autocast():
        for token in generate(model, idx, choose, max_new_tokens=max_new_tokens):
            if token.item() >= END_OF_TEXT:  # or a row of the embedding that pads it
                break
            yield decoder.decode(gpt2().decode_single_token_bytes(token.item()))
    yield decoder.decode(b"", final=True)


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
