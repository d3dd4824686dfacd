"""A model in the parts of several processes against the whole one."""

import pytest
import torch

from nanofit.learning.step import evaluate
from nanofit.machine.dist import Ranks
from tests.learning.test_engine import assert_same, together
from tests.learning.together import Run

SCENARIOS = ["in_parts", "in_parts_scaled", "in_parts_recomputed"]
SCENARIOS += ["held", "evaluated", "saved_and_loaded"]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def results(request, tmp_path_factory) -> list[dict]:
    """What came of all scenarios, by process."""
    folder = tmp_path_factory.mktemp("results")
    done = together(request.param, folder, *SCENARIOS)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{request.param}-{n}.pt") for n in range(request.param)]


@pytest.mark.parametrize(
    ("scenario", "options", "rel"),
    [
        ("in_parts", {}, 1e-5),
        ("in_parts_scaled", {"dtype": "float16"}, 1e-3),
        ("in_parts_recomputed", {"recompute": "block"}, 1e-5),
        ("saved_and_loaded", {}, 1e-5),
    ],
)
def test_steps_are_those_of_the_whole_model(results, scenario, options, rel):
    alone = Run(Ranks(), **options).steps()
    for result in results:
        assert result[scenario]["told"] == results[0][scenario]["told"]
        assert_same(result[scenario], alone, rel)


def test_what_is_gathered_is_the_whole_model(results):
    alone = Run(Ranks()).steps()["weights"]
    gathered = results[0]["in_parts"]["weights"]
    assert gathered["lm_head.weight"].data_ptr() == gathered["transformer.wte.weight"].data_ptr()
    assert gathered.keys() == alone.keys()
    for name, weight in alone.items():
        # Of a key's bias the gradient is nothing but rounding, of which AdamW makes whole steps.
        if not name.endswith("c_attn.bias"):
            torch.testing.assert_close(gathered[name], weight, rtol=0, atol=1e-4)


def test_each_process_has_its_part_of_weights_gradients_and_moments(results):
    held = torch.tensor([result["held"]["held"] for result in results])
    whole = results[0]["held"]["whole"]
    assert held.sum(0).tolist() == [whole] * 3
    assert held.max() < 1.01 * whole / len(results)


def test_evaluation_needs_all_processes_even_if_some_have_no_sequence(results):
    run = Run(Ranks(world=len(results)))
    batches = [batch._replace(share=0.5) for batch in run._micro_batches(0)]
    alone = evaluate(run.model, batches, device=run.device, ranks=Ranks())
    for result in results:
        assert result["evaluated"]["loss"] == pytest.approx(alone, rel=1e-6)


def test_failure_of_one_part_ends_all_in_a_line(tmp_path):
    done = together(2, tmp_path, "part_failed")
    assert done.returncode == 2, done.stderr
    [line] = [one for one in done.stderr.splitlines() if "error: " in one]
    assert "out of memory (no room), and no process can go on without this one's part" in line
    # Another batch_size alone would be another run.
    assert "half the batch_size and twice the gradient_accumulation_steps" in line
