"""How many tokens a recipe needs: nanoGPT's, the same tuned, and the modern one, on real English.

    python bench/recipe.py --text ../shared/data/english.parquet       # hours; the same continues
    python bench/recipe.py --report                                    # what is known so far

Small models learn English byte by byte, so that their bodies and not their heads are trained. Every
arm finds its learning rate at a quarter of the full length, at which its decay ends as well; then
it runs at half and at full length, the latter with three seeds: tokens needed are never read off
one curve. Then each part of the modern recipe is left out once, and each of a second tier added,
at a quarter of the length.
What is finished is kept in results/recipe.json; without --text the sample generator's text is
learned.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import exp, log, sqrt
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import GPT
from nanofit.cache import cache_folder
from nanofit.data.loader import TrainSequences, ValSequences
from nanofit.data.tokens import Bins
from nanofit.files import PROJECT, atomic_write
from nanofit.learning.compiler import compile_in_place, measure
from nanofit.learning.optim import build_optimizer, lr_at
from nanofit.learning.step import evaluate, train_step
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.settings.config import load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, compact, duration, run_script

RESULTS = PROJECT / "bench/results"
FULL_STEPS, SEEDS = 3000, (1, 2, 3)
LENGTHS = (FULL_STEPS // 4, FULL_STEPS // 2, FULL_STEPS)
CHANGED_STEPS = LENGTHS[0]  # of runs that leave a part of the recipe out, or add one
SHAPE = dict(n_layer=4, n_head=3, n_embd=192, block_size=256, vocab_size=256)
SEQUENCES, VAL_SEQUENCES = 4, 256  # a step, and of 65,536 tokens to validate on
TOKENS_PER_STEP = SEQUENCES * SHAPE["block_size"]
PUBLISHED_TOKENS_PER_STEP = 524_288
CURVE_POINTS = 40

# AdamW's memory of 524,288-token steps would be longer than these runs: a tenth of one, then.
BETA2 = min(0.95 ** (TOKENS_PER_STEP / PUBLISHED_TOKENS_PER_STEP), 1 - 10 / FULL_STEPS)
TUNED = dict(beta2=BETA2, lr_schedule="wsd", decay_fraction=0.7, min_lr=0.0)
MODERN = dict(arch="modern", bias=True)
# Twelve Newton-Schulz steps would take longer than the learning itself at so few tokens a step.
MUON = dict(optimizer="muon", muon_steps=5)


@dataclass(frozen=True)
class Arm:
    name: str
    settings: dict[str, Any]
    rates: tuple[float, ...]  # the first to be tried, next to each other


PLAIN = Arm("gpt2 + AdamW, as nanoGPT", dict(beta2=0.95, min_lr=None), (1e-3, 2e-3, 4e-3))
BASELINE = Arm("gpt2 + AdamW, tuned", TUNED, (1e-3, 2e-3, 4e-3))
HALF_WAY = Arm("modern + AdamW", {**MODERN, **TUNED}, (1e-3, 2e-3, 4e-3))
OURS = Arm("modern + Muon", {**MODERN, **MUON}, (0.0125, 0.025, 0.05))
ARMS = (PLAIN, BASELINE, HALF_WAY, OURS)


@dataclass(frozen=True)
class Run:
    """One training run; `change` names what is not as in the arm's recipe."""

    arm: str
    rate: float
    steps: int
    seed: int = SEEDS[0]
    change: str = ""

    @property
    def key(self) -> str:
        recipe = f"{self.arm} {self.change}".strip()
        return f"{recipe}, rate {self.rate:g}, {self.steps} steps, seed {self.seed}"


def main(argv: Sequence[str]) -> None:
    asked = _parse(argv)
    results = Results(RESULTS / "recipe.json")
    if not asked.report:
        folder = _prepare(asked.text)
        for runs in _stages(results):
            _carry_out(runs, results, folder, jobs=asked.jobs)
    _report(results)


class Results:
    """What is known of finished runs, on disk."""

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.known = json.loads(path.read_text(encoding="utf-8"))

    def add(self, run: Run, result: dict[str, Any]) -> None:
        self.known[run.key] = result
        with atomic_write(self.path) as temporary:
            temporary.write_text(json.dumps(self.known, indent=1), encoding="utf-8")

    def loss(self, run: Run) -> float | None:
        found = self.known.get(run.key)
        return found and found["val_loss"]

    def best_rate(self, arm: Arm) -> float | None:
        """The rate with the lowest loss; None while one of its neighbours is still to be tried."""
        if self.rates_to_try(arm):
            return None
        return min(self._tried(arm), key=self._tried(arm).get)

    def rates_to_try(self, arm: Arm) -> list[float]:
        """The first rates, and then what lies beyond the best as long as that is at an end."""
        tried = self._tried(arm)
        missing = [rate for rate in arm.rates if rate not in tried]
        if missing:
            return missing
        best = min(tried, key=tried.get)
        return [rate for rate in (best / 2, 2 * best) if rate not in tried]

    def _tried(self, arm: Arm) -> dict[float, float]:
        runs = [Run(arm.name, arm.rates[0] * 2.0**power, LENGTHS[0]) for power in range(-6, 7)]
        return {run.rate: self.loss(run) for run in runs if self.loss(run) is not None}


