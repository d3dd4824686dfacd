"""What decides the memory of a step."""

from dataclasses import dataclass
from typing import Literal

from nanofit.settings.shape import GPTConfig, Recompute

Attention = Literal["flash", "efficient", "math"]  # by whose kernels


@dataclass(frozen=True)
class Setup:
    """What decides the memory of a step, but for the micro-batch.

    `recompute` acts in the eager stage, `activation_memory_budget` in the compiled one.
    """

    shape: GPTConfig
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    compiled: bool = False
    loss: Literal["chunked", "full"] = "chunked"
    returns_logits: bool = False  # as nanoGPT's forward does; for comparison
    recompute: Recompute = "off"
    activation_memory_budget: float = 1.0
    optimizer: Literal["adamw", "muon"] = "adamw"
    optimizer_bits: Literal[8, 32] = 32  # of AdamW's moments
    has_flash: bool = True  # attention; cards older than Ampere have none
    deterministic: bool = False  # kernels, which may need a little more
    world: int = 1  # processes, each with a card
    shard: bool = False  # weights, gradients and moments cut by them, as by torch's fully_shard

    @property
    def attention(self) -> Attention:
        """Whose kernels torch takes: with "math" the scores of all pairs of tokens are in memory.

        The efficient ones are for heads whose rows are aligned; flash attention pads them.
        """
        if self.dtype != "float32" and self.has_flash:
            return "flash"
        if self.dtype == "bfloat16":
            return "math"
        aligned = 8 if self.dtype == "float16" else 4 if self.has_flash else 1
        return "math" if self.shape.n_embd // self.shape.n_head % aligned else "efficient"
