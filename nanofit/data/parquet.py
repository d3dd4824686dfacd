"""Parquet shards, local or remote: found, checked, and read as bounded chunks of documents."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanofit.data.remote import RemoteFile, find_remote, is_remote, stop_waiting, version_of
from nanofit.terminal import InputError, first_line

CHUNK_BYTES = 4 * 2**20  # of text at once: enough to be quick, little to hold
CHUNK_ROWS = 1024
READ_BUFFER_BYTES = 2**20  # pages stream through this, so a giant row group is never held whole
COUNT_COLUMN = "token_count"  # FineWeb's own count of GPT-2 tokens, without end-of-text

# A flipped bit rarely breaks a page without checksums, so shards we know are held to their digest.
KNOWN_SHA256 = {  # by (name, bytes)
    ("000_00000.parquet", 2_147_531_358): (
        "c84e6941d787b50959521df6d6894a91397c8b2db13f8a9c8fe0f8782872e930"  # CC-MAIN-2013-20
    ),
}


@dataclass(frozen=True)
class Shard:
    """One parquet file with a readable footer and a usable text column."""

    location: str  # as given: a path or an address
    bytes: int
    version: int | str | None  # other for other content: a time in ns, or what an address tells
    touched_ns: int | None  # a time of change that counts a move to this name; None if remote
    rows: int  # to use, from the first on
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]  # of text before compression, as far as the footer knows
    text_column: str
    has_counts: bool
    expected_sha256: str | None

    @property
    def name(self) -> str:
        return _name_of(self.location)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one row group."""

    texts: pa.Array  # as bytes that nobody has looked at
    counts: pa.Array | None  # the file's own token counts
    is_first_of_group: bool
    end: tuple[int, int]  # the shard's index, and its first row after this chunk

    @property
    def bytes(self) -> int:
        return self.texts.nbytes


def find_shards(inputs: Iterable[str]) -> list[str]:
    """The parquet files meant by paths, folders and addresses."""
    locations = [location for given in inputs for location in _expand(given)]
    places = Counter(place if is_remote(place) else os.path.realpath(place) for place in locations)
    repeated = [place for place, count in places.items() if count > 1]
    if repeated:
        raise InputError(f"given more than once: {', '.join(repeated[:3])}")
    return locations


def open_shards(locations: list[str], text_column: str, sha256: Sequence[str] = ()) -> list[Shard]:
    """Read and check every footer; the shards in the order of their paths, however they are given.

    Several at a time, since a remote one is mostly waiting. Digests are given for all or none.
    """
    if sha256 and len(sha256) != len(locations):
        raise InputError(
            f"--sha256 got {len(sha256)} digests for {len(locations)} files; give one each"
        )
    expected = [digest.lower() for digest in sha256] or [None] * len(locations)
    order = sorted(range(len(locations)), key=lambda number: _path_of(locations[number]))
    with ThreadPoolExecutor(8) as pool:
        opened = [
            pool.submit(_open_shard, locations[number], text_column, expected[number])
            for number in order
        ]
        try:
            return [shard.result() for shard in opened]
        except KeyboardInterrupt:
            stop_waiting()
            raise


def read_chunks(shard: Shard, index: int = 0, start_row: int = 0) -> Iterator[Chunk]:
    """The shard's documents from a row on, in order, a bounded number of bytes at once."""
    with _parquet_file(shard.location, shard.bytes) as file:
        for row, is_first_of_group, batch in _batches(file, shard, start_row):
            end_row = min(row + batch.num_rows, shard.rows)
            for start, end in _cut(batch.column(0), max(start_row - row, 0), end_row - row):
                wanted = batch.slice(start, end - start)
                yield Chunk(
                    texts=wanted.column(0),
                    counts=wanted.column(1) if shard.has_counts else None,
                    is_first_of_group=is_first_of_group and start == 0,
                    end=(index, row + end),
                )


def text_offsets(texts: pa.Array) -> np.ndarray:
    """Where each text begins and ends in the array's buffer of bytes."""
    width = np.int64 if texts.type in (pa.large_string(), pa.large_binary()) else np.int32
    return np.frombuffer(texts.buffers()[1], width)[texts.offset : texts.offset + len(texts) + 1]


