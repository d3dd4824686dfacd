"""How many tokens a recipe needs: nanoGPT's, the same tuned, and the modern one, on real English.

    python bench/recipe.py                       # hours; the same continues
    python bench/recipe.py --report              # what is known so far

Small models learn English byte by byte, so that their bodies and not their heads are trained. Every
arm finds its learning rate at a quarter of the full length, at which its decay ends as well; then
it runs at half and at full length, the latter with three seeds: tokens needed are never read off
one curve. Then each part of the modern recipe is left out once, and each of a second tier added,
at a quarter of the length.
What is finished is kept in results/recipe/runs.json and told in results/recipe.md. Where there is
no English, nor a text is named, the sample generator's is learned.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from bench.recipe_parts import SETTINGS, change_optimizer, changed_model
from bench.recipe_report import report
from bench.recipe_runs import (
    ARMS,
    DTYPE,
    SEQUENCES,
    SHAPE,
    TOKENS_PER_STEP,
    VAL_SEQUENCES,
    Results,
    Run,
    conditions,
    stages,
)
from nanofit.cache import cache_folder
from nanofit.data.loader import TrainSequences, ValSequences
from nanofit.data.tokens import Bins
from nanofit.files import PROJECT, atomic_write
from nanofit.learning.compiler import compile_in_place, measure
from nanofit.learning.optim import build_optimizer, lr_at
from nanofit.learning.step import evaluate, train_step
from nanofit.machine.device import Device, describe_device
from nanofit.machine.dist import Ranks
from nanofit.settings.config import load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, duration, first_line, run_script

RESULTS = PROJECT / "bench/results"
ENGLISH = PROJECT / "../shared/data/english.parquet"
SAMPLE = PROJECT / "data/sample/sample.parquet"  # which the generator makes
CURVE_POINTS = 40


def main(argv: Sequence[str]) -> None:
    asked = _parse(argv)
    path = RESULTS / "recipe/runs.json"
    if asked.report:
        report(Results(path), RESULTS)
        return
    text = _text(asked.text)
    folder = _prepare(text)
    text_bytes = sum((folder / f"{split}.bin").stat().st_size // 2 for split in ("train", "val"))
    results, failed = Results(path, conditions(text.name, text_bytes)), []
    for runs in stages(results):
        failed += _carry_out(runs, results, folder, jobs=asked.jobs)
    report(results, RESULTS)
    if failed:
        raise InputError(f"{len(failed)} runs failed; the same command tries them again")


def _carry_out(runs: list[Run], results: Results, folder: Path, *, jobs: int) -> list[Run]:
    """Do what is not yet done; what fails is told and returned, and the rest goes on."""
    open_runs, failed = [run for run in runs if run.key not in results.known], []
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as p:
        futures = {p.submit(_train, run, folder): run for run in open_runs}
        for future in as_completed(futures):
            run = futures[future]
            if error := future.exception():
                failed.append(run)
                print(f"failed  {run.key}: {first_line(error)}", file=sys.stderr, flush=True)
                continue
            result = future.result()
            results.add(run, result)
            seconds = result["optimizer_s"] + result["other_s"]
            print(f"{result['val_loss']:.4f}  {duration(seconds)}  {run.key}", flush=True)
    return failed


def _train(run: Run, folder: Path) -> dict[str, Any]:
    """Learn, by the product's own parts; CPU seconds of one thread, the optimiser's apart."""
    torch._dynamo.reset()
    shape, learn, _ = load_config(_flags(run))
    device, ranks = describe_device("cpu", DTYPE), Ranks()
    torch.manual_seed(run.seed)
    model = changed_model(run.change, shape)
    train, val = _sequences(shape, folder, device, run.seed)
    optimizer = build_optimizer(model, learn, products=device.dtype)
    scaler = device.grad_scaler()
    change_optimizer(run.change, optimizer)
    clock = _Clock(optimizer)
    compile_in_place(model)
    first = next(iter(train.micro_batches(0, SEQUENCES, ranks)))
    measure(model, first, device, rows=SEQUENCES)  # lets the compiler work before the clock starts
    curve, losses, started = [], [], time.process_time()
    for step in range(run.steps):
        loss, _ = train_step(
            model,
            optimizer,
            scaler,
            train.micro_batches(step, SEQUENCES, ranks),
            device=device,
            ranks=ranks,
            lr=lr_at(step, learn),
            grad_clip=learn.grad_clip,
            seed=step,
        )
        losses.append(loss.item())
        if (step + 1) % (run.steps // CURVE_POINTS) == 0:
            curve.append([step + 1, statistics.fmean(losses)])
            losses = []
    seconds = time.process_time() - started
    val_loss = evaluate(model, val.micro_batches(SEQUENCES, ranks), device=device, ranks=ranks)
    return {
        "val_loss": val_loss,
        "tokens": run.steps * TOKENS_PER_STEP,
        "optimizer_s": clock.seconds,
        "other_s": seconds - clock.seconds,
        "curve": curve,
    }


def _sequences(
    shape: GPTConfig, folder: Path, device: Device, seed: int
) -> tuple[TrainSequences, ValSequences]:
    train, val = (Bins([folder / f"{split}.bin"]) for split in ("train", "val"))
    common = (shape.block_size, shape.vocab_size, device)
    return (
        TrainSequences(train, *common, sequences_per_step=SEQUENCES, seed=seed),
        ValSequences(val, *common, sequences=VAL_SEQUENCES),
    )


def _flags(run: Run) -> list[str]:
    arm = next(arm for arm in ARMS if arm.name == run.arm)
    settings = {
        **SHAPE,
        **dict(batch_size=SEQUENCES, gradient_accumulation_steps=1, max_iters=run.steps),
        **dict(learning_rate=run.rate, seed=run.seed),
        **arm.settings,
        **SETTINGS.get(run.change, {}),
    }
    if settings.get("min_lr", 0) is None:  # nanoGPT's rule
        settings["min_lr"] = run.rate / 10
    if settings.get("optimizer") != "muon":
        settings.setdefault("warmup_iters", run.steps // 20)
    return [f"--{name}={value}" for name, value in settings.items()]


class _Clock:
    """The CPU seconds that an optimiser takes."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.seconds = 0.0
        optimizer.register_step_pre_hook(self._start)
        optimizer.register_step_post_hook(self._stop)

    def _start(self, *_: Any) -> None:
        self._started = time.process_time()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.process_time() - self._started


