"""The explanation as its user gets it: exact counts, budgets that add up, clear refusals."""

import json
import re

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

import autofit
from model import GPT
from nanofit.machine.overhead import CUDA_CONTEXT_BYTES, LIBRARY_BYTES, collective_bytes
from nanofit.memory.budget import budget_of, dtype_of, has_flash_on
from nanofit.memory.explain import count_parameters
from nanofit.memory.ledger import write_down
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.settings.config import load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError
from tests.conftest import PROJECT
from tests.memory.simulations import simulate

SMALL_30M = str(PROJECT / "config" / "train_small_30m.py")
SIZES = dict(n_layer=2, n_head=1, n_embd=32, block_size=16, vocab_size=512)
TINY = GPTConfig(**SIZES)
WORDS = [*(f"--{name}={value}" for name, value in SIZES.items()), "--batch_size=8", "--explain"]
MIB = 2**20


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


def test_figures_are_those_of_the_ledger_or_of_the_simulator(told):
    for words, course in (
        ([], write_down(Setup(TINY), 8)),
        (["--simulate"], simulate(Setup(TINY), 8)),
    ):
        answer = told("--compile=False", *words)
        assert answer["peak_bytes"] == course.peak_bytes
        assert answer["is_simulated"] == bool(words)
        told_of = [(one["size_bytes"], one["line"]) for one in answer["largest_tensors"]]
        assert told_of == [(one.size_bytes, one.line) for one in course.alive_at_peak[:5]]
        components = {line["component"]: line["size_bytes"] for line in answer["components"]}
        reserved = course.replay(expandable_segments=True).peak_reserved_bytes
        assert components["allocator slack"] == reserved - course.peak_bytes
        assert components["weights"] == course.components_at_peak()["weights"]
        assert components["library workspace"] == LIBRARY_BYTES
    assert answer["written_peak_bytes"] == write_down(Setup(TINY), 8).peak_bytes


@pytest.mark.slow
def test_what_is_not_written_down_is_simulated_unasked(told):
    answer = told("--compile=False", "--loss=full")
    assert answer["is_simulated"]
    assert answer["peak_bytes"] == simulate(Setup(TINY, loss="full"), 8).peak_bytes


@pytest.mark.parametrize("words", [[], ["--simulate"]])
def test_formulas_come_to_the_sizes_beside_them(told, words):
    for line in told("--compile=False", *words)["components"]:
        if not line["component"].startswith(("activations", "logits", "weights", "gradients")):
            continue
        whole, more = line["formula"].removesuffix(" + ..."), line["formula"].endswith("...")
        value = eval(whole.replace("×", "*").replace(",", "").replace(" B", ""))
        rounding = 512 * 40  # of each tensor
        if more:
            assert value < line["size_bytes"], line
        else:
            assert line["size_bytes"] == pytest.approx(value, rel=0.01, abs=rounding), line


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
    answer = told("--vram=2GB", "--memory_limit=200MB")
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
    assert saving["peak_bytes"] < plain["peak_bytes"]
    own = {"allocator slack", "library workspace", "CUDA context"}
    tensors = [line for line in saving["components"] if line["component"] not in own]
    assert sum(line["size_bytes"] for line in tensors) == saving["peak_bytes"]
    narrow = told("--compile=False", "--optimizer_bits=8")
    assert narrow["peak_bytes"] < plain["peak_bytes"]


MODERN = ["--arch=modern", "--optimizer=muon", "--compile=False"]


@pytest.mark.slow
def test_modern_recipe_is_explained_as_the_plain_one_is(told, shown):
    """Counts of the real model, sizes of the simulator, and the lines of its own parts."""
    shape, learn, _ = load_config([*WORDS[:-1], *MODERN])
    assert shape.bias and learn.optimizer == "muon"
    setup = Setup(shape, optimizer="muon")
    written, simulated = told(*MODERN), told(*MODERN, "--simulate")
    assert written["peak_bytes"] == write_down(setup, 8).peak_bytes
    assert simulated["peak_bytes"] == simulate(setup, 8).peak_bytes
    assert written["peak_bytes"] == pytest.approx(simulated["peak_bytes"], rel=0.03)
    assert {one["line"] for one in written["largest_tensors"]}
    with FakeTensorMode():
        parameters = dict(GPT(shape).named_parameters())
    components = {line["component"]: line["size_bytes"] for line in written["components"]}
    moments = sum(p.numel() * (1 if is_muons(n, p) else 2) for n, p in parameters.items())
    rounding = 512 * 3 * len(parameters)
    assert components["optimiser state"] == pytest.approx(4 * moments, abs=rounding)
    weights = sum(p.numel() for p in parameters.values())
    assert components["weights"] == pytest.approx(4 * weights, abs=rounding + 8 * 1024)
    text = shown(*MODERN, "--gpu=RTX 4070")
    assert max(map(len, text.splitlines())) <= 100
    assert f"{weights:,}" in text


