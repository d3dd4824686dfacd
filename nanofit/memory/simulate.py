"""Bytes a training step needs on a GPU, by simulation: no GPU is needed to find out."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from model import GPT
from nanofit.cache import keep, recall
from nanofit.data.loader import MicroBatch, random_micro_batches
from nanofit.learning.chunks import chunk_rows
from nanofit.learning.loss import first_chunks
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import evaluate, train_step
from nanofit.machine.device import Device
from nanofit.machine.dist import Ranks
from nanofit.memory.course import MOST_SEQUENCES, Course, Curve
from nanofit.memory.graphs import CompiledStandIn, Graphs, compiled_graphs
from nanofit.memory.ledger import saved_by_8_bits, update_bytes
from nanofit.memory.setup import Attention, Setup
from nanofit.memory.spread import (
    followed_resizing,
    know_shapes,
    pretended_processes,
    put_gradients_into_buckets,
    shard_,
)
from nanofit.memory.trace import MemoryTrace
from nanofit.settings.config import TrainConfig

CHUNKS = 3  # of the loss, which all take the same memory: a first, a middle and a last one


def simulate(setup: Setup, micro_batch_size: int) -> Course:
    """Run the real `train_step` on tensors without content and follow their memory.

    The peak is not reached before the second micro-batch of the second step, when gradients and
    optimiser state are there as well.
    """
    device = simulated_device(setup)
    trace = MemoryTrace(setup.attention)
    graphs = graphs_of(setup, micro_batch_size) if setup.compiled else None
    with _followed_model(setup, trace) as model:
        if graphs:
            model.forward = CompiledStandIn(
                model, graphs, trace, returns_logits=setup.returns_logits
            )
        optimizer, scaler = optimizer_of(setup, model), device.grad_scaler()
        trace.follow_step(model, optimizer)
        if setup.world > 1 and not setup.shard:
            put_gradients_into_buckets(model, optimizer, trace)
        for _ in range(2):
            train_step(
                model,
                optimizer,
                scaler,
                micro_batches_of(setup, micro_batch_size),
                device=device,
                ranks=Ranks(),
                lr=1e-3,
                grad_clip=1.0,
                seed=0,
            )
        with suppress(DataDependentOutputException):  # a fake loss has no value to return
            batches = micro_batches_of(setup, micro_batch_size)
            evaluate(model, batches, device=device, ranks=Ranks())
    return Course(trace.events)


@contextmanager
def _followed_model(setup: Setup, trace: MemoryTrace) -> Iterator[GPT]:
    """A model without content; what is allocated from now on is traced.

    One that is sharded is cut before that: its parts alone are there when training begins.
    """
    anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
    with ExitStack() as stack:
        mesh = stack.enter_context(pretended_processes(setup.world)) if setup.shard else None
        for context in (FakeTensorMode(), anomaly, as_on_cuda(setup), first_chunks(CHUNKS)):
            stack.enter_context(context)
        if mesh is None:
            stack.enter_context(trace)
            yield model_of(setup)
            return
        model = model_of(setup)
        shard_(model, setup, mesh)
        know_shapes(model, partial(optimizer_of, setup))
        stack.enter_context(followed_resizing(trace))
        stack.enter_context(trace)
        trace.adopt([*(part.to_local() for part in model.parameters()), *model.buffers()])
        yield model


@dataclass(frozen=True)
class Hull:
    """A need by the highest of a few lines, each of one moment in a step."""

    lines: tuple[Curve, ...]

    def at(self, micro_batch_size: int) -> int:
        return max(line.at(micro_batch_size) for line in self.lines)

    def largest(self, limit_bytes: float) -> int:
        return min(line.largest(limit_bytes) for line in self.lines)


def simulated_need(setup: Setup) -> Hull:
    """What any micro-batch needs, from two simulations; kept for the next time it is asked.

    For fewer sequences than it takes to fill a few chunks of the loss it may be a little too high.
    """
    if setup.optimizer_bits == 8:  # torchao compiles its step, of which nothing is seen here
        wide = simulated_need(replace(setup, optimizer_bits=32))
        saved = saved_by_8_bits(setup)
        lines = (Curve(fixed - saved, slope) for fixed, slope in wide.lines)
        return Hull((*lines, Curve(update_bytes(setup), 0)))
    kept = recall("memory", setup)
    if kept is None:
        few, many = _sizes_to_simulate(setup)
        kept = _highest_lines({size: simulate(setup, size) for size in (few, many)})
        keep("memory", setup, kept)
    return Hull(tuple(Curve(*line) for line in kept))


def _sizes_to_simulate(setup: Setup) -> tuple[int, int]:
    if setup.compiled:
        return 8, 16  # with fewer it depends on their number what is kept
    # One sequence alone would be off the line by some rounding; too few chunks, by a lot.
    few = max(2, -(-CHUNKS * chunk_rows(setup.shape.n_embd) // setup.shape.block_size))
    return few, 3 * few


def _order(course: Course) -> list[tuple[str, bool]]:
    """What happens, whatever the sizes."""
    return [(event.buffer.op, event.is_birth) for event in course.events]


def _highest_lines(simulations: dict[int, Course]) -> list[Curve]:
    """Every moment of a step needs memory in a straight line; those that are the peak of any size.

    A large micro-batch may have its peak at another moment than a small one.
    """
    (few, low), (many, high) = simulations.items()
    if _order(low) != _order(high):
        return [Curve.through({few: low.peak_bytes, many: high.peak_bytes})]
    before, after = (np.fromiter(one.allocated(), np.int64) for one in (low, high))
    slopes = (after - before) // (many - few)
    fixed = before - few * slopes
    sizes = np.unique(np.geomspace(1, MOST_SEQUENCES, 200, dtype=np.int64))
    peaks = {int((fixed + size * slopes).argmax()) for size in sizes}
    return [Curve(int(fixed[index]), int(slopes[index])) for index in sorted(peaks)]


def model_of(setup: Setup) -> GPT:
    recompute = "off" if setup.compiled else setup.recompute
    model = GPT(setup.shape, loss=setup.loss, recompute=recompute)
    if setup.returns_logits:
        model.loss = _KeepLogits()
    return model


def optimizer_of(setup: Setup, model: GPT) -> Optimizer:
    """With moments of 32 bits: what 8 of them save is arithmetic."""
    learn = TrainConfig(optimizer=setup.optimizer)
    products = torch.bfloat16 if setup.has_flash else torch.float16
    return build_optimizer(model, learn, products=products)


class _KeepLogits:
    """The loss of a model that returns its logits as well: whoever called it holds them."""

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, *_: None) -> Tensor:
        logits = F.linear(hidden, weight)  # (N, V)
        loss = F.cross_entropy(logits, targets, ignore_index=-1)
        self.logits = logits  # until now there were also those of the last time
        return loss


def simulated_device(setup: Setup) -> Device:
    return Device(torch.device("cpu"), "simulated", getattr(torch, setup.dtype), None, None)


def graphs_of(setup: Setup, size: int) -> Graphs:
    with FakeTensorMode(), as_on_cuda(setup):
        model = model_of(setup)
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        tied = {} if setup.shape.is_modern else {"lm_head.weight": "transformer.wte.weight"}

        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            *weights, idx, targets = inputs
            by_name = dict(zip(tensors, weights, strict=True))
            by_name |= {name: by_name[same] for name, same in tied.items()}
            with simulated_device(setup).autocast():
                loss = torch.func.functional_call(model, by_name, (idx, targets))
            return (model.loss.logits, loss) if setup.returns_logits else (loss,)

        batch = next(micro_batches_of(setup, size))
        return compiled_graphs(
            forward,
            [*tensors.values(), batch.idx, batch.targets.clone()],
            weights=len(tensors),
            outputs=2 if setup.returns_logits else 1,
            activation_memory_budget=setup.activation_memory_budget,
        )


def micro_batches_of(setup: Setup, size: int) -> Iterator[MicroBatch]:
    return random_micro_batches(
        size,
        block_size=setup.shape.block_size,
        vocab_size=setup.shape.vocab_size,
        device=simulated_device(setup),
    )


@contextmanager
def as_on_cuda(setup: Setup) -> Iterator[None]:
    """What takes other memory on CUDA than on a CPU: dropout keeps a mask of bytes, attention
    pads heads and needs nothing for its own dropout, a loss widens half precision late, an RMSNorm
    keeps its input and a number for each token.

    By other functions under the same names: no mode of torch's reaches what a backward pass
    computes again.
    """
    stand_ins = {
        "dropout": _dropout,
        "cross_entropy": _cross_entropy,
        "scaled_dot_product_attention": partial(_attention, setup.attention),
    }
    if not setup.compiled:  # the compiler takes either apart
        stand_ins["rms_norm"] = lambda x, _, weight, eps: _RmsNorm.apply(x, weight)
    own = {name: getattr(F, name) for name in stand_ins}
    try:
        for name, stand_in in stand_ins.items():
            setattr(F, name, stand_in)
        yield
    finally:
        for name, function in own.items():
            setattr(F, name, function)


def _dropout(input: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if p and training else input


class _RmsNorm(torch.autograd.Function):
    """As CUDA's kernel; a CPU's is made of many."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, _, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


_sdpa = F.scaled_dot_product_attention


def _attention(
    kernels: Attention, *heads: Tensor, is_causal: bool, dropout_p: float, scale: float | None
) -> Tensor:
    if kernels == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return _sdpa(*heads, None, dropout_p, is_causal, scale=scale)
    width, options = heads[0].size(-1), dict(is_causal=is_causal, scale=scale)
    if kernels == "efficient" or width % 8 == 0:
        return _sdpa(*heads, **options)
    # Flash attention takes copies of the others, and what it returns is no longer in one piece.
    padded = (F.pad(one, (0, -width % 8)) for one in heads)
    return _sdpa(*padded, **options)[..., :width]


def _cross_entropy(input: Tensor, target: Tensor, *, ignore_index: int, **_: Any) -> Tensor:
    """A CPU's autocast widens what comes in; CUDA's the log-softmax, which is in half as well."""
    log_probs = torch._log_softmax(input, 1, half_to_float=False)
    return F.nll_loss(log_probs.float(), target, ignore_index=ignore_index)