def _text(asked: str | None) -> Path:
    if asked is None:
        return ENGLISH if ENGLISH.exists() else SAMPLE
    if not Path(asked).is_file():
        raise InputError(f"no text in {asked}; without --text there is one to learn")
    return Path(asked)


def _prepare(text: Path) -> Path:
    """Bytes of documents, each followed by a zero, as bins; every hundredth is for validation."""
    folder = cache_folder() / f"bench-recipe-{text.stem}"
    if (folder / "val.bin").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": bytearray(), "val": bytearray()}
    for number, document in enumerate(_documents(text)):
        splits["train" if number % 100 else "val"] += document.encode() + b"\0"
    for split, content in splits.items():
        with atomic_write(folder / f"{split}.bin") as temporary:
            np.frombuffer(bytes(content), np.uint8).astype(np.uint16).tofile(temporary)
    return folder


def _documents(text: Path) -> list[str]:
    import pyarrow.parquet

    if text == SAMPLE:
        import subprocess

        subprocess.run([sys.executable, PROJECT / "data/sample/make_shard.py"], check=True)
    return pyarrow.parquet.read_table(text, columns=["text"])["text"].to_pylist()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", metavar="FILE", help="a parquet file with a text column")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
    parser.add_argument("--report", action="store_true", help="only tell what is known so far")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_script(main)
