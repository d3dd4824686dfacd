"""Sampling: the cache against recomputation, the filters against enumeration."""

from functools import partial

import pytest
import torch

from model import GPT
from nanofit.settings.shape import GPTConfig
from nanofit.use.generate import choose_token, generate

GREEDY = partial(choose_token, temperature=0)


@pytest.mark.parametrize("prompt_length", [1, 5, 30])
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_cached_tokens_equal_recomputed_ones_even_past_the_block(arch, prompt_length):
    torch.manual_seed(3)
    shape = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=24, vocab_size=97, arch=arch)
    model = GPT(shape)
    for parameter in model.parameters():  # sharp logits, so that rounding decides nothing
        torch.nn.init.normal_(parameter, std=0.3)
    prompt = torch.randint(0, 97, (2, prompt_length))
    cached, recomputed = (
        torch.stack(list(generate(model, prompt, GREEDY, max_new_tokens=40, use_cache=use_cache)))
        for use_cache in (True, False)
    )
    assert torch.equal(cached, recomputed)
    assert len(set(cached[:, 0].tolist())) > 5  # not one token for ever


def test_recomputed_tokens_are_the_likeliest_by_the_plain_forward():
    torch.manual_seed(3)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=24, vocab_size=97)).eval()
    context = torch.randint(0, 97, (1, 4))
    for token in generate(model, context, GREEDY, max_new_tokens=15, use_cache=False):
        expected = model(context)[:, -1].argmax(dim=-1)
        assert torch.equal(token, expected)
        context = torch.cat([context, token[:, None]], dim=1)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {3, 1}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.0}, {3}),
        ({"top_p": 0.4}, {3}),
        ({"top_p": 0.5}, {3, 1}),
        ({"top_p": 0.75}, {3, 1, 0}),
        ({"top_p": 0.75, "top_k": 2}, {3, 1}),
    ],
)
def test_only_the_likeliest_tokens_are_drawn_and_as_often_as_they_should(options, allowed):
    probabilities = torch.tensor([0.2, 0.25, 0.1, 0.45])
    logits = probabilities.log().expand(20_000, 4)
    generator = torch.Generator().manual_seed(0)
    drawn = choose_token(logits, generator=generator, **options)
    assert set(drawn.tolist()) == allowed
    kept = torch.zeros(4)
    kept[list(allowed)] = probabilities[list(allowed)]
    frequencies = drawn.bincount(minlength=4) / len(drawn)
    torch.testing.assert_close(frequencies, kept / kept.sum(), atol=0.015, rtol=0)


def test_temperature_sharpens():
    logits = torch.tensor([0.2, 0.8]).log().expand(20_000, 2)
    drawn = choose_token(logits, temperature=0.5, generator=torch.Generator().manual_seed(0))
    assert drawn.float().mean().item() == pytest.approx(0.64 / (0.64 + 0.04), abs=0.01)
