"""Compiled steps on every kind of card: Inductor's and Triton's own work, as far as ptxas does it.

Two layers of each config: the others are the same.
"""

import json

import pytest

from tests.card.harness import LEAVE, PROJECT, Run

CONFIGS = sorted(PROJECT.glob("config/*.py"))
CARDS = {
    "7.5": "RTX 2060",
    "8.0": "A100 80GB PCIe",
    "8.6": "RTX 3060",
    "8.9": "RTX 4070",
    "9.0": "H100 PCIe",
    "12.0": "RTX 5090",
}
# Three sequences, so that in most shapes the last chunk of the loss is a short one.
STEPS = """
import json, sys
from dataclasses import replace
from functools import partial

sys.path.insert(0, sys.argv[1])
import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from model import GPT
from nanofit.learning.compiler import compile_in_place
from nanofit.settings.config import load_config
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.data.loader import random_micro_batches
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import evaluate, train_step

def steps(shape, learn, run, device):
    torch._dynamo.reset()
    torch._dynamo.config.error_on_recompile = False
    counters.clear()
    known = len(PyCodeCache.modules)
    model = GPT(shape, loss=run.loss).to(device.torch_device)
    optimizer = build_optimizer(model, learn, products=device.product_dtype)
    scaler = device.grad_scaler()
    sizes = dict(block_size=shape.block_size, vocab_size=shape.vocab_size, device=device)
    batches = partial(random_micro_batches, 3, **sizes)
    compile_in_place(model)
    for step in range(3):
        evaluate(model, batches(), device=device, ranks=Ranks())
        settings = dict(device=device, ranks=Ranks(), lr=1e-5, grad_clip=1.0, seed=step)
        train_step(model, optimizer, scaler, batches(), **settings)
        torch._dynamo.config.error_on_recompile = True
    modules = [vars(module).values() for module in PyCodeCache.modules[known:]]
    kernels = [one for values in modules for one in values if isinstance(one, CachingAutotuner)]
    return {
        "dtype": device.precision,
        "graph_breaks": counters["graph_break"],
        "frames": counters["frames"],
        "graphs": counters["stats"]["unique_graphs"],
        "capabilities": sorted({kernel.device_props.cc for kernel in kernels}),
        "launched": sum(bool(kernel.launchers) for kernel in kernels),
    }

done = {}
for config in sys.argv[2:]:
    shape, learn, run = load_config([config])
    shape, device = replace(shape, n_layer=2), describe_device("cuda", run.dtype)
    device.enter_thread()
    key = shape, run.loss, learn.optimizer, device.precision
    if key not in done:  # else its graphs are another config's as well
        done[key] = steps(shape, learn, run, device)
    print(json.dumps({"config": config, **done[key]}), flush=True)
"""


@pytest.mark.parametrize("capability", CARDS)
def test_graphs_of_every_config_compile_for_every_kind_of_card(card, capability):
    on = card(CARDS[capability], memory=24576)
    run = on.run("-c", STEPS + LEAVE, PROJECT, *CONFIGS, CARD_SCRIPT="-c", timeout_s=1800)
    assert run.code == 0, str(run)
    seen = [json.loads(line) for line in run.output.splitlines()]
    assert [one["config"] for one in seen] == list(map(str, CONFIGS))
    for one in seen:
        assert_compiled_once(one)
        assert one["capabilities"] == [int(capability.replace(".", ""))]
    dtypes = {one["dtype"] for one in seen}
    half = {"float16"} if capability == "7.5" else {"float16", "bfloat16"}
    assert dtypes == {"float32"} | half


def assert_compiled_once(seen: dict) -> None:
    """A graph for training, one for evaluation, one of a chunk of the loss; nothing in eager."""
    assert seen["graph_breaks"] == {}, seen
    assert seen["graphs"] == 3, seen
    assert seen["frames"] == {"total": 2, "ok": 2}, seen  # the model, and a chunk
    assert seen["launched"] > 10, seen


LOSS = """
import json, os, sys

sys.path.insert(0, sys.argv[1])
import torch
from nanofit.learning.loss import chunk_bytes
from nanofit.learning.chunks import chunk_rows

WIDTH, VOCABULARY = 576, 50304
dtype = getattr(torch, sys.argv[2])
weight = torch.zeros(VOCABULARY, WIDTH, device="cuda")

def trace():
    with open(os.environ["CARD_TRACE"]) as file:
        return file.readlines()

def loss_of(chunks):
    rows = chunks * chunk_rows(WIDTH, fused=True)
    hidden = torch.zeros(rows, WIDTH, dtype=dtype, device="cuda")
    targets = torch.zeros(rows, dtype=torch.int64, device="cuda")
    before, launched = requested_bytes("current"), len(trace())
    torch.cuda.reset_peak_memory_stats()
    _, *gradients = torch.ops.nanofit.loss_sum(hidden, weight, targets, dtype, True)
    taken = requested_bytes("peak") - before
    foreseen = sum(one.nbytes for one in gradients) + chunk_bytes(*gradients)
    of_losses = 4 * rows
    return taken - foreseen - of_losses, trace()[launched:]

def requested_bytes(when):  # whose blocks nanofit/memory/allocator.py foresees
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]

loss_of(2)  # compiles
(unforeseen, fewer), (_, more) = loss_of(2), loss_of(3)
print(json.dumps({"unforeseen": unforeseen, "launches": [len(fewer), len(more)], "products": [
    sum("cublas" in kernel for kernel in launched) for launched in (fewer, more)]}))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunk_of_the_loss_is_four_kernels_in_the_memory_foreseen(card, tmp_path, dtype):
    run = card().run("-c", LOSS + LEAVE, PROJECT, dtype, CARD_SCRIPT="-c", trace=tmp_path / "trace")
    assert run.code == 0, str(run)
    seen = json.loads(run.output.splitlines()[-1])
    fewer, more = seen["products"]
    assert more - fewer == 3
    fewer, more = seen["launches"]
    assert more - fewer == 4
    assert seen["unforeseen"] == 0


def test_run_that_cannot_compile_goes_on_in_eager_and_says_so(train, tmp_path):
    caches = {f"{name}_CACHE_DIR": str(tmp_path / name) for name in ("TRITON", "TORCHINDUCTOR")}
    run = train("--autofit=False", CC="/bin/false", **caches)  # Triton needs a C compiler
    assert run.code == 0, str(run)
    assert stages(run) == ["eager", "eager for good"]
    [reason] = [event["reason"] for event in run.events("stage") if "good" in event["now"]]
    assert reason in run.output


def stages(run: Run) -> list[str]:
    return [event["now"] for event in run.events("stage")]
