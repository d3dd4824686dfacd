"""What Muon costs: an update, batched and one matrix at a time as torch does it; and of a step.

    python bench/muon.py [--quick]      # one round, and no page

The matrices are those of the fast config at a few layers. Times are medians of interleaved rounds,
by the wall and by the CPU; the latter says more where there is other work. The share of a step is
counted in FLOPs, and measured: a pass of a few sequences, scaled to all of a step, against an
update. Writes results/muon.md.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from bench.figures import Figure, record, take_quick
from model import GPT
from nanofit.data.loader import random_micro_batches
from nanofit.files import PROJECT, atomic_write
from nanofit.learning.muon import COEFFICIENTS, MOMENTUM, Muon
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.outlook.forecast import step_of
from nanofit.settings.config import load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import run_script

CONFIG, LAYERS = "config/train_fineweb_4070_fast.py", 2
ROUNDS, SEQUENCES = 3, 1
TORCHS = "torch's, one at a time, bfloat16"
MOST_SHARE = 0.03  # of a step's FLOPs
RATE, DECAY = 0.025, 0.05
OUT = PROJECT / "bench/results/muon.md"


class Seconds(NamedTuple):
    wall: float
    cpu: float


def main(argv: Sequence[str]) -> None:
    quick, _ = take_quick(argv)
    rounds = 1 if quick else ROUNDS
    shape, learn, _ = load_config([CONFIG])
    lines = [
        "# What Muon costs",
        "",
        f"`make bench-muon`, on the CPU: the matrices of `{CONFIG}` at {LAYERS} of its "
        f"{shape.n_layer} layers.",
        f"Medians of {rounds} interleaved rounds, by the wall and by the time of all threads.",
        "",
    ]
    shallow = replace(shape, n_layer=LAYERS)
    measured = {threads: _measure(shallow, threads, rounds) for threads in (1, 2)}
    lines += [*_update_table(measured), "", *_share_table(shape, learn.muon_steps, measured)]
    told = "\n".join(lines) + "\n"
    print(told)
    _record(shape, learn.muon_steps, measured, rounds)
    if quick:
        return
    by_hand = OUT.read_text(encoding="utf-8").partition("## ") if OUT.exists() else ("", "", "")
    with atomic_write(OUT) as temporary:
        temporary.write_text(told + "\n" + "".join(by_hand[1:]), encoding="utf-8")


def _record(shape: GPTConfig, steps: int, measured: dict, rounds: int) -> None:
    shares = 100 * _flops_share(shape, 524_288 // shape.block_size, steps), 100 * MOST_SHARE
    figures = [Figure("Muon's share of a step's FLOPs, fast config", *shares, "limit", "%")]
    for threads, by_way in measured.items():
        both = by_way["batched, bfloat16"].cpu, by_way[TORCHS].cpu
        name = f"Muon's update, bfloat16, {threads} thread(s): CPU time"
        figures.append(Figure(name, *both, "torch.optim.Muon", "s"))
    conditions = f"{LAYERS} layers, medians of {rounds} rounds in turns"
    record("muon", figures, command="make bench-muon", conditions=conditions)


def _measure(shape: GPTConfig, threads: int, rounds: int) -> dict[str, Seconds]:
    """Of each way to update, and of a pass."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = GPT(shape)
    ways = {**_updates(model), "pass": _pass_of(model)}
    spent = {way: [] for way in ways}
    for round_ in range(1 + rounds):  # the first is for warming up
        for way, prepare in ways.items():
            work = prepare()
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            seconds = Seconds(time.perf_counter() - wall, time.process_time() - cpu)
            if round_:
                spent[way].append(seconds)
            print(f"{threads} threads, {way}: {seconds.cpu:.2f} CPU s", file=sys.stderr, flush=True)
    return {way: Seconds(*map(statistics.median, zip(*s, strict=True))) for way, s in spent.items()}


