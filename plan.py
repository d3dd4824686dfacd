"""The truth about a run before it burns a week.

    python plan.py config/train_fineweb_4070.py --gpu "RTX 4070"
    python plan.py config/train_fineweb_4070.py --gpu "RTX 4070" --hours 24
    python plan.py config/train_fineweb_4070.py --shard 000_00000.parquet --epochs 4 --json

Without --gpu the speed is measured on this machine, by a short trial of real training steps. Every
setting of train.py can be given as well: --max_iters=1000.
"""

import argparse
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import nn

from model import GPT, GPTConfig
from nanofit.config import RunConfig, TrainConfig, load_config
from nanofit.device import (
    Card,
    Device,
    describe_device,
    find_card,
    is_out_of_memory,
    known_card,
)
from nanofit.dist import Ranks
from nanofit.explain import budget_of, dtype_of, has_flash_on
from nanofit.footprint import footprint, total
from nanofit.forecast import (
    COMPILE_GAIN,
    PUBLISHED_RUNS,
    Forecast,
    expected_share,
    predicted_tokens_per_s,
    reached_share,
    step_of,
)
from nanofit.loader import open_bins, random_micro_batches
from nanofit.memory import Setup
from nanofit.optim import build_optimizer
from nanofit.parquet import find_shards, mean_token_count, open_shards
from nanofit.roofline import seconds_by_part
from nanofit.scaling import (
    FADING_EPOCHS,
    FEWEST_TOKENS,
    LIKE_NEW_EPOCHS,
    model_for,
    optimal_tokens,
    recipe_of,
    weight_decay_for,
)
from nanofit.search import sizes_for
from nanofit.step import train_step
from nanofit.terminal import FlagParser, InputError, compact, duration, run_script

TRIAL_S = 8.0
VAL_FRACTION = 0.01  # prepare_fineweb.py's default
BIN_BYTES_PER_TOKEN = 2
CHECKPOINT_BYTES_PER_PARAMETER = 4 + 8  # fp32 weight and AdamW's two moments
COLUMNS = 100


def main(argv: Sequence[str]) -> None:
    asked, rest = _parse(argv)
    shape, learn, run = load_config(rest)
    if asked.tokens is None and asked.epochs is None and asked.hours is None:
        asked.hours = learn.hours
    with torch.device("meta"):
        model = GPT(shape)
    data = _find_data(asked, shape, run)
    speed = (
        _speed_of_card(asked.gpu, shape, learn, run) if asked.gpu else _measure(shape, learn, run)
    )
    plan = Plan(
        words=tuple(rest),
        model=model,
        learn=_within_budget(asked, shape, learn, data, speed),
        run=run,
        data=data,
        speed=speed,
        gpu=asked.gpu,
    )
    if asked.json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        _print(plan)


class Data(NamedTuple):
    """The tokens there are to learn from, as far as is known before training."""

    train_tokens: int | None
    all_tokens: int | None
    source: str


class Speed(NamedTuple):
    tokens_per_s: float
    card: Card | None
    source: str


