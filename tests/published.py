"""The published simple recipe written out in float64, from its description and none of our classes.

modded-nanogpt, track 3, 2026: the model by its formulas, its gradients by autograd, one step of its
optimisers number by number.
"""

import math

import torch
from torch import Tensor

MUON = {"lr": 0.025, "weight_decay": 0.05, "momentum": 0.95}
ADAMW = {"betas": (0.8, 0.95), "eps_of_sum": 1e-10, "weight_decay": 0.001}
RATES = {"embedding": 0.7, "head": 0.004, "vectors": 0.015}


def logits(weights: dict[str, Tensor], idx: Tensor, n_head: int) -> Tensor:
    """Of weights by nanoGPT's names: (B, T) token ids -> (B, T, V)."""

    def linear(x: Tensor, name: str) -> Tensor:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    x = rms_norm(weights["transformer.wte.weight"][idx]) * weights["transformer.ln_e.weight"]
    C = x.size(-1)
    D, layer = C // n_head, 0
    while (block := f"transformer.h.{layer}") + ".ln_1.weight" in weights:
        qkv = linear(rms_norm(x) * weights[f"{block}.ln_1.weight"], f"{block}.attn.c_attn")
        heads = []
        for head in range(n_head):
            columns = slice(head * D, (head + 1) * D)
            q, k, v = (qkv[..., part * C : (part + 1) * C][..., columns] for part in range(3))
            heads.append(attention(rotated(rms_norm(q)), rotated(rms_norm(k)), v))
        x = x + linear(torch.cat(heads, -1), f"{block}.attn.c_proj")
        inner = linear(rms_norm(x) * weights[f"{block}.ln_2.weight"], f"{block}.mlp.c_fc")
        x = x + linear(inner.clamp(min=0) ** 2, f"{block}.mlp.c_proj")
        layer += 1
    z = linear(rms_norm(x) * weights["transformer.ln_f.weight"], "lm_head")
    return 15 * z / (z**2 + 225).sqrt()


def loss(weights: dict[str, Tensor], idx: Tensor, targets: Tensor, n_head: int) -> Tensor:
    z = logits(weights, idx, n_head)
    of_targets = z.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (z.exp().sum(-1).log() - of_targets).mean()


def rms_norm(x: Tensor) -> Tensor:
    return x / (x**2).mean(-1, keepdim=True).sqrt()


def rotated(x: Tensor) -> Tensor:
    """(B, T, D): of D / 2 pairs, a first and a second half, the first D / 4 turn."""
    T, D = x.shape[-2:]
    y = x.clone()
    for pair in range(D // 4):
        frequency = (1 / 1024) ** (pair / (D // 4 - 1)) if D > 4 else 1.0
        for position in range(T):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            one, other = x[..., position, pair], x[..., position, pair + D // 2]
            y[..., position, pair] = one * cos + other * sin
            y[..., position, pair + D // 2] = other * cos - one * sin
    return y


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, of one head; 0.12 at 128 dimensions, and elsewhere scores that spread alike."""
    T, D = q.shape[-2:]
    scores = 0.12 * math.sqrt(128 / D) * q @ k.mT
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    return scores.softmax(-1) @ v


class Step:
    """Steps of the published optimisers on weights in float64, for gradients of a mean loss."""

    def __init__(self, weights: dict[str, Tensor], tokens_per_step: int):
        self.weights = weights
        self._eps = ADAMW["eps_of_sum"] / tokens_per_step
        self._moments = {name: (torch.zeros_like(w),) * 2 for name, w in weights.items()}
        self._done = 0

    def take(self, gradients: dict[str, Tensor], share_of_rate: float = 1.0) -> None:
        self._done += 1
        for name, gradient in gradients.items():
            is_matrix = ".h." in name and gradient.dim() == 2
            self.weights[name] = (self._muon if is_matrix else self._adamw)(
                name, gradient, share_of_rate
            )

    def _muon(self, name: str, gradient: Tensor, share: float) -> Tensor:
        lr, mu = MUON["lr"] * share, MUON["momentum"]
        momentum = mu * self._moments[name][0] + (1 - mu) * gradient
        self._moments[name] = momentum, momentum
        wanted = (1 - mu) * gradient + mu * momentum
        parts = 3 if "c_attn" in name else 1  # queries, keys and values
        update = torch.cat([muon_direction(one) for one in wanted.chunk(parts)])
        return self.weights[name] * (1 - lr * MUON["weight_decay"]) - lr * update

    def _adamw(self, name: str, gradient: Tensor, share: float) -> Tensor:
        kind = "embedding" if "wte" in name else "head" if gradient.dim() == 2 else "vectors"
        lr, (beta1, beta2) = RATES[kind] * share, ADAMW["betas"]
        mean, square = self._moments[name]
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        self._moments[name] = mean, square
        corrected_mean = mean / (1 - beta1**self._done)
        corrected_square = square / (1 - beta2**self._done)
        update = corrected_mean / (corrected_square.sqrt() + self._eps)
        return self.weights[name] * (1 - lr * ADAMW["weight_decay"]) - lr * update


def muon_direction(matrix: Tensor) -> Tensor:
    """Twelve Newton-Schulz steps, each of them done to the singular values themselves."""
    u, values, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = values / values.square().sum().sqrt()
    for _ in range(12):
        s = 2 * s - 1.5 * s**3 + 0.5 * s**5
    rows, columns = matrix.shape
    return math.sqrt(max(1, rows / columns)) * (u * s) @ vt
