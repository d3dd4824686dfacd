"""The memory of a step by arithmetic: a line per component, with its formula. It takes no time.

    P parameters  L layers  C width  H heads  T block  V vocabulary  B micro-batch  N = B·T tokens
    E bytes of an element in the precision of the matrix products

The largest need comes at one of three moments: in the loss, when all activations are there; in the
backward pass of the last block; or at the end of the backward pass, when the gradients of the
embedding meet. The first decides for all but very small models. A formula stands before the colon,
in bytes; what it counts, after it.
"""

from typing import NamedTuple

from model import GPTConfig
from nanofit.allocator import rounded
from nanofit.loss import chunk_rows
from nanofit.memory import Setup

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Line(NamedTuple):
    """One component of a step's memory."""

    component: str
    formula: str
    size_bytes: int


def footprint(setup: Setup, micro_batch_size: int) -> list[Line]:
    """What is in memory at the peak of a step, without any saver but the chunked loss.

    It knows nothing of the scores of all pairs of tokens, which `setup.attention` "math" keeps.
    """
    moments = [_in_the_loss, _in_the_last_block, _at_the_end]
    at_peak = [moment(setup, micro_batch_size) for moment in moments]
    return _fixed(setup) + max(at_peak, key=total)


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
        Line("weights", f"4 B × {P:,}: parameters", weights),
        Line("gradients", f"4 B × {P:,}: one for each", weights),
        Line("optimiser state", f"8 B × {P:,}: AdamW's two moments", 2 * weights + counters),
    ]
    if _element(setup) < 4:
        matrices = setup.shape.n_layer * 12 * setup.shape.n_embd**2
        lines.append(
            Line("weights in half precision", f"2 B × {matrices:,}: in the blocks", 2 * matrices)
        )
    if setup.dtype == "float16":
        size = rounded(4)
        lines.append(Line("loss scale", f"2 × {size} B: the scale, its tracker", 2 * size))
    return lines


def _in_the_loss(setup: Setup, B: int) -> list[Line]:
    C, V, E = setup.shape.n_embd, setup.shape.vocab_size, _element(setup)
    N = B * setup.shape.block_size
    lines = [*_activations(setup, B), _logits(setup, N)]
    if _has_full_logits(setup) and setup.compiled and not setup.returns_logits:
        formula = f"{E} B × {V:,} × {C}: the embedding's new gradient"
        lines.append(_workspace(setup, formula, E * V * C))
    elif not setup.compiled and not _has_full_logits(setup):
        formula = f"4 B × {N:,} × {C}: the last norm's result"
        lines.append(_workspace(setup, formula, 4 * N * C))
    return lines