@dataclass(frozen=True)
class Plan:
    """A run, its data and its machine; everything else follows."""

    words: tuple[str, ...]  # of the command line, that give the settings
    model: GPT
    learn: TrainConfig  # with the length that was asked for
    run: RunConfig
    data: Data
    speed: Speed
    gpu: str | None  # the card asked for; None: the one that is here

    @property
    def forecast(self) -> Forecast:
        return Forecast(
            parameters=self.model.num_params(),
            steps=self.learn.max_iters,
            tokens_per_step=self.learn.sequences_per_step * self.model.config.block_size,
            decay_end=self.learn.decay_end if self.learn.decay_lr else None,
            unique_tokens=self.data.train_tokens,
            tokens_per_s=self.speed.tokens_per_s,
            watts=self.speed.card and self.speed.card.watts,
            recipe=recipe_of(self.model.config.arch, self.model.config.vocab_size),
        )

    @property
    def better(self) -> Forecast:
        """The same run no longer than its data last."""
        asked = self.forecast
        too_long = asked.epochs and asked.epochs > LIKE_NEW_EPOCHS
        return asked.with_epochs(LIKE_NEW_EPOCHS) if too_long else asked

    @property
    def weight_decay(self) -> float | None:
        """What suits a run that sees its data more than once."""
        unique, epochs = self.data.train_tokens, self.better.epochs
        if not unique or unique < FEWEST_TOKENS or epochs <= 1:
            return None
        return round(weight_decay_for(self.model.num_params(), unique), 3)

    def command(self, steps: int) -> str:
        """train.py's, for a run of so many steps."""
        values = {
            "max_iters": steps,
            "lr_decay_iters": None if self.learn.lr_decay_iters is None else steps,
            "warmup_iters": _warmup(self.learn, steps),
            "hours": None,
        }
        if self.weight_decay is not None:
            values["weight_decay"] = self.weight_decay
        replaced = tuple(f"--{name}=" for name in values)
        words = [word for word in self.words if not word.startswith(replaced)]
        _, configured, _ = load_config(words)
        words += [f"--{k}={v}" for k, v in values.items() if getattr(configured, k) != v]
        return shlex.join(["python", "train.py", *words])

    @property
    def checkpoints(self) -> int:
        """How many there are at most: those kept, the best, the stable one, the one in writing."""
        stable = self.learn.decay_lr and self.learn.lr_schedule == "wsd"
        return self.run.keep_checkpoints + 2 + stable

    @property
    def checkpoint_bytes(self) -> int:
        return CHECKPOINT_BYTES_PER_PARAMETER * self.model.num_params()

    @property
    def optimal_tokens(self) -> float:
        return _optimal_tokens(self.model.config)

    @property
    def model_for_the_time(self) -> GPTConfig | None:
        shape = self.model.config
        found = model_for(
            self.forecast.tokens * self.model.flops_per_token(),
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
        )
        return found and replace(shape, n_layer=found[0], n_head=found[1], n_embd=found[2])

    def warnings(self) -> list[str]:
        found = list(self.forecast.warnings())
        card, dtype = self.speed.card, self.run.dtype
        if card and dtype == "bfloat16" and not card.has_bfloat16:
            found.append(f"{card.name} has no bfloat16: float16 will be used instead")
        if card and dtype == "float32":
            found.append("the speed is that of half precision; float32 takes twice as long or more")
        return found

    def milestones(self) -> list[Forecast]:
        """The run at the ends of what its data teach well, and as asked."""
        asked = self.forecast
        if not asked.epochs:
            return [asked]
        ends = [end for end in (1, LIKE_NEW_EPOCHS, FADING_EPOCHS) if end < 0.95 * asked.epochs]
        return [*(asked.with_epochs(end) for end in ends), asked]

    def as_json(self) -> dict[str, Any]:
        better, fitting = self.better, self.model_for_the_time
        return {
            "asked": _forecast_json(self.forecast)
            | {
                "non_embedding_parameters": _non_embedding(self.model),
                "bin_bytes": self.data.all_tokens and BIN_BYTES_PER_TOKEN * self.data.all_tokens,
                "checkpoint_bytes_at_most": self.checkpoints * self.checkpoint_bytes,
                "data": self.data.source,
                "command": self.command(self.learn.max_iters),
            },
            "milestones": [_forecast_json(one) for one in self.milestones()],
            "instead": _forecast_json(better)
            | {
                "optimal_tokens": round(self.optimal_tokens),
                "model_for_the_time": fitting
                and {name: getattr(fitting, name) for name in ("n_layer", "n_head", "n_embd")},
                "weight_decay": self.weight_decay,
                "command": self.command(better.steps),
            },
            "speed": {"tokens_per_s": self.speed.tokens_per_s, "source": self.speed.source},
            "warnings": self.warnings(),
        }


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's own flags, and the words that belong to the settings of the run."""
    parser = FlagParser(
        usage="python plan.py config/X.py [options] [--SETTING=VALUE ...]",
        description=__doc__,
    )
    add = parser.add_argument
    add("--gpu", metavar="NAME", help="plan for this card, as in 'RTX 4070' or 'A100 80GB'")
    add("--unique_tokens", type=_count, metavar="N", help="tokens of the data, as in 0.65B")
    add("--shard", metavar="FILE", help="count the tokens of this parquet file or folder instead")
    add("--hours", type=float, metavar="H", help="the longest schedule that ends in H hours")
    add("--tokens", type=_count, metavar="N", help="the schedule for N tokens, as in 2.5B")
    add("--epochs", type=float, metavar="E", help="the schedule for E passes over the data")
    add("--json", action="store_true", help="print it for programs")
    asked, rest = parser.parse_known_args(argv)
    budgets = [name for name in ("hours", "tokens", "epochs") if getattr(asked, name) is not None]
    lengths = [f"--{name}" for name in budgets]
    lengths += [word for word in rest if word.startswith(("--max_iters", "--lr_decay_iters"))]
    if budgets and len(lengths) > 1:
        raise InputError(f"{' and '.join(lengths)} each set the run's length; give one of them")
    for name in budgets:
        if not 0 < getattr(asked, name) < math.inf:
            raise InputError(f"--{name} {getattr(asked, name)} is not a length; give more than 0")
    if asked.unique_tokens is not None and asked.shard:
        raise InputError("--unique_tokens and --shard both tell the data; give one of them")
    return asked, rest


