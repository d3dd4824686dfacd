"""A file at an address, read as if it were here: a read that fails goes on where it was."""

import errno
import io
import math
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from nanofit.terminal import InputError, duration, first_line

TIMEOUT = "NANOFIT_TIMEOUT_S"  # in the environment, for the processes of an engine too
TRIES = 8  # in a row; with pauses of up to the time-out, some minutes
NOT_THERE = (404, 410)
BLOCK_BYTES = 4 * 2**20  # at least, of what is asked for at once
_copies: dict[str, tempfile.TemporaryDirectory] = {}
_leaving = threading.Event()


class RemoteFile(io.RawIOBase):
    """The bytes at an address.

    A read that fails or ends early goes on at the byte it has come to, on a new connection, until
    TRIES in a row have brought nothing: then InputError tells of the last failure.
    """

    def __init__(self, location: str, bytes: int | None = None):
        self._location, self._position, self._file = location, 0, None
        self._blocks = deque(maxlen=2)  # (where it begins, its bytes): columns are read in turns
        self.bytes = bytes  # as it is known already; otherwise as it is now
        _patiently(location, lambda: self._connect(is_first=True))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.bytes}[whence]
        self._position = begin + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self.bytes - self._position, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        parts = []
        while wanted:
            parts.append(self._known(wanted) or self._fetched(wanted))
            self._position += len(parts[-1])
            wanted -= len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        self._disconnect()
        super().close()

    def _known(self, wanted: int) -> bytes:
        """What a block has of the next bytes."""
        for start, block in self._blocks:
            offset = self._position - start
            if 0 <= offset < len(block):
                return block[offset : offset + wanted]
        return b""

    def _fetched(self, wanted: int) -> bytes:
        size = min(max(wanted, BLOCK_BYTES), self.bytes - self._position)
        block = _patiently(self._location, lambda: self._some_of(size))
        self._blocks.append((self._position, block))
        return block[:wanted]

    def _some_of(self, size: int) -> bytes:
        """At least one byte; what fails is tried on a new connection next time."""
        try:
            if self._file is None:
                self._connect()
            self._file.seek(self._position)
            block = self._file.read(size)
            if not block:
                raise OSError(f"it ended after {self._position:,} of {self.bytes:,} bytes")
        except BaseException:
            self._disconnect()
            raise
        return block

    def _connect(self, *, is_first: bool = False) -> None:
        file = _open(self._location, is_first=is_first)
        bytes = file.seek(0, os.SEEK_END)
        if bytes != (self.bytes or bytes):
            file.close()
            raise OSError(f"it has {bytes:,} bytes now, not {self.bytes:,} as before")
        self._file, self.bytes = file, bytes

    def _disconnect(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def is_remote(location: str) -> bool:
    return "://" in location


def find_remote(folder: str) -> list[str]:
    """The addresses of the files below one."""
    filesystem, path = _filesystem(folder)
    paths = _patiently(folder, lambda: filesystem.find(path))
    return [filesystem.unstrip_protocol(p) for p in sorted(paths)]


def version_of(location: str) -> str | None:
    """What an address tells of its content that changes with it, if anything."""
    filesystem, path = _filesystem(location)
    told = _patiently(location, lambda: filesystem.info(path))
    return next((str(told[name]) for name in ("ETag", "etag", "blob_id") if told.get(name)), None)


def stop_waiting() -> None:
    """Let whoever waits for an address give up at once: we are leaving."""
    _leaving.set()


def timeout_s() -> float:
    """How long a silent address is waited for, and at most between two tries."""
    given = os.environ.get(TIMEOUT, "30")
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"{TIMEOUT}={given} in the environment is not a positive number")
    return seconds


def _patiently(location: str, attempt: Callable[[], Any]) -> Any:
    """What `attempt` gives; while it fails it is made again, after ever longer pauses."""
    longest_s, shown = timeout_s(), location.partition("?")[0]  # behind it there may be a key
    for number in range(1, TRIES + 1):
        try:
            return attempt()
        except InputError:
            raise
        except Exception as error:  # every protocol has its own kinds
            reason = _reason(error)
            if number == TRIES or _is_final(error) or _leaving.is_set():
                raise InputError(f"cannot read {shown}: {reason}") from error
        pause_s = longest_s * 2.0 ** (min(number, 6) - 6)
        print(f"{shown}: {reason}; trying again in {duration(math.ceil(pause_s))}", file=sys.stderr)
        _leaving.wait(pause_s)
    raise AssertionError("the last try either gives something or fails")


def _is_final(error: Exception) -> bool:
    """Whether to ask again would be of no use, because there is nothing there."""
    cause = _first_cause(error)
    return isinstance(cause, FileNotFoundError) or getattr(cause, "status", None) in NOT_THERE


def _reason(error: Exception) -> str:
    """Without the address that a server has sent us on to: it may hold a key."""
    cause = _first_cause(error)
    status, message = getattr(cause, "status", None), getattr(cause, "message", None)
    return f"{status} {message}" if status and message else first_line(cause)


def _first_cause(error: BaseException) -> BaseException:
    """fsspec tells of any failure to ask for a size as of a file that is not there."""
    is_empty = isinstance(error, FileNotFoundError) or not str(error)
    return _first_cause(error.__cause__) if is_empty and error.__cause__ else error


def _open(location: str, *, is_first: bool) -> BinaryIO:
    """A file to seek in, or a copy of it; which of them is found out by the first one."""
    if location in _copies:
        return _copy_of(location)
    filesystem, path = _filesystem(location)
    # Its own cache puts bytes into the wrong place when a server sends fewer than it was asked for.
    file = filesystem.open(path, "rb", cache_type="none")
    try:
        file.seek(-1, os.SEEK_END)
        if is_first:
            file.read(1)
    except ValueError:  # this server sends a file from its beginning or not at all
        file.close()
        return _copy_of(location)
    return file


def _copy_of(location: str) -> BinaryIO:
    if location not in _copies:
        _copies[location] = _download(location)
    return Path(_copies[location].name, "copy").open("rb")


def _download(location: str) -> tempfile.TemporaryDirectory:
    """A temporary folder with a copy of the file, kept while we run."""
    folder = tempfile.TemporaryDirectory()
    filesystem, path = _filesystem(location)
    try:
        filesystem.get_file(path, f"{folder.name}/copy")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise InputError(
            f"no room for a copy of {location} in {folder.name}; name a larger place in TMPDIR"
        ) from error
    return folder


def _filesystem(location: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(location, **_http_settings(location))
    except (ImportError, ValueError) as error:
        raise InputError(
            f"cannot open {location}: {first_line(error)}; it may need "
            "pip install fsspec aiohttp (http), s3fs (s3) or huggingface_hub (hf)"
        ) from error


def _http_settings(location: str) -> dict[str, Any]:
    """Time-outs for a silence, and none for a long transfer; other protocols bring their own."""
    if not location.startswith(("http://", "https://")):
        return {}
    from aiohttp import ClientTimeout

    silence_s = timeout_s()
    limits = ClientTimeout(total=None, sock_connect=silence_s, sock_read=silence_s)
    return {"client_kwargs": {"timeout": limits}}
