"""Stopping on request: a signal sets a flag that the loop looks at once a step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Stop:
    """Whether somebody asked the run to end."""

    requested = False


@contextmanager
def watch_for_stop() -> Iterator[Stop]:
    """SIGINT and SIGTERM ask for a clean end; a second one ends the process at once."""
    stop = Stop()

    def request(number, frame):
        stop.requested = True
        for kind, handler in before.items():
            signal.signal(kind, handler)

    before = {kind: signal.signal(kind, request) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
