"""The truth about a run before it burns a week.

    python plan.py config/train_fineweb_4070.py --gpu "RTX 4070"
    python plan.py config/train_fineweb_4070.py --gpu "RTX 4070" --hours 24
    python plan.py config/train_fineweb_4070.py --parquet 000_00000.parquet --epochs 4 --json
    python plan.py config/train_gpt2_124m.py --gpu "RTX 4070" --gpus 2 --link pcie4-x16
    python plan.py --model=auto --gpu "RTX 4070" --hours 5 --unique_tokens 0.73B

Without --gpu the speed is measured on this machine, by a short trial of real training steps. Every
setting of train.py can be given as well: --max_iters=1000. The last one shows what train.py with
--model=auto would choose.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from nanofit.fit.search import sizes_for
from nanofit.machine.cards import check_gpus
from nanofit.memory.budget import Budget, budget_of, dtype_of, has_flash_on
from nanofit.memory.course import Need
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.memory.several import room_bytes
from nanofit.outlook.choice import (
    AUTO,
    Choice,
    choose,
    data_for,
    read_asked,
    take_auto,
)
from nanofit.outlook.forecast import Forecast
from nanofit.outlook.links import LINKS
from nanofit.outlook.plan import (
    BIN_BYTES_PER_TOKEN,
    Plan,
    Speed,
    Spread,
    find_data,
    optimal_tokens_of,
    speed_of_card,
    speed_of_cards,
    within_budget,
)
from nanofit.outlook.scaling import FADING_EPOCHS, FEWEST_TOKENS, LIKE_NEW_EPOCHS
from nanofit.run.here import capacity_of, choose_here, measured_speed
from nanofit.settings.config import Settings, load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import SWITCH, FlagParser, InputError, compact, duration, run_script

BUDGETS = ("hours", "tokens", "epochs")
MUON_SOURCE = (
    "modded-nanogpt's track 3 for 524,288 tokens a step, 12 layers of 768 and 1.7B new tokens. By "
    "nanochat's rules all rates go with √batch, embedding's and head's with 1/√width as well, and "
    "weight decay with √batch / tokens of an epoch (arXiv:2405.13698). Batch and decay rules come "
    "from AdamW: for Muon they are an assumption, as nanochat says. For depth and vector_rate no "
    "rule is known: they stay as published"
)
COLUMNS = 100
MOST = 1e18  # hours, tokens or epochs: more is a slip


def main(argv: Sequence[str]) -> None:
    asked, rest = _parse(argv)
    is_auto, rest = take_auto(rest)
    choice = _choose(asked, rest) if is_auto else None
    plan = choice.plan if choice else _plan(asked, rest)
    if asked.json:
        chosen = {"chosen": choice.as_json()} if choice else {}
        print(json.dumps(chosen | plan.as_json(), indent=2))
    else:
        _print(plan, choice)


def _choose(asked: argparse.Namespace, words: Sequence[str]) -> Choice:
    if asked.tokens or asked.epochs:
        raise InputError(f"{AUTO} chooses for a time: give --hours, and no --tokens or --epochs")
    if asked.gpus > 1:
        raise InputError(f"{AUTO} chooses for one card: leave out --gpus, or name the model")
    if asked.hours:
        words = [*words, f"--hours={asked.hours}"]
    data = data_for(words, unique_tokens=asked.unique_tokens, shard=asked.parquet)
    if not asked.gpu:
        return choose_here(words, data)
    return choose(words, capacity_of(asked.gpu, read_asked(words).run), data)


def _plan(asked: argparse.Namespace, rest: Sequence[str]) -> Plan:
    settings = load_config([*rest, "--shard=True"] if asked.shard else rest)
    budget = {name: getattr(asked, name) for name in BUDGETS}
    if not any(budget.values()):
        budget["hours"] = settings.learn.hours
    data = find_data(settings, unique_tokens=asked.unique_tokens, shard=asked.parquet)
    speed = _speed(asked, settings)
    return Plan(
        words=tuple(rest),
        settings=within_budget(settings, data, speed, **budget),
        data=data,
        speed=speed,
        gpu=asked.gpu,
    )


def _speed(asked: argparse.Namespace, settings: Settings) -> Speed:
    if asked.gpus > 1:
        return speed_of_cards(
            asked.gpu, settings, world=asked.gpus, shard=settings.run.shard, link=asked.link
        )
    return speed_of_card(asked.gpu, settings) if asked.gpu else measured_speed(settings)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's own flags, and the words that belong to the settings of the run."""
    parser = FlagParser(
        usage="python plan.py config/X.py [options] [--SETTING=VALUE ...]",
        description=__doc__,
    )
    add = parser.add_argument
    add("--gpu", metavar="NAME", help="plan for this card, as in 'RTX 4070' or 'A100 80GB'")
    add("--unique_tokens", type=_count, metavar="N", help="tokens of the data, as in 0.65B")
    add("--parquet", metavar="FILE", help="count the tokens of this file or folder instead")
    add("--gpus", type=int, default=1, metavar="N", help="with --gpu: so many of them")
    add("--shard", **SWITCH, help="with --gpus: each card holds a part of the model")
    add("--link", metavar="NAME", help=f"with --gpus: what connects them: {', '.join(LINKS)}")
    add("--hours", type=float, metavar="H", help="the longest schedule that ends in H hours")
    add("--tokens", type=_count, metavar="N", help="the schedule for N tokens, as in 2.5B")
    add("--epochs", type=float, metavar="E", help="the schedule for E passes over the data")
    add("--json", action="store_true", help="print it for programs")
    asked, rest = parser.parse_known_args(argv)
    budgets = [name for name in BUDGETS if getattr(asked, name) is not None]
    lengths = [f"--{name}" for name in budgets]
    lengths += [word for word in rest if word.startswith(("--max_iters", "--lr_decay_iters"))]
    if budgets and len(lengths) > 1:
        raise InputError(f"{' and '.join(lengths)} each set the run's length; give one of them")
    for name in budgets:
        length = float(getattr(asked, name))
        if not 0 < length < MOST:
            raise InputError(
                f"--{name} {length} is not a length; give more than 0 and less than {MOST:g}"
            )
    if asked.unique_tokens is not None and asked.parquet:
        raise InputError("--unique_tokens and --parquet both tell the data; give one of them")
    check_gpus(asked.gpus, shard=asked.shard)
    if asked.gpus > 1 and not asked.gpu:
        raise InputError("--gpus needs the card's name: --gpu 'RTX 4070'")
    if asked.gpus == 1 and asked.link:
        raise InputError("--link connects several cards: give --gpus 2 or more")
    return asked, rest


