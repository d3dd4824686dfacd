"""Where the memory of a training step goes, on the card you have or would like to have.

    python autofit.py config/train_small_30m.py --explain --gpu "RTX 4070"
    python autofit.py config/train_small_30m.py --explain --vram 12GB --batch_size=32
    python autofit.py config/train_small_30m.py --explain --gpu "RTX 4070" --png memory.png

No GPU is needed: a step is simulated, tensor by tensor. That takes a minute or two the first time;
results are kept. Every setting of train.py can be given as well: --block_size=512.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from nanofit.config import load_config
from nanofit.explain import budget_of, dtype_of, explain, show
from nanofit.picture import figure_class, save_png
from nanofit.terminal import InputError, parse_size, run_script


def main(argv: Sequence[str]) -> None:
    asked, rest = _parse(argv)
    shape, learn, run = load_config(rest)
    budget = budget_of(asked.gpu, asked.vram, run)
    if asked.png:
        figure_class()  # not to find out a minute later that it is missing
    with Console(stderr=True).status("") as status:
        told = explain(
            shape, learn, run, budget, dtype=dtype_of(asked.gpu, run), note=status.update
        )
    if asked.png:
        save_png(told.simulation, budget and budget.limit_bytes, title=told.title, path=asked.png)
    if asked.json:
        print(json.dumps(told.as_json(), indent=2))
    else:
        show(told)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's own flags, and the words that belong to the settings of the run."""
    parser = _Parser(
        usage="python autofit.py config/X.py --explain [options] [--SETTING=VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--explain", action="store_true", help="show where the memory goes and what would save it")
    add("--gpu", metavar="NAME", help="for this card, as in 'RTX 4070' or 'A100 80GB'")
    add("--vram", type=_vram, metavar="SIZE", help="for a card with so much memory, as in 12GB")
    add("--png", type=Path, metavar="FILE", help="save a picture of the memory over one step")
    add("--json", action="store_true", help="print it for programs")
    asked, rest = parser.parse_known_args(argv)
    if not asked.explain:
        raise InputError("nothing to do; --explain shows where the memory goes, --help shows how")
    return asked, rest


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help shows how")


def _vram(text: str) -> int:
    """Bytes of a card's memory: its maker's gigabytes are 2^30 bytes."""
    try:
        size = parse_size(re.sub(r"(?i)([kmgt])i?b?\s*$", r"\1ib", text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 2**30:
        raise argparse.ArgumentTypeError(f"{text!r} is less than any card has; try 12GB")
    return size


if __name__ == "__main__":
    run_script(main)
