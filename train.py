"""The run: set up, loop, stop cleanly.

    python train.py config/train_fineweb_4070.py --max_iters=1000
    torchrun --nproc_per_node=2 train.py config/train_fineweb_4070.py

The same command continues an interrupted run. Settings, as assignments in files or as flags:
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model import GPT, GPTConfig
from nanofit import checkpoint
from nanofit.checkpoint import Checkpoints, Progress
from nanofit.compiler import CompileStages
from nanofit.config import PROJECT, RunConfig, TrainConfig, describe_knobs, flatten, load_config
from nanofit.device import Device, describe_device
from nanofit.dist import Ranks, start_ranks
from nanofit.loader import TrainSequences, ValSequences, mix, open_bins
from nanofit.metrics import Log, WandbSink
from nanofit.optim import build_optimizer, decay_start, lr_at
from nanofit.step import evaluate, train_step
from nanofit.stop import Stop, watch_for_stop
from nanofit.terminal import InputError, compact, run_script


def main(argv: Sequence[str]) -> None:
    if "--help" in argv or "-h" in argv:
        print(__doc__ + describe_knobs())
        return
    shape, learn, run = load_config(argv)
    with start_ranks(run.backend) as ranks, watch_for_stop() as stop:
        train(shape, learn, run, ranks, stop)


def train(shape: GPTConfig, learn: TrainConfig, run: RunConfig, ranks: Ranks, stop: Stop) -> None:
    """Start or continue a run and carry it to its end, or to the step at which it is stopped."""
    micro_batch_size = min(learn.batch_size, _share_of_rank(learn, ranks))
    device = describe_device(run.device, run.dtype, local_rank=ranks.local_rank)
    _prepare_if_needed(run.data_dir, ranks)
    checkpoints = Checkpoints(Path(run.out_dir), run.keep_checkpoints)
    model, optimizer, scaler, progress = _begin(checkpoints, shape, learn, run, device, ranks)
    train_data, val_data = _open_data(model.config, learn, run, device)
    ranks.say(_summary(model, learn, run, device, ranks, train_data, val_data, micro_batch_size))

    validate = partial(_validate, model, val_data, micro_batch_size, device, ranks)
    if run.eval_only:
        ranks.say(f"val_loss {validate():.4f}")
        return
    if progress.step >= learn.max_iters:
        ranks.say(
            f"the run is complete at step {progress.step}; extend it with a larger --max_iters"
        )
        return
    if ranks.is_main:
        checkpoints.prepare_folder(progress.step)

    pack = partial(checkpoint.pack, model, optimizer, scaler, config=flatten(shape, learn, run))
    with _open_log(model, learn, run, device, ranks, progress) as log:
        save = partial(_save, checkpoints, pack, ranks, log)
        stages = CompileStages(
            model, run.compile_after if run.compile else None, device, ranks, log.event
        )
        log.event(progress.step, "resumed" if progress.step else "started")
        for step in range(progress.step, learn.max_iters + 1):
            stopping = ranks.any(stop.requested)
            ending = stopping or step == learn.max_iters
            progress = replace(progress, step=step, seconds=log.seconds)
            if ending or (run.always_save_checkpoint and _due(run.save_every, step)):
                save(progress, must_succeed=ending)
            if step == _stable_end(learn):
                save(progress, name=checkpoint.STABLE)
            if not stopping and (ending or _due(run.eval_interval, step)):
                progress = _review(progress, validate(), save, log)
            if ending:
                break
            batches = partial(train_data.micro_batches, step, micro_batch_size, ranks)
            stages.advance(step, batches)
            loss, grad_norm = train_step(
                model,
                optimizer,
                scaler,
                batches(),
                device=device,
                ranks=ranks,
                lr=lr_at(step, learn),
                grad_clip=learn.grad_clip,
                seed=mix(learn.seed, step, ranks.rank),
            )
            log.stepped(step, loss, grad_norm, lr_at(step, learn))
        log.event(step, "stopped" if stopping else "finished")
    if stopping:
        ranks.say(f"stopped on request; {_how_to_continue(run)} continues the run")


def _due(interval: int, step: int) -> bool:
    return step > 0 and step % interval == 0


def _stable_end(learn: TrainConfig) -> int | None:
    """The step whose checkpoint a WSD run can be extended from, however often."""
    return decay_start(learn) if learn.decay_lr and learn.lr_schedule == "wsd" else None


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
    checkpoints: Checkpoints,
    shape: GPTConfig,
    learn: TrainConfig,
    run: RunConfig,
    device: Device,
    ranks: Ranks,
) -> tuple[GPT, torch.optim.Optimizer, torch.amp.GradScaler, Progress]:
    """What learns, as it was when the run was last saved, or new."""
    saved = _find_saved(checkpoints, shape, learn, run, ranks)
    torch.manual_seed(learn.seed)
    model = _build_model(shape, run, saved).to(device.torch_device)
    optimizer, scaler = build_optimizer(model, learn), device.grad_scaler()
    progress = checkpoint.unpack(saved, model, optimizer, scaler) if saved else Progress()
    if not ranks.agree(progress.step):
        raise InputError(
            f"the processes found different checkpoints in {run.out_dir}; "
            "it must be a folder that all machines see"
        )
    return model, optimizer, scaler, progress


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


def _build_model(shape: GPTConfig, run: RunConfig, saved: dict[str, Any] | None) -> GPT:
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


def _summary(
    model: GPT,
    learn: TrainConfig,
    run: RunConfig,
    device: Device,
    ranks: Ranks,
    train_data: TrainSequences,
    val_data: ValSequences,
    micro_batch_size: int,
) -> str:
    """Everything derived from the settings, before anything is spent."""
    shape, sequences = model.config, learn.sequences_per_step
    tokens_per_step = sequences * shape.block_size
    memory = f", {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else ""
    processes = f" on {ranks.world} processes" if ranks.world > 1 else ""
    passes = -(-sequences // (micro_batch_size * ranks.world))
    epochs = learn.max_iters * sequences / train_data.blocks_per_epoch
    return "\n".join(
        (
            f"device  {device.name}{memory}, {device.precision}{processes}",
            f"model   {compact(model.num_params())} parameters: {shape.n_layer} layers, "
            f"{shape.n_head} heads, {shape.n_embd} wide, block {shape.block_size}",
            f"data    {run.data_dir}: {compact(len(train_data.bins))} tokens to learn from, "
            f"{compact(val_data.sequences * shape.block_size)} to validate on",
            f"step    {micro_batch_size} × {passes}{f' × {ranks.world}' if processes else ''} = "
            f"{sequences} sequences, {compact(tokens_per_step)} tokens",
            f"run     {learn.max_iters} steps, "
            f"{compact(learn.max_iters * tokens_per_step)} tokens, "
            f"{epochs:.3g} epochs, in {run.out_dir}",
        )
    )


def _open_log(
    model: GPT,
    learn: TrainConfig,
    run: RunConfig,
    device: Device,
    ranks: Ranks,
    progress: Progress,
) -> Log:
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
        last_step=learn.max_iters,
        tokens_per_step=learn.sequences_per_step * model.config.block_size,
        flops_per_token=model.flops_per_token(),
        peak_flops=device.peak_flops and device.peak_flops * ranks.world,
        seconds_before=progress.seconds,
        sinks=sinks,
    )


def _validate(
    model: GPT, val_data: ValSequences, micro_batch_size: int, device: Device, ranks: Ranks
) -> float:
    batches = val_data.micro_batches(micro_batch_size, ranks)
    return evaluate(model, batches, device=device, ranks=ranks)


def _review(progress: Progress, val_loss: float, save: Callable[..., None], log: Log) -> Progress:
    """Tell the validation loss, and save if it is the best so far."""
    log.evaluated(progress.step, val_loss)
    if val_loss < progress.best_val_loss:
        progress = replace(progress, best_val_loss=val_loss)
        save(progress, name=checkpoint.BEST)
    return progress


def _save(
    checkpoints: Checkpoints,
    pack: Callable[[Progress], dict[str, Any]],
    ranks: Ranks,
    log: Log,
    progress: Progress,
    *,
    name: str | None = None,
    must_succeed: bool = False,
) -> None:
    """Write a checkpoint; a failure in mid-run is told, not fatal: earlier ones are whole."""
    if not ranks.is_main:
        return
    try:
        path = checkpoints.save(pack(progress), name)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        if must_succeed:
            raise InputError(
                f"step {progress.step} could not be saved in {checkpoints.folder} ({error}); free "
                "some space, and the run continues from the checkpoint before"
            ) from error
        log.event(progress.step, "save failed", reason=str(error))
    else:
        log.say(f"step {progress.step}  saved {path}")
        log.restart_clock(progress.step)


if __name__ == "__main__":
    run_script(main)
