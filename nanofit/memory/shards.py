"""How sharded weights are cut: what is gathered and reduced as one, and each process's part of it.

As torch's fully_shard does it when it is given each block, and then the model with what is left.
Free of torch.
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
    """What is outside of the blocks, and each block."""
    weights = shape.weights()
    blocks = []
    for layer in range(shape.n_layer):
        prefix = f"transformer.h.{layer}."
        own = {name: size for name, size in weights.items() if name.startswith(prefix)}
        blocks.append(Group(own, world, is_block=True))
    rest = {name: size for name, size in weights.items() if ".h." not in name}
    return Group(rest, world, is_block=False), blocks


def part_of(size: tuple[int, ...], world: int) -> tuple[int, ...]:
    """A weight's rows are shared out; the first process has no fewer than any other."""
    rows, *columns = size
    return (-(-rows // world), *columns)
