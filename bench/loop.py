"""What a step costs besides forward, backward and optimiser, and how fast sequences are read.

    python bench/loop.py [--quick]

Both are measured beside nanoGPT's way, on the same bins and in turns. Steps are those of the demo,
each run's own: ours with all that train.py does, nanoGPT's with its loop and its batches around the
same model, loss and optimiser. Seconds are of the CPU, of all threads and with one to compute, so
that reading ahead counts and a busy machine matters little.

Sequences are read from a file that the system has been told to forget before each round.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # what computes is told from what reads by its thread
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn

import train
from bench.figures import Figure, record
from model import GPT
from nanofit.data.loader import TrainSequences
from nanofit.data.tokens import Bins
from nanofit.files import PROJECT
from nanofit.learning.optim import build_optimizer, lr_at
from nanofit.learning.undo import UpdateUndo
from nanofit.machine.device import Device, describe_device
from nanofit.machine.dist import Ranks
from nanofit.outlook.forecast import PUBLISHED_RUNS
from nanofit.run.metrics import Log
from nanofit.run.signals import Requests
from nanofit.settings.config import Settings, load_config
from nanofit.terminal import run_script

OURS, NANOGPTS = "ours", "nanoGPT's way"
WARM_UP = 5  # steps that do not count
MOST_OVERHEAD = 0.01  # of a step
LEAST_SPEED = 50  # times what a card consumes
BLOCK, SEQUENCES = 1024, 16
COMMAND = "make bench-loop"


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps, a smaller file")
    parser.add_argument("--part", choices=("steps", "reading"), help="this alone")
    asked, flags = parser.parse_known_args(argv)
    torch.set_num_threads(1)
    if asked.part != "reading":
        tell_steps(40 if asked.quick else 200, flags)
    if asked.part != "steps":
        tell_reading(million_tokens=50 if asked.quick else 500, rounds=3)


class Account:
    """CPU seconds of a way's steps, and of these what is forward, backward and optimiser."""

    open: "Account"  # of the way whose step it is

    def __init__(self):
        self.steps, self.all_s, self.work_s = -WARM_UP, 0.0, 0.0
        self.began_s = self.working_s = 0.0  # of the present step

    def begin(self) -> None:
        """A step of this way begins."""
        Account.open, self.working_s, self.began_s = self, 0.0, time.process_time()

    def end(self) -> None:
        seconds, self.steps = time.process_time() - self.began_s, self.steps + 1
        if self.steps > 0:
            self.all_s, self.work_s = self.all_s + seconds, self.work_s + self.working_s

    @property
    def step_s(self) -> float:
        return self.all_s / self.steps

    @property
    def overhead_s(self) -> float:
        return (self.all_s - self.work_s) / self.steps


def tell_steps(steps: int, flags: Sequence[str]) -> None:
    """Let both loops run, a step of one after a step of the other."""
    ways = measure_steps(steps, flags)
    print("| way | ms a step | besides forward, backward, optimiser, ms | share |")
    print("|---|--:|--:|--:|")
    for way, one in ways.items():
        told = f"{1e3 * one.step_s:.1f} | {1e3 * one.overhead_s:.3f}"
        print(f"| {way} | {told} | {one.overhead_s / one.step_s:.2%} |")
    ours, nanogpts = ways[OURS], ways[NANOGPTS]
    share = 100 * ours.overhead_s / ours.step_s
    name = "CPU time of a step besides forward, backward and optimiser"
    of_both = {"ours": 1e3 * ours.overhead_s, "other": 1e3 * nanogpts.overhead_s}
    record(
        "loop",
        [
            Figure(f"{name}, the demo", **of_both, of=NANOGPTS, unit="ms"),
            Figure(f"{name}, share", share, 100 * MOST_OVERHEAD, of="limit", unit="%"),
        ],
        command=COMMAND,
        conditions=f"config/demo.py, eager, {ours.steps} steps of each in turns",
    )


def measure_steps(steps: int, flags: Sequence[str]) -> dict[str, Account]:
    ways = {OURS: Account(), NANOGPTS: Account()}
    with tempfile.TemporaryDirectory() as folder, counted_work():
        never = ["--eval_interval=1000000", "--decay_lr=False", "--compile=False"]
        never.append(f"--max_iters={steps + WARM_UP}")
        settings = load_config(
            ["config/demo.py", *never, f"--out_dir={folder}/out", "--sample_prompts=", *flags]
        )
        nanogpts = nanogpts_steps(settings)
        with in_turns(ways, lambda: next(nanogpts)):
            train.train(settings, Ranks(), Requests())
    return ways


@contextmanager
def in_turns(ways: dict[str, Account], other: Callable[[], None]) -> Iterator[None]:
    """While our run goes on, have a step of the other after each of its own."""
    told = Log.stepped

    def stepped(log: Log, *values: Any) -> None:
        told(log, *values)
        ways[OURS].end()
        ways[NANOGPTS].begin()
        other()
        ways[NANOGPTS].end()
        ways[OURS].begin()

    ways[OURS].begin()
    Log.stepped = stepped
    try:
        yield
    finally:
        Log.stepped = told


