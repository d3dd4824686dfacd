"""Sampling: the cache against recomputation, the filters against enumeration."""

from functools import partial

import pytest
import torch

from model import GPT
from nanofit.machine.device import describe_device
from nanofit.settings.shape import GPTConfig
from nanofit.use.generate import choose_token, generate
from nanofit.use.samples import take_samples

GREEDY = partial(choose_token, temperature=0)
DRAWS = 4000


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


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, before = 3 * torch.randn(4, 50), torch.randint(0, 50, (4, 30))
    penalised = RepetitionPenaltyLogitsProcessor(penalty)(before, logits.clone())
    chosen = choose_token(logits, before, temperature=0, repetition_penalty=penalty)
    assert torch.equal(chosen, penalised.argmax(-1))
    for row in range(4):
        of_row = partial(choose_token, before=before[row].expand(DRAWS, -1))
        choose = partial(of_row, repetition_penalty=penalty)
        assert_drawn_as_often(choose, logits[row], penalised[row])


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 5])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_filters_leave_what_those_of_transformers_leave(top_p, top_k, temperature):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = 2 * torch.randn(4, 20)
    filtered = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        filtered = TopKLogitsWarper(top_k)(None, filtered)
    filtered = TopPLogitsWarper(top_p)(None, filtered)
    options = {"top_p": top_p, "top_k": top_k, "temperature": temperature}
    for row in range(4):
        assert_drawn_as_often(partial(choose_token, **options), logits[row], filtered[row])


def assert_drawn_as_often(choose, logits, expected) -> None:
    """By a choice from logits as by the softmax of others: never what has no probability there."""
    frequencies = choose(logits.expand(DRAWS, -1)).bincount(minlength=len(logits)) / DRAWS
    probabilities = expected.softmax(-1)
    assert not frequencies[probabilities == 0].any()
    torch.testing.assert_close(frequencies, probabilities, atol=0.04, rtol=0)


def test_what_is_drawn_for_a_row_depends_on_its_own_generator_alone():
    logits = torch.randn(5, 40)

    def drawn(rows):
        generators = [torch.Generator().manual_seed(row) for row in rows]
        return [choose_token(logits[rows], generator=generators) for _ in range(20)]

    together, apart = drawn([0, 1, 2, 3, 4]), drawn([3, 1])
    assert [one[[3, 1]].tolist() for one in together] == [one.tolist() for one in apart]
    assert len({one[0].item() for one in together}) > 5


def test_temperature_sharpens():
    logits = torch.tensor([0.2, 0.8]).log().expand(20_000, 2)
    drawn = choose_token(logits, temperature=0.5, generator=torch.Generator().manual_seed(0))
    assert drawn.float().mean().item() == pytest.approx(0.64 / (0.64 + 0.04), abs=0.01)


def test_a_document_ends_in_a_sample_of_training_where_its_prompt_says_so():
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32))
    prompts = ["", "<|endoftext|>", "One day", "One day<|endoftext|>"]
    told = dict(take_samples(model, prompts, describe_device("cpu"), seed=3))
    assert told["<|endoftext|>"] == told[""]  # which begins a document as well
    assert len(set(told.values())) == 3
