"""JSON Lines and text, compressed or not: read as whole documents, a bounded number at once."""

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import BinaryIO

import pyarrow as pa

from nanofit.data.source import (
    CHUNK_BYTES,
    Chunk,
    Position,
    Shard,
    binary_file,
    damage_told,
    is_utf8,
)
from nanofit.terminal import InputError

LONGEST_BYTES = 64 * 2**20  # of a document with what is around it: it is held some times over
GROUP_ROWS = 1024  # of these one document is encoded twice, as of a parquet file's row groups
PEEK_BYTES = 2**16
_LONGEST = f"{LONGEST_BYTES // 2**20} MiB"
BOM = b"\xef\xbb\xbf"
# Numbers are of no use here, and to turn the digits of a long one into one takes for ever.
_decode_json = json.JSONDecoder(parse_int=len).decode


@dataclass(frozen=True)
class Block:
    """Consecutive documents as they stand in a file; a worker makes a chunk of them."""

    documents: list[bytes | None]  # None for one that was too long
    shard: Shard
    is_first_of_group: bool
    is_unsplit: bool  # all of a file, in which the separator was looked for in vain
    end: Position

    @property
    def bytes(self) -> int:
        return sum(map(len, filter(None, self.documents)))

    def parsed(self) -> Chunk:
        documents = [document for document in self.documents if document is not None]
        tally = Counter(too_long=len(self.documents) - len(documents))
        if self.shard.layout.is_json:
            documents = list(_texts_of(documents, self.shard.text_column, tally))
        elif self.shard.layout.separator:
            tally["unsplit"] += self.is_unsplit
            documents = [document.strip(b"\r\n") for document in documents]
        texts = pa.array(documents, pa.binary())
        return Chunk(texts, None, self.is_first_of_group, self.end, tally)


def check_lines(shard: Shard) -> None:
    """Refuse a file that is no JSON Lines, whose objects lack the text, or that is too long."""
    if not shard.layout.is_json:
        if not (shard.layout.separator or shard.layout.codec):
            _check_length(shard, shard.bytes)
        return
    lines, too_long = _first_lines(shard)
    objects = [value for value in map(_object_in, lines) if value is not None]
    if too_long and not lines:
        raise InputError(f"{shard.location} is not JSON Lines: a line is longer than {_LONGEST}")
    if lines and not objects:
        raise InputError(
            f"{shard.location} is not JSON Lines, an object a line: "
            f"it begins with {lines[0][:40]!r}"
        )
    values = [value[shard.text_column] for value in objects if shard.text_column in value]
    if objects and not any(value is None or isinstance(value, str) for value in values):
        found = ", ".join(f"{name} ({type(value).__name__})" for name, value in objects[0].items())
        raise InputError(
            f"{shard.location} has no text in a field {shard.text_column!r}; "
            f"it has {found}: choose with --text_column"
        )


def read_lines(
    shard: Shard, index: int, start: Position, read_bytes: int | None = None
) -> Iterator[Block]:
    """The shard's documents from `start` on; what a block ends with does not depend on the rest."""
    row, most_rows = start.row, shard.rows
    with _content(shard, start.byte) as (stream, file):
        pieces = _documents(stream, shard, start.byte, read_bytes or CHUNK_BYTES)
        for documents, ends, is_unsplit in pieces:
            while documents and row != most_rows:
                count = min(GROUP_ROWS - row % GROUP_ROWS, len(documents))
                count = count if most_rows is None else min(count, most_rows - row)
                row += count
                yield Block(
                    documents[:count],
                    shard,
                    is_first_of_group=_is_first_of_group(shard, row - count, documents[0]),
                    is_unsplit=is_unsplit,
                    end=Position(index, row, ends[count - 1], file.tell()),
                )
                documents, ends = documents[count:], ends[count:]
            if row == most_rows:
                return


def words_on_unsplit(count: int, separator: str) -> str:
    """What to tell of text files that are one document each for want of a separator."""
    windows = separator.replace("\r\n", "\n").replace("\n", "\r\n")
    is_other = separator not in (windows, "\n")  # which Windows has in its line breaks, too
    hint = f"; with Windows line breaks it is --separator {windows!r}" if is_other else ""
    return f"{count:,} text files without {separator!r} are one document each{hint}"


