"""One run at a time in a folder: two would write over each other.

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
from nanofit.machine.dist import Ranks
from nanofit.settings.config import RunConfig
from nanofit.terminal import InputError, redacted

LOCK = "lock"  # who holds it is written into it


@contextmanager
def only_run_in_folder(run: RunConfig, ranks: Ranks) -> Iterator[None]:
    """Hold out_dir for this run; InputError, with who has it, if another one does."""
    file = None
    with ranks.all_or_none():
        if ranks.is_main and not run.eval_only:  # which writes nothing
            file = _locked(Path(run.out_dir))
    try:
        yield
    finally:
        if file:
            _release(file)


def _locked(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a+", encoding="utf-8", opener=without_links)  # noqa: SIM115
    except OSError as error:
        raise InputError(
            f"cannot write to out_dir {folder} ({error.strerror}); use another --out_dir"
        ) from None
    if not _take(file):
        holder = _holder(file)
        file.close()
        raise InputError(f"{folder} is in use by {holder}; end that, or use another --out_dir")
    if not _is_in_place(file):  # whoever had it has just removed it
        file.close()
        return _locked(folder)
    words = redacted(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]))
    since = time.strftime("%Y-%m-%d %H:%M")
    with suppress(OSError):  # a full disk: nobody will know who it is
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {since} ({words})")
        file.flush()
    return file


def _release(file: TextIO) -> None:
    """Leave no lock behind, nor a folder that was made for it alone."""
    path = Path(file.name)
    with suppress(OSError):
        if os.name != "nt" and _is_in_place(file):  # Windows removes no file that is open
            path.unlink()
            path.parent.rmdir()
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
