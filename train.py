"""The run: set up, loop, stop cleanly.

    python train.py config/train_fineweb_4070.py --max_iters=1000
    torchrun --nproc_per_node=2 train.py config/train_fineweb_4070.py

The same command continues an interrupted run. Settings, as assignments in files or as flags:
"""

import sys
from dataclasses import replace
from functools import partial

from nanofit.settings.config import RunConfig, TrainConfig, answer_help, load_config

if __name__ == "__main__":
    answer_help(sys.argv, __doc__)  # before torch is loaded, which takes seconds

from nanofit.learning.optim import decay_start, lr_at
from nanofit.machine.dist import Ranks, start_ranks
from nanofit.run import checkpoint
from nanofit.run.checkpoint import Progress
from nanofit.run.launch import Launch, launch
from nanofit.run.length import fix_length
from nanofit.run.recovery import (
    how_to_continue,
    kept_without_room,
    put_back,
    recover,
    review,
    save,
    shortage_in_one_line,
    take_step,
)
from nanofit.run.stop import Stop, watch_for_stop
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import run_script


def main(argv: list[str]) -> None:
    shape, learn, run = load_config(argv)
    with shortage_in_one_line(run), start_ranks(run.backend) as ranks, watch_for_stop() as stop:
        train(shape, learn, run, ranks, stop)


def train(shape: GPTConfig, learn: TrainConfig, run: RunConfig, ranks: Ranks, stop: Stop) -> None:
    """Start or continue a run and carry it to its end, or to the step at which it is stopped."""
    launched = launch(shape, learn, run, ranks)
    if launched is None:  # the run is complete
        return
    started, progress = launched
    for line in started.opening():
        ranks.say(line)
    if run.eval_only:
        ranks.say(f"validation loss {started.validate(started.fit.eager.size):.4f}")
    elif carry_on(started, progress, stop):
        ranks.say(f"stopped on request; {how_to_continue(run)} continues the run")


def carry_on(launch: Launch, progress: Progress, stop: Stop) -> bool:
    """Learn step by step, from where the run is, until its end; True if it was stopped before."""
    run, ranks = launch.run, launch.ranks
    if ranks.is_main:
        launch.checkpoints.prepare_folder(progress.step)
    with launch.open_log(progress) as log:
        stages = launch.begin_stages(progress, log.event)
        log.event(progress.step, "resumed" if progress.step else "started", **launch.fit.told())
        while True:
            step, stopping = progress.step, ranks.any(stop.requested)
            ending = stopping or step == launch.learn.max_iters
            progress = replace(progress, seconds=log.seconds, stage=stages.stage)
            if ranks.any(log.diverged(look=ending or is_kept(step, launch.learn, run))):
                progress = recover(launch, log, progress)
                continue
            if ending or (run.always_save_checkpoint and due(run.save_every, step)):
                save(launch, log, progress, must_succeed=ending)
            if step == stable_end(launch.learn):
                save(launch, log, progress, name=checkpoint.STABLE)
            if not stopping and (ending or due(run.eval_interval, step)):
                with kept_without_room(launch, log, progress):
                    val_loss = stages.evaluate(step, launch.validate)
                progress = review(launch, log, progress, val_loss)
            if ending:
                break
            batches = launch.batches(progress)
            stages.advance(step, batches)
            with kept_without_room(launch, log, progress):
                results = take_step(stages, step, partial(launch.attempt, step, batches))
            if results is None:
                progress = put_back(launch, log)
                continue
            log.stepped(step, *results, lr_at(step, launch.learn))
            progress = replace(progress, step=step + 1)
            launch = fix_length(launch, log, step)
        log.event(step, "stopped" if stopping else "finished")
        for line in stages.table():
            log.say(line)
    return stopping


def due(interval: int, step: int) -> bool:
    return step > 0 and step % interval == 0


def stable_end(learn: TrainConfig) -> int | None:
    """The step whose checkpoint a WSD run can be extended from, however often."""
    return decay_start(learn) if learn.decay_lr and learn.lr_schedule == "wsd" else None


def is_kept(step: int, learn: TrainConfig, run: RunConfig) -> bool:
    """Whether the state at a step is saved or evaluated, so that it had better be sound."""
    is_due = due(run.save_every, step) or due(run.eval_interval, step)
    return is_due or step == stable_end(learn)


if __name__ == "__main__":
    run_script(main)
