"""How autofit finds a micro-batch, beside accelerate, Lightning and Composer's rule.

    python bench/autofit.py [--limits 8] [--rechecks 20] [--peer_rechecks 5] [--folder FOLDER]

One small model on one CPU thread under limits of the process' data, so that memory really runs
out. The limits leave rooms in geometric order, from a few sequences to about a hundred. Each way
runs in a process of its own; all get the same room beyond what their process holds before there
is a model, so that no library pays for its imports. What truly fits is found by trying every size
around the edge. Answers are kept in the folder; given that of an interrupted bench, it goes on.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from bench.figures import Figure, record
from model import GPT
from nanofit.data.loader import random_micro_batches
from nanofit.fit.fit import find_fit
from nanofit.fit.trial import TrialResult, run_trial
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import train_step
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.machine.memory import is_out_of_memory
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.settings.config import RunConfig, Settings, TrainConfig
from nanofit.settings.shape import GPTConfig

MIB = 2**20
SHAPE = GPTConfig(n_layer=4, n_head=2, n_embd=64, block_size=64, vocab_size=8192)
SETUP = Setup(SHAPE, dtype="float32", loss="full")
SEQUENCES = TrainConfig().sequences_per_step
DIVISORS = [size for size in range(1, SEQUENCES + 1) if SEQUENCES % size == 0]
LEAST_ROOM, MOST_ROOM = 48 * MIB, 720 * MIB
WARMING_ROOMS = 60 * MIB, 600 * MIB  # of earlier fits, whose peaks are remembered
EDGE = 2  # sizes on either side of the edge that are all tried
TIMES = 3  # that a size has to survive, of as many, to count as fitting


@dataclass
class Search:
    """What a way did and chose, 0 if nothing; `trials` are sizes and whether they survived."""

    size: int = 0
    trials: list[tuple[int, bool]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    forecast_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def deaths(self) -> int:
        return sum(not survived for _, survived in self.trials)

    @property
    def is_batch_kept(self) -> bool:
        return self.size > 0 and SEQUENCES % self.size == 0


def main() -> None:
    arguments = parse()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](**json.loads(arguments.order))))
        return
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="bench-autofit-"))
    print(f"to go on after an interruption: --folder {folder}", file=sys.stderr)
    ask = Answers(folder)
    base_bytes = ask("base")
    for room_bytes in WARMING_ROOMS:
        ask(OURS_WARM, limit_bytes=base_bytes + room_bytes)
    cases = [
        look_at(ask, base_bytes, limit_bytes, arguments)
        for limit_bytes in limits(arguments.limits, base_bytes)
    ]
    print_machine()
    print_ways(cases)
    print_cases(cases, base_bytes)
    print_targets(cases)
    keep_figures(cases)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limits", type=int, default=8)
    parser.add_argument("--rechecks", type=int, default=20, help="of the sizes autofit chose")
    parser.add_argument("--peer_rechecks", type=int, default=5, help="of other sizes")
    parser.add_argument("--folder", type=Path, help="of kept answers (default: a new one)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--order", help=argparse.SUPPRESS)
    return parser.parse_args()


def limits(count: int, base_bytes: int) -> list[int]:
    ratio = (MOST_ROOM / LEAST_ROOM) ** (1 / (count - 1))
    return [base_bytes + int(LEAST_ROOM * ratio**index) for index in range(count)]


@dataclass
class Case:
    """Everything about one limit."""

    limit_bytes: int
    largest: int  # of all sizes
    divisor: int  # the largest that cuts a step evenly
    searches: dict[str, Search]
    rechecks: dict[int, tuple[int, int]]  # by size: how many survived, of how many


def look_at(
    ask: "Answers", base_bytes: int, limit_bytes: int, arguments: argparse.Namespace
) -> Case:
    room_bytes = limit_bytes - base_bytes
    largest, divisor = ask("truth", limit_bytes=limit_bytes)
    searches = {way: Search(**ask(way, limit_bytes=limit_bytes)) for way in OURS}
    searches |= {way: Search(**ask(way, room_bytes=room_bytes)) for way in PEERS}
    our_sizes = {searches[way].size for way in OURS}
    other_sizes = {searches[way].size for way in PEERS} - our_sizes
    rechecks = {}
    for sizes, times in (our_sizes, arguments.rechecks), (other_sizes, arguments.peer_rechecks):
        survived = ask("recheck", limit_bytes=limit_bytes, sizes=sorted(sizes), times=times)
        for size, count in zip(sorted(sizes), survived, strict=True):
            rechecks[size] = count, times
    return Case(limit_bytes, largest, divisor, searches, rechecks)


class Answers:
    """Asks child processes, one at a time, and keeps what they answer."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "answers.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._kept = {json.dumps(question): answer for question, answer in map(json.loads, lines)}
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def __call__(self, child: str, **order: Any) -> Any:
        question = json.dumps([child, order])
        if question not in self._kept:
            command = [sys.executable, __file__, "--child", child, "--order", json.dumps(order)]
            done = subprocess.run(
                command, env=self._environment, check=True, capture_output=True, text=True
            )
            self._kept[question] = json.loads(done.stdout.splitlines()[-1])
            with self._file.open("a") as file:
                print(json.dumps([[child, order], self._kept[question]]), file=file)
            print(child, order, self._kept[question], file=sys.stderr, flush=True)
        return self._kept[question]


