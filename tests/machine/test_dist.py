"""Two real processes over gloo against the arithmetic of one."""

import sys

import pytest
import torch

from nanofit.machine.dist import Ranks
from tests import processes
from tests.conftest import PROJECT

SCRIPT = """
import torch
from nanofit.machine.dist import start_ranks
from nanofit.terminal import run_script
def main(argv):
    with start_ranks("gloo") as ranks:
        tensors = [torch.full((3,), float(ranks.rank + 1)), torch.tensor(float(ranks.rank))]
        ranks.sum_(tensors)
        ranks.wait()
        print([
            ranks.world, [t.tolist() for t in tensors],
            ranks.any(ranks.rank == 1), ranks.any(False), ranks.agree(7), ranks.agree(ranks.rank),
            ranks.least(5 - ranks.rank),
        ], flush=True)
        with ranks.all_or_none():
            pass
        try:
            with ranks.all_or_none():
                if ranks.rank == 1:
                    raise ValueError("mine")
        except Exception as error:
            print(f"<{type(error).__name__} {error}>", flush=True)
        for fails in ("before", "within", "between", "after"):
            try:
                with ranks.all_or_none():
                    work(fails == "before", ranks)
                    with ranks.all_or_none():
                        work(fails == "within", ranks)
                    work(fails == "between", ranks)
                    with ranks.all_or_none():
                        pass
                    work(fails == "after", ranks)
            except Exception as error:
                print(f"<{fails}: {type(error).__name__}>", flush=True)
            assert ranks.least(5 - ranks.rank) == 4
def work(fails, ranks):
    if fails and ranks.rank == 1:
        raise ValueError("mine")
run_script(main)
"""


def test_two_processes_sum_and_agree(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = processes.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", script],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
    )
    told = "[2, [[3.0, 3.0, 3.0], 1.0], True, False, True, False, 4]"
    assert done.stdout.count(told) == 2, done.stdout + done.stderr  # both may be on one line
    assert "<ValueError mine>" in done.stdout
    assert "<OtherProcessFailed it failed in another process>" in done.stdout
    for fails in ("before", "within", "between", "after"):  # and what follows goes in step
        for error in ("ValueError", "OtherProcessFailed"):
            assert done.stdout.count(f"<{fails}: {error}>") == 1, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, "RANK"),
        ({"RANK": "0"}, "MASTER_ADDR"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
        ({"RANK": "1", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
    ],
)
def test_processes_that_do_not_know_where_to_meet_are_refused_in_a_line(
    tmp_path, variables, missing
):
    command = [sys.executable, PROJECT / "train.py", f"--out_dir={tmp_path / 'out'}"]
    done = processes.run(command, variables={"WORLD_SIZE": "2", **variables})
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: the processes cannot meet (" in line and f"{missing} expected" in line
    assert not (tmp_path / "out").exists()


def test_world_of_one_changes_nothing():
    ranks, tensor = Ranks(), torch.ones(2)
    ranks.sum_([tensor])
    assert tensor.tolist() == [1.0, 1.0]
    assert (ranks.any(True), ranks.any(False), ranks.agree(3), ranks.is_main) == (
        True,
        False,
        True,
        True,
    )
