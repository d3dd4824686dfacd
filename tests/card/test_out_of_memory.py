"""Other programs take memory in mid-run, at moments drawn at random: no step may be lost.

torch's allocator keeps what it once had, so that in a steady run nothing is asked of the card. Most
runs here do without it: then every tensor may be the one that is refused.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.card.harness import Run

WITHOUT_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
STEPS, SIZE = 280, 4
FLAGS = (
    f"--autofit=False --loss=full --n_embd=16 --batch_size={SIZE} --gradient_accumulation_steps=1 "
    f"--max_iters={STEPS} --eval_interval=5 --save_interval=20"
).split()
EVERYTHING_MIB = 12282
SPACING = 1500  # launches at least: more than a step, or one step would meet them all


class Case(NamedTuple):
    """A run, and where in it the first of its moments is."""

    first: str
    flags: str = "--dtype=bfloat16"
    has_cache: bool = False
    processes: int = 1
    device: int = 0  # whose memory is taken

    def __str__(self) -> str:
        return self.first + (" on two cards" if self.processes > 1 else "")


# The activations leave room for a copy of the weights, but not for the moments as well.
LARGE_UPDATE = "--loss=chunked --n_embd=128 --block_size=64"
SAVING = "--save_interval=4"
CASES = [
    Case("forward", processes=2, device=1),
    Case("backward", "--dtype=float16"),
    Case("first update", LARGE_UPDATE, has_cache=True),
    Case("later update", "--dtype=float16"),
    Case("evaluation"),
    Case("saving", SAVING),
    Case("saving", SAVING, processes=2),  # the first of which saves
    Case("backward", "--dtype=float16", processes=2, device=1),
]
MOMENTS_EACH = 6


@pytest.fixture(scope="session")
def launches(tmp_path_factory, tokens):
    """From and to which launch of an undisturbed run a phase lasts."""
    known = {}

    def look_up(train, card, case: Case) -> range:
        key = case.flags, case.processes
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            trace, words = folder / "trace", (*FLAGS, "--compile=False", "--max_iters=6")
            on, several = card(folder=folder, devices=case.processes), {"processes": case.processes}
            run = train(*words, *case.flags.split(), on=on, trace=trace, **several)
            assert run.code == 0, str(run)
            known[key] = phases(trace)
        return known[key][case.first]

    return look_up


def phases(trace: Path) -> dict[str, range]:
    """The launches of each phase, by the kernels that begin and end it."""
    names = trace.read_text().splitlines()
    forward, backward, norm, update = (
        [number for number, name in enumerate(names) if kernel in name]
        for kernel in ("flash_fwd_kernel", "flash_bwd_dot", "LpNorm", "fused_adamw")
    )
    updated = [max(number for number in update if number < later) for later in forward[1:]]
    return {
        "forward": range(forward[0] - 4, forward[0] + 4),
        "backward": range(backward[1], norm[1] - 5),
        "first update": range(norm[0] + 12, update[0]),
        "later update": range(norm[2], min(number for number in update if number > norm[2])),
        "compiling": range(updated[2] + 2, updated[2] + 80),  # with compile_after = 3
        "saving": range(updated[3] + 1, updated[3] + 2),  # before the fourth step's save
        "evaluation": range(forward[5] - 5, forward[5] + 5),
    }


def moments(case: Case, first: range) -> str:
    """When other programs take everything, for a few refusals or at most a part of the spacing."""
    random = np.random.default_rng(CASES.index(case))
    device = f"@{case.device}" if case.processes > 1 else ""
    gaps = random.integers(SPACING, 2 * SPACING, MOMENTS_EACH - 1)
    at = np.cumsum([random.integers(first.start, first.stop), *gaps])
    # torch's allocator asks once more when it has given back what it kept.
    refusals = random.integers(1, 3, MOMENTS_EACH) * (2 if case.has_cache else 1)
    return ",".join(
        f"{launch}:{EVERYTHING_MIB}*{count}{device},{launch + SPACING // 2}:0{device}"
        for launch, count in zip(at, refusals, strict=True)
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_step_is_lost_whenever_memory_is(train, card, launches, case):
    first = launches(train, card, case)
    run = train(
        *FLAGS,
        *case.flags.split(),
        "--compile=False",
        on=card(devices=case.processes),
        processes=case.processes,
        others_after=moments(case, first),
        timeout_s=300,
        **({} if case.has_cache else WITHOUT_CACHE),
    )
    assert run.code == 0, str(run)
    assert_no_step_is_lost(run)
    assert_first_moment_was(case, run)
    sizes = [stage["micro_batch"] for stage in run.events("stage")]
    assert sizes[0] > min(sizes)
    if not became_slower(run):
        assert sizes[-1] == sizes[0]
    for noise in ("Traceback", "CachingAllocator", "out of memory"):
        assert noise not in run.errors, run.errors


def became_slower(run: Run) -> bool:
    """On a busy machine steps do, which a run takes for a shortage as well."""
    return any("slower" in stage["reason"] for stage in run.events("stage"))


def assert_no_step_is_lost(run: Run) -> None:
    """Every step follows the one before it, but where the log says that the run went back."""
    steps = run.steps()
    assert sorted(set(steps)) == list(range(STEPS))
    jumps = [later for step, later in pairwise(steps) if later != step + 1]
    assert jumps == [event["step"] for event in run.events("went back") if event["step"] in jumps]
    assert (run.out_dir / f"ckpt-{STEPS:08d}.pt").exists()
    assert not run.events("save failed")


def assert_first_moment_was(case: Case, run: Run) -> None:
    shortage = next(
        event for event in run.records("event") if "out of memory" in event.get("reason", "")
    )
    is_in_update = shortage["reason"] == "out of memory in an update"
    told = shortage["name"], shortage["step"], is_in_update
    expected = {
        "forward": ("stage", 0, False),
        "backward": ("stage", 1, False),
        "first update": ("stage", 0, True),
        "later update": ("stage", 2, is_in_update),  # or in the norm before it
        "evaluation": ("evaluation shrunk", 5, False),
        "saving": ("stage", 4, False),  # in the step after it: to save takes no memory of a card
    }
    assert told == expected[case.first]


def test_memory_lost_while_compiling_puts_it_off(train, card, launches):
    first = launches(train, card, Case("compiling"))
    launch = np.random.default_rng(0).integers(first.start, first.stop)
    words = (*FLAGS, "--dtype=bfloat16", "--compile_after=3", "--max_iters=206")
    run = train(*words, others_after=f"{launch}:{EVERYTHING_MIB}*1", **WITHOUT_CACHE)
    assert run.code == 0, str(run)
    assert run.steps() == list(range(206))
    assert [event["step"] for event in run.events("not compiled yet")] == [3]
    stages = [(event["step"], event["now"]) for event in run.events("stage")]
    assert stages[0] == (0, "eager")
    assert "compiled" in dict(stages).values()
    if not became_slower(run):
        assert stages == [(0, "eager"), (203, "compiled")]


def test_compiled_run_shrinks_and_grows_again(train, card, tmp_path):
    # A single eager step is not compared with: kernels that do nothing have no speed, by which a
    # compiled model might be given up.
    words = (*FLAGS, "--dtype=bfloat16", "--batch_size=2", "--compile_after=1")
    # The first run tries kernels out, as often as time allows; what the second launches are steps.
    for folder in ("tried", "counted"):
        first = train(*words, "--max_iters=6", on=card(folder=tmp_path / folder), **WITHOUT_CACHE)
        assert first.code == 0, str(first)
    launch = first.processes["launches"].max()
    run = train(*words, others_after=f"{launch}:{EVERYTHING_MIB}*1", **WITHOUT_CACHE)
    assert run.code == 0, str(run)
    assert_no_step_is_lost(run)
    stages = [(event["now"], event["micro_batch"]) for event in run.events("stage")]
    assert stages[:3] == [("eager", 2), ("compiled", 2), ("compiled", 1)]
    if not became_slower(run):
        assert stages[3:] == [("compiled", 2)]


def test_run_without_room_is_saved_and_says_how_to_go_on(train, card):
    on, words = card(), (*FLAGS, "--compile=False", "--max_iters=12", "--eval_interval=100")
    run = train(*words, on=on, others_after=f"1000:{EVERYTHING_MIB}", **WITHOUT_CACHE)
    assert run.code == 2, str(run)
    steps, (line,) = run.steps(), run.errors.strip().splitlines()
    saved = on.folder / f"out/ckpt-{len(steps):08d}.pt"
    assert saved.exists()
    assert line.startswith(f"error: out of memory at step {len(steps)}, with one sequence at a")
    assert f"the same command goes on from {saved}" in line
    assert train(*words, on=on).code == 0
    assert run.steps() == list(range(12))
