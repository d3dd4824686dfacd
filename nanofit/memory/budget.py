"""What a run may use of a card: its memory, and who else has a claim on it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanofit.machine.cards import CARDS, Card, find_card
from nanofit.machine.overhead import ASSUMED, CUDA_CONTEXT_BYTES, Overhead, overhead_of
from nanofit.settings.config import RunConfig
from nanofit.terminal import parse_size

if TYPE_CHECKING:
    from nanofit.machine.device import Device

MIB = 2**20
LEAST_RESERVE_BYTES, RESERVE_SHARE = 128 * MIB, 0.05


def usable_bytes(free_bytes: int, run: RunConfig) -> int:
    """What a run may use of what is free: some is left for others, and for the unforeseen."""
    if run.memory_reserve is not None:
        reserve = parse_size(run.memory_reserve)
    else:
        reserve = int(RESERVE_SHARE * free_bytes) + LEAST_RESERVE_BYTES
    return free_bytes - reserve


def smallest_card(needed_bytes: int, run: RunConfig) -> Card | None:
    """The card with the least memory on which so much is usable by a run."""
    large_enough = [
        card
        for card in CARDS
        if usable_bytes(card.memory_mib * MIB - CUDA_CONTEXT_BYTES, run) >= needed_bytes
    ]
    return min(large_enough, key=lambda card: card.memory_mib, default=None)


@dataclass(frozen=True)
class Budget:
    """The memory of a card and who has a claim on it."""

    card: str
    total_bytes: int
    others_bytes: int | None  # what other programs use; None if that is not known
    run: RunConfig
    overhead: Overhead = ASSUMED

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.overhead.context_bytes - (self.others_bytes or 0)

    @property
    def reserve_bytes(self) -> int:
        return self.free_bytes - usable_bytes(self.free_bytes, self.run)

    @property
    def limit_bytes(self) -> int:
        """What the run may use, as autofit decides it."""
        limit = usable_bytes(self.free_bytes, self.run)
        asked = self.run.memory_limit
        return limit if asked is None else min(limit, parse_size(asked))


def budget_of(gpu: str | None, vram_bytes: int | None, run: RunConfig) -> Budget | None:
    """The budget of a card by name, by size, or of this machine; None if there is no card."""
    if gpu is not None:
        card = find_card(gpu)
        total_bytes = vram_bytes or card.memory_mib * 2**20
        return Budget(card.name, total_bytes, None, run, overhead_of(card.name))
    if vram_bytes is not None:
        return Budget("a card of this size", vram_bytes, None, run)
    device = None if run.device in ("cpu", "mps") else _card_here(run)
    if device is None:
        return None
    overhead = overhead_of(device.name)
    used_bytes = device.memory_bytes - device.memory().free_bytes()  # its context included
    others_bytes = max(used_bytes - overhead.context_bytes, 0)
    return Budget(device.name, device.memory_bytes, others_bytes, run, overhead)


def dtype_of(gpu: str | None, run: RunConfig) -> str:
    """The precision a run would have: where a card has no bfloat16, float16 instead."""
    if gpu is None and (device := _card_here(run)):
        return device.precision
    best = "bfloat16" if gpu is None or find_card(gpu).has_bfloat16 else "float16"
    return best if run.dtype in ("auto", "bfloat16") else run.dtype


def has_flash_on(gpu: str | None, run: RunConfig) -> bool:
    """Whether attention has flash kernels: a card has them if it has bfloat16."""
    if gpu is None and (device := _card_here(run)):
        return device.has_flash
    return gpu is None or find_card(gpu).has_bfloat16


def _card_here(run: RunConfig) -> "Device | None":
    """The card of this machine, if it has one; to ask takes torch, which takes seconds to load."""
    import torch

    from nanofit.machine.device import describe_device

    if not torch.cuda.is_available():
        return None
    name = run.device if run.device.startswith("cuda") else "cuda"
    return describe_device(name, run.dtype)
