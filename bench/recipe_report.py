"""What the runs of bench/recipe.py say: results/recipe.md and results/recipe.png."""

import statistics
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

from bench.figures import Figure, record
from bench.recipe_parts import ALL_CHANGES
from bench.recipe_runs import (
    ARMS,
    BASELINE,
    BETA2,
    CHANGED_STEPS,
    FULL_STEPS,
    FULL_TOKENS,
    LENGTHS,
    OURS,
    PUBLISHED_BETA2,
    PUBLISHED_TOKENS_PER_STEP,
    SCALED_BETA2,
    SEEDS,
    SEQUENCES,
    SHAPE,
    TOKENS_PER_STEP,
    VAL_SEQUENCES,
    Arm,
    Results,
    Run,
)
from nanofit.files import atomic_write
from nanofit.terminal import InputError, compact

MOST_TOKENS, MOST_CPU = 0.5, 0.6  # targets, in units of what the tuned baseline takes
BY_HAND = "## What follows from it"  # what stands from here on is kept


@dataclass(frozen=True)
class Row:
    """An arm at its best rate: by length, the mean loss over seeds; the seconds of a token."""

    arm: Arm
    rate: float
    losses: dict[int, float]  # by tokens
    spread: float | None  # of the losses of seeds, at full length
    seeds: int
    other_s_per_token: float
    optimizer_s_per_token: float
    curve: list[list[float]]  # of training at full length: steps, loss

    @property
    def optimizer_share(self) -> float:
        return self.optimizer_s_per_token / (self.optimizer_s_per_token + self.other_s_per_token)


@dataclass(frozen=True)
class Reached:
    """How long a run must be to end at a loss; a sign says that none was short or long enough."""

    tokens: float
    sign: str = ""

    def told(self, ratio: float) -> str:
        return f"{self.sign}{ratio:.2f} ×"


def report(results: Results, folder: Path) -> None:
    """Write the tables, the text around them and the picture; print the tables."""
    if not results.known:
        raise InputError(f"there are no results in {results.path}")
    rows = [row for arm in ARMS if (row := _row(results, arm))]
    _record(rows)
    tables = {
        "arms": [*_arm_table(rows)],
        "targets": [*_target_table(rows)],
        "rates": [*_rate_table(results)],
        "changes": [*_change_table(results)],
    }
    for table in tables.values():
        print(*table, sep="\n", end="\n\n")
    path = folder / "recipe.md"
    by_hand = path.read_text(encoding="utf-8").partition(BY_HAND) if path.exists() else ("", "", "")
    told = _text(results, rows, {name: "\n".join(table) for name, table in tables.items()})
    with atomic_write(path) as temporary:
        temporary.write_text(told + "".join(by_hand[1:]), encoding="utf-8")
    if rows:
        _plot(rows, folder / "recipe.png")


def _row(results: Results, arm: Arm) -> Row | None:
    """None if its best rate is not known."""
    rate = results.best_rate(arm)
    if rate is None:
        return None
    of = partial(Run, arm.name, rate)
    runs = {steps: [of(steps, seed).key for seed in SEEDS] for steps in LENGTHS}
    known = {n: [results.known[k] for k in keys if k in results.known] for n, keys in runs.items()}
    everything = [result for found in known.values() for result in found]
    losses = {steps: [r["val_loss"] for r in found] for steps, found in known.items() if found}
    full = losses.get(FULL_STEPS, [])
    return Row(
        arm,
        rate,
        {steps * TOKENS_PER_STEP: statistics.fmean(found) for steps, found in losses.items()},
        statistics.stdev(full) if len(full) > 1 else None,
        len(full),
        statistics.median(result["other_s"] / result["tokens"] for result in everything),
        statistics.median(result["optimizer_s"] / result["tokens"] for result in everything),
        known[FULL_STEPS][0]["curve"] if full else [],
    )


def _target_loss(rows: list[Row]) -> float | None:
    """The tuned baseline's, at full length."""
    return next((r.losses.get(FULL_TOKENS) for r in rows if r.arm.name == BASELINE.name), None)


