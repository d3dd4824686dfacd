"""Simulations that several test files look at, each run once."""

from functools import cache
from itertools import pairwise

from model import GPTConfig
from nanofit.memory import Setup, Simulation
from nanofit.memory import simulate as simulate_anew

simulate = cache(simulate_anew)

TINY = GPTConfig(n_layer=3, n_head=2, n_embd=64, block_size=64, vocab_size=1024)
GPT2_77M = GPTConfig(n_layer=12, n_head=12, n_embd=576, block_size=1024)
GPT2_124M = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)


def nanogpts_way(shape: GPTConfig, **changes) -> Setup:
    """All logits at once, and returned with the loss."""
    return Setup(shape, loss="full", returns_logits=True, **changes)


def peak_index(simulation: Simulation) -> int:
    """The event at which most memory is in use."""
    return list(simulation.allocated()).index(simulation.peak_bytes)


def passes_begun(simulation: Simulation, index: int) -> int:
    """How many forward passes have begun by then; the second step has the third and the fourth."""
    phases = ["", *(event.phase for event in simulation.events[: index + 1])]
    return sum(now == "forward" != before for before, now in pairwise(phases))
