"""The time of a training step by arithmetic: what its kernels compute, and what they move.

    L layers  C width  T block  V vocabulary  N tokens of a pass

A kernel takes as long as its FLOPs at the card's peak or its bytes at the card's bandwidth,
whichever is more. The step is a compiled one in half precision. Bytes are counted as the
compiler counts them: a kernel reads what it needs once and writes its results once, and no cache
helps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

PARTS = ("products", "attention", "elementwise", "loss", "weights", "optimiser")
HALF, FULL = 2, 4  # bytes of a number
LAUNCH_S = 5e-6  # the host's time for a kernel; seen only where the card is done sooner
ADAMW_BYTES = (
    4 * FULL + 3 * FULL
)  # weight, gradient, two moments read; all but the gradient written
CLIP_BYTES = FULL + 2 * FULL  # read for the norm; read and written to be scaled
# Momentum and gradient, each read twice and written once; the gradient read for its norm, and once
# more to be cast; the weight decayed and moved, each time read and written, along what was found.
MUON_BYTES = 6 * FULL + 2 * FULL + HALF + 4 * FULL + HALF


class Kernels(NamedTuple):
    """Equal kernels of a step: what one of them computes and moves."""

    part: str
    count: float
    flops: float
    moved_bytes: float

    def seconds(self, peak_flops: float, bytes_per_s: float) -> float:
        return self.count * max(self.flops / peak_flops, self.moved_bytes / bytes_per_s)


@dataclass(frozen=True)
class Step:
    """One optimiser step of a GPT whose blocks have 12·C² weights."""

    n_layer: int
    n_embd: int
    block_size: int
    vocab_size: int
    micro_batch_size: int
    passes: int
    lookup_parameters: int  # embeddings besides that of the head
    head_is_embedding: bool = True
    chunk_rows: int | None = None  # tokens whose logits the loss makes at a time; None: all
    returns_logits: bool = False  # whose gradient is then a tensor of zeros, added like any other
    is_rotary: bool = False  # queries and keys are normalised and turned on their way to attention
    muon_steps: int = 0  # of Newton-Schulz, for the matrices of the blocks; 0: AdamW for all

    @property
    def tokens_per_pass(self) -> int:
        return self.micro_batch_size * self.block_size

    @property
    def tokens(self) -> int:
        return self.passes * self.tokens_per_pass

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.n_embd

    @property
    def block_parameters(self) -> int:
        return 12 * self.n_layer * self.n_embd**2

    @property
    def parameters(self) -> int:
        return self.block_parameters + self.head_parameters + self.lookup_parameters

    def kernels(self) -> Iterator[Kernels]:
        for kernels in self._of_a_pass():
            yield kernels._replace(count=self.passes * kernels.count)
        by_muon = self.block_parameters if self.muon_steps else 0
        yield Kernels("optimiser", 1, 0, CLIP_BYTES * self.parameters)
        yield Kernels("optimiser", 1, 0, ADAMW_BYTES * (self.parameters - by_muon))
        yield Kernels("optimiser", 1, 0, MUON_BYTES * by_muon)
        yield from _newton_schulz(self)

    def _of_a_pass(self) -> Iterator[Kernels]:
        yield from _products(self)
        yield from _attention(self)
        yield from _elementwise(self)
        yield from _full_loss(self) if self.chunk_rows is None else _chunked_loss(self)
        yield from _weights(self)


def seconds_by_part(step: Step, *, peak_flops: float, bytes_per_s: float) -> dict[str, float]:
    """How long the card is busy with each part of a step."""
    parts = dict.fromkeys(PARTS, 0.0)
    for kernels in step.kernels():
        parts[kernels.part] += kernels.seconds(peak_flops, bytes_per_s)
    return parts


def tokens_per_s(step: Step, *, peak_flops: float, bytes_per_s: float) -> float:
    """The speed if the card does its best, or the host if that is slower."""
    busy_s = sum(seconds_by_part(step, peak_flops=peak_flops, bytes_per_s=bytes_per_s).values())
    return step.tokens / max(busy_s, LAUNCH_S * launches(step))


def launches(step: Step) -> float:
    """Kernels of a step, as far as there is one for each thing that is counted here."""
    return sum(kernels.count for kernels in step.kernels())


def _products(step: Step) -> Iterator[Kernels]:
    """A linear layer's product and its two gradients: the same three matrices, each made once."""
    L, C, N = step.n_layer, step.n_embd, step.tokens_per_pass
    for inputs, outputs in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)):
        yield _product(3 * L, N, inputs, outputs)
    if step.chunk_rows is None:
        yield _product(3, N, C, step.vocab_size)
    else:  # each chunk but the first adds to the head's gradient, which is in float32
        rows = min(step.chunk_rows, N)
        yield _product(2 * N / rows, rows, C, step.vocab_size)
        yield _product(1, rows, C, step.vocab_size, bytes_per_weight=FULL)
        yield _product(N / rows - 1, rows, C, step.vocab_size, bytes_per_weight=2 * FULL)


def _product(
    count: float, rows: int, inputs: int, outputs: int, bytes_per_weight: int = HALF
) -> Kernels:
    moved_bytes = HALF * rows * (inputs + outputs) + bytes_per_weight * inputs * outputs
    return Kernels("products", count, 2 * rows * inputs * outputs, moved_bytes)


