"""Bytes a training step needs on a GPU, by simulation: no GPU is needed to find out."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import GPT, GPTConfig, Recompute
from nanofit.allocator import Allocator, OutOfMemory
from nanofit.cache import keep, recall
from nanofit.config import TrainConfig
from nanofit.device import Device
from nanofit.dist import Ranks
from nanofit.graphs import CompiledStandIn, Graphs, compiled_graphs
from nanofit.loader import MicroBatch, random_micro_batches
from nanofit.loss import chunk_rows, first_chunks
from nanofit.optim import build_optimizer
from nanofit.step import evaluate, train_step
from nanofit.trace import Attention, Buffer, Event, MemoryTrace

MOST_SEQUENCES = 4096  # of a micro-batch
CHUNKS = 3  # of the loss, which all take the same memory: a first, a middle and a last one


@dataclass(frozen=True)
class Setup:
    """What decides the memory of a step, but for the micro-batch.

    `recompute` acts in the eager stage, `activation_memory_budget` in the compiled one.
    """

    shape: GPTConfig
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    compiled: bool = False
    loss: Literal["chunked", "full"] = "chunked"
    returns_logits: bool = False  # as nanoGPT's forward does; for comparison
    recompute: Recompute = "off"
    activation_memory_budget: float = 1.0
    optimizer_bits: Literal[8, 32] = 32
    has_flash: bool = True  # attention; cards older than Ampere have none

    @property
    def attention(self) -> Attention:
        """Whose kernels torch takes: with "math" the scores of all pairs of tokens are in memory.

        The efficient ones are for heads whose rows are aligned; flash attention pads them.
        """
        if self.dtype != "float32" and self.has_flash:
            return "flash"
        if self.dtype == "bfloat16":
            return "math"
        aligned = 8 if self.dtype == "float16" else 4 if self.has_flash else 1
        return "math" if self.shape.n_embd // self.shape.n_head % aligned else "efficient"


class Curve(NamedTuple):
    """Memory by micro-batch, in a straight line."""

    fixed_bytes: int
    bytes_per_sequence: int

    @classmethod
    def through(cls, peaks: dict[int, int]) -> "Curve":
        """The line through the peaks of the smallest and the largest of some sizes."""
        few, many = min(peaks), max(peaks)
        slope = (peaks[many] - peaks[few]) // (many - few)
        return cls(peaks[few] - few * slope, slope)

    def at(self, micro_batch_size: int) -> int:
        return self.fixed_bytes + micro_batch_size * self.bytes_per_sequence

    def largest(self, limit_bytes: float) -> int:
        """The largest micro-batch under a limit; 0 if there is none."""
        room = limit_bytes - self.fixed_bytes
        if self.bytes_per_sequence <= 0:
            return MOST_SEQUENCES if room >= 0 else 0
        return max(int(room // self.bytes_per_sequence), 0)


@dataclass(frozen=True)
class Simulation:
    """The life of every buffer over two steps of two micro-batches and one evaluation."""

    events: list[Event]

    @cached_property
    def peak_bytes(self) -> int:
        """The most that is allocated at any time."""
        return max(self.allocated())

    @cached_property
    def alive_at_peak(self) -> list[Buffer]:
        """What fills the memory when most of it is in use, the largest first."""
        alive: dict[Buffer, None] = {}
        for event, allocated in zip(self.events, self.allocated(), strict=True):
            if event.is_birth:
                alive[event.buffer] = None
            else:
                del alive[event.buffer]
            if allocated == self.peak_bytes:
                break
        return sorted(alive, key=lambda buffer: -buffer.size_bytes)

    def components_at_peak(self) -> Counter[str]:
        """The peak's bytes by what they are for."""
        sizes = Counter()
        for buffer in self.alive_at_peak:
            sizes[buffer.component] += buffer.size_bytes
        return sizes

    def course(self) -> list[tuple[str, bool]]:
        """What happens, whatever the sizes."""
        return [(event.buffer.op, event.is_birth) for event in self.events]

    def allocated(self) -> Iterator[int]:
        """The bytes in use after each event."""
        total = 0
        for buffer, is_birth, _ in self.events:
            total += buffer.size_bytes if is_birth else -buffer.size_bytes
            yield total

    def replay(self, *, limit_bytes: int | None = None, expandable_segments: bool) -> Allocator:
        """The caching allocator after all of it; OutOfMemory, and where, if it does not fit."""
        allocator = Allocator(limit_bytes=limit_bytes, expandable_segments=expandable_segments)
        for buffer, is_birth, phase in self.events:
            if not is_birth:
                allocator.free(buffer)
                continue
            try:
                allocator.allocate(buffer, buffer.size_bytes)
            except OutOfMemory as error:
                error.add_note(f"{phase}: {buffer.component}, {buffer.op}, {buffer.line}")
                raise
        return allocator


