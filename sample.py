"""Checkpoint -> text.

python sample.py --out_dir=out-demo --start="The river"
echo "Once upon a time" | python sample.py --out_dir=out-demo --start=-
"""

import argparse
import codecs
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from model import GPT
from nanofit.checkpoint import BEST, Checkpoints
from nanofit.device import Device, describe_device
from nanofit.generate import choose_token, generate
from nanofit.terminal import InputError, run_script
from nanofit.tokenizer import END_OF_TEXT, gpt2


def main(argv: Sequence[str]) -> None:
    args = _parse(argv)
    sys.stdout.reconfigure(errors="replace")  # not every terminal can show every character
    device = describe_device(args.device, args.dtype)
    if device.note:
        print(device.note, file=sys.stderr)
    model = GPT.from_checkpoint(_find_checkpoint(args)).to(device.torch_device)
    prompt = _read_prompt(args.start)
    tokens = gpt2().encode(prompt, allowed_special="all") or [END_OF_TEXT]
    if max(tokens) >= model.config.vocab_size:
        raise InputError("the model's vocabulary is too small for GPT-2's tokens")
    for number in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- sample {number + 1} of {args.num_samples}, seed {args.seed + number}")
        print(prompt, end="", flush=True)
        for piece in _pieces(model, tokens, device, args, seed=args.seed + number):
            print(piece, end="", flush=True)
        print()


def _pieces(
    model: GPT, tokens: list[int], device: Device, args: argparse.Namespace, *, seed: int
) -> Iterator[str]:
    """The text that follows, in pieces as they come; it ends with the document."""
    generator = torch.Generator(device.torch_device).manual_seed(seed % 2**63)
    choose = partial(
        choose_token,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=generator,
    )
    idx = torch.tensor([tokens], device=device.torch_device)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span tokens
    with device.autocast():
        for token in generate(model, idx, choose, max_new_tokens=args.max_new_tokens):
            if token.item() >= END_OF_TEXT:  # or a row of the embedding that pads it
                break
            yield decoder.decode(gpt2().decode_single_token_bytes(token.item()))
    yield decoder.decode(b"", final=True)


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
