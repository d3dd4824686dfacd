"""The speed of this machine, by a few real steps."""

import gc
import math
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from torch.amp import GradScaler
from torch.optim import Optimizer

from model import GPT
from nanofit.data.loader import MicroBatch, random_micro_batches
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import train_step
from nanofit.machine.device import Device, describe_device
from nanofit.machine.dist import Ranks
from nanofit.machine.memory import is_out_of_memory
from nanofit.settings.config import Settings, TrainConfig
from nanofit.terminal import InputError

TRIAL_S = 8.0


class Measured(NamedTuple):
    """How fast this machine learns, eagerly."""

    tokens_per_s: float
    device: Device
    micro_batch_size: int
    update_s: float  # of a step, whatever its batch


def measure_speed(settings: Settings, *, at_most_s: float = math.inf) -> Measured:
    """The speed of this machine, by real training steps on random tokens."""
    shape, learn, run = settings
    device = describe_device(run.device, run.dtype)
    print(f"trying some real steps on {device.name} ...", file=sys.stderr)
    try:
        model = GPT(shape, loss=run.loss).to(device.torch_device)
        seconds, sequences = _try_steps(model, learn, device, min(TRIAL_S, at_most_s))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise InputError(
                f"not even one sequence fits on {device.name}; autofit.py --explain tells more"
            ) from error
        raise
    finally:  # else what is kept would count as another program's when a fit is looked for
        model = None
        gc.collect()
        device.memory().release()
    step_s = learn.sequences_per_step * seconds.passes + seconds.update
    tokens_per_s = learn.sequences_per_step * shape.block_size / step_s
    return Measured(tokens_per_s, device, sequences, seconds.update)


class _Seconds(NamedTuple):
    """Of a step: its passes, which get more with the batch, and its update, which does not."""

    passes: float
    update: float


def _try_steps(
    model: GPT, learn: TrainConfig, device: Device, trial_s: float
) -> tuple[_Seconds, int]:
    """Those of a sequence and an update, and the micro-batch they were measured with; soon."""
    optimizer = build_optimizer(model, learn, products=device.product_dtype)
    scaler = device.grad_scaler()
    step = partial(_timed_step, model, optimizer, scaler, device=device, grad_clip=learn.grad_clip)
    first = step(1)  # makes the optimiser's state as well
    if sum(first) > TRIAL_S:
        return first, 1
    sequences = max(min(learn.batch_size, int(trial_s / 2 / step(1).passes)), 1)
    while True:
        try:
            pass_s = step(sequences).passes
            break
        except RuntimeError as error:
            if not is_out_of_memory(error) or sequences == 1:
                raise
        sequences //= 2
    passes = max(min(learn.gradient_accumulation_steps, int(trial_s / pass_s)), 1)
    steps: list[_Seconds] = []
    while sum(map(sum, steps)) < trial_s:
        steps.append(step(sequences, passes))
    pass_s, update_s = (sum(part) / len(steps) for part in zip(*steps, strict=True))
    return _Seconds(pass_s / (passes * sequences), update_s), sequences


def _timed_step(
    model: GPT,
    optimizer: Optimizer,
    scaler: GradScaler,
    sequences: int,
    passes: int = 1,
    *,
    device: Device,
    grad_clip: float,
) -> _Seconds:
    shape, passed = model.config, []

    def batches() -> Iterator[MicroBatch]:
        sizes = dict(block_size=shape.block_size, vocab_size=shape.vocab_size, passes=passes)
        yield from random_micro_batches(sequences, device=device, **sizes)
        _wait_for(model)
        passed.append(time.monotonic())  # once the step asks for more

    started = time.monotonic()
    learn = dict(device=device, ranks=Ranks(), lr=0.0, grad_clip=grad_clip, seed=0)
    train_step(model, optimizer, scaler, batches(), **learn)
    _wait_for(model)
    return _Seconds(passed[0] - started, time.monotonic() - passed[0])


def _wait_for(model: GPT) -> None:
    """Until its device has done all that it was told, as a number read from there tells."""
    model.lm_head.weight[0, 0].item()
