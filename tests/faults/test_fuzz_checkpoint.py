"""The reader of checkpoints: any content, and any file, is a run's or bad input."""

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given

from model import GPT
from nanofit.learning.optim import build_optimizer
from nanofit.run.checkpoint import Checkpoints, Progress, pack, unpack
from nanofit.run.launch import build_model
from nanofit.settings.config import RunConfig, Settings, TrainConfig, flatten
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError
from tests.fuzz import fuzzed
from tests.hostile import bounded
from tests.mutations import NASTY_VALUES, changed, damaged

SHAPE = GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=8)
LEARN = TrainConfig(batch_size=2, gradient_accumulation_steps=1)
SETTINGS = Settings(SHAPE, LEARN, RunConfig())
PIECES = [b"\0", b"\xff", b"PK\x01\x02", b"PK\x05\x06", b"ctorch\nFloatStorage\n", b"(", b"t", b"R"]
TENSORS = [torch.zeros(3, 3), torch.zeros(()), torch.zeros(8, 4, dtype=torch.int64)]


def learner(model: GPT):
    return model, build_optimizer(model, LEARN), torch.amp.GradScaler(enabled=False)


def of_a_run() -> dict:
    torch.manual_seed(1)
    model, optimizer, scaler = learner(GPT(SHAPE))
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()
    optimizer.step()
    data = {"train": {"tokens": 5, "sample": "0", "digests": None}}
    progress = Progress(step=5, best_val_loss=3.0, seconds=1.0, rollbacks=((3, 2),))
    packed = pack(model, optimizer, scaler, progress, config=flatten(*SETTINGS), data=data)
    return packed | {"model": dict(packed["model"]), "machine": {"device": "CPU"}}


CONTENT = of_a_run()


def continued_or_refused(path: Path) -> Progress | None:
    """Read as a resumed run does."""
    with bounded():
        try:
            found = Checkpoints(path.parent).load(SHAPE, LEARN, say=lambda text: None)
            return unpack(found, *learner(build_model(SETTINGS, found)))
        except InputError as refused:
            assert str(refused)
            return None


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("fuzzed") / "ckpt-00000005.pt"


@fuzzed
@given(content=changed(CONTENT, [*NASTY_VALUES, *TENSORS]))
def test_any_content_is_a_runs_or_bad_input(content, path):
    torch.save(content, path)
    continued_or_refused(path)


def as_bytes() -> bytes:
    file = io.BytesIO()
    torch.save({"model": CONTENT["model"], "model_args": CONTENT["model_args"]}, file)
    return file.getvalue()


@fuzzed
@given(content=damaged(as_bytes(), PIECES))
def test_any_bytes_are_a_checkpoint_or_bad_input(content, path):
    path.write_bytes(content)
    with bounded():
        try:
            assert GPT.from_checkpoint(path).config == SHAPE
        except InputError as refused:
            assert str(refused)


def test_what_is_changed_was_valid(path):
    torch.save(CONTENT, path)
    progress = continued_or_refused(path)
    assert (progress.step, progress.rollbacks) == (5, ((3, 2),))
