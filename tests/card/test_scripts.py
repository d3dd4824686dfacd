"""autofit.py, plan.py and sample.py on a card."""

import json
from dataclasses import asdict

import pytest
import torch

from model import GPT
from nanofit.settings.shape import GPTConfig
from tests.card.conftest import SMALL
from tests.card.harness import CONTEXT_MIB, MIB

pytestmark = pytest.mark.covered


@pytest.fixture
def checkpoint(tmp_path):
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=64, block_size=128)
    saved = {"model": GPT(shape).state_dict(), "model_args": asdict(shape)}
    torch.save(saved, tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt"


@pytest.fixture
def flags(tokens):
    return [*SMALL, f"--dataset={tokens}", "--compile=False"]


def test_autofit_measures_the_overhead_that_explain_then_tells(card, flags):
    on = card(others=600)
    fit = on.run("autofit.py", *flags, "--json")
    assert fit.code == 0, fit
    found = json.loads(fit.output[fit.output.index("{") :])
    free = 12282 - CONTEXT_MIB - 600
    limit_mib = found["limit_bytes"] / MIB
    assert 0 <= free * 0.95 - 128 - limit_mib <= 0.01 * 12282

    told = on.run("autofit.py", *flags, "--explain")
    assert told.code == 0, told
    assert "measured here: of any process" in told.output
    answer = json.loads(on.run("autofit.py", *flags, "--explain", "--json").output)
    assert answer["budget"]["context_bytes"] == CONTEXT_MIB * MIB
    assert answer["budget"]["other_programs_bytes"] == 600 * MIB


def test_explain_before_any_run_says_what_it_assumes(card, flags):
    told = card().run("autofit.py", *flags, "--explain")
    assert told.code == 0, told
    assert "assumed: of any process" in told.output
    assert "assumed: cuBLAS and the like" in told.output


def test_without_a_card_the_same_build_says_what_to_do(card, flags):
    fit = card(devices=0).run("autofit.py", *flags)
    assert fit.code == 2, fit
    assert "there is no limit to fit on CPU" in fit.errors
    told = card(devices=0).run("autofit.py", *flags, "--explain")
    assert told.code == 0, told
    assert "add a card with --gpu 'RTX 4070'" in told.output


@pytest.mark.parametrize("compiled", [False, True])
def test_plan_measures_the_card(card, flags, compiled):
    run = card().run("plan.py", *flags, f"--compile={compiled}", "--json")
    assert run.code == 0, run
    source = json.loads(run.output)["speed"]["source"]
    assert "measured here: NVIDIA GeForce RTX 4070" in source
    assert ("for torch.compile" in source) == compiled


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("plan.py", "not even one sequence fits on NVIDIA GeForce RTX 4070"),
        ("autofit.py", "autofit cannot use cuda:0: its memory is full; end what uses it, or wait"),
        ("sample.py", "out of memory on NVIDIA GeForce RTX 4070; end what else uses it"),
    ],
)
def test_full_card_is_one_line(card, flags, checkpoint, script, said):
    run = card(memory=CONTEXT_MIB + 1).run(
        script, *([f"--checkpoint={checkpoint}"] if script == "sample.py" else flags)
    )
    assert run.code == 2, run
    *before, line = run.errors.splitlines()
    assert said in line
    assert before == ["trying some real steps on NVIDIA GeForce RTX 4070 ..."] * (
        script == "plan.py"
    )


def test_text_is_sampled_on_the_card(card, train):
    trained = train("--compile=False", "--max_iters=1")
    assert trained.code == 0, trained
    on = card("RTX 2060", folder=trained.out_dir.parent)
    words = [f"--out_dir={trained.out_dir}", "--start=Once", "--max_new_tokens=3"]
    run = on.run("sample.py", *words, "--dtype=bfloat16")
    assert run.code == 0, run
    assert run.output.startswith("Once")
    assert "has no bfloat16: float16 is used instead" in run.errors
    assert run.peak_bytes > CONTEXT_MIB * MIB
