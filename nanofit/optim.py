"""Parameter groups, AdamW, and the learning-rate curve."""

import math
from dataclasses import replace
from typing import Literal

from torch import nn
from torch.optim import Optimizer

from nanofit.config import TrainConfig
from nanofit.moments import adamw_8bit, adamw_32bit


def build_optimizer(model: nn.Module, learn: TrainConfig, bits: Literal[8, 32] = 32) -> Optimizer:
    """AdamW that decays matrices and embeddings, but neither biases nor norms.

    Its two moments take `bits` each.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": learn.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = adamw_8bit if bits == 8 else adamw_32bit
    return adamw(groups, lr=learn.learning_rate, betas=(learn.beta1, learn.beta2))


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
    """The schedule that ends in so many steps, or with wsd as soon after as a whole decay takes."""
    ended = replace(learn, max_iters=step + steps_left, lr_decay_iters=None)
    if learn.lr_schedule == "wsd" and learn.decay_fraction < 1:
        while decay_start(ended) < step:
            ended = replace(ended, max_iters=ended.max_iters + 1)
    return ended


def same_lr_until(step: int, one: TrainConfig, other: TrainConfig) -> bool:
    """Whether two runs have had the same learning rates when they reach `step`."""
    return one == other or all(lr_at(s, one) == lr_at(s, other) for s in range(step))