def _count(text: str) -> int:
    """A number of tokens as people write it: 650M, 2.5B, 1e9, 1_000_000."""
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e\d+)?)([kmb]?)", text.strip().lower())
    number = match and round(float(match[1]) * 1000 ** " kmb".index(match[2] or " "))
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 650M or 2.5B")
    return number


def _find_data(asked: argparse.Namespace, shape: GPTConfig, run: RunConfig) -> Data:
    folder = run.data_dir
    if asked.unique_tokens is not None:
        return Data(asked.unique_tokens, asked.unique_tokens, "as given by --unique_tokens")
    if asked.shard:
        return _count_shards(asked.shard)
    if (folder / "meta.json").exists() or (folder / "train.bin").exists():
        train, val = open_bins(folder, block_size=shape.block_size, vocab_size=shape.vocab_size)
        return Data(len(train), len(train) + len(val), f"prepared in {folder}")
    if any(folder.glob("*.parquet")):
        return _count_shards(str(folder))
    wanted = f"no data in {folder}; give --shard FILE.parquet or --unique_tokens 0.65B"
    if asked.epochs is not None:
        raise InputError(f"--epochs {asked.epochs:g} needs data: {wanted}")
    return Data(None, None, wanted)


def _count_shards(given: str) -> Data:
    """Tokens of parquet files before they are prepared, from one small column of theirs."""
    shards = open_shards(find_shards([given]), "text")
    means = [mean_token_count(shard) for shard in shards]
    if None in means:
        raise InputError(f"{given} has no token_count column to plan with; give --unique_tokens")
    # Each document will be followed by one end-of-text token.
    tokens = round(sum(shard.rows * (mean + 1) for shard, mean in zip(shards, means, strict=True)))
    files = f"{len(shards)} parquet file{'s' if len(shards) > 1 else ''}"
    source = f"by the token_count column of {files}, not yet prepared"
    return Data(round(tokens * (1 - VAL_FRACTION)), tokens, source)


def _speed_of_card(name: str, shape: GPTConfig, learn: TrainConfig, run: RunConfig) -> Speed:
    card = find_card(name)
    step = step_of(
        shape,
        run.loss,
        micro_batch_size=learn.batch_size,
        sequences_per_step=learn.sequences_per_step,
    )
    parts = seconds_by_part(step, peak_flops=card.peak_flops, bytes_per_s=card.bytes_per_s)
    shares = ", ".join(
        f"{part} {seconds / sum(parts.values()):.0%}" for part, seconds in parts.items()
    )
    reached = " and ".join(f"{reached_share(one):.0%} on a {one.card}" for one in PUBLISHED_RUNS)
    source = (
        f"{card.name}: {card.tensor_cores} tensor cores × {card.boost_mhz} MHz × {card.core_flops} "
        f"= {card.peak_flops / 1e12:.1f} TFLOPS (dense, fp32 accumulation) and "
        f"{card.bandwidth_gb_s} GB/s. By its FLOPs and bytes a step takes "
        f"{sum(parts.values()):.3g} s ({shares}). Of such a speed GPT-2 124M reached {reached}; "
        f"{expected_share(card):.0%} is expected here"
    )
    if not run.compile:
        source += f"; without torch.compile {COMPILE_GAIN} × slower (published: 1.5 to 1.85)"
    return Speed(predicted_tokens_per_s(card, step, compiled=run.compile), card, source)


