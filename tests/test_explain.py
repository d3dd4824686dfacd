"""The explanation as its user gets it: exact counts, budgets that add up, clear refusals."""

import json

import pytest
from conftest import PROJECT
from simulations import simulate
from torch._subclasses.fake_tensor import FakeTensorMode

import autofit
from model import GPT, GPTConfig
from nanofit.config import load_config
from nanofit.explain import budget_of, count_parameters, dtype_of
from nanofit.memory import Setup, need_of
from nanofit.overhead import CUDA_CONTEXT_BYTES, LIBRARY_BYTES
from nanofit.terminal import InputError

SMALL_30M = str(PROJECT / "config" / "train_small_30m.py")
SIZES = dict(n_layer=2, n_head=1, n_embd=32, block_size=16, vocab_size=512)
TINY = GPTConfig(**SIZES)
WORDS = [*(f"--{name}={value}" for name, value in SIZES.items()), "--batch_size=8", "--explain"]
MIB = 2**20


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    """The simulations of one explanation serve all the others."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache_folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))


@pytest.fixture
def told(capsys):
    """What autofit.py --explain tells programs."""

    def run(*words: str) -> dict:
        autofit.main([*WORDS, "--json", *words])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def shown(capsys):
    """What it shows a person whose output goes to a file."""

    def run(*words: str) -> str:
        autofit.main([*WORDS, *words])
        return capsys.readouterr().out

    return run


def test_worked_example_has_nanogpts_counts():
    shape, _, _ = load_config([SMALL_30M])
    counts = count_parameters(shape)
    assert f"{counts.without_positions / 1e6:.2f}" == "29.94"
    assert (counts.decayed_tensors, counts.decayed_parameters) == (26, 30_130_176)
    with FakeTensorMode():
        assert counts.parameters == sum(p.numel() for p in GPT(shape).parameters())
    assert counts.parameters == counts.decayed_parameters + counts.other_parameters


def test_figures_are_those_of_the_simulator(told):
    answer = told("--compile=False")
    simulation = simulate(Setup(TINY), 8)
    assert answer["simulated_peak_bytes"] == simulation.peak_bytes
    told_of = [(one["size_bytes"], one["line"]) for one in answer["largest_tensors"]]
    assert told_of == [(one.size_bytes, one.line) for one in simulation.alive_at_peak[:5]]
    components = {line["component"]: line["size_bytes"] for line in answer["components"]}
    reserved = simulation.replay(expandable_segments=True).peak_reserved_bytes
    assert components["allocator slack"] == reserved - simulation.peak_bytes
    assert components["weights"] == simulation.components_at_peak()["weights"]
    assert components["library workspace"] == LIBRARY_BYTES


def test_budget_of_a_card_adds_up(told):
    answer = told("--gpu", "RTX 4070")
    budget = answer["budget"]
    assert budget["total_bytes"] == 12_282 * MIB
    free = budget["total_bytes"] - CUDA_CONTEXT_BYTES
    assert budget["limit_bytes"] == pytest.approx(0.95 * free - 128 * MIB, abs=1)
    process = sum(line["size_bytes"] for line in answer["components"])
    others = budget["reserve_bytes"] + budget["left_bytes"]
    assert process + others == budget["total_bytes"]
    assert budget["other_programs_bytes"] is None


def test_each_choice_says_the_largest_micro_batch_that_fits(told):
    answer = told("--vram=2GB")
    limit = answer["budget"]["limit_bytes"] - LIBRARY_BYTES
    assert {choice["stage"] for choice in answer["choices"]} == {"eager", "compiled"}
    plain = answer["choices"][0]
    need = need_of(Setup(TINY))
    assert plain["peak_bytes"] == need.at(8)
    largest = plain["largest_micro_batch_size"]
    assert need.at(largest) <= limit < need.at(largest + 1)
    savers = {choice["saver"]: choice for choice in answer["choices"]}
    assert savers["recompute=block"]["peak_bytes"] < plain["peak_bytes"]
    assert savers["recompute=block"]["extra_time"] > savers["recompute=alternate"]["extra_time"] > 0


def test_savers_of_the_config_are_in_the_table(told):
    plain, saving = told("--compile=False"), told("--compile=False", "--recompute=block")
    assert saving["simulated_peak_bytes"] < plain["simulated_peak_bytes"]
    tensors = [line for line in saving["components"] if line["formula"] == "simulated"]
    assert sum(line["size_bytes"] for line in tensors) == saving["simulated_peak_bytes"]
    narrow = told("--compile=False", "--optimizer_bits=8")
    total_bytes, narrow_bytes = (
        sum(line["size_bytes"] for line in one["components"]) for one in (plain, narrow)
    )
    assert narrow_bytes < total_bytes


def test_person_sees_all_of_it_in_100_columns(shown):
    text = shown("--gpu=RTX 4070")
    assert max(map(len, text.splitlines())) <= 100
    for expected in (
        "activations",
        "CUDA context",
        "GeForce RTX 4070",
        "other programs",
        "recompute=selective",
        "activation_memory_budget=0.5",
        "forward 2",
        "by these formulas",
    ):
        assert expected in text, expected


def test_without_a_card_nothing_is_assumed_about_one(told, shown):
    assert told()["budget"] is None
    text = shown()
    assert "--gpu 'RTX 4070'" in text
    assert "largest micro-batch" not in text
    assert "limit" not in text.replace("speed limits", "")


def test_too_small_a_card_says_how_much_is_lacking(shown):
    assert "lacking" in shown("--vram=1GB", "--memory_limit=100MB")


def test_limits_of_the_config_are_obeyed():
    *_, run = load_config(["--memory_limit=3GB"])
    assert budget_of("RTX 4070", None, run).limit_bytes == 3 * 10**9
    *_, run = load_config(["--memory_reserve=1GB"])
    budget = budget_of(None, 12 * 2**30, run)
    assert budget.limit_bytes == 12 * 2**30 - CUDA_CONTEXT_BYTES - 10**9


def test_precision_is_what_the_card_can_do():
    *_, run = load_config([])
    assert dtype_of("RTX 4070", run) == "bfloat16"
    assert dtype_of("RTX 2080 Ti", run) == "float16"
    *_, run = load_config(["--dtype=float32"])
    assert dtype_of("RTX 2080 Ti", run) == "float32"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--explain", "--gpu", "RTX 9999"], "RTX 9999"),
        (["--explain", "--vram", "many"], "12GB|size"),
        (["--explain", "--vram", "12"], "12GB"),
        (["--explain", "--n_layers=3"], "n_layer"),
        (["--explain", "--gpu"], "--gpu"),
    ],
)
def test_mistakes_are_named(words, told):
    with pytest.raises(InputError, match=told):
        autofit.main([SMALL_30M, *words])


def test_help_shows_how(capsys):
    with pytest.raises(SystemExit) as end:
        autofit.main(["--help"])
    assert end.value.code == 0
    assert "--vram SIZE" in capsys.readouterr().out
