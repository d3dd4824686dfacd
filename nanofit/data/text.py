"""Any text as GPT-2's tokens: a UTF-8 file, or the documents of a parquet file."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanofit.data.documents import HASH_RANGE, ChunkEncoder
from nanofit.data.shards import open_shards, read_chunks
from nanofit.data.tokenizer import fast_encoder, reference_encoder
from nanofit.terminal import InputError

_PARQUET = b"PAR1"  # begins every such file


class Text(NamedTuple):
    """A text's tokens, and how many bytes they stand for."""

    tokens: np.ndarray
    bytes: int


def read_text(path: Path, text_column: str = "text") -> Text:
    """A file as it is, as one document; those of a parquet file as prepare_fineweb.py joins them.

    So each of these is followed by an end-of-text token, and the file as it is by none.
    """
    try:
        with path.open("rb") as file:
            is_parquet = file.read(len(_PARQUET)) == _PARQUET
        if is_parquet:
            text = _read_parquet(path, text_column)
        else:
            content = path.read_bytes()
            (tokens,) = _encoder()([content.decode()])
            text = Text(tokens.astype(np.uint16), len(content))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the text of {path} ({error})") from None
    if not text.bytes:
        raise InputError(f"{path} holds no text")
    return text


def _read_parquet(path: Path, text_column: str) -> Text:
    (shard,) = open_shards([str(path)], text_column)
    # A rule by which every document is validation.
    encode = ChunkEncoder(_encoder(), reference=None, val_hash_below=HASH_RANGE)
    chunks = [encode(chunk) for chunk in read_chunks(shard)]
    broken = sum(tally["not_utf8"] for _, tally in chunks)
    if broken:
        raise InputError(f"{path} holds {broken:,} documents that are not UTF-8")
    parts = [tokens["val"] for tokens, _ in chunks]
    text_bytes = sum(tally["val_text_bytes"] for _, tally in chunks)
    return Text(np.concatenate([np.empty(0, np.uint16), *parts]), text_bytes)


def _encoder():
    return fast_encoder() or reference_encoder()
