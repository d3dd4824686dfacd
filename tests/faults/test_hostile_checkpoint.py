"""A checkpoint made to do harm: nothing in it runs, and it takes neither memory nor time."""

import os
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from model import GPT
from nanofit.evaluation.evaluate import Subject
from nanofit.run.checkpoint import Checkpoints
from nanofit.run.launch import build_model
from nanofit.settings.config import RunConfig, Settings, TrainConfig, flatten
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError
from tests.conftest import run_tiny
from tests.hostile import Calls, bounded, rewrite
from tests.processes import run_script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=64)
LEARN = TrainConfig()
TRACE = "run-by-a-checkpoint"


def content(**changes: Any) -> dict[str, Any]:
    """What a run of no steps would save."""
    return {
        "format": 1,
        "model": GPT(SHAPE).state_dict(),
        "optimizer": {"state": {}, "param_groups": []},
        "scaler": {},
        "model_args": flatten(SHAPE),
        "config": flatten(SHAPE, LEARN, RunConfig()),
        "iter_num": 5,
        "sequences_seen": 2400,
        "best_val_loss": 3.0,
        "seconds": 1.0,
        "rollbacks": (),
        "stage": "eager",
        "compile_at": None,
    } | changes


def saved(folder: Path, **changes: Any) -> Path:
    path = folder / "ckpt-00000005.pt"
    torch.save(content(**changes), path)
    return path


def read_by_all(path: Path) -> None:
    """Read it as sample, evaluate, export and a resumed run do; InputError from the first one."""
    GPT.from_checkpoint(path)
    Subject.find(str(path)).dataset  # noqa: B018
    found = Checkpoints(path.parent).load(SHAPE, LEARN, say=lambda text: None)
    build_model(Settings(SHAPE, LEARN, RunConfig()), found)


def tensor(size: tuple, stride: tuple, offset: int = 0, kept: int = 16) -> Calls:
    """A tensor that tells such a size of a storage of a few numbers."""
    storage = torch.zeros(kept)._typed_storage()
    told = (storage, offset, size, stride, False, OrderedDict())
    return Calls(torch._utils._rebuild_tensor_v2, *told)


def with_weight(name: str, weight: Any) -> dict[str, Any]:
    return {"model": {**GPT(SHAPE).state_dict(), name: weight}}


def with_shape(**values: Any) -> dict[str, Any]:
    return {"model_args": flatten(SHAPE) | values}


def with_setting(name: str, value: Any) -> dict[str, Any]:
    return {"config": flatten(SHAPE, LEARN, RunConfig()) | {name: value}}


def nested(depth: int) -> list:
    """Few objects, each of which holds the one before twice: 2 ** depth values to look at."""
    one: list = ["x"]
    for _ in range(depth):
        one = [one, one]
    return one


def endless() -> list:
    one: list = []
    one.append(one)
    return one


