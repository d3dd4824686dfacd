"""Courses that several test files look at, each run once."""

import hashlib
import os
import pickle
from functools import cache
from itertools import pairwise

from nanofit.cache import cache_folder
from nanofit.memory.course import Course
from nanofit.memory.setup import Setup
from nanofit.memory.simulate import simulate as simulate_anew
from nanofit.settings.shape import GPTConfig

TINY = GPTConfig(n_layer=3, n_head=2, n_embd=64, block_size=64, vocab_size=1024)
GPT2_77M = GPTConfig(n_layer=12, n_head=12, n_embd=576, block_size=1024)
GPT2_124M = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024)


@cache
def simulate(setup: Setup, micro_batch_size: int) -> Course:
    """What `simulate_anew` gives, or gave to another process of this session."""
    name = hashlib.sha256(repr((setup, micro_batch_size)).encode()).hexdigest()
    place = cache_folder() / "simulations" / name
    if place.exists():
        return pickle.loads(place.read_bytes())
    simulation = simulate_anew(setup, micro_batch_size)
    place.parent.mkdir(parents=True, exist_ok=True)
    own = place.with_name(f"{name}.{os.getpid()}")  # another may be writing the same
    own.write_bytes(pickle.dumps(simulation))
    own.replace(place)
    return simulation


def nanogpts_way(shape: GPTConfig, **changes) -> Setup:
    """All logits at once, and returned with the loss."""
    return Setup(shape, loss="full", returns_logits=True, **changes)


def peak_index(simulation: Course) -> int:
    """The event at which most memory is in use."""
    return list(simulation.allocated()).index(simulation.peak_bytes)


def passes_begun(simulation: Course, index: int) -> int:
    """How many forward passes have begun by then; the second step has the third and the fourth."""
    phases = ["", *(event.phase for event in simulation.events[: index + 1])]
    return sum(now == "forward" != before for before, now in pairwise(phases))
