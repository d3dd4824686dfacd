"""The mean cross entropy of a vocabulary projection: of all tokens at once, or chunk by chunk.

The chunked loss holds the logits of one chunk of tokens at a time. It makes the gradients in the
forward pass, while it has the logits, so that each of the three matrix products is done once.
They are gradients of the loss's sum: the backward pass multiplies them by what comes from above,
1 / tokens and a loss scale included, in float32. So nothing under- or overflows in float16.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula


def full_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of `hidden @ weight.T` over targets that are >= 0, the textbook's way."""
    logits = F.linear(hidden, weight)  # (N, V)
    return F.cross_entropy(logits.float(), targets.clamp(min=-1), ignore_index=-1)


def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same without ever holding the logits of all tokens."""
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss_sum = _LossSum.apply(hidden, weight, targets, _matmul_dtype(hidden), with_gradients)
    return loss_sum / (targets >= 0).sum()


def chunk_rows(width: int) -> int:
    """Tokens whose logits are alive at once: about as large a buffer as the weight itself.

    Each chunk passes over its (rows, V) logits and over the (V, C) gradient, so that fewer rows
    than the width make the second cost more than the first; more rows only take memory. And up to
    1024 rows of a layer norm's output cannot overflow a float16 product.
    """
    return min(max(1 << (width - 1).bit_length(), 128), 1024)


_most_chunks: ContextVar[int | None] = ContextVar("most chunks", default=None)


@contextmanager
def first_chunks(count: int) -> Iterator[None]:
    """Of tensors without content compute no more than these: each takes the same memory."""
    token = _most_chunks.set(count)
    try:
        yield
    finally:
        _most_chunks.reset(token)


def chunk_bytes(d_hidden: Tensor, d_weight: Tensor) -> int:
    """What the opaque op takes besides these results: the cast weight, a chunk and its product."""
    if not d_weight.numel():
        return 0
    (vocabulary, width), size = d_weight.shape, d_hidden.element_size()
    cast = 0 if d_hidden.dtype == d_weight.dtype else 2 * vocabulary * width * size
    return cast + chunk_rows(width) * (vocabulary + 2 * width) * size


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, dtype, with_gradients):
        # Opaque to the compiler, which otherwise keeps all chunks of a traced loop alive at once.
        compute = _opaque_loss_sum if torch.compiler.is_compiling() else _loss_sum
        loss_sum, d_hidden, d_weight = compute(hidden, weight, targets, dtype, with_gradients)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.hidden_dtype = hidden.dtype
        return loss_sum

    @staticmethod
    def backward(ctx, d_loss_sum):
        d_hidden, d_weight = ctx.saved_tensors
        # Not d_hidden * d_loss_sum: that would round the small factor to half precision.
        d_hidden = (d_hidden.float() * d_loss_sum).to(ctx.hidden_dtype)
        return d_hidden, d_weight * d_loss_sum, None, None, None


@torch.library.custom_op("nanofit::loss_sum", mutates_args=())
def _opaque_loss_sum(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, with_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        return _loss_sum(
            hidden, weight, targets, dtype, with_gradients, to_gradient_=_fused_to_gradient_()
        )


@_opaque_loss_sum.register_fake
def _(hidden, weight, targets, dtype, with_gradients):
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if with_gradients else 0, dtype=dtype),
        weight.new_empty(weight.shape if with_gradients else 0),
    )


@register_flop_formula(torch.ops.nanofit.loss_sum)
def _flops(hidden_shape, weight_shape, targets_shape, dtype, with_gradients, **_) -> int:
    """For FLOP counters, which do not look into the op."""
    products = 3 if with_gradients else 1
    return products * 2 * hidden_shape[0] * weight_shape[0] * weight_shape[1]


def _to_gradient_(logits: Tensor, targets: Tensor) -> Tensor:
    """Turn logits into softmax - one-hot, in place; return the loss of each row in float32."""
    index = targets.unsqueeze(1)
    log_probs = logits.float()  # the same tensor if it is float32
    torch.log_softmax(log_probs, 1, out=log_probs)
    of_targets = log_probs.gather(1, index)
    torch.exp(log_probs, out=logits)
    logits.scatter_(1, index, of_targets.expm1().to(logits.dtype))
    return -of_targets.squeeze(1)


@cache
def _fused_to_gradient_():
    """`_to_gradient_` in formulas of which the compiler makes one kernel, without a buffer."""

    def to_gradient_(logits, targets):
        index = targets.unsqueeze(1)
        wide = logits.float()
        log_sum = wide.logsumexp(1, keepdim=True)
        of_targets = wide.gather(1, index) - log_sum
        is_target = torch.arange(logits.size(1), device=logits.device) == index
        logits.copy_((wide - log_sum).exp() - is_target.float())
        return -of_targets.squeeze(1)

    compiled = torch.compile(to_gradient_, fullgraph=True)

    def with_any_number_of_rows(logits, targets):  # the last chunk may be short
        for tensor in (logits, targets):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(logits, targets)

    return with_any_number_of_rows


def _loss_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    with_gradients: bool,
    to_gradient_=_to_gradient_,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses; its gradients for hidden, in `dtype`, and for weight, or nothing."""
    N, C = hidden.shape
    rows = chunk_rows(C)
    weight_cast = weight.to(dtype)  # (V, C)
    loss_sum = hidden.new_zeros((), dtype=torch.float32)
    d_hidden = hidden.new_empty(hidden.shape if with_gradients else 0, dtype=dtype)
    d_weight = weight.new_zeros(weight.shape if with_gradients else 0)
    for start in range(0, N, rows)[: _most_chunks.get() if is_fake(hidden) else None]:
        chunk = slice(start, start + rows)
        ignored = targets[chunk] < 0
        inputs = hidden[chunk].to(dtype).masked_fill(ignored.unsqueeze(1), 0)  # (rows, C)
        logits = inputs @ weight_cast.T  # (rows, V)
        losses = to_gradient_(logits, targets[chunk].clamp(min=0))
        loss_sum += losses.masked_fill(ignored, 0).sum()
        if with_gradients:
            d_hidden[chunk] = (logits @ weight_cast).masked_fill_(ignored.unsqueeze(1), 0)
            if dtype == weight.dtype:
                torch.addmm(d_weight, logits.T, inputs, out=d_weight)
            else:
                d_weight += logits.T @ inputs
        del logits  # before there are the next ones
    return loss_sum, d_hidden, d_weight


def _matmul_dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