def _updates(model: GPT) -> dict[str, Callable[[], Callable[[], None]]]:
    """Each gives its matrices gradients, and what is to be done with them."""
    ways = {}
    for name, steps, dtype in (
        ("batched, bfloat16", 5, torch.bfloat16),
        ("batched, float32", 5, torch.float32),
        ("batched, float32, 12 steps", 12, torch.float32),
    ):
        matrices = list(_matrices(model))
        groups = [{"params": matrices, "weight_decay": DECAY}]
        ways[name] = _update(Muon(groups, lr=RATE, steps=steps, dtype=dtype, ranks=Ranks()))
    torchs = torch.optim.Muon(
        list(_matrices(model)),
        lr=RATE,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        ns_coefficients=COEFFICIENTS[5],
        ns_steps=5,
    )
    return {TORCHS: _update(torchs), **ways}


def _matrices(model: GPT) -> Iterator[Tensor]:
    """Copies of the blocks' matrices; queries, keys and values apart."""
    for name, parameter in model.transformer.h.named_parameters():
        if parameter.dim() == 2:
            parts = 3 if name.endswith("c_attn.weight") else 1
            yield from (part.detach().clone() for part in parameter.chunk(parts))


def _update(optimizer: torch.optim.Optimizer) -> Callable[[], Callable[[], None]]:
    matrices = [matrix for group in optimizer.param_groups for matrix in group["params"]]
    gradients = [torch.randn_like(matrix) for matrix in matrices]

    def prepare() -> Callable[[], None]:
        for matrix, gradient in zip(matrices, gradients, strict=True):
            matrix.grad = gradient.clone()  # ours uses gradients up
        return optimizer.step

    return prepare


def _pass_of(model: GPT) -> Callable[[], Callable[[], None]]:
    shape, device = model.config, describe_device("cpu", "float32")
    sizes = dict(block_size=shape.block_size, vocab_size=shape.vocab_size)
    batch = next(random_micro_batches(SEQUENCES, **sizes, device=device))
    return lambda: lambda: model(batch.idx, batch.targets).backward()


def _update_table(measured: dict[int, dict[str, Seconds]]) -> Iterator[str]:
    yield "| an update of the matrices | threads | s | CPU s | × torch's | × torch's CPU s |"
    yield "|---|--:|--:|--:|--:|--:|"
    for threads, by_way in measured.items():
        torchs = by_way[TORCHS]
        for way, seconds in by_way.items():
            if way != "pass":
                ratios = (one / base for one, base in zip(seconds, torchs, strict=True))
                told = [f"{one:.3f}" for one in seconds] + [f"{ratio:.2f}" for ratio in ratios]
                yield f"| {way} | {threads} | {' | '.join(told)} |"


def _share_table(shape: GPTConfig, steps: int, measured: dict) -> Iterator[str]:
    sequences = 524_288 // shape.block_size
    yield f"| Muon's share of a step of {sequences * shape.block_size:,} tokens, {steps} steps | |"
    yield "|---|--:|"
    for layers in (LAYERS, shape.n_layer):
        share = _flops_share(replace(shape, n_layer=layers), sequences, steps)
        yield f"| in FLOPs, {layers} layers | {share:.2%} |"
    met = "yes" if share <= MOST_SHARE else "no"
    yield f"| the latter at most {MOST_SHARE:.0%} | {met} |"
    for threads, by_way in measured.items():
        update, one_pass = by_way[f"batched, float32, {steps} steps"], by_way["pass"]
        whole = sequences / SEQUENCES * one_pass.cpu
        yield (
            f"| measured, {LAYERS} layers, float32, {threads} threads: {update.cpu:.2f} CPU s "
            f"beside {sequences // SEQUENCES} passes of {one_pass.cpu:.2f} | "
            f"{update.cpu / (update.cpu + whole):.2%} |"
        )


def _flops_share(shape: GPTConfig, sequences: int, muon_steps: int) -> float:
    sizes = dict(micro_batch_size=16, sequences_per_step=sequences)
    kernels = list(step_of(shape, "chunked", **sizes, muon_steps=muon_steps).kernels())
    by_muon = sum(k.count * k.flops for k in kernels if k.part == "optimiser")
    return by_muon / sum(k.count * k.flops for k in kernels)


if __name__ == "__main__":
    run_script(main)
