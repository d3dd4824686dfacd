"""A sample shard, made offline: documents of grammar.py in a parquet of FineWeb's schema.

python data/sample/make_shard.py --size 6MB
"""

import argparse
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.sample import grammar
from nanofit.data.tokenizer import gpt2
from nanofit.files import atomic_write
from nanofit.terminal import InputError, Progress, compact, duration, parse_size, run_script

SCHEMA = pyarrow.schema(
    {
        "text": pyarrow.string(),
        "id": pyarrow.string(),
        "dump": pyarrow.string(),
        "url": pyarrow.string(),
        "date": pyarrow.string(),
        "file_path": pyarrow.string(),
        "language": pyarrow.string(),
        "language_score": pyarrow.float64(),
        "token_count": pyarrow.int64(),
    }
)
DEFAULT_OUT = Path(__file__).resolve().with_name("sample.parquet")


def main(arguments: Sequence[str]) -> None:
    """Write the shard the arguments ask for, and say what is in it."""
    options = read_options(arguments)
    size_bytes = read_size(options.size)
    started = time.monotonic()
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        documents, tokens, text_bytes = write_shard(
            options.out,
            size_bytes,
            seed=options.seed,
            compression=options.compression,
            row_group_size=options.row_group_size,
        )
    except OSError as error:
        raise InputError(f"cannot write {options.out}: {error.strerror or error}") from error
    elapsed_s = time.monotonic() - started
    print(
        f"{options.out}  documents {compact(documents)}  tokens {compact(tokens)}  "
        f"text {text_bytes / 1e6:.1f} MB  file {options.out.stat().st_size / 1e6:.1f} MB  "
        f"in {duration(elapsed_s)} ({text_bytes / 1e6 / elapsed_s:.0f} MB/s)"
    )


def write_shard(
    path: Path, size_bytes: int, *, seed: int, compression: str, row_group_size: int
) -> tuple[int, int, int]:
    """Write a parquet with about `size_bytes` of text; give its documents, tokens and bytes."""
    counts = TokenCounts()
    documents = tokens = text_bytes = 0
    with (
        Progress("writing", size_bytes) as progress,
        atomic_write(path) as temporary,
        pyarrow.parquet.ParquetWriter(temporary, SCHEMA, compression=compression) as writer,
    ):
        for texts in batches(seed, size_bytes, row_group_size):
            token_counts = counts.of(texts)
            group = row_group(texts, token_counts, first=documents, seed=seed)
            writer.write_table(group, row_group_size=row_group_size)
            documents += len(texts)
            tokens += sum(token_counts)
            text_bytes += sum(map(len, texts))
            progress.update(text_bytes, f"{compact(documents)} documents {compact(tokens)} tokens")
    return documents, tokens, text_bytes


def batches(seed: int, size_bytes: int, row_group_size: int) -> Iterator[list[str]]:
    """Documents 0, 1, 2, ... by row group, ending where the sum of bytes is nearest to the size."""
    texts, number, bytes_left = [], 0, size_bytes
    while True:
        text = grammar.write(seed, number)
        assert text.isascii(), "a character is a byte"
        if number and bytes_left < len(text) / 2:
            break
        texts.append(text)
        number += 1
        bytes_left -= len(text)
        if len(texts) == row_group_size:
            yield texts
            texts = []
    if texts:
        yield texts


def row_group(texts: list[str], token_counts: list[int], *, first: int, seed: int) -> pyarrow.Table:
    """The rows of documents `first`, `first + 1`, ..., with all of FineWeb's columns."""
    numbers = range(first, first + len(texts))
    columns = {
        "text": texts,
        "id": [f"<urn:uuid:{uuid.UUID(int=(seed % 2**64 << 64) + number)}>" for number in numbers],
        "dump": ["SAMPLE"] * len(texts),
        "url": [f"https://example.com/{seed}/{number}" for number in numbers],
        "date": [f"2013-05-{1 + number % 28:02d}T{number % 24:02d}:00:00Z" for number in numbers],
        "file_path": [f"sample/{seed}/{number // 10_000:06d}.txt" for number in numbers],
        "language": ["en"] * len(texts),
        "language_score": [0.9 + number % 100 / 1000 for number in numbers],
        "token_count": token_counts,
    }
    return pyarrow.table(columns, schema=SCHEMA)


class TokenCounts(dict):
    """GPT-2 tokens of each word met so far.

    GPT-2 splits a text before every single space and around every line break, whatever the words
    are, so a text has as many tokens as its words have: a lookup each, many times quicker than
    encoding, and as exact.
    """

    LARGEST = 500_000  # words; numbers could otherwise make it grow with the shard

    def of(self, texts: list[str]) -> list[int]:
        """Tokens of each text, which must have no double, leading or trailing spaces."""
        if len(self) > self.LARGEST:
            self.clear()
        lines = pyarrow.compute.replace_substring(["\n" + text for text in texts], "\n", " \n")
        words = pyarrow.compute.split_pattern(lines, " ")
        encoded = words.flatten().dictionary_encode()
        tokens_of_word = np.array([self[word] for word in encoded.dictionary.to_pylist()])
        tokens = np.add.reduceat(tokens_of_word[encoded.indices], words.offsets[:-1])
        return (tokens - 1).tolist()  # the line break put before each text

    def __missing__(self, word: str) -> int:
        before = "" if word.startswith("\n") or not word else " "
        self[word] = len(gpt2().encode_ordinary(before + word))
        return self[word]


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """The checked command line."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--size", default="6MB", help="bytes of text: 500kB, 6MB, 2.5GB")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--compression", choices=("zstd", "snappy"), default="zstd")
    parser.add_argument("--row_group_size", type=int, default=1000, help="documents")
    options = parser.parse_args(arguments)
    if options.row_group_size < 1:
        raise InputError(f"--row_group_size {options.row_group_size} must be at least 1")
    if options.out.is_dir():
        raise InputError(f"--out {options.out} is a folder; name a file in it")
    return options


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as any other bad input."""

    def error(self, message: str) -> None:
        raise InputError(message)


def read_size(text: str) -> int:
    """The bytes of text asked for: `6MB`, `500 kB`, `2.5GB` or plain digits."""
    try:
        size_bytes = parse_size(text)
    except ValueError:
        size_bytes = 0
    if size_bytes < 1:
        raise InputError(f"--size {text} is not a size; give bytes of text, for example 6MB")
    return size_bytes


if __name__ == "__main__":
    run_script(main)
