"""A disk that takes nothing, a folder that is removed: training goes on, and nothing is lost."""

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_events, read_metrics
from tests.disturb import full_disk, small_disk
from tests.processes import TIMEOUT_S, wait_for

LONG = ["--max_iters=1000", "--eval_interval=50", "--save_interval=25"]


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", mib=3) as is_mounted:
        if not is_mounted:
            pytest.skip("a small disk needs the right to mount one")
        yield tmp_path / "disk"


@pytest.fixture
def running(tiny_dataset, tmp_path):
    """Start a run of some seconds in a folder."""

    def start(out: Path):
        words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}", *LONG]
        with (tmp_path / "said").open("w") as said:
            command = [sys.executable, PROJECT / "train.py", *words]
            process = processes.start(command, cwd=tmp_path, stdout=said, stderr=said)
        wait_for(lambda: "saved" in text(tmp_path), interval_s=0.005)
        return process

    return start


def text(tmp_path: Path) -> str:
    return (tmp_path / "said").read_text()


def read(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def newest_in(out: Path) -> tuple[Path, dict]:
    """A run's newest checkpoint; while one looks at it, it may become too old to be kept."""
    while True:
        path = max(out.glob("ckpt-0*.pt"))
        with suppress(FileNotFoundError):
            return path, read(path)


def weights(out: Path) -> dict:
    return read(out / "ckpt-00001000.pt")["model"]


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_no_checkpoint_and_no_step(running, disk, tiny_run, tmp_path):
    out = disk / "out"
    process = running(out)
    newest, good = newest_in(out)
    with full_disk(disk):
        wait_for(lambda: "NOT SAVED" in text(tmp_path), interval_s=0.005)
        full_at = int(re.findall(r"step (\d+)", text(tmp_path))[-1])
        if newest.exists():  # and no newer three were written before the disk was full
            assert_equal(read(newest)["model"], good["model"])
    assert process.wait(TIMEOUT_S) == 0, text(tmp_path)
    after = [event["step"] for event in read_events(out, "saved") if event["step"] > full_at]
    assert after, "it was not tried again"
    whole = tmp_path / "whole"
    assert tiny_run(*LONG, out_dir=whole).returncode == 0
    assert_equal(weights(out), weights(whole))
    assert list(read_metrics(out, "step", "loss")) == list(range(1000))


@contextmanager
def read_only(out: Path, pid: int) -> Iterator[None]:
    """What has the folder's name is on a disk that takes nothing."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", out], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", out], check=True)


@contextmanager
def no_permission(out: Path, pid: int) -> Iterator[None]:
    """To add files; the administrator, to whom no mode says that, included."""
    subprocess.run(["chattr", "+i", out], check=True)
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", out], check=True)


@contextmanager
def quota(out: Path, pid: int) -> Iterator[None]:
    """No file may grow beyond what metrics.jsonl has by now."""
    free = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (20_000, free[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, free)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounts disks")
@pytest.mark.parametrize("refused", [read_only, no_permission, quota])
def test_a_folder_that_takes_nothing_for_a_while_costs_no_checkpoint_and_no_step(
    running, tiny_run, tmp_path, refused
):
    out, whole = tmp_path / "out", tmp_path / "whole"
    process = running(out)
    with refused(out, process.pid):
        wait_for(lambda: "NOT SAVED" in text(tmp_path), interval_s=0.005)
    assert process.wait(TIMEOUT_S) == 0, text(tmp_path)
    assert text(tmp_path).count("metrics.jsonl could not be written") <= 1
    assert "Traceback" not in text(tmp_path)
    assert tiny_run(*LONG, out_dir=whole).returncode == 0
    assert_equal(weights(out), weights(whole))
    assert list(read_metrics(out, "step", "loss")) == list(range(1000))


@pytest.mark.slow
def test_a_folder_that_is_removed_is_made_again(running, tiny_run, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    process = running(out)
    shutil.rmtree(out, ignore_errors=True)
    assert process.wait(TIMEOUT_S) == 0, text(tmp_path)
    assert "was removed; begun anew" in text(tmp_path)
    assert tiny_run(*LONG, out_dir=whole).returncode == 0
    assert_equal(weights(out), weights(whole))
    recorded, expected = (read_metrics(place, "step", "loss") for place in (out, whole))
    assert recorded and recorded.items() <= expected.items()
    later = tiny_run(*LONG, "--max_iters=1010", out_dir=out)
    assert later.returncode == 0, later.stderr


FULL_IN_BETWEEN = """
import os, resource, sys
{importing}
say = {say}
say("one")
free = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(1).st_size + 6, free[1]))
say("two"), say("three")
print(os.fstat(1).st_size, file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, free)
say("four")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file's size")
@pytest.mark.parametrize(
    ("importing", "say"),
    [
        ("from nanofit.terminal import Progress", "Progress('training', 1).line"),
        ("from nanofit.machine.dist import Ranks", "Ranks().say"),
    ],
    ids=["progress", "ranks"],
)
def test_lines_that_a_full_disk_did_not_take_come_once_with_the_next(tmp_path, importing, say):
    """The disk is full in the middle of a line, of which the rest comes later."""
    command = [sys.executable, "-c", FULL_IN_BETWEEN.format(importing=importing, say=say)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (tmp_path / "said").open("w") as said:
        child = processes.start(command, cwd=PROJECT, env=buffered, stdout=said)
        _, errors = child.communicate()
    assert (child.returncode, errors) == (0, f"{len('one.two.th')}\n")  # then it was full
    assert text(tmp_path) == "one\ntwo\nthree\nfour\n"


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
