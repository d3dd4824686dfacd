"""Several processes: one that dies, hangs or is stopped; restarts; another number of them."""

import os
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_events, read_metrics, run_tiny
from tests.processes import TIMEOUT_S, children_of, wait_for

pytestmark = pytest.mark.slow
# Six sequences a step can be shared by one, two and three.
LENGTH = ["--batch_size=6", "--gradient_accumulation_steps=1", "--max_iters=400"]
LENGTH += ["--eval_interval=100", "--save_interval=20", "--learning_rate=1e-3", "--min_lr=1e-4"]


@pytest.fixture
def running(tiny_dataset, tmp_path):
    """Start a run of two processes; back with torchrun and them, once some steps are done."""

    def start(*flags: str, launcher: tuple[str, ...] = ()):
        out = tmp_path / "out"
        words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}", *LENGTH, *flags]
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", *launcher]
        with (tmp_path / "said").open("w") as said:
            command = [*run, PROJECT / "train.py", *words]
            process = processes.start(command, cwd=tmp_path, stdout=said, stderr=said)
        wait_for(lambda: "step 30 " in text(tmp_path), interval_s=0.005)
        return process, ranks_of(process.pid)

    return start


@pytest.fixture(scope="module")
def whole(tiny_dataset, tmp_path_factory) -> Path:
    """What comes of the run when one process does it undisturbed."""
    return run_alone(tiny_dataset, tmp_path_factory.mktemp("alone") / "whole")


