"""What a run has from its start: the same for all its processes, and what it may still go by."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, run_tiny
from tests.shards import assert_same_dataset


@pytest.fixture(scope="module")
def begun(tiny_dataset, tmp_path_factory) -> Path:
    """A run of two steps."""
    out = tmp_path_factory.mktemp("begun") / "out"
    done = run_tiny(tiny_dataset, "--max_iters=2", "--lr_decay_iters=12", out_dir=out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def run_apart(tiny_dataset, tmp_path):
    """Run two processes, each with a flag of its own."""

    def run(*own: str):
        words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={tmp_path / 'out'}"]
        each = [[flag] for flag in own]
        return processes.run_ranks(2, "train.py", *words, cwd=tmp_path, own=each)

    return run


@pytest.mark.parametrize("has_run", [0, 1])
def test_processes_with_folders_of_their_own_are_refused_by_name(
    begun, run_apart, tmp_path, has_run
):
    folders = [tmp_path / "first", tmp_path / "second"]
    shutil.copytree(begun, folders[has_run])
    done = run_apart(*(f"--out_dir={folder}" for folder in folders))
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith(f"error: the processes found different checkpoints in {folders[0]}; ")
    assert not list(folders[1 - has_run].glob("*.pt"))


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float16", "bfloat16")])
def test_processes_that_compute_in_different_precisions_are_refused(run_apart, tmp_path, dtypes):
    done = run_apart(*(f"--dtype={dtype}" for dtype in dtypes))
    [line] = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("error: the processes' cards differ in the precision they have; give ")
    assert not list((tmp_path / "out").glob("*"))


@pytest.mark.slow
def test_processes_wait_for_a_preparation_longer_than_for_each_other(tiny_run, tmp_path):
    data, alone = tmp_path / "data", tmp_path / "alone"
    shard = data / "shard.parquet"
    make_shard = [sys.executable, PROJECT / "data" / "sample" / "make_shard.py", "--size=8MB"]
    processes.run([*make_shard, "--out", shard], check=True)
    flags = [f"--dataset={data}", "--vocab_size=50304", "--max_iters=1", "--rank_timeout_s=2"]
    done = tiny_run(*flags, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("holds parquet files but no bins") == 1
    processes.run_script("prepare_fineweb.py", str(shard), f"--out={alone}", cwd=tmp_path)
    assert_same_dataset(data, alone)


@pytest.mark.parametrize(
    ("flags", "is_kept"),
    [
        ([], True),
        (["--batch_size=2", "--gradient_accumulation_steps=4", "--eval_iters=4"], True),
        (["--batch_size=2", "--gradient_accumulation_steps=4"], False),
        (["--eval_iters=3"], False),
    ],
    ids=["same", "same in other batches", "smaller batches", "more batches"],
)
def test_the_best_validation_loss_counts_on_for_the_same_text_alone(
    begun, tiny_run, tmp_path, flags, is_kept
):
    """Less than nothing is better than whatever comes."""
    out = tmp_path / "out"
    shutil.copytree(begun, out)
    saved = torch.load(out / "ckpt-00000002.pt", weights_only=True)
    torch.save(saved | {"best_val_loss": -1.0}, out / "ckpt-00000002.pt")
    done = tiny_run("--max_iters=4", "--lr_decay_iters=12", *flags)
    assert done.returncode == 0, done.stderr
    assert (torch.load(out / "ckpt-best.pt", weights_only=True)["iter_num"] == 2) == is_kept
