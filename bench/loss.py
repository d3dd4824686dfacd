"""The loss alone, forward and backward: every way torch has against ours, eager and compiled.

    python bench/loss.py [--quick]      # in float32 alone

Times are CPU seconds, so that a busy machine matters little: medians of interleaved rounds in one
process. Bytes are the peak of what a call holds besides its inputs, measured at two sizes and
continued to 16 × 1024 tokens: they are affine in the tokens.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Some virtual machines announce AMX without granting it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.nn import functional as F

from bench.figures import Figure, record, take_quick
from nanofit.learning import loss
from nanofit.terminal import run_script

ROUNDS = 3
VOCABULARY = 50304
WIDTH, TOKENS = 192, 1024  # for the times
WIDE, FEW_TOKENS, MORE_TOKENS, MANY_TOKENS = 576, 2048, 3072, 16 * 1024  # for the bytes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main(argv: Sequence[str]) -> None:
    quick, _ = take_quick(argv)
    dtypes = DTYPES[:1] if quick else DTYPES
    print(f"CPU, {torch.get_num_threads()} thread(s); vocabulary {VOCABULARY}\n")
    print(f"| CPU s, {WIDTH} wide, {TOKENS} tokens | {' | '.join(map(_name, dtypes))} |")
    print("|---" + "|--:" * len(dtypes) + "|")
    by_dtype = [_seconds(dtype) for dtype in dtypes]
    for way in by_dtype[0]:
        cells = (f"{seconds[way]:.2f} ({_ratio(seconds, way):.2f} ×)" for seconds in by_dtype)
        print(f"| {way} | {' | '.join(cells)} |")
    figures = [
        Figure(
            f"the loss in {stage}, {_name(dtype)}, {WIDTH} wide, {TOKENS} tokens: CPU time",
            seconds[f"ours, {stage}"],
            seconds[f"all logits, {stage}"],
            "all logits",
            "s",
        )
        for dtype, seconds in zip(dtypes, by_dtype, strict=True)
        for stage in ("eager", "compiled")
    ]
    if not quick:
        figures += _tell_bytes()
    conditions = f"{torch.get_num_threads()} thread(s), medians of {ROUNDS} rounds in turns"
    record("loss", figures, command="make bench-loss", conditions=conditions)


def _tell_bytes() -> Iterator[Figure]:
    print(f"\n| {WIDE} wide, {MANY_TOKENS} tokens, bfloat16 | MiB |\n|---|--:|")
    mib = {}
    for name, call in _ways(torch.bfloat16).items():
        few, more = (_peak_bytes(call, _inputs(WIDE, n)) for n in (FEW_TOKENS, MORE_TOKENS))
        per_token = (more - few) / (MORE_TOKENS - FEW_TOKENS)
        mib[name] = (few + per_token * (MANY_TOKENS - FEW_TOKENS)) / 2**20
        print(f"| {name} | {mib[name]:.0f} |")
    for stage in ("eager", "compiled"):
        what = f"the loss in {stage}, bfloat16, {WIDE} wide, {MANY_TOKENS} tokens: memory"
        both = mib[f"ours, {stage}"], mib[f"all logits, {stage}"]
        yield Figure(what, *both, "all logits", "MiB")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ways(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor, Tensor], None]]:
    """Each way as a function that leaves gradients in hidden and weight."""
    torch._dynamo.reset()  # the compiled ways share one cache, and it holds eight entries
    plain = {
        "all logits": loss.full_loss,
        "torch's, mean": lambda *tensors: _torchs_loss(*tensors, reduction="mean"),
        "torch's, none": lambda *tensors: _torchs_loss(*tensors, reduction="none"),
        "ours": loss.chunked_loss,
    }
    eager = {f"{name}, eager": function for name, function in plain.items()}
    compiled = {f"{name}, compiled": _compile(function) for name, function in plain.items()}
    compiled["all logits, compiled, auto-chunked"] = _compile(loss.full_loss, auto_chunk=True)
    return {name: _with_backward(f, dtype) for name, f in (eager | compiled).items()}


def _torchs_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *, reduction: str) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
    losses = F.linear_cross_entropy(
        hidden.to(dtype),
        weight.to(dtype),
        targets,
        reduction=reduction,
        options=nn.LinearCrossEntropyOptions(
            batch_chunk_size=loss.chunk_rows(hidden.size(1)),
            allow_retain_graph=torch.compiler.is_compiling(),
        ),
    )
    return losses.float().mean()


def _compile(function: Callable, auto_chunk: bool = False) -> Callable:
    def call(*tensors):
        return function(*tensors)

    compiled = torch.compile(call, dynamic=False)

    def run(*tensors):
        # By default it engages only where there are many more tokens than are measured here.
        chunker = {"auto_chunker.enable": auto_chunk, "auto_chunker.amplify_ratio_threshold": 1}
        with inductor_config.patch(chunker):
            return compiled(*tensors)

    return run


def _with_backward(function: Callable, dtype: torch.dtype) -> Callable:
    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            value = function(hidden, weight, targets)
        value.backward()

    return call


def _inputs(width: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = (0.02 * torch.randn(VOCABULARY, width)).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (tokens,))


def _seconds(dtype: torch.dtype) -> dict[str, float]:
    ways, inputs = _ways(dtype), _inputs(WIDTH, TOKENS)
    seconds = {way: [] for way in ways}
    for round_ in range(ROUNDS + 1):
        for way, call in ways.items():
            started = time.process_time()
            call(*inputs)
            if round_:  # the first one compiles
                seconds[way].append(time.process_time() - started)
    return {way: statistics.median(measured) for way, measured in seconds.items()}


def _ratio(seconds: dict[str, float], way: str) -> float:
    return seconds[way] / seconds["all logits, eager"]


def _peak_bytes(call: Callable, inputs: tuple[Tensor, ...]) -> int:
    call(*inputs)  # compiles
    hidden, weight, _ = inputs
    hidden.grad = weight.grad = None
    with torch.profiler.profile(profile_memory=True) as profile:
        call(*inputs)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


if __name__ == "__main__":
    run_script(main)
