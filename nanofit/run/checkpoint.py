"""Save and restore a run, atomically.

A run's folder holds its newest checkpoints (`ckpt-00002000.pt`), the best by validation loss
(`ckpt-best.pt`) and, with a WSD schedule, the last one before the decay (`ckpt-stable.pt`), from
which the run can be extended. The keys are nanoGPT's and a few more.
"""

import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import GPT
from nanofit.files import atomic_write, link_or_copy, without_links
from nanofit.learning.optim import lr_at, same_lr_until
from nanofit.machine.memory import is_out_of_memory
from nanofit.settings.config import (
    ENDLESS,
    WITH_MODERN,
    WITH_MUON,
    TrainConfig,
    flatten,
    sound,
)
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, first_line
from nanofit.weights import (
    UnreadableCheckpoint,
    is_stored,
    read_checkpoint,
    without_compile_prefix,
)

FORMAT = 1
# A run may be extended, and its sequences per step be cut into other micro-batches.
_MAY_CHANGE = {"max_iters", "lr_decay_iters", "batch_size", "gradient_accumulation_steps"}
_KINDS = {  # of what a run goes on from; what may be missing is younger than the first checkpoints
    "format": int | None,
    "best_val_loss": float,
    "seconds": float,
    "rollbacks": tuple | list | None,
    "recent_losses": tuple | list | None,
    "stage": str | None,
    "compile_at": int | None,
    "data": dict | None,
    "machine": dict | None,
    "scaler": dict | None,
}
BEST, STABLE = "ckpt-best.pt", "ckpt-stable.pt"


