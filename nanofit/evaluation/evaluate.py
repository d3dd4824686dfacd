"""Models held to one task: what comes of it for each, and how far each is from the first."""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from model import GPT
from nanofit.data.tokens import open_val
from nanofit.evaluation.corpus import Corpus
from nanofit.evaluation.estimate import Estimate
from nanofit.evaluation.predict import Windows, losses_of
from nanofit.machine.device import Device, describe_device
from nanofit.run.checkpoint import best_checkpoint
from nanofit.settings.config import RunConfig, sound
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, Progress
from nanofit.use.shortage import shortage_in_one_line
from nanofit.weights import read_checkpoint

PRECISIONS = ("float32", "bfloat16", "float16")


class Task(Protocol):
    """What a model is held to."""

    def windows(self, shape: GPTConfig, settings: dict[str, Any]) -> Windows:
        """What a model of a shape, from a run with these settings, is to predict."""

    def estimates(self, windows: Windows, losses: np.ndarray) -> dict[str, Estimate]:
        """What counts, by name."""

    def figures(self, estimates: dict[str, Estimate]) -> dict[str, float]:
        """What follows from it."""

    def described(self) -> dict[str, Any]:
        """The task in plain values."""


@dataclass(frozen=True)
class Subject:
    """A model to evaluate, and what its file tells of the run it is from."""

    name: str  # as given
    path: Path
    step: int | None
    settings: dict[str, Any]

    @classmethod
    def find(cls, name: str) -> "Subject":
        """The model at a path: a run's folder, a checkpoint file, or a Hugging Face folder."""
        path = Path(name)
        if (path / "config.json").exists():
            return cls(name, path, None, {})
        if not path.exists():
            raise InputError(
                f"no model at {name}; give the out_dir of a run, a checkpoint file, or a folder "
                "with config.json and model.safetensors"
            )
        path = best_checkpoint(path) if path.is_dir() else path
        content = read_checkpoint(path)
        return cls(name, path, content.get("iter_num"), sound(content.get("config", {})))

    @property
    def dataset(self) -> Path | None:
        """The folder it was trained on, as far as it tells."""
        dataset = self.settings.get("dataset")
        return dataset and RunConfig(dataset=dataset).data_dir.resolve()


@dataclass(frozen=True)
class Result:
    """What came of a task."""

    subject: Subject
    device: Device
    estimates: dict[str, Estimate]
    figures: dict[str, float]

    def told(self, first: "Result") -> dict[str, Any]:
        """In plain values; how far it is from the first where both were held to the same."""
        told = {
            "model": self.subject.name,
            "checkpoint": str(self.subject.path),
            "step": self.subject.step,
            "device": self.device.name,
            "precision": self.device.precision,
        }
        for name, estimate in self.estimates.items():
            told |= {name: estimate.value, f"{name}_stderr": estimate.error}
            difference = None if self is first else estimate.less(first.estimates[name])
            if difference:
                told[f"{name}_difference"] = difference.value
                told[f"{name}_difference_stderr"] = difference.error
        return told | self.figures


def validation_of(subjects: Sequence[Subject], dataset: str | None, *, as_in_run: bool) -> Corpus:
    """The validation split that the models have in common, or that of another dataset."""
    if dataset is not None:
        folder = RunConfig(dataset=dataset).data_dir
    else:
        folder = _common_dataset(subjects)
    return Corpus.of_bins(open_val(folder), as_in_run=as_in_run)


def _common_dataset(subjects: Sequence[Subject]) -> Path:
    told = {subject.dataset: subject.name for subject in subjects if subject.dataset}
    if not told:
        names = ", ".join(subject.name for subject in subjects)
        raise InputError(f"{names}: no dataset is told there; name one with --dataset=...")
    if len(told) > 1:
        each = ", ".join(f"{name} on {folder}" for folder, name in told.items())
        raise InputError(f"trained on different datasets: {each}; name one for all: --dataset=...")
    ((folder, name),) = told.items()
    if not folder.is_dir():
        raise InputError(
            f"{name} was trained on {folder}, which is not there; name the folder of its dataset "
            "with --dataset=..."
        )
    return folder


def evaluate(
    subjects: Sequence[Subject], task: Task, *, device: str, dtype: str | None
) -> Iterator[Result]:
    """Hold each model to the task; the progress is told on standard error."""
    for subject in subjects:
        described = _device_for(subject, device, dtype)
        with shortage_in_one_line(described, "evaluate with --device=cpu"):
            estimates = _estimates(subject, task, described)
        yield Result(subject, described, estimates, task.figures(estimates))
        gc.collect()
        described.memory().release()  # the next one needs it


def _estimates(subject: Subject, task: Task, device: Device) -> dict[str, Estimate]:
    model = GPT.from_checkpoint(subject.path).to(device.torch_device)
    windows = task.windows(model.config, subject.settings)
    total = int(windows.lengths.sum())
    with Progress(f"evaluating {subject.name}", total, stream=sys.stderr) as progress:
        losses = losses_of(model, windows, device, progress)
    return task.estimates(windows, losses)


def _device_for(subject: Subject, name: str, dtype: str | None) -> Device:
    """Where to compute, and as precisely as the model's run did: on a CPU in float32."""
    found = describe_device(name, dtype or "float32")
    if dtype is None and found.type != "cpu":
        of_run = subject.settings.get("dtype")
        found = describe_device(name, of_run if of_run in PRECISIONS else "auto")
    if found.note:
        print(found.note, file=sys.stderr)
    return found
