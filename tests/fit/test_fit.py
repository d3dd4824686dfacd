"""The fit of a run, found and proven under real memory limits, against trying every size."""

import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from nanofit.fit.fit import Savers, _Fitter, find_fit, judged, ladder
from nanofit.fit.search import sizes_for
from nanofit.fit.trial import TrialResult, run_trial
from nanofit.machine.cards import CARDS
from nanofit.machine.device import Device, describe_device
from nanofit.machine.dist import Ranks
from nanofit.machine.overhead import CUDA_CONTEXT_BYTES
from nanofit.memory.budget import budget_of, smallest_card, usable_bytes
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.settings.config import RunConfig, Settings, TrainConfig
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError
from tests import processes
from tests.conftest import PROJECT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=128, vocab_size=2048)
LEARN = TrainConfig(batch_size=8, gradient_accumulation_steps=12)
RUN = RunConfig(device="cpu", compile=False)
DEVICE = describe_device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, shared_cache):
    """But for simulations, which are the same whatever was fitted before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shared = shared_cache / "nanofit" / "memory"
    for folder in (shared, tmp_path / "nanofit"):
        folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "nanofit" / "memory").symlink_to(shared)


@pytest.mark.slow
def test_fit_is_the_largest_divisor_that_survives(capsys):
    setup = Setup(SHAPE, dtype="float32")
    peak = run_trial(setup, 16, device="cpu", limit_bytes=10**9).peak_bytes
    limit = peak + 30 * 10**6
    fit = find(memory_limit=str(limit))
    assert capsys.readouterr().out.count("trying") == fit.eager.trials
    following = next(size for size in sizes_for(96) if size > fit.eager.size)
    assert run_trial(setup, fit.eager.size, device="cpu", limit_bytes=limit).peak_bytes
    assert not run_trial(setup, following, device="cpu", limit_bytes=limit).peak_bytes
    assert fit.eager.peak_bytes <= limit
    assert fit.compiled is None
    assert len(list(fit.lines(96))) == 3

    run = replace(RUN, memory_limit=str(limit))
    settings = Settings(SHAPE, LEARN, run)
    again = find_fit(settings, DEVICE, Ranks(), trial=None)  # which nobody may call
    assert again.is_remembered
    assert (again.eager, again.savers) == (fit.eager, fit.savers)
    assert capsys.readouterr().out == ""


def test_without_autofit_the_configured_numbers_are_taken():
    for run in (replace(RUN, autofit=False, memory_limit="1MB"), RUN):
        fit = find_fit(Settings(SHAPE, LEARN, run), DEVICE, Ranks())
        assert fit.eager.size == 8
        assert list(fit.lines(96)) == []


def test_ladder_begins_with_what_is_given_and_leaves_out_what_is_not_possible():
    def rungs(given, **settings):
        asked = Settings(SHAPE, LEARN, replace(RUN, **settings))
        return _Fitter(asked, DEVICE, 96, print)._rungs(given)

    every = ladder(Setup(SHAPE))
    assert rungs(Savers(), on_spike="skip") == [rung for rung in every if rung.optimizer_bits > 8]
    assert rungs(every[2], on_spike="skip") == [every[2], every[3]]
    own = Savers("block", 0.9)
    assert rungs(own, on_spike="skip")[:2] == [own, every[1]]


@pytest.mark.slow
def test_broken_compiler_costs_the_compiled_size_and_not_the_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    # By speed sizes are compared, so that there is a trial however much room there is.
    fit = find(memory_limit="3GB", compile=True, autofit_goal="fastest")
    assert fit.eager.size > 0
    assert fit.compiled is None
    assert fit.plan(compile_after=7).compiled_size == fit.eager.size
    assert "no size for the compiled stage: a trial failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("room", "goal", "is_tried"),
    [(2.1, "largest", False), (1.9, "largest", True), (2.1, "fastest", True)],
)
def test_whole_step_far_from_the_limit_is_not_compiled_for_a_trial(room, goal, is_tried):
    tried = set()

    def trial(setup, size, **_):
        if not size:
            return TrialResult(used_bytes=8 * MIB)
        tried.add(setup.compiled)
        return TrialResult(peak_bytes=need_of(setup).at(size) + 8 * MIB, tokens_per_s=1.0)

    needed = need_of(Setup(SHAPE, dtype="float32")).at(96) + 8 * MIB
    run = replace(RUN, compile=True, memory_limit=str(int(room * needed)), autofit_goal=goal)
    fit = find_fit(Settings(SHAPE, LEARN, run), DEVICE, Ranks(), trial=trial)
    assert tried == ({False, True} if is_tried else {False})
    assert fit.plan(compile_after=7).compiled_size == (24 if goal == "fastest" else 96)
    assert ("needs no trial" in " ".join(fit.lines(96))) != is_tried


@pytest.mark.slow
def test_nothing_fits_and_what_the_error_advises_does():
    all_savers = dict(recompute="block", activation_memory_budget=0.5, on_spike="skip")
    with pytest.raises(InputError, match="not even one sequence fits") as caught:
        find(memory_limit="100MB", **all_savers)
    advised = re.search(r"--memory_limit=(\w+)", str(caught.value))[1]
    assert find(memory_limit=advised, **all_savers).eager.size >= 1


class Laptop(Device):
    """A card of 4 GB that nobody has to ask."""

    has_flash, driver = True, ""


MIB = 2**20
LAPTOP = Laptop(torch.device("cuda", 0), "GeForce RTX 3050 Laptop GPU", torch.float16, 2**32, None)
MEDIUM = GPTConfig(n_layer=24, n_head=16, n_embd=1024)


@pytest.mark.parametrize(
    ("shape", "others_mib", "larger"),
    [
        (MEDIUM, 0, "a card like the GeForce RTX 4060"),
        (MEDIUM, 2118, "a card like the GeForce RTX 4060"),
        (GPTConfig(), 2118, "end what else uses this card, 2,118 MiB"),
        (replace(MEDIUM, arch="modern"), 2118, "a card like the GeForce"),
    ],
)
def test_what_is_offered_fits_and_twice_as_much_would_not(shape, others_mib, larger):
    free = 2**32 - CUDA_CONTEXT_BYTES - others_mib * MIB

    def trial(setup, size, **_):
        if not size:
            return TrialResult(free_bytes=free, used_bytes=8 * MIB)
        return TrialResult(is_too_large=True)

    run = replace(RUN, device="cuda", on_spike="skip")  # with which there are no 8-bit moments
    with pytest.raises(InputError, match=larger) as caught:
        find_fit(Settings(shape, LEARN, run), LAPTOP, Ranks(), trial=trial)
    error = str(caught.value)
    limit = usable_bytes(free, run)

    def needed(name, size):
        smaller = replace(shape, **{name: int(size)})
        return need_of(Setup(smaller, dtype="float16", recompute="block")).at(1) + 8 * MIB

    offered = re.findall(r"--(\w+)=(\d+) \(([\d,]+) MiB\)", error)
    assert "n_embd" in [name for name, *_ in offered]
    for name, size, told in offered:
        assert needed(name, size) <= limit
        assert needed(name, size) == pytest.approx(int(told.replace(",", "")) * MIB, abs=MIB)
        assert needed(name, 2 * int(size)) > limit - 0.01 * 2**32  # limits come in classes


ROOMS_MIB = (2800, 3900)  # of two cards; for the smaller one moments are kept in 8 bits
TOGETHER = f"""
import json, sys
sys.path.insert(0, {str(PROJECT)!r})
from nanofit.machine.dist import start_ranks
from nanofit.terminal import run_script
from tests.fit.test_fit import ROOMS_MIB, in_room
def main(argv):
    with start_ranks("gloo") as ranks:
        found = in_room(ROOMS_MIB[ranks.rank] * 2**20, ranks)
        print(json.dumps([found.savers.optimizer_bits, found.eager.size]))
