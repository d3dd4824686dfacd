"""What fits on which card: forecast, and what torch's own CUDA allocator bears, side by side.

    python bench/cards.py              # all cards, eager; about 25 minutes on 2 cores
    python bench/cards.py "RTX 4070" --compiled --configs train_gpt2_124m,train_fineweb_4070_fast
    python bench/cards.py --doctor FILE ... [--keep]      # what owners of cards measured and sent

On cards without a GPU (tests/card): torch's allocator and its out-of-memory are real, kernels do
nothing. For each card, config and use by other programs the fit is found as train.py finds it, but
with trials in one process, and then the next larger micro-batch is tried.

With --doctor it shows reports that doctor.py --measure wrote on real cards beside what is assumed
of them; --keep puts them into the table that the planner takes instead of what is assumed.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.figures import Figure, record
from nanofit.fit.fit import Fit, find_fit
from nanofit.fit.search import sizes_for
from nanofit.fit.trial import TrialResult, trial_here
from nanofit.machine.cards import Card, known_card
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.machine.measured import CardReport, MeasuredStep, keep_reports, read_report
from nanofit.machine.overhead import CUDA_CONTEXT_BYTES, LIBRARY_BYTES
from nanofit.memory.budget import LEAST_RESERVE_BYTES, RESERVE_SHARE
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.outlook.forecast import (
    expected_share,
    measured_share,
    measured_step,
    predicted_tokens_per_s,
)
from nanofit.settings.config import PROJECT, Settings, load_config
from nanofit.terminal import InputError, compact, first_line, run_script

CARDS = (
    "3050 laptop",
    "RTX 2060",
    "RTX 4060",
    "RTX 2080 Ti",
    "RTX 3060",
    "RTX 4070",
    "RTX 4080",
    "T4",
    "RTX 3090",
    "RTX 4090",
    "RTX 5090",
)
OTHERS_MIB = (0, 600, 2118)
MIB = 2**20
WORKER = "--worker"
COLUMNS = (
    "card|others|config|dtype|savers|micro-batch|limit|forecast|allocated|reserved|error|next"
).split("|")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cards", nargs="*", default=CARDS)
    parser.add_argument("--compiled", action="store_true", help="the compiled stage as well")
    parser.add_argument("--configs", metavar="NAME,...", help="these of config/ alone")
    parser.add_argument("--doctor", nargs="+", type=Path, metavar="FILE", help="reports to show")
    parser.add_argument(
        "--keep", action="store_true", help="with --doctor: let the planner use them"
    )
    parser.add_argument(WORKER, action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.doctor:
        _show_reports(list(map(_report_in, asked.doctor)), keep=asked.keep)
        return
    if asked.worker:
        for row in _rows_of_this_card(asked.configs, compiled=asked.compiled):
            print(json.dumps(row), flush=True)
        return
    words = [WORKER, *(word for word in argv if word not in asked.cards)]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda card: _on_card(card, words), asked.cards)
        rows = []
        _print_row(COLUMNS)
        _print_row(["---", "--:", "---", "---", "---", *["--:"] * 6, "---"])
        for answer in answers:
            rows += answer
            for row in answer:
                _print_row(_cells(row))
    _print_summary(rows)


def _report_in(path: Path) -> CardReport:
    try:
        report = read_report(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a doctor.json") from error
    except ValueError as error:
        raise InputError(f"{path} is not used: {error}; ask for it again") from error
    if not known_card(report.card):
        raise InputError(
            f"{path} is of {report.card}, which nanofit/machine/cards.py lacks; add it"
        )
    return report


def _show_reports(reports: list[CardReport], *, keep: bool) -> None:
    """A row for each, and one for each of its steps: what was assumed, and what was measured."""
    print("| card | system | driver | context, MiB | libraries, MiB | share | assumed share |")
    print("|---|---|---|--:|--:|--:|--:|")
    for one in reports:
        card = known_card(one.card)
        share = measured_share(card, [one])
        overheads = [(one.context_bytes, CUDA_CONTEXT_BYTES), (one.library_bytes, LIBRARY_BYTES)]
        told = [
            f"{f'{found / MIB:,.0f}' if found else '-'} ({assumed / MIB:,.0f})"
            for found, assumed in overheads
        ]
        _print_row(
            [
                one.card,
                one.system,
                one.driver,
                *told,
                f"{share:.2f}" if share else "-",
                f"{expected_share(card):.2f}",
            ]
        )
    print("\n| card | step | forecast, MiB | allocated | reserved | plan, tokens/s | measured |")
    print("|---|---|--:|--:|--:|--:|--:|")
    for one in reports:
        for step in one.steps:
            _print_row([one.card, *_cells_of_step(known_card(one.card), step)])
    if keep:
        keep_reports(reports)


def _cells_of_step(card: Card, one: MeasuredStep) -> list[str]:
    step = measured_step(one)
    stage = "compiled" if one.compiled else "eager"
    planned = predicted_tokens_per_s(card, step, compiled=one.compiled)
    sizes = [one.forecast_bytes, one.allocated_bytes, one.reserved_bytes]
    measured = [f"{planned:,.0f}", f"{one.tokens_per_s:,.0f}"]
    name = f"{compact(step.parameters)}, {one.micro_batch_size} × {one.block_size} {stage}"
    if not one.survived:
        sizes, measured, name = sizes[:1], ["-"] * 4, f"{name}: did not survive"
    return [name, *(f"{size / MIB:,.0f}" for size in sizes), *measured]


def _on_card(name: str, words: list[str]) -> list[dict[str, Any]]:
    from tests.card.harness import CardWithoutGpu

    with tempfile.TemporaryDirectory() as folder:
        # With numbers read back as 0 a loss scale finds no overflow, and no update is left out.
        card = CardWithoutGpu(Path(folder), name)
        run = card.run("bench/cards.py", *words, timeout_s=7200, scalars="0:0")
    if run.code:
        raise SystemExit(str(run))
    found = [json.loads(line) for line in run.output.splitlines() if line.startswith("{")]
    return [{"card": name, **row} for row in found]


def _rows_of_this_card(names: str | None, *, compiled: bool) -> Iterator[dict[str, Any]]:
    """In a process on the card: each config with each use by others."""
    from tests.card.harness import set_others

    stems = names.split(",") if names else sorted(f.stem for f in PROJECT.glob("config/*.py"))
    for config in (PROJECT / f"config/{stem}.py" for stem in stems):
        for others_mib in OTHERS_MIB:
            set_others(Path(os.environ["CARD_STATE"]).parent, others_mib)
            row = {"config": config.stem, "others_mib": others_mib}
            try:
                for found in _fit_here(config, compiled=compiled):
                    yield {**row, **found}
            except InputError as error:
                yield {**row, "refused": first_line(error)}


def _fit_here(config: Path, *, compiled: bool) -> Iterator[dict[str, Any]]:
    shape, learn, run = load_config([str(config)])
    run = replace(run, compile=compiled, autofit=True)
    device = describe_device("cuda", run.dtype)
    fit = find_fit(Settings(shape, learn, run), device, Ranks(), trial=_trial_here)
    for stage in (fit.eager, fit.compiled)[: 1 + compiled]:
        if stage.peak_bytes is None:  # so far from the limit that it was not tried
            continue
        setup = Setup(
            shape,
            dtype=device.precision,
            loss=run.loss,
            optimizer=learn.optimizer,
            compiled=stage is fit.compiled,
            has_flash=device.has_flash,
            **asdict(fit.savers),
        )
        yield {
            "dtype": device.precision,
            "stage": "compiled" if setup.compiled else "eager",
            "savers": _savers(fit),
            "size": stage.size,
            "limit_bytes": fit.limit_bytes,
            "forecast_bytes": need_of(setup).at(stage.size) + _base_bytes(setup),
            "allocated_bytes": stage.peak_allocated_bytes,
            "reserved_bytes": stage.peak_bytes,
            "next": _try_next(setup, stage.size, learn.sequences_per_step, fit.limit_bytes),
        }


def _trial_here(setup: Setup, size: int, *, device: str, limit_bytes: int | None) -> TrialResult:
    torch.cuda.set_per_process_memory_fraction(1.0)  # whatever the last trial was allowed
    result = trial_here(setup, size, device=device, limit_bytes=limit_bytes)
    gc.collect()
    torch.cuda.empty_cache()  # or what the last trial kept would count as free for the next
    return replace(result, tokens_per_s=1.0)  # kernels that do nothing have no speed


def _base_bytes(setup: Setup) -> int:
    return _trial_here(setup, 0, device="cuda", limit_bytes=None).held_bytes


def _try_next(setup: Setup, size: int, sequences: int, limit_bytes: int) -> str:
    """What becomes of the next larger micro-batch."""
    larger = [one for one in sizes_for(sequences) if one > size]
    if not larger:
        return "the whole step"
    trial = _trial_here(setup, larger[0], device="cuda", limit_bytes=limit_bytes)
    return f"{larger[0]} {'fits' if trial.peak_bytes else 'does not fit'}"


def _savers(fit: Fit) -> str:
    return fit.told().get("savers", "-")


def _cells(row: dict[str, Any]) -> list[str]:
    begin = [row["card"], str(row["others_mib"]), row["config"]]
    if "refused" in row:
        return [*begin, *["-"] * 8, row["refused"]]
    config = f"{row['config']}, compiled" if row["stage"] == "compiled" else row["config"]
    return [
        *begin[:2],
        config,
        row["dtype"],
        row["savers"],
        str(row["size"]),
        *(
            f"{row[name] / MIB:,.0f}"
            for name in (
                "limit_bytes",
                "forecast_bytes",
                "allocated_bytes",
                "reserved_bytes",
            )
        ),
        f"{_error(row):+.2%}",
        row["next"],
    ]


def _error(row: dict[str, Any]) -> float:
    return row["forecast_bytes"] / row["allocated_bytes"] - 1


def _used_reserve(row: dict[str, Any]) -> float:
    """How much of what is left free for the unforeseen a forecast would have needed."""
    limit = row["limit_bytes"]
    free = (limit + LEAST_RESERVE_BYTES) / (1 - RESERVE_SHARE)
    return max(row["reserved_bytes"] - row["forecast_bytes"], 0) / (free - limit)


def _print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _print_summary(rows: list[dict[str, Any]]) -> None:
    fitting = [row for row in rows if "refused" not in row]
    errors = sorted(map(_error, fitting))
    missed = [row for row in fitting if row["next"].endswith(" fits")]
    print(
        f"\n{len(fitting)} of {len(rows)} run, {len(rows) - len(fitting)} are refused in one line. "
        f"Forecasts are {errors[0]:+.2%} to {errors[-1]:+.2%} of what was allocated; "
        f"of the reserve they need {max(map(_used_reserve, fitting)):.0%} at most. "
        f"The next larger micro-batch fitted {len(missed)} times."
    )
    cards = len({row["card"] for row in rows})
    what = f"{cards} cards × use by others × {len({row['config'] for row in rows})} configs"
    record(
        "cards",
        [
            Figure(f"{what}: the next larger fits", len(missed), out_of=len(fitting)),
            Figure(f"{what}: a forecast's error", 100 * max(map(abs, errors)), unit="%"),
        ],
        command="make bench-cards",
        conditions="torch's own CUDA allocator, no GPU",
    )


if __name__ == "__main__":
    run_script(main)
