"""What may be other than in the modern recipe, for bench/recipe.py to try: each part left out once.

A change is of settings, of a model's parts, a model with more, or of the optimiser.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from model import GPT
from nanofit.learning.muon import Muon
from nanofit.settings.shape import GPTConfig

SETTINGS = {
    "without biases": dict(bias=False),
    "with twelve gentle steps of Muon for five steep ones": dict(muon_steps=12),
    "with a decay over 20 % for one over 70 %": dict(decay_fraction=0.2),
    "without weight decay": dict(weight_decay=0.0),
}


def _no_cap(model: GPT) -> None:
    model.logit_cap = None


def _gelu(model: GPT) -> None:
    for block in model.transformer.h:
        block.mlp.act = F.gelu


def _no_embedding_norm(model: GPT) -> None:
    model.transformer.ln_e = nn.Identity()


def _full_rotary(model: GPT) -> None:
    width, block_size = model.config.head_width, model.config.block_size
    frequencies = (1 / 1024) ** torch.linspace(0, 1, width // 2)
    angles = torch.outer(torch.arange(block_size).float(), frequencies)
    model.turns = torch.stack([angles.cos(), angles.sin()]).unsqueeze(2)


def _small_start(model: GPT) -> None:
    """Output projections and head begin as other matrices do."""
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "lm_head.weight")):
            nn.init.normal_(parameter, std=sqrt(0.33 / parameter.size(1)))


def _no_query_norm(model: GPT) -> None:
    """Queries and keys are turned as they are; scores are scaled as usual."""
    for block in model.transformer.h:
        block.attn.scale = None
        block.attn._placed = _turned_only


def _turned_only(q, k, v, turns):
    cos, sin = turns
    turned = []
    for x in (q, k):
        one, other = x.chunk(2, dim=-1)
        turned.append(torch.cat([one * cos + other * sin, other * cos - one * sin], dim=-1))
    return *turned, v


CHANGES: dict[str, Callable[[GPT], None]] = {
    "without a soft cap": _no_cap,
    "with GELU for ReLU²": _gelu,
    "without a norm after the embedding": _no_embedding_norm,
    "with full rotary for half": _full_rotary,
    "without a start at zero": _small_start,
    "without normalised queries and keys": _no_query_norm,
}


class _Mixing(GPT):
    """Each block gets a learned mix of what the one before it gave and the first embedding."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.mix = nn.Parameter(torch.tensor([1.0, 0.0] * config.n_layer))

    def _hidden(self, idx: Tensor, cache: None = None) -> Tensor:
        parts, places = self.transformer, self._places(idx)
        x = first = parts.ln_e(parts.wte(idx))
        for layer, block in enumerate(parts.h):
            x = self._mixed(x, first, layer)
            x = block(x, places, None, layer)
        return parts.ln_f(x)

    def _mixed(self, x: Tensor, first: Tensor, layer: int) -> Tensor:
        return self.mix[2 * layer] * x + self.mix[2 * layer + 1] * first

    def _places(self, idx: Tensor) -> Any:
        return self.turns[:, : idx.size(1)]


class _OtherValues(_Mixing):
    """Values are a learned mix with others: those of the first layer, or looked up by token."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.mix = nn.Parameter(torch.tensor([0.5, 0.5] * config.n_layer))
        for layer, block in enumerate(self.transformer.h):
            block.attn._placed = partial(self._placed, layer, block.attn._placed)

    def _mixed(self, x: Tensor, first: Tensor, layer: int) -> Tensor:
        return x

    def _placed(self, layer: int, plain: Callable, q: Tensor, k: Tensor, v: Tensor, places: Any):
        turns, others = places
        if layer in others:
            v = self.mix[2 * layer] * v + self.mix[2 * layer + 1] * others[layer].view_as(v)
        elif not others:  # the first layer's, for all that follow
            others |= dict.fromkeys(range(1, self.config.n_layer), v)
        return plain(q, k, v, turns)

    def _places(self, idx: Tensor) -> Any:
        return super()._places(idx), {}


class _ValueTables(_OtherValues):
    """Tables of values by token, for the first and the last layer."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.tables = nn.ModuleList(nn.Embedding(config.vocab_size, config.n_embd) for _ in "12")

    def _places(self, idx: Tensor) -> Any:
        first, last = (table(idx) for table in self.tables)
        return self.turns[:, : idx.size(1)], {0: first, self.config.n_layer - 1: last}


ADDITIONS = {
    "with a mix of each block's input and the first embedding": _Mixing,
    "with the first layer's values mixed into all": _OtherValues,
    "with two tables of values by token": _ValueTables,
}


def _layer_norm(model: GPT) -> None:
    parts, width = model.transformer, model.config.n_embd
    parts.ln_e, parts.ln_f = (nn.LayerNorm(width, bias=False) for _ in "ef")
    for block in parts.h:
        block.ln_1, block.ln_2 = (nn.LayerNorm(width, bias=False) for _ in "12")


def _usual_scale(model: GPT) -> None:
    for block in model.transformer.h:
        block.attn.scale = None


def _small_embedding(model: GPT) -> None:
    nn.init.normal_(model.transformer.wte.weight, std=0.02)


REPLACED: dict[str, Callable[[GPT], None]] = {
    "with LayerNorm for RMSNorm": _layer_norm,
    "with scores scaled by 1/√D": _usual_scale,
    "with an embedding that starts at 0.02 for 1": _small_embedding,
}


class _WithoutNesterov(Muon):
    """Steps along what has been wanted so far, and not along what that and the gradient want."""

    def _gather_momentum(self, is_skipped: Tensor | None) -> None:
        super()._gather_momentum(is_skipped)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad.copy_(self.state[parameter]["momentum"])


def _no_nesterov(optimizer: Optimizer) -> None:
    optimizer._second.__class__ = _WithoutNesterov


OPTIMIZERS = {"without Nesterov's look ahead": _no_nesterov}

# In the order in which they are tried.
ALL_CHANGES = (*CHANGES, *SETTINGS, *ADDITIONS, *REPLACED, *OPTIMIZERS)


def changed_model(change: str, shape: GPTConfig) -> GPT:
    model = ADDITIONS.get(change, GPT)(shape)
    for changes in (CHANGES, REPLACED):
        if change in changes:
            changes[change](model)
    return model


def change_optimizer(change: str, optimizer: Optimizer) -> None:
    if change in OPTIMIZERS:
        OPTIMIZERS[change](optimizer)
