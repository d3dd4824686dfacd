"""The length of a run in hours: fixed by its speed, once that is known."""

from dataclasses import replace

import torch

from nanofit.learning.optim import end_in
from nanofit.run.launch import Launch
from nanofit.run.metrics import Log
from nanofit.settings.config import ENDLESS


def fix_length(launch: Launch, log: Log, step: int) -> Launch:
    """Give a run in `hours` the length whose decay ends in time, once its speed is known."""
    if not _is_due(launch, log, step):
        return launch
    learn = end_in(_steps_left(launch, log), step + 1, launch.learn)
    log.event(step + 1, "length fixed", max_iters=learn.max_iters, hours=learn.hours)
    fixed = replace(launch, settings=launch.settings._replace(learn=learn))
    log.expect(fixed.normal_losses, last_step=learn.max_iters)
    return fixed


def _is_due(launch: Launch, log: Log, step: int) -> bool:
    """Whether it is not fixed yet, and steps were timed as the run will do them: compiled."""
    run = launch.run
    if launch.learn.max_iters != ENDLESS or step < (run.compile_after if run.compile else 0):
        return False
    return launch.ranks.any(log.step_seconds is not None)


def _steps_left(launch: Launch, log: Log) -> int:
    """How many more steps fit in the time, by the main process's clock."""
    learn, left = launch.learn, 0
    # An evaluation passes forward alone, a third of the work of learning from a sequence.
    evaluated = launch.val_data.sequences / launch.run.eval_interval
    per_step = evaluated / 3 / learn.sequences_per_step
    if launch.ranks.is_main:
        left_s = learn.hours * 3600 - log.seconds
        left = max(int(left_s / (log.step_seconds * (1 + per_step))), 1)
    agreed = torch.tensor([left])
    launch.ranks.sum_([agreed])
    return agreed.item()
