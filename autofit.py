"""The largest micro-batch that fits, and where the memory of a training step goes.

    python autofit.py config/train_fineweb_4070.py
    python autofit.py config/train_small_30m.py --explain --gpu "RTX 4070"
    python autofit.py config/train_small_30m.py --explain --vram 12GB --batch_size=32
    python autofit.py config/train_small_30m.py --explain --gpu "RTX 4070" --png memory.png
    python autofit.py config/train_fineweb_4070.py --explain --gpu "RTX 4070" --gpus 2 --shard

Without --explain the fit is found by trials on this machine, as train.py does by itself. To explain
needs no GPU: the tensors of a step are written down. --simulate runs the step's code instead, on
tensors without content, in a minute or two the first time; so are settings of which nothing is
written. Every setting of train.py can be given as well: --block_size=512.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from nanofit.machine.cards import check_gpus
from nanofit.memory.budget import budget_of, dtype_of, has_flash_on
from nanofit.memory.explain import explain
from nanofit.memory.picture import figure_class, save_png
from nanofit.memory.tables import show
from nanofit.settings.config import Settings, load_config
from nanofit.terminal import SWITCH, FlagParser, InputError, folded, parse_size, run_script


def main(argv: Sequence[str]) -> None:
    asked, rest = _parse(argv)
    settings = load_config(rest)
    if asked.explain:
        _explain(asked, settings)
    else:
        _fit(asked, settings)


def _fit(asked: argparse.Namespace, settings: Settings) -> None:
    """Find what fits on this machine, as train.py does before its first step."""
    from nanofit.fit.fit import find_fit  # and torch, which takes seconds to load
    from nanofit.fit.trial import share_compile_cache
    from nanofit.machine.device import describe_device
    from nanofit.machine.dist import Ranks

    if any((asked.gpu, asked.vram, asked.png, asked.simulate, asked.gpus > 1)):
        raise InputError(
            "--gpu, --gpus, --vram, --simulate and --png go with --explain: trials need the card "
            "itself"
        )
    run = replace(settings.run, autofit=True, eval_only=False)
    device = describe_device(run.device, run.dtype)
    if device.type != "cuda" and run.memory_limit is None:
        raise InputError(
            f"there is no limit to fit on {device.name}: give --memory_limit=8GB, or see what a "
            'card would bear with --explain --gpu "RTX 4070"'
        )
    if device.note:
        print(f"note    {device.note}", file=sys.stderr)
    share_compile_cache()
    fit = find_fit(settings._replace(run=run), device, Ranks())
    if asked.json:
        print(json.dumps(fit.as_dict(), indent=2))
    else:
        for line in fit.lines(settings.learn.sequences_per_step):
            print(folded(line))


def _explain(asked: argparse.Namespace, settings: Settings) -> None:
    run = settings.run
    budget = budget_of(asked.gpu, asked.vram, run)
    if asked.png:
        figure_class()  # not to find out a minute later that it is missing
    with Console(stderr=True).status("") as status:
        told = explain(
            settings,
            budget,
            dtype=dtype_of(asked.gpu, run),
            has_flash=has_flash_on(asked.gpu, run),
            world=asked.gpus,
            shard=asked.shard or (asked.gpus > 1 and run.shard),
            is_simulated=asked.simulate,
            note=status.update,
        )
    if asked.png:
        save_png(told.course, budget and budget.limit_bytes, title=told.title, path=asked.png)
    if asked.json:
        print(json.dumps(told.as_json(), indent=2))
    else:
        show(told)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's own flags, and the words that belong to the settings of the run."""
    parser = FlagParser(
        usage="python autofit.py config/X.py [--explain] [options] [--SETTING=VALUE ...]",
        description=__doc__,
    )
    add = parser.add_argument
    add("--explain", action="store_true", help="show where the memory goes and what would save it")
    add("--gpu", metavar="NAME", help="for this card, as in 'RTX 4070' or 'A100 80GB'")
    add("--vram", type=_vram, metavar="SIZE", help="for a card with so much memory, as in 12GB")
    add(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="for so many cards, each with a process of its own",
    )
    add("--shard", **SWITCH, help="with --gpus: each card holds a part of the model")
    add("--simulate", action="store_true", help="with --explain: run the step's code to find out")
    add("--png", type=Path, metavar="FILE", help="save a picture of the memory over one step")
    add("--json", action="store_true", help="print it for programs")
    asked, rest = parser.parse_known_args(argv)
    check_gpus(asked.gpus, shard=asked.shard)
    return asked, rest


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
