"""One process at a time in a folder: two would write over each other.

The lock is the operating system's. It ends with the process that holds it, whatever ends that, and
works between the machines of a network folder where its server passes locks on, as NFS does.
"""

import errno
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from nanofit.files import without_links
from nanofit.terminal import InputError, redacted

LOCK = "lock"  # who holds it is written into it
PATIENCE_S = 2.0  # a process that was killed may take as long to let go of its memory and files


@contextmanager
def only_one_in(folder: Path, setting: str) -> Iterator[None]:
    """Hold the folder that a setting names, made if need be; InputError, with who else has it."""
    is_new = not folder.exists()
    file = _locked(folder, setting)
    try:
        yield
    finally:
        _release(file)
        if is_new:
            with suppress(OSError):  # it is of use
                folder.rmdir()


def _locked(folder: Path, setting: str) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8", opener=without_links)  # noqa: SIM115
    except OSError as error:
        raise InputError(
            f"cannot write to {setting} {folder} ({error.strerror}); use another --{setting}"
        ) from None
    due = time.monotonic() + PATIENCE_S
    while not _take(file):
        if time.monotonic() > due:
            holder = _holder(file)
            file.close()
            raise InputError(
                f"{folder} is in use by {holder}; end that, or use another --{setting}"
            )
        time.sleep(0.05)
    if not _is_in_place(file):  # whoever had it has just removed it
        file.close()
        return _locked(folder, setting)
    words = redacted(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    since = time.strftime("%Y-%m-%d %H:%M")
    with suppress(OSError):  # a full disk: nobody will know who it is
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since} ({words})")
        file.flush()
    return file


def _release(file: TextIO) -> None:
    """Leave no lock behind."""
    path = Path(file.name)
    with suppress(OSError):
        if os.name != "nt" and _is_in_place(file):  # Windows removes no file that is open
            path.unlink()
    with suppress(OSError):
        file.close()


def _is_in_place(file: TextIO) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), Path(file.name).stat())
    return False


def _take(file: TextIO) -> bool:
    """False if another process has it. Where there are no locks, none is taken."""
    try:
        if os.name == "nt":
            import msvcrt

            # A byte that nobody reads: Windows keeps others from what is locked.
            file.seek(2**30)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)
    return True


def _holder(file: TextIO) -> str:
    file.seek(0)
    return file.read(500).strip() or "another process"