def _count(text: str) -> int:
    """A number of tokens as people write it: 650M, 2.5B, 1e9, 1_000_000."""
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e\d+)?)([kmb]?)", text.strip().lower())
    number = float(match[1]) * 1000 ** " kmb".index(match[2] or " ") if match else 0
    if not 0.5 < number < MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 650M or 2.5B")
    return round(number)


def _print(plan: Plan, choice: Choice | None) -> None:
    on_terminal = sys.stdout.isatty()
    width = min(Console().width, COLUMNS) if on_terminal else COLUMNS
    console = Console(width=width, highlight=False, force_terminal=on_terminal)
    with console.capture() as captured:
        if choice:
            _heading(console, "What was chosen")
            console.print(_rows((one.topic, one.told()) for one in choice.reasons))
            console.print(_choice_table(choice))
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
            is_chosen = choice and one == plan.forecast
            command = choice.command if is_chosen else plan.command(one.steps)
            console.print(command, markup=False, soft_wrap=True)  # to be pasted
        _heading(console, "Where the speed comes from")
        console.print(_rows(_speed_rows(plan)))
        if plan.speed.spread:
            _heading(console, "What the cards tell each other; by arithmetic, nothing was measured")
            console.print(_rows(_spread_rows(plan.speed.spread)))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _choice_table(choice: Choice) -> RenderableType:
    table = Table(box=None, padding=(0, 3, 0, 0))
    for title in ("", "layers", "width", "parameters", "tokens", "expected loss"):
        table.add_column(title, justify="left" if title == "" else "right", no_wrap=True)
    names = ("  chosen", *("  next best" for _ in choice.others))
    for name, one in zip(names, (choice.taken, *choice.others), strict=True):
        shape, loss = one.shape, f"{one.loss:.3f}" if one.is_known else "-"
        sizes = (shape.n_layer, shape.n_embd, compact(shape.parameters), compact(one.tokens), loss)
        table.add_row(name, *map(str, sizes))
    return table


def _name(run: Forecast) -> str:
    epochs = f", {run.epochs:.3g} epochs" if run.epochs else ""
    return f"{run.steps:,} steps, {duration(run.seconds)}{epochs}"


def _heading(console: Console, title: str) -> None:
    console.print(f"\n{title}", style="bold")


