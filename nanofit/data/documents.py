"""Chunks of documents to tokens: split by a hash of the text, encoded by threads, in order."""

import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nanofit.data.lines import Block, words_on_unsplit
from nanofit.data.shards import count_rows, read_chunks
from nanofit.data.source import CHUNK_BYTES, Chunk, Lines, Shard, is_utf8, text_offsets
from nanofit.data.tokenizer import END_OF_TEXT, Encoder
from nanofit.terminal import InputError

HASH_RANGE = 2**32
MOST_TOKENS = 2**32  # of a document
FEW_ROWS, FEW_VAL_DOCUMENTS = 8192, 16
SKIPPED = {  # as it is counted and told
    "skipped": "null or empty",
    "not_utf8": "not UTF-8",
    "not_json": "no JSON object",
    "not_text": "no text in the field",
    "too_long": "too long",
}
SEPARATOR = np.array([END_OF_TEXT], np.uint32)


@dataclass(frozen=True)
class ChunkEncoder:
    """From a chunk to the tokens of each split, and the tally of what was seen."""

    encode: Encoder
    reference: Encoder | None  # encodes a document of every row group again, as a check
    val_hash_below: int  # which makes a document validation

    def __call__(self, chunk: Chunk | Block) -> tuple[dict[str, np.ndarray], Counter]:
        texts, counts, tally = usable(chunk)
        strings = texts.to_pylist()
        documents = self.encode(strings)
        if chunk.is_first_of_group and documents and self.reference:
            tally.update(self._check(strings, documents))
        del strings  # a long text need not stay beside its tokens
        if counts is not None:
            tally.update(_compare_counts(documents, counts))
        is_val = np.array(hashes_of(texts), np.int64) < self.val_hash_below
        sizes = np.diff(text_offsets(texts))
        tokens = {}
        for split, chosen in (("train", np.flatnonzero(~is_val)), ("val", np.flatnonzero(is_val))):
            tokens[split] = _join(documents[index] for index in chosen)
            tally[f"{split}_documents"] = len(chosen)
            tally[f"{split}_tokens"] = len(tokens[split])
            tally[f"{split}_text_bytes"] = int(sizes[chosen].sum())
        return tokens, tally

    def _check(self, strings: list[str], documents: list[np.ndarray]) -> Counter:
        """Hold one document to the reference, which also replaces it if they differ."""
        index = len(strings) // 2
        (expected,) = self.reference([strings[index]])
        is_equal = np.array_equal(documents[index], expected)
        documents[index] = expected
        return Counter(checked=1, mismatched=int(not is_equal))


def encode_in_order(
    chunks: Iterator[Chunk | Block], encode: ChunkEncoder, workers: int
) -> Iterator:
    """The end of each chunk and what `encode` makes of it, in order; bounded work is under way."""
    pool, pending, pending_bytes = ThreadPoolExecutor(workers), deque(), deque()
    try:
        for chunk in _read_ahead(chunks):
            pending.append((chunk.end, pool.submit(encode, chunk)))
            pending_bytes.append(chunk.bytes)
            del chunk  # here and below: nothing is held on to while the next one is waited for
            while sum(pending_bytes) > (workers + 2) * CHUNK_BYTES:
                pending_bytes.popleft()
                yield _first_result(pending)
        while pending:
            yield _first_result(pending)
    finally:
        pool.shutdown(cancel_futures=True)


def _read_ahead(chunks: Iterator[Chunk | Block]) -> Iterator[Chunk | Block]:
    """The same chunks, each read while the one before is handed on."""
    with ThreadPoolExecutor(1) as reader:
        following = reader.submit(next, chunks, None)
        while (chunk := following.result()) is not None:
            following = reader.submit(next, chunks, None)
            yield chunk
            del chunk


def _first_result(pending: deque) -> tuple:
    end, encoded = pending.popleft()
    return end, *encoded.result()