def run_alone(dataset: Path, out: Path, *flags: str, ranks: int = 1) -> Path:
    done = run_tiny(dataset, *LENGTH, *flags, out_dir=out, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return out


def ranks_of(torchrun: int) -> dict[int, int]:
    """The processes that it started, by rank."""
    ranks = {}
    for pid in children_of(torchrun):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for word in words:
            if word.startswith(b"RANK="):
                ranks[int(word[5:])] = pid
    return ranks


def text(tmp_path: Path) -> str:
    return (tmp_path / "said").read_text()


def curve(out: Path) -> list[float]:
    steps, evaluations = read_metrics(out, "step", "loss"), read_metrics(out, "eval", "val_loss")
    assert sorted(steps) == list(range(400))
    return [value for _, value in sorted(steps.items()) + sorted(evaluations.items())]


@pytest.mark.parametrize(("rank", "flags"), [(0, []), (1, []), (1, ["--shard=True"])])
def test_a_killed_process_ends_all_with_one_line_and_the_run_can_be_continued(
    running, whole, tiny_dataset, tmp_path, rank, flags
):
    process, ranks = running(*flags)
    os.kill(ranks[rank], signal.SIGKILL)
    assert process.wait(60) != 0
    [line] = [one for one in text(tmp_path).splitlines() if "error: " in one]
    assert "another process of this run has died or hangs (" in line
    of_torchrun = text(tmp_path).index("Sending process")
    assert "Traceback" not in text(tmp_path)[:of_torchrun]
    run_alone(tiny_dataset, tmp_path / "out", ranks=2)
    assert curve(tmp_path / "out") == pytest.approx(curve(whole), abs=2e-6)


def test_a_process_that_hangs_is_waited_for_so_long_and_no_longer(running, tmp_path):
    process, ranks = running("--rank_timeout_s=15")  # in which a busy machine starts both
    os.kill(ranks[1], signal.SIGSTOP)
    # torchrun gives what it ends 30 seconds, which a stopped process does not use.
    assert process.wait(180) != 0
    [line] = [one for one in text(tmp_path).splitlines() if "error: " in one]
    assert "has died or hangs (" in line and "imed out" in line
    newest = max((tmp_path / "out").glob("ckpt-0*.pt"))
    assert torch.load(newest, weights_only=True)["iter_num"] >= 20


@pytest.mark.parametrize("shard", [False, True])
def test_two_machines_of_two_processes_give_the_curve_of_one(tiny_dataset, tmp_path, shard):
    length = ["--batch_size=4", "--gradient_accumulation_steps=2", "--max_iters=40"]
    length += ["--eval_interval=20", "--learning_rate=1e-3", "--min_lr=1e-4"]
    one, four = tmp_path / "one", tmp_path / "four"
    assert run_tiny(tiny_dataset, *length, out_dir=one).returncode == 0
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={four}", *length]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = ["--master_addr=127.0.0.1", f"--master_port={free.getsockname()[1]}"]
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    script = [PROJECT / "train.py", *words, f"--shard={shard}"]
    machines = [
        processes.start([*run, *meeting, f"--node_rank={n}", *script], cwd=tmp_path) for n in (0, 1)
    ]
    said = [machine.communicate(timeout=300)[1] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    for kind, value in (("step", "loss"), ("eval", "val_loss")):
        alone, together = (read_metrics(out, kind, value) for out in (one, four))
        assert together == pytest.approx(alone, abs=2e-6)


def test_torchrun_brings_a_run_back_by_itself_to_the_same_curve(running, whole, tmp_path):
    process, _ = running(launcher=("--max-restarts=2",))
    for rank, done in ((1, 100), (0, 200)):
        wait_for(lambda: f"step {done} " in text(tmp_path), interval_s=0.005)  # noqa: B023
        os.kill(ranks_of(process.pid)[rank], signal.SIGKILL)
    assert process.wait(TIMEOUT_S) == 0, text(tmp_path)
    assert len(read_events(tmp_path / "out", "resumed")) == 2
    assert curve(tmp_path / "out") == pytest.approx(curve(whole), abs=2e-6)


@pytest.mark.parametrize("asked", ["one of them", "all of them, and torchrun"])
def test_all_stop_at_one_step_and_save(running, whole, tiny_dataset, tmp_path, asked):
    process, ranks = running()
    for pid in [ranks[1]] if asked == "one of them" else [*ranks.values(), process.pid]:
        os.kill(pid, signal.SIGTERM)
    code = process.wait(60)
    assert (code == 0) == (asked == "one of them"), text(tmp_path)
    assert text(tmp_path).count("stopped on request") == 1
    steps = read_metrics(tmp_path / "out", "step", "loss")
    newest = max((tmp_path / "out").glob("ckpt-0*.pt"))
    assert torch.load(newest, weights_only=True)["iter_num"] == max(steps) + 1
    run_alone(tiny_dataset, tmp_path / "out", ranks=2)
    assert curve(tmp_path / "out") == pytest.approx(curve(whole), abs=2e-6)


@pytest.mark.parametrize("shard", [False, True])
def test_any_number_of_processes_continues_the_curve_of_any_other(
    whole, tiny_dataset, tmp_path, shard
):
    out = tmp_path / "out"
    for ranks, last in ((1, 100), (2, 200), (3, 300), (1, 400)):
        flags = [f"--max_iters={last}", "--lr_decay_iters=400", f"--shard={shard}"]
        run_alone(tiny_dataset, out, *flags, ranks=ranks)
    assert curve(out) == pytest.approx(curve(whole), abs=2e-5)
    changed = [event["processes"] for event in read_events(out, "machine changed")]
    assert changed == ["2, before 1", "3, before 2", "1, before 3"]


@pytest.mark.parametrize("shard", [False, True])
def test_updates_are_skipped_by_all_alike(tmp_path, shard):
    """Counting is easy to learn; a stretch of noise then makes gradients explode."""
    data = tmp_path / "data"
    data.mkdir()
    tokens = (np.arange(8000) % 64).astype(np.uint16)
    tokens[:600].tofile(data / "val.bin")
    tokens[4000:4064] = np.random.default_rng(5).integers(0, 64, 64)
    tokens.tofile(data / "train.bin")
    flags = ["--on_spike=skip", "--batch_size=2", "--max_iters=240", "--eval_interval=240"]
    flags += ["--learning_rate=1e-2", "--min_lr=1e-3", f"--shard={shard}"]
    one, two = (run_alone(data, tmp_path / str(ranks), *flags, ranks=ranks) for ranks in (1, 2))
    skipped = [
        [(event["step"], event["updates"]) for event in read_events(out, "spikes skipped")]
        for out in (one, two)
    ]
    assert skipped[0] == skipped[1] != []
    losses = [list(read_metrics(out, "step", "loss").values()) for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


FULL_AT_THE_SUM = """
import os, torch, train
from nanofit.terminal import run_script
calls = []
def without_room(tensor, *options, async_op=False):
    calls.extend([None] if async_op else [])  # of gradients alone
    if os.environ["RANK"] == "1" and len(calls) == 30:
        raise MemoryError("no room")
    return all_reduce(tensor, *options, async_op=async_op)
all_reduce, torch.distributed.all_reduce = torch.distributed.all_reduce, without_room
run_script(train.main)
"""


def test_a_sum_of_gradients_without_room_ends_all_and_the_curve_stays(
    whole, tiny_dataset, tmp_path
):
    """It cannot be tried again: the others are waiting in the middle of it."""
    out, script = tmp_path / "out", tmp_path / "script.py"
    script.write_text(FULL_AT_THE_SUM)
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}", *LENGTH]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", script, *words]
    done = processes.run(run, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    assert done.returncode != 0
    assert done.stderr.count("has died or hangs (") == 1, done.stderr
    run_alone(tiny_dataset, out, ranks=2)
    assert curve(out) == pytest.approx(curve(whole), abs=2e-6)
