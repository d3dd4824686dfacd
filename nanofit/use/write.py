"""A prompt -> what follows it: as text, once or several times."""

import codecs
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from model import GPT
from nanofit.data.tokenizer import END_OF_TEXT, VOCABULARY_SIZE, encoded, gpt2
from nanofit.machine.device import Device, describe_device
from nanofit.terminal import FlowingText, InputError
from nanofit.use.generate import choose_token, generate
from nanofit.use.shortage import if_it_fits, shortage_in_one_line

MOST_AT_ONCE = 16  # samples


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
    """Print what follows a prompt, once for each seed.

    Samples are computed together, as many as fit; the first of them is shown as it comes. Each has
    random numbers of its own, so that it is what its seed gives alone, to rounding.
    """
    with opened(checkpoint, device, dtype) as (model, described):
        tokens = encoded(prompt) or [END_OF_TEXT]
        options = {"max_new_tokens": max_new_tokens, **how_to_choose}
        waiting, at_once = seeds, MOST_AT_ONCE
        while waiting:
            together = waiting[:at_once]
            pieces = _pieces(model, tokens, described, together, **options)
            # With the first token all memory is taken that the others need.
            attempt = partial(next, pieces)
            begun = if_it_fits(attempt, described, is_smallest=len(together) == 1)
            if begun is None:
                at_once = len(together) // 2
                continue
            _print(prompt, chain([begun], pieces), [_title(seed, seeds) for seed in together])
            waiting = waiting[at_once:]


@contextmanager
def opened(checkpoint: Path, device: str, dtype: str) -> Iterator[tuple[GPT, Device]]:
    """A model that writes, and where; a lack of memory there is told in a line."""
    described = describe_device(device, dtype)
    if described.note:
        print(described.note, file=sys.stderr)
    with shortage_in_one_line(described, "sample with --device=cpu"):
        model = GPT.from_checkpoint(checkpoint).to(described.torch_device)
        if model.config.vocab_size < VOCABULARY_SIZE:
            raise InputError("the model's vocabulary is too small for GPT-2's tokens")
        yield model.eval(), described


class TextPieces:
    """Tokens -> pieces of text, until a document ends; a character may span tokens."""

    def __init__(self):
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.has_ended = False

    def add(self, token: int) -> str:
        """What a token adds to the text."""
        self.has_ended = token >= END_OF_TEXT  # or a row of the embedding that pads it
        return self.rest() if self.has_ended else self._decoder.decode(_bytes_of(token))

    def rest(self) -> str:
        """What is left of a character that was begun."""
        return self._decoder.decode(b"", final=True)


def _bytes_of(token: int) -> bytes:
    return gpt2().decode_single_token_bytes(token)


def _pieces(
    model: GPT,
    tokens: list[int],
    device: Device,
    seeds: Sequence[int],
    *,
    max_new_tokens: int,
    **how_to_choose: float | None,
) -> Iterator[tuple[int, str]]:
    """The texts that follow, one for each seed: the number of each, and a piece of it."""
    generators = [torch.Generator(device.torch_device).manual_seed(seed % 2**63) for seed in seeds]
    choose = partial(choose_token, generator=generators, **how_to_choose)
    idx = torch.tensor([tokens] * len(seeds), device=device.torch_device)
    unfinished = {number: TextPieces() for number in range(len(seeds))}
    with device.autocast():
        for drawn in generate(model, idx, choose, max_new_tokens=max_new_tokens):
            for number, token in enumerate(drawn.tolist()):
                if number in unfinished:
                    yield number, unfinished[number].add(token)
                    if unfinished[number].has_ended:
                        del unfinished[number]
            if not unfinished:
                return
    for number, text in unfinished.items():
        yield number, text.rest()


def _title(seed: int, seeds: range) -> str:
    number, count = seeds.index(seed) + 1, len(seeds)
    return f"--- sample {number} of {count}, seed {seed}\n" if count > 1 else ""


def _print(prompt: str, pieces: Iterator[tuple[int, str]], titles: list[str]) -> None:
    """Each text under its title: the first as it comes, then the others."""
    texts = [title + prompt for title in titles]
    shown = FlowingText()
    shown.add(texts[0])
    for number, piece in pieces:
        if number == 0:
            shown.add(piece)
        texts[number] += piece
    shown.end()
    for text in texts[1:]:
        shown.add(text)
        shown.end()