def _measure(shape: GPTConfig, learn: TrainConfig, run: RunConfig) -> Speed:
    """The speed of this machine, by real training steps on random tokens."""
    device = describe_device(run.device, run.dtype)
    print(f"trying some real steps on {device.name} ...", file=sys.stderr)
    try:
        model = GPT(shape, loss=run.loss).to(device.torch_device)
        tokens_per_s, sequences = _try_steps(model, learn, device)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise InputError(
                f"not even one sequence fits on {device.name}; autofit.py --explain tells more"
            ) from error
        raise
    source = (
        f"measured here: {device.name}, {device.precision}, real training steps on micro-batches "
        f"of {sequences} × {shape.block_size} random tokens"
    )
    if device.type == "cuda" and run.compile:
        source += f", × {COMPILE_GAIN} for torch.compile (published: 1.5 to 1.85)"
        tokens_per_s *= COMPILE_GAIN
    return Speed(tokens_per_s, known_card(device.name), source)


def _try_steps(model: GPT, learn: TrainConfig, device: Device) -> tuple[float, int]:
    """Tokens per second and the micro-batch they were measured with, in bounded time."""
    optimizer, scaler = build_optimizer(model, learn), device.grad_scaler()
    shape = model.config

    def step(sequences: int, passes: int = 1) -> float:
        batches = random_micro_batches(
            sequences,
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
            device=device,
            passes=passes,
        )
        started = time.monotonic()
        arguments = dict(device=device, ranks=Ranks(), lr=0.0, grad_clip=learn.grad_clip, seed=0)
        loss, _ = train_step(model, optimizer, scaler, batches, **arguments)
        loss.item()  # waits for the device
        return time.monotonic() - started

    first_s = step(1)  # makes the optimiser's state as well
    if first_s > TRIAL_S:
        return shape.block_size / first_s, 1
    one_s = step(1)
    sequences = max(min(learn.batch_size, int(TRIAL_S / 2 / one_s)), 1)
    while True:
        try:
            micro_s = step(sequences)
            break
        except RuntimeError as error:
            if not is_out_of_memory(error) or sequences == 1:
                raise
        sequences //= 2
    passes = max(min(learn.gradient_accumulation_steps, int(TRIAL_S / micro_s)), 1)
    done, seconds = 0, 0.0
    while seconds < TRIAL_S:
        seconds += step(sequences, passes)
        done += passes * sequences
    return done * shape.block_size / seconds, sequences


def _within_budget(
    asked: argparse.Namespace, shape: GPTConfig, learn: TrainConfig, data: Data, speed: Speed
) -> TrainConfig:
    """The settings with the length that --hours, --tokens or --epochs ask for."""
    tokens_per_step = learn.sequences_per_step * shape.block_size
    if asked.hours is not None:
        name, tokens = f"--hours {asked.hours:g}", asked.hours * 3600 * speed.tokens_per_s
    elif asked.tokens is not None:
        name, tokens = f"--tokens {compact(asked.tokens)}", asked.tokens
    elif asked.epochs is not None:
        name, tokens = f"--epochs {asked.epochs:g}", asked.epochs * data.train_tokens
    else:
        return learn
    steps = int(tokens / tokens_per_step)
    if steps < 1:
        raise InputError(
            f"{name} is less than one step: {compact(tokens)} tokens, while a step has "
            f"{compact(tokens_per_step)} and takes "
            f"{duration(tokens_per_step / speed.tokens_per_s)}; give more, or a smaller batch"
        )
    ends = None if learn.lr_decay_iters is None else steps
    warmup = _warmup(learn, steps)
    return replace(learn, max_iters=steps, lr_decay_iters=ends, warmup_iters=warmup)


