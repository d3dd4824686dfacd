"""What disturbs a job, for real: signals at chosen moments, a full disk, a flipped bit.

A moment is a function of a seeded chance, the job's folder and the seconds within which it is to
come; it answers with another one, that says whether it has come.
"""

import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Moment = Callable[[random.Random, Path, float], Callable[[], bool]]


def at_a_random_time(chance: random.Random, out: Path, within_s: float) -> Callable[[], bool]:
    due = time.monotonic() + chance.uniform(0, within_s)
    return lambda: time.monotonic() > due


def in_mid_save(chance: random.Random, out: Path, within_s: float) -> Callable[[], bool]:
    """While a temporary file is there, which it is until the rename."""
    return lambda: any(out.glob("*.tmp"))


def after_a_rename(chance: random.Random, out: Path, within_s: float) -> Callable[[], bool]:
    """Before the folder is known to be on the disk, or older checkpoints are dropped."""
    before = {path.name for path in out.glob("ckpt-*.pt")}
    return lambda: any(path.name not in before for path in out.glob("ckpt-*.pt"))


def in_an_evaluation(chance: random.Random, out: Path, within_s: float) -> Callable[[], bool]:
    """A checkpoint of such a step is being written while it is evaluated."""
    return lambda: any(out.glob("ckpt-*[02468]0.pt.tmp"))


def in_setting_up(chance: random.Random, out: Path, within_s: float) -> Callable[[], bool]:
    """Before the first step of a launch: reading the checkpoint, compiling."""
    due = time.monotonic() + chance.uniform(0, 0.3)
    return lambda: time.monotonic() > due


MOMENTS = (at_a_random_time, in_mid_save, after_a_rename, in_an_evaluation, in_setting_up)


def kill(process: subprocess.Popen, is_time: Callable[[], bool]) -> bool:
    """Kill it when it is time; False if it was over before."""
    while process.poll() is None:
        if is_time():
            os.kill(process.pid, signal.SIGKILL)
            return process.wait() == -signal.SIGKILL
        time.sleep(0.0005)
    return False


def obey_modes() -> None:
    """For a child's preexec_fn: root's as well asks what it may read, write and enter."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which an exec drops
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def flip_a_bit(path: Path, number: int | None = None) -> None:
    """Change one bit of a file; without a number one in its middle."""
    content = bytearray(path.read_bytes())
    byte, bit = (len(content) // 2, 0) if number is None else divmod(number, 8)
    content[byte] ^= 1 << bit
    path.write_bytes(content)


@contextmanager
def small_disk(place: Path, mib: int) -> Iterator[bool]:
    """A file system of a few megabytes at `place`; False where nobody may mount one."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", place]
    try:
        if os.name == "posix" and shutil.which("mount"):
            subprocess.run(command, capture_output=True)
        yield place.is_mount()
    finally:
        if place.is_mount():
            subprocess.run(["umount", "--lazy", place], check=True)


def fill(path: Path) -> None:
    """Write until there is no room for another byte."""
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
    with suppress(OSError):
        while os.write(descriptor, bytes(2**16)):
            pass
    with suppress(OSError):
        while os.write(descriptor, bytes(512)):
            pass
    os.close(descriptor)


@contextmanager
def full_disk(place: Path) -> Iterator[None]:
    """No room for another byte on a small disk, and then as much as before."""
    fill(place / "filler")
    try:
        yield
    finally:
        (place / "filler").unlink()


@contextmanager
def no_larger_files(pids: list[int]) -> Iterator[None]:
    """No file of some processes may grow: what is left of a full disk where none can be mounted."""
    limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
    for pid, (_, hard) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        for pid, limit in limits.items():
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
