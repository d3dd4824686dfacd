"""The run: set up, loop, stop cleanly.

    python train.py config/train_fineweb_4070.py --max_iters=1000
    torchrun --nproc_per_node=2 train.py config/train_fineweb_4070.py
    python train.py --model=auto --dataset=mine --hours=5

The last one chooses model and recipe for this machine, these data and so many hours, and writes
what it chose, with the reasons, to auto.py in out_dir; settings that are given it keeps. The same
command continues an interrupted run. Settings, as assignments in files or as flags:
"""

import sys
from dataclasses import replace
from functools import partial

from nanofit.settings.config import RunConfig, Settings, TrainConfig, answer_help, load_config

if __name__ == "__main__":
    answer_help(sys.argv, __doc__)  # before torch is loaded, which takes seconds

from nanofit.learning.optim import decay_start, lr_at
from nanofit.machine.dist import Ranks, start_ranks
from nanofit.machine.memory import is_out_of_memory
from nanofit.outlook.choice import read_asked, take_auto
from nanofit.run import checkpoint
from nanofit.run.auto import chosen_settings
from nanofit.run.checkpoint import Progress
from nanofit.run.launch import Launch, launch
from nanofit.run.length import fix_length
from nanofit.run.lock import only_run_in_folder
from nanofit.run.metrics import Log
from nanofit.run.recovery import (
    how_to_continue,
    kept_without_room,
    put_back,
    recover,
    review,
    save,
    settle,
    shortage_in_one_line,
    take_step,
    tell_saves,
)
from nanofit.run.signals import Requests, watch_for_requests
from nanofit.run.stages import Stages
from nanofit.terminal import run_script
from nanofit.use.samples import take_samples


def main(argv: list[str]) -> None:
    is_auto, words = take_auto(argv)
    settings = read_asked(words) if is_auto else load_config(words)
    run = settings.run
    with (
        shortage_in_one_line(run),
        start_ranks(run.backend, timeout_s=run.rank_timeout_s) as ranks,
        only_run_in_folder(run, ranks),
        watch_for_requests() as requests,
    ):
        train(chosen_settings(words, ranks) if is_auto else settings, ranks, requests)


def train(settings: Settings, ranks: Ranks, requests: Requests) -> None:
    """Start or continue a run and carry it to its end, or to the step at which it is stopped."""
    launched, run = launch(settings, ranks), settings.run
    if launched is None:  # the run is complete
        return
    started, progress = launched
    for line in started.opening():
        ranks.say(line)
    if run.eval_only:
        ranks.say(f"validation loss {started.validate(started.fit.eager.size):.4f}")
    elif carry_on(started, progress, requests):
        ranks.say(f"stopped on request; {how_to_continue(run)} continues the run")


def carry_on(launch: Launch, progress: Progress, requests: Requests) -> bool:
    """Learn step by step, from where the run is, until its end; True if it was stopped before."""
    run, ranks = launch.run, launch.ranks
    if ranks.is_main:
        launch.checkpoints.prepare_folder(progress.step)
    with launch.open_log(progress) as log, launch.saver:
        on_disk = progress.step or None
        log.event(progress.step, "resumed" if on_disk else "started", **launch.fit.told())
        stages = launch.begin_stages(progress, log.event)
        while True:
            step, stopping = progress.step, ranks.any(requests.is_end_asked)
            ending = stopping or step >= launch.learn.max_iters
            progress = replace(progress, seconds=log.seconds, **stages.reached)
            tell_saves(launch, log)
            if ranks.any(log.diverged(look=ending or is_kept(step, launch.learn, run))):
                progress = recover(launch, log, progress)
                on_disk = progress.step
                continue
            if step != on_disk:  # what was read is not written again
                is_asked = ranks.any(requests.take_save())
                keep(launch, log, progress, is_last=ending, is_asked=is_asked)
            if not stopping:
                progress = look(launch, log, stages, progress, is_last=ending)
            if ending:
                break
            batches = launch.batches(progress)
            stages.advance(step, batches)
            with kept_without_room(launch, log, progress):
                results = take_step(stages, step, partial(launch.attempt, step, batches))
            if results is None:
                progress = put_back(launch, log)
                on_disk = progress.step
                continue
            log.stepped(step, *results, lr_at(step, launch.learn))
            progress = replace(progress, step=step + 1)
            launch = fix_length(launch, log, step)
        settle(launch, log)
        log.event(step, "stopped" if stopping else "finished")
        for line in stages.table():
            log.say(line)
    return stopping


def keep(launch: Launch, log: Log, progress: Progress, *, is_last: bool, is_asked: bool) -> None:
    """Save the run if that is due: what can be extended from under a name of its own."""
    run, step = launch.run, progress.step
    is_due = run.always_save_checkpoint and due(run.save_every, step)
    if step == stable_end(launch.learn):
        save(launch, log, progress, name=checkpoint.STABLE, is_last=is_last)
    elif is_due or is_last or is_asked:
        save(launch, log, progress, is_last=is_last)


def look(
    launch: Launch, log: Log, stages: Stages, progress: Progress, *, is_last: bool
) -> Progress:
    """How good the model is by now, and what it writes, where that is due."""
    run, step = launch.run, progress.step
    if is_last or due(run.eval_interval, step):
        with kept_without_room(launch, log, progress):
            val_loss = stages.evaluate(step, launch.validate)
        progress = review(launch, log, progress, val_loss)
    if run.sample_every and (is_last or due(run.sample_every, step)):
        show_samples(launch, log, step)
    return progress


def show_samples(launch: Launch, log: Log, step: int) -> None:
    """Tell what the model writes by now; for lack of memory a run does not end here."""
    if not launch.ranks.is_main:
        return
    try:
        model, seed = launch.learner.model, launch.learn.seed
        for prompt, text in take_samples(model, launch.run.prompts, launch.device, seed=seed):
            log.sampled(step, prompt, text)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.tell(step, "no sample: out of memory", is_warning=True)


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
