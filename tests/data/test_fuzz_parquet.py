"""Damaged shards, by the thousand: the texts that are in them, or one line that says why not."""

import io
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanofit.data.digests import sha256_of
from nanofit.data.documents import usable
from nanofit.data.parquet import mean_token_count
from nanofit.data.shards import open_shards, read_chunks
from nanofit.terminal import InputError
from tests.fuzz import fuzzed

ROOM_BYTES = 2 * 2**30  # more than this no damaged shard of some kilobytes may ask for
TEXTS = ["", None, "<|endoftext|>", *(f"document {n}, {'again ' * (n % 9)}" for n in range(57))]
KINDS = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}
COMPRESSIONS = ["none", "snappy", "gzip", "zstd", "lz4", "brotli"]


@cache
def shard_of(kind: str, compression: str, has_checksums: bool, encoding: str) -> bytes:
    texts = pa.array(TEXTS, pa.string()).cast(KINDS[kind])
    table = pa.table({"text": texts, "token_count": list(range(len(TEXTS)))})
    content = io.BytesIO()
    pq.write_table(
        table,
        content,
        row_group_size=20,
        compression=compression,
        write_page_checksum=has_checksums,
        use_dictionary=encoding == "DICTIONARY",
        column_encoding=None if encoding == "DICTIONARY" else {"text": encoding},
        data_page_version="2.0" if encoding.startswith("DELTA") else "1.0",
    )
    return content.getvalue()


@st.composite
def damaged_shards(draw) -> tuple[bytes, bytes]:
    """A whole shard, and the same with some bytes flipped, replaced, left out or put in."""
    kind = draw(st.sampled_from(sorted(KINDS)))
    encodings = ["DICTIONARY", "PLAIN", *(["DELTA_BYTE_ARRAY"] if kind != "dictionary" else [])]
    whole = shard_of(
        kind,
        draw(st.sampled_from(COMPRESSIONS)),
        draw(st.booleans()),
        draw(st.sampled_from(encodings)),
    )
    content = bytearray(whole)
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for _ in range(draw(st.integers(1, 4))):
        first = footer if draw(st.booleans()) else 0  # where the rest is told of
        at = draw(st.integers(min(first, len(content)), len(content)))
        change = draw(st.sampled_from(["flip", "number", "cut", "leave out", "put in"]))
        if change == "flip" and at < len(content):
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "number":  # the largest that thrift can write
            content[at : at + 5] = b"\xff\xff\xff\xff\x0f"
        elif change == "leave out":
            del content[at : at + draw(st.integers(1, 30))]
        elif change == "put in":
            content[at:at] = draw(st.binary(min_size=1, max_size=8))
        elif draw(st.integers(0, 9)) == 0:
            del content[at:]
    return whole, bytes(content)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "a.parquet"


@contextmanager
def little_memory() -> Iterator[None]:
    """What asks for more than there is gets none, as it would in the end on any machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read(path: Path) -> list[str] | None:
    """The documents of a shard; None where it is refused, in one line."""
    with little_memory():
        return _read(path)


def _read(path: Path) -> list[str] | None:
    try:
        [shard] = open_shards([str(path)], "text")
        mean_token_count(shard)
        chunks = [usable(chunk)[0].to_pylist() for chunk in read_chunks(shard)]
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return None
    return [text for chunk in chunks for text in chunk]


@fuzzed
@given(damaged_shards())
def test_a_damaged_shard_is_text_or_one_line(place, contents):
    whole, content = contents
    place.write_bytes(content)
    texts = read(place)
    if content == whole:
        assert texts == list(filter(None, TEXTS))
    if texts is not None:
        "".join(texts).encode()  # nothing but text


def test_what_pyarrow_cannot_read_is_not_called_damaged(place):
    place.write_bytes(shard_of("dictionary", "none", False, "DELTA_BYTE_ARRAY"))
    [shard] = open_shards([str(place)], "text")
    with pytest.raises(InputError, match=r"cannot be read in row group 0 \(Not yet implemented"):
        list(read_chunks(shard))


@fuzzed
@given(st.sampled_from(COMPRESSIONS), st.integers(0, 2**31), st.integers(0, 7))
def test_a_flipped_bit_never_gets_past_the_digest(place, compression, at, bit):
    content = bytearray(shard_of("string", compression, False, "PLAIN"))
    place.write_bytes(content)
    [whole] = open_shards([str(place)], "text")
    digest = sha256_of(whole)
    content[at % len(content)] ^= 1 << bit
    place.write_bytes(content)
    assert sha256_of(whole) != digest


@fuzzed
@given(st.binary(max_size=300), st.booleans())
def test_what_is_no_shard_is_one_line(place, content, is_framed):
    place.write_bytes(b"PAR1" + content + b"PAR1" if is_framed else content)
    assert read(place) is None


def test_no_bit_of_a_footer_ends_the_interpreter(place):
    """pyarrow aborts where it is asked about a column of which these are wrong."""
    content = io.BytesIO()
    pq.write_table(pa.table({"text": TEXTS}), content, store_schema=False)
    whole = content.getvalue()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for at in range(footer, len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            place.write_bytes(changed)
            read(place)