def base() -> int:
    """What the child of a trial holds before there is a model."""
    return run_trial(SETUP, 1, device="cpu", limit_bytes=None).used_bytes


def truth(limit_bytes: int) -> tuple[int, int]:
    """The largest size of all, and the largest divisor, that truly fit."""
    fits, dies = 0, SEQUENCES + 1
    while fits + 1 < dies:
        middle = (fits + dies) // 2
        if survives(middle, limit_bytes):
            fits = middle
        else:
            dies = middle

    def is_fitting(size: int) -> bool:
        return all(survives(size, limit_bytes) for _ in range(TIMES))

    around = range(min(fits + EDGE, SEQUENCES), 0, -1)
    largest = next(filter(is_fitting, around), 0)
    above = [size for size in DIVISORS if size > largest][:1]
    below = [size for size in DIVISORS if size <= largest]
    return largest, next(filter(is_fitting, [*above, *reversed(below)]), 0)


def recheck(limit_bytes: int, sizes: list[int], times: int) -> list[int]:
    """How often each size survived."""
    return [sum(survives(size, limit_bytes) for _ in range(times)) if size else 0 for size in sizes]


def survives(size: int, limit_bytes: int) -> bool:
    return run_trial(SETUP, size, device="cpu", limit_bytes=limit_bytes).peak_bytes is not None


