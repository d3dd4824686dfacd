"""Files and folders that are either whole or absent."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
MOST_SMALL = 16 * 2**20  # bytes


def read_small(path: Path, most_bytes: int = MOST_SMALL) -> str:
    """A text that describes something; ValueError if it is too large for that, or no UTF-8."""
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes, as no such file has")
    return content.decode("utf-8-sig")


def without_links(path: str, flags: int) -> int:
    """For open(..., opener=without_links): never through a link, to somewhere else."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


@contextmanager
def atomic_write(path: Path, *, is_shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write to; on success it is made durable and takes the final name.

    Until then whatever was at `path` stays as it is: a kill, a full disk or an error loses nothing.
    What is shared several processes may write at once, and the last one's stays.
    """
    own = f".{os.getpid()}" if is_shared else ""
    temporary = path.with_name(f"{path.name}{own}.tmp")
    temporary.unlink(missing_ok=True)  # to write through a link would be to write elsewhere
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to fill; on success it is made durable and replaces what was at `path`.

    Until then that stays as it is; a kill may leave the new folder, with the process's id, behind.
    """
    temporary, old = (path.with_name(f"{path.name}.{os.getpid()}.{end}") for end in ("tmp", "old"))
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.iterdir():
            sync(file)
        sync(temporary)
        if path.exists():
            path.replace(old)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if old.exists() and not path.exists():
            old.replace(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def link_or_copy(path: Path, other: Path) -> None:
    """Give a file a second name; where the file system has no links, a second file."""
    try:
        other.hardlink_to(path)
    except OSError:
        with atomic_write(other) as temporary:
            shutil.copyfile(path, temporary)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open folders; its renames are durable by themselves
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems of clouds and cameras cannot do so for a folder
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
