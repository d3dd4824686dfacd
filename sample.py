"""Checkpoint -> text.

python sample.py --out_dir=out-demo --start="The river"
echo "Once upon a time" | python sample.py --out_dir=out-demo --start=-
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nanofit.terminal import InputError, run_script


def main(argv: Sequence[str]) -> None:
    args = _parse(argv)
    from nanofit.use.generate import write_text  # and torch, which takes seconds to load

    sys.stdout.reconfigure(errors="replace")  # not every terminal can show every character
    write_text(
        _find_checkpoint(args),
        _read_prompt(args.start),
        device=args.device,
        dtype=args.dtype,
        seeds=range(args.seed, args.seed + args.num_samples),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out_dir", default="out", help="folder of a run; its best checkpoint is used")
    add("--checkpoint", help="a checkpoint file or Hugging Face folder instead")
    add("--start", default="", help="the prompt; FILE:path reads a file, - reads standard input")
    add("--num_samples", type=_at_least(1, int), default=1)
    add("--max_new_tokens", type=_at_least(1, int), default=200)
    add("--temperature", type=_at_least(0, float), default=0.8, help="0 takes the likeliest token")
    add("--top_k", type=_at_least(1, int), default=200, help="draw from the k likeliest")
    add("--top_p", type=_at_least(0, float), help="draw from the likeliest up to this sum")
    add("--seed", type=int, default=1337, help="the first sample's; each next one's is 1 higher")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    return parser.parse_args(argv)


def _at_least(least: int, kind: type):
    def parse(text: str):
        value = kind(text)
        if not value >= least:  # nor nan
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return parse


def _find_checkpoint(args: argparse.Namespace) -> Path:
    if args.checkpoint:
        return Path(args.checkpoint)
    from nanofit.run.checkpoint import BEST, Checkpoints

    folder = Path(args.out_dir)
    for path in (folder / BEST, *Checkpoints(folder).newest_first(), folder / "ckpt.pt"):
        if path.exists():
            return path
    raise InputError(f"no checkpoint in {folder}; train first, or name one with --checkpoint=...")


def _read_prompt(start: str) -> str:
    if start == "-":
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