def _first_lines(shard: Shard) -> tuple[list[bytes], int]:
    """Some lines that are not blank, and how many too long ones there were before."""
    too_long = 0
    for block in read_lines(shard, 0, Position(), PEEK_BYTES):
        too_long += block.documents.count(None)
        lines = [line for line in block.documents if line and line.strip()]
        if lines:
            return lines, too_long
    return [], too_long


def _is_first_of_group(shard: Shard, row: int, document: bytes | None) -> bool:
    """Of files that are one document each, about one in GROUP_ROWS begins a group."""
    if shard.layout.separator:
        return row % GROUP_ROWS == 0
    return zlib.crc32(document) % GROUP_ROWS == 0


@contextmanager
def _content(shard: Shard, byte: int) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The text from a byte on, and the file it is read from."""
    with binary_file(shard.location, shard.bytes) as file, damage_told(shard.location):
        if shard.layout.codec is None:
            file.seek(byte)
            yield file, file
            return
        with pa.CompressedInputStream(file, shard.layout.codec) as stream:
            while byte and (block := stream.read(min(byte, CHUNK_BYTES))):
                byte -= len(block)
            yield stream, file


def _documents(
    stream: BinaryIO, shard: Shard, start: int, read_bytes: int
) -> Iterator[tuple[list[bytes | None], list[int], bool]]:
    """Documents as they are completed, None for too long ones, and the bytes at which they end.

    With them stands whether they are all of a file, which has no separator.
    """
    is_unsplit = start == 0
    separator, at = shard.layout.separator, start
    parts, held, lost, tail = [], 0, 0, b""  # of a document that has not ended
    while block := stream.read(read_bytes):
        if at == 0 and block.startswith(BOM):
            at, block = len(BOM), block[len(BOM) :]
        tail, window = _end_of(tail + block, separator), tail + block
        parts.append(block)
        if separator and separator in window:
            *documents, rest = b"".join(parts).split(separator)
            ends = list(_ends(documents, at + lost, len(separator)))
            is_unsplit = False
            yield _without_too_long(documents, lost), ends, is_unsplit
            parts, held, lost, at = [rest], len(rest), 0, ends[-1]
            tail = _end_of(rest, separator)
        elif (held := held + len(block)) > LONGEST_BYTES:
            _check_length(shard, held)
            parts, held, lost = [tail], len(tail), lost + held - len(tail)
    rest = b"".join(parts)
    if rest.strip() or lost or (rest and not separator):
        yield _without_too_long([rest], lost), [at + lost + len(rest)], is_unsplit


def _end_of(content: bytes, separator: bytes | None) -> bytes:
    """What may be the beginning of a separator."""
    return content[len(content) - min(len(separator or b".") - 1, len(content)) :]


def _ends(documents: list[bytes], at: int, separator_bytes: int) -> Iterator[int]:
    ends = accumulate((len(document) + separator_bytes for document in documents), initial=at)
    return islice(ends, 1, None)


def _without_too_long(documents: list[bytes], lost: int) -> list[bytes | None]:
    """The first has lost so many bytes already."""
    first = [None] if lost else []
    others = documents[len(first) :]
    return first + [doc if len(doc) <= LONGEST_BYTES else None for doc in others]


def _check_length(shard: Shard, bytes: int) -> None:
    """A whole file cannot be left out and counted: nothing would be left."""
    if shard.layout.separator is None and bytes > LONGEST_BYTES:
        raise InputError(
            f"{shard.location} is longer than {_LONGEST}, too long for one document; "
            "tell by --separator what stands between those in it"
        )


def _texts_of(lines: list[bytes], field: str, tally: Counter) -> Iterator[bytes | None]:
    """The texts in a field of JSON objects, None where there is none, and a tally of the rest."""
    for line in lines:
        if not line.strip():
            yield None
        elif (value := _object_in(line)) is None:
            tally["not_json" if is_utf8(line) else "not_utf8"] += 1
        elif isinstance(text := value.get(field), str):
            yield text.encode("utf-8", "surrogatepass")  # half a pair is told of later
        elif text is None:
            yield None
        else:
            tally["not_text"] += 1


def _object_in(line: bytes) -> dict | None:
    try:
        value = _decode_json(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