def _stages(results: Results) -> Iterator[list[Run]]:
    """What to do next, as soon as it is known."""
    while rates := [Run(a.name, r, LENGTHS[0]) for a in ARMS for r in results.rates_to_try(a)]:
        yield rates
    best = {arm.name: results.best_rate(arm) for arm in ARMS}
    for steps in LENGTHS[1:]:
        yield [Run(arm.name, best[arm.name], steps) for arm in reversed(ARMS)]
    changed = partial(Run, OURS.name, best[OURS.name], CHANGED_STEPS)
    yield [
        *(changed(seed) for seed in SEEDS),
        *(changed(change=change) for change in ALL_CHANGES),
    ]
    for arm in (OURS, BASELINE, HALF_WAY, PLAIN):
        yield [Run(arm.name, best[arm.name], FULL_STEPS, seed) for seed in SEEDS[1:]]


def _carry_out(runs: list[Run], results: Results, folder: Path, *, jobs: int) -> None:
    open_runs = [run for run in runs if run.key not in results.known]
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as p:
        futures = {p.submit(_train, run, folder): run for run in open_runs}
        for future in as_completed(futures):
            run, result = futures[future], future.result()
            results.add(run, result)
            seconds = result["optimizer_s"] + result["other_s"]
            print(f"{result['val_loss']:.4f}  {duration(seconds)}  {run.key}", flush=True)


def _train(run: Run, folder: Path) -> dict[str, Any]:
    """Learn, by the product's own parts; CPU seconds of one thread, the optimiser's apart."""
    torch._dynamo.reset()
    shape, learn, _ = load_config(_flags(run))
    device, ranks = describe_device("cpu", "float32"), Ranks()
    torch.manual_seed(run.seed)
    model = ADDITIONS.get(run.change, GPT)(shape)
    if run.change in CHANGES:
        CHANGES[run.change](model)
    common = (shape.block_size, shape.vocab_size, device)
    train = TrainSequences(
        Bins([folder / "train.bin"]), *common, sequences_per_step=SEQUENCES, seed=run.seed
    )
    val = ValSequences(Bins([folder / "val.bin"]), *common, sequences=VAL_SEQUENCES)
    optimizer, scaler = build_optimizer(model, learn), device.grad_scaler()
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


# What may be other than in the modern recipe: settings, parts of the model, or a model with more.

SETTINGS = {
    "without biases": dict(bias=False),
    "with twelve gentle steps of Muon for five steep ones": dict(muon_steps=12),
    "with a decay over 20 % for one over 70 %": dict(decay_fraction=0.2),
    "without weight decay": dict(weight_decay=0.0),
}


def _no_cap(model: GPT) -> None:
    model.logit_cap = None


def _gelu(model: GPT) -> None:
    for block in model.transformer.h:
        block.mlp.act = F.gelu


def _no_embedding_norm(model: GPT) -> None:
    model.transformer.ln_e = nn.Identity()


def _full_rotary(model: GPT) -> None:
    width, block_size = model.config.head_width, model.config.block_size
    frequencies = (1 / 1024) ** torch.linspace(0, 1, width // 2)
    angles = torch.outer(torch.arange(block_size).float(), frequencies)
    model.turns = torch.stack([angles.cos(), angles.sin()]).unsqueeze(2)


def _small_start(model: GPT) -> None:
    """Output projections and head begin as other matrices do."""
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "lm_head.weight")):
            nn.init.normal_(parameter, std=sqrt(0.33 / parameter.size(1)))


def _no_query_norm(model: GPT) -> None:
    """Queries and keys are turned as they are; scores are scaled as usual."""
    for block in model.transformer.h:
        block.attn.scale = None
        block.attn._placed = _turned_only


def _turned_only(q, k, v, turns):
    cos, sin = turns
    turned = []
    for x in (q, k):
        one, other = x.chunk(2, dim=-1)
        turned.append(torch.cat([one * cos + other * sin, other * cos - one * sin], dim=-1))
    return *turned, v


