"""What a run keeps, and how it goes back to that: saving, divergence, no room left."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nanofit.learning.step import UpdateInterrupted
from nanofit.machine.memory import is_out_of_memory
from nanofit.run import checkpoint
from nanofit.run.checkpoint import Checkpoints, Progress
from nanofit.run.launch import Launch, build_model
from nanofit.run.metrics import Log
from nanofit.run.stages import NoRoom, Stages
from nanofit.settings.config import RunConfig, flatten
from nanofit.terminal import InputError, first_line

MIB = 2**20
MOST_ROLLBACKS = 3  # to one checkpoint: what goes wrong after that is not the data's fault


def save(
    launch: Launch,
    log: Log,
    progress: Progress,
    *,
    name: str | None = None,
    is_last: bool = False,
) -> None:
    """Have a checkpoint written while the run goes on."""
    if launch.ranks.any(log.is_suspect) and not (name or is_last):
        told = "not saved: the loss has jumped, which may be divergence"
        log.tell(progress.step, told, is_warning=True)
        return
    content = checkpoint.pack(
        *launch.learner,
        replace(progress, recent_losses=log.recent_losses),
        config=flatten(*launch.settings),
        data=launch.identity,
        machine=launch.machine,
        fit=launch.fit.as_dict(),
    )
    content = launch.engine.gathered(content)
    if launch.ranks.is_main:
        launch.saver.save(content, name)
    log.restart_clock(progress.step)


def tell_saves(launch: Launch, log: Log) -> None:
    """Say what has come of checkpoints; a failure in mid-run is told, not fatal."""
    for saved in launch.saver.outcomes():
        if saved.error:
            log.event(saved.step, "save failed", reason=first_line(saved.error))
        else:
            details = {"mib": round(saved.size_bytes / MIB, 1), "took": round(saved.seconds, 2)}
            log.note(saved.step, "saved", path=str(saved.path), **details)


def settle(launch: Launch, log: Log) -> None:
    """Wait until all is written; InputError if that failed."""
    launch.saver.wait()
    tell_saves(launch, log)
    if (failed := launch.saver.failed_step) is not None:
        raise InputError(
            f"step {failed} could not be saved in {launch.run.out_dir}, for the reason above; put "
            "that right, and the run continues from the checkpoint before"
        )


def review(launch: Launch, log: Log, progress: Progress, val_loss: float) -> Progress:
    """Tell the validation loss, and save if it is the best so far."""
    log.evaluated(progress.step, val_loss)
    if val_loss < progress.best_val_loss:
        progress = replace(progress, best_val_loss=val_loss)
        save(launch, log, progress, name=checkpoint.BEST)
    return progress


def recover(launch: Launch, log: Log, diverged: Progress) -> Progress:
    """Go back to the last good checkpoint and on past the data that led astray, or stop there."""
    _settle_for_all(launch, log)
    reason = log.divergence or "the run diverged"  # at which the main process alone looks
    log.event(diverged.step, "diverged", reason=reason)
    good = next(iter(launch.checkpoints.newest_first()), None)
    kept = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
    stopped = f"{reason} by step {diverged.step}; {kept}"
    if launch.run.on_spike != "rollback" or good is None:
        raise InputError(
            f"{stopped}; continue with --on_spike=rollback or skip, or start again with a lower "
            "--learning_rate in another --out_dir"
        )
    progress = _go_back(launch, log.say)
    if sum(step == progress.step for step, _ in progress.rollbacks) >= MOST_ROLLBACKS:
        raise InputError(
            f"{stopped}, and going on from there with other data failed {MOST_ROLLBACKS} times; "
            "start again with a lower --learning_rate in another --out_dir"
        )
    rollback = (progress.step, diverged.step - progress.step)
    progress = replace(
        progress, seconds=diverged.seconds, rollbacks=(*progress.rollbacks, rollback)
    )
    launch.saver.forget()
    log.event(progress.step, "rolled back", left_out_steps=rollback[1])
    log.went_back(progress.recent_losses)
    save(launch, log, progress)  # so that a resumed run goes the same way
    return progress


def take_step(
    stages: Stages, step: int, attempt: Callable[[int], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor] | None:
    """Loss and gradient norm; None if an update was interrupted that cannot be undone."""
    try:
        return stages.run(step, attempt)
    except UpdateInterrupted:
        pass
    stages.interrupted(step)  # not before the error, and what it holds on to, is gone
    return None


def put_back(launch: Launch, log: Log) -> Progress:
    """The run as it last was whole, after an update that could not be undone."""
    _settle_for_all(launch, log)
    progress = replace(_go_back(launch, log.say), seconds=log.seconds)
    log.event(progress.step, "went back", reason="an update ran out of memory")
    log.went_back(progress.recent_losses)
    return progress


@contextmanager
def kept_without_room(launch: Launch, log: Log, progress: Progress) -> Iterator[None]:
    """Save what was learned, for which there is always room, if there is none to go on."""
    try:
        yield
    except NoRoom as error:
        if error.is_whole:
            save(launch, log, progress, is_last=True)
        settle(launch, log)
        launch.ranks.wait()
        raise InputError(f"{error}; {_way_out_of_shortage(launch.run)}") from error


@contextmanager
def shortage_in_one_line(run: RunConfig) -> Iterator[None]:
    """Wherever memory runs out that nobody expected it to: what to do, instead of a traceback."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what, *_ = first_line(error).split(". ")
        raise InputError(f"{what}; {_way_out_of_shortage(run)}") from error


def how_to_continue(run: RunConfig) -> str:
    return "the same command" if run.init_from in ("auto", "resume") else "--init_from=resume"


def _way_out_of_shortage(run: RunConfig) -> str:
    newest = next(iter(Checkpoints(Path(run.out_dir)).newest_first()), None)
    how = f"{how_to_continue(run)} goes on from {newest}" if newest else "start again"
    return f"free some memory, and {how}"


def _settle_for_all(launch: Launch, log: Log) -> None:
    """Before checkpoints are read: what is being written is there, for all processes."""
    launch.saver.wait()
    tell_saves(launch, log)
    launch.ranks.wait()


def _go_back(launch: Launch, say: Callable[[str], None]) -> Progress:
    """Put the run back to its newest checkpoint, or to its beginning if there is none yet."""
    model, optimizer, scaler = launch.learner
    optimizer.state.clear()  # to make room for what is loaded
    if launch.checkpoints.exist():
        saved = launch.checkpoints.load(launch.settings.shape, launch.learn, say)
        launch.ranks.wait()  # until all have read what is now renamed, or written anew
        if launch.ranks.is_main:
            with suppress(OSError):  # the disk takes nothing just now
                launch.checkpoints.set_damaged_aside()
        return checkpoint.unpack(saved, *launch.learner)
    first = build_model(launch.settings)
    model.load_state_dict(first.state_dict())
    optimizer.param_groups[0].pop("spike_memory", None)
    if scaler.is_enabled():
        scaler.load_state_dict(torch.amp.GradScaler(device="cpu").state_dict())
    return Progress()
