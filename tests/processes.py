"""Processes of tests: none outlives its test, and most find torch loaded already.

A process is known by two words in its environment, which all that it starts inherit: torchrun, for
one, puts its processes into sessions of their own, so that no process group holds them all. Should
a test's own process die before it has tidied up, a guard (`python -m tests.processes`) does so.
"""

import inspect
import os
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

from tests.zygote import SCRIPTS, Zygote

if sys.platform == "linux":
    import fcntl

PROJECT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300
CAN_FORK = sys.platform == "linux"
PIPE_BYTES = 2**20
_OF_THESE_TESTS, _OF_ONE_PROCESS = "NANOFIT_TESTS", "NANOFIT_TESTED_PROCESS"
_marks: dict[subprocess.Popen, str] = {}  # of those not yet ended
_numbers = count()
_EXECUTE_CHILD = inspect.signature(subprocess.Popen._execute_child)
_PIPE_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def start(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
    preexec_fn: Callable[[], None] | None = None,
    **options: Any,
) -> subprocess.Popen:
    """Start a command that can be interrupted, and that `end_all` kills with all it started.

    A script of ours is forked from a process that has loaded torch, as to load it takes longer than
    most of what is tested; not so if it wants an environment of its own. `variables` are additions
    that nobody reads while loading.
    """

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored in whatever a shell starts with &
        if preexec_fn:
            preexec_fn()

    words = list(map(str, command))
    is_plain = env is None and preexec_fn is None and words[0] == sys.executable
    is_forked = is_plain and words[1] in [str(PROJECT / script) for script in SCRIPTS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    marks = _new_marks()
    process = (_Forked if is_forked and CAN_FORK else subprocess.Popen)(
        words,
        env={**(os.environ if env is None else env), **(variables or {}), **marks},
        preexec_fn=prepare,
        start_new_session=True,
        **{**pipes, **options},
    )
    _marks[process] = marks[_OF_ONE_PROCESS]
    for pipe in (process.stdout, process.stderr) if CAN_FORK else ():
        if pipe:  # of which nobody may read before the end: who writes should not have to wait
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
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
    """Run a script of the project to its end."""
    return run([sys.executable, PROJECT / name, *words], cwd=cwd, stdin=stdin, timeout_s=timeout_s)


def run_ranks(
    world: int,
    name: str,
    *words: str,
    cwd: Path,
    own: Sequence[Sequence[str]] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> subprocess.CompletedProcess:
    """Run a script in several processes, as torchrun does but in a fraction of its time.

    Words of its `own` each process may have besides.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    command = [sys.executable, PROJECT / name, *words]
    with tempfile.TemporaryDirectory() as folder:
        said = [[Path(folder) / f"{rank}-{kind}" for kind in "oe"] for rank in range(world)]
        ranks = []
        for rank, files in enumerate(said):
            variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            of_rank = [*command, *(own[rank] if own else ())]
            ranks.append(_start_rank(of_rank, variables, cwd, files))
        wait_for(lambda: any(one.poll() for one in ranks) or _have_ended(ranks), timeout_s)
        code = next((one.returncode for one in ranks if one.returncode), 0)
        for one in ranks:  # of which some wait for the one that failed
            if code:
                one.terminate()
            one.wait(TIMEOUT_S)
        told = ("".join(files[kind].read_text() for files in said) for kind in (0, 1))
        return subprocess.CompletedProcess(command, code, *told)


def _start_rank(
    command: Sequence[str | Path], variables: dict[str, str], cwd: Path, files: Sequence[Path]
) -> subprocess.Popen:
    with files[0].open("w") as stdout, files[1].open("w") as stderr:
        return start(command, cwd=cwd, variables=variables, stdout=stdout, stderr=stderr)


def _have_ended(processes: Sequence[subprocess.Popen]) -> bool:
    return all(one.poll() is not None for one in processes)


def end(process: subprocess.Popen) -> None:
    """Kill a process and all that it started, whatever state they are in."""
    process.kill()
    _kill_marked(_OF_ONE_PROCESS, _marks.pop(process))
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            pipe.close()


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


def children_running(pid: int, words: bytes) -> list[int]:
    """Those in whose command these words are; others may end while one looks."""
    found = []
    with suppress(OSError):
        for child in children_of(pid):
            with suppress(OSError):
                if words in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
    return found


def is_stopped(pid: int) -> bool:
    """As SIGSTOP leaves it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "T"


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


class _Forked(subprocess.Popen):
    """A process that the zygote has forked: it alone can wait for it."""

    def _execute_child(self, *settings: Any) -> None:
        given = _EXECUTE_CHILD.bind(self, *settings).arguments
        cwd, env = str(given["cwd"] or Path.cwd()), given["env"]
        with Path(os.devnull).open("r+b") as nothing:
            streams = [given[end] for end in ("p2cread", "c2pwrite", "errwrite")]
            streams = [nothing.fileno() if one == -1 else one for one in streams]
            self.pid = _zygote().fork(given["args"][1:], cwd, env, streams)
        self._child_created = True
        self._close_pipe_fds(*(given[end] for end in _PIPE_ENDS))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        while (status := _zygote().status(self.pid)) is None:
            if wait_flags == os.WNOHANG:
                return 0, 0
            time.sleep(0.001)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid == self.pid:
                self._handle_exitstatus(status)
        return self.returncode


@cache
def _zygote() -> Zygote:
    guarded()
    return Zygote(subprocess.Popen)


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
