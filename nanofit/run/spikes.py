"""Divergence: a loss that jumps or is no number, and updates that had better not be made."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

WINDOW, FEWEST = 64, 16  # losses to compare with, and how many it takes to judge
SIGMAS = 10
LEAST_SIGMA = 0.05  # of a loss averaged over very many tokens
PATIENCE = 5  # looks in a row: odd data make a loss jump for a moment
EXPLODED = 10.0  # times the usual gradient norm
NORM_MEMORY = 0.02  # weight of each new norm in the usual one
HOPELESS_SKIPS = 20  # in a row


def watch_for_spikes(
    on_spike: str, optimizer: Optimizer, scaler: GradScaler, recent: Sequence[float] = ()
) -> "LossWatch | SkipWatch":
    """What looks out for divergence under a policy: `skip` takes part in every step."""
    if on_spike == "skip":
        return SkipWatch(optimizer, is_scaled=scaler.is_enabled())
    return LossWatch(recent, norms_may_overflow=scaler.is_enabled())


class Sight(NamedTuple):
    """What was seen at a look."""

    divergence: str | None  # in words, once it is certain
    is_suspect: bool = False  # it may become certain
    skipped: int = 0  # updates left out since the last look


class LossWatch:
    """Compares each loss it is shown with those before it."""

    def __init__(self, recent: Sequence[float] = (), *, norms_may_overflow: bool = False):
        self._norms_may_overflow = norms_may_overflow  # float16's scaler takes care of that
        self.restart(recent)

    def restart(self, recent: Sequence[float]) -> None:
        """Go on from where the run was put back to, and these were the losses before."""
        self._recent = deque(recent, maxlen=WINDOW)
        self._suspicions = 0

    @property
    def recent(self) -> tuple[float, ...]:
        """The losses that the next one is compared with, which a resumed run needs as well."""
        return tuple(self._recent)

    def look(self, loss: Tensor, grad_norm: Tensor) -> Sight:
        for name, value in (("loss", loss.item()), ("gradient norm", grad_norm.item())):
            if not math.isfinite(value) and (name == "loss" or not self._norms_may_overflow):
                return Sight(f"the {name} is {value}", is_suspect=True)
        jump = self._jump(loss.item())
        self._suspicions = self._suspicions + 1 if jump else 0
        if self._suspicions < PATIENCE:
            return Sight(None, is_suspect=bool(jump))
        self._suspicions = 0  # whoever goes back begins anew
        return Sight(jump, is_suspect=True)

    def _jump(self, loss: float) -> str | None:
        """How far a loss is above those before it, if that is very far."""
        if len(self._recent) >= FEWEST:
            usual, sigma = fmean(self._recent), max(pstdev(self._recent), LEAST_SIGMA)
            sigmas = (loss - usual) / sigma
            if sigmas > SIGMAS:
                return f"the loss jumped from {usual:.2f} to {loss:.2f}, {sigmas:.0f} sigma,"
        self._recent.append(loss)
        return None


class SkipWatch:
    """Leaves out each update whose gradient norm explodes or is no number.

    That is decided on the device, without waiting for it, as the optimiser steps: its `found_inf`
    is the switch that fused optimisers have for float16. What the decision needs is part of the
    optimiser's state, so a resumed run decides alike.
    """

    recent: tuple[float, ...] = ()

    def __init__(self, optimizer: Optimizer, *, is_scaled: bool = False):
        self._optimizer, self._is_scaled = optimizer, is_scaled
        restored = optimizer.param_groups[0].get("spike_memory")
        self._told = 0 if restored is None else int(restored[1])
        optimizer.register_step_pre_hook(self._decide)

    def look(self, loss: Tensor, grad_norm: Tensor) -> Sight:
        _, skipped, in_a_row = self._memory().tolist()
        # Fewer than were told are those of a state that was gone back to.
        new, self._told = max(int(skipped) - self._told, 0), int(skipped)
        if in_a_row >= HOPELESS_SKIPS:
            return Sight(f"{in_a_row:.0f} updates in a row had to be skipped", skipped=new)
        return Sight(None, skipped=new)

    def restart(self, recent: Sequence[float]) -> None:
        """What it goes by was put back with the optimiser's state."""

    def _decide(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        norm = optimizer.grad_norm
        usual, skipped, in_a_row = self._memory().to(norm.device, non_blocking=True).unbind()
        is_bad = ~norm.isfinite() | (norm > EXPLODED * usual)
        overflowed = optimizer.found_inf.bool() if self._is_scaled else torch.zeros_like(is_bad)
        is_spike = is_bad & ~overflowed  # of an overflow the scaler takes care
        learned = torch.where(usual.isinf(), norm, torch.lerp(usual, norm, NORM_MEMORY))
        memory = (
            torch.where(is_bad, usual, learned),
            skipped + is_spike,
            torch.where(is_spike, in_a_row + 1, 0),
        )
        optimizer.param_groups[0]["spike_memory"] = torch.stack(memory)
        optimizer.found_inf = (is_bad | overflowed).float()

    def _memory(self) -> Tensor:
        """The usual norm, updates skipped, and how many of them just now in a row."""
        start = torch.tensor([float("inf"), 0.0, 0.0])
        return self._optimizer.param_groups[0].get("spike_memory", start)