@contextmanager
def counted_work() -> Iterator[None]:
    """Have forward, backward and optimiser counted for the way whose step it is."""
    places = [
        (GPT, "__call__", 1),
        (Tensor, "backward", 1),
        (nn.utils, "clip_grad_norm_", 1),
        (torch.amp.GradScaler, "unscale_", 1),
        (torch.amp.GradScaler, "step", 1),
        (UpdateUndo, "_remember", -1),  # within the optimiser's step, and no part of it
        (torch.optim.Optimizer, "zero_grad", 1),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    for place, name, sign in places:
        setattr(place, name, counted(getattr(place, name), sign))
    try:
        yield
    finally:
        for place, name, function in before:
            setattr(place, name, function)


def counted(function: Callable, sign: int) -> Callable:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.thread_time()
        result = function(*args, **kwargs)
        Account.open.working_s += sign * (time.thread_time() - started)
        return result

    return call


def nanogpts_steps(settings: Settings) -> Iterator[None]:
    """Its loop, step by step: the next batch is drawn after the forward pass of the present one."""
    shape, learn, run = settings
    device = describe_device("cpu", "float32")
    torch.manual_seed(learn.seed)
    model, scaler = GPT(shape), device.grad_scaler()
    optimizer = build_optimizer(model, learn)
    file, step, printed = run.data_dir / "train.bin", 0, time.time()
    idx, targets = nanogpts_batch(file, learn.batch_size, shape.block_size)
    while True:
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, learn) * group.get("rate", 1.0)
        for _ in range(learn.gradient_accumulation_steps):
            loss = model(idx, targets) / learn.gradient_accumulation_steps
            idx, targets = nanogpts_batch(file, learn.batch_size, shape.block_size)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), learn.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        now = time.time()
        if step % run.log_interval == 0:
            told = f"{NANOGPTS}, iter {step}: loss {loss.item():.4f}, {now - printed:.2f} s"
            print(told, file=sys.stderr)
        step, printed = step + 1, now
        yield


def nanogpts_batch(file: Path, batch_size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Windows at random places of a file that is opened anew for each batch."""
    data = np.memmap(file, dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()

    def windows(shift: int) -> Tensor:
        parts = (data[at + shift : at + shift + block_size] for at in starts)
        return torch.stack([torch.from_numpy(part.astype(np.int64)) for part in parts])

    return windows(0), windows(1)


def tell_reading(*, million_tokens: int, rounds: int) -> None:
    """Tokens per second of both loaders, from a file that is not in memory."""
    speeds: dict[str, list[float]] = {OURS: [], NANOGPTS: []}
    with tempfile.TemporaryDirectory(dir=PROJECT) as folder:  # not where files may be in memory
        file = Path(folder) / "train.bin"
        write_bin(file, million_tokens)
        for _ in range(rounds):
            for way, read in (OURS, read_ours), (NANOGPTS, read_nanogpts):
                forget(file)
                speeds[way].append(read(file))
    ours, nanogpts = (statistics.median(one) for one in speeds.values())
    card, _ = PUBLISHED_RUNS
    limit = LEAST_SPEED * card.tokens_per_s
    print("\n| loader, cold file | M tokens/s | × what a 4070 consumes |\n|---|--:|--:|")
    for way, speed in zip(speeds, (ours, nanogpts), strict=True):
        print(f"| {way} | {speed / 1e6:.2f} | {speed / card.tokens_per_s:.0f} |")
    name = f"tokens a second read from a cold file, block {BLOCK}"
    shared = {"unit": "M", "is_less_better": False}
    record(
        "loop",
        [
            Figure(name, ours / 1e6, nanogpts / 1e6, of=NANOGPTS, **shared),
            Figure(
                f"{name}: 50 × what a 4070 consumes", ours / 1e6, limit / 1e6, "limit", **shared
            ),
        ],
        command=COMMAND,
        conditions=f"{million_tokens}M tokens, medians of {rounds} rounds in turns, by the wall",
    )


def write_bin(file: Path, million_tokens: int) -> None:
    tokens = np.random.default_rng(0).integers(50257, size=1_000_000, dtype=np.uint16)
    with file.open("wb") as out:
        for _ in range(million_tokens):
            tokens.tofile(out)
        out.flush()
        os.fsync(out.fileno())  # what is not on the disk yet cannot be forgotten


def forget(file: Path) -> None:
    """Have the system drop what it holds of a file; where it cannot, it stays warm."""
    if not hasattr(os, "posix_fadvise"):
        return
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ours(file: Path, batches: int = 60) -> float:
    """Tokens per second, as a step gets them."""
    device: Device = describe_device("cpu", "float32")
    sequences = TrainSequences(
        Bins([file]), BLOCK, 50304, device, sequences_per_step=batches * SEQUENCES, seed=1
    )
    started = time.perf_counter()
    for _ in sequences.micro_batches(0, SEQUENCES, Ranks()):
        pass
    return batches * SEQUENCES * BLOCK / (time.perf_counter() - started)


def read_nanogpts(file: Path, batches: int = 60) -> float:
    torch.manual_seed(1)
    started = time.perf_counter()
    for _ in range(batches):
        nanogpts_batch(file, SEQUENCES, BLOCK)
    return batches * SEQUENCES * BLOCK / (time.perf_counter() - started)


if __name__ == "__main__":
    run_script(main)
