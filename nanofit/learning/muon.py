"""Muon for the matrices of the blocks and AdamW for the rest, as one optimiser.

Muon (Jordan et al., 2024) steps along the orthogonal matrix that is nearest to a matrix's momentum:
in all directions in which it has to change alike. Newton-Schulz steps find it by products alone.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanofit.learning.chunks import MOST_NUMBERS
from nanofit.machine.dist import Ranks

MOMENTUM = 0.95
# Of x, x·xᵀ·x and x·(xᵀ·x)²: twelve gentle steps as published in 2026, or five steep ones as in
# 2024 and in torch, which leave singular values between 0.7 and 1.2.
COEFFICIENTS = {12: (2.0, -1.5, 0.5), 5: (3.4445, -4.7750, 2.0315)}
_TINY = 1e-30  # a matrix of zeros stays one


class _Matrix(NamedTuple):
    """A parameter or a part of one, what it is to step along, and its settings."""

    weight: Tensor
    wanted: Tensor
    group: dict[str, Any]


class Muon(Optimizer):
    """Steps of orthogonal matrices, √(rows / columns) longer for tall ones.

    A group's `parts` says of how many matrices, one below the other, its parameters consist. Those
    of one shape are orthogonalised as a batch, in `dtype`; processes share the batches out.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        steps: int,
        dtype: torch.dtype,
        ranks: Ranks,
    ):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0, "parts": 1})
        self._steps, self._dtype, self._ranks = steps, dtype, ranks

    @property
    def workspace_bytes(self) -> int:
        """What a step takes at most: a batch, its squares, their polynomial and what that makes."""
        numbers = [len(batch) * batch[0].weight.numel() for batch in self._batches()]
        return 4 * self._dtype.itemsize * max(numbers, default=0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Gradients are used up.

        Nobody waits for a share that its owner, out of memory, will never give: all agree first.
        """
        found_inf = getattr(self, "found_inf", None)  # a switch on the device, as for fused AdamW
        is_skipped = None if found_inf is None else found_inf.bool()
        self._gather_momentum(is_skipped)
        batches, world = list(self._batches()), self._ranks.world
        for start in range(0, len(batches), world):
            of_each = batches[start : start + world]
            mine = None
            if self._ranks.rank < len(of_each):
                mine = self._directions(of_each[self._ranks.rank])
            for owner, batch in enumerate(of_each):
                with self._ranks.all_or_none():
                    directions = mine if owner == self._ranks.rank else self._room_for(batch)
                self._ranks.share_(directions, owner)
                if is_skipped is not None:
                    directions.masked_fill_(is_skipped, 0)
                for matrix, direction in zip(batch, directions, strict=True):
                    _move(matrix, direction, is_skipped)
                del direction, directions  # before there are the next ones
            del mine

    def _gather_momentum(self, is_skipped: Tensor | None) -> None:
        """What has been wanted so far; gradients become what that and they want now (Nesterov)."""
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            momentum, gradient = state["momentum"], parameter.grad
            if is_skipped is None:
                momentum.lerp_(gradient, 1 - MOMENTUM)
            else:
                gathered = momentum.lerp(gradient, 1 - MOMENTUM)
                torch.where(is_skipped, momentum, gathered, out=momentum)
            gradient.lerp_(momentum, MOMENTUM)

    def _batches(self) -> Iterator[list[_Matrix]]:
        by_shape = defaultdict(list)
        for group in self.param_groups:
            for parameter in group["params"]:
                parts = (tensor.chunk(group["parts"]) for tensor in (parameter, parameter.grad))
                for weight, wanted in zip(*parts, strict=True):
                    by_shape[_wide(wanted).shape].append(_Matrix(weight, wanted, group))
        for shape, matrices in by_shape.items():
            share = -(-len(matrices) // self._ranks.world)
            length = max(min(MOST_NUMBERS // shape.numel(), share), 1)
            for start in range(0, len(matrices), length):
                yield matrices[start : start + length]

    def _directions(self, batch: list[_Matrix]) -> Tensor:
        return orthogonalized(self._scaled(batch), self._steps)

    def _scaled(self, batch: list[_Matrix]) -> Tensor:
        """What the matrices are to step along, none of them longer than 1."""
        stacked = self._room_for(batch)
        for row, matrix in zip(stacked, batch, strict=True):
            torch.div(_wide(matrix.wanted), matrix.wanted.norm() + _TINY, out=row)
        return stacked

    def _room_for(self, batch: list[_Matrix]) -> Tensor:
        """For the directions that another process finds."""
        like = _wide(batch[0].wanted)
        return like.new_empty((len(batch), *like.shape), dtype=self._dtype)


def orthogonalized(x: Tensor, steps: int) -> Tensor:
    """The nearest orthogonal matrices, near enough: (N, rows, columns), not more rows than columns.

    Singular values, which must not be above 1, are driven towards 1. `x` is used up: of two buffers
    that are written in turns it is one, for whoever calls may hold it until the end.
    """
    a, b, c = COEFFICIENTS[steps]
    other = torch.empty_like(x)
    for _ in range(steps):
        square = x @ x.mT
        torch.baddbmm(
            x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a, out=other
        )
        x, other = other, x
    return x


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.size(0) > matrix.size(1) else matrix


def _move(matrix: _Matrix, direction: Tensor, is_skipped: Tensor | None) -> None:
    weight, _, group = matrix
    rows, columns = weight.shape
    decay = group["lr"] * group["weight_decay"]
    weight.mul_(1 - (decay if is_skipped is None else decay * ~is_skipped))
    if rows > columns:
        direction = direction.mT
    weight.add_(direction, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


class Halves(Optimizer):
    """AdamW and Muon, one to everybody else: one step, one state, one decision to skip."""

    def __init__(self, first: Optimizer, second: Muon):
        self._first, self._second = first, second
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._first_groups = len(first.param_groups)
        # Whether a loss scale's overflow is told by a switch on the device, or the step left out.
        self._step_supports_amp_scaling = getattr(first, "_step_supports_amp_scaling", False)
        self._link()
        self.register_load_state_dict_post_hook(Halves._link)

    def step(self, closure: None = None) -> None:
        for half in (self._first, self._second):
            for switch in ("found_inf", "grad_scale"):
                if hasattr(self, switch):
                    setattr(half, switch, getattr(self, switch))
                elif hasattr(half, switch):
                    delattr(half, switch)
            half.step()

    @property
    def workspace_bytes(self) -> int:
        return max(getattr(half, "workspace_bytes", 0) for half in (self._first, self._second))

    def _link(self) -> None:
        """Both work on the groups and the state that this one has."""
        self._first.state = self._second.state = self.state
        self._first.param_groups = self.param_groups[: self._first_groups]
        self._second.param_groups = self.param_groups[self._first_groups :]
