"""Damaged JSON Lines and text, by the thousand: what a plain reading gives, or one line."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanofit.data import lines
from nanofit.data.documents import SKIPPED, usable
from nanofit.data.shards import open_shard, read_chunks
from nanofit.data.source import Position
from nanofit.terminal import InputError
from tests.fuzz import fuzzed

CODECS = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}
TEXTS = ["", None, 5, "<|endoftext|>", "ü\U0001f600\n", *(f"document {n} " * n for n in range(9))]
WHOLE = b"".join(
    json.dumps({"id": n, "text": text}, ensure_ascii=bool(n % 2)).encode() + b"\r\n"[n % 2 :]
    for n, text in enumerate(TEXTS)
)
BOM = b"\xef\xbb\xbf"
PIECES = [b"\xff", b"\0", b"\n", b'"', b"{", b"}", b"\\ud800", b"[" * 3000, BOM]
PIECES += [b"NaN", b"1" * 5000, b'{"text": "new"}\n', b"==", b"=", WHOLE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lines")


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """The same with some bytes flipped, left out or put in."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(content)))
        change = draw(st.sampled_from(["flip", "leave out", "put in", "cut"]))
        if change == "flip" and at < len(content):
            content[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "leave out":
            del content[at : at + draw(st.integers(1, 30))]
        elif change == "put in":
            content[at:at] = draw(st.sampled_from(PIECES) | st.binary(max_size=8))
        elif draw(st.integers(0, 9)) == 0:
            del content[at:]
    return bytes(content)


def read(path: Path, separator: str | None = None) -> tuple[list[str], Counter] | None:
    """The documents of a file and what was left out; None where it is refused, in one line."""
    try:
        shard = open_shard(str(path), "text", None, separator)
        tally, texts, place = Counter(), [], Position()
        for chunk in read_chunks(shard):
            strings, _, chunk_tally = usable(chunk)
            texts += strings.to_pylist()
            tally.update({name: chunk_tally[name] for name in SKIPPED if chunk_tally[name]})
            assert chunk.end > place
            place = chunk.end
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return None
    assert len(texts) + sum(tally.values()) == place.row
    return texts, tally


def plainly(content: bytes) -> tuple[list[str], Counter]:
    """By Python's own means, all at once."""
    texts, tally = [], Counter()
    rows = content.removeprefix(BOM).split(b"\n")
    for row in rows[: None if rows[-1].strip() else -1]:
        try:
            value = json.loads(row.decode()) if row.strip() else {}
            text = value.get("text")
            text and text.encode()
        except UnicodeError:
            tally["not_utf8"] += 1
        except (ValueError, RecursionError, AttributeError) as error:
            is_number = "digits" in str(error) or "encode" in str(error)
            tally["not_text" if is_number else "not_json"] += 1
        else:
            if isinstance(text, str) and text:
                texts.append(text)
            else:
                tally["skipped" if text in (None, "") else "not_text"] += 1
    return texts, tally


@fuzzed
@given(damaged(WHOLE), st.sampled_from(sorted(CODECS)), st.sampled_from([3, 7, 100, 2**20]))
def test_damaged_json_lines_are_what_a_plain_reading_gives(folder, content, codec, size):
    path = folder / f"a.jsonl{codec}"
    path.write_bytes(CODECS[codec](content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK_BYTES", size)
        found = read(path)
    expected = plainly(content)
    assert found == expected if found else not expected[0]


@fuzzed
@given(damaged(b"one==two\n==\nthree\xc3\xbc====" * 3), st.sampled_from([3, 4, 5, 2**20]))
def test_damaged_text_is_what_a_plain_reading_gives(folder, content, size):
    path = folder / "a.txt"
    path.write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK_BYTES", size)
        patch.setattr(lines, "GROUP_ROWS", 3)
        texts, tally = read(path, "==")
    pieces = [piece.strip(b"\r\n") for piece in content.removeprefix(BOM).split(b"==")]
    assert texts == [piece.decode() for piece in pieces if is_text(piece)]
    is_blank_at_the_end = not pieces[-1].strip()
    assert sum(tally.values()) == len(pieces) - len(texts) - is_blank_at_the_end


def is_text(content: bytes) -> bool:
    try:
        return bool(content.decode())
    except UnicodeDecodeError:
        return False


@fuzzed
@given(st.sampled_from([".gz", ".zst"]), st.data())
def test_a_damaged_archive_is_its_documents_or_one_line(folder, codec, data):
    whole = CODECS[codec](WHOLE)
    content = data.draw(damaged(whole))
    path = folder / f"a.jsonl{codec}"
    path.write_bytes(content)
    found = read(path)
    if content == whole:
        assert found == plainly(WHOLE)
    if found:
        "".join(found[0]).encode()  # nothing but text


@fuzzed
@given(
    st.integers(0, 2**20),
    st.sampled_from(sorted(CODECS)),
    st.integers(3, 200),
    st.sampled_from([30, 2**26]),
)
def test_from_any_place_the_rest_is_read_that_was_left(folder, seed, codec, size, longest):
    path = folder / f"b.jsonl{codec}"
    path.write_bytes(CODECS[codec](WHOLE))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK_BYTES", size)
        patch.setattr(lines, "LONGEST_BYTES", longest)
        shard = open_shard(str(path), "text", None, None)
        chunks = list(read_chunks(shard))
        place = seed % len(chunks)
        rest = list(read_chunks(shard, 0, chunks[place].end))
    left = [row for chunk in chunks[place + 1 :] for row in chunk.documents]
    assert [row for chunk in rest for row in chunk.documents] == left
    assert not rest or rest[-1].end == chunks[-1].end
