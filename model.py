"""The GPT: token ids -> loss (training) or logits (inference).

GPT-2 as nanoGPT trains it: pre-norm blocks, learned positions, tied embeddings, exact GELU.
Parameter names are nanoGPT's, so its checkpoints load.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from nanofit.loss import chunked_loss, full_loss
from nanofit.terminal import InputError, first_line
from nanofit.weights import read_weights


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape; fixed for the life of a run."""

    n_layer: Annotated[int, "transformer blocks"] = 12
    n_head: Annotated[int, "attention heads per block"] = 12
    n_embd: Annotated[int, "width of the model"] = 768
    block_size: Annotated[int, "longest sequence, in tokens"] = 1024
    vocab_size: Annotated[int, "rows of the embedding; GPT-2's 50257 rounded up is faster"] = 50304
    dropout: Annotated[float, "share of activations dropped in training"] = 0.0
    bias: Annotated[bool, "biases in linear and norm layers, as GPT-2 has"] = False
    arch: Annotated[
        Literal["gpt2", "gpt2-tanh"], "gpt2 as nanoGPT trains it, or with OpenAI's tanh GELU"
    ] = "gpt2"

    def problems(self) -> Iterator[str]:
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if getattr(self, name) < 1:
                yield f"{name} = {getattr(self, name)} must be at least 1"
        if self.n_head > 0 and self.n_embd % self.n_head:
            nearest = max(round(self.n_embd / self.n_head), 1) * self.n_head
            yield (
                f"n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}; "
                f"n_embd = {nearest} would be"
            )
        if not 0 <= self.dropout < 1:
            yield f"dropout = {self.dropout} must be at least 0 and below 1"


Recompute = Literal["off", "selective", "alternate", "block"]


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
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self._init_weights()

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, *, loss: Literal["chunked", "full"] = "chunked", dropout: float = 0.0
    ) -> "GPT":
        """A model with the weights of our checkpoint, nanoGPT's, or a Hugging Face GPT-2 folder."""
        shape, weights = read_weights(Path(path))
        try:
            model = cls(GPTConfig(**{**shape, "dropout": dropout}), loss=loss)
            model.load_state_dict(weights)
        except (TypeError, RuntimeError) as error:
            raise InputError(f"{path} does not hold a GPT-2 ({first_line(error)})") from error
        return model

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        hidden = self._hidden(idx)  # (B, T, C)
        if targets is None:
            return self.lm_head(hidden)  # (B, T, V)
        return self.loss(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten())

    def next_logits(self, idx: Tensor, cache: "KVCache | None" = None) -> Tensor:
        """Logits of the token that follows; with a cache, `idx` is only what it has not seen."""
        return self.lm_head(self._hidden(idx, cache)[:, -1])  # (B, V)

    def crop_block_size(self, block_size: int) -> None:
        """Give up positions beyond `block_size`, to train on shorter sequences than before."""
        if block_size < self.config.block_size:
            self.config = replace(self.config, block_size=block_size)
            wpe = self.transformer.wpe
            wpe.weight = nn.Parameter(wpe.weight[:block_size].detach().clone())

    def num_params(self, *, positions: bool = True) -> int:
        """Parameters of the model; nanoGPT counts them without the position embedding."""
        total = sum(p.numel() for p in self.parameters())
        return total if positions else total - self.transformer.wpe.weight.numel()

    def flops_per_token(self) -> int:
        """Forward and backward, as in PaLM's appendix B: 6 per weight, 12·L·C·T for attention."""
        shape = self.config
        attention = 12 * shape.n_layer * shape.n_embd * shape.block_size
        return 6 * self.num_params(positions=False) + attention

    def _hidden(self, idx: Tensor, cache: "KVCache | None" = None) -> Tensor:
        seen = cache.length if cache else 0
        positions = torch.arange(seen, seen + idx.size(1), device=idx.device)  # (T)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)  # (B, T, C)
        x = self.transformer.drop(x)
        is_learning = self.training and torch.is_grad_enabled() and cache is None
        run = _RUN_BLOCK[self.recompute if is_learning else "off"]
        for layer, block in enumerate(self.transformer.h):
            x = run(block, x, cache, layer)
        if cache:
            cache.length += idx.size(1)
        return self.transformer.ln_f(x)

    def _init_weights(self) -> None:
        residual_std = 0.02 / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: "KVCache | None", layer: int) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, layer)
        return x + self.mlp(self.ln_2(x))


def _run(block: Block, x: Tensor, cache: "KVCache | None", layer: int) -> Tensor:
    return block(x, cache, layer)


def _run_twice(block: Block, x: Tensor, cache: "KVCache | None", layer: int) -> Tensor:
    """Keep the input alone; the backward pass runs the block again."""
    return checkpoint(block, x, cache, layer, **_checkpoint_options(block))


def _run_every_other_twice(block: Block, x: Tensor, cache: "KVCache | None", layer: int) -> Tensor:
    run = _run if layer % 2 else _run_twice
    return run(block, x, cache, layer)


def _run_the_cheap_twice(block: Block, x: Tensor, cache: "KVCache | None", layer: int) -> Tensor:
    """Keep the input, matrix products and attention; run norms, GELU and casts again."""
    # Dropout in attention draws random numbers: left out, it would change the masks that follow.
    kept = _PRODUCTS if block.attn.dropout else _PRODUCTS + _ATTENTION
    context_fn = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(block, x, cache, layer, context_fn=context_fn, **_checkpoint_options(block))


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
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, cache: "KVCache | None", layer: int) -> Tensor:
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if cache:
            k, v = cache.extend(layer, k, v)  # (B, H, seen + T, D)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=T > 1, dropout_p=self.dropout if self.training else 0.0
        )
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU("tanh" if config.arch == "gpt2-tanh" else "none")
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(self.gelu(self.c_fc(x)))
        return F.dropout(x, self.dropout, self.training)


class KVCache:
    """Keys and values of the tokens seen so far, so that each new one is computed once."""

    def __init__(self, model: GPT):
        self.length = 0
        self._block_size = model.config.block_size
        self._layers: dict[int, Tensor] = {}  # each (2, B, H, block_size, D)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all of them."""
        assert k.size(2) == 1 or self.length == 0, "several tokens at once only into an empty cache"
        if layer not in self._layers:
            B, H, _, D = k.shape
            self._layers[layer] = k.new_empty(2, B, H, self._block_size, D)
        end = self.length + k.size(2)
        stored = self._layers[layer]
        stored[0, :, :, self.length : end] = k
        stored[1, :, :, self.length : end] = v
        return stored[0, :, :, :end], stored[1, :, :, :end]
