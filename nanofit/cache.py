"""Results worth keeping between runs, in the user's cache folder; losing them costs only time."""

import hashlib
import json
import os
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanofit.files import PROJECT, atomic_write


def cache_folder() -> Path:
    """Where they are kept: $XDG_CACHE_HOME/nanofit, by default ~/.cache/nanofit."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanofit"


def recall(kind: str, key: Any) -> Any | None:
    """What was kept under this key by the same code and the same torch; None if nothing was."""
    with suppress(OSError, ValueError):
        return json.loads(_path(kind, key).read_text(encoding="utf-8"))
    return None


def keep(kind: str, key: Any, value: Any) -> None:
    """Keep a value, if the folder can be written to."""
    path = _path(kind, key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(json.dumps(value), encoding="utf-8")


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
