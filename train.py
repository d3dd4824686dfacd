"""The run: set up, loop, stop cleanly.

    python train.py config/train_fineweb_4070.py --max_iters=1000
    torchrun --nproc_per_node=2 train.py config/train_fineweb_4070.py

The same command continues an interrupted run. Settings, as assignments in files or as flags:
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# Its allocator warns of all memory it does not get, which the run tells in its own words. This is
# read as torch is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from torch import Tensor

from model import GPT, GPTConfig
from nanofit import checkpoint
from nanofit.checkpoint import Checkpoints, Progress
from nanofit.config import (
    ENDLESS,
    PROJECT,
    RunConfig,
    TrainConfig,
    describe_knobs,
    flatten,
    load_config,
)
from nanofit.device import Device, describe_device, is_out_of_memory, known_card
from nanofit.dist import Ranks, start_ranks
from nanofit.fit import Fit, find_fit
from nanofit.forecast import Forecast, predicted_tokens_per_s, step_of
from nanofit.loader import MicroBatch, TrainSequences, ValSequences, mix, open_bins
from nanofit.metrics import Log, WandbSink
from nanofit.optim import build_optimizer, decay_start, end_in, lr_at, undecayed_share
from nanofit.scaling import Band, recipe_of
from nanofit.search import sizes_for
from nanofit.spikes import watch_for_spikes
from nanofit.stages import NoRoom, Stages
from nanofit.step import UpdateInterrupted, evaluate, train_step
from nanofit.stop import Stop, watch_for_stop
from nanofit.terminal import InputError, compact, first_line, run_script
from nanofit.trial import share_compile_cache
from nanofit.undo import UpdateUndo

MOST_ROLLBACKS = 3  # to one checkpoint: what goes wrong after that is not the data's fault


class Learner(NamedTuple):
    """What learns: all that an update changes."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


@dataclass(frozen=True)
class Launch:
    """All that a run has from its launch on."""

    shape: GPTConfig
    run: RunConfig
    device: Device
    ranks: Ranks
    checkpoints: Checkpoints
    learner: Learner
    train_data: TrainSequences
    val_data: ValSequences
    fit: Fit
    forecast: Forecast