def simulate(setup: Setup, micro_batch_size: int) -> Simulation:
    """Run the real `train_step` on tensors without content and follow their memory.

    The peak is not reached before the second micro-batch of the second step, when gradients and
    optimiser state are there as well.
    """
    device = simulated_device(setup)
    trace = MemoryTrace(setup.attention)
    graphs = graphs_of(setup, micro_batch_size) if setup.compiled else None
    anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
    with FakeTensorMode(), anomaly, AsOnCuda(setup), first_chunks(CHUNKS), trace:
        model = model_of(setup)
        if graphs:
            model.forward = CompiledStandIn(
                model, graphs, trace, returns_logits=setup.returns_logits
            )
        optimizer, scaler = build_optimizer(model, TrainConfig()), device.grad_scaler()
        # It would ask the card here, if there is one, and so take a context's memory on it.
        optimizer._accelerator_graph_capture_health_check = lambda: None
        trace.follow_step(model, optimizer)
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
    return Simulation(trace.events)


@dataclass(frozen=True)
class Need:
    """Peak memory by micro-batch: the highest of a few lines, each of one moment in a step."""

    lines: tuple[Curve, ...]

    def at(self, micro_batch_size: int) -> int:
        return max(line.at(micro_batch_size) for line in self.lines)

    def largest(self, limit_bytes: float) -> int:
        """The largest micro-batch under a limit; 0 if there is none."""
        return min(line.largest(limit_bytes) for line in self.lines)


def need_of(setup: Setup) -> Need:
    """What any micro-batch needs, from two simulations; kept for the next time it is asked.

    For fewer sequences than it takes to fill a few chunks of the loss it may be a little too high.
    """
    if setup.optimizer_bits == 8:
        wide = need_of(replace(setup, optimizer_bits=32))
        saved = saved_by_8_bits(setup.shape)
        return Need(tuple(Curve(fixed - saved, slope) for fixed, slope in wide.lines))
    kept = recall("memory", setup)
    if kept is None:
        few, many = _sizes_to_simulate(setup)
        kept = _highest_lines({size: simulate(setup, size) for size in (few, many)})
        keep("memory", setup, kept)
    return Need(tuple(Curve(*line) for line in kept))


