"""An hour of trouble: whatever happens to it, what is trained and prepared comes out the same.

    make soak MINUTES=60 SEED=1
    python -m tests.soak --minutes 60 --seed 1

Runs and a preparation, each done once undisturbed, are done again under kills, stops, full disks,
memory taken away, flipped bits, other micro-batches and numbers of processes. Exit code 1 if
anything differs in the end, or if a process that trains in peace holds more and more.
"""

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

from nanofit.terminal import Progress, duration, run_script
from tests import processes
from tests.conftest import write_tiny_dataset
from tests.disturb import small_disk
from tests.soak.courses import Compiled, Course, Eager, Muon, Preparation, Rounding
from tests.soak.growth import watch_growth
from tests.soak.storm import storm
from tests.soak.tally import Tally

NAMES = [kind.name for kind in (Eager, Rounding, Preparation, Muon, Compiled)]
EVERY_S = 30.0  # between plain lines


def main(argv: Sequence[str]) -> int:
    options = read_options(argv)
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever ends it leaves no disk mounted
        signal.signal(number, signal.default_int_handler)
    work = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"seed {options.seed}  minutes {options.minutes:g}  work {work}", flush=True)
    try:
        tally, growth = soak(work, options)
    finally:
        processes.end_all()
    print(f"\n{tally.tables()}\n\n{growth}\n\n{tally.ending()}")
    if tally.problems:
        print(f"what was found is kept in {work}; --seed {options.seed} begins the same storm")
        return 1
    shutil.rmtree(work)
    return 0


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="how long new runs are begun (60)")
    add("--seed", type=int, default=int(time.time()), help="of the storm (default: the time)")
    add("--growth_steps", type=int, default=10_000, help="of the run that is watched (10,000)")
    add("--shard_mb", type=int, default=60, help="of text to prepare (60)")
    add("--faults", type=int, default=12, help="that a course suffers each time (12)")
    add("--only", nargs="+", metavar="COURSE", choices=NAMES, help="not all")
    add("--without_mounts", action="store_true", help="as where one may not mount a small disk")
    return parser.parse_args(argv)


def soak(work: Path, options: argparse.Namespace) -> tuple[Tally, str]:
    """The storm over all courses in turn, until the time is over; each of them once at least."""
    with Progress("soak", round(60 * options.minutes), every_s=EVERY_S) as progress:
        tally, can_mount = Tally(progress), not options.without_mounts and has_mounts(work)
        if not can_mount:
            tally.line("NO SMALL DISK: nobody may mount one here; instead no file may grow")
        dataset = work / "tiny"
        dataset.mkdir()
        courses = undisturbed(work, write_tiny_dataset(dataset), options, tally)
        growth = watch_growth(work / "growth", dataset, options.growth_steps, tally)
        tally.line(growth)
        for number, course in enumerate(cycle(courses)):
            is_over = tally.seconds > 60 * options.minutes
            if is_over and number >= len(courses):
                return tally, growth
            # A number of its own for each run: it does not hang on how the ones before went.
            chance = random.Random(f"{options.seed} {number}")
            storm(course, chance, tally, most_faults=options.faults, can_mount=can_mount)
    raise AssertionError("no course")


def undisturbed(
    work: Path, dataset: Path, options: argparse.Namespace, tally: Tally
) -> list[Course]:
    """All courses, each done once in peace."""
    courses = [
        Eager(work, dataset),
        Rounding(work, dataset),
        Preparation(work, options.shard_mb),
        Muon(work, dataset),
        Compiled(work, dataset),
    ]
    courses = [course for course in courses if course.name in (options.only or NAMES)]
    for course in courses:
        course.prepare()
        tally.line(f"{course.name}: undisturbed in {duration(course.whole_s)}")
    return courses


def has_mounts(work: Path) -> bool:
    with small_disk(work / "probe", mib=1) as is_mounted:
        return is_mounted


if __name__ == "__main__":
    run_script(main)
