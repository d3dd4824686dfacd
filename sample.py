"""Checkpoint -> text.

python sample.py --out_dir=out-demo --start="The river"
echo "Once upon a time" | python sample.py --out_dir=out-demo --start=-
python sample.py --out_dir=out-demo --chat
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nanofit.terminal import FlagParser, InputError, run_script

OPTIONS = "device dtype max_new_tokens temperature top_k top_p repetition_penalty".split()


def main(argv: Sequence[str]) -> None:
    args = _parse(argv)
    from nanofit.use.chat import chat  # and torch, which takes seconds to load
    from nanofit.use.write import write_text

    sys.stdout.reconfigure(errors="replace")  # not every terminal can show every character
    options = {name: getattr(args, name) for name in OPTIONS}
    prompt = _read_prompt(args.start)
    if args.chat:
        chat(_find_checkpoint(args), prompt, seed=args.seed, **options)
    else:
        seeds = range(args.seed, args.seed + args.num_samples)
        write_text(_find_checkpoint(args), prompt, seeds=seeds, **options)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(usage="python sample.py [--out_dir=FOLDER] [options]", description=__doc__)
    add = parser.add_argument
    add("--out_dir", default="out", help="folder of a run; its best checkpoint is used")
    add("--checkpoint", help="a checkpoint file or Hugging Face folder instead")
    add("--start", default="", help="the prompt; FILE:path reads a file, - reads standard input")
    add("--chat", action="store_true", help="write in turns: you write, the model goes on")
    add("--num_samples", type=_at_least(1, int), default=1)
    add("--max_new_tokens", type=_at_least(1, int), default=200)
    add("--temperature", type=_at_least(0, float), default=0.8, help="0 takes the likeliest token")
    add("--top_k", type=_at_least(1, int), default=200, help="draw from the k likeliest")
    add("--top_p", type=_share, help="draw from the likeliest up to this sum, of 1")
    add(
        "--repetition_penalty",
        type=_at_least(0.01, float),
        default=1.0,
        help="above 1 makes tokens less likely that are there already",
    )
    add("--seed", type=int, default=1337, help="the first sample's; each next one's is 1 higher")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    args = parser.parse_args(argv)
    if args.chat and args.start == "-":
        raise InputError("--chat reads standard input itself; leave --start=- out")
    if args.chat and args.num_samples > 1:
        raise InputError("--chat writes one text; leave --num_samples out")
    return args


def _at_least(least: int, kind: type):
    def parse(text: str):
        value = kind(text)
        if not value >= least:  # nor nan
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return parse


def _share(text: str) -> float:
    value = _at_least(0, float)(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is more than 1, which is all of them")
    return value


def _find_checkpoint(args: argparse.Namespace) -> Path:
    if args.checkpoint:
        return Path(args.checkpoint)
    from nanofit.run.checkpoint import best_checkpoint

    return best_checkpoint(Path(args.out_dir))


def _read_prompt(start: str) -> str:
    if start == "-":
        sys.stdin.reconfigure(errors="replace")
        return sys.stdin.read().rstrip("\n")
    if start.startswith("FILE:"):
        path = Path(start.removeprefix("FILE:"))
        try:
            return path.read_text(encoding="utf-8").rstrip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the prompt from {path} ({error})") from None
    return start


if __name__ == "__main__":
    run_script(main)
