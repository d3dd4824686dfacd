"""GPT-2's encoding, offline, from the vocabulary beside this file.

tiktoken is the reference; fastokens gives the same tokens many times faster and is held to it.
"""

import base64
import hashlib
import json
import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from nanofit.terminal import InputError

VOCABULARY = Path(__file__).with_name("gpt2.tiktoken")
VOCABULARY_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
END_OF_TEXT = 50256
VOCABULARY_SIZE = 50257

LONG_TEXT = 2**20  # characters; beyond, encoders may need 50 bytes of memory for each byte of text
WINDOW_BYTES = 2**18
UNSETTLED_TOKENS = 8  # at a window's end; the pattern looks at most three characters ahead

Encoder = Callable[[list[str]], list[np.ndarray]]  # texts -> the token ids of each, in order

# What has told encoders apart: contractions, digits, whitespace before words and at the end,
# special-token text, several scripts, joined emoji, unassigned and combining code points.
SELF_CHECK = [
    "The quick brown fox isn't 100% sure; they've said 'we'll see' 12345 times.",
    "  leading\n\n\n  runs \t\t of   whitespace \r\n\u00a0\u3000 and trailing   ",
    "<|endoftext|> is text here <|endoftext|>",
    "naïve Ελληνικά Русский العربية हिन्दी ไทย 中文字符 日本語 한국어",
    "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301\u0323 \u200d\ufeff \U0001fae8 \U000e0001 ½²٣",
    "x = {'a': [1, 2]}; //----====~~~~ http://example.com/?q=1&r=%20" + "a" * 300,
]


@cache
def gpt2() -> tiktoken.Encoding:
    """tiktoken's `gpt2` encoder, token for token, without its download."""
    return tiktoken.Encoding(
        name="gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=read_ranks(VOCABULARY),
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=VOCABULARY_SIZE,
    )


def encoded(text: str) -> list[int]:
    """The tokens of a prompt, in which <|endoftext|> may stand for the end of a document."""
    return gpt2().encode(text, allowed_special="all")


@cache
def reference_encoder() -> Encoder:
    """Encode with tiktoken; text that spells a special token stays text."""
    encode = gpt2().encode_to_numpy
    return _bounded(lambda texts: [encode(text, disallowed_special=()) for text in texts])


@cache
def fast_encoder() -> Encoder | None:
    """Encode with fastokens; None where it is not installed or fails its check against tiktoken."""
    # One thread a call: our own threads share the work, and `--workers` means what it says.
    os.environ["FASTOKENS_BPE_THREADS"] = "1"
    try:
        from fastokens import Tokenizer
    except ImportError:
        return None
    encode_flat = Tokenizer.from_json_str(tokenizer_json()).encode_batch_flat

    def encode(texts: list[str]) -> list[np.ndarray]:
        ids, offsets = encode_flat(texts)  # it knows no special tokens, so there are none to read
        ids, offsets = np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8").tolist()
        return [ids[start:end] for start, end in pairwise(offsets)]

    expected = reference_encoder()(SELF_CHECK)
    is_equal = all(map(np.array_equal, encode(SELF_CHECK), expected))
    return _bounded(encode) if is_equal else None


def _bounded(encode: Encoder) -> Encoder:
    """The same encoder, with memory for a long text that does not grow with its longest word."""

    def bounded(texts: list[str]) -> list[np.ndarray]:
        if max(map(len, texts), default=0) <= LONG_TEXT:
            return encode(texts)
        return [encode_long(encode, t) if len(t) > LONG_TEXT else encode([t])[0] for t in texts]

    return bounded


def encode_long(encode: Encoder, text: str) -> np.ndarray:
    """Encode window by window; the tokens are those of the whole text.

    A window is left at a token border from which the next window begins with the same token. Byte
    pairs merge by neighbours alone, so tokens are right if every two neighbours are: here each two
    were neighbours in one window. The last tokens of a window may still change with what follows.
    """
    content, start, count = text.encode(), 0, 0
    tokens = np.empty(len(content), np.uint16)  # at most one a byte; untouched memory costs nothing
    ids = _encode_window(encode, content, start)
    while start + WINDOW_BYTES < len(content):
        borders = start + np.cumsum(_token_bytes()[ids])
        for kept in range(len(ids) - UNSETTLED_TOKENS, 0, -1):
            border = int(borders[kept - 1])
            if content[border] & 0b1100_0000 == 0b1000_0000:
                continue  # inside a character
            following = _encode_window(encode, content, border)
            if following[0] == ids[kept]:
                break
        else:
            raise AssertionError("no border at which two windows agree")
        tokens[count : count + kept] = ids[:kept]
        ids, start, count = following, border, count + kept
    tokens[count : count + len(ids)] = ids
    return tokens[: count + len(ids)]


def _encode_window(encode: Encoder, content: bytes, start: int) -> np.ndarray:
    window = content[start : start + WINDOW_BYTES]
    return encode([window.decode("utf-8", "ignore")])[0]  # a character cut at the end is left out


@cache
def _token_bytes() -> np.ndarray:
    """The length of each token in bytes."""
    ranks = read_ranks(VOCABULARY)
    return np.array([len(token) for token in sorted(ranks, key=ranks.get)])


def tokenizer_json() -> str:
    """The same encoding in the `tokenizer.json` format of Hugging Face."""
    ranks = read_ranks(VOCABULARY)
    names = {token: _byte_level_name(token) for token in ranks}
    merges = [
        " ".join(names[half] for half in _last_merge(token, ranks))
        for token in ranks
        if len(token) > 1
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {
        "type": "BPE",
        "vocab": {names[token]: rank for token, rank in ranks.items()},
        "merges": merges,
    }
    return json.dumps(
        {"version": "1.0", "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
    )


@cache
def read_ranks(path: Path) -> dict[bytes, int]:
    """Each token's bytes and rank, read from a vocabulary file whose digest is checked first."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != VOCABULARY_SHA256:
        raise InputError(
            f"{path} is damaged: its SHA-256 differs; restore it (git checkout {path.name})"
        )
    return {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in content.splitlines())
    }


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts whose merge makes `token`: byte-pair encoding, stopped one merge early."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, VOCABULARY_SIZE) for a, b in pairwise(parts)]
        first = pairs.index(min(pairs))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts[0], parts[1]


def _byte_level_name(token: bytes) -> str:
    return "".join(map(_byte_alphabet().__getitem__, token))


@cache
def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte: itself, or the next free character from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return [chr(b if b in printable else 256 + unprintable.index(b)) for b in range(256)]
