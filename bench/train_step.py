"""One training step, ours against nanoGPT's way: time and peak memory, on this machine.

    python bench/train_step.py config/train_small_30m.py --batch_size=12 --block_size=1024

The same model, batch, precision and optimiser; nanoGPT's way returns all logits and the loss. Where
they are installed, transformers' GPT-2 and litgpt's take their steps in the same rounds.
Times are medians of interleaved rounds in one process; memory is each way's own process' peak.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.figures import Figure, record
from model import GPT
from nanofit.data.loader import MicroBatch
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import train_step
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.settings.config import load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import compact, run_script

ROUNDS = 3
OURS, NANOGPTS, TRANSFORMERS, LITGPT = WAYS = "ours", "nanoGPT's way", "transformers", "litgpt"
PEERS = TRANSFORMERS, LITGPT


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["--memory-of"]:
        print(json.dumps(_peak_bytes(argv[1], argv[2:])))
        return
    ways = [way for way in WAYS if way not in PEERS or find_spec(way)]
    steps = {way: _make_step(way, argv) for way in ways}
    seconds = {way: [] for way in ways}
    losses = {way: step() for way, step in steps.items()}  # warm-up
    for _ in range(ROUNDS):
        for way, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - started)
    del steps
    peaks = {way: _measure_in_child(way, argv) for way in ways}
    medians = {way: statistics.median(s) for way, s in seconds.items()}
    _print_table(argv, losses, medians, peaks)
    _record(argv, medians, peaks)


def _make_step(way: str, argv: Sequence[str]) -> Callable[[], float]:
    """A function that takes one step of one micro-batch and returns its loss."""
    shape, learn, run = load_config(argv)
    device = describe_device(run.device, run.dtype)
    torch.manual_seed(learn.seed)
    model = MODELS[way](shape).to(device.torch_device)
    idx = torch.randint(0, shape.vocab_size, (learn.batch_size, shape.block_size))
    batch = MicroBatch(device.send(idx), device.send(idx.roll(-1, 1)), 1.0)
    optimizer, scaler = build_optimizer(model, learn), device.grad_scaler()

    def ours() -> float:
        loss, _ = train_step(
            model,
            optimizer,
            scaler,
            [batch],
            device=device,
            ranks=Ranks(),
            lr=learn.learning_rate,
            grad_clip=learn.grad_clip,
            seed=0,
        )
        return loss.item()

    def plain() -> float:
        with device.autocast():
            _, loss = model(batch.idx, batch.targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), learn.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return ours if way == OURS else plain


class PlainGPT(GPT):
    """The same model, returning what nanoGPT returns."""

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = super().forward(idx)  # (B, T, V)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.flatten(), ignore_index=-1)
        return logits, loss


def _transformers(shape: GPTConfig) -> nn.Module:
    """GPT-2 as transformers has it, and its own loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), shape.dropout)
    sizes = dict(n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd)
    vocabulary = dict(vocab_size=shape.vocab_size, n_positions=shape.block_size)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **vocabulary, **rates, use_cache=False))

    def forward(idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = model(idx, labels=targets, shift_labels=targets)
        return out.logits, out.loss

    return _Called(model, forward)


def _litgpt(shape: GPTConfig) -> nn.Module:
    """litgpt's model in the sizes of ours, with its positions and its loss in chunks."""
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    sizes = dict(n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd)
    vocabulary = dict(padded_vocab_size=shape.vocab_size, block_size=shape.block_size)
    model = GPT(Config(**sizes, **vocabulary, bias=shape.bias))
    model.lm_head.weight = model.transformer.wte.weight

    def forward(idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        return None, chunked_cross_entropy(model(idx), targets)

    return _Called(model, forward)


class _Called(nn.Module):
    """A peer's model, called as nanoGPT's is."""

    def __init__(self, model: nn.Module, forward: Callable):
        super().__init__()
        self.model, self.forward = model, forward


MODELS = {OURS: GPT, NANOGPTS: PlainGPT, TRANSFORMERS: _transformers, LITGPT: _litgpt}


def _peak_bytes(way: str, argv: Sequence[str]) -> int:
    """The process' peak over two steps: only the second meets Adam's state."""
    step = _make_step(way, argv)
    step()
    step()
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # Not getrusage: after a fork its peak is at least the parent's.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def _measure_in_child(way: str, argv: Sequence[str]) -> int:
    child = [sys.executable, __file__, "--memory-of", way, *argv]
    # Freed memory goes back to the system at once, so that the peak is what was alive.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    return json.loads(
        subprocess.run(child, env=environment, stdout=subprocess.PIPE, check=True).stdout
    )


def _print_table(argv: Sequence[str], losses: dict, seconds: dict, peaks: dict) -> None:
    shape, learn, run = load_config(argv)
    device = describe_device(run.device, run.dtype)
    tokens = learn.batch_size * shape.block_size
    print(
        f"{device.name}, {device.precision}, eager; "
        f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd} wide; "
        f"micro-batch {learn.batch_size} × {shape.block_size}; vocabulary {shape.vocab_size}\n"
    )
    print("| way | s/step | tokens/s | peak memory | loss of step 1 |\n|---|---|---|---|---|")
    for way in seconds:
        print(
            f"| {way} | {seconds[way]:.2f} | {compact(tokens / seconds[way])} | "
            f"{peaks[way] / 2**30:.2f} GiB | {losses[way]:.5f} |"
        )


def _record(argv: Sequence[str], seconds: dict, peaks: dict) -> None:
    shape, learn, run = load_config(argv)
    what = f"one step, {shape.n_layer} layers, {shape.n_embd} wide, {learn.batch_size} × "
    what += f"{shape.block_size} tokens, {describe_device(run.device, run.dtype).precision}, eager"
    figures = []
    for way in (way for way in seconds if way != OURS):
        times = Figure(f"{what}: time, {way}", seconds[OURS], seconds[way], way, "s")
        gib = (peaks[OURS] / 2**30, peaks[way] / 2**30)
        figures += [times, Figure(f"{what}: peak memory, {way}", *gib, way, "GiB")]
    conditions = f"medians of {ROUNDS} rounds in turns"
    record("train_step", figures, command="make bench-train-step", conditions=conditions)


if __name__ == "__main__":
    run_script(main)
