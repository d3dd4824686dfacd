"""Nothing that a test starts outlives it, however either of them ends."""

import multiprocessing
import os
import select
import signal
import sys

import pytest

from tests import processes
from tests.conftest import TINY_MODEL

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# As torchrun does: a process in a session of its own, which no signal to its parent's reaches.
WITH_A_CHILD = """
import subprocess, sys, time
sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleeping, start_new_session=True).pid, flush=True)
time.sleep(600)
"""
TESTS_THAT_ARE_KILLED = f"""
import sys, time
from tests import processes
child = processes.start([sys.executable, "-c", {WITH_A_CHILD!r}])
print(child.pid, child.stdout.readline(), flush=True)
time.sleep(600)
"""
TESTS_WITHOUT_CTRL_C = """
import signal, sys
from tests import processes
signal.signal(signal.SIGINT, signal.SIG_IGN)
code = "import os; os.kill(os.getpid(), 2)"
print(processes.run([sys.executable, "-c", code]).returncode)
"""


def test_what_a_test_leaves_is_ended_with_all_that_it_started():
    process = processes.start([sys.executable, "-c", WITH_A_CHILD])
    watched = [watch(process.pid), watch(int(process.stdout.readline()))]
    processes.end_all()
    assert all(has_ended(one, within_s=0) for one in watched)


def test_what_killed_tests_leave_is_ended_by_the_guard():
    tests = processes.start([sys.executable, "-c", TESTS_THAT_ARE_KILLED], cwd=processes.PROJECT)
    watched = [watch(int(pid)) for pid in tests.stdout.readline().split()]
    assert not any(has_ended(one, within_s=0) for one in watched)
    tests.kill()
    assert all(has_ended(one, within_s=30) for one in watched)


def test_script_that_takes_too_long_is_ended(tiny_dataset, tmp_path):
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", "--max_iters=1000000", "--out_dir=out"]
    with pytest.raises(AssertionError, match=r"train.py took longer than 0.5 s"):
        processes.run_script("train.py", *words, cwd=tmp_path, timeout_s=0.5)
    (process,) = multiprocessing.active_children()
    watched = watch(process.pid)
    processes.end_all()
    assert has_ended(watched, within_s=0)


def test_processes_can_be_interrupted_where_the_tests_cannot():
    script = [sys.executable, "-c", TESTS_WITHOUT_CTRL_C]
    done = processes.run(script, cwd=processes.PROJECT)
    assert done.stdout == f"{-signal.SIGINT}\n", done.stderr


def watch(pid: int) -> int:
    return os.pidfd_open(pid)


def has_ended(watched: int, within_s: float) -> bool:
    return bool(select.select([watched], [], [], within_s)[0])