def _activations(setup: Setup, B: int) -> list[Line]:
    """What the forward pass keeps for the backward pass, by the kind of layer that needs it."""
    shape, E = setup.shape, _element(setup)
    L, C, H, T = shape.n_layer, shape.n_embd, shape.n_head, shape.block_size
    N = B * T
    statistics = 4 if setup.compiled else 8
    mask, and_mask = (C, f" + {C}") if shape.dropout else (0, "")
    blocks = f"{N:,} tokens × {L} layers"
    norms = Line(
        # The stream in float32 as it enters either norm, and of each token its mean and deviation.
        # Compiled kernels keep it normalised, and need no mean.
        "activations: norms",
        f"{blocks} × (8·{C} + {2 * statistics}) B",
        N * L * (8 * C + 2 * statistics),
    )
    width = C // H
    padded = H * -(-width // 8) * 8 if setup.attention == "flash" else C
    copy, and_copy = (E * C, f" + {E}·{C}") if padded > C else (0, "")
    attention = Line(
        # In the products' precision the norm's result, queries, keys, values and what the heads
        # make of them; of each head a sum per token in float32; dropout's mask, in bytes. Of heads
        # that are padded the result is there a second time, without the padding.
        "activations: attention",
        f"{blocks} × ({E}·{C} + 4·{E}·{padded}{and_copy} + 4·{H}{and_mask}) B",
        N * L * (E * C + 4 * E * padded + copy + 4 * H + mask),
    )
    mlp = Line(
        # The norm's result, its product, four times as wide, and GELU of that; dropout's mask.
        "activations: MLP",
        f"{blocks} × (9·{E}·{C}{and_mask}) B",
        N * L * (9 * E * C + mask),
    )
    positions, and_positions = (4 * T * C, f" + 4·{T:,}·{C}") if setup.compiled else (0, "")
    ends = Line(
        # Around the blocks: the stream as it enters the last norm, and what that keeps of a token;
        # its id and its target. Compiled kernels keep the positions they have looked up.
        "activations: embedding",
        f"{N:,} tokens × (4·{C} + {statistics + 16}{and_mask}){and_positions} B: and the last norm",
        N * (4 * C + statistics + 16 + mask) + positions,
    )
    return [norms, attention, mlp, ends]


def _logits(setup: Setup, N: int) -> Line:
    """All logits at once or a chunk of them, with what they need and what becomes of them."""
    C, V, E = setup.shape.n_embd, setup.shape.vocab_size, _element(setup)
    if _has_full_logits(setup):  # their input is kept for the backward pass
        rows, inputs, also = N, N, "logits, their input"
        per_logit, per_weight = _full_copies(setup)
    else:  # the gradient of the input is, which in eager is written over it
        rows, also = min(chunk_rows(C, fused=setup.compiled), N), "a chunk, gradients"
        inputs = 2 * N if setup.compiled else N
        per_logit, per_weight = _chunk_copies(setup)
    and_weight = f" + {per_weight}·{V:,}·{C}" if per_weight else ""
    return Line(
        "logits and loss",
        f"{per_logit}·{rows:,}·{V:,} + {E}·{inputs:,}·{C}{and_weight} B: {also}",
        per_logit * rows * V + E * inputs * C + per_weight * V * C,
    )


def _full_copies(setup: Setup) -> tuple[int, int]:
    """Of the full logits: the bytes for each of them, and for each number of the embedding."""
    E = _element(setup)
    cast = E if E < 4 else 0
    if setup.compiled:  # in the products' precision; if returned, also held, with a zero gradient
        return 3 * E if setup.returns_logits else E, cast
    held = E if setup.returns_logits else 0
    if held and E < 4:  # the log-softmax as well; in float32 a copy of it, and its gradient
        return held + E + 8, cast
    # In float32 the log-softmax, its gradient and the loss's.
    return held + 12, cast


def _chunk_copies(setup: Setup) -> tuple[int, int]:
    """The same of a chunk's logits. The embedding's gradient, which they add to, is in float32."""
    E = _element(setup)
    if E == 4:
        return 4, 4
    # The embedding is cast. The log-softmax is in float32; compiled kernels need no copy for it.
    return (E if setup.compiled else E + 4), 4 + E


def _in_the_last_block(setup: Setup, B: int) -> list[Line]:
    C, V, E = setup.shape.n_embd, setup.shape.vocab_size, _element(setup)
    N = B * setup.shape.block_size
    # The gradient of the last norm's input has taken its place. That of the MLP's result is one
    # more if it was cast or dropped. That of GELU's is there beside the result itself, which the
    # weight's gradient still needs; without a bias compiled kernels make that first.
    of_result = E if E < 4 or setup.shape.dropout else 0
    of_gelu = 0 if setup.compiled and not setup.shape.bias else 4 * E
    within = of_result + of_gelu
    formula = f"{within}·{N:,}·{C} + 4·({V:,} + 4·{C})·{C} B: gradients in the last block"
    size = within * N * C + 4 * (V + 4 * C) * C  # of the embedding and a weight as well
    return [*_activations(setup, B), _workspace(setup, formula, size)]


def _at_the_end(setup: Setup, B: int) -> list[Line]:
    C, V, N = setup.shape.n_embd, setup.shape.vocab_size, B * setup.shape.block_size
    if setup.compiled:  # all gradients arrive at once, beside the old ones
        P = sum(parameter_sizes(setup.shape))
        formula = f"4 B × ({P:,} + {V:,}·{C} + {N:,}·{C}): new gradients, the embedding's twice"
        size = 4 * (P + V * C + N * C)
    else:
        formula = f"4 B × 3·{V:,}·{C}: the embedding's two gradients and their sum"
        size = 4 * 3 * V * C
    return [_workspace(setup, formula, size)]


def _workspace(setup: Setup, formula: str, size_bytes: int) -> Line:
    """What kernels hold for each other at the peak, beside what they keep."""
    return Line("compile workspace" if setup.compiled else "temporaries", formula, size_bytes)


def _has_full_logits(setup: Setup) -> bool:
    return setup.loss == "full" or setup.returns_logits


def _element(setup: Setup) -> int:
    return _BYTES[setup.dtype]
