"""What a run has from its start: settings, device, data, what fits, what learns."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model import GPT
from nanofit.data.loader import MicroBatch, TrainSequences, ValSequences, mix
from nanofit.data.tokens import open_bins
from nanofit.files import PROJECT
from nanofit.fit.fit import Fit, find_fit
from nanofit.fit.search import sizes_for
from nanofit.fit.trial import share_compile_cache
from nanofit.learning.engine import Engine, engine_for
from nanofit.learning.optim import build_optimizer, lr_at, undecayed_share
from nanofit.learning.step import evaluate, train_step
from nanofit.learning.undo import UpdateUndo
from nanofit.machine.cards import known_card
from nanofit.machine.device import Device, describe_device
from nanofit.machine.dist import Ranks
from nanofit.outlook.forecast import Forecast, predicted_tokens_per_s, step_of
from nanofit.outlook.scaling import Band, recipe_of
from nanofit.run import checkpoint
from nanofit.run.checkpoint import Checkpoints, Progress
from nanofit.run.metrics import Log, has_ended
from nanofit.run.record import described
from nanofit.run.saving import Saver
from nanofit.run.spikes import watch_for_spikes
from nanofit.run.stages import Stages
from nanofit.run.trackers import Sink, open_sinks
from nanofit.settings.config import ENDLESS, RunConfig, Settings, TrainConfig, flatten
from nanofit.terminal import InputError, compact
from nanofit.weights import without_compile_prefix

DATA_CHANGED = "data changed"
LOOK_S = 0.2  # between looks at a preparation


class Learner(NamedTuple):
    """What learns: all that an update changes."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler


