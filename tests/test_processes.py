"""Nothing that a test starts outlives it, however either of them ends."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.conftest import TINY_MODEL, write_tiny_dataset
from tests.processes import children_of

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
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run_script("train.py", *words, cwd=tmp_path, timeout_s=0.5)
    [zygote] = [pid for pid in children_of(os.getpid()) if "tests.zygote" in command_of(pid)]
    [pid] = children_of(zygote)
    watched = watch(pid)
    processes.end_all()
    assert has_ended(watched, within_s=0)
    assert not children_of(zygote)


def test_processes_can_be_interrupted_where_the_tests_cannot():
    script = [sys.executable, "-c", TESTS_WITHOUT_CTRL_C]
    done = processes.run(script, cwd=processes.PROJECT)
    assert done.stdout == f"{-signal.SIGINT}\n", done.stderr


SHOWS_ITSELF = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(),
    "said": sys.stdin.read(), "tty": sys.stdout.isatty(), "word": os.environ.get("WORD"),
    "leads": os.getsid(0) == os.getpid(), "buffered": sys.stdout.line_buffering,
    "signals": [str(signal.getsignal(n)) for n in range(1, 32) if n not in (9, 19)],
}))
sys.exit(int(sys.argv[1]))
"""
FAILS = "import atexit\natexit.register(print, 'at exit')\nprint('before')\nraise KeyError('no')"


@pytest.mark.parametrize("code", ["0", "3"])
def test_what_is_forked_is_as_what_is_started(tmp_path, monkeypatch, code):
    script = tmp_path / "train.py"
    script.write_text(SHOWS_ITSELF)
    told = {}
    for is_forked in (True, False):
        monkeypatch.setattr(processes, "CAN_FORK", is_forked)
        told[is_forked] = run_as_project(script, code, monkeypatch, stdin="hello")
    assert told[True] == told[False]
    assert told[True][0] == int(code)


def test_what_is_forked_fails_as_what_is_started(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    told = {}
    for is_forked in (True, False):
        monkeypatch.setattr(processes, "CAN_FORK", is_forked)
        told[is_forked] = run_as_project(script, "", monkeypatch)
    (code, said, complaint), started = told[True], told[False]
    assert (code, said) == started[:2] == (1, "before\nat exit\n")
    assert complaint.splitlines()[-1] == started[2].splitlines()[-1] == "KeyError: 'no'"


def run_as_project(script, word, monkeypatch, stdin=""):
    monkeypatch.setattr(processes, "PROJECT", script.parent)
    monkeypatch.setenv("WORD", "of the environment")
    done = processes.run_script("train.py", word, cwd=script.parent, stdin=stdin)
    return done.returncode, done.stdout, done.stderr


def test_ranks_end_when_one_of_them_fails(tmp_path):
    dataset = write_tiny_dataset(tmp_path)
    words = [*TINY_MODEL, f"--dataset={dataset}", f"--out_dir={tmp_path / 'out'}"]
    fails = "--batch_size=3", "--gradient_accumulation_steps=1"
    done = processes.run_ranks(2, "train.py", *words, *fails, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def watch(pid: int) -> int:
    return os.pidfd_open(pid)


def has_ended(watched: int, within_s: float) -> bool:
    return bool(select.select([watched], [], [], within_s)[0])
