"""The planner as its user runs it: exact counts, the worked example, and clear refusals."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import plan
from model import GPT
from nanofit.data.loader import random_micro_batches
from nanofit.fit import speed
from nanofit.fit.search import sizes_for
from nanofit.learning.muon import Halves
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import train_step
from nanofit.machine.dist import Ranks
from nanofit.machine.overhead import LIBRARY_BYTES
from nanofit.memory.budget import budget_of
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.outlook.plan import Data, Plan, speed_of_card, within_budget
from nanofit.settings.config import Settings, load_config
from nanofit.terminal import InputError
from tests import processes
from tests.conftest import PROJECT, TINY_MODEL

ONE_SHARD = str(PROJECT / "config" / "train_fineweb_4070_one_shard.py")
GPT2 = str(PROJECT / "config" / "train_gpt2_124m.py")
ON_4070 = ["--gpu", "RTX 4070"]


@pytest.fixture
def planned(capsys):
    """What plan.py tells programs."""

    def run(*words: str) -> dict:
        plan.main([*words, "--json"])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def printed(capsys):
    """What plan.py shows a person whose output goes to a file."""

    def run(*words: str) -> str:
        plan.main(list(words))
        return capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """A parquet whose texts no one could count in time; only their counts are there."""
    path = tmp_path_factory.mktemp("shard") / "000.parquet"
    counts = np.arange(1, 1001)
    table = pa.table({"text": [""] * 1000, "token_count": counts})
    pq.write_table(table, path)
    return path


def test_the_worked_example_is_shown_as_asked_and_its_better_number(planned):
    told = planned(ONE_SHARD, *ON_4070, "--unique_tokens=0.72B")
    asked, instead = told["asked"], told["instead"]
    assert asked["steps"] == 250_000
    assert asked["tokens"] == 250_000 * 491_520
    assert asked["epochs"] == pytest.approx(250_000 * 491_520 / 0.72e9)
    assert asked["epochs"] > 100 and asked["seconds"] > 7 * 86400
    assert "waste" in told["warnings"][0]
    assert instead["epochs"] == pytest.approx(4, rel=1e-3)
    assert instead["steps"] == round(4 * 0.72e9 / 491_520)
    one, four, sixteen, last = (row["loss"] for row in told["milestones"])
    assert one > four > sixteen > last
    assert four - last < 0.3


def test_the_command_to_paste_gives_the_better_run(planned):
    told = planned(ONE_SHARD, *ON_4070, "--unique_tokens=0.72B", "--max_iters=250001")
    python, script, *words = told["instead"]["command"].split()
    assert (python, script) == ("python", "train.py")
    _, learn, _ = load_config(words)
    assert learn.max_iters == learn.decay_end == told["instead"]["steps"]
    assert learn.warmup_iters <= learn.max_iters / 10
    assert learn.weight_decay == pytest.approx(0.57 * 64_041_472 / 0.72e9, abs=1e-3)
    again = planned(*words, *ON_4070, "--unique_tokens=0.72B")
    assert again["warnings"] == []
    assert load_config(again["instead"]["command"].split()[2:])[1] == learn


def test_parameters_are_counted_on_the_model(planned):
    asked = planned(ONE_SHARD, *ON_4070)["asked"]
    shape, _, _ = load_config([ONE_SHARD])
    weights = GPT(shape).state_dict()
    del weights["lm_head.weight"]  # the embedding once more
    assert asked["parameters"] == sum(tensor.numel() for tensor in weights.values())
    embeddings = ("transformer.wte.weight", "transformer.wpe.weight")
    inner = sum(tensor.numel() for name, tensor in weights.items() if name not in embeddings)
    assert asked["non_embedding_parameters"] == inner


def test_a_budget_of_hours_is_spent_and_not_more(planned):
    told = planned(GPT2, *ON_4070, "--hours", "24")
    step_s = told["asked"]["tokens_per_step"] / told["speed"]["tokens_per_s"]
    assert 24 * 3600 - step_s < told["asked"]["seconds"] <= 24 * 3600
    for data in ([], ["--unique_tokens=0.1B"]):  # however many epochs that may be
        told = planned(ONE_SHARD, *ON_4070, "--hours", "24", *data)
        _, learn, _ = load_config(told["asked"]["command"].split()[2:])
        assert learn.max_iters == learn.decay_end == told["asked"]["steps"]


def test_hours_of_a_config_are_a_budget_as_well(planned, tmp_path):
    config = tmp_path / "short.py"
    config.write_text("hours = 2\n")
    told = planned(str(config), *ON_4070)
    assert told["asked"] == planned(*ON_4070, "--hours=2")["asked"] | {
        "command": told["asked"]["command"]
    }
    _, learn, _ = load_config(told["asked"]["command"].split()[2:])
    assert (learn.hours, learn.max_iters) == (None, told["asked"]["steps"])


def test_budgets_of_tokens_and_epochs_agree(planned):
    data = "--unique_tokens=500M"
    by_tokens = planned(GPT2, *ON_4070, data, "--tokens=2B")["asked"]
    by_epochs = planned(GPT2, *ON_4070, data, "--epochs", "4")["asked"]
    assert by_tokens == by_epochs
    assert by_tokens["steps"] == int(2e9 / 491_520)


def test_prepared_data_are_counted_from_their_bins(planned, tiny_dataset):
    asked = planned(*TINY_MODEL, f"--dataset={tiny_dataset}", *ON_4070)["asked"]
    assert asked["unique_tokens"] == (tiny_dataset / "train.bin").stat().st_size // 2
    sizes = [path.stat().st_size for path in tiny_dataset.glob("*.bin")]
    assert asked["bin_bytes"] == sum(sizes)
    assert asked["epochs"] == 12 * 128 / 4000
    assert asked["loss"] is None  # no law for a vocabulary of 64


@pytest.mark.parametrize("given", ["shard", "dataset"])
def test_data_not_yet_prepared_are_counted_by_their_token_counts(planned, shard, given):
    word = f"--parquet={shard}" if given == "shard" else f"--dataset={shard.parent}"
    asked = planned(GPT2, *ON_4070, word)["asked"]
    tokens = 1000 * 1001 // 2 + 1000  # and one end-of-text each
    assert asked["bin_bytes"] == 2 * tokens
    assert asked["unique_tokens"] == round(tokens * 0.99)
    assert "token_count column of 1 parquet file, not yet prepared" in asked["data"]


def test_without_data_the_rest_is_planned_and_the_way_out_told(printed, tmp_path):
    told = printed(GPT2, *ON_4070, f"--dataset={tmp_path}/none")
    assert "no data in" in told and "--unique_tokens 0.65B" in told
    assert "epochs  " not in told.split("What it will give")[0]


def test_a_checkpoint_takes_the_disk_that_is_told(planned, tiny_run, tiny_dataset, tmp_path):
    flags = ["--n_embd=128", "--lr_schedule=wsd", "--keep_checkpoints=2"]
    assert tiny_run(*flags, "--max_iters=2").returncode == 0
    told = planned(*TINY_MODEL, *flags, f"--dataset={tiny_dataset}", *ON_4070)["asked"]
    saved = (tmp_path / "out" / "ckpt-00000002.pt").stat().st_size
    assert told["checkpoint_bytes_at_most"] / 5 == pytest.approx(saved, rel=0.1)


def test_speed_here_is_measured_by_real_steps(planned, tiny_dataset, monkeypatch):
    monkeypatch.setattr(speed, "TRIAL_S", 0.1)
    told = planned(*TINY_MODEL, f"--dataset={tiny_dataset}")
    assert told["speed"]["source"].startswith("measured here: CPU")
    assert told["speed"]["tokens_per_s"] > 0
    assert told["asked"]["kwh"] is None


@pytest.mark.parametrize("trial_s", [0.5, 8.0, 200.0])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_measured_speed_counts_one_update_a_step_as_a_whole_step_does(
    monkeypatch, trial_s, optimizer
):
    """By a clock on which a sequence takes 0.25 s and an update 3 s: trial against one real step.

    Trials of less than a step, of some passes, and of more than a step.
    """
    now = [0.0]

    def pass_time(module, inputs):
        if isinstance(module, GPT):
            now[0] += 0.25 * len(inputs[0])

    def update_time(stepped, *_):
        if optimizer == "adamw" or isinstance(stepped, Halves):
            now[0] += 3.0

    forwards = register_module_forward_pre_hook(pass_time)
    updates = register_optimizer_step_post_hook(update_time)
    monkeypatch.setattr(speed.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(speed, "TRIAL_S", trial_s)
    batch = ["--batch_size=4", "--gradient_accumulation_steps=30", f"--optimizer={optimizer}"]
    settings = load_config([*TINY_MODEL, *batch])
    shape, learn, _ = settings
    try:
        measured = speed.measure_speed(settings)
        started, device, model = now[0], measured.device, GPT(shape)
        whole = random_micro_batches(
            learn.batch_size,
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
            device=device,
            passes=learn.gradient_accumulation_steps,
        )
        rest = dict(device=device, ranks=Ranks(), lr=0.0, grad_clip=1.0, seed=0)
        train_step(model, build_optimizer(model, learn), device.grad_scaler(), whole, **rest)
    finally:
        forwards.remove()
        updates.remove()
    assert now[0] - started == 120 * 0.25 + 3.0
    assert measured.tokens_per_s == pytest.approx(120 * shape.block_size / (now[0] - started))


def test_sections_are_the_promised_ones_and_fit_a_log_file(printed):
    told = printed(ONE_SHARD, *ON_4070, "--unique_tokens=0.72B")
    titles = [line for line in told.splitlines() if line.startswith(("What ", "Where "))]
    assert titles == [
        "What you asked for",
        "What it will give",
        "What to do instead",
        "Where the speed comes from",
    ]
    lines = [line for line in told.splitlines() if not line.startswith("python train.py")]
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in told
    shown = " ".join(told.split())
    assert "58.3 TFLOPS" in shown and "504 GB/s" in shown
    assert "reached 102% on a GeForce RTX 4070 and 75% on a GeForce RTX 4090" in shown


def test_two_cards_take_half_the_time_and_what_they_wait_for_each_other(planned):
    one, two = planned(GPT2, *ON_4070), planned(GPT2, *ON_4070, "--gpus=2", "--link=10gbe")
    several = two["several_gpus"]
    assert one["several_gpus"] is None
    step_s = 491_520 / two["speed"]["tokens_per_s"]
    assert step_s == pytest.approx(several["computing_s"] + several["waiting_s"])
    assert several["waiting_share"] == pytest.approx(several["waiting_s"] / step_s)
    alone_s = 491_520 / one["speed"]["tokens_per_s"]
    assert several["computing_s"] == pytest.approx(alone_s / 2, rel=0.01)  # but for the update
    assert several["sent_bytes_per_step"] == 4 * one["asked"]["parameters"]
    assert not several["overlaps"]  # compiled
    link_s = several["sent_bytes_per_step"] / several["link_bytes_per_s"]
    assert several["waiting_s"] == pytest.approx(link_s)
    hours = [planned_one["asked"]["seconds"] / 3600 for planned_one in (one, two)]
    assert two["asked"]["kwh"] == pytest.approx(one["asked"]["kwh"] * 2 * hours[1] / hours[0])


def test_eager_cards_hide_what_they_send_and_slower_links_show(planned):
    words = [GPT2, *ON_4070, "--gpus=2", "--compile=False"]
    shares = [
        planned(*words, f"--link={link}", *shard)["several_gpus"]["waiting_share"]
        for shard in ([], ["--shard"])
        for link in ("pcie4-x16", "pcie4-x8", "10gbe")
    ]
    assert shares == sorted(shares[:3]) + sorted(shares[3:])
    assert shares[0] == shares[1] == 0
    assert shares[5] > 0.25 > 0.05 > shares[2]  # blocks in each pass, gradients once


def test_several_cards_are_told_in_a_section_of_their_own(printed):
    text = printed(GPT2, *ON_4070, "--gpus=2", "--shard", "--unique_tokens=10B")
    lines = [line for line in text.splitlines() if not line.startswith("torchrun")]  # to be pasted
    assert max(map(len, lines)) <= 100
    for said in ("by arithmetic, nothing was measured", "pcie4-x8", "of the time", "400 W"):
        assert said in text, said
    command = next(line for line in text.splitlines() if line.startswith("torchrun"))
    assert command.startswith(f"torchrun --standalone --nproc_per_node=2 train.py {GPT2}")
    assert load_config(command.split("train.py ")[1].split()).run.shard
    assert "What the cards tell each other" not in printed(GPT2, *ON_4070)


def test_a_sharded_step_is_judged_with_its_batch_as_it_is(printed):
    large = [GPT2, *ON_4070, "--gpus=2", "--n_layer=36", "--n_head=20", "--n_embd=1280"]
    words = " ".join(printed(*large, "--shard").split())
    assert "12 sequences a pass do not fit" in words
    advised = re.findall(r"--(?:batch_size|gradient_accumulation_steps)=\d+", words)
    settings = load_config([GPT2, *advised])
    assert settings.learn.sequences_per_step == load_config([GPT2]).learn.sequences_per_step
    assert f"{settings.learn.batch_size} sequences a pass, eager, take" in " ".join(
        printed(*large, "--shard", *advised).split()
    )


def test_a_file_may_ask_for_parts_as_well(planned, tmp_path):
    (tmp_path / "parts.py").write_text("shard = True\n")
    by_file = planned(GPT2, *ON_4070, "--gpus=2", str(tmp_path / "parts.py"))
    by_flag = planned(GPT2, *ON_4070, "--gpus=2", "--shard")
    assert by_file["several_gpus"] == by_flag["several_gpus"]
    wide = planned(GPT2, *ON_4070, "--gpus=2", "--shard", "--dtype=float32")["several_gpus"]
    assert wide["sent_bytes_per_step"] > 1.2 * by_flag["several_gpus"]["sent_bytes_per_step"]


def test_a_card_without_bfloat16_is_told(planned):
    told = planned(GPT2, "--gpu=2080 Ti", "--dtype=bfloat16")
    assert any(
        "no bfloat16: float16 will be used instead" in warning for warning in told["warnings"]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hours", "0"], "--hours 0.0 is not a length"),
        (["--hours=-3"], "--hours -3.0 is not a length"),
        (["--hours=nan"], "not a length"),
        (["--tokens=100"], "less than one step"),
        (["--hours=1e-9"], "less than one step"),
        (["--hours=3", "--tokens=1B"], "--hours and --tokens each set"),
        (["--hours=3", "--max_iters=7"], "--hours and --max_iters=7 each set"),
        (["--epochs=4", "--dataset=/nonexistent/place"], "--epochs 4 needs data: no data in"),
        (["--gpu=RTX 4071"], "names like it are GeForce RTX 4070"),
        (["--gpu"], "--gpu: expected one argument"),
        (["--tokens=many"], "'many' is not a number of tokens such as 650M"),
        (["--tokens=1e999"], "'1e999' is not a number of tokens such as 650M"),
        (["--hours=1e300"], "--hours 1e+300 is not a length"),
        (["--parquet=/nonexistent/file"], "does not exist"),
        (["--gpus=0"], "--gpus 0 must be from 1"),
        (["--gpus=7"], "480 sequences per step cannot be shared by 7 cards"),
        (["--gpus=2", "--link=string"], "link 'string' is not known; there are pcie3-x16"),
        (["--link=10gbe"], "give --gpus 2 or more"),
        (["--shard"], "give --gpus 2 or more"),
        (["--shard", "a.parquet"], "'a.parquet' is not True or False"),
        (["--gpus=2", "--shard", "--optimizer=muon"], "shard = True needs optimizer = 'adamw'"),
        (["--gpus=2", "--shard", "--optimizer_bits=8"], "needs optimizer_bits = 32"),
        (["--parquet=a", "--unique_tokens=1B"], "give one of them"),
        (["--max_itres=5"], "did you mean max_iters?"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(words, message):
    with pytest.raises(InputError) as refused:
        plan.main([GPT2, *ON_4070, *words])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bad_input_is_one_line_and_exit_code_2():
    done = processes.run([sys.executable, PROJECT / "plan.py", GPT2, "--gpu", "RTX 9999"])
    assert done.returncode == 2
    assert done.stderr.startswith("error: card 'RTX 9999'") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("650M", 650_000_000),
        ("2.5B", 2_500_000_000),
        (".5b", 500_000_000),
        ("1e9", 10**9),
        ("12k", 12_000),
        ("1_000", 1000),
    ],
)
def test_numbers_of_tokens_as_people_write_them(text, tokens):
    assert plan._count(text) == tokens


@pytest.mark.parametrize("block_size", [32, 256, 1024])
def test_micro_batch_that_should_fit_is_the_largest_that_a_simulation_lets_fit(printed, block_size):
    words = [GPT2, f"--block_size={block_size}", "--n_layer=2", "--compile=False"]
    shown = " ".join(printed(*words, *ON_4070, "--unique_tokens=1B").split())
    told = int(re.search(r"memory (\d+) × \d+ eager", shown)[1])
    shape, learn, run = load_config(words)
    room = budget_of("RTX 4070", None, run).limit_bytes - LIBRARY_BYTES
    largest = need_of(Setup(shape)).largest(room)
    assert told == max(size for size in sizes_for(learn.sequences_per_step) if size <= largest)


# the modern recipe


FAST = str(PROJECT / "config/train_fineweb_4070_fast.py")
EVENING = str(PROJECT / "config/train_fineweb_4070_evening.py")


def test_the_fast_config_is_planned_to_reach_the_published_loss_in_the_published_tokens(planned):
    told = planned(FAST, *ON_4070, "--unique_tokens=10B")
    assert told["asked"]["tokens"] == 3250 * 524_288
    assert told["asked"]["loss"] == pytest.approx(3.2787, abs=0.005)
    assert told["asked"]["seconds"] / 3600 == pytest.approx(8.4, rel=0.1)  # at 56.1k tokens/s


def test_the_plain_recipe_is_told_beside_the_modern_one_for_the_same_hours(planned):
    modern = planned(FAST, *ON_4070, "--unique_tokens=0.72B")
    plain, asked = modern["plain_recipe"], modern["asked"]
    assert plain["seconds"] == pytest.approx(asked["seconds"], rel=0.001)
    shape = ["--arch=gpt2", "--bias=False", "--optimizer=adamw"]
    alone = planned(
        FAST, *shape, *ON_4070, "--unique_tokens=0.72B", f"--max_iters={plain['steps']}"
    )
    assert alone["asked"]["loss"] == pytest.approx(plain["loss"])
    assert alone["plain_recipe"] is None
    assert asked["loss"] < plain["loss"] - 0.3


@pytest.mark.parametrize("config", [FAST, EVENING])
def test_the_plain_recipe_is_printed_in_a_row_of_its_own(planned, printed, config):
    data = [*ON_4070, "--unique_tokens=0.72B"]
    plain, told = planned(config, *data)["plain_recipe"], printed(config, *data)
    row = next(line for line in told.splitlines() if line.startswith("  plain recipe"))
    low, high = plain["loss_band"]
    hours, minutes = divmod(int(plain["seconds"] / 60), 60)
    assert row.split("   ")[-1].strip() == f"{low:.2f} to {high:.2f}"
    assert f" {plain['steps']:,} " in row and f" {hours}h{minutes:02}m " in row
    assert "plain recipe" not in printed(GPT2, *data)
    assert "compute-optimal for this model" in told
    assert "heads" not in told.split("What to do instead")[1]  # of a shape without a law


def test_the_evening_config_is_the_smallest_of_the_best_shapes_in_its_hours(planned):
    """As its text says: of all with heads of 128 and at most 110 of width a layer."""
    told = planned(EVENING, *ON_4070, "--unique_tokens=0.72B")
    assert told["asked"]["seconds"] / 3600 == pytest.approx(5, abs=0.1)
    assert told["asked"]["epochs"] == pytest.approx(1.06, abs=0.005)
    settings = load_config([EVENING])
    shape = settings.shape
    losses = {}
    for layers in range(2, 33):
        for heads in range(2, 17):
            other = replace(shape, n_layer=layers, n_head=heads, n_embd=128 * heads)
            losses[other] = loss_in_five_hours(settings._replace(shape=other))
    meant = {s: loss for s, loss in losses.items() if loss and s.n_embd <= 110 * s.n_layer}
    good = [s for s, loss in meant.items() if loss <= min(meant.values()) + 0.003]
    assert min(good, key=lambda s: s.parameters) == shape
    assert losses[shape] == pytest.approx(told["asked"]["loss"], abs=0.003)
    flat = replace(shape, n_layer=2, n_head=16, n_embd=2048)
    assert losses[shape] - losses[flat] == pytest.approx(0.026, abs=0.001)


def loss_in_five_hours(settings: Settings) -> float | None:
    data = Data(720_000_000, 720_000_000, "as given")
    speed = speed_of_card("RTX 4070", settings)
    settings = within_budget(settings, data, speed, hours=5, tokens=None, epochs=None)
    return Plan((), settings, data, speed, None).forecast.loss


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        ([FAST, "--unique_tokens=10B"], {}),
        ([EVENING, "--unique_tokens=0.72B"], {}),
        ([FAST, "--unique_tokens=0.72B"], {"weight_decay": 0.118}),
        # A quarter of the batch and of the tokens: half the rate, and twice the decay.
        (
            [FAST, "--unique_tokens=10B", "--batch_size=4"],
            {"learning_rate": 0.0125, "weight_decay": 0.1},
        ),
        (
            [FAST, "--unique_tokens=10B", "--n_embd=3072", "--n_head=24", "--head_rate=1"],
            {"embedding_rate": 14.0, "head_rate": 0.08},
        ),
    ],
)
def test_the_command_to_paste_carries_what_is_advised_with_muon(planned, words, advised):
    told = planned(*words, *ON_4070)
    for part in ("asked", "instead"):
        pasted = told[part]["command"].split()[2:]
        _, given, _ = load_config([word for word in words if "unique" not in word])
        _, learn, _ = load_config(pasted)
        expected = {name: getattr(given, name) for name in told["instead"]["muon_settings"]}
        assert {name: getattr(learn, name) for name in expected} == expected | advised
        again = planned(*pasted, *ON_4070, words[1])
        assert again["asked"]["command"] == told[part]["command"]


def test_where_the_rules_for_muon_come_from_and_what_is_assumed_is_printed(printed):
    told = " ".join(printed(FAST, *ON_4070, "--unique_tokens=10B").split())
    assert "modded-nanogpt's track 3 for 524,288 tokens a step" in told
    assert "nanochat" in told and "arXiv:2405.13698" in told
    assert "for Muon they are an assumption" in told
    assert "For depth and vector_rate no rule is known" in told


def test_with_too_little_data_no_rates_are_advised(planned):
    told = planned(FAST, *ON_4070, "--unique_tokens=2M", "--max_iters=50")
    assert told["instead"]["muon_settings"] is None
    assert "decay=" not in told["instead"]["command"]


@pytest.mark.parametrize("config", [FAST, EVENING])
def test_the_readme_has_the_figures_that_are_printed(printed, config):
    told = printed(config, *ON_4070, "--unique_tokens=0.72B")
    rows = {
        name: told.split(f"  {name}  ")[1].splitlines()[0] for name in ("as asked", "plain recipe")
    }
    readme = " ".join((PROJECT / "README.md").read_text(encoding="utf-8").split())
    of_config = readme.split(f"`config/{Path(config).name}`")[1][:100]
    loss, plain = (re.search(r"\d\.\d\d to \d\.\d\d", row)[0] for row in rows.values())
    assert of_config.index(loss) < of_config.index(plain)
    assert re.search(r"\d+h\d\dm", rows["as asked"])[0] in of_config


def test_checkpoints_of_muon_hold_one_moment_of_each_matrix(planned):
    with_muon, without = (
        planned(FAST, *ON_4070, f"--optimizer={name}", "--lr_schedule=wsd")["asked"]
        for name in ("muon", "adamw")
    )
    matrices, checkpoints = 12 * 12 * 768**2, 6
    saved = without["checkpoint_bytes_at_most"] - with_muon["checkpoint_bytes_at_most"]
    assert saved == checkpoints * 4 * matrices


# a model that is chosen


AUTO = ["--model=auto", *ON_4070, "--unique_tokens=0.72B", "--hours=5"]


def test_a_choice_is_shown_with_its_reasons_its_command_and_the_next_best(planned, printed):
    told, shown = planned(*AUTO), printed(*AUTO)
    chosen = told["chosen"]
    assert chosen["settings"]["n_layer"] == 10 and chosen["settings"]["n_embd"] == 1024
    assert chosen["command"] == "python train.py --model=auto --hours=5.0"
    assert f"\n{chosen['command']}\n" in shown
    assert set(chosen["reasons"]) == {"given", "recipe", "shape", "step", "rates", "course"}
    table = shown.split("What was chosen")[1].split("What you asked for")[0].splitlines()
    rows = [line.split() for line in table if line.startswith(("  chosen", "  next best"))]
    losses = [told["asked"]["loss"], *(one["loss"] for one in chosen["others"])]
    assert [float(row[-1]) for row in rows] == pytest.approx(losses, abs=0.001)
    assert len(rows) == 3
    assert max(map(len, table)) <= 100


def test_what_is_chosen_needs_no_better_advice(planned):
    for words in (AUTO, [*AUTO, "--arch=gpt2"], [*AUTO[:3], "--unique_tokens=0.3B", "--hours=24"]):
        told = planned(*words)
        again = planned(*told["asked"]["command"].split()[2:], *words[1:4])
        assert again["asked"] == told["asked"]
        rates = told["instead"]["muon_settings"] or {}
        for name, value in rates.items():
            assert told["chosen"]["settings"][name] == pytest.approx(value, rel=0.02)


def test_a_choice_here_is_timed(planned, tiny_dataset, monkeypatch):
    monkeypatch.setattr(speed, "TRIAL_S", 0.05)
    data = [f"--dataset={tiny_dataset}", "--vocab_size=64", "--device=cpu"]
    told = planned("--model=auto", "--hours=0.01", *data)
    assert told["speed"]["source"].startswith("measured here: CPU")
    assert told["chosen"]["settings"]["compile"] is False
    assert 0 < told["asked"]["seconds"] <= 36


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model=auto"], "give --hours"),
        (["--model=auto", "--tokens=1B"], "give --hours, and no --tokens or --epochs"),
        (["--model=auto", "--hours=3", "--epochs=4"], "each set the run's length"),
        (["--model=mine", "--hours=3"], "--model=auto is all there is"),
    ],
)
def test_a_choice_without_a_time_is_refused(words, message):
    with pytest.raises(InputError) as refused:
        plan.main([*ON_4070, *words])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