def is_muons(name: str, parameter) -> bool:
    return name.startswith("transformer.h.") and parameter.dim() == 2


def test_each_of_several_cards_is_explained_as_it_is_written_down(told):
    for words, shard in (([], False), (["--shard"], True), (["--shard=True"], True)):
        answer = told("--compile=False", "--gpu=RTX 4070", "--gpus=2", *words)
        setup = Setup(TINY, world=2, shard=shard)
        assert answer["peak_bytes"] == write_down(setup, 8).peak_bytes
        assert (answer["gpus"], answer["is_sharded"]) == (2, shard)
        components = {line["component"]: line["size_bytes"] for line in answer["components"]}
        assert components["NCCL's buffers"] == collective_bytes(2)
        stages = {choice["stage"] for choice in answer["choices"]}
        assert stages == ({"eager"} if shard else {"eager", "compiled"})


def test_ways_to_spread_a_model_say_what_fits(told):
    limit = ["--vram=2GB", "--memory_limit=900MB"]
    answer = told(*limit, "--gpus=2", "--n_embd=512", "--block_size=64")
    room = answer["budget"]["limit_bytes"] - LIBRARY_BYTES - collective_bytes(2)
    for way in answer["ways"]:
        setup = Setup(
            GPTConfig(**SIZES | dict(n_embd=512, block_size=64)),
            world=way["world"],
            shard=way["shard"],
            recompute=way["recompute"],
            optimizer_bits=way["optimizer_bits"],
        )
        own_room = room if way["world"] == 2 else room + collective_bytes(2)
        need, largest = need_of(setup), way["largest_micro_batch_size"]
        assert largest == 0 or need.at(largest) <= own_room < need.at(largest + 1)
        assert way["one_sequence_bytes"] == need.at(1) > way["held_bytes"]
    assert [(way["world"], way["shard"]) for way in answer["ways"]] == (
        3 * [(1, False)] + 3 * [(2, False)] + 2 * [(2, True)]
    )
    assert answer["ways"][-1]["largest_micro_batch_size"] > 0


@pytest.mark.slow
def test_a_model_of_1500_million_takes_three_cards_of_12_gb(shown):
    """Of GPT-2 XL 16 bytes a parameter are 23 GiB; a half of them is more than such a card has."""
    xl = ["--n_layer=48", "--n_head=25", "--n_embd=1600", "--vocab_size=50304"]
    text = shown(*xl, "--block_size=1024", "--gpu=RTX 4070", "--gpus=2", "--shard")
    assert "1.56B parameters: does not fit." in text
    assert "so many cards: 4 with savers none; 3 with savers recompute=block." in text
    assert "nothing here was measured" in text
    held = re.findall(r"2, (whole|sharded) +none +([\d.]+)", text)
    assert [(way, float(gib)) for way, gib in held] == [
        ("whole", pytest.approx(16 * 1.556840e9 / 2**30, abs=0.01)),
        ("sharded", pytest.approx(8 * 1.556840e9 / 2**30, abs=0.01)),
    ]


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
        "as written down; --simulate checks it",
        "assumed: cuBLAS and the like",
        "assumed: of any process",
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


def test_attention_is_forecast_for_the_card_it_runs_on():
    _, _, run = load_config([])
    assert has_flash_on("RTX 4070", run)
    assert not has_flash_on("RTX 2080 Ti", run)
    assert not has_flash_on("T4", run)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--explain", "--gpu", "RTX 9999"], "RTX 9999"),
        (["--explain", "--vram", "many"], "12GB|size"),
        (["--explain", "--vram", "12"], "12GB"),
        (["--explain", "--n_layers=3"], "n_layer"),
        (["--explain", "--gpu"], "--gpu"),
        (["--explain", "--gpus=0"], "--gpus 0 must be from 1"),
        (["--explain", "--shard"], "--gpus 2 or more"),
        (["--explain", "--gpus=2", "--shard", "--optimizer=muon"], "--optimizer=adamw"),
        (["--explain", "--gpus=2", "--shard", "--optimizer_bits=8"], "--optimizer_bits=32"),
        (["--gpus=2"], "go with --explain"),
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
