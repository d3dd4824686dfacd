"""Checkpoints on their way to the disk, while the run goes on.

A save holds up the run for a copy in the host's memory. One checkpoint at a time is written, whole
or not at all; what cannot be written is tried again until a newer one takes its place.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from nanofit.machine.memory import available_bytes, is_out_of_memory

RETRY_S = 30.0
MOST_OF_HOST = 0.5  # of the memory it has left: what a copy may take

Content = dict[str, Any]


@dataclass
class _Open:
    """A checkpoint to be written; without content it is too late for that."""

    step: int
    content: Content | None


@dataclass(frozen=True)
class Saved:
    """What came of writing a checkpoint."""

    step: int
    path: Path | None
    size_bytes: int
    seconds: float
    error: Exception | None = None


class Saver:
    """Writes checkpoints by `write`, which returns the path; leaving its context waits for it."""

    def __init__(self, write: Callable[[Content, str | None], Path], *, may_copy: bool = True):
        self._write, self._may_copy = write, may_copy
        self._open: dict[str | None, _Open] = {}  # what is not on the disk yet, by name
        self._outcomes: list[Saved] = []
        self._failed: set[str | None] = set()  # and was told of
        self._retry_at = float("inf")
        self._writer, self._writing = _started_thread(), None
        self._is_written_by_one = threading.Lock()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        if kind is not KeyboardInterrupt:  # whoever insists does not wait
            self.wait()
        if self._writer:
            self._writer.shutdown(wait=False)

    def save(self, content: Content, name: str | None = None) -> None:
        """Have a checkpoint written; where there is no room for a copy, wait until it is."""
        self.wait()
        tensors = _tensors(content)
        is_copied = self._may_copy and _has_room_for(tensors)
        kept = _copied(content, tensors) if is_copied else content
        self._open[name] = opened = _Open(content["iter_num"], kept)
        self._failed.discard(name)
        self._start()
        if not is_copied:
            self.wait()
            opened.content = None  # from now on it changes: too late to try again

    def outcomes(self) -> list[Saved]:
        """What has come of saves since the last look; each failure once."""
        is_kept = any(one.content is not None for one in list(self._open.values()))
        if is_kept and not self._is_writing() and time.monotonic() >= self._retry_at:
            self._start()
        told, self._outcomes = self._outcomes, []
        return told

    @property
    def failed_step(self) -> int | None:
        """The step of the newest checkpoint that could not be written; None if none is missing."""
        return max((one.step for one in self._open.values()), default=None)

    def forget(self) -> None:
        """Give up what could not be written: the run goes another way."""
        self.wait()
        self._open.clear()

    def wait(self) -> None:
        """Go on when nothing is being written."""
        error = self._writing and self._writing.exception()
        if error is not None and not is_out_of_memory(error):
            raise error

    def _is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _start(self) -> None:
        try:
            self._writing = self._writer and self._writer.submit(self._write_open)
        except MemoryError:  # which is when a save matters most
            self._writing = None
        if self._writing is None:
            self._write_open()

    def _write_open(self) -> None:
        with self._is_written_by_one:
            self._write_all()

    def _write_all(self) -> None:
        for name, one in list(self._open.items()):
            if one.content is None:
                continue
            outcome = self._written(one.content, name)
            if outcome.error is None:
                del self._open[name]
            if outcome.error is None or name not in self._failed:
                self._outcomes.append(outcome)
            if outcome.error is not None:
                self._failed.add(name)
                self._retry_at = time.monotonic() + RETRY_S

    def _written(self, content: Content, name: str | None) -> Saved:
        started, outcome = time.monotonic(), partial(Saved, content["iter_num"])
        try:
            _check_sound(content)
            path = self._write(content, name)
            return outcome(path, path.stat().st_size, time.monotonic() - started)
        except Exception as error:  # torch.save has many for a full disk, and for full memory
            return outcome(None, 0, time.monotonic() - started, error)


def _started_thread() -> ThreadPoolExecutor | None:
    """A thread that is there from the beginning; None where there is no room for its stack.

    To start one when there is hardly any memory left may take for ever.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="saving")
    try:
        pool.submit(int).result()
    except RuntimeError:
        return None
    return pool


def _check_sound(content: Content) -> None:
    """Nothing that is no number takes the place of what was good."""
    for tensor in _tensors(content["model"]) + _tensors(content["optimizer"]):
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise RuntimeError("weights or moments are no numbers any more")


def _has_room_for(tensors: list[Tensor]) -> bool:
    room_bytes = available_bytes()
    return room_bytes is None or sum(t.nbytes for t in tensors) < MOST_OF_HOST * room_bytes


def _copied(content: Content, tensors: list[Tensor]) -> Content:
    """The same with copies in the host's memory; what is one tensor stays one."""
    copies = {}
    for tensor in tensors:
        if _place(tensor) not in copies:
            copies[_place(tensor)] = tensor.detach().to("cpu", copy=True)
    return tree_map(
        lambda leaf: copies[_place(leaf)] if isinstance(leaf, Tensor) else leaf, content
    )


def _tensors(content: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> tuple:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
