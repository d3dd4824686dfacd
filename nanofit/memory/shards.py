"""How sharded weights are cut: what is gathered and reduced as one, and each process's part of it.

As torch's fully_shard does it when it is given the attention and the MLP of each block, and then
the model with what is left: embeddings, norms and a head. Free of torch.
"""

from dataclasses import dataclass
from math import prod

from nanofit.settings.shape import GPTConfig


@dataclass(frozen=True)
class Group:
    """Weights that are gathered together, used, and let go again."""

    weights: dict[str, tuple[int, ...]]
    world: int
    is_block: bool

    @property
    def part_numbers(self) -> int:
        """Of one process, filled up: all parts are equally long on their way."""
        return sum(prod(part_of(size, self.world)) for size in self.weights.values())

    @property
    def numbers(self) -> int:
        """Of all processes."""
        return self.world * self.part_numbers


def groups_of(shape: GPTConfig, world: int) -> tuple[Group, list[Group]]:
    """What is outside of the blocks, with their norms, and the rest of each block."""
    rest: dict[str, tuple[int, ...]] = {}
    blocks: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shape.n_layer)]
    for name, size in shape.weights().items():
        layer = block_of(name)
        (rest if layer is None else blocks[layer])[name] = size
    groups = [Group(weights, world, is_block=True) for weights in blocks]
    return Group(rest, world, is_block=False), groups


def block_of(name: str) -> int | None:
    """The block that a weight is gathered with; None for what is gathered with the model."""
    if ".attn." not in name and ".mlp." not in name:
        return None
    return int(name.removeprefix("transformer.h.").split(".")[0])


def part_of(size: tuple[int, ...], world: int) -> tuple[int, ...]:
    """A weight's rows are shared out; the first process has no fewer than any other."""
    rows, *columns = size
    return (-(-rows // world), *columns)
