"""Two runs in one folder: the second is refused, whoever the first is and however it ends."""

import os
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_metrics, read_records
from tests.processes import wait_for

LONG = "--max_iters=100000"


@pytest.fixture
def first(tiny_dataset, tmp_path):
    """A run that goes on for long, alone or of two processes."""

    def start(ranks: int = 1):
        words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={tmp_path / 'out'}", LONG]
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] * (ranks > 1)
        command = [sys.executable, *launcher, PROJECT / "train.py", *words]
        with (tmp_path / "said").open("w") as said:
            process = processes.start(command, cwd=tmp_path, stdout=said, stderr=said)
        wait_for(lambda: "step 6 " in (tmp_path / "said").read_text())
        return process

    return start


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_second_run_is_refused_and_the_first_goes_on(first, tiny_run, tmp_path, ranks):
    process = first(ranks)
    before = len(read_records(tmp_path / "out", "step"))
    second = tiny_run(LONG)
    assert second.returncode == 2
    [told] = second.stderr.splitlines()
    assert told.startswith(f"error: {tmp_path / 'out'} is in use by process ")
    assert f" on {socket.gethostname()} since " in told and "train.py" in told
    holder = int(told.split("process ")[1].split()[0])
    assert ranks > 1 or holder == process.pid
    assert Path(f"/proc/{holder}").exists()
    wait_for(lambda: len(read_records(tmp_path / "out", "step")) > before)
    assert len(read_records(tmp_path / "out", "run")) == 1


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow)])
def test_several_processes_are_refused_with_one_line(first, tiny_run, ranks):
    first()
    second = tiny_run(LONG, ranks=ranks)
    assert second.returncode != 0
    assert second.stderr.count("is in use by process") == 1


def test_the_lock_ends_with_its_process(first, tiny_run, tmp_path):
    process = first()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (tmp_path / "out/lock").exists()
    steps = read_metrics(tmp_path / "out", "step", "loss")
    later = tiny_run(f"--max_iters={max(steps) + 2}")
    assert later.returncode == 0, later.stderr
    assert not (tmp_path / "out/lock").exists()


def test_an_evaluation_alone_may_look_at_a_run(first, tiny_run):
    first()
    looked = tiny_run(LONG, "--eval_only=True")
    assert looked.returncode == 0, looked.stderr
    assert "validation loss" in looked.stdout


@pytest.mark.skipif(not shutil.which("flock"), reason="needs util-linux")
def test_the_lock_is_one_that_other_programs_know(first, tmp_path):
    process = first()
    taken = ["flock", "--nonblock", tmp_path / "out/lock", "true"]
    assert processes.run(taken).returncode == 1
    process.kill()
    process.wait()
    assert processes.run(taken).returncode == 0