def _warmup(learn: TrainConfig, steps: int) -> int:
    """The warm-up asked for, but no more than a tenth of the run."""
    return min(learn.warmup_iters, steps // 10)


def _optimal_tokens(shape: GPTConfig) -> float:
    return optimal_tokens(n_layer=shape.n_layer, n_embd=shape.n_embd, vocab_size=shape.vocab_size)


def _non_embedding(model: GPT) -> int:
    embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    return model.num_params() - sum(weight.numel() for weight in embeddings)


def _forecast_json(forecast: Forecast) -> dict[str, Any]:
    return {
        "parameters": forecast.parameters,
        "steps": forecast.steps,
        "tokens_per_step": forecast.tokens_per_step,
        "tokens": forecast.tokens,
        "unique_tokens": forecast.unique_tokens,
        "epochs": forecast.epochs,
        "seconds": forecast.seconds,
        "kwh": forecast.kwh,
        "loss": forecast.loss,
        "loss_band": forecast.band,
    }


def _print(plan: Plan) -> None:
    on_terminal = sys.stdout.isatty()
    width = min(Console().width, COLUMNS) if on_terminal else COLUMNS
    console = Console(width=width, highlight=False, force_terminal=on_terminal)
    with console.capture() as captured:
        _heading(console, "What you asked for")
        console.print(_rows(_asked_rows(plan)))
        for warning in plan.warnings():
            console.print(_rows([("warning", warning)], style="yellow"))
        _heading(console, "What it will give")
        console.print(_result_table(plan))
        _heading(console, "What to do instead")
        console.print(_rows(_instead_rows(plan)))
        for one in dict.fromkeys((plan.forecast, plan.better)):
            console.print(f"\n  {_name(one)}:")
            console.print(plan.command(one.steps), markup=False, soft_wrap=True)  # to be pasted
        _heading(console, "Where the speed comes from")
        console.print(_rows(_speed_rows(plan)))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _name(run: Forecast) -> str:
    epochs = f", {run.epochs:.3g} epochs" if run.epochs else ""
    return f"{run.steps:,} steps, {duration(run.seconds)}{epochs}"


def _heading(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _asked_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    shape, learn, asked = plan.model.config, plan.learn, plan.forecast
    yield (
        "model",
        f"{asked.parameters:,} parameters ({_non_embedding(plan.model):,} without embeddings): "
        f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide",
    )
    yield (
        "step",
        f"{learn.batch_size} × {learn.gradient_accumulation_steps} sequences of "
        f"{shape.block_size} = {asked.tokens_per_step:,} tokens",
    )
    yield "run", f"{asked.steps:,} steps = {compact(asked.tokens)} tokens"
    if asked.epochs is None:
        yield "data", plan.data.source
    else:
        yield "data", f"{compact(asked.unique_tokens)} tokens, {plan.data.source}"
        yield "epochs", f"{asked.epochs:.3g}"
    yield "time", f"{duration(asked.seconds)} at {compact(asked.tokens_per_s)} tokens/s"
    if asked.kwh is not None:
        yield "energy", f"{asked.kwh:.3g} kWh at {asked.watts} W, the card alone"
    bins = plan.data.all_tokens and f"{_gb(BIN_BYTES_PER_TOKEN * plan.data.all_tokens)} of bins, "
    yield (
        "disk",
        f"{bins or ''}at most {_gb(plan.checkpoints * plan.checkpoint_bytes)} of checkpoints "
        f"({plan.checkpoints} × {_gb(plan.checkpoint_bytes)})",
    )
    if memory := _memory_row(plan):
        yield "memory", memory


def _memory_row(plan: Plan) -> str | None:
    """What a step takes, and the micro-batches that autofit should find; by arithmetic."""
    budget = budget_of(plan.gpu, None, plan.run)
    if budget is None:
        return None
    eager = Setup(
        plan.model.config,
        dtype=dtype_of(plan.gpu, plan.run),
        loss=plan.run.loss,
        has_flash=has_flash_on(plan.gpu),
    )
    sizes, told = sizes_for(plan.learn.sequences_per_step), []
    for setup in (eager, replace(eager, compiled=True))[: 1 + plan.run.compile]:
        stage = "compiled" if setup.compiled else "eager"
        needs = {size: total(footprint(setup, size)) for size in sizes}
        room_bytes = budget.limit_bytes - budget.overhead.library_bytes
        largest = max((size for size, need in needs.items() if need <= room_bytes), default=None)
        if largest is None:
            return f"not one sequence fits {stage} without savers; autofit.py --explain tells more"
        passes = -(-plan.learn.sequences_per_step // largest)
        told.append(f"{largest} × {passes} {stage} ({_gb(needs[largest])})")
    return f"{' and '.join(told)} should fit in {_gb(budget.limit_bytes)} of {budget.card}"


def _result_table(plan: Plan) -> RenderableType:
    asked = plan.forecast
    if asked.recipe is None:
        return Text("  no forecast: the law is for GPT-2's vocabulary, this model has another")
    if asked.loss is None:
        return Text(
            f"  no forecast: the law begins at {compact(FEWEST_TOKENS)} tokens' worth of new text"
        )
    table = Table(box=None, padding=(0, 3, 0, 0))
    for title in ("", "epochs", "tokens", "steps", "time", "expected loss", "gained"):
        table.add_column(title, justify="left" if title == "" else "right", no_wrap=True)
    before = None
    for one in plan.milestones():
        table.add_row(
            "  as asked" if one == asked else "",
            f"{one.epochs:.3g}" if one.epochs else "-",
            compact(one.tokens),
            f"{one.steps:,}",
            duration(one.seconds),
            f"{one.band.low:.2f} to {one.band.high:.2f}" if one.band else "-",
            f"{before - one.loss:.3f}" if before and one.loss else "",
        )
        before = one.loss
    return Group(table, Text(_what_repeats_buy(plan)))


def _what_repeats_buy(plan: Plan) -> str:
    told = "  Validation loss on FineWeb once the learning rate has decayed to its end."
    first, asked = plan.milestones()[0], plan.forecast
    if asked.epochs and asked.epochs > 1 and first.loss:
        if_new = replace(asked, unique_tokens=None)
        told += (
            f"\n  All epochs after the first buy {first.loss - asked.loss:.2f} of it; as many new "
            f"tokens would buy {first.loss - if_new.loss:.2f}."
        )
    return told


def _instead_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    asked, better, unique = plan.forecast, plan.better, plan.data.train_tokens
    if unique:
        advice = "this run is within that"
        if better != asked:
            advice = f"take {better.steps:,} steps, {duration(better.seconds)}"
        yield (
            "epochs",
            f"up to {LIKE_NEW_EPOCHS} are as good as new data, up to {FADING_EPOCHS} fade, more is "
            f"waste: {advice}",
        )
    epochs = f", {plan.optimal_tokens / unique:.2g} epochs" if unique else ""
    yield (
        "tokens",
        f"compute-optimal for this model: {compact(plan.optimal_tokens)}{epochs}; asked for are "
        f"{compact(asked.tokens / plan.optimal_tokens)} × that",
    )
    if fitting := plan.model_for_the_time:
        tokens = _optimal_tokens(fitting)
        lack = ""
        if unique and tokens > LIKE_NEW_EPOCHS * unique:
            lack = f", which are {tokens / unique:.2g} epochs of these data: get more first"
        yield (
            "model",
            f"compute-optimal for {duration(asked.seconds)}: {fitting.n_layer} layers, "
            f"{fitting.n_head} heads, {fitting.n_embd} wide on {compact(tokens)} tokens{lack}",
        )
    if plan.weight_decay is not None:
        yield (
            "weight decay",
            f"{plan.weight_decay} for {compact(asked.parameters)} parameters on {compact(unique)} "
            f"tokens (now {plan.learn.weight_decay:g})",
        )


def _speed_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "speed", f"{compact(plan.speed.tokens_per_s)} tokens/s"
    yield "source", plan.speed.source
    yield "work", f"{plan.model.flops_per_token() / 1e6:.0f} MFLOP per token (6N + 12LCT)"


def _rows(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=14, no_wrap=True)
    grid.add_column()
    for name, value in rows:
        grid.add_row(f"  {name}", Text(value), style=style)
    return grid


def _gb(count: float) -> str:
    return f"{count / 1e9:.3g} GB"


if __name__ == "__main__":
    run_script(main)
