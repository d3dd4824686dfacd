"""Requests by signal, of a real process."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_events, read_metrics
from tests.processes import wait_for

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no such signal")


@pytest.fixture
def running(tiny_dataset, tmp_path):
    """A long run that saves nothing by itself."""
    out = tmp_path / "out"
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}", "--max_iters=100000"]
    # The best so far would be saved as well, at any evaluation.
    words += ["--save_interval=90000", "--eval_interval=90000"]
    command = [sys.executable, PROJECT / "train.py", *words]
    process = processes.start(command, cwd=tmp_path, stdout=subprocess.DEVNULL)  # no full pipe
    wait_for(
        lambda: (
            out.exists() and (out / "metrics.jsonl").exists() and read_metrics(out, "step", "loss")
        )
    )
    return process, out


def test_a_save_on_request_is_of_the_step_it_says_and_the_run_goes_on(running, tiny_run, tmp_path):
    process, out = running
    for saves in (1, 2):
        os.kill(process.pid, signal.SIGUSR1)
        wait_for(lambda: len(numbered(out)) == saves)  # noqa: B023
    step = max(read_metrics(out, "step", "loss"))
    wait_for(lambda: max(read_metrics(out, "step", "loss")) > step + 20)
    process.terminate()
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    content = torch.load(numbered(out)[0], weights_only=True)
    whole = tmp_path / "whole"
    same = ["--lr_decay_iters=100000", "--eval_interval=90000"]
    done = tiny_run(f"--max_iters={content['iter_num']}", *same, out_dir=whole)
    assert done.returncode == 0, done.stderr
    expected = torch.load(next(whole.glob(f"ckpt-*{content['iter_num']}.pt")), weights_only=True)
    for name, weight in expected["model"].items():
        assert torch.equal(content["model"][name], weight), name
    assert len(read_events(out, "saved")) == 3


LEAVES = """
import atexit, os, signal, time, torch
from nanofit import terminal
from nanofit.terminal import run_script
terminal.LEAVING_S = 3600
atexit.register(lambda: (os.kill(os.getpid(), signal.{name}), time.sleep({seconds}), print("left")))
run_script(lambda words: None)
"""


def test_a_request_to_save_that_comes_too_late_ends_nothing():
    script = LEAVES.format(name="SIGUSR1", seconds=0)
    done = processes.run([sys.executable, "-c", script], cwd=PROJECT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "left\n", "")


def test_an_interrupt_that_comes_too_late_waits_for_nothing():
    script = LEAVES.format(name="SIGINT", seconds=3600)
    done = processes.run([sys.executable, "-c", script], cwd=PROJECT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


WITHOUT_ROOM = """
import resource, torch
from nanofit.terminal import InputError, run_script

def main(words):
    used = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
    limit = int(used.split()[1]) * 1024 + 2**20  # a thread's stack takes more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    raise InputError("nothing fits")

run_script(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_without_room_for_a_thread_a_run_still_leaves_with_its_one_line():
    done = processes.run([sys.executable, "-c", WITHOUT_ROOM], cwd=PROJECT)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "error: nothing fits\n")


def numbered(out):
    return sorted(out.glob("ckpt-0*.pt"))
