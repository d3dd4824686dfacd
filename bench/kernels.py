"""Kernels that a training step launches and bytes that they move: nanoGPT's model and ours.

    python bench/kernels.py --nanogpt PATH/model.py

Counted on a CUDA card without a GPU (tests/card): launches are real, of what torch and Triton would
launch on a GPU, and nothing is timed. Bytes of compiled kernels are Inductor's own estimate; of all
other operations, each input is read once and each result written once. So they are the least that
a kernel can move: caches may serve no more than that, and a product that reads its operands again
moves more. PATH/model.py is nanoGPT's, at https://github.com/karpathy/nanoGPT.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from bench.figures import Figure, record
from nanofit.terminal import run_script

SHAPE = dict(n_head=12, block_size=1024, vocab_size=50304, bias=False, dropout=0.0)
SIZES = dict(layers=12, width=576, sequences=16)  # unless told otherwise
PASSES = 2
MEMORY_MIB = 40960  # of an RTX 4070 that bears all of these
KINDS = ("products", "attention", "compiled", "update", "other")
GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Count:
    """What was counted of some passes, by kind of kernel."""

    launches: dict[str, int]
    bytes: dict[str, int]
    flops: int

    def __sub__(self, other: "Count") -> "Count":
        return Count(
            {kind: self.launches[kind] - other.launches[kind] for kind in KINDS},
            {kind: self.bytes[kind] - other.bytes[kind] for kind in KINDS},
            self.flops - other.flops,
        )


def main(argv: Sequence[str]) -> None:
    options = _options(argv)
    if options.count:
        print(json.dumps(_count(options)))
        return
    print(f"{options.layers} layers, {options.width} wide, bfloat16, ", end="")
    print(f"{options.sequences} sequences of {SHAPE['block_size']}\n")
    results = {way: _count_on_a_card(options, way) for way in _ways(options)}
    _record(options, results)
    for title, wanted in (("a step of two passes", "step"), ("one more pass", "pass")):
        print(f"| {title} | launches | {' | '.join(KINDS)} | GB | {' | '.join(KINDS)} | TFLOP |")
        print("|---" + "|--:" * (2 * len(KINDS) + 3) + "|")
        for way, result in results.items():
            print(_row(way, Count(**result[wanted])))
        print()
    print("| | peak of the allocator, GiB |\n|---|--:|")
    for way, result in results.items():
        print(f"| {way} | {result['peak_bytes'] / GIB:.2f} |")


def _record(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Ours beside nanoGPT's, if its model was given."""
    what = f"a step of two passes, {options.layers} layers, {options.width} wide"
    figures = []
    for stage in ("eager", "compiled"):
        ours, nanogpts = (results.get(f"{whose}, {stage}") for whose in ("ours", "nanoGPT's"))
        for name, unit, number in NUMBERS:
            other = nanogpts and number(nanogpts)
            whose = "nanoGPT's" if nanogpts else ""
            figures.append(Figure(f"{what}, {stage}: {name}", number(ours), other, whose, unit))
    how = {"command": "make bench-kernels NANOGPT=...", "conditions": "counted, no GPU"}
    record("kernels", figures, **how)


NUMBERS = (
    ("launches", "", lambda one: sum(one["step"]["launches"].values())),
    ("bytes moved", "GB", lambda one: sum(one["step"]["bytes"].values()) / GB),
    ("peak of the allocator", "GiB", lambda one: one["peak_bytes"] / GIB),
)


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nanogpt", type=Path, help="nanoGPT's model.py; else ours alone")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--deterministic", action="store_true", help="ours, and so as well")
    parser.add_argument("--names", type=Path, help="write each kernel's launches here")
    parser.add_argument("--count", help=argparse.SUPPRESS)  # in the process on the card
    return parser.parse_args(argv)


def _ways(options: argparse.Namespace) -> Iterator[str]:
    for stage in ("eager", "compiled"):
        if options.nanogpt:
            yield f"nanoGPT's, {stage}"
        yield f"ours, {stage}"
        if options.deterministic:
            yield f"ours with deterministic=True, {stage}"


def _row(way: str, count: Count) -> str:
    launches = [sum(count.launches.values()), *(count.launches[kind] for kind in KINDS)]
    moved = [sum(count.bytes.values()), *(count.bytes[kind] for kind in KINDS)]
    cells = [*(f"{n:,}" for n in launches), *(f"{n / GB:.2f}" for n in moved)]
    return f"| {way} | {' | '.join(cells)} | {count.flops / 10**12:.2f} |"


def _count_on_a_card(options: argparse.Namespace, way: str) -> dict:
    from tests.card.harness import CardWithoutGpu

    arguments = ["--count", way, *(f"--{name}={getattr(options, name)}" for name in SIZES)]
    for name in ("nanogpt", "names"):
        if path := getattr(options, name):
            arguments += [f"--{name}", str(path.resolve())]
    with tempfile.TemporaryDirectory() as folder:
        card = CardWithoutGpu(Path(folder), "RTX 4070", memory_mib=MEMORY_MIB)
        trace = Path(folder) / "trace"
        done = card.run("bench/kernels.py", *arguments, trace=trace, timeout_s=3000)
    if done.code:
        raise SystemExit(f"{way}: {done}")
    return json.loads(done.output.splitlines()[-1])


