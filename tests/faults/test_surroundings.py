"""What a run has around it goes away or lies: its terminal, its reader, the clock, the host."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_metrics, read_records
from tests.processes import TIMEOUT_S, is_stopped, wait_for

pytestmark = pytest.mark.slow
LENGTH = ["--max_iters=200", "--lr_decay_iters=200", "--eval_interval=100"]
LENGTH += ["--learning_rate=1e-3", "--min_lr=1e-4"]
ENDLESS = "--max_iters=100000"  # so that no run ends before we come to disturb it


@pytest.fixture
def command(tiny_dataset, tmp_path):
    out = tmp_path / "out"
    places = [f"--dataset={tiny_dataset}", f"--out_dir={out}"]
    return [sys.executable, PROJECT / "train.py", *TINY_MODEL, *places, *LENGTH], out


@pytest.fixture
def expected(tiny_run, tmp_path):
    """The losses of the same run undisturbed, as far as another one has come."""

    def losses(steps: int = 200) -> dict[int, float]:
        done = tiny_run(*LENGTH, f"--max_iters={steps}", out_dir=tmp_path / "whole")
        assert done.returncode == 0, done.stderr
        whole = read_metrics(tmp_path / "whole", "step", "loss")
        return {step: whole[step] for step in range(steps)}

    return losses


def has_begun(out: Path, *, steps: int = 5) -> bool:
    return (out / "metrics.jsonl").exists() and len(read_records(out, "step")) > steps


def on_a_terminal(command: list, *, hangup: signal.Handlers) -> tuple:
    """Start a run as a shell on a terminal does; returns it and the terminal's other side."""
    ours, its = pty.openpty()

    def take_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(its, termios.TIOCSCTTY, 0)  # of a new session, which `start` makes it
        signal.signal(signal.SIGHUP, hangup)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), its)
    process = processes.start(command, preexec_fn=take_terminal, **streams)
    os.close(its)
    return process, ours


def read_until(terminal: int, condition: Callable[[], bool]) -> None:
    """A terminal that nobody reads from would hold up who writes to it."""
    os.set_blocking(terminal, False)

    def look() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 2**16)
        return condition()

    wait_for(look)


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_terminal_that_goes_is_a_request_to_stop_unless_hangups_are_ignored(
    command, expected, hangup
):
    words, out = command
    goes_on = hangup == signal.SIG_IGN
    process, terminal = on_a_terminal(words if goes_on else [*words, ENDLESS], hangup=hangup)
    read_until(terminal, lambda: has_begun(out))
    os.close(terminal)
    assert process.wait(TIMEOUT_S) == 0
    losses = read_metrics(out, "step", "loss")
    assert not goes_on or max(losses) == 199
    assert losses == expected(len(losses))
    newest = max(out.glob("ckpt-0*.pt"))
    assert torch.load(newest, weights_only=True)["iter_num"] == len(losses)


def test_streams_that_are_closed_are_not_taken_for_files(command, expected):
    """Else the first files that are opened would get all that is printed."""
    words, out = command
    shell = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", *words]
    assert processes.start(shell).wait(TIMEOUT_S) == 0
    assert read_metrics(out, "step", "loss") == expected()
    for path in out.glob("*.jsonl"):
        assert all(line.startswith("{") for line in path.read_text().splitlines())


def test_a_host_that_sleeps_changes_nothing(command, expected):
    words, out = command
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    process = processes.start([*words, ENDLESS], **quiet)
    for steps in (20, 60):
        wait_for(lambda: has_begun(out, steps=steps))  # noqa: B023
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: is_stopped(process.pid))
        os.kill(process.pid, signal.SIGCONT)
    awake_at = len(read_records(out, "step"))
    wait_for(lambda: has_begun(out, steps=awake_at + 20))
    process.terminate()
    assert process.wait(TIMEOUT_S) == 0
    losses = read_metrics(out, "step", "loss")
    assert losses == expected(len(losses))


JUMPING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) {
    return (rand() % 3 - 1) * 365L * 86400 * (rand() % 3);
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += jump();
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


def test_a_clock_that_jumps_by_years_changes_nothing(command, expected, tmp_path):
    """The calendar's, as somebody sets it; the monotonic one counts on."""
    words, out = command
    (tmp_path / "jumping.c").write_text(JUMPING)
    library = tmp_path / "jumping.so"
    try:
        build = ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "jumping.c", "-ldl"]
        processes.run(build, check=True)
    except FileNotFoundError:
        pytest.skip("needs gcc")
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    told = processes.run(
        [sys.executable, "-c", "import time; print(len({int(time.time()) for _ in range(50)}))"],
        env=environment,
    )
    assert int(told.stdout) > 3, "the clock does not jump"
    done = processes.run(words, env=environment)
    assert done.returncode == 0, done.stderr
    assert read_metrics(out, "step", "loss") == expected()
    seconds = [record["seconds"] for record in read_records(out, "step")]
    assert seconds == sorted(seconds) and 0 <= seconds[0] < seconds[-1] < 120