def main(argv: Sequence[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(__doc__ + describe_knobs())
        return
    shape, learn, run = load_config(argv)
    try:
        with start_ranks(run.backend) as ranks, watch_for_stop() as stop:
            train(shape, learn, run, ranks, stop)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        what, *_ = first_line(error).split(". ")
        raise InputError(f"{what}; {_way_out_of_shortage(run)}") from error


def train(shape: GPTConfig, learn: TrainConfig, run: RunConfig, ranks: Ranks, stop: Stop) -> None:
    """Start or continue a run and carry it to its end, or to the step at which it is stopped."""
    share = _share_of_rank(learn, ranks)
    device = describe_device(run.device, run.dtype, local_rank=ranks.local_rank)
    _prepare_if_needed(run.data_dir, ranks)
    checkpoints = Checkpoints(Path(run.out_dir), run.keep_checkpoints)
    saved = _find_saved(checkpoints, shape, learn, run, ranks)
    learn = checkpoint.with_length(saved, learn)
    model = _build_model(shape, learn, run, saved)
    train_data, val_data = _open_data(model.config, learn, run, device)
    if saved and saved["iter_num"] >= learn.max_iters and not run.eval_only:
        ranks.say(
            f"the run is complete at step {saved['iter_num']}; extend it with a larger --max_iters"
        )
        return
    share_compile_cache()
    fit = find_fit(model.config, learn, run, device, ranks)
    learner, progress = _begin(model, learn, run, saved, fit, device, ranks)
    del saved  # as large as the model and its optimiser
    forecast = _forecast(model, learn, run, device, ranks, train_data, fit)
    launch = Launch(
        shape=shape,
        run=run,
        device=device,
        ranks=ranks,
        checkpoints=checkpoints,
        learner=learner,
        train_data=train_data,
        val_data=val_data,
        fit=fit,
        forecast=forecast,
    )
    if device.note:
        ranks.say(f"note    {device.note}")
    ranks.say(_summary(launch, learn))
    for line in (*fit.lines(share), *forecast.outlook()):
        ranks.say(line)
    if run.eval_only:
        ranks.say(f"val_loss {_validate(launch, fit.eager.size):.4f}")
    else:
        _carry_on(launch, learn, progress, stop)


def _carry_on(launch: Launch, learn: TrainConfig, progress: Progress, stop: Stop) -> None:
    """Learn step by step, from where the run is, until it ends or is stopped."""
    run, ranks = launch.run, launch.ranks
    if ranks.is_main:
        launch.checkpoints.prepare_folder(progress.step)
    undo = UpdateUndo(launch.learner.optimizer, launch.device.memory())
    with _open_log(launch, learn, progress) as log:
        log.expect(partial(_normal_losses, launch.forecast, learn))
        stages = _begin_stages(launch, learn, progress, undo, log)
        log.event(progress.step, "resumed" if progress.step else "started", **launch.fit.told())
        while True:
            step, stopping = progress.step, ranks.any(stop.requested)
            ending = stopping or step == learn.max_iters
            progress = replace(progress, seconds=log.seconds, stage=stages.stage)
            save = partial(_save, launch, learn, log)
            if ranks.any(log.diverged(look=ending or _is_kept(step, learn, run))):
                progress = _recover(launch, learn, progress, save, log)
                continue
            if ending or (run.always_save_checkpoint and _due(run.save_every, step)):
                save(progress, must_succeed=ending)
            if step == _stable_end(learn):
                save(progress, name=checkpoint.STABLE)
            if not stopping and (ending or _due(run.eval_interval, step)):
                with _kept_without_room(launch, partial(save, progress)):
                    val_loss = stages.evaluate(step, partial(_validate, launch))
                progress = _review(progress, val_loss, save, log)
            if ending:
                break
            batches = partial(launch.train_data.micro_batches, progress.data_step, ranks=ranks)
            stages.advance(step, batches)
            with _kept_without_room(launch, partial(save, progress)):
                results = _take_step(stages, step, partial(_attempt, launch, learn, step, batches))
            if results is None:
                progress = replace(_go_back(launch, learn, log.say), seconds=log.seconds)
                log.event(progress.step, "went back", reason="an update ran out of memory")
                continue
            log.stepped(step, *results, lr_at(step, learn))
            progress = replace(progress, step=step + 1)
            if _speed_is_known(step, learn, run, ranks, log):
                learn = _fix_length(launch, step + 1, learn, log)
                normal_losses = partial(_normal_losses, launch.forecast, learn)
                log.expect(normal_losses, last_step=learn.max_iters)
        log.event(step, "stopped" if stopping else "finished")
        for line in stages.table():
            log.say(line)
    if stopping:
        ranks.say(f"stopped on request; {_how_to_continue(run)} continues the run")


def _begin_stages(
    launch: Launch, learn: TrainConfig, progress: Progress, undo: UpdateUndo, log: Log
) -> Stages:
    run, model = launch.run, launch.learner.model
    return Stages(
        model,
        launch.fit.plan(run.compile_after if run.compile else None),
        sizes_for(_share_of_rank(learn, launch.ranks)),
        device=launch.device,
        ranks=launch.ranks,
        tokens_per_step=learn.sequences_per_step * model.config.block_size,
        undo=undo,
        event=log.event,
        reached=progress.stage,
    )


def _take_step(
    stages: Stages, step: int, attempt: Callable[[int], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor] | None:
    """Loss and gradient norm; None if an update was interrupted that cannot be undone."""
    try:
        return stages.run(step, attempt)
    except UpdateInterrupted:
        pass
    stages.interrupted(step)  # not before the error, and what it holds on to, is gone
    return None


@contextmanager
def _kept_without_room(launch: Launch, save: Callable[..., None]) -> Iterator[None]:
    """Save what was learned, for which there is always room, if there is none to go on."""
    try:
        yield
    except NoRoom as error:
        if error.is_whole:
            save(must_succeed=True)
        launch.ranks.wait()
        raise InputError(f"{error}; {_way_out_of_shortage(launch.run)}") from error


def _way_out_of_shortage(run: RunConfig) -> str:
    newest = next(iter(Checkpoints(Path(run.out_dir)).newest_first()), None)
    how = f"{_how_to_continue(run)} goes on from {newest}" if newest else "start again"
    return f"free some memory, and {how}"


def _attempt(
    launch: Launch,
    learn: TrainConfig,
    step: int,
    batches: Callable[..., Iterator[MicroBatch]],
    micro_batch_size: int,
) -> tuple[Tensor, Tensor]:
    """Learn from the sequences of a step; may be repeated with another micro-batch."""
    return train_step(
        *launch.learner,
        batches(micro_batch_size),
        device=launch.device,
        ranks=launch.ranks,
        lr=lr_at(step, learn),
        grad_clip=learn.grad_clip,
        seed=mix(learn.seed, step, launch.ranks.rank),
    )


def _due(interval: int, step: int) -> bool:
    return step > 0 and step % interval == 0


def _stable_end(learn: TrainConfig) -> int | None:
    """The step whose checkpoint a WSD run can be extended from, however often."""
    return decay_start(learn) if learn.decay_lr and learn.lr_schedule == "wsd" else None


def _is_kept(step: int, learn: TrainConfig, run: RunConfig) -> bool:
    """Whether the state at a step is saved or evaluated, so that it had better be sound."""
    is_due = _due(run.save_every, step) or _due(run.eval_interval, step)
    return is_due or step == _stable_end(learn)


def _how_to_continue(run: RunConfig) -> str:
    return "the same command" if run.init_from in ("auto", "resume") else "--init_from=resume"


def _share_of_rank(learn: TrainConfig, ranks: Ranks) -> int:
    share, rest = divmod(learn.sequences_per_step, ranks.world)
    if rest:
        raise InputError(
            f"{learn.sequences_per_step} sequences per step cannot be shared by {ranks.world} "
            f"processes; make batch_size × gradient_accumulation_steps a multiple of {ranks.world}"
        )
    return share


def _prepare_if_needed(folder: Path, ranks: Ranks) -> None:
    """Make the bins of a folder where the user only put parquet files."""
    has_bins = (folder / "train.bin").exists() or (folder / "meta.json").exists()
    if ranks.is_main and not has_bins and any(folder.glob("*.parquet")):
        ranks.say(f"{folder} holds parquet files but no bins; preparing them first")
        script = PROJECT / "prepare_fineweb.py"
        if subprocess.run([sys.executable, script, folder, "--out", folder]).returncode:
            raise InputError(f"{folder} could not be prepared, for the reason above")
    ranks.wait()


def _begin(
    model: GPT,
    learn: TrainConfig,
    run: RunConfig,
    saved: dict[str, Any] | None,
    fit: Fit,
    device: Device,
    ranks: Ranks,
) -> tuple[Learner, Progress]:
    """Put on the device what learns, as it was when the run was last saved, or new."""
    device.enter_thread()
    # What is set up for the first sum must not be missing in the middle of a step.
    ranks.sum_([torch.zeros(1, device=device.torch_device)])
    if fit.limit_bytes is not None:
        device.memory().limit(fit.limit_bytes)
    model.to(device.torch_device)
    model.recompute = fit.savers.recompute
    optimizer = build_optimizer(model, learn, bits=fit.savers.optimizer_bits)
    learner = Learner(model, optimizer, device.grad_scaler())
    progress = checkpoint.unpack(saved, *learner) if saved else Progress()
    if not ranks.agree(progress.step):
        raise InputError(
            f"the processes found different checkpoints in {run.out_dir}; "
            "it must be a folder that all machines see"
        )
    return learner, progress


def _find_saved(
    checkpoints: Checkpoints,
    shape: GPTConfig,
    learn: TrainConfig,
    run: RunConfig,
    ranks: Ranks,
) -> dict[str, Any] | None:
    """The checkpoint to continue from; None for a new run."""
    if run.init_from not in ("auto", "resume"):
        if checkpoints.exist() and not run.eval_only:
            raise InputError(
                f"{run.out_dir} already holds a run; continue it with --init_from=resume, "
                "or start another in a new --out_dir"
            )
        return None
    if not checkpoints.exist():
        if run.init_from == "resume":
            raise InputError(f"no checkpoint in {run.out_dir} to resume from")
        return None
    return checkpoints.load(shape, learn, ranks.say)


def _build_model(
    shape: GPTConfig, learn: TrainConfig, run: RunConfig, saved: dict[str, Any] | None
) -> GPT:
    """The model of a run, in the host's memory."""
    torch.manual_seed(learn.seed)
    if saved:
        return GPT(GPTConfig(**saved["model_args"]), loss=run.loss)
    if run.init_from in ("auto", "scratch"):
        return GPT(shape, loss=run.loss)
    model = GPT.from_checkpoint(run.init_from, loss=run.loss, dropout=shape.dropout)
    if shape.block_size > model.config.block_size:
        raise InputError(
            f"block_size = {shape.block_size}, but {run.init_from} has positions for "
            f"{model.config.block_size} tokens; use --block_size={model.config.block_size}"
        )
    model.crop_block_size(shape.block_size)
    return model


def _open_data(
    shape: GPTConfig, learn: TrainConfig, run: RunConfig, device: Device
) -> tuple[TrainSequences, ValSequences]:
    train_bins, val_bins = open_bins(
        run.data_dir, block_size=shape.block_size, vocab_size=shape.vocab_size
    )
    common = (shape.block_size, shape.vocab_size, device)
    return (
        TrainSequences(
            train_bins, *common, sequences_per_step=learn.sequences_per_step, seed=learn.seed
        ),
        ValSequences(val_bins, *common, sequences=run.eval_iters * learn.batch_size),
    )


def _summary(launch: Launch, learn: TrainConfig) -> str:
    """Everything derived from the settings, before anything is spent."""
    run, device, world = launch.run, launch.device, launch.ranks.world
    model, train_data, val_data = launch.learner.model, launch.train_data, launch.val_data
    shape, sequences = model.config, learn.sequences_per_step
    tokens_per_step = sequences * shape.block_size
    memory = f", {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else ""
    processes = f" on {world} processes" if world > 1 else ""
    micro_batch_size = launch.fit.eager.size
    passes = -(-sequences // (micro_batch_size * world))
    steps, epochs = learn.max_iters, learn.max_iters * sequences / train_data.blocks_per_epoch
    length = f"{steps} steps, {compact(steps * tokens_per_step)} tokens, {epochs:.3g} epochs"
    if steps == ENDLESS:
        length = f"{learn.hours:g} hours, in as many steps as the measured speed allows"
    return "\n".join(
        (
            f"device  {device.name}{memory}, {device.precision}{processes}",
            f"model   {compact(model.num_params())} parameters: {shape.n_layer} layers, "
            f"{shape.n_head} heads, {shape.n_embd} wide, block {shape.block_size}",
            f"data    {run.data_dir}: {compact(len(train_data.bins))} tokens to learn from, "
            f"{compact(val_data.sequences * shape.block_size)} to validate on",
            f"step    {micro_batch_size} × {passes}{f' × {world}' if processes else ''} = "
            f"{sequences} sequences, {compact(tokens_per_step)} tokens",
            f"run     {length}, in {run.out_dir}",
        )
    )


def _forecast(
    model: GPT,
    learn: TrainConfig,
    run: RunConfig,
    device: Device,
    ranks: Ranks,
    train_data: TrainSequences,
    fit: Fit,
) -> Forecast:
    """What the run will cost and give, as far as that is known before it starts."""
    tokens_per_step = learn.sequences_per_step * model.config.block_size
    card = known_card(device.name) if device.dtype != torch.float32 else None
    step = step_of(
        model.config,
        run.loss,
        micro_batch_size=(fit.compiled or fit.eager).size,
        sequences_per_step=learn.sequences_per_step // ranks.world,
    )
    tokens_per_s = card and ranks.world * predicted_tokens_per_s(card, step, compiled=run.compile)
    steps = learn.max_iters
    if steps == ENDLESS:
        steps = int(learn.hours * 3600 * (tokens_per_s or 0) / tokens_per_step)
    is_new = run.init_from in ("auto", "resume", "scratch")  # what has learned before has no law
    return Forecast(
        parameters=model.num_params(),
        steps=steps,
        tokens_per_step=tokens_per_step,
        decay_end=learn.lr_decay_iters if learn.decay_lr else None,
        unique_tokens=len(train_data.bins),
        tokens_per_s=tokens_per_s,
        watts=card and card.watts * ranks.world,
        recipe=recipe_of(model.config.arch, model.config.vocab_size) if is_new else None,
    )


def _normal_losses(forecast: Forecast, learn: TrainConfig, steps_done: int) -> Band | None:
    """Between which losses a run of this shape and recipe is by then; None during warm-up."""
    if steps_done <= learn.warmup_iters:
        return None
    return forecast.with_steps(steps_done).band_before_decay(undecayed_share(steps_done, learn))


def _open_log(launch: Launch, learn: TrainConfig, progress: Progress) -> Log:
    run, device, ranks = launch.run, launch.device, launch.ranks
    model, optimizer, scaler = launch.learner
    folder, sinks = Path(run.out_dir), ()
    if run.wandb_log and ranks.is_main:
        name = run.wandb_run_name or folder.resolve().name
        config = flatten(model.config, learn, run)
        sinks = (WandbSink(run.wandb_project, name, config, folder, say=print),)
    return Log(
        folder,
        is_main=ranks.is_main,
        log_interval=run.log_interval,
        first_step=progress.step,
        last_step=None if learn.max_iters == ENDLESS else learn.max_iters,
        tokens_per_step=learn.sequences_per_step * model.config.block_size,
        flops_per_token=model.flops_per_token(),
        peak_flops=device.peak_flops and device.peak_flops * ranks.world,
        seconds_before=progress.seconds,
        watch=watch_for_spikes(run.on_spike, optimizer, scaler),
        sinks=sinks,
    )


def _validate(launch: Launch, micro_batch_size: int) -> float:
    batches = launch.val_data.micro_batches(micro_batch_size, launch.ranks)
    return evaluate(launch.learner.model, batches, device=launch.device, ranks=launch.ranks)


def _review(progress: Progress, val_loss: float, save: Callable[..., None], log: Log) -> Progress:
    """Tell the validation loss, and save if it is the best so far."""
    log.evaluated(progress.step, val_loss)
    if val_loss < progress.best_val_loss:
        progress = replace(progress, best_val_loss=val_loss)
        save(progress, name=checkpoint.BEST)
    return progress


def _go_back(launch: Launch, learn: TrainConfig, say: Callable[[str], None]) -> Progress:
    """Put the run back to its newest checkpoint, or to its beginning if there is none yet."""
    model, optimizer, scaler = launch.learner
    optimizer.state.clear()  # to make room for what is loaded
    if launch.checkpoints.exist():
        saved = launch.checkpoints.load(launch.shape, learn, say)
        return checkpoint.unpack(saved, *launch.learner)
    model.load_state_dict(_build_model(launch.shape, learn, launch.run, None).state_dict())
    optimizer.param_groups[0].pop("spike_memory", None)
    if scaler.is_enabled():
        scaler.load_state_dict(torch.amp.GradScaler(device="cpu").state_dict())
    return Progress()


def _recover(
    launch: Launch,
    learn: TrainConfig,
    diverged: Progress,
    save: Callable[..., None],
    log: Log,
) -> Progress:
    """Go back to the last good checkpoint and on past the data that led astray, or stop there."""
    log.event(diverged.step, "diverged", reason=log.divergence)
    good = next(iter(launch.checkpoints.newest_first()), None)
    kept = f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"
    stopped = f"{log.divergence} by step {diverged.step}; {kept}"
    if launch.run.on_spike != "rollback" or good is None:
        raise InputError(
            f"{stopped}; continue with --on_spike=rollback or skip, or start again with a lower "
            "--learning_rate in another --out_dir"
        )
    progress = _go_back(launch, learn, log.say)
    if sum(step == progress.step for step, _ in progress.rollbacks) >= MOST_ROLLBACKS:
        raise InputError(
            f"{stopped}, and going on from there with other data failed {MOST_ROLLBACKS} times; "
            "start again with a lower --learning_rate in another --out_dir"
        )
    rollback = (progress.step, diverged.step - progress.step)
    progress = replace(
        progress, seconds=diverged.seconds, rollbacks=(*progress.rollbacks, rollback)
    )
    log.event(progress.step, "rolled back", left_out_steps=rollback[1])
    log.forget_divergence()
    launch.ranks.wait()  # until all have read what is now written anew
    save(progress)  # so that a resumed run goes the same way
    return progress


def _speed_is_known(step: int, learn: TrainConfig, run: RunConfig, ranks: Ranks, log: Log) -> bool:
    """Whether a run in `hours` can be given its length: compiled, and timed for a few steps."""
    if learn.max_iters != ENDLESS or step < (run.compile_after if run.compile else 0):
        return False
    return ranks.any(log.step_seconds is not None)


def _fix_length(launch: Launch, step: int, learn: TrainConfig, log: Log) -> TrainConfig:
    """Give a run in `hours` the length whose decay ends in time, once and for all processes."""
    # An evaluation passes forward alone, a third of the work of learning from a sequence.
    evaluated = launch.val_data.sequences / launch.run.eval_interval
    per_step = evaluated / 3 / learn.sequences_per_step
    steps_left = 0
    if launch.ranks.is_main:
        left_s = learn.hours * 3600 - log.seconds
        steps_left = max(int(left_s / (log.step_seconds * (1 + per_step))), 1)
    agreed = torch.tensor([steps_left])
    launch.ranks.sum_([agreed])
    fixed = end_in(agreed.item(), step, learn)
    log.event(step, "length fixed", max_iters=fixed.max_iters, hours=learn.hours)
    return fixed


def _save(
    launch: Launch,
    learn: TrainConfig,
    log: Log,
    progress: Progress,
    *,
    name: str | None = None,
    must_succeed: bool = False,
) -> None:
    """Write a checkpoint; a failure in mid-run is told, not fatal: earlier ones are whole."""
    if not launch.ranks.is_main:
        return
    if log.is_suspect and not (name or must_succeed):
        log.say(f"step {progress.step}  not saved: the loss has jumped, which may be divergence")
        return
    config, fit = flatten(launch.shape, learn, launch.run), launch.fit.as_dict()
    try:
        content = checkpoint.pack(*launch.learner, progress, config=config, fit=fit)
        path = launch.checkpoints.save(content, name)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        if must_succeed:
            raise InputError(
                f"step {progress.step} could not be saved in {launch.run.out_dir} ({error}); free "
                "some space, and the run continues from the checkpoint before"
            ) from error
        log.event(progress.step, "save failed", reason=str(error))
    else:
        log.say(f"step {progress.step}  saved {path}")
        log.restart_clock(progress.step)


if __name__ == "__main__":
    run_script(main)
