"""The memory of a step by arithmetic: a line per component, with its formula. It takes no time.

    P parameters  L layers  C width  H heads  T block  V vocabulary  B micro-batch  N = B·T tokens
    E bytes of an element in the precision of the matrix products

The largest need comes at one of three moments: in the loss, when all activations are there; in the
backward pass of the last block; or at the end of the backward pass, when the gradients of the
embedding meet. The first decides for all but very small models.
"""

from typing import NamedTuple

from model import GPTConfig
from nanofit.allocator import rounded
from nanofit.loss import chunk_rows
from nanofit.memory import Curve, Setup

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Line(NamedTuple):
    """One component of a step's memory."""

    component: str
    formula: str
    size_bytes: int


def footprint(setup: Setup, micro_batch_size: int) -> list[Line]:
    """What is in memory at the peak of a step, without any saver but the chunked loss."""
    moments = [_in_the_loss, _at_the_end]
    if not setup.compiled:  # fused kernels keep little within a block
        moments.append(_in_the_last_block)
    at_peak = [moment(setup, micro_batch_size) for moment in moments]
    return _fixed(setup) + max(at_peak, key=total)


def footprint_curve(setup: Setup) -> Curve:
    """What any micro-batch needs."""
    return Curve.through({size: total(footprint(setup, size)) for size in (2, 6)})


def total(lines: list[Line]) -> int:
    return sum(line.size_bytes for line in lines)


def parameter_sizes(shape: GPTConfig) -> list[int]:
    """How many numbers each weight tensor holds, the tied embedding once."""
    C, biases = shape.n_embd, shape.bias
    matrices = [3 * C * C, C * C, 4 * C * C, 4 * C * C]  # qkv, attention out, up, down
    vectors = [C, C] + biases * [C, C, 3 * C, C, 4 * C, C]  # norms; their biases, and the matrices'
    outer = [shape.vocab_size * C, shape.block_size * C, C] + biases * [C]
    return outer + shape.n_layer * (matrices + vectors)


def _fixed(setup: Setup) -> list[Line]:
    """What is there whatever the micro-batch."""
    sizes = parameter_sizes(setup.shape)
    P, weights = sum(sizes), sum(rounded(4 * size) for size in sizes)
    counters = rounded(4) * len(sizes)  # AdamW counts the steps of each tensor
    lines = [
        Line("weights", f"4 B × {P:,} parameters", weights),
        Line("gradients", f"4 B × {P:,}", weights),
        Line("optimiser state", f"8 B × {P:,}: AdamW's two moments", 2 * weights + counters),
    ]
    if _element(setup) < 4:
        matrices = setup.shape.n_layer * 12 * setup.shape.n_embd**2
        lines.append(
            Line("weights in half precision", f"2 B × {matrices:,} in the blocks", 2 * matrices)
        )
    return lines


def _in_the_loss(setup: Setup, B: int) -> list[Line]:
    C, N = setup.shape.n_embd, B * setup.shape.block_size
    return [
        *_activations(setup, B),
        _logits(setup, N),
        Line("temporaries", f"4 B × {N:,} × {C}: the last norm's result", 4 * N * C),
    ]


def _activations(setup: Setup, B: int) -> list[Line]:
    """What the backward pass will need of the forward pass."""
    shape, N, E = setup.shape, B * setup.shape.block_size, _element(setup)
    L, C, H = shape.n_layer, shape.n_embd, shape.n_head
    masks = 2 * C if shape.dropout else 0
    # In float32: the input of two norms, its mean and deviation; of each head a sum per row. In the
    # precision of the products: the results of the norms, q, k and v, attention, up and GELU.
    block = 8 * C + 16 + 4 * H + 14 * E * C + masks
    outer = 4 * C + 8 + 24 + masks // 2  # the last norm's input; tokens, as ids and as targets
    return [
        Line(
            "activations",
            f"{N:,} tokens × {L} × ((8 + 14·{E})·{C} + 4·{H} + 16{f' + 2·{C}' if masks else ''}) B",
            N * (L * block + outer),
        )
    ]


def _logits(setup: Setup, N: int) -> Line:
    C, V, E = setup.shape.n_embd, setup.shape.vocab_size, _element(setup)
    if setup.loss == "full" or setup.returns_logits:
        copies = _bytes_per_logit(setup)
        cast = E * C * (N + V) if E < 4 else 0
        return Line("logits and loss", f"{copies} B × {N:,} × {V:,}", copies * N * V + cast)
    rows = min(chunk_rows(C), N)
    gradients = E * N * C + 4 * V * C
    cast = E * V * C if E < 4 else 0
    wide = 0 if E == 4 else E * V * C if setup.compiled else max(4 * rows * V, E * V * C)
    chunk = E * rows * V
    return Line(
        "logits and loss",
        f"{rows} rows × {V:,} at a time, gradients {E} B × {N:,} × {C} + 4 B × {V:,} × {C}",
        gradients + cast + chunk + wide,
    )


def _bytes_per_logit(setup: Setup) -> int:
    """Of the full logits: how many bytes each of them takes at the peak."""
    E = _element(setup)
    if setup.compiled:  # in the products' precision; if returned, also held, with a zero gradient
        return 3 * E if setup.returns_logits else E
    return 12 + (E if setup.returns_logits else 0)  # log-softmax, its gradient, the loss's: float32


def _in_the_last_block(setup: Setup, B: int) -> list[Line]:
    C, N, E = setup.shape.n_embd, B * setup.shape.block_size, _element(setup)
    # Of GELU's input and result the gradients are there, its saved result is not any more.
    size = N * C * (4 * E + 2) + 4 * setup.shape.vocab_size * C
    formula = f"{N:,} × {C} × (4·{E} + 2) B within a block, the embedding's gradient"
    return [*_activations(setup, B), Line("temporaries", formula, size)]


def _at_the_end(setup: Setup, B: int) -> list[Line]:
    C, V = setup.shape.n_embd, setup.shape.vocab_size
    sizes = parameter_sizes(setup.shape)
    waiting = 4 * sum(sizes) if setup.compiled else 4 * V * C  # compiled, all arrive at once
    formula = "new gradients beside the old, the embedding's twice"
    return [Line("temporaries", formula, waiting + 4 * V * C + 4 * B * setup.shape.block_size * C)]


def _element(setup: Setup) -> int:
    return _BYTES[setup.dtype]
