"""sample.py as its user calls it, from a checkpoint alone."""

import subprocess
from pathlib import Path

import pytest
import torch

from model import GPT
from nanofit.settings.config import flatten
from nanofit.settings.shape import GPTConfig
from tests import processes
from tests.conftest import PROJECT


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """An untrained model that has GPT-2's vocabulary."""
    torch.manual_seed(0)
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32)
    folder = tmp_path_factory.mktemp("run")
    content = {"model": GPT(shape).state_dict(), "model_args": flatten(shape), "iter_num": 5}
    torch.save(content, folder / "ckpt-00000005.pt")
    return folder


def test_same_seed_gives_the_same_text_and_the_prompt_comes_first(run_folder):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=12", "--start=Zwölf Boxkämpfer"]
    one, two = sample(*flags, "--seed=3"), sample(*flags, "--seed=3")
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("Zwölf Boxkämpfer")
    assert one.stdout == two.stdout != sample(*flags, "--seed=4").stdout


def test_samples_are_numbered_and_the_second_is_that_of_the_next_seed(run_folder):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=8", "--top_p=0.9"]
    both = sample(*flags, "--num_samples=2", "--seed=10").stdout
    second = both.partition("--- sample 2 of 2, seed 11\n")[2]
    assert second == sample(*flags, "--seed=11").stdout


def test_prompt_may_come_from_a_file_or_from_standard_input(run_folder, tmp_path):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=4"]
    (tmp_path / "prompt.txt").write_text("Once upon a time\n")
    from_text = sample(*flags, "--start=Once upon a time").stdout
    assert sample(*flags, f"--start=FILE:{tmp_path}/prompt.txt").stdout == from_text
    assert sample(*flags, "--start=-", stdin="Once upon a time\n").stdout == from_text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out_dir=nowhere"], "no checkpoint in nowhere"),
        (["--checkpoint=nowhere.pt"], "no weights at nowhere.pt"),
        (["--temperature=-1"], "-1 is less than 0"),
        (["--temperature=nan"], "nan is less than 0"),
        (["--device=foo"], "device = 'foo' is none of"),
        (["--start=FILE:nowhere.txt"], "cannot read the prompt"),
    ],
)
def test_bad_input_is_told_in_a_line(run_folder, flags, message):
    done = sample(f"--out_dir={run_folder}", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def sample(*flags: str, stdin: str = "") -> subprocess.CompletedProcess:
    return processes.run_script("sample.py", *flags, cwd=PROJECT, stdin=stdin)