# What follows runs in the process on the card.


def _count(options: argparse.Namespace) -> dict:
    # Inductor notes the bytes of a kernel where it may be asked to benchmark it.
    torch._inductor.config.benchmark_kernel = True
    whose, stage = options.count.split(", ")
    if whose == "nanoGPT's":
        step = _nanogpts_step(options, stage == "compiled")
    else:
        step = _our_step(options, stage == "compiled", deterministic="deterministic" in whose)
    for _ in range(2):  # compiles; makes the optimiser's state
        step(PASSES)
    torch.cuda.reset_peak_memory_stats()
    step(PASSES)
    peak_bytes = torch.cuda.max_memory_allocated()
    launched = {passes: _launches(step, passes) for passes in (PASSES, PASSES + 1)}
    moved = {passes: _moved(step, passes) for passes in launched}
    if options.names:
        _write_names(options, launched[PASSES], moved[PASSES])
    counts = [_summed(launched[passes], moved[passes]) for passes in launched]
    return {
        "step": asdict(counts[0]),
        "pass": asdict(counts[1] - counts[0]),
        "peak_bytes": peak_bytes,
    }


def _our_step(
    options: argparse.Namespace, compiled: bool, *, deterministic: bool
) -> Callable[[int], None]:
    from model import GPT
    from nanofit.data.loader import MicroBatch
    from nanofit.learning.compiler import compile_in_place
    from nanofit.learning.optim import build_optimizer
    from nanofit.learning.step import train_step
    from nanofit.machine.device import describe_device
    from nanofit.machine.dist import Ranks
    from nanofit.settings.config import TrainConfig
    from nanofit.settings.shape import GPTConfig

    device = describe_device("cuda", "bfloat16", deterministic=deterministic)
    device.enter_thread()
    model = GPT(GPTConfig(**_shape(options))).to(device.torch_device)
    optimizer, scaler = build_optimizer(model, TrainConfig()), device.grad_scaler()
    if compiled:
        compile_in_place(model)
    idx, targets = _tokens(options.sequences)

    def step(passes: int) -> None:
        batches = passes * [MicroBatch(idx, targets, 1 / passes)]
        settings = dict(device=device, ranks=Ranks(), lr=1e-4, grad_clip=1.0, seed=0)
        train_step(model, optimizer, scaler, batches, **settings)

    return step


def _nanogpts_step(options: argparse.Namespace, compiled: bool) -> Callable[[int], None]:
    """What nanoGPT's train.py does between one batch and the next."""
    spec = importlib.util.spec_from_file_location("nanogpt", options.nanogpt)
    nanogpt = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(nanogpt)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    sys.stdout, standard_output = sys.stderr, sys.stdout  # it prints
    model = nanogpt.GPT(nanogpt.GPTConfig(**_shape(options))).to("cuda")
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), "cuda")
    sys.stdout = standard_output
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    run = torch.compile(model) if compiled else model
    idx, targets = _tokens(options.sequences)

    def step(passes: int) -> None:
        for _ in range(passes):
            with torch.amp.autocast("cuda", torch.bfloat16):
                _, loss = run(idx, targets)
                loss = loss / passes
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def _shape(options: argparse.Namespace) -> dict:
    return dict(n_layer=options.layers, n_embd=options.width, **SHAPE)


