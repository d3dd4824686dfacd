"""What the storm is sent over: runs and a preparation, and how each of them is known to be whole.

A course is done once undisturbed, and then again and again under faults. What it must come to is
the same bit for bit where the arithmetic is; where micro-batch or processes change, to rounding.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nanofit.run.metrics import has_ended
from tests import processes
from tests.conftest import TINY_MODEL, recorded
from tests.disturb import MOMENTS, Moment
from tests.processes import PROJECT

# The exit codes that a kind of fault may lead to, besides 0.
ENDINGS = {"SIGKILL": {-9}, "full disk": {2}, "full disk, SIGKILL": {-9}}
ENDINGS_OF_RANKS = {  # torchrun ends with 1 for what was killed, whatever its processes said
    "SIGKILL": {-9, 1},
    "SIGKILL of one process": {1},
    "SIGTERM": {1, -15},
    "memory taken": {2, 1},
    "full disk": {2, 1},
    "full disk, SIGKILL": {-9},
}
ENDINGS_OF_PREPARATION = {
    "SIGKILL": {-9},
    "SIGTERM": {-15},
    "SIGINT": {130, -2},  # the second once all is done, and Python takes itself apart
    "full disk": {2},
    "full disk, SIGKILL": {-9, 2},
}
QUIET_S = 1200  # the longest that a launch may take without a sign of life


@dataclass
class Launched:
    """A launch of a course, and where it works."""

    process: subprocess.Popen
    out: Path
    said: Path
    within_s: float  # after its first sign of life, in which it is disturbed
    world: int = 1
    hit: list[str] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        """Those that compute."""
        return processes.children_of(self.process.pid) if self.world > 1 else [self.process.pid]

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout_s: float = QUIET_S) -> int:
        return self.process.wait(timeout_s)


class Course:
    """What all have in common: to be launched, once or as often as it takes."""

    name: str
    disk_mib: int
    moments: tuple[Moment, ...]
    faults: tuple[str, ...]  # kinds, as in storm.py; each as often as it is named
    endings: Mapping[str, set[int]]

    def __init__(self, work: Path):
        self.work, self.whole = work / self.name, work / self.name / "whole"
        self.whole_s = 0.0

    def prepare(self) -> None:
        """Do it undisturbed."""
        self.work.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        self.end(self.launch(self.whole, None))
        self.whole_s = time.monotonic() - started

    def end(self, launched: Launched) -> None:
        """Wait for the end of what nobody disturbs."""
        code = launched.wait()
        processes.end(launched.process)
        assert code == 0, launched.said.read_text()

    def launch(self, out: Path, chance: random.Random | None) -> Launched:
        """Begin it or go on with it; back at its first sign of life."""
        world, command = self.command(out, chance)
        said = self.work / "said"
        with said.open("w") as file:
            process = processes.start(command, cwd=self.work, stdout=file, stderr=file)
        launched = Launched(process, out, said, max(self.whole_s / 6, 1.0), world)
        known = self.signs_of_life(launched)
        processes.wait_for(
            lambda: process.poll() is not None or self.signs_of_life(launched) > known,
            QUIET_S,
            interval_s=0.002,
        )
        return launched

    def command(self, out: Path, chance: random.Random | None) -> tuple[int, list[str | Path]]:
        """The number of processes and the words; by chance, what may differ between launches."""
        raise NotImplementedError

    def signs_of_life(self, launched: Launched) -> int:
        raise NotImplementedError

    def is_whole(self, out: Path) -> bool:
        raise NotImplementedError

    def differences(self, out: Path) -> tuple[float, list[str]]:
        """The largest one that is allowed, and those that are not."""
        raise NotImplementedError

    def counts(self, out: Path) -> dict[str, float]:
        """What it took, at its end."""
        raise NotImplementedError


class Training(Course):
    """A tiny model whose arithmetic no fault changes: bit for bit."""

    steps = 600
    flags = ("--dropout=0.1",)
    disk_mib = 8
    moments = MOMENTS
    faults = (
        *2 * ("SIGKILL",),
        "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGSTOP and SIGCONT", "full disk",
    )  # fmt: skip
    endings = ENDINGS

    def __init__(self, work: Path, dataset: Path):
        super().__init__(work)
        self.dataset = dataset

    def command(self, out: Path, chance: random.Random | None) -> tuple[int, list[str | Path]]:
        places = [f"--dataset={self.dataset}", f"--out_dir={out}"]
        length = [f"--max_iters={self.steps}", "--eval_interval=20", "--save_interval=10"]
        words = [*TINY_MODEL, *length, *places, *self.flags]
        return 1, [sys.executable, PROJECT / "train.py", *words]

    def signs_of_life(self, launched: Launched) -> int:
        records = launched.out / "metrics.jsonl"
        return records.read_bytes().count(b'"kind": "run"') if records.exists() else 0

    def is_whole(self, out: Path) -> bool:
        return self._last(out).exists() and has_ended(out, self.steps)

    def newest(self, out: Path) -> Path | None:
        return max(out.glob("ckpt-0*.pt"), default=None)

    def differences(self, out: Path) -> tuple[float, list[str]]:
        found = []
        if recorded(out) != recorded(self.whole):
            found.append("the curves differ")
        for path in (self._last(out), out / "ckpt-best.pt"):
            one, other = (_read(place / path.name) for place in (out, self.whole))
            differing = [name for name in other["model"] if not _equal(one, other, name)]
            if differing or one["iter_num"] != other["iter_num"]:
                found.append(f"{path.name} differs in {', '.join(differing) or 'its step'}")
        return 0.0, found

    def counts(self, out: Path) -> dict[str, float]:
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        steps = [one["step"] for one in records if one["kind"] == "step"]
        resumed = sum(one.get("name") == "resumed" for one in records)
        shrunk = sum(str(one.get("reason")).startswith("out of memory") for one in records)
        again = len(steps) - len(set(steps))
        return {"resumed": resumed, "steps_done_again": again, "out_of_memory": shrunk}

    def _last(self, out: Path) -> Path:
        return out / f"ckpt-{self.steps:08d}.pt"


class Eager(Training):
    name = "eager"


class Muon(Training):
    """The modern recipe: another optimiser, and a checkpoint from before the decay."""

    name = "modern, Muon"
    flags = ("--arch=modern", "--optimizer=muon", "--muon_steps=5", "--bias=True")
    steps = 300


class Compiled(Training):
    name = "compiled"
    # Else a busy machine may leave the compiled stage again, which is no fault, but other kernels.
    flags = ("--dropout=0.1", "--compile=True", "--compile_after=30", "--deterministic=True")
    steps = 240

    def prepare(self) -> None:
        """Once more at first: only what is compiled for the first time takes a minute."""
        self.work.mkdir(parents=True)
        self.end(self.launch(self.work / "compiling", None))
        super().prepare()


class Rounding(Training):
    """A run whose memory, micro-batch and processes change all the time: to rounding."""

    name = "squeezed"
    steps = 40
    sequences = 32
    flags = tuple(
        "--n_layer=4 --n_embd=128 --block_size=128 --save_interval=3 --eval_interval=8 "
        "--learning_rate=1e-3 --min_lr=1e-4 --autofit=False --memory_limit=4GB".split()
    )
    disk_mib = 160  # five checkpoints, and those that were damaged
    moments = MOMENTS[:3]
    faults = (
        *3 * ("memory taken",),
        "SIGKILL", "SIGKILL of one process", "SIGTERM", "SIGSTOP and SIGCONT", "full disk",
    )  # fmt: skip
    endings = ENDINGS_OF_RANKS
    most_difference = 1e-5  # of a loss or a weight

    def command(self, out: Path, chance: random.Random | None) -> tuple[int, list[str | Path]]:
        _, (python, script, *words) = super().command(out, chance)
        world, passes = (chance.choice((1, 2)), chance.choice((1, 2, 4))) if chance else (1, 1)
        words += [f"--batch_size={self.sequences // passes}"]
        words += [f"--gradient_accumulation_steps={passes}"]
        if chance and chance.random() < 0.25:
            words += ["--autofit=True", f"--memory_limit={chance.choice((800, 1200))}MB"]
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={world}"] * (world > 1)
        return world, [python, *launcher, script, *words]

    def differences(self, out: Path) -> tuple[float, list[str]]:
        found, curves = [], (recorded(out), recorded(self.whole))
        if [line[0] for line in curves[0]] != [line[0] for line in curves[1]]:
            return 0.0, ["the curves have other steps"]
        loss = max(abs(a[1] - b[1]) for a, b in zip(*curves, strict=True))
        one, other = (_read(self._last(place))["model"] for place in (out, self.whole))
        weight = max((one[name] - other[name]).abs().max().item() for name in other)
        if max(loss, weight) > self.most_difference:
            found.append(f"losses differ by up to {loss:.2g}, weights by up to {weight:.2g}")
        return max(loss, weight), found


class Preparation(Course):
    """Bins that are the same byte for byte, whenever and by how many workers they were made."""

    name = "preparation"
    moments = MOMENTS[:2]
    faults = (*3 * ("SIGKILL",), "SIGTERM", "SIGINT", "SIGSTOP and SIGCONT", "full disk")
    endings = ENDINGS_OF_PREPARATION

    def __init__(self, work: Path, shard_mb: int):
        super().__init__(work)
        self.shard, self._shard_mb = self.work / "shard.parquet", shard_mb
        self.disk_mib = 8 + shard_mb

    def prepare(self) -> None:
        script = PROJECT / "data/sample/make_shard.py"
        size = ["--size", f"{self._shard_mb}MB", "--out", self.shard]
        processes.run([sys.executable, script, *size], check=True)
        super().prepare()

    def command(self, out: Path, chance: random.Random | None) -> tuple[int, list[str | Path]]:
        workers = chance.choice((1, 2)) if chance else 2
        words = [self.shard, "--out", out, "--encoder", "tiktoken", "--workers", str(workers)]
        return 1, [sys.executable, PROJECT / "prepare_fineweb.py", *words]

    def signs_of_life(self, launched: Launched) -> int:
        return "documents" in launched.said.read_text()

    def is_whole(self, out: Path) -> bool:
        return (out / "meta.json").exists()

    def newest(self, out: Path) -> None:
        """There is no older state to fall back to."""

    def differences(self, out: Path) -> tuple[float, list[str]]:
        names = sorted(path.name for path in self.whole.iterdir())
        found = [] if names == sorted(path.name for path in out.iterdir()) else ["other files"]
        for name in ("train.bin", "val.bin"):
            if (out / name).read_bytes() != (self.whole / name).read_bytes():
                found.append(f"{name} differs")
        one, other = (json.loads((place / "meta.json").read_text()) for place in (out, self.whole))
        found += [f"{key} differ" for key in ("splits", "sources") if one[key] != other[key]]
        return 0.0, found

    def counts(self, out: Path) -> dict[str, float]:
        return {}


def has_gone_on(course: Course, launched: Launched) -> bool:
    """Whether a preparation went on from where another launch was."""
    return isinstance(course, Preparation) and "continuing after" in launched.said.read_text()


def _read(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def _equal(one: dict, other: dict, name: str) -> bool:
    return torch.equal(one["model"][name], other["model"][name])
