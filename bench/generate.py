"""Tokens per second of sampling, with and without the key-value cache, on this machine.

python bench/generate.py config/train_small_30m.py [--quick]
"""

import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.figures import Figure, record, take_quick
from model import GPT
from nanofit.machine.device import describe_device
from nanofit.settings.config import load_config
from nanofit.terminal import run_script
from nanofit.use.generate import choose_token, generate

TOKENS, ROUNDS = 200, 3


def main(argv: Sequence[str]) -> None:
    quick, argv = take_quick(argv)
    shape, learn, run = load_config([*argv, "--dtype=float32"])
    device = describe_device(run.device, run.dtype)
    torch.manual_seed(learn.seed)
    model = GPT(shape).to(device.torch_device)
    prompt = device.send(torch.randint(0, 50257, (1, 16)))
    greedy = partial(choose_token, temperature=0)
    seconds, tokens = {True: [], False: []}, {}
    rounds = 1 if quick else ROUNDS
    for _ in range(rounds):
        for use_cache in seconds:
            started = time.perf_counter()
            drawn = generate(model, prompt, greedy, max_new_tokens=TOKENS, use_cache=use_cache)
            tokens[use_cache] = [token.item() for token in drawn]
            seconds[use_cache].append(time.perf_counter() - started)
    cached, plain = (statistics.median(seconds[use_cache]) for use_cache in (True, False))
    print(
        f"{device.name}; {shape.n_layer} layers, {shape.n_embd} wide; {TOKENS} tokens greedily: "
        f"{TOKENS / plain:.0f} tok/s recomputed, {TOKENS / cached:.0f} tok/s cached, "
        f"{plain / cached:.1f} × faster; same tokens: {tokens[True] == tokens[False]}"
    )
    speeds = {"ours": TOKENS / cached, "other": TOKENS / plain, "of": "recomputing all"}
    name = f"{TOKENS} tokens sampled, {shape.n_layer} layers, {shape.n_embd} wide"
    record(
        "generate",
        [Figure(name, **speeds, unit="tok/s", is_less_better=False)],
        command="OMP_NUM_THREADS=1 make bench-generate",
        conditions=f"{device.name}, medians of {rounds} rounds in turns",
    )


if __name__ == "__main__":
    run_script(main)
