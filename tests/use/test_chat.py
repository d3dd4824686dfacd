"""A text in turns: what is carried on against a run on all of it."""

from functools import partial
from itertools import islice

import pytest
import torch

from model import GPT
from nanofit.data.tokenizer import END_OF_TEXT, gpt2
from nanofit.machine.device import describe_device
from nanofit.settings.shape import GPTConfig
from nanofit.use.chat import SharedText
from nanofit.use.generate import choose_token, generate

GREEDY = partial(choose_token, temperature=0)
BLOCK = 64


@pytest.fixture(params=["gpt2", "modern"])
def text(request) -> SharedText:
    """Of a model with sharp logits, so that rounding decides nothing."""
    shape = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=BLOCK, arch=request.param)
    model = GPT(shape)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        model.lm_head.weight[END_OF_TEXT:] = 0  # what is never the likeliest
    return SharedText(model.eval(), describe_device("cpu"), GREEDY)


def followed_by(text: SharedText, count: int) -> str:
    """What a fresh run on all tokens so far gives."""
    drawn = generate(
        text._model, text.context.tokens, GREEDY, max_new_tokens=count, use_cache=False
    )
    return gpt2().decode([token.item() for token in drawn])


def test_each_part_is_that_of_a_fresh_run_on_all_before_it(text):
    text.write("Once upon a time")
    for turn in ("", "there was a river", "", "<|endoftext|>A boat"):
        text.write(turn)
        expected = followed_by(text, 7)
        assert "".join(text.go_on(7)) == expected
    assert len(set(text.context.tokens[0].tolist())) > 12  # not one token for ever
    so_far = gpt2().decode(text.context.tokens[0].tolist())
    assert so_far.startswith("Once upon a time") and "\nthere was a river" in so_far


def test_a_part_left_off_is_carried_on_from_there(text):
    text.write("Once")
    whole = followed_by(text, 12)
    left_off = "".join(islice(text.go_on(12), 5))
    assert left_off and whole.startswith(left_off)
    text.write("")
    assert left_off + "".join(text.go_on(7)) == whole


def test_retry_takes_back_the_last_part_alone(text):
    assert not text.retry()
    text.write("Once")
    first = "".join(text.go_on(6))
    text.write("and then a boat came down the river")
    second = "".join(text.go_on(6))
    assert first != second
    for _ in range(2):
        assert text.retry()
        assert "".join(text.go_on(6)) == second
    text.reset()
    assert not text.retry()
    text.write("Once")
    assert "".join(text.go_on(6)) == first


def test_when_the_block_is_full_the_newer_half_is_carried_on(text):
    text.write("Once")
    all_of_it = text.context.tokens[0].tolist()
    for _ in islice(text.go_on(1000), 150):
        assert len(text.context) <= BLOCK + 1
        newest = text.context.tokens[0].tolist()
        all_of_it.append(newest[-1])
        assert len(newest) >= min(len(all_of_it), BLOCK // 2)
        assert newest == all_of_it[-len(newest) :]
    assert not text.retry()  # where the part began is forgotten
    text.write("and then")
    assert len(text.context) + 3 <= BLOCK
    expected = followed_by(text, 3)
    assert "".join(text.go_on(3)) == expected
    text.write("more than the block " * BLOCK)
    written = "".join(text.go_on(3))
    assert len(text.context) == BLOCK // 2 + 3
    assert text.retry() and "".join(text.go_on(3)) == written


def test_the_end_of_a_document_is_told_and_not_part_of_it(text):
    text.write("Once")
    model_chooses = text._choose
    text._choose = lambda logits, before: torch.tensor([END_OF_TEXT])
    assert "".join(text.go_on(5)) == "" and text.has_ended
    assert END_OF_TEXT not in text.context.tokens
    text._choose = model_chooses
    text.write("")
    expected = followed_by(text, 5)
    assert "".join(text.go_on(5)) == expected and not text.has_ended
