"""Parameter groups, their optimisers, and the learning-rate curve."""

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanofit.learning.moments import adamw_8bit, adamw_32bit, convert_moments
from nanofit.learning.muon import Halves, Muon
from nanofit.machine.dist import Ranks
from nanofit.settings.config import TrainConfig

# AdamW beside Muon, as published: for gradients of the loss's sum over a step, decayed a little.
_EPS_OF_SUM, _DECAY_BESIDE_MUON = 1e-10, 0.001


def build_optimizer(
    model: nn.Module,
    learn: TrainConfig,
    bits: Literal[8, 32] = 32,
    *,
    products: torch.dtype = torch.float32,
    ranks: Ranks = Ranks(),  # noqa: B008
) -> Optimizer:
    """AdamW, whose two moments take `bits` each, or Muon and AdamW.

    A group's `rate` is its learning rate in units of the run's. Muon's products are in `products`.
    """
    adamw = adamw_8bit if bits == 8 else adamw_32bit
    betas, lr = (learn.beta1, learn.beta2), learn.learning_rate
    if learn.optimizer == "muon":
        matrices, others = _groups_for_muon(model, learn)
        eps = _EPS_OF_SUM / (learn.sequences_per_step * model.config.block_size)
        optimizer = Halves(
            adamw(others, lr=lr, betas=betas, eps=eps, weight_decay=_DECAY_BESIDE_MUON),
            Muon(matrices, lr=lr, steps=learn.muon_steps, dtype=products, ranks=ranks),
        )
    else:
        optimizer = adamw(_groups_for_adamw(model, learn), lr=lr, betas=betas)
    convert_moments(optimizer, bits)
    return optimizer


def _groups_for_adamw(model: nn.Module, learn: TrainConfig) -> list[dict[str, Any]]:
    """Matrices and embeddings, which are decayed, and biases and norms, which are not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": learn.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _groups_for_muon(model: nn.Module, learn: TrainConfig) -> tuple[list[dict[str, Any]], ...]:
    """The matrices of the blocks, and all the rest.

    Queries, keys and values are three matrices in one. A tied embedding learns as a head does.
    """
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            kind = "vectors"
        elif name.startswith("transformer.h."):
            kind = "attention" if name.endswith("c_attn.weight") else "matrices"
        else:
            is_tied = not model.config.is_modern
            kind = "head" if is_tied or name == "lm_head.weight" else "embedding"
        parts[kind].append(parameter)
    decay = {"weight_decay": learn.weight_decay}
    matrices = [
        {"params": parts["attention"], "parts": 3, **decay},
        {"params": parts["matrices"], **decay},
    ]
    rates = {
        "embedding": learn.embedding_rate,
        "head": learn.head_rate,
        "vectors": learn.vector_rate,
    }
    others = [{"params": parts[kind], "rate": rate} for kind, rate in rates.items() if parts[kind]]
    return matrices, others


def lr_at(step: int, learn: TrainConfig) -> float:
    """The learning rate of a step."""
    if not learn.decay_lr:
        return learn.learning_rate
    if step < learn.warmup_iters:
        return learn.learning_rate * (step + 1) / (learn.warmup_iters + 1)
    if step >= learn.decay_end:
        return learn.min_lr
    start = decay_start(learn)
    if step < start:
        return learn.learning_rate
    progress = (step - start) / (learn.decay_end - start)
    if learn.lr_schedule == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        remaining = 1.0 - progress
    return learn.min_lr + remaining * (learn.learning_rate - learn.min_lr)


def undecayed_share(step: int, learn: TrainConfig) -> float:
    """How much of the decay is still to come, from 1 at the full learning rate to 0 at its end."""
    span = learn.learning_rate - learn.min_lr
    return (lr_at(step, learn) - learn.min_lr) / span if span else 1.0


def decay_start(learn: TrainConfig) -> int:
    """The first step of the decay: a checkpoint from before it can be continued for longer."""
    if learn.lr_schedule == "cosine":
        return learn.warmup_iters
    return max(learn.warmup_iters, round(learn.decay_end * (1 - learn.decay_fraction)))


def end_in(steps_left: int, step: int, learn: TrainConfig) -> TrainConfig:
    """The schedule that ends in so many steps, or with wsd as soon after as a whole decay takes.

    A warm-up that would still last for most of it is shortened; one that is over stays as it was.
    """
    length = learn.of_length(step + steps_left)
    warmup = min(learn.warmup_iters, max(length.warmup_iters, step))
    ended = replace(length, lr_decay_iters=None, warmup_iters=warmup)
    if learn.lr_schedule == "wsd" and learn.decay_fraction < 1:
        while decay_start(ended) < step:
            ended = replace(ended, max_iters=ended.max_iters + 1)
    return ended


def same_lr_until(step: int, one: TrainConfig, other: TrainConfig) -> bool:
    """Whether two runs have had the same learning rates when they reach `step`."""
    return one == other or all(lr_at(s, one) == lr_at(s, other) for s in range(step))
