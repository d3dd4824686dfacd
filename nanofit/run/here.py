"""What a machine can do, this one or a card by its name, for what is to be chosen for it."""

import math
from collections.abc import Sequence
from functools import partial

from nanofit.machine.cards import find_card, known_card
from nanofit.memory.budget import budget_of, dtype_of, has_flash_on
from nanofit.memory.need import need_of
from nanofit.outlook.capacity import Capacity
from nanofit.outlook.choice import Choice, choose, read_asked, smallest
from nanofit.outlook.forecast import COMPILE_GAIN
from nanofit.outlook.plan import Data, Speed, speed_of_card, tokens_per_s_of
from nanofit.settings.config import RunConfig, Settings
from nanofit.terminal import parse_size

TRIALS, TRIAL_SHARE, SHORTEST_TRIAL_S = 3, 0.01, 1.0  # of unknown speed; of the hours


def choose_here(words: Sequence[str], data: Data, processes: int = 1) -> Choice:
    """The choice for this machine.

    Where no speed is published that of the choice is measured, and it is made again.
    """
    asked = read_asked(words)
    capacity = capacity_here(asked.run, processes)
    if capacity.speed:
        return choose(words, capacity, data)
    timed = smallest(words, capacity, data)
    at_most_s = max(TRIAL_SHARE * 3600 * asked.learn.hours, SHORTEST_TRIAL_S)
    for _ in range(TRIALS):
        measured = measured_speed(timed, at_most_s=at_most_s)
        choice = choose(words, capacity.with_speed_of(timed, measured), data)
        if choice.plan.shape == timed.shape:
            break
        timed = choice.plan.settings
    return choice


def capacity_of(gpu: str, run: RunConfig) -> Capacity:
    """Of a card by its name."""
    return Capacity(
        find_card(gpu).name,
        partial(tokens_per_s_of, find_card(gpu)),
        partial(speed_of_card, gpu),
        need_of,
        _room_bytes(gpu, run),
        dtype_of(gpu, run),
        has_flash_on(gpu, run),
        gpu,
    )


def capacity_here(run: RunConfig, processes: int = 1) -> Capacity:
    """Of this machine; its speed where that of its card is published."""
    from nanofit.machine.device import describe_device  # and torch, which takes seconds to load

    device = describe_device(run.device, run.dtype)
    card = known_card(device.name, device.memory_mib) if device.precision != "float32" else None
    return Capacity(
        device.name,
        card and partial(tokens_per_s_of, card),
        card and partial(speed_of_card, card.name),
        need_of,
        _room_bytes(None, run),
        device.precision,
        device.has_flash,
        processes=processes,
    )


def measured_speed(settings: Settings, *, at_most_s: float = math.inf) -> Speed:
    """Of this machine, by a trial of real steps."""
    from nanofit.fit.speed import measure_speed  # and torch, which takes seconds to load

    measured = measure_speed(settings, at_most_s=at_most_s)
    device, gain = measured.device, 1.0
    source = (
        f"measured here: {device.name}, {device.precision}, real training steps on micro-batches "
        f"of {measured.micro_batch_size} × {settings.shape.block_size} random tokens"
    )
    if device.type == "cuda" and settings.run.compile:
        source += f", × {COMPILE_GAIN} for torch.compile (published: 1.5 to 1.85)"
        gain = COMPILE_GAIN
    update_s = measured.update_s / gain
    card = known_card(device.name, device.memory_mib)
    return Speed(gain * measured.tokens_per_s, card, source, update_s=update_s)


def _room_bytes(gpu: str | None, run: RunConfig) -> int | None:
    budget = budget_of(gpu, None, run)
    if budget:
        return budget.limit_bytes - budget.overhead.library_bytes
    return run.memory_limit and parse_size(run.memory_limit)