@dataclass(frozen=True)
class Launch:
    """All that a run has from its launch on. Of it only the length may change, once."""

    settings: Settings  # as asked for; the model's own shape may come from a checkpoint
    device: Device
    ranks: Ranks
    checkpoints: Checkpoints
    saver: Saver
    learner: Learner
    engine: Engine
    train_data: TrainSequences
    val_data: ValSequences
    fit: Fit
    forecast: Forecast
    identity: dict[str, Any]  # of the data, by split
    changes: dict[str, dict[str, str]]  # what a continued run has that it had not, by event

    @property
    def learn(self) -> TrainConfig:
        return self.settings.learn

    @property
    def run(self) -> RunConfig:
        return self.settings.run

    def opening(self) -> Iterator[str]:
        """Everything derived from the settings, before anything is spent."""
        if self.device.note:
            yield f"note    {self.device.note}"
        yield from self._summary()
        yield from self.fit.lines(share_of_rank(self.learn, self.ranks))
        yield from self.forecast.outlook()

    def open_log(self, progress: Progress) -> Log:
        """Where the run tells of itself, with the losses that are normal for it."""
        learn, model, ranks = self.learn, self.learner.model, self.ranks
        log = Log(
            Path(self.run.out_dir),
            is_main=ranks.is_main,
            log_interval=self.run.log_interval,
            first_step=progress.step,
            last_step=None if learn.max_iters == ENDLESS else learn.max_iters,
            tokens_per_step=learn.sequences_per_step * model.config.block_size,
            flops_per_token=model.config.flops_per_token,
            peak_flops=self.device.peak_flops and self.device.peak_flops * ranks.world,
            seconds_before=progress.seconds,
            watch=watch_for_spikes(
                self.run.on_spike,
                self.learner.optimizer,
                self.learner.scaler,
                progress.recent_losses,
            ),
            peek=self.device.peek,
            bytes_per_token=self.val_data.bins.bytes_per_token,
            sinks=self._sinks(progress.step),
        )
        log.expect(self.normal_losses)
        log.began(progress.step, described(self))
        for name, details in self.changes.items():
            log.event(progress.step, name, **details)
        return log

    def begin_stages(self, progress: Progress, event: Callable[..., None]) -> Stages:
        """How the run computes: in eager first, or as it did when it was last saved."""
        run, model = self.run, self.learner.model
        stages = Stages(
            model,
            self.fit.plan(run.compile_after if run.compile else None),
            sizes_for(share_of_rank(self.learn, self.ranks)),
            device=self.device,
            ranks=self.ranks,
            tokens_per_step=self.learn.sequences_per_step * model.config.block_size,
            undo=UpdateUndo(self.learner.optimizer, self.device.memory()),
            event=event,
            engine=self.engine,
            reached=progress.stage,
            compile_at=progress.compile_at,
            may_time=not run.deterministic,
        )
        stages.begin(progress.step, self.batches(progress))
        return stages

    @property
    def machine(self) -> dict[str, Any]:
        return _machine(self.device, self.ranks)

    def batches(self, progress: Progress) -> Callable[[int], Iterator[MicroBatch]]:
        """The sequences of the coming step, by the size of micro-batch they are to be cut into."""
        return partial(self.train_data.micro_batches, progress.data_step, ranks=self.ranks)

    def attempt(
        self, step: int, batches: Callable[[int], Iterator[MicroBatch]], micro_batch_size: int
    ) -> tuple[Tensor, Tensor]:
        """Learn from the sequences of a step; may be repeated with another micro-batch."""
        return train_step(
            *self.learner,
            batches(micro_batch_size),
            device=self.device,
            ranks=self.ranks,
            lr=lr_at(step, self.learn),
            grad_clip=self.learn.grad_clip,
            seed=mix(self.learn.seed, step, self.ranks.rank),
            engine=self.engine,
        )

    def validate(self, micro_batch_size: int) -> float:
        batches = self.engine.evenly(self.val_data.micro_batches(micro_batch_size, self.ranks))
        return evaluate(self.learner.model, batches, device=self.device, ranks=self.ranks)

    def normal_losses(self, steps_done: int) -> Band | None:
        """Between which losses a run of this shape and recipe is by then; None in warm-up."""
        if steps_done <= self.learn.warmup_iters:
            return None
        share = undecayed_share(steps_done, self.learn)
        return self.forecast.with_steps(steps_done).band_before_decay(share)

    def _summary(self) -> Iterator[str]:
        run, device, world = self.run, self.device, self.ranks.world
        shape, sequences = self.learner.model.config, self.learn.sequences_per_step
        memory = f", {device.memory_bytes / 1e9:.1f} GB" if device.memory_bytes else ""
        processes = f" on {world} processes" if world > 1 else ""
        yield f"device  {device.name}{memory}, {device.precision}{processes}"
        yield (
            f"model   {compact(self.learner.model.num_params())} parameters: {shape.n_layer} "
            f"layers, {shape.n_head} heads, {shape.n_embd} wide, block {shape.block_size}"
        )
        yield (
            f"data    {run.data_dir}: {compact(len(self.train_data.bins))} tokens to learn from, "
            f"{compact(self.val_data.sequences * shape.block_size)} to validate on"
        )
        size = self.fit.eager.size
        yield (
            f"step    {size} × {-(-sequences // (size * world))}"
            f"{f' × {world}' if processes else ''} = {sequences} sequences, "
            f"{compact(sequences * shape.block_size)} tokens"
        )
        yield f"run     {self._length()}, in {run.out_dir}"
        if self.learn.optimizer == "muon":
            rates = self.learn.adamw_rates(is_tied=not shape.is_modern)
            of_adamw = ", ".join(f"{kind} {rate:.3g}" for kind, rate in rates)
            yield f"rates   matrices {self.learn.learning_rate:.3g} by Muon; by AdamW {of_adamw}"

    def _sinks(self, step: int) -> tuple[Sink, ...]:
        config = flatten(self.learner.model.config, self.learn, self.run)
        return tuple(open_sinks(self.run, config, step)) if self.ranks.is_main else ()

    def _length(self) -> str:
        steps, sequences = self.learn.max_iters, self.learn.sequences_per_step
        if steps == ENDLESS:
            return f"{self.learn.hours:g} hours, in as many steps as the measured speed allows"
        tokens = steps * sequences * self.learner.model.config.block_size
        epochs = steps * sequences / self.train_data.blocks_per_epoch
        return f"{steps} steps, {compact(tokens)} tokens, {epochs:.3g} epochs"


def launch(settings: Settings, ranks: Ranks) -> tuple[Launch, Progress] | None:
    """Start a run or continue the one in its folder; None if that is complete."""
    settings = _as_parts_allow(settings, ranks)
    run = settings.run
    share_of_rank(settings.learn, ranks)
    device = describe_device(
        run.device, run.dtype, local_rank=ranks.local_rank, deterministic=run.deterministic
    )
    _check_alike(device, settings.learn, ranks)
    prepare_if_needed(run.data_dir, ranks)
    checkpoints = Checkpoints(Path(run.out_dir), run.keep_checkpoints)
    saved = _find_saved(checkpoints, settings, ranks)
    _check_same_folder(saved, run, ranks)
    settings = settings._replace(learn=checkpoint.with_length(saved, settings.learn))
    model = build_model(settings, saved)
    used = settings._replace(shape=model.config)  # weights may come with another
    train_data, val_data = _open_data(used, device)
    if saved and _is_complete(saved, settings):
        step = saved["iter_num"]
        ranks.say(f"the run is complete at step {step}; extend it with a larger --max_iters")
        return None
    identity = {"train": train_data.bins.identity(), "val": val_data.bins.identity()}
    changes = _changes(saved, run, data=identity, machine=_machine(device, ranks)) if saved else {}
    share_compile_cache()
    fit = find_fit(used, device, ranks)
    engine, ranks = _engine(run, ranks)
    learner = _put_on_device(model, settings.learn, fit, device, ranks, engine)
    launched = Launch(
        settings=settings,
        device=device,
        ranks=ranks,
        checkpoints=checkpoints,
        saver=Saver(checkpoints.save, may_copy=_has_two_memories(device)),
        learner=learner,
        engine=engine,
        train_data=train_data,
        val_data=val_data,
        fit=fit,
        forecast=_forecast(used, device, ranks, len(train_data.bins), fit),
        identity=identity,
        changes=changes,
    )
    return launched, _put_back(saved, launched) if saved else Progress()