@dataclass(frozen=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    best_val_loss: float = float("inf")
    seconds: float = 0.0
    rollbacks: tuple[tuple[int, int], ...] = ()  # (step gone back to, steps of data left out)
    recent_losses: tuple[float, ...] = ()  # that tell what would be a jump
    stage: str = "eager"  # of the step before, as in nanofit/run/stages.py
    compile_at: int | None = None  # the step of the next try, if one was put off

    @property
    def data_step(self) -> int:
        """The step whose sequences come next: what once made the run diverge is left out."""
        return self.step + sum(left_out for _, left_out in self.rollbacks)


class Checkpoints:
    """The checkpoints in a run's folder."""

    def __init__(self, folder: Path, keep: int = 3):
        self.folder, self.keep = folder, keep
        self._damaged: list[Path] = []  # of those that were read

    def newest_first(self) -> list[Path]:
        """The numbered checkpoints."""
        found = self.folder.glob("ckpt-*.pt")
        return sorted((path for path in found if _step_of(path) is not None), reverse=True)

    def exist(self) -> bool:
        return bool(self._candidates())

    def prepare_folder(self, step: int) -> None:
        """Make ready to save what follows `step`, before any work is done.

        Newer checkpoints than that are of a schedule given up: they are renamed, as damaged ones.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.folder / "metrics.jsonl", "a", opener=without_links):
                pass
            for half_written in self.folder.glob("ckpt-*.pt.tmp"):  # when a run was killed
                half_written.unlink()
            self.set_damaged_aside()
            best = self.folder / BEST
            later = [path for path in self.newest_first() if _step_of(path) > step]
            if best.exists() and _step_within(best) > step:
                later.append(best)
            for path in later:
                _rename(path, "aside")
        except OSError as error:
            raise InputError(
                f"cannot write to out_dir {self.folder} ({error.strerror}); use another --out_dir"
            ) from None

    def set_damaged_aside(self) -> None:
        """Rename what `load` could not read: perhaps somebody can. Nothing takes its place."""
        for path in self._damaged:
            with suppress(FileNotFoundError):
                _rename(path, "damaged")
        self._damaged = []

    def save(self, content: dict[str, Any], name: str | None = None) -> Path:
        """Write a checkpoint, whole or not at all, then drop the oldest beyond `keep`.

        A named one is a numbered one as well: a run that saves only its best can be continued.
        """
        numbered = self.folder / f"ckpt-{content['iter_num']:08d}.pt"
        path = self.folder / name if name else numbered
        self.folder.mkdir(parents=True, exist_ok=True)  # should somebody have removed it
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            torch.save(content, file)
        if not numbered.exists():
            link_or_copy(path, numbered)
        for old in self.newest_first()[self.keep :]:
            old.unlink()
        return path

    def load(
        self, shape: GPTConfig, learn: TrainConfig, say: Callable[[str], None]
    ) -> dict[str, Any]:
        """The checkpoint to continue from: the newest that is whole.

        If a WSD schedule was extended after its decay had begun, the newest from before the decay.
        """
        newest = None
        for path in self._candidates():
            content = _read_whole(path)
            if content is None:
                say(f"{path} is damaged, and will be kept aside; trying the one before it")
                self._damaged.append(path)
                continue
            newest = newest or content
            learn = with_length(newest, learn)
            _check_same_run(newest, shape, learn)
            if same_lr_until(content["iter_num"], _learned(content), learn):
                if content is not newest:
                    say(f"the schedule was extended: going on from {path}, before its decay")
                return content
            if learn.lr_schedule != "wsd":
                break
        if newest is None:
            raise InputError(f"no readable checkpoint in {self.folder}; start in another --out_dir")
        _warn_of_lr_jump(newest, learn, say)
        return newest

    def _candidates(self) -> list[Path]:
        named = (self.folder / name for name in (STABLE, BEST))
        return [*self.newest_first(), *(path for path in named if path.exists())]


def best_checkpoint(folder: Path) -> Path:
    """The checkpoint of a run that is worth most: its best, else its newest, else nanoGPT's."""
    if folder.is_file():
        raise InputError(f"{folder} is a file, no run's folder; give it as --checkpoint={folder}")
    for path in (folder / BEST, *Checkpoints(folder).newest_first(), folder / "ckpt.pt"):
        if path.exists():
            return path
    raise InputError(f"no checkpoint in {folder}; train first, or give a checkpoint file itself")


def _is_plain(path: Path) -> bool:
    """Whether it may be a checkpoint; a flipped bit may make it packed, or encrypted."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror})") from error
    try:
        with file, zipfile.ZipFile(file) as archive:
            return is_stored(archive)
    except MemoryError:
        raise
    except Exception:  # or it begins before the file does
        return False


def pack(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    progress: Progress,
    *,
    config: dict[str, Any],
    data: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
    fit: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything needed to go on, or to sample, as plain containers and tensors."""
    sequences_per_step = config["batch_size"] * config["gradient_accumulation_steps"]
    return {
        "format": FORMAT,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "model_args": flatten(model.config),
        "config": config,
        "data": data,  # by what the bins can be told from others
        "machine": machine,
        "fit": fit,  # what the machine was found to bear; the next one is asked anew
        "iter_num": progress.step,
        "sequences_seen": progress.step * sequences_per_step,
        "best_val_loss": progress.best_val_loss,
        "seconds": progress.seconds,
        "rollbacks": progress.rollbacks,
        "recent_losses": progress.recent_losses,
        "stage": progress.stage,
        "compile_at": progress.compile_at,
        "tokenizer": "gpt2",
        "torch": str(torch.__version__),
    }


def unpack(
    content: dict[str, Any],
    model: GPT,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> Progress:
    """Put a checkpoint's state back into place."""
    try:
        model.load_state_dict(without_compile_prefix(content["model"]))
        optimizer.load_state_dict(content["optimizer"])
        _check_moments(optimizer)
        if scaler.is_enabled() and content["scaler"]:  # empty if it was saved by a bfloat16 run
            scaler.load_state_dict(content["scaler"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"the checkpoint of step {content['iter_num']} does not fit its run "
            f"({type(error).__name__}: {first_line(error)}); move it away to go on from another"
        ) from error
    return Progress(
        step=content["iter_num"],
        best_val_loss=content["best_val_loss"],
        seconds=content["seconds"],
        rollbacks=content.get("rollbacks") or (),
        recent_losses=content.get("recent_losses") or (),
        stage=content.get("stage") or "eager",
        compile_at=content.get("compile_at"),
    )


def _check_moments(optimizer: torch.optim.Optimizer) -> None:
    for weight, moments in optimizer.state.items():
        for name, moment in moments.items():
            if isinstance(moment, Tensor) and moment.dim() and moment.shape != weight.shape:
                raise ValueError(f"{name} of a weight {tuple(weight.shape)} has another shape")


def changed_data(content: dict[str, Any], data: dict[str, Any]) -> dict[str, str]:
    """In which splits a run would go on with other tokens than it had, and what tells them apart.

    A checkpoint that is older than such marks tells nothing.
    """
    changed = {}
    for split, now in data.items():
        was = (content.get("data") or {}).get(split)
        if was is None:
            continue
        if was["tokens"] != now["tokens"]:
            changed[split] = f"{now['tokens']:,} tokens instead of {was['tokens']:,}"
        elif was["sample"] != now["sample"] or _differ(was["digests"], now["digests"]):
            changed[split] = "as many tokens, but other ones"
    return changed


def changed_machine(content: dict[str, Any], machine: dict[str, Any]) -> dict[str, str]:
    """What a run goes on with that it did not have; that may change, but explains rounding."""
    was = content.get("machine") or {}
    return {
        name: f"{now}, before {was[name]}"
        for name, now in machine.items()
        if name in was and was[name] != now
    }


def _differ(one: list[str] | None, other: list[str] | None) -> bool:
    return one is not None and other is not None and one != other


def with_length(content: dict[str, Any] | None, learn: TrainConfig) -> TrainConfig:
    """The settings of a run in `hours` with the length that its speed once fixed, if it has."""
    if learn.hours is None:
        return learn
    config = content["config"] if content else {}
    fixed = {"max_iters": ENDLESS, "lr_decay_iters": None}
    if learn.hours == config.get("hours"):
        fixed |= {name: config[name] for name in ("max_iters", "warmup_iters")}
    return replace(learn, **fixed)


def _check_same_run(content: dict[str, Any], shape: GPTConfig, learn: TrainConfig) -> None:
    """Refuse to continue a run with another shape or recipe than it was begun with."""
    if (content.get("format") or FORMAT) > FORMAT:
        raise InputError(
            f"{content['config']['out_dir']} was saved by a newer version; update first"
        )
    # What a checkpoint does not tell is younger than it is: the run had what is now the default.
    before, now = flatten(GPTConfig(), TrainConfig()) | content["config"], flatten(shape, learn)
    if learn.hours is None:
        del now["hours"]  # its length may be given in steps from now on
    names = {name for name in now.keys() - _MAY_CHANGE if before[name] != now[name]}
    for choice, suited in (("optimizer", WITH_MUON), ("arch", WITH_MODERN)):
        if choice in names:  # else what it brings along would hide it
            names -= suited.keys()
    differing = [f"{name} = {before[name]} (now {now[name]})" for name in now if name in names]
    sequences = _learned(content).sequences_per_step
    if sequences != learn.sequences_per_step:
        differing.append(f"{sequences} sequences per step (now {learn.sequences_per_step})")
    if differing:
        raise InputError(
            f"{before['out_dir']} holds a run with {', '.join(differing)}; "
            "use the same settings to continue it, or another --out_dir"
        )


def _step_of(path: Path) -> int | None:
    match = re.fullmatch(r"ckpt-(\d{8,})\.pt", path.name)
    return int(match[1]) if match else None


def _learned(content: dict[str, Any]) -> TrainConfig:
    saved = content["config"]
    return TrainConfig(**{f.name: saved[f.name] for f in fields(TrainConfig) if f.name in saved})


def _step_within(path: Path) -> float:
    """The step a checkpoint was saved at; a damaged one counts as too late."""
    try:
        return read_checkpoint(path)["iter_num"]
    except InputError:
        return float("inf")


def _read_whole(path: Path) -> dict[str, Any] | None:
    """A checkpoint's content; None if the file is damaged."""
    if not _is_plain(path):
        return None
    try:
        content = read_checkpoint(path, mmap=False)
    except UnreadableCheckpoint as error:  # by damage where no checksum looks
        if is_out_of_memory(error.__cause__):
            raise
        return None
    if not {"config", "optimizer", "iter_num"} <= content.keys():
        raise InputError(f"{path} is no checkpoint of ours; start from it with --init_from={path}")
    if wrong := next(_impossible(content), None):
        raise InputError(
            f"{path} is no checkpoint of ours: {wrong}; move it away to go on from another"
        )
    return content


def _impossible(content: dict[str, Any]) -> Iterator[str]:
    """What no run can have saved, so that whatever relies on it may do so."""
    config, fixed = content["config"], flatten(GPTConfig(), TrainConfig())
    told = {name: value for name, value in config.items() if name in fixed}
    yield from (f"its {name} is none" for name in told.keys() - sound(told).keys())
    if not isinstance(config.get("out_dir"), str):
        yield "it has no out_dir"
    for name, kinds in _KINDS.items():
        if not isinstance(content.get(name), kinds):
            yield f"its {name} is a {type(content.get(name)).__name__}"
    if not (content["iter_num"] >= 0 and 0 <= content["seconds"] < float("inf")):
        yield "its iter_num or its seconds are out of bounds"
    yield from _learned(content).problems()
    if not all(_is_rollback(one) for one in content.get("rollbacks") or ()):
        yield "its rollbacks are none"
    if not all(isinstance(loss, float) for loss in content.get("recent_losses") or ()):
        yield "its recent losses are none"
    if not all(map(_is_identity, (content.get("data") or {}).values())):
        yield "its data cannot be told from others"


def _is_rollback(one: Any) -> bool:
    """A step, and a number of steps that were left out after it."""
    is_pair = isinstance(one, tuple | list) and len(one) == 2
    return is_pair and all(isinstance(number, int) and number >= 0 for number in one)


def _is_identity(one: Any) -> bool:
    """As Bins.identity tells it."""
    is_whole = isinstance(one, dict) and {"tokens", "sample", "digests"} <= one.keys()
    return is_whole and isinstance(one["tokens"], int)


def _rename(path: Path, why: str) -> None:
    """Give a checkpoint a name that says why it is left out, and that no other has."""
    number, free = 1, path.with_name(f"{why}-{path.name}")
    while free.exists():
        number += 1
        free = path.with_name(f"{why}-{number}-{path.name}")
    path.rename(free)


def _warn_of_lr_jump(
    content: dict[str, Any], learn: TrainConfig, say: Callable[[str], None]
) -> None:
    step = content["iter_num"]
    say(
        f"the schedule was changed: at step {step} the learning rate goes from "
        f"{lr_at(step - 1, _learned(content)):.3g} to {lr_at(step, learn):.3g}; "
        "a run with lr_schedule = 'wsd' can be extended without such a jump"
    )
