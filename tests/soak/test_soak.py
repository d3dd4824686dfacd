"""The soak itself: it runs, and it sees what it is there to see."""

import shutil
import signal
import sys
from pathlib import Path

import pytest

from nanofit.terminal import Progress
from tests import processes
from tests.conftest import run_tiny
from tests.disturb import flip_a_bit, small_disk
from tests.processes import PROJECT
from tests.soak.courses import Eager, Preparation, Rounding
from tests.soak.growth import Look, judge
from tests.soak.storm import FAULTS
from tests.soak.tally import Tally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
HELD = {"memory_mib": 300.0, "files": 7, "threads": 2}


@pytest.fixture
def tally():
    return Tally(Progress("soak", 60, quiet=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("courses", "more"),
    [(["eager", "preparation"], []), (["squeezed"], ["--without_mounts"])],
    ids=["small disk", "no mounts"],
)
def test_a_short_storm_is_told_and_finds_no_difference(courses, more):
    short = "--minutes 0 --faults 2 --shard_mb 8 --growth_steps 100 --seed 1".split()
    words = [sys.executable, "-m", "tests.soak", *short, "--only", *courses, *more]
    done = processes.run(words, cwd=PROJECT, timeout_s=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1 " in done.stdout and "no difference in" in done.stdout
    assert all(f"| {name} | 1 |" in done.stdout for name in courses)
    assert ("NO SMALL DISK" in done.stdout) == bool(more)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_soak_that_is_ended_leaves_no_disk_mounted(tmp_path, number):
    if not can_mount(tmp_path):
        pytest.skip("a small disk needs the right to mount one")
    words = "--only eager --growth_steps 20 --seed 1".split()
    soak = processes.start([sys.executable, "-m", "tests.soak", *words], cwd=PROJECT)
    work = soak.stdout.readline().split()[-1]
    # Not while it starts a process: Python may lose what is raised then.
    processes.wait_for(Path(work, "eager/disk-0/out/metrics.jsonl").exists)
    soak.send_signal(number)
    assert soak.wait(180) == 130
    assert work not in Path("/proc/mounts").read_text()
    shutil.rmtree(work)


def can_mount(folder: Path) -> bool:
    with small_disk(folder / "probe", mib=1) as is_mounted:
        return is_mounted


@pytest.mark.slow
def test_a_run_that_came_to_something_else_is_seen(tiny_dataset, tmp_path):
    course, out = Eager(tmp_path, tiny_dataset), tmp_path / "out"
    course.whole, course.steps = tmp_path / "whole", 12
    assert run_tiny(tiny_dataset, out_dir=course.whole).returncode == 0
    shutil.copytree(course.whole, out)
    assert course.is_whole(out) and course.differences(out) == (0.0, [])
    shutil.rmtree(out)
    assert run_tiny(tiny_dataset, "--seed=2", out_dir=out).returncode == 0
    found = " ".join(course.differences(out)[1])
    assert "the curves differ" in found and "ckpt-00000012.pt differs" in found


@pytest.mark.slow
def test_bins_that_came_to_something_else_are_seen(tmp_path):
    course, out = Preparation(tmp_path, shard_mb=1), tmp_path / "out"
    course.work.mkdir()
    course.prepare()
    shutil.copytree(course.whole, out)
    assert course.differences(out) == (0.0, [])
    flip_a_bit(out / "train.bin")
    assert course.differences(out) == (0.0, ["train.bin differs"])


@pytest.mark.parametrize(
    ("grown", "told"),
    [
        ({}, None),
        ({"memory_mib": 0.02}, "memory, MiB grew from"),
        ({"files": 0.1}, "files grew from"),
        ({"threads": 0.1}, "threads grew from"),
    ],
)
def test_what_a_process_keeps_of_each_evaluation_is_seen(tally, grown, told):
    looks = [
        Look(step, *(start + grown.get(name, 0) * step for name, start in HELD.items()))
        for step in range(300)
    ]
    table = judge(looks, tally)
    assert table.startswith("| held |")
    assert len(tally.problems) == bool(told)
    assert all(told in problem for problem in tally.problems)


def test_every_fault_of_a_course_is_there():
    named = {kind for course in (Eager, Rounding, Preparation) for kind in course.faults}
    assert named == set(FAULTS)
