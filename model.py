"""The GPT: token ids -> loss (training) or logits (inference).

Two architectures of pre-norm blocks, which differ in named parts:

                gpt2, as nanoGPT trains it    modern, as modded-nanogpt's track 3 publishes it
    norm        LayerNorm                     RMSNorm, one after the embedding as well
    positions   learned, added to the tokens  rotary, on half of each normalised query and key
    MLP         GELU                          ReLU²
    head        tied to the embedding         of its own, with a bias, logits softly capped
    start       all of it small               zero where blocks and head give their results

Parameter names are nanoGPT's, so its checkpoints load.
"""

import math
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from nanofit.learning.loss import chunked_loss, full_loss, soft_capped, token_losses
from nanofit.settings.config import sound
from nanofit.settings.shape import GPTConfig, Recompute
from nanofit.terminal import InputError, first_line
from nanofit.weights import read_weights

LOGIT_CAP = 15.0


class GPT(nn.Module):
    """`model(idx)` gives logits, `model(idx, targets)` the mean loss over targets that are >= 0.

    What the backward pass computes again instead of keeping it is up to `recompute`: nothing, all
    but attention and matrix products, every other block, or every block. It may change any time.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        loss: Literal["chunked", "full"] = "chunked",
        recompute: Recompute = "off",
    ):
        super().__init__()
        self.config = config
        self.loss = chunked_loss if loss == "chunked" else full_loss
        self.recompute = recompute
        C, V = config.n_embd, config.vocab_size
        if config.is_modern:
            after_embedding = {"ln_e": _norm(config)}
        else:
            after_embedding = {"wpe": nn.Embedding(config.block_size, C)}
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(V, C),
                **after_embedding,
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": _norm(config),
            }
        )
        self.lm_head = nn.Linear(C, V, bias=config.is_modern and config.bias)
        self.logit_cap = LOGIT_CAP if config.is_modern else None
        if config.is_modern:
            self.register_buffer("turns", _turns(config), persistent=False)
            self._init_modern()
        else:
            self.transformer.wte.weight = self.lm_head.weight
            self._init_gpt2()

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, *, loss: Literal["chunked", "full"] = "chunked", dropout: float = 0.0
    ) -> "GPT":
        """A model with the weights of our checkpoint, nanoGPT's, or a Hugging Face folder."""
        shape, weights = read_weights(Path(path))
        try:
            model = cls.for_weights({**shape, "dropout": dropout}, weights, loss=loss)
            model.load_state_dict(weights)
        except (ValueError, RuntimeError) as error:
            raise InputError(f"{path} does not hold a GPT-2 ({first_line(error)})") from error
        return model

    @classmethod
    def for_weights(
        cls, shape: dict[str, Any], weights: dict[str, Tensor], **options: Any
    ) -> "GPT":
        """A model of a shape that a file tells; ValueError unless its weights have that shape.

        That is known before a model is made, for which a file could ask for any memory.
        """
        known = {field.name for field in fields(GPTConfig)} & sound(shape).keys()
        if unknown := [name for name in shape if name not in known]:
            raise ValueError(f"it has no such model_args as {unknown[0]}")
        config = GPTConfig(**shape)
        if problems := list(config.problems()):
            raise ValueError(problems[0])
        for name, size in config.weights().items():
            if name not in weights or weights[name].shape != size:
                found = f"is {tuple(weights[name].shape)}" if name in weights else "is missing"
                raise ValueError(f"{name} {found}, and should be {size}")
        return cls(config, **options)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self._hidden(idx)  # (B, T, C)
        if targets is None:
            return self._logits(hidden)  # (B, T, V)
        head = self.lm_head
        hidden, targets = hidden.flatten(0, 1), targets.flatten()  # (B·T, C), (B·T)
        return self.loss(hidden, head.weight, targets, head.bias, self.logit_cap)

    def token_losses(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token (B, T), 0 where its target is below 0; without gradients."""
        hidden, head = self._hidden(idx).flatten(0, 1), self.lm_head  # (B·T, C)
        losses = token_losses(hidden, head.weight, targets.flatten(), head.bias, self.logit_cap)
        return losses.view(targets.shape)

    def next_logits(self, idx: Tensor, cache: "KVCache | None" = None) -> Tensor:
        """Logits of the token that follows; with a cache, `idx` is only what it has not seen."""
        return self._logits(self._hidden(idx, cache)[:, -1])  # (B, V)

    def crop_block_size(self, block_size: int) -> None:
        """Give up positions beyond `block_size`, to train on shorter sequences than before."""
        if block_size >= self.config.block_size:
            return
        self.config = replace(self.config, block_size=block_size)
        if self.config.is_modern:
            self.turns = self.turns[:, :block_size].clone()
        else:
            wpe = self.transformer.wpe
            wpe.weight = nn.Parameter(wpe.weight[:block_size].detach().clone())

    def num_params(self, *, positions: bool = True) -> int:
        """Parameters of the model; nanoGPT counts them without the position embedding."""
        total = sum(p.numel() for p in self.parameters())
        is_counted = positions or self.config.is_modern
        return total if is_counted else total - self.transformer.wpe.weight.numel()

    def _hidden(self, idx: Tensor, cache: "KVCache | None" = None) -> Tensor:
        start = cache.length if cache else 0
        end = start + idx.size(1)
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.is_modern:
            x, turns = self.transformer.ln_e(x), self.turns[:, start:end]
        else:
            positions = torch.arange(start, end, device=idx.device)
            x, turns = x + self.transformer.wpe(positions), None
        x = self.transformer.drop(x)
        is_learning = self.training and torch.is_grad_enabled() and cache is None
        run = _RUN_BLOCK[self.recompute if is_learning else "off"]
        for layer, block in enumerate(self.transformer.h):
            x = run(block, x, turns, cache, layer)
        if cache:
            cache.length = end
        return self.transformer.ln_f(x)

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden)
        return logits if self.logit_cap is None else soft_capped(logits.float(), self.logit_cap)

    def _init_modern(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("c_proj.weight", "lm_head.weight", "bias")):
                nn.init.zeros_(parameter)
            elif name.endswith("wte.weight"):
                nn.init.normal_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=math.sqrt(0.33 / parameter.size(1)))

    def _init_gpt2(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def _norm(config: GPTConfig) -> nn.Module:
    if config.is_modern:
        return nn.RMSNorm(config.n_embd)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = _norm(config)
        self.attn = (RotaryAttention if config.is_modern else CausalSelfAttention)(config)
        self.ln_2 = _norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, turns: Tensor | None, cache: "KVCache | None", layer: int
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), turns, cache, layer)
        return x + self.mlp(self.ln_2(x))


def _run(block: Block, *inputs: Any) -> Tensor:
    return block(*inputs)


def _run_twice(block: Block, *inputs: Any) -> Tensor:
    """Keep the input alone; the backward pass runs the block again."""
    return checkpoint(block, *inputs, **_checkpoint_options(block))


def _run_every_other_twice(block: Block, *inputs: Any) -> Tensor:
    *_, layer = inputs
    return (_run if layer % 2 else _run_twice)(block, *inputs)


def _run_the_cheap_twice(block: Block, *inputs: Any) -> Tensor:
    """Keep the input, matrix products and attention; run norms, GELU and casts again."""
    # Dropout in attention draws random numbers: left out, it would change the masks that follow.
    kept = _PRODUCTS if block.attn.dropout else _PRODUCTS + _ATTENTION
    context_fn = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(block, *inputs, context_fn=context_fn, **_checkpoint_options(block))


def _checkpoint_options(block: Block) -> dict[str, Any]:
    return dict(
        use_reentrant=False,
        preserve_rng_state=block.attn.dropout > 0,  # to read it is to wait for the device
        determinism_check="none",
    )


_RUN_BLOCK = {
    "off": _run,
    "selective": _run_the_cheap_twice,
    "alternate": _run_every_other_twice,
    "block": _run_twice,
}
_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
_ATTENTION = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.scale = None  # 1 / √D
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(
        self, x: Tensor, turns: Tensor | None, cache: "KVCache | None", layer: int
    ) -> Tensor:
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        placed = self._placed(*heads.unbind(2), turns)  # each (B, T, H, D)
        q, k, v = (one.transpose(1, 2) for one in placed)  # each (B, H, T, D)
        mask = None
        if cache:
            mask = cache.mask(q)
            k, v = cache.extend(layer, k, v)  # (B, H, seen + T, D)
        dropout_p = self.dropout if self.training else 0.0
        sight = {"is_causal": T > 1} if mask is None else {"attn_mask": mask}
        y = F.scaled_dot_product_attention(q, k, v, **sight, dropout_p=dropout_p, scale=self.scale)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)

    def _placed(self, q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values that know where they are; here their tokens have told them."""
        return q, k, v


class RotaryAttention(CausalSelfAttention):
    """Queries and keys are normalised and turned by their positions.

    Published is a scale of 0.12 for heads of 128. Scores of normalised queries and keys that have
    nothing to do with each other spread by √D, so that 0.12 · √(128 / D) keeps them as they are.
    """

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.scale = 0.12 * math.sqrt(128 / config.head_width)

    def _placed(self, q: Tensor, k: Tensor, v: Tensor, turns: Tensor | None) -> tuple[Tensor, ...]:
        q, k = _NormedAndTurned.apply(q, turns), _NormedAndTurned.apply(k, turns)
        return q, k, v.contiguous()  # else attention would keep what q and k were as well


def _turns(config: GPTConfig) -> Tensor:
    """Cosine and sine of each position's angles; half of the pairs do not turn."""
    turning = config.head_width // 4
    frequencies = (1 / 1024) ** torch.linspace(0, 1, turning, dtype=torch.float64)
    angles = torch.outer(torch.arange(config.block_size, dtype=torch.float64), frequencies)
    angles = F.pad(angles, (0, config.head_width // 2 - turning))
    return torch.stack([angles.cos(), angles.sin()]).float().unsqueeze(2)  # (2, T, 1, D / 2)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of a first and a second half, each turned by an angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class _NormedAndTurned(torch.autograd.Function):
    """Of what it makes, which attention keeps anyway, it tells its gradient: no input is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, turns: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = (wide.square().mean(-1, keepdim=True) + torch.finfo(wide.dtype).eps).rsqrt()
        y = _turned(wide * scale, *turns).to(x.dtype)
        ctx.save_for_backward(y, scale, turns)
        return y

    @staticmethod
    def backward(ctx, d_y: Tensor) -> tuple[Tensor, None]:
        y, scale, (cos, sin) = ctx.saved_tensors
        wide, d_wide = y.to(scale.dtype), d_y.to(scale.dtype)
        along = (wide * d_wide).mean(-1, keepdim=True)  # which no turn changes
        d_x = _turned(d_wide - wide * along, cos, -sin) * scale
        return d_x.to(d_y.dtype), None


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.act = _ACTIVATIONS[config.arch]
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(self.act(self.c_fc(x)))
        return F.dropout(x, self.dropout, self.training)


class _SquaredRelu(torch.autograd.Function):
    """Its slope is told by its result, which the product after it keeps anyway: 2·relu = 2·√result.

    torch's own keeps two or, where autocast squares in float32, as CUDA's does, four times as much.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = F.relu(x)
        y.mul_(y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, d_y: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y.sqrt().mul_(2).mul_(d_y)


_ACTIVATIONS = {
    "gpt2": F.gelu,
    "gpt2-tanh": partial(F.gelu, approximate="tanh"),
    "modern": _SquaredRelu.apply,
}


class KVCache:
    """Keys and values of the tokens seen so far, so that each new one is computed once."""

    def __init__(self, model: GPT):
        self.length = 0
        self._block_size = model.config.block_size
        self._layers: dict[int, Tensor] = {}  # each (2, B, H, block_size, D)

    def mask(self, q: Tensor) -> Tensor | None:
        """Which tokens each new one may look at; None for one alone, or with none before them."""
        T = q.size(2)
        if self.length == 0 or T == 1:
            return None
        return q.new_ones(T, self.length + T, dtype=torch.bool).tril(self.length)  # (T, seen + T)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all of them."""
        if layer not in self._layers:
            B, H, _, D = k.shape
            self._layers[layer] = k.new_empty(2, B, H, self._block_size, D)
        end = self.length + k.size(2)
        stored = self._layers[layer]
        stored[0, :, :, self.length : end] = k
        stored[1, :, :, self.length : end] = v
        return stored[0, :, :, :end], stored[1, :, :, :end]
