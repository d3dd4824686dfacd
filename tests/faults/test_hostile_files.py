"""Settings, datasets, Hugging Face folders and records made to do harm, read by every script."""

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model import GPT
from nanofit.data import tokenizer
from nanofit.data.dataset import read_meta
from nanofit.data.tokens import open_bins
from nanofit.report.history import LONGEST_SAMPLE, read_history
from nanofit.run.metrics import Log, has_ended
from nanofit.settings.config import load_config
from nanofit.terminal import InputError
from tests.conftest import run_tiny
from tests.hostile import GIB, Calls, bounded
from tests.processes import run_script
from tests.report.stories import launch, sample, step, write

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
TRACE = "run-by-a-file"


def huge(path: Path, begins: bytes = b"") -> Path:
    """A file of a GiB that takes no room on the disk."""
    path.write_bytes(begins)
    os.truncate(path, GIB)
    return path


# settings

CONFIGS = {
    "runs python": f"exec(\"open('{TRACE}', 'w')\")",
    "runs it as a value": f"out_dir = __import__('os').system('touch {TRACE}')",
    "runs it in a text": f"out_dir = f\"{{open('{TRACE}', 'w')}}\"",
    "runs it as a decorator": f"@print\ndef f(): open('{TRACE}', 'w')",
    "power tower": "max_iters = 9**9**9**9",
    "long number": "max_iters = " + "9" * 200_000,
    "long digits to divide": "max_iters = 10**64 // 10**63",
    "deep brackets": "max_iters = " + "(" * 5000 + "1" + ")" * 5000,
    "deep signs": "max_iters = " + "-" * 50_000 + "1",
    "deep sums": "max_iters = " + "+".join("1" for _ in range(50_000)),
    "deep texts": "out_dir = f'{" * 100,
    "doubled text": "_a = 'x' * 9\n" + "_a = 'xxxxxxxxxx'\n" + "_a = _a + _a\n" * 64,
    "doubled text at once": "_a = '" + "x" * 9000 + "'\nout_dir = f'" + "{_a}" * 900 + "'",
    "wide format": "out_dir = f'{1:{10**9}}'",
    "wide format of a float": "out_dir = f'{1.0:.{99}f}' + f'{1.0:999999999}'",
    "more problems than lines on a screen": "x\n" * 10_000,
    "size without end": f"memory_limit = '{'9' * 400}'",
    "zero byte": "max_iters = 1\0",
    "no text": "\udcff\udcfe",
    "absurd shape": "n_layer = 10**9\nn_embd = 10**9\nblock_size = 10**12",
    "absurd step": "batch_size = 10**9\ngradient_accumulation_steps = 10**9",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hostile_config_is_refused_and_not_run(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile.py"
    path.write_bytes(CONFIGS[kind].encode(errors="surrogateescape"))
    with bounded(), pytest.raises(InputError) as refused:
        load_config([str(path)])
    assert len(str(refused.value)) < 10_000
    assert not (tmp_path / TRACE).exists()


@pytest.mark.parametrize("begins", [b"", b"max_iters = 1\n#", b"x = '"])
def test_a_config_of_a_gibibyte_is_refused_unread(begins, tmp_path):
    with bounded(GIB // 4), pytest.raises(InputError, match="as no such file has"):
        load_config([str(huge(tmp_path / "huge.py", begins))])


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("train.py", []),
        ("plan.py", ["--gpu=RTX 4070"]),
        ("autofit.py", ["--explain", "--gpu=RTX 4070"]),
        ("prepare_fineweb.py", ["x.parquet", "--config"]),
    ],
)
def test_no_script_runs_a_config(script, words, tmp_path):
    path = tmp_path / "hostile.py"
    path.write_text(f"exec(\"open('{tmp_path / TRACE}', 'w')\")")
    done = run_script(script, *words, str(path), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {path}:1: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / TRACE).exists()


# datasets


@pytest.fixture
def dataset(tmp_path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "val"):
        np.arange(100, dtype=np.uint16).tofile(folder / f"{split}.bin")
    return folder


def meta_of(file: Any = "train.bin", tokens: Any = 100, **more: Any) -> dict[str, Any]:
    train = {"bins": [{"file": file, "tokens": tokens}], "text_bytes": 100}
    val = {"bins": [{"file": "val.bin", "tokens": 100}]}
    return {"vocab_size": 100, "splits": {"train": train, "val": val}} | more


METAS = {
    "another kind of file": meta_of("/etc/passwd"),
    "another kind of file, from here": meta_of("../../../../etc/passwd"),
    "absolute": meta_of("/tmp/train.bin"),
    "a device": meta_of("zero.bin", 0),
    "a pipe": meta_of("pipe.bin"),
    "a folder": meta_of("folder.bin"),
    "a name that is none": meta_of("\0.bin"),
    "a name without end": meta_of("x" * 5000 + ".bin"),
    "absurd tokens": meta_of(tokens=10**30),
    "endless tokens": meta_of(tokens=float("inf")),
    "tokens below zero": meta_of(tokens=-100),
    "absurd vocabulary": meta_of(vocab_size=10**30),
    "endless vocabulary": meta_of(vocab_size=float("inf")),
}


@pytest.mark.parametrize("kind", METAS)
def test_a_hostile_meta_is_refused(kind, dataset):
    (dataset / "zero.bin").symlink_to("/dev/zero")
    (dataset / "folder.bin").mkdir()
    os.mkfifo(dataset / "pipe.bin")
    (dataset / "meta.json").write_text(json.dumps(METAS[kind]))
    with bounded(), pytest.raises(InputError) as refused:
        open_bins(dataset, block_size=16, vocab_size=100)
    assert "\n" not in str(refused.value)
    assert read_meta(dataset) is None


@pytest.mark.parametrize("begins", [b"", b"[" * 10**6, b'{"splits":' * 10**5])
def test_a_meta_of_a_gibibyte_or_without_a_bottom_is_refused(begins, dataset):
    huge(dataset / "meta.json", begins)
    for end in (GIB, len(begins)):
        os.truncate(dataset / "meta.json", end)
        with bounded(GIB // 4), pytest.raises(InputError, match="is damaged"):
            open_bins(dataset, block_size=16, vocab_size=100)
        assert read_meta(dataset) is None


def test_a_run_tells_of_a_hostile_meta_in_a_line(dataset, tmp_path):
    (dataset / "meta.json").write_text(
        json.dumps(meta_of("\x1b[2J\x1b]0;owned\x07.bin", vocab_size=64))
    )
    done = run_tiny(dataset, out_dir=tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "\x1b" not in done.stderr
    assert "?[2J?]0;owned?.bin is missing" in done.stderr


def test_another_vocabulary_is_refused_before_it_is_parsed(tmp_path):
    hostile = tmp_path / "gpt2.tiktoken"
    hostile.write_bytes(tokenizer.VOCABULARY.read_bytes().replace(b" 500\n", b" 10\n"))
    with bounded(), pytest.raises(InputError, match="its SHA-256 differs"):
        tokenizer.read_ranks(hostile)


# Hugging Face folders

HF = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "n_positions": 16,
    "vocab_size": 64,
}


def safetensors(header: Any, content: bytes = b"") -> bytes:
    told = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(told)) + told + content


def one_tensor(**changes: Any) -> dict[str, Any]:
    return {"wte.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}


FOLDERS = {
    "header without end": (HF, struct.pack("<Q", 2**63 - 1) + b"{}"),
    "header beyond the file": (HF, struct.pack("<Q", 2**20) + b"{}"),
    "header nested": (HF, safetensors(b"[" * 10**6)),
    "absurd size": (HF, safetensors(one_tensor(shape=[2**40, 2**20]), bytes(16))),
    "size that wraps": (HF, safetensors(one_tensor(shape=[2**32, 2**32]), bytes(16))),
    "offsets beyond the file": (HF, safetensors(one_tensor(data_offsets=[0, 2**50]), bytes(16))),
    "offsets backwards": (HF, safetensors(one_tensor(data_offsets=[16, 0]), bytes(16))),
    "overlapping": (HF, safetensors({"a": one_tensor()["wte.weight"]} | one_tensor(), bytes(16))),
    "another shape": (HF, safetensors(one_tensor(), bytes(16))),
    "absurd config": (HF | {"n_layer": 10**9}, safetensors(one_tensor(), bytes(16))),
    "absurd width": (HF | {"n_embd": 2**50}, safetensors(one_tensor(), bytes(16))),
    "config of texts": (HF | {"n_layer": "2"}, safetensors(one_tensor(), bytes(16))),
    "config of lists": (HF | {"activation_function": []}, safetensors(one_tensor(), bytes(16))),
    "type of lists": (HF | {"model_type": []}, safetensors(one_tensor(), bytes(16))),
    "config is a list": ([HF], safetensors(one_tensor(), bytes(16))),
    "no weights": (HF, None),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_hostile_hugging_face_folder_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, weights = FOLDERS[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    pickled = Calls(os.system, f"touch {TRACE}")
    torch.save(pickled, tmp_path / "pytorch_model.bin")
    index = {"weight_map": {"wte.weight": "../../etc/passwd", "wpe.weight": "pytorch_model.bin"}}
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / f"{name}.index.json").write_text(json.dumps(index))
    with bounded(), pytest.raises(InputError) as refused:
        GPT.from_checkpoint(tmp_path)
    assert "does not hold a GPT-2" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / TRACE).exists()


def test_a_huge_or_bottomless_config_of_a_folder_is_refused(tmp_path):
    for begins in (b"", b"[" * 10**6, b'{"a":' * 10**6):
        huge(tmp_path / "config.json", begins)
        for end in (GIB, len(begins)):
            os.truncate(tmp_path / "config.json", end)
            with bounded(GIB // 4), pytest.raises(InputError, match="does not hold a GPT-2"):
                GPT.from_checkpoint(tmp_path)


# records


def test_records_of_any_size_are_read_within_bounds(tmp_path):
    """A line of many MiB, and one that is nested without end, between good ones."""
    write(tmp_path, [launch(), step(0, 3.0)])
    with (tmp_path / "metrics.jsonl").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"[" * 10**5 + b"\n")
        file.seek(GIB // 4)
        file.write(b"\n" + json.dumps(step(1, 2.0)).encode() + b"\n")
        file.write(json.dumps(sample(2, "x" * 10**5)).encode() + b"\n")
    with bounded(GIB // 16):
        history = read_history(tmp_path)
        assert has_ended(tmp_path, 5) is False
    assert list(history.steps["loss"]) == [3.0, 2.0]
    assert history.damaged_lines == 2
    assert len(history.samples[0]["text"]) == LONGEST_SAMPLE


@pytest.mark.parametrize("end", [b"", b'{"kind": "st'])
def test_a_run_goes_on_after_records_of_any_size(end, tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.write(b"{}\n")
        file.seek(GIB // 2)
        file.write(b"\n" + end)
    with bounded(GIB // 8), open_log(tmp_path) as log:
        log.event(0, "started", micro_batch=1)
    with path.open("rb") as file:
        file.seek(GIB // 2)
        begin, record, nothing = file.read().split(b"\n")
    assert (begin, json.loads(record)["name"], nothing) == (b"", "started", b"")


def open_log(folder: Path) -> Log:
    return Log(
        folder,
        is_main=True,
        log_interval=1,
        first_step=0,
        last_step=5,
        tokens_per_step=1,
        flops_per_token=1.0,
        peak_flops=None,
    )


def test_a_report_is_drawn_of_names_that_mean_something_to_others(tmp_path):
    """To a terminal, a shell, HTML and matplotlib's formulas."""
    folder = tmp_path / "$\\frac{$ <b>`id`\x1b[2J"
    other = tmp_path / "$\\frac{$ <b>`id`\x1b[2J 2"
    for place in (folder, other):
        story = [launch(settings={"out_dir": "$\\bad{$"}), *(step(n, 3.0) for n in range(20))]
        write(place, story)
    done = run_script("report.py", str(folder), str(other), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "<b>" not in (folder / "report.html").read_text()
