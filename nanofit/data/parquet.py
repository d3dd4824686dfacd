"""Parquet files: their footers checked, and read as documents, a bounded number at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanofit.data.remote import is_remote
from nanofit.data.source import (
    CHUNK_BYTES,
    Chunk,
    Footer,
    Position,
    Shard,
    binary_file,
    damage_told,
    text_offsets,
)
from nanofit.terminal import InputError, first_line

CHUNK_ROWS = 1024
READ_BUFFER_BYTES = 2**20  # pages stream through this, so a giant row group is never held whole
COUNT_COLUMN = "token_count"  # FineWeb's own count of GPT-2 tokens, without end-of-text


def read_footer(location: str, bytes: int, text_column: str) -> tuple[Footer, int]:
    """What the footer tells, and the rows in all; without a usable text column it is refused."""
    with _parquet_file(location, bytes) as file:
        metadata, schema = file.metadata, file.schema_arrow
        _check_text_column(location, schema, text_column)
        # No more than this of a group: pyarrow ends the process where a column of it is damaged.
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        _check_rows(location, metadata.num_rows, [group.num_rows for group in groups])
        has_counts = schema.names.count(COUNT_COLUMN) == 1 and pa.types.is_integer(
            schema.field(COUNT_COLUMN).type
        )
        footer = Footer(
            group_rows=tuple(group.num_rows for group in groups),
            group_bytes=tuple(group.total_byte_size for group in groups),
            has_counts=has_counts,
        )
        return footer, metadata.num_rows


def read_parquet(shard: Shard, index: int, start_row: int) -> Iterator[Chunk]:
    """The shard's documents from a row on, in order, a bounded number of bytes at once."""
    with _parquet_file(shard.location, shard.bytes) as file:
        for row, is_first_of_group, batch in _batches(file, shard, start_row):
            end_row = min(row + batch.num_rows, shard.rows)
            for start, end in _cut(batch.column(0), max(start_row - row, 0), end_row - row):
                wanted = batch.slice(start, end - start)
                yield Chunk(
                    texts=wanted.column(0),
                    counts=wanted.column(1) if shard.layout.has_counts else None,
                    is_first_of_group=is_first_of_group and start == 0,
                    end=_position(shard, index, row + end),
                )


def mean_token_count(shard: Shard) -> float | None:
    """The shard's own mean number of tokens per row, from one column; None if that is not cheap."""
    if (
        not isinstance(shard.layout, Footer)
        or not shard.layout.has_counts
        or is_remote(shard.location)
    ):
        return None
    with _parquet_file(shard.location, shard.bytes) as file:
        counts = file.read(columns=[COUNT_COLUMN])[COUNT_COLUMN]
    return float(np.nan_to_num(counts.to_numpy()).mean()) if len(counts) else None


def _position(shard: Shard, index: int, row: int) -> Position:
    share = row / max(sum(shard.layout.group_rows), 1)
    return Position(index, row, file_bytes=round(share * shard.bytes))


def _check_rows(location: str, rows: int, group_rows: list[int]) -> None:
    if min(group_rows, default=0) < 0 or sum(group_rows) != rows:
        raise InputError(
            f"{location} is damaged: its footer tells of {rows} rows in all, "
            f"but of {sum(group_rows)} in the row groups; fetch it again"
        )


def _check_text_column(location: str, schema: pa.Schema, text_column: str) -> None:
    found = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if text_column not in schema.names:
        raise InputError(
            f"{location} has no column {text_column!r}; it has {found}: choose with --text_column"
        )
    if schema.names.count(text_column) > 1:
        raise InputError(f"{location} has more than one column {text_column!r}; it has {found}")
    kind = schema.field(text_column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind not in (pa.string(), pa.large_string(), pa.string_view()):
        raise InputError(
            f"{location}: column {text_column!r} holds {kind}, not text; the columns are {found}"
        )


def _batches(
    file: pq.ParquetFile, shard: Shard, start_row: int
) -> Iterator[tuple[int, bool, pa.RecordBatch]]:
    """(first row, whether it begins a row group, rows) of each batch that may hold wanted rows."""
    row = 0
    for group, group_rows in enumerate(shard.layout.group_rows):
        group_end = row + group_rows
        if start_row < group_end and row < shard.rows:
            for number, batch in enumerate(_group_batches(file, shard, group)):
                yield row, number == 0, batch
                row += batch.num_rows
        row = group_end


def _group_batches(file: pq.ParquetFile, shard: Shard, group: int) -> Iterator[pa.RecordBatch]:
    """A row group in batches of about CHUNK_BYTES; what is damaged is told as such."""
    columns = [shard.text_column, *([COUNT_COLUMN] if shard.layout.has_counts else [])]
    bytes_per_row = max(shard.layout.group_bytes[group] / max(shard.layout.group_rows[group], 1), 1)
    batch_rows = min(max(round(CHUNK_BYTES / bytes_per_row), 1), CHUNK_ROWS)
    rows = 0
    with damage_told(shard.location, f" in row group {group}"):
        for batch in file.iter_batches(batch_rows, [group], columns, use_threads=False):
            rows += batch.num_rows
            yield _with_plain_texts(batch.select(columns))
    if rows != shard.layout.group_rows[group]:
        raise InputError(
            f"{shard.location} is damaged: row group {group} holds {rows} rows, "
            f"its footer says {shard.layout.group_rows[group]}; fetch it again"
        )


def _with_plain_texts(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with its texts as bytes and sound offsets, whatever type the file gives them."""
    texts = batch.column(0)
    if pa.types.is_dictionary(texts.type):
        values = texts.dictionary.cast(pa.large_binary())
        texts = pa.DictionaryArray.from_arrays(texts.indices, values)  # checks the indices
    if not pa.types.is_string(texts.type):
        texts = texts.cast(pa.large_binary())
    texts = texts.view(pa.binary() if pa.types.is_string(texts.type) else pa.large_binary())
    batch = batch.set_column(0, batch.schema.names[0], texts)
    batch.validate(full=True)
    return batch


def _cut(texts: pa.Array, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows with about CHUNK_BYTES each, so that long documents come one at a time."""
    offsets = text_offsets(texts)
    while start < end:
        fitting = np.searchsorted(offsets, offsets[start] + CHUNK_BYTES, side="right") - 1
        cut = min(max(int(fitting), start + 1), end)
        yield start, cut
        start = cut


@contextmanager
def _parquet_file(location: str, bytes: int) -> Iterator[pq.ParquetFile]:
    with binary_file(location, bytes) as file:
        try:
            parquet = pq.ParquetFile(
                file, buffer_size=READ_BUFFER_BYTES, page_checksum_verification=True
            )
        except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
            raise InputError(_why_no_footer(location, file, error)) from error
        with damage_told(location):
            yield parquet


def _why_no_footer(location: str, file: BinaryIO, error: Exception) -> str:
    file.seek(0)
    head = file.read(16)
    if not head:
        return f"{location} is empty"
    if head.startswith(b"PAR1"):
        return f"{location} is truncated or damaged ({first_line(error)}); fetch it again"
    return f"{location} is not a parquet file: it begins with {head!r}"
