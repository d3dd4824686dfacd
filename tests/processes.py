"""Processes of tests: none outlives its test, and most find torch loaded already.

A process is known by two words in its environment, which all that it starts inherit: torchrun, for
one, puts its processes into sessions of their own, so that no process group holds them all. Should
a test's own process die before it has tidied up, a guard (`python -m tests.processes`) does so.
"""

import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300
_OF_THESE_TESTS, _OF_ONE_PROCESS = "NANOFIT_TESTS", "NANOFIT_TESTED_PROCESS"
_PRELOADED = ["train", "sample", "torch._dynamo"]
_marks: dict[subprocess.Popen | multiprocessing.Process, str] = {}  # of those not yet ended
_numbers = count()


def start(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    preexec_fn: Callable[[], None] | None = None,
    **options: Any,
) -> subprocess.Popen:
    """Start a command that can be interrupted, and that `end_all` kills with all it started."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in whatever a shell starts with &
        if preexec_fn:
            preexec_fn()

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    marks = _new_marks()
    process = subprocess.Popen(
        list(map(str, command)),
        env={**(os.environ if env is None else env), **marks},
        preexec_fn=prepare,
        start_new_session=True,
        **{**pipes, **options},
    )
    _marks[process] = marks[_OF_ONE_PROCESS]
    return process


def run(
    command: Sequence[str | Path],
    *,
    stdin: str = "",
    timeout_s: float = TIMEOUT_S,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess:
    """Run a command to its end, as subprocess.run does, and tell what it said."""
    process = start(command, stdin=subprocess.PIPE, **options)
    stdout, stderr = process.communicate(stdin, timeout=timeout_s)
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def run_script(
    name: str, *words: str, cwd: Path, stdin: str = "", timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess:
    """Run a script of the project in a process of its own, forked from one that has loaded torch.

    To load it takes longer than most of what is tested.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / stream for stream in ("stdin", "stdout", "stderr")]
        places[0].write_text(stdin)
        marks = _new_marks()
        arguments = ([str(PROJECT / name), *words], cwd, {**os.environ, **marks}, places)
        process = _fork_server().Process(target=_run_forked, args=arguments)
        process.start()
        _marks[process] = marks[_OF_ONE_PROCESS]
        process.join(timeout_s)
        assert process.exitcode is not None, f"{name} took longer than {timeout_s} s"
        told = (place.read_text() for place in places[1:])
        return subprocess.CompletedProcess(arguments[0], process.exitcode, *told)


def end(process: subprocess.Popen | multiprocessing.Process) -> None:
    """Kill a process and all that it started, whatever state they are in."""
    process.kill()
    _kill_marked(_OF_ONE_PROCESS, _marks.pop(process))
    if isinstance(process, subprocess.Popen):
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()
    else:
        process.join()


def end_all() -> None:
    """End all that a test has not ended itself."""
    for process in list(_marks):
        end(process)


def wait_for(
    condition: Callable[[], Any], timeout_s: float = 180, *, interval_s: float = 0.05
) -> None:
    """Go on as soon as a condition holds; a fresh interpreter may take a minute to load torch."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(interval_s)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@cache
def guarded() -> str:
    """Have a guard watch this process, and mark all that it starts; returns the mark."""
    mark = f"{os.getpid()}-{time.time_ns()}"
    if hasattr(os, "pidfd_open"):
        subprocess.Popen(
            [sys.executable, "-m", "tests.processes", str(os.getpid()), mark],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    os.environ[_OF_THESE_TESTS] = mark
    return mark


def _new_marks() -> dict[str, str]:
    return {_OF_THESE_TESTS: guarded(), _OF_ONE_PROCESS: f"{guarded()}.{next(_numbers)}"}


def _fork_server():
    guarded()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _run_forked(
    words: list[str], cwd: Path, environment: dict[str, str], places: list[Path]
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    flags = (os.O_RDONLY, *2 * [os.O_WRONLY | os.O_CREAT])
    for number, (place, flag) in enumerate(zip(places, flags, strict=True)):
        os.dup2(os.open(place, flag), number)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, closefd=False)  # noqa: SIM115
        for number, mode in enumerate("rww")
    )
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _kill_marked(name: str, value: str, within_s: float = 30) -> None:
    """Kill every process with this in its environment, and those that they start meanwhile."""
    deadline = time.monotonic() + within_s
    while (pids := _marked(f"{name}={value}".encode())) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # to die takes a moment


def _marked(entry: bytes) -> list[int]:
    pids = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (place / "environ").read_bytes().split(b"\0"):
                pids.append(int(place.name))
    return [pid for pid in pids if pid != os.getpid()]


def _guard(pid: str, mark: str) -> None:
    """Wait until a process has ended, however it did; then end what it left."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(int(pid))], [], [])
    _kill_marked(_OF_THESE_TESTS, mark)


if __name__ == "__main__":
    _guard(*sys.argv[1:])
