"""Faults, one after the other, until a course is whole."""

import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests import processes
from tests.disturb import flip_a_bit, full_disk, kill, no_larger_files, small_disk
from tests.soak.courses import Course, Launched, has_gone_on
from tests.soak.tally import Tally

DAMAGED = "flipped bit"
DAMAGE = 0.25  # of the pauses between two launches
# A frame of ours in a traceback; torchrun has one of its own for whatever it is sent.
OUR_FRAME = re.compile(r'File "[^"]*(train|prepare_fineweb)\.py", line')


@dataclass(frozen=True)
class Site:
    """What a fault has to do with, besides what is running."""

    course: Course
    disk: Path | None  # a small one, where that can be mounted
    chance: random.Random


def storm(
    course: Course,
    chance: random.Random,
    tally: Tally,
    *,
    most_faults: int,
    can_mount: bool = True,
) -> None:
    """Do a course under so many faults, and compare what it comes to with the undisturbed."""
    place = course.work / f"disk-{tally.courses[course.name]['runs']:.0f}"
    tally.add(course.name, runs=1)
    with small_disk(place, course.disk_mib if can_mount else 0) as is_mounted:
        site = Site(course, place if is_mounted else None, chance)
        started, left = time.monotonic(), most_faults
        while True:
            launched, left = _launch(site, place / "out", tally, left)
            if launched is None:
                return
            if launched.process.returncode == 0 and course.is_whole(place / "out"):
                break
            left = _damage(site, place / "out", tally, left)
        lost_s = time.monotonic() - started - course.whole_s
        tally.add(course.name, seconds_lost=lost_s, **course.counts(place / "out"))
        largest, differences = course.differences(place / "out")
        tally.differed(course.name, largest)
        for difference in differences:
            _keep_evidence(place, course.work)
            tally.problem(course.name, difference)


def _launch(site: Site, out: Path, tally: Tally, left: int) -> tuple[Launched | None, int]:
    """One launch with its faults, and how many are left; None if it ended as it must not."""
    course = site.course
    launched = course.launch(out, site.chance)
    while left and launched.is_running():
        kind = site.chance.choice(course.faults)
        if struck := FAULTS[kind](launched, site):
            launched.hit.append(kind if kind in course.endings else struck)
            tally.struck(course.name, struck)
            left -= 1
    code, said = launched.wait(), launched.said.read_text()
    processes.end(launched.process)  # with what a killed launcher has left
    tally.add(course.name, launches=1, resumed=has_gone_on(course, launched))
    allowed = {0}.union(*(course.endings.get(one, set()) for one in launched.hit))
    if course.is_whole(out):  # a signal that comes when all is done ends what is left at once
        allowed |= {-signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT, 130}
    if code in allowed and not OUR_FRAME.search(said):
        return launched, left
    evidence = _keep_evidence(out.parent, course.work, said)
    after = ", ".join(launched.hit) or "no fault"
    tally.problem(
        course.name, f"exit code {code} after {after}, kept in {evidence}:\n{said[-2000:]}"
    )
    return None, left


def _damage(site: Site, out: Path, tally: Tally, left: int) -> int:
    """Now and then flip a bit of the newest checkpoint, if there is one to fall back to."""
    newest = site.course.newest(out)
    if not left or newest is None or site.chance.random() > DAMAGE:
        return left
    if len(list(out.glob("ckpt-0*.pt"))) < 2:
        return left
    with suppress(OSError):
        flip_a_bit(newest, site.chance.randrange(8 * newest.stat().st_size))
        tally.struck(site.course.name, DAMAGED)
        return left - 1
    return left


def _keep_evidence(place: Path, work: Path, said: str = "") -> Path:
    """What is on a small disk would go with it."""
    kept = work / f"evidence-{time.time_ns()}"
    processes.run(["cp", "-r", place, kept], check=True)
    (kept / "said").write_text(said)
    return kept


# faults: what was done, in words, or nothing if there was nothing left to disturb


def _kill(launched: Launched, site: Site) -> str | None:
    moment = site.chance.choice(site.course.moments)
    is_time = moment(site.chance, launched.out, launched.within_s)
    if launched.world > 1:
        return _kill_all(launched, is_time)
    return f"SIGKILL, {_words(moment)}" if kill(launched.process, is_time) else None