def _tokens(sequences: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(SHAPE["vocab_size"], (2, sequences, SHAPE["block_size"]))
    return tuple(tokens.to("cuda"))


def _launches(step: Callable[[int], None], passes: int) -> Counter[str]:
    """How often each kernel was launched in a step."""
    trace = Path(os.environ["CARD_TRACE"])
    before = trace.stat().st_size
    step(passes)
    torch.cuda.synchronize()
    with trace.open() as file:
        file.seek(before)
        return Counter(file.read().splitlines())


def _kind_of_kernel(name: str) -> str:
    marks = {
        "products": ("cublas", "gemm", "splitK"),
        "attention": ("flash", "fmha", "attention"),
        "compiled": ("triton_",),
        "update": ("multi_tensor_apply", "lpnorm", "LpNorm"),
    }
    return next((kind for kind, words in marks.items() if any(w in name for w in words)), "other")


@dataclass(frozen=True)
class Moved:
    """What one call moved."""

    name: str
    bytes: int
    flops: int = 0


def _moved(step: Callable[[int], None], passes: int) -> list[Moved]:
    moved: list[Moved] = []
    with _CompiledKernels(moved), _Operations(moved):
        step(passes)
    return moved


class _CompiledKernels:
    """Notes each launch of a kernel of Inductor's, with the bytes that Inductor states."""

    def __init__(self, moved: list[Moved]):
        self._moved = moved

    def __enter__(self) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        self._run = CachingAutotuner.run

        def run(kernel, *args, **kwargs):
            gigabytes = kernel.inductor_meta["kernel_num_gb"]
            self._moved.append(Moved(kernel.inductor_meta["kernel_name"], int(gigabytes * GB)))
            return self._run(kernel, *args, **kwargs)

        CachingAutotuner.run = run

    def __exit__(self, *_: object) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        CachingAutotuner.run = self._run


class _Operations(TorchDispatchMode):
    """Notes every operation of torch's own, also those that compiled code calls."""

    def __init__(self, moved: list[Moved]):
        super().__init__()
        self._moved = moved

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else compiled code would not run while we look

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "nanofit":  # look into it
            from nanofit.learning.loss import _opaque_loss_sum

            with self:
                return _opaque_loss_sum._init_fn(*args, **kwargs)
        results = func(*args, **kwargs)
        if size := _bytes_moved(func, args, kwargs, results):
            self._moved.append(Moved(str(func), size, _flops(func, args, results)))
        return results


WITHOUT_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
WITHOUT_KERNEL |= {"_unsafe_view", "_reshape_alias", "detach", "lift_fresh", "alias", "set_"}
LOOK_UPS = {"embedding", "gather", "nll_loss_forward", "nll_loss2d_forward"}


def _bytes_moved(func, args, kwargs, results) -> int:
    name = func._schema.name.removeprefix("aten::")
    if name in WITHOUT_KERNEL or (func.is_view and _is_same_storage(args[0], results)):
        return 0
    read, written = [], []
    for argument, value in _with_schema(func, args, kwargs):
        tensors = [one for one in tree_leaves(value) if isinstance(one, Tensor) and one.is_cuda]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        written += tensors if is_written else []
        is_lost = argument.is_out or name in ("copy_", "fill_", "zero_")
        read += tensors if not (is_written and is_lost) else []
    if name.startswith("_fused_adamw"):  # gradients are among what it may write, and does not
        written = [one for value in (args[0], args[2], args[3]) for one in value]
    written += [one for one in tree_leaves(results) if isinstance(one, Tensor) and one.is_cuda]
    written = list({_address(one): one for one in written}.values())
    if name == "addmm" and kwargs.get("beta") == 0:
        read = read[1:]
    if name in LOOK_UPS:
        read = read[1:] + written
    return sum(map(_size, {_address(one): one for one in read}.values())) + sum(map(_size, written))


def _is_same_storage(tensor: Tensor, results: Tensor | Sequence[Tensor]) -> bool:
    """Whether a view is one: a cast or a reshape may be a copy."""
    first = next(iter(tree_leaves(results)))
    return first.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _with_schema(func, args, kwargs):
    declared = func._schema.arguments
    yield from zip(declared, args, strict=False)
    yield from ((one, kwargs[one.name]) for one in declared[len(args) :] if one.name in kwargs)


def _address(tensor: Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.dtype


def _size(tensor: Tensor) -> int:
    """Of an expanded tensor there is one element where it has many."""
    count = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else 1
    return count


def _flops(func, args, results) -> int:
    name = func._schema.name.removeprefix("aten::")
    if name in ("mm", "matmul", "addmm"):
        left, right = args[1:3] if name == "addmm" else args[:2]
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    if name == "linear":
        return 2 * args[0].numel() * len(args[1])
    if name.startswith("_scaled_dot_product") and "backward" in name:
        return sdpa_backward_flop_count(*(one.shape for one in args[:4]))
    if name.startswith("_scaled_dot_product"):
        return sdpa_flop_count(*(one.shape for one in args[:3]))
    return 0


def _kind_of_call(name: str) -> str:
    if name.startswith("triton_"):
        return "compiled"
    name = name.removeprefix("aten.")
    if name.startswith(("mm.", "addmm.", "matmul.", "linear.")):
        return "products"
    if name.startswith("_scaled_dot_product"):
        return "attention"
    return "update" if name.startswith(("_fused_adamw", "_foreach")) else "other"


def _summed(launched: Counter[str], moved: list[Moved]) -> Count:
    launches, sizes = Counter(), Counter()
    for name, count in launched.items():
        launches[_kind_of_kernel(name)] += count
    for one in moved:
        sizes[_kind_of_call(one.name)] += one.bytes
    return Count(
        {kind: launches[kind] for kind in KINDS},
        {kind: sizes[kind] for kind in KINDS},
        sum(one.flops for one in moved),
    )


def _write_names(options: argparse.Namespace, launched: Counter[str], moved: list[Moved]) -> None:
    """For whoever looks for what to mend: each kernel, each call, the most expensive first."""
    calls, sizes = Counter(one.name for one in moved), Counter()
    for one in moved:
        sizes[one.name] += one.bytes
    with options.names.open("a") as file:
        print(f"\n{options.count}", file=file)
        for name, count in launched.most_common():
            print(f"{count:6} launches  {_kind_of_kernel(name):10} {_short(name)}", file=file)
        for name, size in sizes.most_common():
            print(f"{size / GB:8.3f} GB in {calls[name]:5} calls  {name}", file=file)


@cache
def _short(name: str) -> str:
    found = subprocess.run(["c++filt", name], capture_output=True, text=True, check=False)
    return (found.stdout.strip() or name)[:150]


if __name__ == "__main__":
    run_script(main)
