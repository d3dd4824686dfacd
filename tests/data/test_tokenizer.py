"""fastokens against tiktoken, token for token; long texts against the whole text at once."""

import random
import sys

import numpy as np
import pytest

from nanofit.data import tokenizer
from nanofit.data.tokenizer import (
    END_OF_TEXT,
    SELF_CHECK,
    encoded,
    fast_encoder,
    gpt2,
    reference_encoder,
)

SCRIPTS = [
    "the quick isn't 'we'll they've I'm you'd she's",
    "naïve façade Größe œuvre Žluťoučký",
    "Русский Ελληνικά Հայերեն ქართული",
    "العربية עברית فارسی اردو",
    "हिन्दी தமிழ் ไทย বাংলা",
    "中文字符 日本語テキスト 한국어",
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇨🇭",
    "e\u0301\u0323 \u200d\ufeff\u2060 \u202e",
    "0123456789 ½²٣ ⅷ 3.14159e-10",
    " \t\n\r\x0b\x0c\x1c\x85\u00a0\u1680\u2003\u2028\u3000",
    "'s't're've'm'll'd 'S 'LL ’s",
    '<|endoftext|> <|im_start|> {}[]()<>/\\|~`!@#$%^&*-_=+;:",.?',
]


def expected(text: str) -> list[int]:
    return gpt2().encode_ordinary(text)


def assert_equal_to_tiktoken(texts: list[str]) -> None:
    encode = fast_encoder()
    for text, ids in zip(texts, encode(texts), strict=True):
        assert ids.tolist() == expected(text), repr(text)


@pytest.fixture(autouse=True)
def needs_fastokens():
    pytest.importorskip("fastokens")


def test_known_tokens():
    assert gpt2().encode_ordinary("hello world") == [31373, 995]
    assert fast_encoder()(["hello world"])[0].tolist() == [31373, 995]


def test_special_token_text_stays_text():
    for encode in (fast_encoder(), reference_encoder()):
        (ids,) = encode(["<|endoftext|>"])
        assert 50256 not in ids
        assert gpt2().decode(ids.tolist()) == "<|endoftext|>"


def test_special_token_text_in_a_prompt_is_the_token():
    one, other = "One day<|endoftext|", "> there<|endoftext|>"
    assert encoded(one + other) == [
        *expected("One day"),
        END_OF_TEXT,
        *expected(" there"),
        END_OF_TEXT,
    ]
    assert encoded(one) + encoded(other)[:-1] == expected(one) + expected("> there")


def test_the_self_check_covers_both_encoders():
    assert_equal_to_tiktoken(SELF_CHECK)


@pytest.mark.parametrize(
    "context", ["{}", "a{}b", "1{}2", " {}", "  {} \n", "'{}s", "é{}中", "{}{}"]
)
def test_every_code_point_in_context(context):
    points = [chr(p) for p in range(sys.maxunicode + 1) if not 0xD800 <= p <= 0xDFFF]
    size = 2000
    joined = ["".join(points[i : i + size]) for i in range(0, len(points), size)]
    texts = ["|".join(context.replace("{}", c) for c in group) for group in joined]
    assert_equal_to_tiktoken(texts)


def test_mixed_scripts_whitespace_and_long_words():
    rng = random.Random(1)
    texts = []
    for _ in range(4000):
        pieces = [rng.choice(rng.choice(SCRIPTS).split(" ")) for _ in range(rng.randint(1, 30))]
        gaps = [rng.choice(["", " ", "  ", "\n", "\n\n  ", "\t", "\u00a0"]) for _ in pieces]
        texts.append("".join(a + b for a, b in zip(pieces, gaps, strict=True)))
    texts += ["".join(rng.choices("".join(SCRIPTS), k=rng.randint(1, 200))) for _ in range(4000)]
    texts += [rng.choice("ab é中'= \n9") * rng.randint(1, 5000) for _ in range(200)]
    texts += ["".join(rng.choices("abcxyz", k=20_000)) for _ in range(3)]
    assert_equal_to_tiktoken(texts)


def test_windows_of_a_long_text_give_the_tokens_of_the_whole(monkeypatch):
    """Route one: tiktoken on the whole text. Route two: small windows, for either encoder."""
    rng = random.Random(2)
    alphabets = [
        "ab",
        "a",
        "aA1'! \n",
        "'stlvedrm ",
        "  \n\t",
        "中文é😀 ",
        "=-_ ",
        "".join(SCRIPTS),
    ]
    for _ in range(1500):
        monkeypatch.setattr(tokenizer, "WINDOW_BYTES", rng.choice([300, 500, 1000]))
        monkeypatch.setattr(tokenizer, "LONG_TEXT", 100)
        alphabet = rng.choice(alphabets) + rng.choice(alphabets)
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 4000)))
        for encode in (fast_encoder(), reference_encoder()):
            assert encode([text, "short"])[0].tolist() == expected(text), repr(text)


def test_a_window_that_ends_inside_a_contraction_or_a_gap(monkeypatch):
    monkeypatch.setattr(tokenizer, "WINDOW_BYTES", 300)
    monkeypatch.setattr(tokenizer, "LONG_TEXT", 100)
    for border in ("'llet", "'re", "   x", "\n\n\nx", "👩‍👩‍👧", "''s"):
        for place in range(290, 303):
            text = ("we " * 200)[:place] + border + " and so on" * 60
            assert reference_encoder()([text])[0].tolist() == expected(text), (border, place)


def test_a_failed_self_check_turns_the_fast_encoder_off(monkeypatch):
    wrong = [np.array([1]) for _ in SELF_CHECK]
    monkeypatch.setattr(tokenizer, "reference_encoder", lambda: lambda _texts: wrong)
    assert fast_encoder.__wrapped__() is None


def test_a_damaged_vocabulary_is_refused(tmp_path):
    content = bytearray(tokenizer.VOCABULARY.read_bytes())
    content[1000] ^= 1
    path = tmp_path / "gpt2.tiktoken"
    path.write_bytes(content)
    with pytest.raises(tokenizer.InputError, match="damaged"):
        tokenizer.read_ranks(path)