CHANGES: dict[str, Callable[[GPT], None]] = {
    "without a soft cap": _no_cap,
    "with GELU for ReLU²": _gelu,
    "without a norm after the embedding": _no_embedding_norm,
    "with full rotary for half": _full_rotary,
    "without a start at zero": _small_start,
    "without normalised queries and keys": _no_query_norm,
}


class _Mixing(GPT):
    """Each block gets a learned mix of what the one before it gave and the first embedding."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0] * config.n_layer))

    def _hidden(self, idx: Tensor, cache: None = None) -> Tensor:
        parts, places = self.transformer, self._places(idx)
        x = first = parts.ln_e(parts.wte(idx))
        for layer, block in enumerate(parts.h):
            x = self._mixed(x, first, layer)
            x = block(x, places, None, layer)
        return parts.ln_f(x)

    def _mixed(self, x: Tensor, first: Tensor, layer: int) -> Tensor:
        return self.mix[2 * layer] * x + self.mix[2 * layer + 1] * first

    def _places(self, idx: Tensor) -> Any:
        return self.turns[:, : idx.size(1)]


class _OtherValues(_Mixing):
    """Values are a learned mix with others: those of the first layer, or looked up by token."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.mix = nn.Parameter(torch.tensor([0.5, 0.5] * config.n_layer))
        for layer, block in enumerate(self.transformer.h):
            block.attn._placed = partial(self._placed, layer, block.attn._placed)

    def _mixed(self, x: Tensor, first: Tensor, layer: int) -> Tensor:
        return x

    def _placed(self, layer: int, plain: Callable, q: Tensor, k: Tensor, v: Tensor, places: Any):
        turns, others = places
        if layer in others:
            v = self.mix[2 * layer] * v + self.mix[2 * layer + 1] * others[layer].view_as(v)
        elif not others:  # the first layer's, for all that follow
            others |= dict.fromkeys(range(1, self.config.n_layer), v)
        return plain(q, k, v, turns)

    def _places(self, idx: Tensor) -> Any:
        return super()._places(idx), {}


