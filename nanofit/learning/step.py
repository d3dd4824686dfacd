"""One optimiser step; one evaluation."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from nanofit.data.loader import MicroBatch
from nanofit.learning.engine import Engine
from nanofit.machine.device import Device
from nanofit.machine.dist import OtherProcessFailed, Ranks
from nanofit.machine.memory import is_out_of_memory


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    micro_batches: Iterable[MicroBatch],
    *,
    device: Device,
    ranks: Ranks,
    lr: float,
    grad_clip: float,
    seed: int,
    engine: Engine = Engine(),  # noqa: B008
) -> tuple[Tensor, Tensor]:
    """Learn from the micro-batches of one step; return loss and gradient norm, still on the device.

    Nothing here waits for the device. Dropout depends on `seed` alone.
    """
    device.seed(seed)
    with ranks.all_or_none(), engine.passes(model, micro_batches) as (forward, batches):
        loss = torch.zeros((), device=device.torch_device)
        for idx, targets, share in batches:
            with device.autocast():
                part = forward(idx, targets) * share
            scaler.scale(part).backward()
            loss += part.detach()
    ranks.sum_([loss])
    with _forgotten_on_failure(scaler), ranks.all_or_none():
        scaler.unscale_(optimizer)
        limit = grad_clip or float("inf")
        grad_norm = engine.whole(nn.utils.clip_grad_norm_(model.parameters(), limit))
    optimizer.grad_norm = grad_norm  # for those who watch its steps
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate", 1.0)
    with _whole_or_interrupted(), _forgotten_on_failure(scaler), ranks.all_or_none():
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss, grad_norm


class UpdateInterrupted(RuntimeError):
    """Memory ran out while weights were being updated, here or in another process."""


@contextmanager
def _whole_or_interrupted() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, OtherProcessFailed):
            raise UpdateInterrupted(str(error)) from error
        raise


@contextmanager
def _forgotten_on_failure(scaler: GradScaler) -> Iterator[None]:
    """Else the scaler would take the next attempt for the rest of a failed one."""
    try:
        yield
    except Exception:
        if scaler.is_enabled():
            scaler.update(scaler.get_scale())
        raise


@torch.no_grad()
def evaluate(
    model: nn.Module, micro_batches: Iterable[MicroBatch], *, device: Device, ranks: Ranks
) -> float:
    """The mean loss over the micro-batches of all processes."""
    model.eval()
    parts = []
    try:
        with ranks.all_or_none():
            for idx, targets, share in micro_batches:
                with device.autocast():
                    parts.append(model(idx, targets) * share)
            # A process may have none: there can be more processes than sequences.
            loss = torch.zeros((), dtype=torch.float64)
            if parts:
                loss += torch.stack(parts).cpu().double().sum()
    finally:
        model.train()
    ranks.sum_([loss])
    return loss.item()