def mean_token_count(shard: Shard) -> float | None:
    """The shard's own mean number of tokens per row, from one column; None if that is not cheap."""
    if not shard.has_counts or not shard.rows or is_remote(shard.location):
        return None
    with _parquet_file(shard.location, shard.bytes) as file:
        counts = file.read(columns=[COUNT_COLUMN])[COUNT_COLUMN]
    return float(np.nan_to_num(counts.to_numpy()).mean()) if len(counts) else None


def sha256_of(shard: Shard) -> str:
    """The digest of the whole file."""
    digest = hashlib.sha256()
    with _binary_file(shard.location, shard.bytes) as file:
        while block := file.read(READ_BUFFER_BYTES):
            digest.update(block)
    return digest.hexdigest()


class SourceDigests:
    """The SHA-256 of each shard, computed beside the encoding and held to what it must be."""

    def __init__(self, shards: list[Shard], known: dict):
        self._shards, self._known = shards, known
        self._pool, self._running = ThreadPoolExecutor(1), {}

    def __enter__(self) -> "SourceDigests":
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, index: int) -> None:
        """Begin with a shard as it is read; with a remote one only if there is need to know."""
        if str(index) in self._known or index in self._running:
            return
        if is_remote(self._shards[index].location) and not self._shards[index].expected_sha256:
            self._known[str(index)] = None
        else:
            self._running[index] = self._pool.submit(sha256_of, self._shards[index])

    def finish(self) -> None:
        """Have the digests of all shards, also of those a killed run had read but not digested."""
        for index in range(len(self._shards)):
            self.start(index)
        self.check(wait=True)
        for shard in self._shards:
            _check_unchanged(shard)

    def check(self, *, wait: bool = False) -> None:
        """Record the digests that are ready, or with `wait` all; a wrong one is bad input."""
        for index, future in list(self._running.items()):  # a copy: the reader starts more
            if not wait and not future.done():
                continue
            shard = self._shards[index]
            digest = self._known[str(index)] = self._running.pop(index).result()
            if digest != (shard.expected_sha256 or digest):
                raise InputError(
                    f"{shard.location} is damaged: its SHA-256 is {digest}, "
                    f"not {shard.expected_sha256}; fetch it again"
                )


def _check_unchanged(shard: Shard) -> None:
    """What is at an address is told from what was there by its size alone, as it is read."""
    if is_remote(shard.location):
        return
    try:
        now = _status(shard.location)[:2]
    except OSError:
        now = None
    if now != (shard.bytes, shard.version):
        raise InputError(f"{shard.location} changed while it was read; run the same command again")


def _expand(given: str) -> list[str]:
    if is_remote(given):
        return [given] if _name_of(given).endswith(".parquet") else find_remote(given)
    path = Path(given)
    if path.is_dir():
        # Links to folders are not followed, so that there is no loop. Spark names folders so, too.
        found = [
            p
            for p in path.rglob("*.parquet")
            if not p.is_dir() and not _is_hidden(p.relative_to(path))
        ]
        if not found:
            raise InputError(f"{given} is a folder without .parquet files")
        return [str(p) for p in found]
    if not path.exists():
        raise InputError(f"{given} does not exist")
    return [given]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _name_of(location: str) -> str:
    """Without what an address may ask for beside its path, such as a download, or show as a key."""
    location = location.partition("?")[0] if is_remote(location) else location
    return location.replace(os.sep, "/").rsplit("/", 1)[-1]


def _path_of(location: str) -> str:
    """The same however it is spelled."""
    return location if is_remote(location) else os.path.abspath(location)  # noqa: PTH100


