"""The loss on a text against plain ways: token by token, document by document, by transformers."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model import GPT
from nanofit.data.tokenizer import END_OF_TEXT
from nanofit.evaluation.corpus import Corpus
from nanofit.evaluation.estimate import Estimate
from nanofit.evaluation.predict import losses_of
from nanofit.machine.device import describe_device
from nanofit.memory.trace import MemoryBudget
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, Progress

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=50304)
CPU = describe_device("cpu")


def a_text(count: int = 500, seed: int = 0) -> Corpus:
    """Documents of all lengths, an empty and an unfinished one among them."""
    tokens = np.random.default_rng(seed).integers(0, 50257, count).astype(np.uint16)
    tokens[[40, 41, 200, 330, 470]] = END_OF_TEXT
    return Corpus("a text", tokens, text_bytes=4 * count, has_ends=True)


def predicted(model: GPT, corpus: Corpus, settings: dict | None = None):
    windows = corpus.windows(model.config, settings or {})
    progress = Progress("predicting", 1, quiet=True)
    return windows, losses_of(model, windows, CPU, progress)


def shaken(model: GPT) -> GPT:
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def test_loss_is_that_of_transformers_block_by_block_and_document_by_document(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=50257)
    reference = GPT2LMHeadModel(config).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    reference.save_pretrained(tmp_path)
    corpus = a_text()
    row = [END_OF_TEXT, *corpus.tokens.tolist()]
    expected = []
    for start in range(0, len(corpus.tokens), 16):
        block = torch.tensor([row[start : start + 17]])
        with torch.no_grad():
            log_probs = reference(block[:, :-1]).logits.double().log_softmax(-1)
        expected += (-log_probs.gather(2, block[:, 1:, None])).flatten().tolist()

    windows, losses = predicted(GPT.from_checkpoint(tmp_path), corpus)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)

    documents, document = [], []
    for token, loss in zip(corpus.tokens, expected, strict=True):
        document.append(loss)
        if token == END_OF_TEXT:
            documents, document = [*documents, document], []
    documents.append(document)
    estimate = corpus.estimates(windows, losses)["loss"]
    np.testing.assert_allclose(estimate.amounts, [sum(one) for one in documents], rtol=1e-5)
    assert estimate.weights.tolist() == [len(one) for one in documents]
    assert estimate.value == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert corpus.described()["documents"] == len(documents) == 6


@given(count=st.integers(2, 90), block_size=st.integers(1, 40), has_ends=st.booleans())
def test_every_token_is_predicted_once_from_the_one_before_it(count, block_size, has_ends):
    tokens = np.arange(1000, 1000 + count).astype(np.uint16)
    corpus = Corpus("counting", tokens, None, has_ends)
    windows = corpus.windows(GPTConfig(block_size=block_size), {})
    places = windows.places()
    assert windows.targets[places].tolist() == tokens[not has_ends :].tolist()
    before = [END_OF_TEXT, *tokens.tolist()] if has_ends else tokens.tolist()
    assert windows.inputs[places].tolist() == before[:-1]
    *whole, last = windows.lengths.tolist()
    assert set(whole) <= {block_size} and 1 <= last <= block_size


def test_bits_per_byte_of_a_uniform_model_are_those_of_a_token_over_its_bytes():
    model = GPT(SHAPE)
    torch.nn.init.zeros_(model.lm_head.weight)
    corpus = a_text()
    windows, losses = predicted(model, corpus)
    estimates = corpus.estimates(windows, losses)
    figures = corpus.figures(estimates)
    assert figures["bits_per_byte"] == pytest.approx(math.log2(50304) / 4, rel=1e-6)
    assert figures["perplexity"] == pytest.approx(50304, rel=1e-5)
    assert figures["tokens"] == 500
    assert estimates["loss"].error < 1e-6


@pytest.mark.parametrize("loss", [3.0, 699.0, 711.0, 1e6])
def test_perplexity_is_told_as_far_as_there_are_such_numbers(loss):
    corpus = Corpus("counting", np.arange(9, dtype=np.uint16), 90, has_ends=True)
    figures = corpus.figures({"loss": Estimate(np.array([9 * loss]), np.array([9]))})
    assert figures["perplexity"] == pytest.approx(float(Decimal(loss).exp()))
    assert figures["bits_per_byte"] == pytest.approx(loss / math.log(2) / 10)


def test_less_memory_changes_the_micro_batch_and_not_the_losses(capsys):
    model = shaken(GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=512)))
    tokens = np.random.default_rng(0).integers(0, 512, 3000).astype(np.uint16)
    corpus = Corpus("noise", tokens, None, has_ends=False)
    windows, plenty = predicted(model, corpus)
    assert len(windows.starts) > 8
    progress = Progress("predicting", 1, every_s=math.inf)
    with MemoryBudget(1_500_000):
        scarce = losses_of(model, windows, CPU, progress)
    assert "out of memory with 188 sequences at once; on with 94" in capsys.readouterr().out
    np.testing.assert_allclose(scarce, plenty, rtol=1e-5)
    with MemoryBudget(20_000), pytest.raises(torch.OutOfMemoryError):
        losses_of(model, windows, CPU, progress)


def test_a_text_of_another_tokenizer_is_refused():
    corpus = a_text()
    with pytest.raises(InputError, match="has token 50256, but the model's vocabulary ends at 99"):
        corpus.windows(GPTConfig(vocab_size=100), {})
    with pytest.raises(InputError, match="too few tokens"):
        Corpus("one", np.array([7], np.uint16), None, False).windows(SHAPE, {})
    with pytest.raises(InputError, match="as_in_run"):
        Corpus("one", corpus.tokens, None, True, as_in_run=True).windows(SHAPE, {})