run_script(main)
"""


def in_room(free_bytes: int, ranks: Ranks):
    """What is found to fit a card where the forecast holds to the byte."""
    run = replace(RUN, device="cuda")
    limit_bytes = usable_bytes(free_bytes, run)

    def trial(setup, size, **_):
        if not size:
            return TrialResult(free_bytes=free_bytes, used_bytes=8 * MIB)
        needed = need_of(setup).at(size) + 8 * MIB
        survives = needed < limit_bytes
        return TrialResult(peak_bytes=needed if survives else None, is_too_large=not survives)

    return find_fit(Settings(GPTConfig(), LEARN, run), LAPTOP, ranks, trial=trial)


@pytest.mark.slow
def test_processes_on_different_cards_get_the_least_bits_and_the_least_size(tmp_path):
    pytest.importorskip("torchao")
    script = tmp_path / "script.py"
    script.write_text(TOGETHER)
    done = processes.run_ranks(2, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    together = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    alone = [in_room(free_mib * MIB, Ranks()) for free_mib in ROOMS_MIB]
    bits = [fit.savers.optimizer_bits for fit in alone]
    assert bits == [8, 32]
    assert together == [[min(bits), min(fit.eager.size for fit in alone)]] * 2


@pytest.mark.slow
def test_ladder_is_climbed_where_one_sequence_does_not_fit_without():
    shape = replace(SHAPE, n_layer=4, block_size=2048)
    setup = Setup(shape, dtype="float32")
    without, with_all = (
        run_trial(replace(setup, recompute=mode), 1, device="cpu", limit_bytes=10**9).peak_bytes
        for mode in ("off", "block")
    )
    limit = (without + with_all) // 2
    fit = find(shape=shape, memory_limit=str(limit), on_spike="skip")
    assert fit.savers in ladder(setup)[1:]
    assert fit.eager.size >= 1
    assert fit.eager.peak_bytes <= limit
    assert f"recompute {fit.savers.recompute}" in "".join(fit.lines(96))


@pytest.mark.parametrize(("speeds", "expected"), [((100, 99, 90), 12), ((100, 97, 97), 24)])
def test_fastest_is_the_smallest_size_within_two_percent_of_the_best(speeds, expected):
    speeds = dict(zip((24, 12, 6), speeds, strict=True))
    survived = {24: TrialResult(tokens_per_s=speeds[24])}

    def attempt(size):
        survived[size] = TrialResult(tokens_per_s=speeds[size])

    fitter = _Fitter(Settings(SHAPE, LEARN, RUN), DEVICE, 96, print)
    assert fitter._fastest(24, attempt, survived) == expected
    assert sorted(survived) == [6, 12, 24]


@pytest.mark.parametrize(
    ("trial", "reason"),
    [
        (dict(retries=3, tokens_per_s=60.0), ""),
        (dict(retries=4, tokens_per_s=60.0), "4 allocations had to be repeated"),
        (dict(spilled_bytes=2**30, tokens_per_s=60.0), "1,024 MiB spilled"),
        (dict(tokens_per_s=40.0), "far slower"),
    ],
)
def test_trial_that_only_seems_to_survive_counts_as_too_large(trial, reason):
    seen = judged(TrialResult(peak_bytes=1000, **trial), smaller_speeds=[50.0, 100.0])
    assert (seen.peak_bytes is None, seen.is_too_large) == (bool(reason), bool(reason))
    assert reason in seen.reason


def test_smallest_card_is_the_first_on_which_the_simulated_step_is_said_to_fit():
    needed = 6 * 2**30
    card = smallest_card(needed, RUN)
    assert budget_of(card.name, None, RUN).limit_bytes >= needed
    for other in CARDS:
        if other.memory_mib < card.memory_mib:
            assert budget_of(other.name, None, RUN).limit_bytes < needed
    assert smallest_card(2**50, RUN) is None


def test_reserve_is_five_percent_and_a_little_or_as_told():
    assert usable_bytes(10 * 2**30, RUN) == 10 * 2**30 - 512 * 2**20 - 128 * 2**20
    assert usable_bytes(10**9, replace(RUN, memory_reserve="100MB")) == 9 * 10**8


def find(*, shape=SHAPE, **settings):
    asked = Settings(shape, LEARN, replace(RUN, **settings))
    return find_fit(asked, DEVICE, Ranks())