def _attention(step: Step) -> Iterator[Kernels]:
    """Two products forward, five backward, of which the causal mask leaves half."""
    L, C, T, N = step.n_layer, step.n_embd, step.block_size, step.tokens_per_pass
    yield Kernels("attention", L, 2 * N * T * C, 4 * HALF * N * C)  # q, k, v and the result
    # The result, its gradient, q, k, v and their gradients; a kernel before and one after it.
    yield Kernels("attention", L, 5 * N * T * C, 8 * HALF * N * C)
    yield Kernels("attention", 2 * L, 0, 0)


def _elementwise(step: Step) -> Iterator[Kernels]:
    """Norms with the sums before them, GELU, and the embedding. The stream is in float32."""
    L, C, N = step.n_layer, step.n_embd, step.tokens_per_pass
    numbers = {
        # Read embeddings; write the stream and the first branch's input.
        "embedding and the first norm": (1, 2 * FULL + HALF),
        # Read the stream and what a branch adds to it; write the stream, the same normalised, which
        # the backward pass needs, and the branch's next input.
        "norm": (2 * L - 1, 3 * FULL + 2 * HALF),
        "the last norm, after which there is no stream": (1, 2 * FULL + 2 * HALF),
        "its gradient": (1, 2 * FULL + HALF),
        # Read the gradient of the result, the normalised stream and the stream's gradient, which is
        # written again. On the way the weight's gradient is summed up for groups of tokens.
        "gradient of a norm": (2 * L - 1, 3 * FULL + HALF),
        "the groups' sum": (2 * L + 1, 0),
        "the stream's gradient for a product": (2 * L, FULL + HALF),
        # The first norm takes two kernels: sums along each token, then with these the gradient,
        # which is added to rows of the embedding's.
        "sums of the first norm's gradient": (1, FULL + HALF),
        "gradient of the first norm and the embedding": (1, 4 * FULL + HALF),
        "GELU": (L, 2 * 4 * HALF),
        "its gradient too": (L, 3 * 4 * HALF),
        "gradients of q, k and v into one": (L, 2 * 3 * HALF),
    }
    if step.is_rotary:
        # Queries, keys and values read and written; backward the gradients, and what was made.
        numbers["queries and keys turned"] = (L, 2 * 3 * HALF)
        numbers["and back"] = (L, (2 * 3 + 2) * HALF)
    for count, bytes_per_number in numbers.values():
        yield Kernels("elementwise", count, 0, bytes_per_number * N * C)


def _newton_schulz(step: Step) -> Iterator[Kernels]:
    """Three products a step for each matrix: queries, keys, values, out; up and down."""
    L, C = step.n_layer, step.n_embd
    for matrices, columns in ((4 * L, C), (2 * L, 4 * C)):
        count, square, whole = step.muon_steps * matrices, C * C, C * columns
        yield Kernels("optimiser", count, 2 * C * whole, HALF * (whole + square))
        yield Kernels("optimiser", count, 2 * C * square, HALF * 2 * square)
        yield Kernels("optimiser", count, 2 * C * whole, HALF * (square + 2 * whole))


def _full_loss(step: Step) -> Iterator[Kernels]:
    """Logits are read for their maximum, then for their sum, and turned into gradients."""
    logits = step.tokens_per_pass * step.vocab_size
    yield Kernels("loss", 2, 0, HALF * logits)
    yield Kernels("loss", 1, 0, 2 * HALF * logits)
    if step.returns_logits:  # zeros are written and read
        yield Kernels("loss", 1, 0, 2 * HALF * logits)


def _chunked_loss(step: Step) -> Iterator[Kernels]:
    """One kernel turns a chunk of logits into gradients."""
    N = step.tokens_per_pass
    rows = min(step.chunk_rows, N)
    yield Kernels("loss", N / rows, 0, 2 * HALF * rows * step.vocab_size)
    yield Kernels("loss", 1, 0, 0)  # the losses are summed


def _weights(step: Step) -> Iterator[Kernels]:
    """Every pass casts the weights for its products, and adds its gradients to the others'."""
    L, C = step.n_layer, step.n_embd
    matrices = 12 * C * C / 4  # on average
    cast = FULL + HALF
    yield Kernels("weights", 2 * 4 * L, 0, cast * matrices)  # and their gradients back
    yield Kernels("weights", 1, 0, cast * step.head_parameters)
    gradient = HALF if step.chunk_rows is None else FULL  # of the head, as the loss leaves it
    if step.head_is_embedding:  # lookups add to zeros; then the two gradients are summed
        yield Kernels("weights", 1, 0, FULL * step.head_parameters)
        yield Kernels("weights", 1, 0, (2 * FULL + gradient) * step.head_parameters)
    else:
        yield Kernels("weights", 1, 0, (FULL + gradient) * step.head_parameters)
    yield Kernels("weights", 1, 0, FULL * step.lookup_parameters)
    # The first pass has nothing to add to.
    added = (step.passes - 1) / step.passes
    tensors = 6 * L + 3
    yield Kernels("weights", added * tensors, 0, 3 * FULL * step.parameters / tensors)
