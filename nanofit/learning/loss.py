"""The mean cross entropy of a vocabulary projection: of all tokens at once, or chunk by chunk.

The chunked loss holds the logits of one chunk of tokens at a time. It makes the gradients in the
forward pass, while it has the logits, so that each of the three matrix products is done once.
They are gradients of the loss's sum: the backward pass multiplies them by what comes from above,
1 / tokens and a loss scale included, in float32. So nothing under- or overflows in float16.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from nanofit.learning.chunks import chunk_rows

_ENDLESS = 1e9  # a logit whose square is still a number


def full_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Mean cross entropy of `hidden @ weight.T + bias` over targets >= 0, the textbook's way.

    With a cap the logits are softly bounded by it.
    """
    logits = soft_capped(F.linear(hidden, weight, bias).float(), cap)  # (N, V)
    return F.cross_entropy(logits, targets.clamp(min=-1), ignore_index=-1)


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """The same without ever holding the logits of all tokens."""
    with_gradients = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    dtype = _matmul_dtype(hidden)
    loss_sum = _LossSum.apply(hidden, weight, targets, dtype, with_gradients, bias, cap)
    return loss_sum / (targets >= 0).sum()


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """The cross entropy of each token, which the others mean; 0 where its target is below 0."""
    inputs = hidden.to(_matmul_dtype(hidden))
    to_losses_, rows = partial(_to_losses_, cap=cap), chunk_rows(inputs.size(1))
    losses, *_ = _losses(inputs, weight, bias, targets, inputs.new_empty(0), to_losses_, rows)
    return losses


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits drawn towards 0, the more the larger, so that none gets past the cap."""
    return logits if cap is None else cap * logits * (logits.square() + cap**2).rsqrt()


_most_chunks: ContextVar[int | None] = ContextVar("most chunks", default=None)


@contextmanager
def first_chunks(count: int) -> Iterator[None]:
    """Of tensors without content compute no more than these: each takes the same memory."""
    token = _most_chunks.set(count)
    try:
        yield
    finally:
        _most_chunks.reset(token)


def chunk_bytes(d_hidden: Tensor, d_weight: Tensor, _: Tensor) -> int:
    """What the opaque op takes besides these results: the cast weight and a chunk of logits."""
    if not d_weight.numel():
        return 0
    (vocabulary, width), size = d_weight.shape, d_hidden.element_size()
    cast = 0 if d_hidden.dtype == d_weight.dtype else vocabulary * width * size
    rows = min(chunk_rows(width, fused=True), d_hidden.size(0))
    return cast + rows * vocabulary * size


class _LossSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, dtype, with_gradients, bias, cap):
        is_ignored = targets < 0
        # Whatever an ignored row holds: infinity times a gradient of zero would not be zero. The
        # compiler makes this part of the kernel that makes `hidden`.
        inputs = hidden.to(dtype, copy=True).masked_fill_(is_ignored.unsqueeze(1), 0)  # (N, C)
        # Opaque to the compiler, which otherwise keeps all chunks of a traced loop alive at once.
        compute = _opaque_loss_sum if torch.compiler.is_compiling() else _loss_sum_over_inputs_
        loss_sum, *gradients = compute(inputs, weight, targets, dtype, with_gradients, bias, cap)
        ctx.save_for_backward(*gradients)
        ctx.hidden_dtype, ctx.has_bias = hidden.dtype, bias is not None
        return loss_sum

    @staticmethod
    def backward(ctx, d_loss_sum):
        d_inputs, d_weight, d_bias = ctx.saved_tensors
        # Not d_inputs * d_loss_sum: that would round the small factor to half precision.
        d_hidden = (d_inputs.float() * d_loss_sum).to(ctx.hidden_dtype)
        d_bias = d_bias * d_loss_sum if ctx.has_bias else None
        return d_hidden, d_weight * d_loss_sum, None, None, None, d_bias, None


def _loss_sum_over_inputs_(
    inputs: Tensor,
    weight: Tensor,
    targets: Tensor,
    _: torch.dtype,
    with_gradients: bool,
    bias: Tensor | None,
    cap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The inputs are nobody else's: their gradients take their place, chunk by chunk."""
    d_inputs = inputs if with_gradients else inputs.new_empty(0)
    to_gradient_ = partial(_to_gradient_, cap=cap, zeroes_ignored=bias is not None)
    rows = chunk_rows(inputs.size(1))
    losses, *gradients = _losses(inputs, weight, bias, targets, d_inputs, to_gradient_, rows)
    if with_gradients:
        d_inputs.masked_fill_((targets < 0).unsqueeze(1), 0)
    return losses.sum(), *gradients


@torch.library.custom_op("nanofit::loss_sum", mutates_args=())
def _opaque_loss_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    with_gradients: bool,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.no_grad():
        inputs = hidden.to(dtype)
        d_inputs = inputs.new_empty(inputs.shape if with_gradients else 0)
        rows = chunk_rows(inputs.size(1), fused=True)
        to_gradient_ = _fused_to_gradient_(cap)
        losses, *gradients = _losses(inputs, weight, bias, targets, d_inputs, to_gradient_, rows)
        return losses.sum(), *gradients


@_opaque_loss_sum.register_fake
def _(hidden, weight, targets, dtype, with_gradients, bias=None, cap=None):
    has_bias = with_gradients and bias is not None
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(hidden.shape if with_gradients else 0, dtype=dtype),
        weight.new_empty(weight.shape if with_gradients else 0),
        weight.new_empty(len(weight) if has_bias else 0),
    )


@register_flop_formula(torch.ops.nanofit.loss_sum)
def _flops(hidden_shape, weight_shape, targets_shape, dtype, with_gradients, *_, **__) -> int:
    """For FLOP counters, which do not look into the op."""
    products = 3 if with_gradients else 1
    return products * 2 * hidden_shape[0] * weight_shape[0] * weight_shape[1]


