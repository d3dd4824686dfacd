"""What several cards change: what each of them holds, replicated or sharded, and what fits."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from nanofit.machine.overhead import collective_bytes
from nanofit.memory.budget import Budget
from nanofit.memory.ledger import held_bytes
from nanofit.memory.need import need_of
from nanofit.memory.savers import without_savers
from nanofit.memory.setup import Setup

MOST_CARDS = 64
_SAVERS = ({}, {"recompute": "block"})
_OF_WHOLE_MOMENTS = {"recompute": "block", "optimizer_bits": 8}


class Way(NamedTuple):
    """To spread a run over cards, and what comes of it on each."""

    setup: Setup
    held_bytes: int  # weights, gradients and moments
    one_sequence_bytes: int  # the peak of the smallest micro-batch
    largest: int | None  # micro-batch that fits; None without a card

    @property
    def name(self) -> str:
        world = self.setup.world
        return "1 card" if world == 1 else f"{world}, {'sharded' if self.setup.shard else 'whole'}"

    @property
    def savers(self) -> str:
        told = [f"recompute={self.setup.recompute}"] * (self.setup.recompute != "off")
        told += [f"optimizer_bits={self.setup.optimizer_bits}"] * (self.setup.optimizer_bits != 32)
        return ", ".join(told) or "none"

    def as_json(self) -> dict[str, Any]:
        names = ("world", "shard", "recompute", "optimizer_bits")
        settings = {name: getattr(self.setup, name) for name in names}
        return settings | {
            "held_bytes": self.held_bytes,
            "one_sequence_bytes": self.one_sequence_bytes,
            "largest_micro_batch_size": self.largest,
        }


def ways_of(setup: Setup, world: int, budget: Budget | None) -> list[Way]:
    """One card, as many with all of it on each, as many with a part on each; the eager stage."""
    spreads = [(1, False), (world, False)]
    if setup.optimizer == "adamw":
        spreads.append((world, True))
    return [
        _way(replace(_plain(setup), world=cards, shard=shard, **savers), budget)
        for cards, shard in spreads
        for savers in (*_SAVERS, *([] if shard else [_OF_WHOLE_MOMENTS]))
    ]


def fewest_cards(setup: Setup, budget: Budget) -> Iterator[Way]:
    """For each choice of savers the fewest cards that fit a sequence each, in parts."""
    if setup.optimizer != "adamw":
        return
    for savers in _SAVERS:
        sharded = replace(_plain(setup), world=MOST_CARDS, shard=True, **savers)
        if not _fits(sharded, budget):
            continue
        few = range(2, MOST_CARDS)  # the more cards, the smaller their parts
        spreads = [replace(sharded, world=cards) for cards in few]
        cards = few[0] + bisect_left(spreads, True, key=partial(_fits, budget=budget))
        yield _way(replace(sharded, world=cards), budget)


def room_bytes(budget: Budget, world: int) -> int:
    """What the tensors of a step may take of a card that shares a run with others."""
    return budget.limit_bytes - budget.overhead.library_bytes - collective_bytes(world)


def _fits(setup: Setup, budget: Budget) -> bool:
    """Whether a sequence does."""
    return need_of(setup).at(1) <= room_bytes(budget, setup.world)


def _plain(setup: Setup) -> Setup:
    return replace(without_savers(setup), compiled=False)


def _way(setup: Setup, budget: Budget | None) -> Way:
    need, largest = need_of(setup), None
    if budget:
        largest = need.largest(room_bytes(budget, setup.world)) if _fits(setup, budget) else 0
    return Way(setup, held_bytes(setup), need.at(1), largest)
