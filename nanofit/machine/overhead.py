"""What a process takes of a card besides its tensors: assumed, until a run on such a card tells."""

from typing import NamedTuple

from nanofit.cache import keep, recall
from nanofit.machine.cards import CARDS, known_card
from nanofit.machine.measured import reports_of, usual

# Assumptions about hardware: what its owner published of an RTX 4070, and what simulations of
# published runs lacked.
CUDA_CONTEXT_BYTES = 420 * 2**20
LIBRARY_BYTES = 128 * 2**20

# Published of A100s with NVLink (NVIDIA/nccl issue 964): of a group of two, and of more. Buffers
# are per channel, of which cards on PCIe have fewer: they should take less.
_PAIR_BYTES, _GROUP_BYTES = 544 * 2**20, 688 * 2**20

_MOST_BYTES = 2**31  # more is another program that came while it was measured


class Overhead(NamedTuple):
    """Of one process: its context, and what libraries such as cuBLAS take."""

    context_bytes: int = CUDA_CONTEXT_BYTES
    library_bytes: int = LIBRARY_BYTES
    source: str = "assumed"


ASSUMED = Overhead()


def collective_bytes(world: int) -> int:
    """What NCCL takes of a card that shares a run with others; at most, as far as is known."""
    return {1: 0, 2: _PAIR_BYTES}.get(world, _GROUP_BYTES)


def overhead_of(card: str | None) -> Overhead:
    """What a process takes on a card, by the name its driver reports."""
    if card is None:
        return ASSUMED
    if kept := recall("overhead", _key(card)):
        return Overhead(*kept, source="measured here")
    known = known_card(card)  # those that a driver calls the same are of one kind of chip
    alike = [one.name for one in CARDS if known and one.driver_name == known.driver_name]
    reports = [report for name in alike for report in reports_of(name)]
    context_bytes = usual([report.context_bytes for report in reports])
    library_bytes = usual([report.library_bytes for report in reports])
    if context_bytes is None or library_bytes is None:
        return ASSUMED
    return Overhead(round(context_bytes), round(library_bytes), "measured on such a card")


def remember_overhead(card: str, context_bytes: int, library_bytes: int) -> None:
    """Keep what was measured on a card for the next explanation, if it can be true."""
    if max(context_bytes, library_bytes) < _MOST_BYTES:
        keep("overhead", _key(card), (context_bytes, library_bytes))


def _key(card: str) -> str:
    return card.removeprefix("NVIDIA ")
