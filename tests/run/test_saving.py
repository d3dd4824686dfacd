"""Checkpoints written behind the run: what was there when they were asked for, or nothing."""

import os
import sys
import threading
from pathlib import Path

import pytest
import torch

from nanofit.run import saving
from nanofit.run.checkpoint import Checkpoints
from nanofit.run.saving import Saver
from tests import processes
from tests.processes import PROJECT


def content(step: int) -> dict:
    """A checkpoint whose head and embedding are one tensor, as in GPT-2."""
    torch.manual_seed(step)
    weight = torch.randn(500, 100)
    return {
        "iter_num": step,
        "model": {"wte": weight, "head": weight, "view": weight.t()},
        "optimizer": {"state": {0: {"exp_avg": torch.randn(500, 100), "step": torch.ones(())}}},
        "stage": "eager",
    }


def gate(write, folder: Path):
    """Writes as soon as it may."""
    open_gate = threading.Event()

    def later(*args):
        open_gate.wait()
        return write(*args)

    return later, open_gate


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "out", keep=2)


@pytest.fixture(autouse=True)
def _folder(tmp_path):
    (tmp_path / "out").mkdir()


def read(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def test_what_is_saved_is_the_state_at_that_time(checkpoints, tmp_path):
    later, may_write = gate(checkpoints.save, tmp_path)
    saver, given = Saver(later), content(6)
    saver.save(given)
    before = given["model"]["wte"].clone()
    given["model"]["wte"].zero_()  # the run goes on meanwhile
    may_write.set()
    saver.wait()
    [outcome] = saver.outcomes()
    saved = read(outcome.path)
    assert torch.equal(saved["model"]["head"], before)
    assert torch.equal(saved["model"]["view"], before.t())
    assert (outcome.step, outcome.error) == (6, None)
    assert outcome.size_bytes == outcome.path.stat().st_size
    assert saver.outcomes() == []


def test_one_tensor_stays_one(checkpoints):
    saver, plain = Saver(checkpoints.save), content(6)
    saver.save(plain)
    saver.wait()
    saved = read(checkpoints.folder / "ckpt-00000006.pt")["model"]
    assert saved["wte"].data_ptr() == saved["head"].data_ptr()
    torch.save(plain, checkpoints.folder / "as it is")
    whole = (checkpoints.folder / "as it is").stat().st_size
    # A view in another order is the one thing that becomes a tensor of its own.
    assert (checkpoints.folder / "ckpt-00000006.pt").stat().st_size < 1.6 * whole


def test_nothing_waits_but_the_next_save(checkpoints, tmp_path):
    later, may_write = gate(checkpoints.save, tmp_path)
    saver = Saver(later)
    saver.save(content(1))
    next_save = threading.Thread(target=saver.save, args=[content(2)])
    next_save.start()
    next_save.join(0.2)
    assert next_save.is_alive()  # one at a time
    may_write.set()
    next_save.join()
    saver.wait()
    assert [path.name for path in checkpoints.newest_first()] == [
        "ckpt-00000002.pt",
        "ckpt-00000001.pt",
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows only reserves a stack's room")
def test_without_room_for_a_thread_a_save_is_written_all_the_same(checkpoints):
    """Memory has run out: what was learned must be kept now, or never."""
    before = threading.stack_size(2**46)
    try:
        with pytest.raises(RuntimeError, match="new thread"):
            threading.Thread(target=print).start()
        with Saver(checkpoints.save) as saver:
            saver.save(content(6))
    finally:
        threading.stack_size(before)
    [outcome] = saver.outcomes()
    assert torch.equal(read(outcome.path)["model"]["wte"], content(6)["model"]["wte"])


@pytest.fixture
def broken(checkpoints):
    """A file where the folder should be: nothing can be written."""
    checkpoints.folder.rmdir()
    checkpoints.folder.write_text("")

    def mend():
        checkpoints.folder.unlink()
        checkpoints.folder.mkdir()

    return mend


def test_what_could_not_be_written_is_told_once_and_tried_again(checkpoints, broken, monkeypatch):
    monkeypatch.setattr(saving, "RETRY_S", 0.0)
    saver = Saver(checkpoints.save)
    saver.save(content(6), "ckpt-best.pt")
    saver.wait()
    [failure] = saver.outcomes()
    assert isinstance(failure.error, OSError) and saver.failed_step == 6
    for _ in range(3):  # in vain, and without another word
        assert saver.outcomes() == []
        saver.wait()
    broken()
    assert saver.outcomes() == []  # which tries once more
    saver.wait()
    [success] = saver.outcomes()
    assert (success.step, success.error, saver.failed_step) == (6, None, None)
    assert torch.equal(read(success.path)["model"]["wte"], content(6)["model"]["wte"])


def test_a_newer_checkpoint_takes_the_place_of_one_that_failed(checkpoints, broken):
    saver = Saver(checkpoints.save)
    saver.save(content(6))
    saver.wait()
    broken()
    saver.save(content(12))
    saver.wait()
    assert [one.error is None for one in saver.outcomes()] == [False, True]
    assert [path.name for path in checkpoints.newest_first()] == ["ckpt-00000012.pt"]
    assert saver.failed_step is None


@pytest.mark.parametrize("why", ["no room", "not allowed"])
def test_without_room_for_a_copy_the_run_waits_and_a_failure_is_final(
    checkpoints, broken, monkeypatch, why
):
    """To try again later would be to write a later state under an earlier step."""
    monkeypatch.setattr(saving, "RETRY_S", 0.0)
    if why == "no room":
        monkeypatch.setattr(saving, "available_bytes", lambda: 100_000)
    saver = Saver(checkpoints.save, may_copy=why != "not allowed")
    saver.save(content(6))
    [failure] = saver.outcomes()  # there at once
    assert failure.error
    broken()
    saver.outcomes()
    saver.wait()
    assert saver.outcomes() == [] and saver.failed_step == 6
    saver.save(content(12))
    [success] = saver.outcomes()
    assert success.step == 12 and saver.failed_step is None


@pytest.mark.parametrize("may_copy", [True, False])
def test_only_what_was_copied_is_tried_again(monkeypatch, may_copy):
    monkeypatch.setattr(saving, "RETRY_S", 0.0)
    tries = []

    def write(content, name):
        tries.append(content["iter_num"])
        raise OSError("the disk is full")

    with Saver(write, may_copy=may_copy) as saver:
        saver.save(content(6))
        for _ in range(3):
            saver.wait()
            saver.outcomes()
    assert tries == (4 * [6] if may_copy else [6])


SHORT_OF_MEMORY = """
import resource
from pathlib import Path
from nanofit.run.saving import Saver
from tests import processes
from tests.processes import PROJECT

def write(content, name):
    path = Path(str(content["iter_num"]))
    path.touch()
    return path

def leave(more_bytes):
    lines = Path("/proc/self/status").read_text().splitlines()
    taken = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    limit = 1024 * taken + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))

with Saver(write) as saver:
    for step in range(20):
        leave(2**23 + 2**15 * step)  # a thread's stack, and not all that it needs to begin
        saver.save({"iter_num": step, "model": {}, "optimizer": {}})
        saver.wait()
    resource.setrlimit(resource.RLIMIT_DATA, 2 * [resource.RLIM_INFINITY])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_save_waits_for_no_thread_that_has_no_memory_to_begin_with(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    done = processes.run([sys.executable, "-c", SHORT_OF_MEMORY], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("[0-9]*"))) == 20


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["weight", "moment"])
def test_what_is_no_number_takes_the_place_of_nothing(checkpoints, value, where):
    saver = Saver(checkpoints.save)
    saver.save(content(6), "ckpt-best.pt")
    saver.wait()
    unsound = content(12)
    state = unsound["optimizer"]["state"][0]
    (unsound["model"]["wte"] if where == "weight" else state["exp_avg"])[3, 7] = value
    saver.save(unsound, "ckpt-best.pt")
    with saver:
        pass
    _, failure = saver.outcomes()
    assert "no numbers" in str(failure.error)
    assert read(checkpoints.folder / "ckpt-best.pt")["iter_num"] == 6
    assert not (checkpoints.folder / "ckpt-00000012.pt").exists()


def test_a_run_that_goes_back_gives_up_what_could_not_be_written(checkpoints, broken, monkeypatch):
    """Written later it would be newer than what the run has gone back to."""
    monkeypatch.setattr(saving, "RETRY_S", 0.0)
    saver = Saver(checkpoints.save)
    saver.save(content(12), "ckpt-best.pt")
    saver.forget()
    broken()
    with saver:
        saver.outcomes()
    assert saver.failed_step is None
    assert not list(checkpoints.folder.iterdir())


def test_whatever_goes_wrong_in_a_save_is_told(checkpoints):
    def without_memory(*_):
        raise MemoryError

    saver = Saver(without_memory)
    saver.save(content(6))
    saver.wait()
    [failure] = saver.outcomes()
    assert isinstance(failure.error, MemoryError) and saver.failed_step == 6
