"""What several cards tell each other in a step, and how long that takes.

Bytes are those that a card sends, and receives at the same time, in rings, which are as good as it
gets: of all that is summed or gathered, (n - 1) / n for each time it goes round n cards. A link
carries them at the share of its nominal bandwidth that others have measured. The time of each
message that does not depend on its size is not counted.
"""

from typing import NamedTuple

from nanofit.machine.cards import Card
from nanofit.memory.shards import groups_of
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError

FULL, HALF = 4, 2  # bytes of a number
BACKWARD_SHARE = 2 / 3  # of a pass
# Reached by NCCL. PCIe: 20 of 31.5 GB/s (NVIDIA/nccl-tests issue 178); others report from a tenth
# to two thirds, as boards and drivers differ. NVLink: all but a fifth, which its protocol takes
# (issue 212). Ethernet: what TCP leaves.
_PCIE, _NVLINK, _ETHERNET = 0.63, 0.8, 0.9


class Link(NamedTuple):
    """What carries bytes between cards: nominal, in each direction, for each card."""

    name: str
    gb_per_s: float
    reached: float

    @property
    def bytes_per_s(self) -> float:
        return self.gb_per_s * 1e9 * self.reached


LINKS = {
    link.name: link
    for link in (
        Link("pcie3-x16", 15.75, _PCIE),
        Link("pcie4-x8", 15.75, _PCIE),
        Link("pcie4-x16", 31.5, _PCIE),
        Link("pcie5-x8", 31.5, _PCIE),
        Link("pcie5-x16", 63.0, _PCIE),
        Link("nvlink2", 150, _NVLINK),  # of a V100
        Link("nvlink3", 300, _NVLINK),  # of an A100
        Link("nvlink4", 450, _NVLINK),  # of an H100
        Link("10gbe", 1.25, _ETHERNET),
        Link("100gbe", 12.5, _ETHERNET),
    )
}
_NVLINK_OF = {"Volta": "nvlink2", "Ampere": "nvlink3", "Hopper": "nvlink4"}
_PCIE_OF = {"Volta": 3, "Turing": 3, "Ampere": 4, "Ada": 4, "Hopper": 5, "Blackwell": 5}


def find_link(name: str) -> Link:
    if name not in LINKS:
        raise InputError(f"link {name!r} is not known; there are {', '.join(LINKS)}")
    return LINKS[name]


def link_of(card: Card) -> Link:
    """What such cards usually have: a desktop's board cuts its 16 lanes in two for two of them."""
    if "SXM" in card.name or "HBM3" in card.name or card.name == "H200":
        return LINKS[_NVLINK_OF[card.architecture]]
    generation = _PCIE_OF[card.architecture]
    is_halved = card.name.startswith("GeForce") and generation > 3
    return LINKS[f"pcie{generation}-x{8 if is_halved else 16}"]


class Traffic(NamedTuple):
    """Bytes that a card sends in a step, and what of it can hide behind what it computes."""

    once: float  # at the end of a step's last pass
    each_pass: float  # while it computes
    around_pass: float  # before it can begin, and when it is done
    passes: int

    @property
    def step_bytes(self) -> float:
        return self.once + self.passes * (self.each_pass + self.around_pass)

    def exposed_s(self, link: Link, pass_s: float, *, overlaps: bool) -> float:
        """What a step takes longer for it."""
        once, each, around = (bytes_ / link.bytes_per_s for bytes_ in self[:3])
        hidden_once = BACKWARD_SHARE * pass_s if overlaps else 0
        hidden_each = pass_s if overlaps else 0
        waits = max(each - hidden_each, 0) + around
        return max(once - hidden_once, 0) + self.passes * waits


def replicated_traffic(shape: GPTConfig, world: int, passes: int) -> Traffic:
    """All gradients are summed once a step: their parts go round, then the sums of these."""
    return Traffic(2 * (world - 1) / world * FULL * shape.parameters, 0, 0, passes)


def sharded_traffic(shape: GPTConfig, world: int, passes: int, *, is_half: bool = True) -> Traffic:
    """Blocks are gathered forward and backward, the rest once; all gradients are reduced.

    What is outside of blocks comes before the first of them and goes after the last.
    """
    rest, blocks = groups_of(shape, world)
    gathered = HALF if is_half else FULL
    block_bytes = sum(block.part_numbers for block in blocks) * (2 * gathered + FULL)
    rest_bytes = rest.part_numbers * (FULL + FULL)
    return Traffic(0, (world - 1) * block_bytes, (world - 1) * rest_bytes, passes)
