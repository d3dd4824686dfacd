"""autofit.py, plan.py, sample.py and evaluate.py on a card."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from model import GPT
from nanofit.settings.shape import GPTConfig
from tests.card.conftest import SMALL
from tests.card.harness import CONTEXT_MIB, MIB

pytestmark = pytest.mark.covered

WITHOUT_CACHE = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
A_REFUSAL = "10:12282*1"  # other programs take everything until one allocation has failed


@pytest.fixture
def checkpoint(tmp_path):
    return saved(tmp_path / "ckpt.pt", width=64)


def saved(path: Path, *, width: int) -> Path:
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=width, block_size=128)
    torch.save({"model": GPT(shape).state_dict(), "model_args": asdict(shape)}, path)
    return path


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


TO_BE_CHOSEN = "--model=auto --n_layer=2 --n_embd=64 --block_size=128 --report=False".split()


def test_a_model_is_chosen_for_the_card_and_learns_there(card, tokens):
    on = card(others=600)
    out = on.folder / "out"
    words = [*TO_BE_CHOSEN, "--hours=0.002", f"--dataset={tokens}", f"--out_dir={out}"]
    run = on.run("train.py", *words, "--sample_interval=0")
    assert run.code == 0, run
    assert "expected of GeForce RTX 4070" in run.output
    usable = (12282 - CONTEXT_MIB - 600) * 0.95 - 128
    assert 0 <= usable - int(re.search(r" of ([\d,]+) MiB", run.output)[1].replace(",", "")) <= 300
    assert (out / "auto.py").read_text().count("\nn_head = 1\n") == 1
    assert "the run is complete" in on.run("train.py", *words, "--sample_interval=0").output


def test_a_model_is_chosen_by_trials_where_no_speed_is_published(card, tokens):
    words = [*TO_BE_CHOSEN, f"--dataset={tokens}", "--dtype=float32", "--hours=1", "--json"]
    run = card().run("plan.py", *words)
    assert run.code == 0, run
    told = json.loads(run.output)
    assert "measured here: NVIDIA GeForce RTX 4070, float32" in told["speed"]["source"]
    assert "for torch.compile" in told["speed"]["source"]
    assert told["chosen"]["settings"]["arch"] == "modern"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("plan.py", "not even one sequence fits on NVIDIA GeForce RTX 4070"),
        ("autofit.py", "autofit cannot use cuda:0: its memory is full; end what uses it, or wait"),
        ("sample.py", "out of memory on NVIDIA GeForce RTX 4070; end what else uses it"),
        ("evaluate.py", "out of memory on NVIDIA GeForce RTX 4070; end what else uses it"),
    ],
)
def test_full_card_is_one_line(card, flags, checkpoint, tokens, script, said):
    words = {
        "sample.py": [f"--checkpoint={checkpoint}"],
        "evaluate.py": [checkpoint, f"--dataset={tokens}"],
    }
    run = card(memory=CONTEXT_MIB + 1).run(script, *words.get(script, flags))
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


def test_samples_that_do_not_fit_together_are_made_in_smaller_parts(card, checkpoint):
    words = [f"--checkpoint={checkpoint}", "--start=Once", "--max_new_tokens=3", "--num_samples=4"]
    run = card().run("sample.py", *words, others_after=A_REFUSAL, **WITHOUT_CACHE)
    assert run.code == 0, run
    for number in range(1, 5):
        assert run.output.count(f"--- sample {number} of 4, seed {1336 + number}\nOnce") == 1


@pytest.mark.parametrize("name", ["RTX 4070", "RTX 2060"])
def test_validation_is_evaluated_in_what_fits_by_arithmetic(card, tmp_path, tokens, name):
    words = [saved(tmp_path / "wide.pt", width=256), f"--dataset={tokens}", "--json"]
    run = card(name, memory=CONTEXT_MIB + 500).run("evaluate.py", *words)
    assert run.code == 0, run
    answer = json.loads(run.output)
    (model,) = answer["models"]
    assert model["precision"] == ("bfloat16" if name == "RTX 4070" else "float16")
    assert model["tokens"] == answer["tokens"] == 200_000
    assert "out of memory" not in run.errors
    used_mib = run.peak_bytes / MIB - CONTEXT_MIB
    assert 250 < used_mib < 500


def test_evaluation_goes_on_in_smaller_micro_batches(card, checkpoint, tokens):
    words = [checkpoint, f"--dataset={tokens}", "--dtype=bfloat16", "--json"]
    run = card().run("evaluate.py", *words, others_after=A_REFUSAL, **WITHOUT_CACHE)
    assert run.code == 0, run
    assert "out of memory with 512 sequences at once; on with 256\n" in run.errors
    assert json.loads(run.output)["models"][0]["tokens"] == 200_000
