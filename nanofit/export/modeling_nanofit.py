"""The GPT that nanofit trains with `arch = "modern"`, for Hugging Face transformers.

RMSNorm, rotary positions on half of each normalised query and key, squared ReLU, an untied head
whose logits are softly capped. export.py copies this file beside the weights; it needs no nanofit.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

LOGIT_CAP = 15.0
EPS = torch.finfo(torch.float32).eps  # in half precision too: norms are computed in float32


class NanofitConfig(PretrainedConfig):
    model_type = "nanofit"
    keys_to_ignore_at_inference = ("past_key_values",)
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
    }

    def __init__(
        self,
        n_layer: int = 12,
        n_head: int = 6,
        n_embd: int = 768,
        n_positions: int = 1024,
        vocab_size: int = 50257,
        bias: bool = True,
        dropout: float = 0.0,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **others,
    ):
        self.n_layer, self.n_head, self.n_embd = n_layer, n_head, n_embd
        self.n_positions, self.vocab_size = n_positions, vocab_size
        self.bias, self.dropout, self.use_cache = bias, dropout, use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)


class NanofitForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanofitConfig
    _no_split_modules = ("Block",)
    _supports_sdpa = True

    def __init__(self, config: NanofitConfig):
        super().__init__(config)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "ln_e": nn.RMSNorm(config.n_embd, eps=EPS),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
                "ln_f": nn.RMSNorm(config.n_embd, eps=EPS),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)
        self.register_buffer("turns", turns(config), persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:  # transformers loads into a model without content
            self.turns.copy_(turns(self.config))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.transformer.wte

    def set_input_embeddings(self, embedding: nn.Embedding) -> None:
        self.transformer.wte = embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others,
    ) -> CausalLMOutputWithPast:
        cache, T = past_key_values, input_ids.size(1)
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        seen = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:  # on the left padding counts as well: turns are relative
            position_ids = torch.arange(T, device=input_ids.device).unsqueeze(0) + seen
        x = self.transformer.drop(self.transformer.ln_e(self.transformer.wte(input_ids)))
        mask = visible(attention_mask, x, seen)
        placed = self.turns[:, position_ids].unsqueeze(2)  # (2, B, 1, T, D / 2)
        for block in self.transformer.h:
            x = block(x, placed, mask, cache)
        x = self.transformer.ln_f(x)
        if isinstance(logits_to_keep, int):
            logits_to_keep = slice(-logits_to_keep, None)
        logits = self.lm_head(x[:, logits_to_keep]).float()
        logits = LOGIT_CAP * logits * (logits.square() + LOGIT_CAP**2).rsqrt()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)


class Block(nn.Module):
    def __init__(self, config: NanofitConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.n_embd, eps=EPS)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.RMSNorm(config.n_embd, eps=EPS)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, placed: Tensor, mask: Tensor | None, cache: DynamicCache | None
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), placed, mask, cache)
        return x + self.mlp(self.ln_2(x))


class Attention(nn.Module):
    def __init__(self, config: NanofitConfig, layer: int):
        super().__init__()
        self.layer, self.n_head, self.dropout = layer, config.n_head, config.dropout
        self.scale = 0.12 * math.sqrt(128 / (config.n_embd // config.n_head))
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(
        self, x: Tensor, placed: Tensor, mask: Tensor | None, cache: DynamicCache | None
    ) -> Tensor:
        B, T, C = x.shape
        heads = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        q, k = normed_and_turned(q, placed), normed_and_turned(k, placed)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)  # (B, H, seen + T, D)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None and T > 1,
            scale=self.scale,
        )
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: NanofitConfig):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(F.relu(self.c_fc(x)).square())
        return F.dropout(x, self.dropout, self.training)


def visible(attention_mask: Tensor | None, x: Tensor, seen: int) -> Tensor | None:
    """Which tokens each token sees, (B, 1, T, seen + T): those before it that are no padding.

    Itself in any case, so that no row is empty; None where attention's own causality says it all.
    """
    T = x.size(1)
    if attention_mask is None and (T == 1 or seen == 0):
        return None
    if attention_mask is not None and attention_mask.dim() == 4:  # made for a cache of fixed size
        return attention_mask
    every = torch.ones(T, seen + T, dtype=torch.bool, device=x.device)
    before = every.tril(seen)
    if attention_mask is None:
        return before
    itself = before.triu(seen)
    return before & attention_mask[:, None, None, :].bool() | itself


def turns(config: NanofitConfig) -> Tensor:
    """Cosine and sine of each position's angles; half of the pairs do not turn."""
    width = config.n_embd // config.n_head
    turning = width // 4
    exact = {"dtype": torch.float64, "device": "cpu"}  # whatever transformers loads onto
    frequencies = (1 / 1024) ** torch.linspace(0, 1, turning, **exact)
    angles = torch.outer(torch.arange(config.n_positions, **exact), frequencies)
    angles = F.pad(angles, (0, width // 2 - turning))
    return torch.stack([angles.cos(), angles.sin()]).float()  # (2, positions, D / 2)


def normed_and_turned(x: Tensor, placed: Tensor) -> Tensor:
    """Queries or keys (B, H, T, D) as attention compares them."""
    cos, sin = placed
    first, second = F.rms_norm(x.float(), x.shape[-1:], eps=EPS).chunk(2, dim=-1)
    turned = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
    return turned.to(x.dtype)
