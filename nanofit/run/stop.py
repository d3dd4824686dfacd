"""Stopping on request: a signal sets a flag that the loop looks at once a step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """Whether somebody asked the run to end."""

    requested = False


@contextmanager
def watch_for_stop() -> Iterator[Stop]:
    """SIGINT, SIGTERM and SIGHUP ask for a clean end; a second one ends the process at once."""
    stop = Stop()

    def request(number, frame):
        stop.requested = True
        for kind, handler in before.items():
            signal.signal(kind, handler)

    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP; nohup ignores it
    kinds = [getattr(signal, name) for name in names if hasattr(signal, name)]
    kinds = [kind for kind in kinds if signal.getsignal(kind) is not signal.SIG_IGN]
    before = {kind: signal.signal(kind, request) for kind in kinds}
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
