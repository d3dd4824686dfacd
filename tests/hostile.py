"""Files made to do harm, and the bounds in which whoever reads them has to stay."""

import resource
import signal
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GIB = 2**30
REFUSED_S = 60  # to read what is hostile takes seconds at most


class Calls:
    """Pickled, this is a call of a function."""

    def __init__(self, function: Callable, *arguments: Any):
        self._call = function, arguments

    def __reduce__(self) -> tuple:
        return self._call


@contextmanager
def bounded(more_bytes: int = GIB) -> Iterator[None]:
    """Let this process take no more than so much memory, and no more than a minute."""

    def over(*_: Any) -> None:
        raise AssertionError("it would go on for ever")

    limits = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, over)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + more_bytes, limits[1]))
    signal.alarm(REFUSED_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def rewrite(path: Path, change: Callable[[str, bytes], bytes], **options: Any) -> None:
    """Write an archive anew, with each entry as `change` makes it of its name and content."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", **options) as archive:
        for name, content in entries.items():
            archive.writestr(name, change(name, content))


def _data_bytes() -> int:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line
    )
    return int(line.split()[1]) * 1024