def ours_cold(limit_bytes: int) -> dict:
    """As on a machine that never saw this model."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        return ours_warm(limit_bytes)


def ours_warm(limit_bytes: int) -> dict:
    """With what earlier fits under other limits have left in the cache."""
    search = Search()

    def run_noted_trial(setup: Setup, size: int, **order: Any) -> TrialResult:
        trial = run_trial(setup, size, **order)
        if size:  # else it only looks around
            search.trials.append((size, trial.peak_bytes is not None))
        return trial

    run = RunConfig(
        device="cpu", dtype="float32", loss="full", compile=False, memory_limit=str(limit_bytes)
    )
    started = time.monotonic()
    device = describe_device("cpu", "float32")
    settings = Settings(SHAPE, TrainConfig(), run)
    fit = find_fit(settings, device, Ranks(), trial=run_noted_trial)
    search.seconds = time.monotonic() - started
    search.size, search.peak_bytes = fit.eager.size, fit.eager.peak_bytes
    search.steps = 2 * len(search.trials)
    own_bytes = run_trial(SETUP, 0, device="cpu", limit_bytes=None).used_bytes
    search.forecast_bytes = own_bytes + need_of(SETUP).at(fit.eager.size)
    return asdict(search)


def accelerate(room_bytes: int) -> dict:
    """The function as documented: the decorated one builds the model and trains."""
    from accelerate.utils import find_executable_batch_size

    search = Search()

    @find_executable_batch_size
    def train(batch_size: int) -> int:
        try_size(search, batch_size)
        return batch_size

    return timed(search, train, room_bytes)


def composer(room_bytes: int) -> dict:
    """Its automatic microbatching: begin with the whole step, halve whenever memory runs out.

    Written out, since the package is heavy. It cuts a step unevenly if need be.
    """
    search = Search()

    def train() -> int:
        size = SEQUENCES
        while True:
            try:
                try_size(search, size)
                return size
            except RuntimeError as error:
                if size == 1 or not is_out_of_memory(error):
                    raise
            gc.collect()
            size //= 2

    return timed(search, train, room_bytes)


def try_size(search: Search, size: int) -> None:
    """Build the model and take two steps of two micro-batches, as a trial of ours does."""
    search.trials.append((size, False))
    device = describe_device("cpu", "float32")
    model = GPT(SHAPE, loss="full")
    optimizer, scaler = build_optimizer(model, TrainConfig()), device.grad_scaler()
    for _ in range(2):
        search.steps += 1
        train_step(
            model,
            optimizer,
            scaler,
            random_micro_batches(
                size, block_size=SHAPE.block_size, vocab_size=SHAPE.vocab_size, device=device
            ),
            device=device,
            ranks=Ranks(),
            lr=1e-5,
            grad_clip=1.0,
            seed=0,
        )
    search.trials[-1] = (size, True)


def lightning(mode: str) -> Callable[[int], dict]:
    """Tuner.scale_batch_size, which is BatchSizeFinder, with its defaults."""

    def way(room_bytes: int) -> dict:
        from lightning.pytorch import Trainer
        from lightning.pytorch.tuner import Tuner

        search = Search()
        module = lightning_module(search)

        def tune() -> int:
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(
                    accelerator="cpu",
                    accumulate_grad_batches=2,
                    gradient_clip_val=1.0,
                    default_root_dir=folder,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                return Tuner(trainer).scale_batch_size(module(), mode=mode)

        return timed(search, tune, room_bytes)

    return way


def lightning_module(search: Search) -> type:
    """The model as Lightning wants it, which notes in `search` what is done to it."""
    from lightning.pytorch import LightningModule
    from torch.utils.data import DataLoader

    tokens = torch.randint(SHAPE.vocab_size, (4 * SEQUENCES, SHAPE.block_size + 1))

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.batch_size = 1
            self.model = GPT(SHAPE, loss="full")

        def train_dataloader(self) -> DataLoader:
            return DataLoader(tokens, batch_size=self.batch_size)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer(self.model, TrainConfig())

        def on_train_start(self) -> None:
            search.trials.append((self.batch_size, False))

        def on_train_batch_start(self, batch: Tensor, index: int) -> None:
            search.steps += index % 2 == 0

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.model(batch[:, :-1], batch[:, 1:])

        def on_train_end(self) -> None:
            search.trials[-1] = (search.trials[-1][0], True)

    return Module


def timed(search: Search, choose: Callable[[], int], room_bytes: int) -> dict:
    """Let a peer choose, with this room beside what its process already holds."""
    memory = describe_device("cpu").memory()
    memory.limit(memory.used_bytes() + room_bytes)
    started = time.monotonic()
    try:
        search.size = choose()
    except (RuntimeError, ValueError) as error:  # Lightning goes on to a batch of 0
        print(f"gave up: {error}", file=sys.stderr)
    search.seconds = time.monotonic() - started
    return asdict(search)


def print_machine() -> None:
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "lightning"))
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, 1 thread a process; {packages}\n"
        f"{SHAPE.n_layer} layers, {SHAPE.n_head} heads, {SHAPE.n_embd} wide, block "
        f"{SHAPE.block_size}, vocabulary {SHAPE.vocab_size}, float32, all logits, eager; "
        f"{SEQUENCES} sequences per step\n"
    )


def print_ways(cases: list[Case]) -> None:
    count = len(cases)
    print(
        f"Of {count} limits; trials, steps, deaths and seconds are means.\n\n"
        "| way | trials | steps | out of memory | seconds | largest divisor found | "
        "of the largest size | rechecks survived | batch kept |\n|---|" + "--:|" * 8
    )
    for way in (*OURS, *PEERS):
        searches = [case.searches[way] for case in cases]
        survived, rechecks = _rechecks(cases, way)
        print(
            f"| {way} | {_mean(len(search.trials) for search in searches):.1f} | "
            f"{_mean(search.steps for search in searches):.1f} | "
            f"{_mean(search.deaths for search in searches):.1f} | "
            f"{_mean(search.seconds for search in searches):.1f} | "
            f"{_exact(cases, way)} of {count} | "
            f"{_mean(case.searches[way].size / case.largest for case in cases):.2f} | "
            f"{survived} of {rechecks} | {_kept(cases, way)} of {count} |"
        )


def print_cases(cases: list[Case], base_bytes: int) -> None:
    print(
        f"\nChosen sizes; a process takes {base_bytes / MIB:.0f} MiB without a model. In brackets "
        "what autofit tried, × what died; then its forecast and the measured peak.\n\n"
        "| limit MiB | largest | divisor | " + " | ".join((*OURS, *PEERS)) + " | forecast | "
        "peak |\n" + "|--:" * (5 + len(OURS) + len(PEERS)) + "|"
    )
    for case in cases:
        cells = [f"{case.limit_bytes / MIB:.0f}", str(case.largest), str(case.divisor)]
        for way, search in case.searches.items():
            tried = ", ".join(f"{size}{'' if lived else ' ×'}" for size, lived in search.trials)
            cells.append(f"{search.size} ({tried})" if way in OURS else str(search.size))
        cold = case.searches[OURS_COLD]
        cells += [f"{cold.forecast_bytes / MIB:.0f}", f"{cold.peak_bytes / MIB:.0f}"]
        print(f"| {' | '.join(cells)} |")


def print_targets(cases: list[Case]) -> None:
    trials = {way: sum(len(case.searches[way].trials) for case in cases) for way in (*OURS, *PEERS)}
    fewest = min(trials[way] for way in PEERS)
    print("\n| target | " + " | ".join(OURS) + " | wanted |\n|---|--:|--:|--:|")
    rows = [
        (
            "largest divisor found",
            [f"{_exact(cases, way) / len(cases):.0%}" for way in OURS],
            "95%",
        ),
        ("rechecks survived", ["{} of {}".format(*_rechecks(cases, way)) for way in OURS], "all"),
        ("of the fewest trials of a peer", [f"{trials[way] / fewest:.2f}" for way in OURS], "0.33"),
        ("effective batch kept", [f"{_kept(cases, way) / len(cases):.0%}" for way in OURS], "100%"),
    ]
    for name, measured, wanted in rows:
        print(f"| {name} | {' | '.join(measured)} | {wanted} |")


def keep_figures(cases: list[Case]) -> None:
    """Ours beside each peer."""
    trials = {
        way: _mean(len(case.searches[way].trials) for case in cases) for way in (*OURS, *PEERS)
    }
    many, figures = f"{len(cases)} memory limits", []
    for peer in PEERS:
        name = f"trials to find the micro-batch under {many}, mean, {peer}"
        figures.append(Figure(name, trials[OURS_COLD], trials[peer], peer))
        exact = _exact(cases, OURS_COLD), _exact(cases, peer)
        name = f"exact divisor found under {many}, {peer}"
        figures.append(Figure(name, *exact, peer, is_less_better=False, out_of=len(cases)))
    conditions = "1 thread a process, memory that really runs out"
    record("autofit", figures, command="make bench-autofit", conditions=conditions)


def _exact(cases: list[Case], way: str) -> int:
    return sum(case.searches[way].size == case.divisor for case in cases)


def _kept(cases: list[Case], way: str) -> int:
    searches = [case.searches[way] for case in cases]
    if way == COMPOSER:  # its last micro-batch may be smaller
        return sum(search.size > 0 for search in searches)
    return sum(search.is_batch_kept for search in searches)


def _rechecks(cases: list[Case], way: str) -> tuple[int, int]:
    """How many survived, of how many."""
    survived, times = zip(*(case.rechecks[case.searches[way].size] for case in cases), strict=True)
    return sum(survived), sum(times)


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


OURS_COLD, OURS_WARM = "autofit", "autofit, peaks remembered"
OURS = {OURS_COLD: ours_cold, OURS_WARM: ours_warm}
COMPOSER = "Composer's halving"
PEERS = {
    "accelerate": accelerate,
    "Lightning, power": lightning("power"),
    "Lightning, binsearch": lightning("binsearch"),
    COMPOSER: composer,
}
CHILDREN = {"base": base, "truth": truth, "recheck": recheck, **OURS, **PEERS}

if __name__ == "__main__":
    main()