def _as_parts_allow(settings: Settings, ranks: Ranks) -> Settings:
    """What needs a whole model is switched off where no process has one."""
    if not settings.run.shard or ranks.world == 1:
        return settings
    ranks.say(
        f"shard   1/{ranks.world} of the model in each process: no trials, so batch_size as it is; "
        "eager, as graphs would end at each part; no samples, which one process writes alone"
    )
    without = replace(settings.run, autofit=False, compile=False, sample_interval=0)
    return settings._replace(run=without)


def _engine(run: RunConfig, ranks: Ranks) -> tuple[Engine, Ranks]:
    """How gradients are added up, by processes that know whether they hold a part or the whole."""
    if not run.shard or ranks.world == 1:
        return engine_for(ranks), ranks
    from nanofit.learning.sharded import Shards  # to load it takes as long as half of torch

    ranks = replace(ranks, holds_part=True)
    return Shards(ranks), ranks


def _is_complete(saved: dict[str, Any], settings: Settings) -> bool:
    """Whether nothing is left to do, and all of it was told."""
    is_over = saved["iter_num"] >= settings.learn.max_iters and not settings.run.eval_only
    return is_over and has_ended(Path(settings.run.out_dir), saved["iter_num"])


def _put_back(saved: dict[str, Any], launched: Launch) -> Progress:
    """Give the learner what it had learned."""
    progress = checkpoint.unpack(saved, *launched.learner)
    before = saved["config"].get("eval_iters", 0) * saved["config"].get("batch_size", 0)
    now = launched.run.eval_iters * launched.learn.batch_size
    if "val" in launched.changes.get(DATA_CHANGED, ()) or before != now:
        progress = replace(progress, best_val_loss=float("inf"))  # on other text it tells nothing
    return progress


def _machine(device: Device, ranks: Ranks) -> dict[str, Any]:
    """What may make a run differ in rounding from others."""
    return {
        "device": device.name,
        "precision": device.precision,
        "processes": ranks.world,
        "torch": str(torch.__version__),
    }


def _has_two_memories(device: Device) -> bool:
    """Whether a copy in the host's memory takes nothing from what the run may use."""
    return device.type != "cpu" or not device.memory().can_run_out()


def _changes(
    saved: dict[str, Any], run: RunConfig, *, data: dict[str, Any], machine: dict[str, Any]
) -> dict[str, dict[str, str]]:
    """What a run goes on with that it had not; other data are refused unless that was said."""
    of_data = checkpoint.changed_data(saved, data)
    if of_data and not run.accept_new_data:
        told = "; ".join(f"{split}: {how}" for split, how in of_data.items())
        raise InputError(
            f"{run.out_dir} holds a run on other data than {run.data_dir} has now ({told}); put "
            "the old back, or go on with the new on purpose by --accept_new_data=True"
        )
    of_machine = checkpoint.changed_machine(saved, machine)
    changes = {DATA_CHANGED: of_data, "machine changed": of_machine}
    return {name: details for name, details in changes.items() if details}


def share_of_rank(learn: TrainConfig, ranks: Ranks) -> int:
    """The sequences of a step that each process has to do."""
    share, rest = divmod(learn.sequences_per_step, ranks.world)
    if rest:
        raise InputError(
            f"{learn.sequences_per_step} sequences per step cannot be shared by {ranks.world} "
            f"processes; make batch_size × gradient_accumulation_steps a multiple of {ranks.world}"
        )
    return share


def build_model(settings: Settings, saved: dict[str, Any] | None = None) -> GPT:
    """The model of a run as it begins, in the host's memory."""
    shape, learn, run = settings
    torch.manual_seed(learn.seed)
    if saved:
        try:
            weights = without_compile_prefix(saved["model"])
            return GPT.for_weights(saved["model_args"], weights, loss=run.loss)
        except ValueError as error:
            raise InputError(
                f"the checkpoint in {run.out_dir} holds no model ({error}); move it away to go on "
                "from another"
            ) from error
    if run.init_from in ("auto", "scratch"):
        return GPT(shape, loss=run.loss)
    model = GPT.from_checkpoint(run.init_from, loss=run.loss, dropout=shape.dropout)
    if shape.is_modern != model.config.is_modern:
        raise InputError(
            f"{run.init_from} holds a model with arch = {model.config.arch!r}, which cannot become "
            f"{shape.arch!r}; use --arch={model.config.arch}"
        )
    if shape.block_size > model.config.block_size:
        raise InputError(
            f"block_size = {shape.block_size}, but {run.init_from} has positions for "
            f"{model.config.block_size} tokens; use --block_size={model.config.block_size}"
        )
    model.crop_block_size(shape.block_size)
    return model