HOSTILE: dict[str, dict[str, Any]] = {
    "runs a command": {"more": Calls(os.system, f"touch {TRACE}")},
    "runs python": {"more": Calls(exec, f"open({TRACE!r}, 'w')")},
    "runs it as a setting": with_setting("out_dir", Calls(os.system, f"touch {TRACE}")),
    "takes memory": {"more": Calls(bytearray, 2**40)},
    "takes memory as a storage": {"more": Calls(torch.FloatStorage, 2**40)},
    "takes memory as a tensor": {"more": Calls(torch.Tensor, 2**40)},
    "nested twice in itself": {"more": nested(60)},
    "nested in itself": {"more": endless()},
    "nested twice in a setting": with_setting("out_dir", nested(60)),
    "absurd size": with_weight("lm_head.weight", tensor((2**40, 2**20), (2**20, 1))),
    "absurd size that wraps": with_weight("lm_head.weight", tensor((2**31, 2**31), (0, 0))),
    "absurd stride": with_weight("lm_head.weight", tensor((64, 16), (2**50, 1))),
    "absurd offset": with_weight("lm_head.weight", tensor((64, 16), (16, 1), 2**50)),
    "negative offset": with_weight("lm_head.weight", tensor((4, 4), (4, 1), -(2**40))),
    "repeats one number": with_weight("lm_head.weight", tensor((2**30, 2**30), (0, 0))),
    "weight is no tensor": with_weight("lm_head.weight", "x"),
    "weight of another shape": with_weight("lm_head.weight", torch.zeros(3, 3)),
    "weight too many": with_weight("another.weight", torch.zeros(3, 3)),
    "no weights": {"model": {}},
    "weights are a list": {"model": [1, 2]},
    "shape is a text": {"model_args": "n_layer=2"},
    "shape with more": with_shape(rope=True),
    "shape with a setting": with_shape(max_iters=5),
    "shape without limits": with_shape(n_layer=10**9),
    "shape too wide": with_shape(n_embd=2**40, n_head=1),
    "shape of endless blocks": with_shape(block_size=2**60),
    "modern of endless blocks": with_shape(block_size=2**60, arch="modern"),
    "shape below zero": with_shape(n_layer=-1),
    "shape of a text": with_shape(n_layer="2"),
    "shape of a tensor": with_shape(arch=torch.zeros(3)),
    "shape of an unknown kind": with_shape(arch="x"),
    "number without end": {"iter_num": 10**5000},
    "config is a list": {"config": [1]},
    "setting of another kind": with_setting("max_iters", "5"),
    "setting below zero": with_setting("max_iters", -5),
    "setting of a tensor": with_setting("lr_schedule", torch.zeros(3)),
    "out_dir is a number": with_setting("out_dir", 5),
    "iter_num is a text": {"iter_num": "5"},
    "iter_num below zero": {"iter_num": -5},
    "seconds are none": {"seconds": float("nan")},
    "best loss is a text": {"best_val_loss": "x"},
    "rollbacks of a text": {"rollbacks": ("x",)},
    "rollbacks of one": {"rollbacks": (1,)},
    "format is a text": {"format": "1"},
    "stage is a list": {"stage": ["x"]},
    "compile_at is a text": {"compile_at": "x"},
    "data is a list": {"data": [5]},
    "data of a split is a text": {"data": {"train": "x"}},
    "machine is a text": {"machine": "x"},
    "scaler is a text": {"scaler": "x"},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_checkpoint_is_refused_in_a_line(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = saved(tmp_path, **HOSTILE[kind])
    with bounded(), pytest.raises(InputError) as refused:
        read_by_all(path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
    assert not (tmp_path / TRACE).exists()


def test_what_they_differ_from_is_read(tmp_path):
    with bounded():
        read_by_all(saved(tmp_path))


def describe_at_length(name: str, entry: bytes) -> bytes:
    return entry[:2] + b"N0" * 2**23 + entry[2:] if name.endswith("data.pkl") else entry


def claim_more(name: str, entry: bytes) -> bytes:
    """A storage of 64 × 16 numbers says that it has 2**40."""
    told, absurd = b"M\x00\x04tq", b"\x8a\x06" + (2**40).to_bytes(6, "little") + b"tq"
    assert not name.endswith("data.pkl") or told in entry
    return entry.replace(told, absurd) if name.endswith("data.pkl") else entry


@pytest.mark.parametrize("change", [describe_at_length, claim_more])
def test_an_archive_that_claims_more_than_it_is_is_refused(change, tmp_path):
    path = saved(tmp_path)
    rewrite(path, change)
    with bounded(), pytest.raises(InputError, match=r"no(t a)? readable checkpoint"):
        read_by_all(path)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = saved(tmp_path)
    rewrite(path, lambda name, entry: entry, compression=zipfile.ZIP_DEFLATED)
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("ckpt-00000005/data/99", "w", force_zip64=True) as entry,
    ):
        for _ in range(2**5):  # 0.5 GiB
            entry.write(bytes(2**24))
    assert path.stat().st_size < 2**21
    with bounded(2**28), pytest.raises(InputError, match="unpack to more than it is"):
        read_by_all(path)
    with pytest.raises(InputError, match="no readable checkpoint"):
        Checkpoints(tmp_path).load(SHAPE, LEARN, say=lambda text: None)


def flags_of(archive: bytes, name: bytes) -> int:
    """Where the directory at an archive's end has the flags of an entry: 46 bytes before a name."""
    return archive.rindex(name) - 46 + 8


@pytest.mark.parametrize("field", [0, 2])
def test_a_bit_that_makes_an_archive_encrypted_or_packed_is_damage(field, tmp_path):
    path = saved(tmp_path)
    archive = bytearray(path.read_bytes())
    archive[flags_of(bytes(archive), b"ckpt-00000005/data/0") + field] ^= 1
    path.write_bytes(archive)
    torch.save(content(iter_num=4), path.with_name("ckpt-00000004.pt"))
    told: list[str] = []
    found = Checkpoints(tmp_path).load(SHAPE, LEARN, say=told.append)
    assert found["iter_num"] == 4
    assert told == [f"{path} is damaged, and will be kept aside; trying the one before it"]


@pytest.mark.parametrize("script", ["train", "resume", "sample", "evaluate", "export"])
def test_no_script_runs_what_a_checkpoint_holds(script, tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    monkeypatch.chdir(tmp_path)
    path = saved(tmp_path, more=Calls(os.system, f"touch {tmp_path / TRACE}"))
    if script == "train":
        done = run_tiny(tiny_dataset, f"--init_from={path}", out_dir=tmp_path / "out")
    elif script == "resume":
        done = run_tiny(tiny_dataset, out_dir=tmp_path)
    else:
        words = [f"--out_dir={tmp_path}"] if script == "sample" else [str(tmp_path)]
        words += ["hf"] if script == "export" else []
        done = run_script(f"{script}.py", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "it names posix.system" in done.stderr
    assert not (tmp_path / TRACE).exists()
