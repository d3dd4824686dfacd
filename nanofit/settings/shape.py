"""The model's shape: what the GPT of a run looks like."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

# Far beyond any model: more is a slip or an attack, and to reckon with it would take for ever.
_MOST = dict(n_layer=10_000, n_head=10_000, n_embd=10**6, block_size=2**20, vocab_size=2**24)


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape; fixed for the life of a run."""

    n_layer: Annotated[int, "transformer blocks"] = 12
    n_head: Annotated[int, "attention heads per block"] = 12
    n_embd: Annotated[int, "width of the model"] = 768
    block_size: Annotated[int, "longest sequence, in tokens"] = 1024
    vocab_size: Annotated[int, "rows of the embedding; GPT-2's 50257 rounded up is faster"] = 50304
    dropout: Annotated[float, "share of activations dropped in training"] = 0.0
    bias: Annotated[bool, "biases in linear layers, and in gpt2's norms"] = False
    arch: Annotated[
        Literal["gpt2", "gpt2-tanh", "modern"],
        "gpt2 as nanoGPT trains it, or with OpenAI's tanh GELU; modern learns from fewer tokens",
    ] = "gpt2"

    @property
    def is_modern(self) -> bool:
        return self.arch == "modern"

    @property
    def head_width(self) -> int:
        return self.n_embd // self.n_head

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.weights().values()))

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and of what is added to them or stands for them: positions, an untied head."""
        other = self.vocab_size if self.is_modern else self.block_size
        return (self.vocab_size + other) * self.n_embd

    @property
    def law_parameters(self) -> int:
        """As published laws count them: embedding and head are one, be they tied or not."""
        return self.parameters - self.is_modern * self.vocab_size * self.n_embd

    @property
    def flops_per_token(self) -> int:
        """Forward and backward, as in PaLM's appendix B: 6 per weight, 12·L·C·T for attention.

        Positions are looked up, not multiplied, and so are tokens where the head is not tied.
        """
        looked_up = self.vocab_size if self.is_modern else self.block_size
        weights = self.parameters - looked_up * self.n_embd
        return 6 * weights + 12 * self.n_layer * self.n_embd * self.block_size

    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight by its name in the model, a tied embedding once."""
        C, V = self.n_embd, self.vocab_size
        norm_bias = self.bias and not self.is_modern
        shapes = {"transformer.wte.weight": (V, C)}
        if self.is_modern:
            shapes["transformer.ln_e.weight"] = (C,)
        else:
            shapes["transformer.wpe.weight"] = (self.block_size, C)
        block = _with_bias("ln_1", (C,), norm_bias)
        block |= _with_bias("attn.c_attn", (3 * C, C), self.bias)
        block |= _with_bias("attn.c_proj", (C, C), self.bias)
        block |= _with_bias("ln_2", (C,), norm_bias)
        block |= _with_bias("mlp.c_fc", (4 * C, C), self.bias)
        block |= _with_bias("mlp.c_proj", (C, 4 * C), self.bias)
        for layer in range(self.n_layer):
            shapes |= {f"transformer.h.{layer}.{name}": size for name, size in block.items()}
        shapes |= _with_bias("transformer.ln_f", (C,), norm_bias)
        return shapes | (_with_bias("lm_head", (V, C), self.bias) if self.is_modern else {})

    def problems(self) -> Iterator[str]:
        for name, most in _MOST.items():
            if getattr(self, name) < 1:
                yield f"{name} = {getattr(self, name)} must be at least 1"
            elif getattr(self, name) > most:
                yield f"{name} = {getattr(self, name)} must be at most {most}"
        if self.n_head > 0 and self.n_embd % self.n_head:
            nearest = max(round(self.n_embd / self.n_head), 1) * self.n_head
            yield (
                f"n_embd = {self.n_embd} is not divisible by n_head = {self.n_head}; "
                f"n_embd = {nearest} would be"
            )
        elif self.n_head > 0 and self.is_modern and self.head_width % 4:
            yield (
                f"arch = 'modern' turns half of each head in pairs, but heads of {self.n_embd} / "
                f"{self.n_head} = {self.head_width} are no multiple of 4; "
                f"n_embd = {-(-self.head_width // 4) * 4 * self.n_head} would do"
            )
        if not 0 <= self.dropout < 1:
            yield f"dropout = {self.dropout} must be at least 0 and below 1"


def _with_bias(name: str, shape: tuple[int, ...], has_bias: bool) -> dict[str, tuple[int, ...]]:
    bias = {f"{name}.bias": shape[:1]} if has_bias else {}
    return {f"{name}.weight": shape, **bias}


Recompute = Literal["off", "selective", "alternate", "block"]
