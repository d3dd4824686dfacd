"""What a model writes while it still learns."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from model import GPT
from nanofit.data.tokenizer import END_OF_TEXT, VOCABULARY_SIZE, encoded, gpt2
from nanofit.machine.device import Device
from nanofit.use.generate import choose_token, generate

NEW_TOKENS = 80
TEMPERATURE, TOP_K = 0.8, 200


def take_samples(
    model: GPT, prompts: Sequence[str], device: Device, *, seed: int
) -> Iterator[tuple[str, str]]:
    """Each prompt and what follows it, always by the same random numbers, which are no one else's.

    None from a model whose tokens are not GPT-2's.
    """
    if model.config.vocab_size < VOCABULARY_SIZE:
        return
    for prompt in prompts:
        yield prompt, _continued(model, prompt, device, seed)


def _continued(model: GPT, prompt: str, device: Device, seed: int) -> str:
    tokens = encoded(prompt) or [END_OF_TEXT]
    idx = torch.tensor([tokens], device=device.torch_device)
    generator = torch.Generator(device.torch_device).manual_seed(seed % 2**63)
    choose = partial(choose_token, temperature=TEMPERATURE, top_k=TOP_K, generator=generator)
    written: list[int] = []
    try:
        with device.autocast():
            for token in generate(model, idx, choose, max_new_tokens=NEW_TOKENS):
                if token.item() >= END_OF_TEXT:  # or a row of the embedding that pads it
                    break
                written.append(token.item())
    finally:
        model.train()
    return gpt2().decode(written)
