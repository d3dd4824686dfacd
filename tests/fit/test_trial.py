"""Trials in a child process, with real out-of-memory under a limit of Linux."""

import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from nanofit.fit.trial import TrialResult, run_trial, trial_here
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.settings.shape import GPTConfig
from tests import processes
from tests.processes import children_running, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=128, vocab_size=2048)
SETUP = Setup(SHAPE, dtype="float32")
LIMIT = 900 * 10**6


@cache
def trial(size: int) -> TrialResult:
    return run_trial(SETUP, size, device="cpu", limit_bytes=LIMIT)


@pytest.mark.slow
def test_trial_tells_what_a_size_needs_and_a_limit_below_it_kills():
    small, large = trial(4), trial(32)
    assert 0 < small.used_bytes < small.peak_bytes < large.peak_bytes < LIMIT
    assert large.tokens_per_s > 0
    limit = (small.peak_bytes + large.peak_bytes) // 2
    assert run_trial(SETUP, 4, device="cpu", limit_bytes=limit).peak_bytes
    dead = run_trial(SETUP, 32, device="cpu", limit_bytes=limit)
    assert dead.peak_bytes is None
    assert "memory" in dead.reason


def test_trial_touches_neither_the_random_numbers_nor_the_settings_of_the_run():
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    run_trial(SETUP, 0, device="cpu", limit_bytes=None)
    assert torch.equal(torch.rand(3), expected)


def test_float16_trial_updates_whatever_would_overflow_at_the_scale_a_run_begins_with(monkeypatch):
    shape = replace(SHAPE, n_embd=16, block_size=16, vocab_size=64)
    scales = []
    step = torch.amp.GradScaler.step

    def noted(scaler, *args, **kwargs):
        scales.append(scaler.get_scale())
        return step(scaler, *args, **kwargs)

    monkeypatch.setattr(torch.amp.GradScaler, "step", noted)
    trial_here(Setup(shape, dtype="float16"), 1, device="cpu", limit_bytes=None)
    assert scales == [1.0, 1.0]


def test_hanging_trial_is_an_answer():
    result = run_trial(SETUP, 4, device="cpu", limit_bytes=None, timeout_s=0.2)
    assert result.peak_bytes is None
    assert "no answer within" in result.reason


def test_broken_trial_is_an_answer():
    result = run_trial(SETUP, 4, device="cuda", limit_bytes=None)
    assert result.peak_bytes is None
    assert "CUDA" in result.reason


PARENT = """
from nanofit.fit.trial import run_trial
from nanofit.memory.setup import Setup
from nanofit.settings.shape import GPTConfig
shape = GPTConfig(n_layer=12, n_head=8, n_embd=512, block_size=1024, vocab_size=128)
setup = Setup(shape, dtype="float32", recompute="block")
print("begins", flush=True)
run_trial(setup, 8, device="cpu", limit_bytes=None)
"""


def test_trial_ends_with_a_parent_that_is_killed():
    parent = processes.start([sys.executable, "-c", PARENT], cwd=processes.PROJECT)
    assert parent.stdout.readline() == "begins\n"
    wait_for(lambda: children_running(parent.pid, b"nanofit.fit.trial"))
    [child] = children_running(parent.pid, b"nanofit.fit.trial")
    wait_for(lambda: memory_of(child) > 400 * 10**6)  # it computes, for minutes
    parent.kill()
    wait_for(lambda: not memory_of(child), timeout_s=20)


def memory_of(pid: int) -> int:
    """What a process holds; nothing when it has ended, even if nobody has asked how it did."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    held = re.search(r"RssAnon:\s*(\d+) kB", status)
    return int(held[1]) * 1024 if held else 0


def test_forecast_is_within_five_percent_of_what_trials_measure():
    own_bytes = run_trial(SETUP, 0, device="cpu", limit_bytes=None).used_bytes
    need = need_of(SETUP)
    for size in (4, 32):
        assert own_bytes + need.at(size) == pytest.approx(trial(size).peak_bytes, rel=0.05)
