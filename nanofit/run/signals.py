"""Requests by signal: a flag is set, at which the loop looks once a step."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_END = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP; nohup ignores it
_SAVE = "SIGUSR1"  # which Windows has not either
TOGETHER_S = 0.5  # torchrun passes on what a cluster has sent to all processes already


class Requests:
    """What somebody asked of the run."""

    def __init__(self):
        self.is_end_asked = False
        self._is_save_asked = False

    def ask_for_save(self, *_: Any) -> None:
        self._is_save_asked = True

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for since the last look."""
        asked, self._is_save_asked = self._is_save_asked, False
        return asked


@contextmanager
def watch_for_requests() -> Iterator[Requests]:
    """SIGINT, SIGTERM and SIGHUP ask for a clean end; a later one ends the process at once.

    SIGUSR1 asks for a checkpoint.
    """
    requests, asked_at = Requests(), None

    def ask_for_end(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        requests.is_end_asked = True
        asked_at = asked_at or time.monotonic()
        if time.monotonic() > asked_at + TOGETHER_S:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    ending = [kind for kind in _known(*_END) if signal.getsignal(kind) is not signal.SIG_IGN]
    handlers = dict.fromkeys(ending, ask_for_end)
    handlers |= dict.fromkeys(_known(_SAVE), requests.ask_for_save)
    before = {kind: signal.signal(kind, handler) for kind, handler in handlers.items()}
    try:
        yield requests
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def _known(*names: str) -> list[signal.Signals]:
    return [getattr(signal, name) for name in names if hasattr(signal, name)]
