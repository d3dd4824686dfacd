"""What can be traded for memory: the savers, and what they cost in time."""

from dataclasses import replace
from typing import NamedTuple

from nanofit.memory.setup import Setup

RECOMPUTES = ("selective", "alternate", "block")


class Saver(NamedTuple):
    name: str  # as it is set
    setup: Setup  # with this saver and no other


def budgets_for(setup: Setup) -> tuple[float, ...]:
    """Parts of the activations worth keeping; of less, what is computed again takes as much.

    The modern model keeps so little that there is no second one.
    """
    return (0.7,) if setup.shape.is_modern else (0.7, 0.5)


def savers_of(setup: Setup) -> list[Saver]:
    """Each saver there is for the stage of a setup, the cheapest first."""
    plain = without_savers(setup)
    found = [("optimizer_bits", 8)]
    if setup.compiled:
        found += [("activation_memory_budget", budget) for budget in budgets_for(setup)]
    else:
        found += [("recompute", mode) for mode in RECOMPUTES]
    return [Saver(f"{name}={value}", replace(plain, **{name: value})) for name, value in found]


def without_savers(setup: Setup) -> Setup:
    return replace(setup, recompute="off", activation_memory_budget=1.0, optimizer_bits=32)


def extra_time(setup: Setup) -> float:
    """The FLOPs that the savers of a setup repeat, as a share of a step's without savers.

    Counted are matrix products and attention. What is limited by memory's speed, as norms and GELU
    are, comes on top of it.
    """
    return repeated_flops(setup) / step_flops(setup)


def step_flops(setup: Setup) -> int:
    """Of a token, forward and backward; attention's backward pass computes its scores again."""
    L, C, T = setup.shape.n_layer, setup.shape.n_embd, setup.shape.block_size
    products = 12 * L * C**2 + setup.shape.vocab_size * C
    return 6 * products + 14 * L * C * T


def repeated_flops(setup: Setup) -> int:
    """Of a token: blocks but for the last of their products, or attention alone."""
    L, C, T = setup.shape.n_layer, setup.shape.n_embd, setup.shape.block_size
    attention = 4 * C * T
    if setup.compiled:
        # Within 0.7 all products are kept, and attention's result if it needs no turned queries.
        budget = setup.activation_memory_budget
        is_repeated = budget < 0.7 or (budget < 1 and setup.shape.is_modern)
        return is_repeated * L * attention
    blocks = {"alternate": -(-L // 2), "block": L}.get(setup.recompute, 0)
    return blocks * (2 * (3 + 1 + 4) * C**2 + attention)  # queries to values, out, up
