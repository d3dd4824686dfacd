"""Several processes over gloo against one: whole gradients, on the way early, failures together."""

import pytest
import torch

from nanofit.machine.dist import Ranks
from tests import processes
from tests.learning.together import PLACES, STEPS, Run

SCENARIOS = ["undisturbed", "scaled", "recomputed", "failed", "ordered"]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def results(request, tmp_path_factory) -> list[dict]:
    """What came of all scenarios, by process."""
    folder = tmp_path_factory.mktemp("results")
    done = together(request.param, folder, *SCENARIOS)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{request.param}-{n}.pt") for n in range(request.param)]


def together(world: int, folder, *scenarios: str):
    return processes.run_ranks(
        world, "tests/learning/together.py", str(folder), *scenarios, cwd=folder
    )


@pytest.mark.parametrize(
    ("scenario", "options", "rel"),
    [
        ("undisturbed", {}, 1e-5),
        ("scaled", {"dtype": "float16"}, 1e-3),
        ("recomputed", {"recompute": "block"}, 1e-5),
    ],
)
def test_steps_are_those_of_one_process(results, scenario, options, rel):
    alone = Run(Ranks(), **options).steps()
    assert_same(results[0][scenario], alone, rel)
    for other in results[1:]:
        assert other[scenario]["told"] == results[0][scenario]["told"]
        for name, weight in other[scenario]["weights"].items():
            assert torch.equal(weight, results[0][scenario]["weights"][name]), name


def test_buckets_are_on_their_way_before_the_last_pass_is_through(results):
    """In the first step alone there is one bucket, for nobody knows yet what comes first."""
    for result in results:
        first, *others = result["ordered"]["happened"]
        assert first == [("back", 0, False), ("back", 0, False), ("sum", 0, True)]
        for happened in others:
            assert happened == [
                ("back", 0, False),
                ("sum", 0, False),
                ("back", 0, False),
                ("sum", 1, True),
            ]


def test_gradients_take_the_memory_of_one_process(results):
    for result in results:
        assert result["ordered"]["buffers"] == [result["ordered"]["parameter_bytes"]] * STEPS


def test_failure_of_one_is_of_all_wherever_it_comes_and_the_step_can_be_done_again(results):
    expected = results[0]["undisturbed"]
    failures = [*["OtherProcessFailed"] * (len(results) - 1), "OutOfMemoryError"]
    assert len(results[0]["failed"]) == 3 * len(PLACES)
    for case in results[0]["failed"]:
        told = [result["failed"][case] for result in results]
        assert [one["errors"] for one in told] == [[failure] for failure in failures], case
        for one in told:
            assert_same(one, expected)


def test_death_of_one_on_the_way_back_is_told_in_a_line(tmp_path):
    done = together(2, tmp_path, "lost")
    assert done.returncode != 0
    [line] = [one for one in done.stderr.splitlines() if "error: " in one]
    assert "another process of this run has died or hangs (" in line
    assert "Traceback" not in done.stderr


def assert_same(one: dict, other: dict, rel: float = 1e-5) -> None:
    """The same but for rounding, as numbers are added up in another order."""
    for step, (numbers, others) in enumerate(zip(one["told"], other["told"], strict=True)):
        assert numbers == pytest.approx(others, rel=rel), step