def _sizes_to_simulate(setup: Setup) -> tuple[int, int]:
    if setup.compiled:
        return 8, 16  # with fewer it depends on their number what is kept
    # One sequence alone would be off the line by some rounding; too few chunks, by a lot.
    few = max(2, -(-CHUNKS * chunk_rows(setup.shape.n_embd) // setup.shape.block_size))
    return few, 3 * few


def _highest_lines(simulations: dict[int, Simulation]) -> list[Curve]:
    """Every moment of a step needs memory in a straight line; those that are the peak of any size.

    A large micro-batch may have its peak at another moment than a small one.
    """
    (few, low), (many, high) = simulations.items()
    if low.course() != high.course():
        return [Curve.through({few: low.peak_bytes, many: high.peak_bytes})]
    before, after = (np.fromiter(one.allocated(), np.int64) for one in (low, high))
    slopes = (after - before) // (many - few)
    fixed = before - few * slopes
    sizes = np.unique(np.geomspace(1, MOST_SEQUENCES, 200, dtype=np.int64))
    peaks = {int((fixed + size * slopes).argmax()) for size in sizes}
    return [Curve(int(fixed[index]), int(slopes[index])) for index in sorted(peaks)]


def saved_by_8_bits(shape: GPTConfig) -> int:
    """What 8-bit moments save: torchao's, with a scale for each 256 values, of larger tensors."""
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in GPT(shape).parameters()]
    saved = 2 * (4 - 1 - 4 / 256)
    return int(sum(saved * size for size in sizes if size >= 4096 and size % 256 == 0))


def model_of(setup: Setup) -> GPT:
    recompute = "off" if setup.compiled else setup.recompute
    model = GPT(setup.shape, loss=setup.loss, recompute=recompute)
    if setup.returns_logits:
        model.loss = _KeepLogits()
    return model


class _KeepLogits:
    """The loss of a model that returns its logits as well: whoever called it holds them."""

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)  # (N, V)
        loss = F.cross_entropy(logits, targets, ignore_index=-1)
        self.logits = logits  # until now there were also those of the last time
        return loss


def simulated_device(setup: Setup) -> Device:
    return Device(torch.device("cpu"), "simulated", getattr(torch, setup.dtype), None, None)


def graphs_of(setup: Setup, size: int) -> Graphs:
    with FakeTensorMode(), AsOnCuda(setup):
        model = model_of(setup)
        names = [name for name, _ in model.named_parameters()]
        tied = {"lm_head.weight": "transformer.wte.weight"}

        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            *weights, idx, targets = inputs
            by_name = dict(zip(names, weights, strict=True))
            by_name |= {name: by_name[same] for name, same in tied.items()}
            with simulated_device(setup).autocast():
                loss = torch.func.functional_call(model, by_name, (idx, targets))
            return (model.loss.logits, loss) if setup.returns_logits else (loss,)

        batch = next(micro_batches_of(setup, size))
        return compiled_graphs(
            forward,
            [*model.parameters(), batch.idx, batch.targets.clone()],
            weights=len(names),
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


class AsOnCuda(torch.overrides.TorchFunctionMode):
    """What takes other memory on CUDA than on a CPU: dropout keeps a mask of bytes, attention
    pads heads and needs nothing for its own dropout, a loss widens half precision late.
    """

    def __init__(self, setup: Setup):
        super().__init__()
        self._attention = setup.attention

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.dropout:  # of what it calls nothing is told here
            return _dropout(*args, **kwargs)
        if function is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if function is F.scaled_dot_product_attention:
            return _attention(self._attention, *args, **kwargs)
        return function(*args, **kwargs)


def _dropout(input: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, training)[0] if p and training else input


def _attention(kernels: Attention, *heads: Tensor, is_causal: bool, dropout_p: float) -> Tensor:
    if kernels == "math":
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*heads, None, dropout_p, is_causal)
    width = heads[0].size(-1)
    if kernels == "efficient" or width % 8 == 0:
        return F.scaled_dot_product_attention(*heads, is_causal=is_causal)
    # Flash attention takes copies of the others, and what it returns is no longer in one piece.
    padded = (F.pad(one, (0, -width % 8)) for one in heads)
    return F.scaled_dot_product_attention(*padded, is_causal=is_causal)[..., :width]


def _cross_entropy(input: Tensor, target: Tensor, *, ignore_index: int, **_: Any) -> Tensor:
    """A CPU's autocast widens what comes in; CUDA's the log-softmax, which is in half as well."""
    log_probs = torch._log_softmax(input, 1, half_to_float=False)
    return F.nll_loss(log_probs.float(), target, ignore_index=ignore_index)
