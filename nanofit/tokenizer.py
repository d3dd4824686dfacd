"""GPT-2's encoding, offline: tiktoken's encoder, built from the vocabulary beside this file."""

import base64
import hashlib
from functools import cache
from pathlib import Path

import tiktoken
from tiktoken_ext.openai_public import r50k_pat_str

from nanofit.terminal import InputError

VOCABULARY = Path(__file__).with_name("gpt2.tiktoken")
VOCABULARY_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
END_OF_TEXT = 50256
VOCABULARY_SIZE = 50257


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
