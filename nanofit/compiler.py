"""Compile a model in place, prove that it computes the same, and undo it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

from model import GPT
from nanofit.device import Device
from nanofit.loader import MicroBatch

AGREEMENT = 0.02  # relative; half-precision kernels fused differently stay well within


def compile_in_place(model: GPT, activation_memory_budget: float = 1.0) -> None:
    """Let torch.compile run the model from now on; its first call takes long.

    What to keep for the backward pass and what to compute again is then up to the compiler, for
    which the budget is the part of the activations to keep.
    """
    torch._functorch.config.activation_memory_budget = activation_memory_budget
    torch._inductor.config.joint_custom_pre_pass = _KeepLoss()
    model.recompute = "off"
    model.compile(dynamic=False)


def keep_loss(graph: fx.Graph) -> None:
    """Forbid to compute the loss again: its gradients, made along with it, are kept."""
    for node in graph.nodes:
        if node.target is torch.ops.nanofit.loss_sum.default:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


class _KeepLoss(CustomGraphPass):
    def __call__(self, graph: fx.Graph) -> None:
        keep_loss(graph)

    def uuid(self) -> str:
        return "nanofit.compiler.keep_loss"  # for the compile cache


def uncompile(model: GPT, recompute: str) -> None:
    """Let the model run as it is written again."""
    model._compiled_call_impl = None  # torch has no public way back from Module.compile()
    model.recompute = recompute


def disagreement(model: GPT, batch: MicroBatch, device: Device, *, rows: int) -> str | None:
    """What is wrong with a compiled model, after all that a run does, but for its update.

    The eager model, for which the micro-batch may be too large, gets `rows` of it at a time.
    Weights and optimiser are left as they are, so this may fail at no cost.
    """
    try:
        with _bare(model):
            eager = _eager_loss(model, batch, device, rows)
        compiled = _evaluation_loss(model, batch.idx, batch.targets, device)
        with device.autocast():
            loss = model(batch.idx, batch.targets)
        loss.backward()
    finally:
        model.zero_grad(set_to_none=True)
        model.train()  # a failure within an evaluation leaves it otherwise
    if abs(compiled - eager) <= AGREEMENT * abs(eager):
        return None
    return f"the compiled loss {compiled:.4f} differs from the eager {eager:.4f}"


@contextmanager
def _bare(model: GPT) -> Iterator[None]:
    compiled, model._compiled_call_impl = model._compiled_call_impl, None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


def _eager_loss(model: GPT, batch: MicroBatch, device: Device, rows: int) -> float:
    total, count = 0.0, 0
    for idx, targets in zip(batch.idx.split(rows), batch.targets.split(rows), strict=True):
        counted = (targets >= 0).sum().item()
        if counted:  # else these rows only fill up the micro-batch
            total += counted * _evaluation_loss(model, idx, targets, device)
            count += counted
    return total / count


@torch.no_grad()
def _evaluation_loss(model: GPT, idx: Tensor, targets: Tensor, device: Device) -> float:
    model.eval()
    with device.autocast():
        loss = model(idx, targets).item()
    model.train()
    return loss
