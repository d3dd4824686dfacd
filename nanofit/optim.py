"""Parameter groups, AdamW, and the learning-rate curve."""

import math

import torch
from torch import nn

from nanofit.config import TrainConfig


def build_optimizer(model: nn.Module, learn: TrainConfig) -> torch.optim.AdamW:
    """Fused AdamW that decays matrices and embeddings, but neither biases nor norms."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": learn.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (learn.beta1, learn.beta2)
    return torch.optim.AdamW(groups, lr=learn.learning_rate, betas=betas, fused=True)


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


def decay_start(learn: TrainConfig) -> int:
    """The first step of the decay: a checkpoint from before it can be continued for longer."""
    if learn.lr_schedule == "cosine":
        return learn.warmup_iters
    return max(learn.warmup_iters, round(learn.decay_end * (1 - learn.decay_fraction)))


def same_lr_until(step: int, one: TrainConfig, other: TrainConfig) -> bool:
    """Whether two runs have had the same learning rates when they reach `step`."""
    return one == other or all(lr_at(s, one) == lr_at(s, other) for s in range(step))