def _reached(row: Row, loss: float) -> Reached:
    """On the line through the logarithms of the lengths on both sides of it."""
    points = sorted(row.losses.items())
    (shortest, highest), (longest, _) = points[0], points[-1]
    if highest <= loss:
        return Reached(shortest, "" if highest == loss else "< ")
    for (few, high), (many, low) in pairwise(points):
        if low <= loss <= high:
            part = (high - loss) / (high - low)
            return Reached(exp(log(few) + part * (log(many) - log(few))))
    return Reached(longest, "> ")


def _ratios(row: Row, reached: Reached, rows: list[Row]) -> tuple[float, float]:
    """Tokens, and CPU time outside the optimiser, in units of what the tuned baseline takes."""
    baseline = next(one for one in rows if one.arm.name == BASELINE.name)
    tokens = reached.tokens / FULL_TOKENS
    return tokens, tokens * row.other_s_per_token / baseline.other_s_per_token


def _arm_table(rows: list[Row]) -> Iterator[str]:
    yield (
        "| arm | best rate | loss at ¼ | at ½ | at full length | ± (seeds) | tokens to the tuned "
        "baseline's loss | CPU time to it, without the optimiser | ms a step, without the "
        "optimiser | optimiser's share |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    target = _target_loss(rows)
    for row in rows:
        losses = [row.losses.get(steps * TOKENS_PER_STEP) for steps in LENGTHS]
        told = ["-", "-"]
        if target:
            reached = _reached(row, target)
            tokens, cpu = _ratios(row, reached, rows)
            many = f"{reached.sign}{compact(reached.tokens)}"
            seconds = f"{reached.sign}{reached.tokens * row.other_s_per_token:.0f} s"
            told = [f"{many} ({reached.told(tokens)})", f"{seconds} ({reached.told(cpu)})"]
        cells = [
            row.arm.name,
            f"{row.rate:g}",
            *("-" if loss is None else f"{loss:.4f}" for loss in losses),
            f"{'-' if row.spread is None else f'{row.spread:.4f}'} ({row.seeds})",
            *told,
            f"{1000 * TOKENS_PER_STEP * row.other_s_per_token:.1f}",
            f"{row.optimizer_share:.0%}",
        ]
        yield f"| {' | '.join(cells)} |"


def _target_table(rows: list[Row]) -> Iterator[str]:
    yield "| modern + Muon, to the tuned baseline's loss: target | reached | met |"
    yield "|---|--:|---|"
    ours = next((row for row in rows if row.arm.name == OURS.name), None)
    loss = _target_loss(rows)
    told, ratios, sign = ["-", "-"], None, ""
    if ours and loss:
        reached = _reached(ours, loss)
        ratios, sign = _ratios(ours, reached, rows), reached.sign
        told = [reached.told(ratio) for ratio in ratios]
    names = (
        (f"tokens: at most {MOST_TOKENS} ×", MOST_TOKENS),
        (f"CPU time outside the optimiser: at most {MOST_CPU} ×", MOST_CPU),
    )
    for place, (name, most) in enumerate(names):
        met = "not known yet" if ratios is None else _met(ratios[place], sign, most)
        yield f"| {name} | {told[place]} | {met} |"


def _record(rows: list[Row]) -> None:
    """What the recipe as a whole comes to, where all of it has run."""
    ours = next((row for row in rows if row.arm.name == OURS.name), None)
    loss = _target_loss(rows)
    if not (ours and loss):
        return
    tokens, cpu = _ratios(ours, _reached(ours, loss), rows)
    shared = {"other": 1.0, "of": "gpt2 + AdamW, tuned", "unit": "×"}
    record(
        "recipe",
        [
            Figure("tokens to the loss of tuned gpt2 + AdamW, at most", tokens, **shared),
            Figure("the same: CPU time outside the optimiser, at most", cpu, **shared),
        ],
        command="make bench-recipe",
        conditions=f"{len(SEEDS)} seeds, 4 layers of 192, bytes of English",
    )


def _met(ratio: float, sign: str, most: float) -> str:
    if sign == "< " and ratio > most:
        return "not known: no run was short enough"
    return "yes" if ratio <= most and sign != "> " else "no"


def _rate_table(results: Results) -> Iterator[str]:
    yield "| arm | losses at a quarter of the length, by rate |"
    yield "|---|---|"
    for arm in ARMS:
        losses = sorted(results.losses_by_rate(arm).items())
        best = min((loss for _, loss in losses), default=None)
        told = [f"{rate:g}: {_marked(loss, loss == best)}" for rate, loss in losses]
        yield f"| {arm.name} | {', '.join(told) or '-'} |"


def _marked(loss: float, is_best: bool) -> str:
    return f"**{loss:.4f}**" if is_best else f"{loss:.4f}"


def _change_table(results: Results) -> Iterator[str]:
    """Against the first seed, which all of them have; the spread of three says what is noise."""
    whole = _whole(results)
    if not whole:
        return
    spread = statistics.stdev(whole) if len(whole) > 1 else None
    noise = "" if spread is None else f" ± {spread:.4f}"
    yield (
        f"| modern + Muon at a quarter of the length, {statistics.fmean(whole):.4f}{noise} over "
        f"{len(whole)} seeds | loss with the first seed | worse by | twice the spread |"
    )
    yield "|---|--:|--:|---|"
    for change, loss in _changed(results).items():
        worse = loss - whole[0]
        seen = "-" if spread is None else "beyond" if abs(worse) > 2 * spread else "within"
        yield f"| {change} | {loss:.4f} | {worse:+.4f} | {seen} |"


def _whole(results: Results) -> list[float]:
    """Losses of the whole recipe at a quarter of the length, the first seed's first."""
    rate = results.best_rate(OURS)
    runs = [Run(OURS.name, rate, CHANGED_STEPS, seed) for seed in SEEDS] if rate else []
    return [results.loss(run) for run in runs if results.loss(run) is not None]


def _changed(results: Results) -> dict[str, float]:
    rate = results.best_rate(OURS)
    if rate is None:
        return {}
    of = partial(Run, OURS.name, rate, CHANGED_STEPS)
    losses = {change: results.loss(of(change=change)) for change in ALL_CHANGES}
    return {change: loss for change, loss in losses.items() if loss is not None}


def _text(results: Results, rows: list[Row], tables: dict[str, str]) -> str:
    """What stands in results/recipe.md, but for what is written by hand."""
    return "\n\n".join(
        [
            "# Tokens that a recipe needs",
            _what_it_is(results.common),
            tables["arms"],
            tables["targets"],
            *(["![Loss against tokens and CPU seconds](recipe.png)"] if rows else []),
            _how_to_read_it(results, rows),
            "## Rates",
            tables["rates"],
            "## Parts left out, and added",
            tables["changes"] or "None has been tried so far.",
            _what_was_not_tried(results),
            "",
        ]
    )


def _what_it_is(common: dict[str, Any]) -> str:
    steps = _and(f"{steps:,}" for steps in LENGTHS)
    tokens = _and(compact(steps * TOKENS_PER_STEP) for steps in LENGTHS)
    return _paragraph(
        f"`make bench-recipe`: small GPTs learn `{common['text']}` byte by byte "
        f"({compact(common['text_bytes'])} bytes, of which the longest run reads "
        f"{FULL_TOKENS / common['text_bytes']:.0%}). {SHAPE['n_layer']} layers of "
        f"{SHAPE['n_embd']}, {SHAPE['n_head']} heads, {SHAPE['block_size']} tokens of context, "
        f"{SEQUENCES} sequences or {TOKENS_PER_STEP:,} tokens a step. Runs are of {steps} steps or "
        f"{tokens} tokens, each with a schedule that ends there. Losses are those of "
        f"{VAL_SEQUENCES * SHAPE['block_size']:,} fixed tokens of other documents, in nats a byte. "
        "Tokens to a loss lie on the line between the two lengths on both sides of it, in "
        "logarithms; `<` where the shortest run is already below it. CPU seconds are of one "
        "thread, compiled, medians over an arm's runs, which had to share the cores with others."
    )


def _how_to_read_it(results: Results, rows: list[Row]) -> str:
    seeds = "; ".join(f"{row.arm.name}: {row.seeds}" for row in rows) or "no best rate is known yet"
    longest, steps = f"{PUBLISHED_TOKENS_PER_STEP:,}", 1 / (1 - SCALED_BETA2)
    return "\n".join(
        [
            _paragraph(
                "Points are runs that have ended, thin lines the training loss on the way of "
                f"full-length runs. Seeds at full length, of {len(SEEDS)}, by {seeds}. Changes "
                f"tried: {len(_changed(results))} of {len(ALL_CHANGES)}."
            ),
            "",
            _point(
                "As nanoGPT: β₂ 0.95, cosine to a tenth of the rate. Tuned: β₂ for small steps, a "
                "decay to 0 over the last 70 %, as in the modern recipe. All AdamW arms warm up "
                "over a twentieth of a run."
            ),
            _point(
                "β₂ for small steps keeps the second moment's memory as long in tokens as "
                f"{PUBLISHED_BETA2} does at {longest} a step: {PUBLISHED_BETA2}^"
                f"({TOKENS_PER_STEP:,} / {longest}) = {SCALED_BETA2:.5f}. That is a memory of "
                f"{steps:,.0f} steps, longer than these runs; so it is capped at a tenth of the "
                f"longest: {BETA2:.5f}. AdamW beside Muon keeps its published {PUBLISHED_BETA2}."
            ),
            _point(
                f"Muon takes five steep Newton-Schulz steps: at {TOKENS_PER_STEP:,} tokens a step "
                f"the optimiser's time counts, at {longest} it does not ([muon.md](muon.md)). That "
                "is why CPU time is told without it."
            ),
        ]
    )


def _what_was_not_tried(results: Results) -> str:
    missing = [change for change in ALL_CHANGES if change not in _changed(results)]
    return "\n".join(
        [
            _paragraph(
                "Each is one run with the first seed, at the recipe's best rate and at a "
                "quarter of the length: a difference within twice the seeds' spread says nothing. "
                "Not tried:"
            ),
            "",
            *([_point(f"of the changes: {'; '.join(missing)};")] if missing else []),
            _point(
                "a tied head: embedding and head have starts and rates of their own, so that it "
                "would change more than one thing at once;"
            ),
            _point(
                "rates between powers of two; other rates of embedding, head and vectors in units "
                "of Muon's; other momenta; other weight decays than the recipe's and none;"
            ),
            _point(
                "larger models, more tokens a step, and runs of more than "
                f"{compact(FULL_TOKENS)} tokens: what is gained there is published, not measured "
                "here."
            ),
        ]
    )


def _and(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False)


def _point(text: str) -> str:
    return textwrap.indent(_paragraph(text), "  ").replace("  ", "- ", 1)


def _plot(rows: list[Row], path: Path) -> None:
    """Loss at the end of each run, against its tokens and its CPU seconds; and the way there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: it needs matplotlib (pip install -r requirements-extras.txt)")
        return
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    by_tokens, by_seconds = figure.subplots(1, 2, sharey=True)
    for number, (row, marker) in enumerate(zip(rows, "osD^", strict=False)):
        color, per_token = f"C{number}", row.other_s_per_token + row.optimizer_s_per_token
        for axes, unit in ((by_tokens, 1.0), (by_seconds, per_token)):
            tokens, losses = zip(*sorted(row.losses.items()), strict=True)
            x = [unit * n for n in tokens]
            axes.plot(x, losses, color=color, marker=marker, label=row.arm.name)
            x = [unit * TOKENS_PER_STEP * step for step, _ in row.curve]
            axes.plot(x, [loss for _, loss in row.curve], color=color, lw=0.6, alpha=0.6)
    _dress(rows, by_tokens, by_seconds)
    figure.savefig(path, dpi=120)


def _dress(rows: list[Row], by_tokens: Any, by_seconds: Any) -> None:
    """Axes with names, and with numbers that a person would write."""
    from matplotlib.ticker import LogLocator, NullLocator

    ends = [loss for row in rows for loss in row.losses.values()]
    by_tokens.set(xlabel="tokens", ylabel="loss (nats a byte)")
    by_tokens.set_ylim(min(ends) - 0.05, max(ends) + 0.4)
    by_seconds.set(xlabel="CPU seconds of one thread, the optimiser included")
    by_seconds.legend(title="validation, at the end of runs\n(thin: training)", loc="upper right")
    for axes in (by_tokens, by_seconds):
        axes.grid(alpha=0.3)
        axes.set_xscale("log")
        axes.set_xlim(left=0.3 * min(axes.lines[0].get_xdata()))
    lengths = [steps * TOKENS_PER_STEP for steps in LENGTHS]
    by_tokens.set_xticks(lengths, map(compact, lengths))
    by_tokens.set_xticks([], minor=True)
    by_seconds.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_seconds.xaxis.set_major_formatter("{x:g}")
    by_seconds.xaxis.set_minor_locator(NullLocator())