def _open_shard(location: str, text_column: str, expected_sha256: str | None) -> Shard:
    try:
        bytes, version, touched_ns = _status(location)
    except OSError as error:
        raise InputError(f"cannot read {location}: {first_line(error)}") from error
    with _parquet_file(location, bytes) as file:
        metadata, schema = file.metadata, file.schema_arrow
        _check_text_column(location, schema, text_column)
        # No more than this of a group: pyarrow ends the process where a column of it is damaged.
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        _check_rows(location, metadata.num_rows, [group.num_rows for group in groups])
        has_counts = schema.names.count(COUNT_COLUMN) == 1 and pa.types.is_integer(
            schema.field(COUNT_COLUMN).type
        )
        return Shard(
            location=location,
            bytes=bytes,
            version=version,
            touched_ns=touched_ns,
            rows=metadata.num_rows,
            group_rows=tuple(group.num_rows for group in groups),
            group_bytes=tuple(group.total_byte_size for group in groups),
            text_column=text_column,
            has_counts=has_counts,
            expected_sha256=expected_sha256 or KNOWN_SHA256.get((_name_of(location), bytes)),
        )


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
    for group, group_rows in enumerate(shard.group_rows):
        group_end = row + group_rows
        if start_row < group_end and row < shard.rows:
            for number, batch in enumerate(_group_batches(file, shard, group)):
                yield row, number == 0, batch
                row += batch.num_rows
        row = group_end


def _group_batches(file: pq.ParquetFile, shard: Shard, group: int) -> Iterator[pa.RecordBatch]:
    """A row group in batches of about CHUNK_BYTES; what is damaged is told as such."""
    columns = [shard.text_column, *([COUNT_COLUMN] if shard.has_counts else [])]
    bytes_per_row = max(shard.group_bytes[group] / max(shard.group_rows[group], 1), 1)
    batch_rows = min(max(round(CHUNK_BYTES / bytes_per_row), 1), CHUNK_ROWS)
    rows = 0
    with _damage_told(shard.location, f" in row group {group}"):
        for batch in file.iter_batches(batch_rows, [group], columns, use_threads=False):
            rows += batch.num_rows
            yield _with_plain_texts(batch.select(columns))
    if rows != shard.group_rows[group]:
        raise InputError(
            f"{shard.location} is damaged: row group {group} holds {rows} rows, "
            f"its footer says {shard.group_rows[group]}; fetch it again"
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
    with _binary_file(location, bytes) as file:
        try:
            parquet = pq.ParquetFile(
                file, buffer_size=READ_BUFFER_BYTES, page_checksum_verification=True
            )
        except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
            raise InputError(_why_no_footer(location, file, error)) from error
        with _damage_told(location):
            yield parquet


@contextmanager
def _damage_told(location: str, where: str = "") -> Iterator[None]:
    """What fails in here for lack of sense in the file is bad input."""
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if getattr(error, "errno", None):
            raise  # the disk or the network fails, not the file
        if "Not yet implemented" in str(error):  # whatever its kind
            raise InputError(
                f"{location} cannot be read{where} ({first_line(error)}); if it is not damaged, "
                "write it anew in a form that pyarrow can read"
            ) from error
        raise InputError(
            f"{location} is damaged{where} ({first_line(error)}); fetch it again"
        ) from error


def _why_no_footer(location: str, file: BinaryIO, error: Exception) -> str:
    file.seek(0)
    head = file.read(16)
    if not head:
        return f"{location} is empty"
    if head.startswith(b"PAR1"):
        return f"{location} is truncated or damaged ({first_line(error)}); fetch it again"
    return f"{location} is not a parquet file: it begins with {head!r}"


@contextmanager
def _binary_file(location: str, bytes: int) -> Iterator[BinaryIO]:
    try:
        with RemoteFile(location, bytes) if is_remote(location) else pa.OSFile(location) as file:
            yield file
    except pa.ArrowException:
        raise
    except OSError as error:
        raise InputError(f"cannot read {location}: {first_line(error)}") from error


def _status(location: str) -> tuple[int, int | str | None, int | None]:
    """Size, and the version and time of `Shard`."""
    if is_remote(location):
        with RemoteFile(location) as file:
            return file.bytes, version_of(location), None
    status = Path(location).stat()
    return status.st_size, status.st_mtime_ns, max(status.st_mtime_ns, status.st_ctime_ns)