def _kill_all(launched: Launched, is_time: Callable[[], bool]) -> str | None:
    """As a power cut does."""
    while launched.is_running():
        if is_time():
            pids = launched.pids
            for pid in (launched.process.pid, *pids):
                _send(pid, signal.SIGKILL)
            launched.wait()
            return "SIGKILL, of torchrun and all"
        time.sleep(0.001)
    return None


def _kill_one(launched: Launched, site: Site) -> str | None:
    if launched.world == 1 or not _wait(launched, site) or not (pids := launched.pids):
        return None
    _send(site.chance.choice(pids), signal.SIGKILL)
    launched.wait()
    return "SIGKILL, of one process of two"


def _ask(number: signal.Signals) -> Callable[[Launched, Site], str | None]:
    """A request to end."""

    def strike(launched: Launched, site: Site) -> str | None:
        if not _wait(launched, site):
            return None
        _send(launched.process.pid, number)
        launched.wait()
        return number.name

    return strike


def _ask_for_save(launched: Launched, site: Site) -> str | None:
    if not _wait(launched, site):
        return None
    _send(launched.process.pid, signal.SIGUSR1)
    return "SIGUSR1, a save on request"


def _stop(launched: Launched, site: Site) -> str | None:
    """A process stands still for a while, as it does when a machine sleeps."""
    if not _wait(launched, site) or not (pids := launched.pids):
        return None
    pid = site.chance.choice(pids)
    _send(pid, signal.SIGSTOP)
    time.sleep(site.chance.uniform(0.05, 1))
    _send(pid, signal.SIGCONT)
    return "SIGSTOP and SIGCONT"


def _fill_disk(launched: Launched, site: Site) -> str | None:
    """The disk is full for a while; in one case of three the process is killed meanwhile."""
    if not _wait(launched, site):
        return None
    is_killed = launched.world == 1 and site.chance.random() < 1 / 3
    full = full_disk(site.disk) if site.disk else no_larger_files(launched.pids)
    with full:
        due = time.monotonic() + site.chance.uniform(0.1, 1.5)
        while launched.is_running() and time.monotonic() < due:
            time.sleep(0.01)
        if is_killed and kill(launched.process, lambda: True):
            launched.hit.append("full disk, SIGKILL")
            return "full disk, and SIGKILL"
    return "full disk" if site.disk else "no file may grow"


def _take_memory(launched: Launched, site: Site) -> str | None:
    """Leave a process less than its step takes: half of what it does, or all but nothing."""
    if not _wait(launched, site) or not (pids := launched.pids):
        return None
    pid = site.chance.choice(pids)
    sizes = []
    due = time.monotonic() + 1.5
    while time.monotonic() < due and (size := _data_bytes(pid)):
        sizes.append(size)
    if not sizes or not launched.is_running():
        return None
    left = min(sizes) + site.chance.uniform(0.1, 0.9) * (max(sizes) - min(sizes))
    with suppress(ProcessLookupError):
        _limit_data(pid, int(left))
        return "memory taken"
    return None


def _data_bytes(pid: int) -> int:
    """What a process holds in data as Linux limits them; 0 if it has ended."""
    with suppress(OSError, TypeError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"VmData:\s*(\d+)", status)[1]) * 1024
    return 0


def _limit_data(pid: int, limit_bytes: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit_bytes, hard))


FAULTS: dict[str, Callable[[Launched, Site], str | None]] = {
    "SIGKILL": _kill,
    "SIGKILL of one process": _kill_one,
    "SIGTERM": _ask(signal.SIGTERM),
    "SIGINT": _ask(signal.SIGINT),
    "SIGHUP": _ask(signal.SIGHUP),
    "SIGUSR1": _ask_for_save,
    "SIGSTOP and SIGCONT": _stop,
    "full disk": _fill_disk,
    "memory taken": _take_memory,
}


def _wait(launched: Launched, site: Site) -> bool:
    """Let it work for a while; False if it was over before."""
    due = time.monotonic() + site.chance.uniform(0, launched.within_s)
    while launched.is_running() and time.monotonic() < due:
        time.sleep(0.005)
    return launched.is_running()


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _words(moment: Callable) -> str:
    return moment.__name__.replace("_", " ")
