"""A process that has loaded what our scripts load, which takes seconds, and forks to run them.

`python -m tests.zygote FD` serves one client over a socket. What it forks has the streams, folder,
environment and signals of a fresh interpreter, and ends as one does; only loading is over.
"""

import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

MOST_BYTES = 2**20  # of a request: a command line and an environment
# Which load torch.
_OF_TESTS = ("tests/memory/living.py", "tests/learning/together.py")
SCRIPTS = ("train.py", "sample.py", "evaluate.py", "export.py", *_OF_TESTS)


class Zygote:
    """The client's side: forks processes, and tells how they ended."""

    def __init__(self, popen: Any):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        with theirs:
            self._process = popen(
                [sys.executable, "-m", "tests.zygote", str(theirs.fileno())],
                cwd=Path(__file__).resolve().parents[1],
                pass_fds=[theirs.fileno()],
            )
        self._socket, self._lock = ours, Lock()

    def fork(
        self, words: Sequence[str], cwd: str, env: Mapping[str, str], streams: Sequence[int]
    ) -> int:
        """Run a script with its words; returns its process's number."""
        return self._ask({"words": list(words), "cwd": cwd, "env": dict(env)}, streams)

    def status(self, pid: int) -> int | None:
        """As waitpid tells it; None while the process runs."""
        return self._ask({"pid": pid})

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return json.loads(self._socket.recv(MOST_BYTES))


def serve(connection: socket.socket) -> dict[str, Any]:
    """Answer until the client has gone; comes back only in each process that is to run a script."""
    while True:
        message, streams, _, _ = socket.recv_fds(connection, MOST_BYTES, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "pid" in request:
            answer = _status(request["pid"])
        elif (answer := os.fork()) == 0:
            connection.close()
            _enter(request, streams)
            return request
        for stream in streams:
            os.close(stream)
        with suppress(BrokenPipeError):
            connection.send(json.dumps(answer).encode())


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return status if ended else None


def _enter(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Become what a fresh interpreter would be."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, closefd=False, errors="backslashreplace")  # noqa: SIM115


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401

    import sample  # noqa: F401
    import train  # noqa: F401

    job = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = job["words"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
