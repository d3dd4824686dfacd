"""How good a model is: its loss on text, or the questions of HellaSwag that it answers.

    python evaluate.py out-demo
    python evaluate.py out-a out-b pretrained/gpt2 --dataset=fineweb
    python evaluate.py out-demo --text book.txt
    python evaluate.py out-demo --hellaswag hellaswag_val.jsonl

A model is the out_dir of a run, whose best checkpoint is taken, a checkpoint file, or a Hugging
Face folder. Without --text and --hellaswag it predicts all of its dataset's validation split. A
document's end counts as a token, in the loss and in the bits per byte, and as no byte. Standard
errors (±) are over documents or questions; the difference to the first model is paired, and so more
certain than either.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from nanofit.terminal import FlagParser, InputError, run_script

if TYPE_CHECKING:
    from nanofit.evaluation.evaluate import Subject, Task

COLUMNS = {  # titles and decimals
    "tokens": ("tokens", 0),
    "loss": ("loss", 4),
    "perplexity": ("perplexity", 2),
    "bits_per_byte": ("bits/byte", 4),
    "acc": ("acc", 4),
    "acc_norm": ("acc_norm", 4),
}
DIFFERENCES = ("loss_difference", "acc_norm_difference")
ENDLESS = 10_000
ENDLESS_VALUE = 1e9  # of which nobody wants to read all digits
APART = {  # flags, and others that would be another task
    "text": {"dataset", "hellaswag", "as_in_run"},
    "hellaswag": {"dataset", "as_in_run"},
}


def main(argv: Sequence[str]) -> None:
    args = _parse(argv)
    from nanofit.evaluation.evaluate import (  # and torch, which takes seconds to load
        Subject,
        evaluate,
    )

    subjects = [Subject.find(name) for name in args.models]
    task, results = _task(args, subjects), []
    try:
        for result in evaluate(subjects, task, device=args.device, dtype=args.dtype):
            results.append(result)
    finally:  # what is there is told, whatever becomes of the next model
        rows = [result.told(results[0]) for result in results]
        if args.json and rows:
            told = {**task.described(), "models": [_with_numbers(row) for row in rows]}
            print(json.dumps(told, indent=2))
        elif rows:
            _show(task.described(), rows)


def _task(args: argparse.Namespace, subjects: "Sequence[Subject]") -> "Task":
    from nanofit.evaluation.corpus import Corpus
    from nanofit.evaluation.evaluate import validation_of
    from nanofit.evaluation.hellaswag import HellaSwag

    if args.hellaswag:
        return HellaSwag.read(args.hellaswag, args.limit)
    if args.text:
        return Corpus.of_text(args.text, args.text_column)
    return validation_of(subjects, args.dataset, as_in_run=args.as_in_run)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(usage="python evaluate.py MODEL [MODEL ...] [options]", description=__doc__)
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="out_dir, checkpoint, or Hugging Face folder")
    add("--dataset", metavar="NAME", help="validate on another: a folder in data/, or a path")
    add("--as_in_run", action="store_true", help="only the sequences that its run validates on")
    add("--text", metavar="FILE", type=Path, help="predict this instead: UTF-8 text, or parquet")
    add("--text_column", metavar="NAME", default="text", help="of a parquet file")
    add("--hellaswag", metavar="FILE", type=Path, help="answer its questions instead, in jsonl")
    add("--limit", metavar="N", type=int, help="only the first N questions")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="by default that of the model's run; on a CPU float32",
    )
    add("--json", action="store_true", help="print it for programs")
    args = parser.parse_args(argv)
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    given = {name for name, value in vars(args).items() if value not in (None, False)}
    for one, others in APART.items():
        if one in given and given & others:
            raise InputError(f"--{one} and --{min(given & others)} do not go together")
    if args.limit is not None and (args.limit < 1 or not args.hellaswag):
        raise InputError("--limit is for --hellaswag: at least 1 of its questions")


def _show(task: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    on_terminal = sys.stdout.isatty()
    width = Console().width if on_terminal else ENDLESS  # in a file nothing is folded
    console = Console(width=width, highlight=False, markup=False, force_terminal=on_terminal)
    with console.capture() as captured:
        console.print(_said(task), soft_wrap=True)
        console.print()
        console.print(_table(rows, tokens_differ=task.get("as_in_run", False)))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _said(task: dict[str, Any]) -> str:
    if "questions" in task:
        return f"{task['data']}: {task['questions']:,} questions"
    many = "s" if task["documents"] > 1 else ""
    told = f"{task['data']}: {task['tokens']:,} tokens, {task['documents']:,} document{many}"
    if task["text_bytes"] is None:
        return f"{told}; how many bytes of text is not told"
    return f"{told}, {task['text_bytes']:,} bytes of text"


def _table(rows: list[dict[str, Any]], *, tokens_differ: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    figures = [name for name in COLUMNS if name in rows[0]]
    if not tokens_differ:
        figures = [name for name in figures if name != "tokens"]
    differences = [name for name in DIFFERENCES if any(name in row for row in rows)]
    table.add_column("model", overflow="fold")
    titles = [COLUMNS[name][0] for name in figures] + len(differences) * ["difference"]
    for title in ("step", "precision", *titles):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        step = "-" if row["step"] is None else f"{row['step']:,}"
        cells = [_cell(row, name) for name in (*figures, *differences)]
        table.add_row(row["model"], step, row["precision"], *cells)
    return table


def _cell(row: dict[str, Any], name: str) -> str:
    """A figure and, if there is one, its standard error."""
    value, error = row.get(name), row.get(f"{name}_stderr")
    if value is None:
        return ""
    _, decimals = COLUMNS.get(name, ("", 4))
    return _figure(value, decimals) + (f" ±{_figure(error, decimals)}" if error is not None else "")


def _figure(value: float, decimals: int) -> str:
    return f"{value:,.{decimals}f}" if abs(value) < ENDLESS_VALUE else f"{value:.3g}"


def _with_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has neither NaN nor infinity, which a diverged model's loss may be."""
    is_none = {name for name, one in row.items() if isinstance(one, float) and not isfinite(one)}
    return {name: None if name in is_none else one for name, one in row.items()}


if __name__ == "__main__":
    run_script(main)
