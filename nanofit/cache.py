"""Results worth keeping between runs, in the user's cache folder; losing them costs only time.

Compiled kernels, which are run, lie there too. So the folder is its owner's alone, and nothing is
read from where anybody else could have written it.
"""

import hashlib
import json
import os
import stat
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanofit.files import PROJECT, atomic_write, read_small


def cache_folder() -> Path:
    """Where they are kept: $XDG_CACHE_HOME/nanofit, by default ~/.cache/nanofit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanofit"


def recall(kind: str, key: Any) -> Any | None:
    """What was kept under this key by the same code and the same torch; None if nothing was."""
    with suppress(OSError, ValueError, RecursionError):
        path = _path(kind, key)
        if private_folder() and path.exists() and all(map(_is_private, (path.parent, path))):
            return json.loads(read_small(path))
    return None


def keep(kind: str, key: Any, value: Any) -> None:
    """Keep a value, if the folder can be written to."""
    path = _path(kind, key)
    with suppress(OSError):
        if not private_folder():
            return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if _is_private(path.parent):
            with atomic_write(path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(json.dumps(value), encoding="utf-8")


def private_folder() -> Path | None:
    """The cache folder, made if need be; None where there can be none, or others have a say."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            return None
        if os.name == "posix":
            folder.chmod(0o700)  # it may be older than this rule
    except OSError:
        return None
    return folder


def _is_private(path: Path) -> bool:
    """Whether nobody else could have put it, or what is in it, there; if not, a line says so."""
    if os.name != "posix":
        return True
    link, found = path.lstat(), path.stat()
    if not link.st_uid == found.st_uid == os.geteuid():
        _tell_once(f"{path} belongs to another user and is not used; remove it, or set another")
    elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _tell_once(f"others can write to {path}, so it is not used; chmod go-w it, or set another")
    else:
        return True
    return False


@cache
def _tell_once(text: str) -> None:
    print(f"note    {text} XDG_CACHE_HOME", file=sys.stderr)


def _path(kind: str, key: Any) -> Path:
    parts = (repr(key), version("torch"), _code_digest())
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]
    return cache_folder() / kind / f"{digest}.json"


@cache
def _code_digest() -> str:
    """Changes with any line of our own code that decides about memory."""
    names = ("settings", "machine", "learning", "memory", "fit")
    rooms = (PROJECT / "nanofit" / name for name in names)
    files = [PROJECT / "model.py", *sorted(file for room in rooms for file in room.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
