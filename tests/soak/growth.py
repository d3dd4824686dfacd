"""Whether a process grows as it trains: memory, open files and threads over thousands of steps."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests import processes
from tests.conftest import TINY_MODEL
from tests.processes import PROJECT
from tests.soak.courses import QUIET_S
from tests.soak.tally import Tally

WARM_UP = 0.2  # of the run: libraries load what they need when it is first needed
MOST_GROWTH = {"memory_mib": 2.0, "files": 1, "threads": 1}  # one more is a save on its way
LOOK_EVERY_S = 0.05
FLAGS = (
    "--eval_interval=100 --save_interval=50 --sample_interval=500 --report=True --log_interval=10"
).split()


@dataclass(frozen=True)
class Look:
    step: int
    memory_mib: float
    files: int
    threads: int


def watch_growth(work: Path, dataset: Path, steps: int, tally: Tally) -> str:
    """Train undisturbed and tell what it held, by thirds; a problem if that has grown."""
    work.mkdir()
    words = [*TINY_MODEL, *FLAGS, f"--max_iters={steps}"]
    places = [f"--dataset={dataset}", f"--out_dir={work / 'out'}"]
    with (work / "said").open("w") as said:
        command = [sys.executable, PROJECT / "train.py", *words, *places]
        process = processes.start(command, cwd=work, stdout=said, stderr=said)
    looks, deadline = [], time.monotonic() + QUIET_S
    while process.poll() is None and time.monotonic() < deadline:
        step = _newest_step(work / "out" / "metrics.jsonl")
        if step is not None and (look := _look(process.pid, step)):
            if not looks or step > looks[-1].step:
                deadline = time.monotonic() + QUIET_S
            looks.append(look)
        tally.show()
        time.sleep(LOOK_EVERY_S)
    code = process.poll()
    processes.end(process)
    if code != 0:
        tally.problem("growth", f"exit code {code}:\n{(work / 'said').read_text()[-2000:]}")
    return judge([look for look in looks if look.step >= WARM_UP * steps], tally)


def judge(looks: list[Look], tally: Tally) -> str:
    """A table of what was held in the first and in the last third of the looks."""
    third = len(looks) // 3
    lines = ["| held | first third | last third | in 1,000 steps |", "|---|--:|--:|--:|"]
    for name, most in MOST_GROWTH.items():
        values = np.array([getattr(look, name) for look in looks], dtype=float)
        first, last = np.median(values[:third]), np.median(values[-third:])
        slope = 1000 * np.polyfit([look.step for look in looks], values, 1)[0]
        label = name.replace("memory_mib", "memory, MiB")
        lines.append(f"| {label} | {first:.2f} | {last:.2f} | {slope:+.3f} |")
        if last - first > most:
            tally.problem("growth", f"{label} grew from {first:.2f} to {last:.2f}")
    steps = f"{looks[0].step:,} to {looks[-1].step:,}"
    return "\n".join([*lines, "", f"{len(looks):,} looks from step {steps}"])


def _look(pid: int, step: int) -> Look | None:
    """None if it has just ended."""
    place = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines())
        files = len(list((place / "fd").iterdir()))
        return Look(step, int(status["VmRSS"].split()[0]) / 1024, files, int(status["Threads"]))
    except (OSError, KeyError, ValueError):
        return None


def _newest_step(records: Path) -> int | None:
    """That of the last whole line."""
    if not records.exists():
        return None
    with records.open("rb") as file:
        file.seek(max(records.stat().st_size - 4096, 0))
        lines = file.read().split(b"\n")[:-1]
    found = lines[-1].partition(b'"step": ')[2].partition(b",")[0] if lines else b""
    return int(found) if found.isdigit() else None
