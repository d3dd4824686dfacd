"""One file of documents, local or at an address: what is known of it, and what is read of it."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from nanofit.data.remote import RemoteFile, is_remote, version_of
from nanofit.terminal import InputError, first_line

CHUNK_BYTES = 4 * 2**20  # of text at once: enough to be quick, little to hold


@dataclass(frozen=True)
class Footer:
    """How a parquet file holds documents."""

    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]  # of text before compression, as far as the footer knows
    has_counts: bool


@dataclass(frozen=True)
class Lines:
    """How a file of text holds documents."""

    is_json: bool  # an object a line
    separator: bytes | None  # what stands between documents; None if the file is one
    codec: str | None  # by which it is compressed


@dataclass(frozen=True)
class Shard:
    """One file that can be read, and has the text that is asked for."""

    location: str  # as given: a path or an address
    bytes: int
    version: int | str | None  # other for other content: a time in ns, or what an address tells
    touched_ns: int | None  # a time of change that counts a move to this name; None if remote
    rows: int | None  # to use, from the first on; None for all of a file that does not tell
    text_column: str
    layout: Footer | Lines
    expected_sha256: str | None

    @property
    def name(self) -> str:
        return name_of(self.location)


class Position(NamedTuple):
    """How far the shards have been read."""

    shard: int = 0  # its index
    row: int = 0  # the first one not read
    byte: int = 0  # where that begins in a file of text, decompressed; no matter in a parquet file
    file_bytes: int = 0  # of the shard that are behind it, about


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a shard; in a parquet file, of one row group."""

    texts: pa.Array  # as bytes that nobody has looked at
    counts: pa.Array | None  # the file's own token counts
    is_first_of_group: bool
    end: Position
    tally: Counter = field(default_factory=Counter)  # of rows that have no place in `texts`

    @property
    def bytes(self) -> int:
        return self.texts.nbytes

    def parsed(self) -> "Chunk":
        return self


def text_offsets(texts: pa.Array) -> np.ndarray:
    """Where each text begins and ends in the array's buffer of bytes."""
    width = np.int64 if texts.type in (pa.large_string(), pa.large_binary()) else np.int32
    return np.frombuffer(texts.buffers()[1], width)[texts.offset : texts.offset + len(texts) + 1]


def is_utf8(text: bytes) -> bool:
    """Half of a surrogate pair, among others, is not, whatever it was written as."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def name_of(location: str) -> str:
    """Without what an address may ask for beside its path, such as a download, or show as a key."""
    location = location.partition("?")[0] if is_remote(location) else location
    return location.replace(os.sep, "/").rsplit("/", 1)[-1]


def status_of(location: str) -> tuple[int, int | str | None, int | None]:
    """Size, and the version and time of `Shard`."""
    if is_remote(location):
        with RemoteFile(location) as file:
            return file.bytes, version_of(location), None
    status = Path(location).stat()
    return status.st_size, status.st_mtime_ns, max(status.st_mtime_ns, status.st_ctime_ns)


@contextmanager
def binary_file(location: str, bytes: int) -> Iterator[BinaryIO]:
    try:
        with RemoteFile(location, bytes) if is_remote(location) else pa.OSFile(location) as file:
            yield file
    except pa.ArrowException:
        raise
    except OSError as error:
        raise InputError(f"cannot read {location}: {first_line(error)}") from error


@contextmanager
def damage_told(location: str, where: str = "") -> Iterator[None]:
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
