"""GPT-2's encoding as the files that Hugging Face's tools and llama.cpp's converter read."""

import json
from typing import Any

from nanofit.data.tokenizer import END_OF_TEXT, tokenizer_json

END = "<|endoftext|>"


def tokenizer_files(longest: int) -> dict[str, str]:
    """The content of each file by its name, for a model that sees `longest` tokens at once."""
    whole = json.loads(tokenizer_json())
    vocabulary, merges = whole["model"]["vocab"], whole["model"]["merges"]
    vocabulary[END] = END_OF_TEXT
    whole["added_tokens"] = [{"id": END_OF_TEXT, "content": END, **_special()}]
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": longest,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), END),
        "padding_side": "left",  # what is generated follows the prompt, not the padding
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,  # which would change the text
    }
    return {
        "tokenizer.json": as_json(whole),
        "vocab.json": as_json(vocabulary),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]),
        "tokenizer_config.json": as_json(config, indent=2),
    }


def as_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent) + "\n"


def _special() -> dict[str, bool]:
    """A token of its own wherever its text stands, never a part of another."""
    alike = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {**alike, "special": True}