def _asked_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    shape, learn, asked = plan.shape, plan.learn, plan.forecast
    yield (
        "model",
        f"{shape.parameters:,} parameters "
        f"({shape.parameters - shape.embedding_parameters:,} without embeddings): "
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
        alone = "the cards alone" if plan.speed.spread else "the card alone"
        yield "energy", f"{asked.kwh:.3g} kWh at {asked.watts} W, {alone}"
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
    spread = plan.speed.spread
    world, shard = (spread.world, spread.shard) if spread else (1, False)
    eager = Setup(
        plan.shape,
        dtype=dtype_of(plan.gpu, plan.run),
        loss=plan.run.loss,
        optimizer=plan.learn.optimizer,
        has_flash=has_flash_on(plan.gpu, plan.run),
        world=world,
        shard=shard,
    )
    if shard:
        return _sharded_memory(plan, need_of(eager), room_bytes(budget, world), budget)
    share = plan.learn.sequences_per_step // world
    sizes, told = sizes_for(share), []
    for setup in (eager, replace(eager, compiled=True))[: 1 + plan.run.compile]:
        stage = "compiled" if setup.compiled else "eager"
        need = need_of(setup)
        fits = need.largest(room_bytes(budget, world))
        largest = max((size for size in sizes if size <= fits), default=None)
        if largest is None:
            return f"not one sequence fits {stage} without savers; autofit.py --explain tells more"
        passes = -(-share // largest)
        told.append(f"{largest} × {passes} {stage} ({_gb(need.at(largest))})")
    return f"{' and '.join(told)} should fit in {_gb(budget.limit_bytes)} of {budget.card}"


def _sharded_memory(plan: Plan, need: Need, usable_bytes: int, budget: Budget) -> str:
    """Of batch_size as it is: where no process has a whole model nothing is tried out."""
    learn, size = plan.learn, plan.learn.batch_size
    takes = f"{_gb(need.at(size))}; {_gb(usable_bytes)} of {budget.card} are for tensors"
    if (fits := need.largest(usable_bytes)) >= size:
        return f"{size} sequences a pass, eager, take {takes}"
    share = learn.sequences_per_step // plan.speed.spread.world
    smaller = max((one for one in range(1, fits + 1) if share % one == 0), default=None)
    if smaller is None:
        return "not one sequence fits eager without savers; autofit.py --explain tells more"
    return (
        f"{size} sequences a pass do not fit: they take {takes}, and with --shard no smaller ones "
        f"are looked for; give --batch_size={smaller} "
        f"--gradient_accumulation_steps={learn.sequences_per_step // smaller}"
    )


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
        gained = f"{before - one.loss:.3f}" if before and one.loss else ""
        table.add_row("  as asked" if one == asked else "", *_result_cells(one), gained)
        before = one.loss
    if plan.plain:
        table.add_row("  plain recipe", *_result_cells(plan.plain), "")
    return Group(table, Text(_what_repeats_buy(plan)))


def _result_cells(run: Forecast) -> Iterator[str]:
    yield f"{run.epochs:.3g}" if run.epochs else "-"
    yield compact(run.tokens)
    yield f"{run.steps:,}"
    yield duration(run.seconds)
    yield f"{run.band.low:.2f} to {run.band.high:.2f}" if run.band else "-"


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
        yield "model", f"compute-optimal for {duration(asked.seconds)}: {_told(fitting, unique)}"
    if plan.weight_decay is not None:
        parameters = compact(plan.shape.parameters)
        yield (
            "weight decay",
            f"{plan.weight_decay} for {parameters} parameters on {compact(unique)} "
            f"tokens (now {plan.learn.weight_decay:g})",
        )
    if settings := plan.muon_settings:
        told = (f"{k} {v:g} (now {getattr(plan.learn, k):.3g})" for k, v in settings.items())
        yield "rates", f"for this batch, width and data: {', '.join(told)}"
        yield "their source", MUON_SOURCE


def _told(model: GPTConfig, unique: int | None) -> str:
    """A model, the tokens it should learn from, and whether there are as many."""
    tokens, lack = optimal_tokens_of(model), ""
    if unique and tokens > LIKE_NEW_EPOCHS * unique:
        lack = f", which are {tokens / unique:.2g} epochs of these data: get more first"
    return (
        f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide on "
        f"{compact(tokens)} tokens{lack}"
    )


def _speed_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "speed", f"{compact(plan.speed.tokens_per_s)} tokens/s"
    yield "source", plan.speed.source
    yield "work", f"{plan.shape.flops_per_token / 1e6:.0f} MFLOP per token (6N + 12LCT)"


def _spread_rows(spread: Spread) -> Iterator[tuple[str, str]]:
    traffic, link = spread.traffic, spread.link
    way = "each with a part of the model" if spread.shard else "each with the whole model"
    yield "cards", f"{spread.world}, {way}; {traffic.passes} passes of each in a step"
    what = "weights and gradients, block by block in each pass"
    if not spread.shard:
        what = "gradients, in float32, once a step"
    yield "a step", f"each card sends {_gb(traffic.step_bytes)}: {what}"
    yield (
        "link",
        f"{link.name}: {link.gb_per_s:g} GB/s each way, of which {link.reached:.0%} are taken to "
        "be reached; boards differ, so measure yours with nccl-tests",
    )
    hidden = "behind passes" if spread.shard else "behind the last backward pass"
    if not spread.overlaps:
        hidden = "behind nothing: a compiled graph gives all gradients at its end"
    yield "hidden", hidden
    yield (
        "waiting",
        f"{spread.waiting_share:.1%} of the time: {spread.waiting_s:.3g} s beside "
        f"{spread.computing_s:.3g} s of computing",
    )


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
