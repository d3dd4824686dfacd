"""Serves a report to the browser of this machine, and makes it anew as the run goes on."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from nanofit.terminal import InputError

HOST = "127.0.0.1"
RESTS = 10  # times as long as a report took to make, before it is made again


class Latest:
    """The newest page; it is made anew when somebody asks and its sources have changed."""

    def __init__(
        self, make: Callable[[], tuple[float, str]], state_of_sources: Callable[[], object]
    ):
        self._make, self._state_of_sources = make, state_of_sources
        self._lock = threading.Lock()
        self._state, self._rests_until = None, 0.0
        self.made, self.page = 0.0, ""  # when, as the page itself has it
        self.refresh()

    def refresh(self) -> None:
        with self._lock:
            state, started = self._state_of_sources(), time.monotonic()
            if state == self._state or started < self._rests_until:
                return
            (self.made, self.page), self._state = self._make(), state
            ended = time.monotonic()
            self._rests_until = ended + RESTS * (ended - started)


def serve(latest: Latest, port: int, began: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; port 0 takes a free one, and `began` is told the address."""
    try:
        server = _Server((HOST, port), _handler_of(latest))
    except (OSError, OverflowError) as error:
        raise InputError(f"port {port} cannot be used ({error}); leave --port out") from error
    with server:
        began(f"http://{HOST}:{server.server_port}/")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *request: Any) -> None:
        """A reader who leaves before the answer, or asks nonsense, is no news."""
        if not isinstance(sys.exception(), ConnectionError | ValueError):
            super().handle_error(*request)


def _handler_of(latest: Latest) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if host not in (HOST, "localhost"):  # another site's name that leads to this machine
                self.send_error(403)
                return
            with suppress(InputError):  # should the run's folder be gone, the last page stays
                latest.refresh()
            if self.path == "/":
                self._answer(latest.page, "text/html")
            elif self.path == "/made":
                self._answer(repr(latest.made), "text/plain")
            else:
                self.send_error(404)

        def _answer(self, text: str, kind: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_) -> None:
            """Nobody wants to read of each request."""

    return Handler
