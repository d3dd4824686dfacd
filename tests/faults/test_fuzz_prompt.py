"""What a person writes to a model: any text is written on, as tokens that the model has."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import GPT
from nanofit.data.tokenizer import VOCABULARY_SIZE
from nanofit.machine.device import describe_device
from nanofit.settings.shape import GPTConfig
from nanofit.use import chat
from nanofit.use.chat import SharedText
from nanofit.use.generate import choose_token
from tests.fuzz import fuzzed
from tests.hostile import bounded
from tests.mutations import damaged

SHAPE = GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=8, vocab_size=VOCABULARY_SIZE)
VALID = (
    "Once upon a time, 12 naïve rivers (don't) met; 日本語 👩‍👩‍👧 <|endoftext|> /help\n".encode()
)
PIECES = [
    *(b"<|endoftext|>", b"<|", b"|>", b"/retry", b"/reset", b"/x", b"/", b" ", b"\t", b"\r", b"\0"),
    *(b"\xff", b"\xed\xa0\x80", b"\xef\xbf\xbe", b"\xcc\xa3", b"a", b"\xf0\x9f", b"'", b"\x1b[2J"),
]


@pytest.fixture(scope="module")
def shared() -> SharedText:
    choose = partial(choose_token, temperature=0)
    return SharedText(GPT(SHAPE).eval(), describe_device("cpu"), choose)


@fuzzed
@given(content=damaged(VALID, PIECES), how=st.sampled_from(["replace", "surrogateescape"]))
def test_any_line_is_taken_as_a_turn(content, how, shared, capsys):
    with bounded():
        if chat._takes_turn(content.decode(errors=how), shared):
            pieces = "".join(shared.go_on(2))
            pieces.encode()
    assert int(shared.context.tokens.max()) < VOCABULARY_SIZE if len(shared.context) else True


@fuzzed
@given(lines=st.lists(st.sampled_from(PIECES), max_size=8))
def test_any_order_of_commands_leaves_a_text(lines, shared, capsys):
    shared.reset()
    for line in lines:
        if chat._takes_turn(line.decode(errors="replace"), shared):
            "".join(shared.go_on(3)).encode()
    assert len(shared.context) <= SHAPE.block_size + max(map(len, lines), default=0) + 8
