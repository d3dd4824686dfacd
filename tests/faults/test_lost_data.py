"""The data a run learns from are cut short or overwritten while it does."""

import os
import shutil
import signal
import sys

import pytest
import torch

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_metrics
from tests.processes import TIMEOUT_S, wait_for

pytestmark = pytest.mark.slow
LENGTH = ["--lr_decay_iters=400", "--save_interval=10", "--eval_interval=90000"]
ENDLESS = "--max_iters=90000"  # so that the run does not end before its data are lost


def cut_short(path) -> None:
    os.truncate(path, 100)


def overwrite(path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize(
    ("lose", "ends_with", "told", "refused_with"),
    [
        # What is mapped into memory and not there any more ends a process without a word.
        (cut_short, -signal.SIGBUS, "", "it was cut short or replaced; prepare the dataset again"),
        (overwrite, 2, "holds token 65535, but vocab_size is 64", "on other data than"),
    ],
)
def test_a_read_that_fails_in_mid_step_leaves_a_whole_checkpoint_and_the_same_curve(
    tiny_dataset, tiny_run, tmp_path, lose, ends_with, told, refused_with
):
    data, out, whole = tmp_path / "data", tmp_path / "out", tmp_path / "whole"
    shutil.copytree(tiny_dataset, data)
    words = [*TINY_MODEL, f"--dataset={data}", f"--out_dir={out}", *LENGTH, ENDLESS]
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, PROJECT / "train.py", *words]
        process = processes.start(command, cwd=tmp_path, stdout=said, stderr=said)
    wait_for(lambda: "ckpt-00000020.pt, " in (tmp_path / "said").read_text(), interval_s=0.005)
    lose(data / "train.bin")
    assert process.wait(TIMEOUT_S) == ends_with
    assert told in (tmp_path / "said").read_text()
    newest = max(out.glob("ckpt-0*.pt"))
    saved_at = torch.load(newest, weights_only=True)["iter_num"]
    assert saved_at >= 20
    later = [*LENGTH, f"--max_iters={saved_at + 40}"]  # beyond what is done again
    refused = tiny_run(*later, f"--dataset={data}")
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert refused_with in line
    shutil.copy(tiny_dataset / "train.bin", data / "train.bin")
    assert tiny_run(*later, f"--dataset={data}").returncode == 0
    assert tiny_run(*later, out_dir=whole).returncode == 0
    assert read_metrics(out, "step", "loss") == read_metrics(whole, "step", "loss")