def _check_alike(device: Device, learn: TrainConfig, ranks: Ranks) -> None:
    """Refuse processes that would compute in different precisions, and drift apart."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    used = [device.dtype, *([device.product_dtype] if learn.optimizer == "muon" else [])]
    if not all(ranks.agree(kinds.index(dtype)) for dtype in used):
        raise InputError(
            "the processes' cards differ in the precision they have; give one that all of them "
            "have, such as --dtype=float16, with --optimizer=adamw, or take cards of one generation"
        )


def prepare_if_needed(folder: Path, ranks: Ranks) -> None:
    """Make the bins of a folder where the user only put parquet files."""
    has_bins = (folder / "train.bin").exists() or (folder / "meta.json").exists()
    preparing = None
    if ranks.is_main and not has_bins and any(folder.glob("*.parquet")):
        ranks.say(f"{folder} holds parquet files but no bins; preparing them first")
        words = [sys.executable, PROJECT / "prepare_fineweb.py", folder, "--out", folder]
        preparing = subprocess.Popen(words)
    while ranks.any(preparing is not None and preparing.poll() is None):
        time.sleep(LOOK_S)  # and all hear of each other, so that none is thought to hang
    if preparing is not None and preparing.returncode:
        raise InputError(f"{folder} could not be prepared, for the reason above")


def _find_saved(
    checkpoints: Checkpoints, settings: Settings, ranks: Ranks
) -> dict[str, Any] | None:
    """The checkpoint to continue from; None for a new run."""
    shape, learn, run = settings
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


def _check_same_folder(saved: dict[str, Any] | None, run: RunConfig, ranks: Ranks) -> None:
    if not ranks.agree(saved["iter_num"] if saved else -1):
        raise InputError(
            f"the processes found different checkpoints in {run.out_dir}; it must be a folder "
            "that all machines see"
        )


def _open_data(settings: Settings, device: Device) -> tuple[TrainSequences, ValSequences]:
    shape, learn, run = settings
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


def _put_on_device(
    model: GPT, learn: TrainConfig, fit: Fit, device: Device, ranks: Ranks, engine: Engine
) -> Learner:
    device.enter_thread()
    # What is set up for the first sum must not be missing in the middle of a step.
    ranks.sum_([torch.zeros(1, device=device.torch_device)])
    if fit.limit_bytes is not None:
        device.memory().limit(fit.limit_bytes)
    engine.hold(model, device)
    model.recompute = fit.savers.recompute
    optimizer = build_optimizer(
        model,
        learn,
        bits=fit.savers.optimizer_bits,
        products=device.product_dtype,
        ranks=ranks,
    )
    engine.follow(optimizer)
    return Learner(model, optimizer, device.grad_scaler())


def _forecast(
    settings: Settings, device: Device, ranks: Ranks, unique_tokens: int, fit: Fit
) -> Forecast:
    """What the run will cost and give, as far as that is known before it starts."""
    shape, learn, run = settings
    tokens_per_step = learn.sequences_per_step * shape.block_size
    card = known_card(device.name, device.memory_mib) if device.dtype != torch.float32 else None
    step = step_of(
        shape,
        run.loss,
        micro_batch_size=(fit.compiled or fit.eager).size,
        sequences_per_step=learn.sequences_per_step // ranks.world,
        muon_steps=learn.newton_schulz_steps,
    )
    tokens_per_s = card and ranks.world * predicted_tokens_per_s(card, step, compiled=run.compile)
    steps = learn.max_iters
    if steps == ENDLESS:
        steps = int(learn.hours * 3600 * (tokens_per_s or 0) / tokens_per_step)
    is_new = run.init_from in ("auto", "resume", "scratch")  # what has learned before has no law
    return Forecast(
        parameters=shape.law_parameters,
        steps=steps,
        tokens_per_step=tokens_per_step,
        decay_end=learn.lr_decay_iters if learn.decay_lr else None,
        unique_tokens=unique_tokens,
        tokens_per_s=tokens_per_s,
        watts=card and card.watts * ranks.world,
        recipe=recipe_of(shape.arch, learn.optimizer, shape.vocab_size) if is_new else None,
    )
