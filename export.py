"""Checkpoint -> a Hugging Face folder.

python export.py out-demo hf-demo
python export.py out-demo hf-demo --dtype=bfloat16 --overwrite

transformers, lm-evaluation-harness, vLLM and llama.cpp's converter take arch = 'gpt2' and
'gpt2-tanh' as GPT-2; 'modern' brings a modelling file for transformers (trust_remote_code=True).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nanofit.terminal import FlagParser, run_script


def main(argv: Sequence[str]) -> None:
    args = _parse(argv)
    from nanofit.export.export import export
    from nanofit.run.checkpoint import best_checkpoint  # and torch, which takes seconds to load

    checkpoint = Path(args.checkpoint) if args.checkpoint else best_checkpoint(Path(args.out_dir))
    export(checkpoint, Path(args.hf_dir), dtype=args.dtype, overwrite=args.overwrite)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(usage="python export.py OUT_DIR HF_DIR [options]", description=__doc__)
    add = parser.add_argument
    add("out_dir", help="folder of a run; its best checkpoint is used")
    add("hf_dir", help="folder to write")
    add("--checkpoint", help="a certain checkpoint file instead of the best one")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--overwrite", action="store_true", help="replace what an earlier export has written")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run_script(main)
