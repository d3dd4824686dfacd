"""Checkpoints damaged on the disk: the run falls back to a whole one, says so, and keeps them."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from model import GPT
from nanofit.learning.optim import build_optimizer
from nanofit.run.checkpoint import Checkpoints, Progress, pack
from nanofit.settings.config import flatten, load_config
from nanofit.terminal import InputError
from nanofit.weights import UnreadableCheckpoint, read_checkpoint
from tests import processes
from tests.conftest import TINY_MODEL, read_metrics
from tests.disturb import flip_a_bit

SETTINGS = [*TINY_MODEL, "--n_layer=1", "--n_embd=4"]


@pytest.fixture
def checkpoints(tmp_path):
    """Two of them, of steps 3 and 6."""
    shape, learn, run = load_config([*SETTINGS, f"--out_dir={tmp_path / 'out'}"])
    model, scaler = GPT(shape), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = build_optimizer(model, learn)
    checkpoints = Checkpoints(tmp_path / "out")
    for step in (3, 6):
        content = pack(model, optimizer, scaler, Progress(step), config=flatten(shape, learn, run))
        checkpoints.save(content)
    return checkpoints


def loaded(checkpoints: Checkpoints) -> dict:
    shape, learn, _ = load_config(SETTINGS)
    return checkpoints.load(shape, learn, lambda line: None)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_wherever_a_bit_is_flipped_the_state_is_the_saved_one_or_that_before(checkpoints):
    """In data, in the pickle, in names and sizes of the archive, in its directory."""
    newest = checkpoints.folder / "ckpt-00000006.pt"
    whole, random = newest.read_bytes(), np.random.default_rng(14)
    saved = loaded(checkpoints)["model"]
    places = {*random.integers(0, len(whole), 60), *range(len(whole) - 40, len(whole))}
    found = []
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << random.integers(8)
        newest.write_bytes(damaged)
        content = loaded(checkpoints)
        found.append(content["iter_num"])
        assert all(torch.equal(content["model"][name], saved[name]) for name in saved)
        assert (content["iter_num"], content["best_val_loss"]) in ((6, np.inf), (3, np.inf))
    assert found.count(3) > found.count(6)


def test_one_bit_of_a_weight_is_told_by_every_reader(checkpoints):
    """torch loads it, as it looks at no checksum."""
    newest = checkpoints.folder / "ckpt-00000006.pt"
    whole = torch.load(newest, weights_only=True)["model"]
    name = "transformer.wpe.weight"
    flip_a_bit(newest, 8 * newest.read_bytes().index(whole[name].numpy().tobytes()) + 3)
    damaged = torch.load(newest, weights_only=True)["model"]
    assert [one for one in whole if not torch.equal(damaged[one], whole[one])] == [name]
    for mmap in (True, False):
        with pytest.raises(UnreadableCheckpoint, match="is damaged"):
            read_checkpoint(newest, mmap=mmap)
    words = [f"--checkpoint={newest}", "--max_new_tokens=1", "--device=cpu"]
    done = processes.run_script("sample.py", *words, cwd=checkpoints.folder)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith(f"error: {newest} is not a readable checkpoint (it is damaged: ")


@pytest.mark.parametrize("left", [0, 1, 22, 0.5, 0.999])
def test_however_short_a_checkpoint_was_cut_the_one_before_is_taken(checkpoints, left):
    newest = checkpoints.folder / "ckpt-00000006.pt"
    size = newest.stat().st_size
    os.truncate(newest, left if isinstance(left, int) else int(left * size))
    assert loaded(checkpoints)["iter_num"] == 3
    checkpoints.prepare_folder(3)
    assert {path.name for path in checkpoints.folder.glob("*.pt")} == {
        "ckpt-00000003.pt",
        "damaged-ckpt-00000006.pt",
    }


def test_damaged_ones_are_kept_aside_under_names_of_their_own(tiny_run, tmp_path):
    out = tmp_path / "out"
    flags = ["--save_interval=3", "--keep_checkpoints=2"]
    assert tiny_run(*flags).returncode == 0
    losses = read_metrics(out, "step", "loss")
    (out / "ckpt-best.pt").unlink()
    kept = {}
    for name in ("damaged-ckpt-00000012.pt", "damaged-2-ckpt-00000012.pt"):
        content = bytearray((out / "ckpt-00000012.pt").read_bytes())
        content[len(content) // 2] ^= len(kept) + 1
        (out / "ckpt-00000012.pt").write_bytes(content)
        kept[name] = bytes(content)
        (out / "ckpt-00000013.pt.tmp").write_bytes(b"half")  # as a kill leaves it
        (out / "ckpt-best.pt").unlink(missing_ok=True)
        done = tiny_run(*flags)
        assert done.returncode == 0, done.stderr
        assert f"{out}/ckpt-00000012.pt is damaged, and will be kept aside" in done.stdout
        assert "step 9   resumed" in done.stdout
        assert {name: files(out)[name] for name in kept} == kept
    assert not list(out.glob("*.tmp"))
    assert read_metrics(out, "step", "loss") == losses
    assert sorted(path.name for path in out.glob("ckpt-0*")) == [
        "ckpt-00000009.pt",
        "ckpt-00000012.pt",
    ]


def test_where_all_are_damaged_nothing_is_touched(checkpoints, tiny_run, tmp_path):
    for path in checkpoints.newest_first():
        path.write_bytes(bytes(path.stat().st_size))
    before = files(checkpoints.folder)
    with pytest.raises(InputError, match=r"no readable checkpoint in .*; start in another"):
        loaded(checkpoints)
    done = tiny_run(out_dir=checkpoints.folder)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no readable checkpoint")
    assert files(checkpoints.folder) == before