def choose_val_hash_below(shards: list[Shard], val_fraction: float) -> int:
    """The hash below which a document is validation.

    With so few documents that the fraction may by chance be next to none, the limit rises to take
    in a tenth of them, up to FEW_VAL_DOCUMENTS: still a rule about the text alone.
    """
    limit = round(val_fraction * HASH_RANGE)
    if not _are_few(shards):
        return limit
    hashes, tally = set(), Counter()
    for shard in shards:
        for chunk in read_chunks(shard):
            texts, _, chunk_tally = usable(chunk)
            hashes.update(hashes_of(texts))
            tally.update(chunk_tally)
    hashes = sorted(hashes)
    if len(hashes) < 2:
        hint = _hint_on_separator(shards, tally["unsplit"])
        raise InputError(
            f"{len(hashes)} different documents cannot be split into train and val; "
            f"give at least 2{hint}{words_on_skipped(tally)}"
        )
    enough = min(-(-len(hashes) // 10), FEW_VAL_DOCUMENTS)
    return max(limit, hashes[enough - 1] + 1)


def words_on_skipped(tally: Mapping[str, int]) -> str:
    """What was left out, for the end of a line that tells what is missing."""
    told = [f"{tally[name]:,} {words}" for name, words in SKIPPED.items() if tally.get(name)]
    return f" (left out: {', '.join(told)})" if told else ""


def _hint_on_separator(shards: list[Shard], unsplit: int) -> str:
    """Why there may be more documents in text files than were found."""
    layouts = [shard.layout for shard in shards if isinstance(shard.layout, Lines)]
    separators = [layout.separator for layout in layouts if not layout.is_json]
    if unsplit:
        return f"; {words_on_unsplit(unsplit, separators[0].decode())}"
    return "; --separator splits text files" if None in separators else ""


def _are_few(shards: list[Shard]) -> bool:
    left = FEW_ROWS
    for shard in shards:
        left -= count_rows(shard, left + 1)
        if left < 0:
            return False
    return True


def usable(chunk: Chunk | Block) -> tuple[pa.Array, pa.Array | None, Counter]:
    """The texts to learn from, their counts if any, and a tally of what is special about all."""
    chunk = chunk.parsed()
    has_text = np.diff(text_offsets(chunk.texts)) > 0
    if chunk.texts.null_count:
        has_text &= chunk.texts.is_valid().to_numpy(zero_copy_only=False)
    texts, counts = _only(has_text, chunk.texts, chunk.counts)
    tally = chunk.tally + Counter(skipped=len(chunk.texts) - len(texts))
    is_wide = pa.types.is_large_binary(texts.type)
    strings = texts.view(pa.large_string() if is_wide else pa.string())
    try:
        strings.validate(full=True)
    except pa.ArrowInvalid:
        is_text = np.array([is_utf8(text) for text in texts.to_pylist()])
        strings, counts = _only(is_text, strings, counts)
        tally["not_utf8"] += len(texts) - len(strings)
    tally["spelling_end_of_text"] = pc.match_substring(strings, "<|endoftext|>").true_count
    return strings, counts, tally


def _only(
    wanted: np.ndarray, texts: pa.Array, counts: pa.Array | None
) -> tuple[pa.Array, pa.Array | None]:
    if wanted.all():
        return texts, counts
    wanted = pa.array(wanted)
    return texts.filter(wanted), counts and counts.filter(wanted)


def hashes_of(texts: pa.Array) -> list[int]:
    """A number below HASH_RANGE for each text: the same everywhere, and for every duplicate."""
    content, offsets = texts.buffers()[2], text_offsets(texts).tolist()
    view = memoryview(content or b"")
    return [zlib.crc32(view[a:b]) for a, b in pairwise(offsets)]


def _join(documents: Iterable[np.ndarray]) -> np.ndarray:
    parts = [part for document in documents for part in (document, SEPARATOR)]
    return np.concatenate([SEPARATOR[:0], *parts], dtype="<u2", casting="unsafe")


def _compare_counts(documents: list[np.ndarray], counts: pa.Array) -> Counter:
    """How the file's own counts agree with ours; null, or what no document has, is no claim."""
    ours = np.array([len(document) for document in documents], np.int64)
    theirs = counts.cast(pa.int64(), safe=False).fill_null(-1).to_numpy()
    is_claim = (theirs >= 0) & (theirs < MOST_TOKENS)
    ours, theirs = ours[is_claim], theirs[is_claim]
    return Counter(
        token_count_rows=len(ours),
        token_count_rows_differing=int((ours != theirs).sum()),
        token_count_tokens=int(theirs.sum()),
        token_count_tokens_here=int(ours.sum()),
    )