def _flops_of_addmm(total, left, right, *dtype, **shapes) -> int:
    """torch's own formula does not expect that a product may be told in which dtype to add up."""
    return _TORCHS_ADDMM(total, left, right, **shapes)


_TORCHS_ADDMM = flop_registry[torch.ops.aten.addmm]
flop_registry[torch.ops.aten.addmm] = _flops_of_addmm


def _to_gradient_(
    logits: Tensor, targets: Tensor, losses: Tensor, *, cap: float | None, zeroes_ignored: bool
) -> None:
    """Turn logits into the loss's gradient, in place; write the loss of each row into `losses`.

    A row without a target, one below 0, has no loss; what its logits become is not defined,
    unless it `zeroes_ignored`.
    """
    log_probs, log_sum, of_targets = _to_losses_(logits, targets, losses, cap=cap)
    slope = log_probs.clone() if cap is not None and log_probs is logits else log_probs
    torch.exp(log_probs, out=logits)
    index = targets.clamp(min=0).unsqueeze(1)
    logits.scatter_(1, index, of_targets.expm1().to(logits.dtype))  # softmax - one-hot
    if cap is not None:  # the capped logits once more, of which the slope is (1 - (z / cap)²)^1.5
        slope.add_(log_sum).div_(cap).square_().neg_().add_(1)
        logits.mul_(slope.clamp_(min=0).pow_(1.5))
    if zeroes_ignored:
        logits.masked_fill_((targets < 0).unsqueeze(1), 0)


def _to_losses_(
    logits: Tensor, targets: Tensor, losses: Tensor, *, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first half of that, without a gradient.

    Returns the logarithms of the probabilities, in the place of float32 logits; what the capped
    ones exceed them by; those of the targets.
    """
    index = targets.clamp(min=0).unsqueeze(1)
    log_probs = logits.float()  # the same tensor if it is float32
    if cap is not None:  # z / √(z² + cap²) without a second buffer
        log_probs.div_(cap).atan_().sin_().mul_(cap)
    capped_targets = log_probs.gather(1, index)
    torch.log_softmax(log_probs, 1, out=log_probs)
    of_targets = log_probs.gather(1, index)
    losses.copy_(of_targets.squeeze(1).neg().masked_fill_(targets < 0, 0))
    return log_probs, capped_targets - of_targets, of_targets


@cache
def _fused_to_gradient_(cap: float | None):
    """`_to_gradient_` in formulas of which the compiler makes one kernel, without a buffer.

    Without a target the gradient is 0 as well, which costs nothing here.
    """

    def to_gradient_(logits, targets, losses):
        wide, slope = logits.float(), 1.0
        if cap is not None:
            wide = wide.clamp(-_ENDLESS, _ENDLESS)  # float16 overflows; infinity times 0 is nothing
            shrunk = cap * (wide.square() + cap**2).rsqrt()
            wide, slope = wide * shrunk, shrunk * shrunk * shrunk
        log_sum = wide.logsumexp(1, keepdim=True)
        index = targets.unsqueeze(1)
        is_target = torch.arange(logits.size(1), device=logits.device) == index
        of_targets = wide.where(is_target, 0).sum(1)  # to gather them would be a kernel of its own
        gradient = ((wide - log_sum).exp() - is_target.float()) * slope
        logits.copy_(gradient.where(index >= 0, 0))
        losses.copy_((log_sum.squeeze(1) - of_targets).where(targets >= 0, 0))

    compiled = torch.compile(to_gradient_, fullgraph=True)

    def with_any_number_of_rows(*tensors):  # the last chunk may be short
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        compiled(*tensors)

    return with_any_number_of_rows


def _losses(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    d_inputs: Tensor,
    to_gradient_: Callable[[Tensor, Tensor, Tensor], None],
    rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss of each row; gradients of their sum for inputs, weight and bias, or nothing.

    The first are written into `d_inputs`, unless that is empty.
    """
    with_gradients = d_inputs.numel() > 0
    weight_cast = weight.to(inputs.dtype)  # (V, C)
    bias_cast = None if bias is None else bias.to(inputs.dtype)
    losses = inputs.new_empty(targets.shape, dtype=torch.float32)
    d_weight = weight.new_empty(weight.shape if with_gradients else 0)
    d_bias = weight.new_zeros(len(weight) if with_gradients and bias is not None else 0)
    starts = range(0, len(inputs), rows)
    for start in starts[: _most_chunks.get() if is_fake(inputs) else None]:
        chunk = slice(start, start + rows)
        logits = F.linear(inputs[chunk], weight_cast, bias_cast)  # (rows, V)
        to_gradient_(logits, targets[chunk], losses[chunk])
        if with_gradients:
            _add_product_(d_weight, logits.T, inputs[chunk], is_first=start == 0)
            torch.mm(logits, weight_cast, out=d_inputs[chunk])
            if bias is not None:
                d_bias += logits.sum(0, dtype=d_bias.dtype)
        del logits  # before there are the next ones
    return losses, d_inputs, d_weight, d_bias


def _add_product_(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """total += left @ right, added up in the precision of the total; the first is not added."""
    beta = 0 if is_first else 1  # times 0 even what is not a number is nothing
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif left.is_cuda or is_fake(left):
        torch.addmm(total, left, right, total.dtype, beta=beta, out=total)
    else:
        # There is no such product elsewhere. Of a layer norm's output and as many rows as here a
        # product cannot overflow in float16.
        parts = zip(left.split(1024, 1), right.split(1024), strict=True)
        products = (one @ other for one, other in parts)
        if is_first:
            total.copy_(next(products))
        for product in products:
            total += product


def _matmul_dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