class _ValueTables(_OtherValues):
    """Tables of values by token, for the first and the last layer."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.tables = nn.ModuleList(nn.Embedding(config.vocab_size, config.n_embd) for _ in "12")

    def _places(self, idx: Tensor) -> Any:
        first, last = (table(idx) for table in self.tables)
        return self.turns[:, : idx.size(1)], {0: first, self.config.n_layer - 1: last}


ADDITIONS = {
    "with a mix of each block's input and the first embedding": _Mixing,
    "with the first layer's values mixed into all": _OtherValues,
    "with two tables of values by token": _ValueTables,
}
ALL_CHANGES = (*CHANGES, *SETTINGS, *ADDITIONS)


def _prepare(text: str | None) -> Path:
    """Bytes of documents, each followed by a zero, as bins; every hundredth is for validation."""
    name = Path(text).stem if text else "sample"
    folder = cache_folder() / f"bench-recipe-{name}"
    if (folder / "val.bin").exists():
        return folder
    if text and not Path(text).exists():
        raise InputError(f"no text in {text}; leave --text out to learn the generator's")
    folder.mkdir(parents=True, exist_ok=True)
    splits = {"train": bytearray(), "val": bytearray()}
    for number, document in enumerate(_documents(text)):
        splits["train" if number % 100 else "val"] += document.encode() + b"\0"
    for split, content in splits.items():
        with atomic_write(folder / f"{split}.bin") as temporary:
            np.frombuffer(bytes(content), np.uint8).astype(np.uint16).tofile(temporary)
    return folder


def _documents(text: str | None) -> list[str]:
    import pyarrow.parquet

    if text is None:
        import subprocess

        subprocess.run([sys.executable, PROJECT / "data/sample/make_shard.py"], check=True)
        text = str(PROJECT / "data/sample/sample.parquet")
    return pyarrow.parquet.read_table(text, columns=["text"])["text"].to_pylist()


# What it says


def _report(results: Results) -> None:
    rows = list(_rows(results))
    lines = [*_arm_table(results, rows), "", *_change_table(results), ""]
    print("\n".join(lines))
    _plot(rows, RESULTS / "recipe.png")


@dataclass(frozen=True)
class Row:
    """An arm at its best rate: by length, the mean loss over seeds and the seconds of a token."""

    arm: Arm
    rate: float
    losses: dict[int, float]  # by tokens
    spread: float  # of the losses of seeds, at full length
    seeds: int
    other_s_per_token: float
    optimizer_s_per_token: float

    def tokens_to(self, loss: float) -> float | None:
        """Tokens of a run that ends at a loss, on the line through the logarithms; None beyond."""
        points = sorted(self.losses.items())
        for (few, high), (many, low) in pairwise(points):
            if low <= loss <= high:
                part = (high - loss) / (high - low)
                return exp(log(few) + part * (log(many) - log(few)))
        return None


def _rows(results: Results) -> Iterator[Row]:
    for arm in ARMS:
        rate = results.best_rate(arm)
        if rate is None:
            continue
        of = partial(Run, arm.name, rate)
        by_length = {steps: [of(steps, seed) for seed in SEEDS] for steps in LENGTHS}
        known = {
            steps: [results.known[run.key] for run in runs if run.key in results.known]
            for steps, runs in by_length.items()
        }
        everything = [result for found in known.values() for result in found]
        tokens = sum(result["tokens"] for result in everything)
        losses = {steps: [r["val_loss"] for r in found] for steps, found in known.items() if found}
        full = losses.get(FULL_STEPS, [])
        yield Row(
            arm,
            rate,
            {n * TOKENS_PER_STEP: statistics.fmean(found) for n, found in losses.items()},
            statistics.stdev(full) if len(full) > 1 else float("nan"),
            len(full),
            sum(result["other_s"] for result in everything) / tokens,
            sum(result["optimizer_s"] for result in everything) / tokens,
        )


def _arm_table(results: Results, rows: list[Row]) -> Iterator[str]:
    yield (
        "| arm | best rate | loss at ¼ | at ½ | at full length | ± (seeds) | tokens to the tuned "
        "baseline's loss | CPU time to it, without the optimiser | optimiser's share |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    baseline = next((row for row in rows if row.arm is BASELINE), None)
    target = baseline and baseline.losses.get(FULL_STEPS * TOKENS_PER_STEP)
    for row in rows:
        losses = [row.losses.get(steps * TOKENS_PER_STEP) for steps in LENGTHS]
        tokens = row.tokens_to(target) if target else None
        share = row.optimizer_s_per_token / (row.optimizer_s_per_token + row.other_s_per_token)
        told = ["-", "-"]
        if tokens:
            spent = tokens * row.other_s_per_token
            base = FULL_STEPS * TOKENS_PER_STEP * baseline.other_s_per_token
            ratio = tokens / (FULL_STEPS * TOKENS_PER_STEP)
            told = [f"{compact(tokens)} ({ratio:.2f} ×)", f"{spent:.0f} s ({spent / base:.2f} ×)"]
        cells = [
            row.arm.name,
            f"{row.rate:g}",
            *(f"{loss:.4f}" if loss else "-" for loss in losses),
            f"{row.spread:.4f} ({row.seeds})",
            *told,
            f"{share:.0%}",
        ]
        yield f"| {' | '.join(cells)} |"


def _change_table(results: Results) -> Iterator[str]:
    rate = results.best_rate(OURS)
    of = rate and partial(Run, OURS.name, rate, CHANGED_STEPS)
    whole = rate and [loss for seed in SEEDS if (loss := results.loss(of(seed)))]
    if not whole or len(whole) < 2:
        return
    mean, spread = statistics.fmean(whole), statistics.stdev(whole)
    yield (
        f"| modern + Muon at a quarter of the length, {mean:.4f} ± {spread:.4f} over "
        f"{len(whole)} seeds | loss with the first seed | worse by |"
    )
    yield "|---|--:|--:|"
    for change in ALL_CHANGES:
        loss = results.loss(of(change=change))
        if loss is not None:
            yield f"| {change} | {loss:.4f} | {loss - whole[0]:+.4f} |"


def _plot(rows: list[Row], path: Path) -> None:
    """Loss at the end of each run, against its tokens and its CPU seconds."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: it needs matplotlib (pip install -r requirements-extras.txt)")
        return
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_tokens, by_seconds = figure.subplots(1, 2, sharey=True)
    for row, marker in zip(rows, "osD^", strict=False):
        tokens, losses = zip(*sorted(row.losses.items()), strict=True)
        per_token = row.other_s_per_token + row.optimizer_s_per_token
        by_tokens.plot(tokens, losses, marker=marker, label=row.arm.name)
        by_seconds.plot([n * per_token for n in tokens], losses, marker=marker)
    by_tokens.set(xlabel="tokens", ylabel="validation loss (nats a byte)", xscale="log")
    by_seconds.set(xlabel="CPU seconds, the optimiser included", xscale="log")
    by_tokens.legend()
    for axes in (by_tokens, by_seconds):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


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
