"""SIGKILL at thirty moments: what comes of the run is what comes of it undisturbed, bit for bit."""

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_events, read_metrics, recorded, run_tiny
from tests.disturb import MOMENTS, kill
from tests.processes import TIMEOUT_S, children_running, wait_for

pytestmark = pytest.mark.slow
LENGTH = ["--max_iters=240", "--eval_interval=20", "--save_interval=10", "--dropout=0.1"]
COMPILED = ["--compile=True", "--compile_after=30", "--deterministic=True"]  # on a busy machine too
WITHIN_S = 1.5  # of the first sign of life: the length of the undisturbed run, about


@pytest.mark.parametrize(("flags", "kills"), [([], 20), (COMPILED, 10)], ids=["eager", "compiled"])
def test_a_run_that_is_killed_again_and_again_is_the_undisturbed_one(
    tiny_dataset, tmp_path, flags, kills
):
    whole, out, chance = tmp_path / "whole", tmp_path / "out", random.Random(f"kills {flags}")
    done = run_tiny(tiny_dataset, *LENGTH, *flags, out_dir=whole)
    assert done.returncode == 0, done.stderr
    killed = 0
    for number in count():
        moment = MOMENTS[number % len(MOMENTS)] if killed < kills else None
        launched = launch(tiny_dataset, out, *flags)
        was_killed = moment is not None and kill(launched, moment(chance, out, WITHIN_S))
        killed += was_killed
        if not was_killed and launched.wait(TIMEOUT_S) == 0 and "ckpt-00000240.pt" in names(out):
            break
    assert killed >= kills - len(MOMENTS), "it was over too soon"
    one, other = (
        torch.load(place / "ckpt-00000240.pt", weights_only=True) for place in (out, whole)
    )
    for name, weight in other["model"].items():
        assert torch.equal(one["model"][name], weight), name
    assert recorded(out) == recorded(whole)
    assert [event["now"] for event in read_events(out, "stage")][-1] == (
        "compiled" if flags else "eager"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="on a CPU the limit is Linux's")
def test_a_run_killed_while_it_looks_for_what_fits_leaves_nothing_behind(
    tiny_dataset, tiny_run, tmp_path
):
    whole, out, flags = tmp_path / "whole", tmp_path / "out", ["--memory_limit=3GB"]
    assert tiny_run(*flags, out_dir=whole).returncode == 0
    assert tiny_run(*flags, "--max_iters=5", "--lr_decay_iters=12", out_dir=out).returncode == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}", *flags]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}  # where nothing is known yet
    command = [sys.executable, PROJECT / "train.py", *words]
    for _ in range(2):
        run = processes.start(command, cwd=tmp_path, env=environment)
        trial = first_trial_of(run.pid)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        wait_for(lambda: not Path(f"/proc/{trial}").exists())  # noqa: B023
        kept = {name: (out / name).read_bytes() for name in before}
        assert kept == before
    assert tiny_run(*flags, out_dir=out).returncode == 0
    assert read_metrics(out, "step", "loss") == read_metrics(whole, "step", "loss")


def first_trial_of(pid: int) -> int:
    """Its first child that tries what fits."""
    trials: list[int] = []

    def has_begun() -> list[int]:
        trials.extend(children_running(pid, b"nanofit.fit.trial"))
        return trials

    wait_for(has_begun, interval_s=0.005)
    return trials[0]


def launch(dataset: Path, out: Path, *flags: str):
    """Start or continue the run; back as soon as it has described itself."""
    known = len(read_runs(out))
    words = [*TINY_MODEL, f"--dataset={dataset}", f"--out_dir={out}", *LENGTH, *flags]
    with (out.parent / "said").open("a") as said:
        command = [sys.executable, PROJECT / "train.py", *words]
        process = processes.start(command, cwd=out.parent, stdout=said, stderr=said)
    while len(read_runs(out)) == known and process.poll() is None:
        time.sleep(0.001)
    return process


def read_runs(out: Path) -> list[str]:
    path = out / "metrics.jsonl"
    return (
        [line for line in path.read_text().splitlines() if '"run"' in line] if path.exists() else []
    )


def names(out: Path) -> list[str]:
    return [path.name for path in out.iterdir()]
