"""The speed of this machine, by a few real steps."""

import sys
import time
from typing import NamedTuple

from model import GPT
from nanofit.data.loader import random_micro_batches
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import train_step
from nanofit.machine.device import Device, describe_device
from nanofit.machine.dist import Ranks
from nanofit.machine.memory import is_out_of_memory
from nanofit.settings.config import RunConfig, TrainConfig
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError

TRIAL_S = 8.0


class Measured(NamedTuple):
    """How fast this machine learns, eagerly."""

    tokens_per_s: float
    device: Device
    micro_batch_size: int


def measure_speed(shape: GPTConfig, learn: TrainConfig, run: RunConfig) -> Measured:
    """The speed of this machine, by real training steps on random tokens."""
    device = describe_device(run.device, run.dtype)
    print(f"trying some real steps on {device.name} ...", file=sys.stderr)
    try:
        model = GPT(shape, loss=run.loss).to(device.torch_device)
        tokens_per_s, sequences = _try_steps(model, learn, device)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise InputError(
                f"not even one sequence fits on {device.name}; autofit.py --explain tells more"
            ) from error
        raise
    return Measured(tokens_per_s, device, sequences)


def _try_steps(model: GPT, learn: TrainConfig, device: Device) -> tuple[float, int]:
    """Tokens per second and the micro-batch they were measured with, in bounded time."""
    optimizer = build_optimizer(model, learn, products=device.product_dtype)
    scaler = device.grad_scaler()
    shape = model.config

    def step(sequences: int, passes: int = 1) -> float:
        batches = random_micro_batches(
            sequences,
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
            device=device,
            passes=passes,
        )
        started = time.monotonic()
        arguments = dict(device=device, ranks=Ranks(), lr=0.0, grad_clip=learn.grad_clip, seed=0)
        loss, _ = train_step(model, optimizer, scaler, batches, **arguments)
        loss.item()  # waits for the device
        return time.monotonic() - started

    first_s = step(1)  # makes the optimiser's state as well
    if first_s > TRIAL_S:
        return shape.block_size / first_s, 1
    one_s = step(1)
    sequences = max(min(learn.batch_size, int(TRIAL_S / 2 / one_s)), 1)
    while True:
        try:
            micro_s = step(sequences)
            break
        except RuntimeError as error:
            if not is_out_of_memory(error) or sequences == 1:
                raise
        sequences //= 2
    passes = max(min(learn.gradient_accumulation_steps, int(TRIAL_S / micro_s)), 1)
    done, seconds = 0, 0.0
    while seconds < TRIAL_S:
        seconds += step(sequences, passes)
        done += passes * sequences
    return done * shape.block_size / seconds, sequences
