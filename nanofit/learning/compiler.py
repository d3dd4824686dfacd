"""Compile a model in place, compare what it computes, and undo it."""

import logging
import math

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

from nanofit.data.loader import MicroBatch
from nanofit.machine.device import Device

AGREEMENT = 0.02  # relative; half-precision kernels fused differently stay well within
MOST_SHAPES = 64
GRADIENT_SCALE = 2.0**10  # float16 would lose the smallest gradients otherwise


def compile_in_place(model: nn.Module, activation_memory_budget: float = 1.0) -> None:
    """Let torch.compile run the model from now on; its first call takes long.

    What to keep for the backward pass and what to compute again is then up to the compiler, for
    which the budget is the part of the activations to keep.
    """
    torch._functorch.config.activation_memory_budget = activation_memory_budget
    torch._inductor.config.joint_custom_pre_pass = _KeepLoss()
    # Beyond its limit torch goes back to eager without a word; a run may see many micro-batches.
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    # In the first call of a graph it checks what our op returns, in a mode that gives tensors other
    # dispatch keys: the kernel of the loss would be compiled twice. A test checks it instead.
    torch._functorch.config.check_custom_op_aliasing = False
    # Cut where buckets of gradients end, a graph would not be the one that was forecast, tried and
    # cached. Whole, it gives all of them at once: buckets are summed one behind the other.
    torch._dynamo.config.optimize_ddp = False
    # It says of every consumer card that it is too small for a mode that nobody asked for.
    logging.getLogger("torch._inductor.utils").addFilter(_is_about_us)
    model.recompute = "off"
    model.compile(dynamic=False)


def _is_about_us(record: logging.LogRecord) -> bool:
    return "max_autotune_gemm" not in record.getMessage()


def keep_loss(graph: fx.Graph) -> None:
    """Forbid to compute the loss again: its gradients, made along with it, are kept."""
    for node in graph.nodes:
        if node.target is torch.ops.nanofit.loss_sum.default:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


class _KeepLoss(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        keep_loss(graph)

    def uuid(self) -> str:
        return "nanofit.learning.compiler.keep_loss"  # for the compile cache


def uncompile(model: nn.Module, recompute: str) -> None:
    """Let the model run as it is written again."""
    model._compiled_call_impl = None  # torch has no public way back from Module.compile()
    model.recompute = recompute


def measure(model: nn.Module, batch: MicroBatch, device: Device, *, rows: int) -> dict[str, float]:
    """Losses and gradient norm of a micro-batch, by all that a run does but for its update.

    The model gets `rows` of it at a time; none of them may be there to fill it up. Weights and
    optimiser are left as they are, so this may fail at no cost.
    """
    losses = {"evaluation loss": 0.0, "training loss": 0.0}
    try:
        for idx, targets in zip(batch.idx.split(rows), batch.targets.split(rows), strict=True):
            share = len(idx) / len(batch.idx)
            losses["evaluation loss"] += share * _evaluation_loss(model, idx, targets, device)
            with device.autocast():
                loss = model(idx, targets)
            (loss * share * GRADIENT_SCALE).backward()
            losses["training loss"] += share * loss.item()
        norm = nn.utils.get_total_norm(p.grad for p in model.parameters()) / GRADIENT_SCALE
    finally:
        model.zero_grad(set_to_none=True)
        model.train()  # a failure within an evaluation leaves it otherwise
    return {**losses, "gradient norm": norm.item()}


def disagreement(
    eager: dict[str, float], compiled: dict[str, float], *, dropout: float
) -> str | None:
    """What a compiled model gets wrong, if anything."""
    # A compiled model draws other neurons to drop, so only its evaluation can be compared.
    names = ("evaluation loss",) if dropout else eager.keys()
    for name in names:
        expected, found = eager[name], compiled[name]
        # An eager gradient may overflow in float16; a compiled one that is no number is wrong.
        if math.isfinite(expected) and not abs(found - expected) <= AGREEMENT * abs(expected):
            return f"the compiled {name} {found:.4g} differs from the eager {expected:.4g}"
    return None


@torch.no_grad()
def _evaluation_loss(model: nn.Module, idx: Tensor, targets: Tensor, device: Device) -> float:
    model.eval()
    with device.autocast():
        loss = model(idx, targets).item()
    model.train()
    return loss
