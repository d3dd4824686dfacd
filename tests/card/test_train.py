"""train.py on a card: every setting whose lines only CUDA executes."""

import re

import pytest
import torch

from model import GPT
from nanofit.run.stages import TIMED_STEPS
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import parse_size
from tests.card.harness import CONTEXT_MIB, MIB

pytestmark = pytest.mark.covered


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_precision_is_what_was_asked_for(train, dtype):
    run = train(f"--dtype={dtype}")
    assert run.code == 0, run
    assert f", {dtype}\n" in run.output
    assert run.steps() == list(range(8))
    assert run.events("stage")[1]["now"] == "compiled"


@pytest.mark.parametrize("is_asked", [True, False])
def test_deterministic_runs_add_up_embeddings_in_an_order(train, tmp_path, is_asked):
    """Sorted, by a kernel of torch's own; else the compiler's kernel adds atomically."""
    run = train(f"--deterministic={is_asked}", trace=tmp_path / "trace")
    assert run.code == 0, run
    assert run.events("stage")[1]["now"] == "compiled"
    launched = (tmp_path / "trace").read_text()
    assert bool(re.search(r"indexing_backward_kernelIfLi\d", launched)) == is_asked


MOST_THERE_IS = "--arch=modern --bias=True --optimizer=muon --dtype=float16 --on_spike=skip"


@pytest.mark.parametrize("flags", ["", MOST_THERE_IS], ids=["plain", "most there is"])
def test_host_waits_only_to_time_a_stage_and_to_print(train, tmp_path, flags):
    """Whatever else a step does beside its kernels, the device never stands idle for it."""
    steps, printed = 40, 30
    lengths = [f"--max_iters={steps}", f"--log_interval={printed}", "--eval_interval=1000"]
    lengths.append("--decay_lr=False")  # where a decay begins, the run is saved
    words = [*lengths, "--compile=False", *flags.split()]
    run = train(*words, trace=tmp_path / "trace", CARD_TRACE_WAITS="1")
    assert run.code == 0, run
    waits = waits_by_step((tmp_path / "trace").read_text().splitlines(), steps)
    assert waits[printed] > 0 and min(waits[:TIMED_STEPS]) > 0
    assert [step for step in range(TIMED_STEPS + 1, steps - 1) if waits[step]] == [printed]


def waits_by_step(trace: list[str], steps: int) -> list[int]:
    """How often the host waited from the end of each step's update to that of the next."""
    updates = sum("FusedAdam" in line for line in trace)
    assert updates and updates % steps == 0
    waits, done = [0] * (steps + 1), 0
    for line in trace:
        done += "FusedAdam" in line
        waits[max(done * steps // updates - 1, 0)] += line.startswith("wait: ")
    return waits


def test_card_without_bfloat16_takes_float16_and_says_so(card, train):
    run = train("--dtype=bfloat16", on=card("Tesla T4"))
    assert run.code == 0, run
    assert "Tesla T4 has no bfloat16: float16 is used instead" in run.output
    assert ", float16\n" in run.output
    assert run.steps() == list(range(8))


def test_card_that_torch_was_not_built_for_gets_one_line(card, train):
    run = train(on=card("RTX 2060", capability="6.1"))
    assert run.code == 2
    assert run.output == ""
    [line] = run.errors.splitlines()
    assert "has CUDA capability 6.1, but torch" in line
    assert "--device=cpu" in line


def test_second_card_alone_is_used(card, train):
    run = train("--device=cuda:1", on=card(devices=2))
    assert run.code == 0, run
    assert (run.processes["peak"][:, 0] == 0).all()
    assert run.processes["peak"][:, 1].max() > CONTEXT_MIB * MIB


@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
def test_missing_card_is_one_line(card, train, device):
    devices = 1 if device == "cuda:1" else 0
    run = train(f"--device={device}", on=card(devices=devices))
    assert run.code == 2
    [line] = run.errors.splitlines()
    assert ("this machine has 1" if devices else "torch sees no CUDA device") in line


def test_two_cards_share_the_steps_under_torchrun(card, train):
    run = train("--dtype=float16", on=card(devices=2), processes=2)
    assert run.code == 0, run
    assert "on 2 processes" in run.output
    assert run.steps() == list(range(8))
    used = run.processes["peak"] > CONTEXT_MIB * MIB
    assert used[:, 0].any() and used[:, 1].any()
    assert not (used[:, 0] & used[:, 1]).any()  # each process keeps to its card


def test_gradients_of_two_cards_take_the_memory_of_one(card, train, tmp_path):
    """They are views of the buckets that are added up, also when buckets are made anew."""
    flags = ["--n_embd=256", "--dtype=bfloat16", "--compile=False", "--autofit=False"]
    flags += ["--batch_size=2", "--gradient_accumulation_steps=4", "--max_iters=4"]
    alone = train(*flags, on=card(folder=tmp_path / "1"))
    both = train(*flags, on=card(folder=tmp_path / "2", devices=2), processes=2)
    assert alone.code == both.code == 0, both
    assert both.steps() == list(range(4))
    gradient_bytes = 4 * 50304 * 256
    assert both.peak_bytes < alone.peak_bytes + 0.5 * gradient_bytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_cards_hold_a_part_of_the_model_each(card, train, dtype):
    flags = ["--shard=True", "--recompute=block", f"--dtype={dtype}", "--n_layer=4"]
    run = train(*flags, on=card(devices=2), processes=2, trace=card().folder / "trace")
    assert run.code == 0, run
    assert run.steps() == list(range(8))
    assert {event["now"] for event in run.events("stage")} == {"eager"}
    launched = (card().folder / "trace").read_text()
    assert "ncclReduceScatter" in launched and "ncclAllGather" in launched


def test_a_part_of_the_blocks_takes_a_part_of_their_memory(card, train, tmp_path):
    """Weights, gradients and moments of blocks are halved; embeddings are gathered all along."""
    flags = ["--n_layer=10", "--n_embd=512", "--dtype=bfloat16", "--compile=False"]
    flags += ["--recompute=block", "--autofit=False", "--batch_size=1", "--max_iters=3"]
    peaks = []
    for shard in (False, True):
        on = card(folder=tmp_path / str(shard), devices=2)
        run = train(*flags, f"--shard={shard}", on=on, processes=2)
        assert run.code == 0, run
        peaks.append(run.peak_bytes)
    block_bytes = 16 * 12 * 10 * 512**2
    assert peaks[0] - peaks[1] > 0.3 * block_bytes


def test_two_cards_share_muons_matrices(card, train, tmp_path):
    flags = ["--arch=modern", "--optimizer=muon", "--bias=True", "--dtype=float16"]
    several = {"on": card(devices=2), "processes": 2, "trace": tmp_path / "trace"}
    run = train(*flags, "--compile=False", scalars="0:0", **several)
    assert run.code == 0, run
    assert run.steps() == list(range(8))
    # Each process sends the other what it has orthogonalised: of attention's four matrices two, of
    # the MLP's two one, in each step.
    launched = (tmp_path / "trace").read_text().splitlines()
    shared = 8 * 2 * 2
    assert launched.count("ncclBcast") == shared + 2  # and which gradients go into which bucket


def test_memory_limit_and_reserve_bound_the_run(card, train):
    # 200 MiB that others use, and all but 700 MiB of the rest.
    free = 12282 - CONTEXT_MIB - 200
    run = train(f"--memory_reserve={free - 700}MiB", "--batch_size=64", on=card(others=200))
    assert run.code == 0, run
    [begun] = run.events("started")
    assert 700 - 0.01 * 12282 < begun["limit_mib"] <= 700
    assert run.peak_bytes <= (700 + CONTEXT_MIB) * MIB

    limited = train("--memory_limit=600MiB", on=card(folder=run.out_dir.parent / "second"))
    assert limited.code == 0, limited
    assert limited.events("started")[0]["limit_mib"] == 600
    assert limited.peak_bytes <= parse_size("600MiB") + CONTEXT_MIB * MIB


def test_fastest_goal_tries_smaller_micro_batches(train):
    run = train("--autofit_goal=fastest", "--compile=False")
    assert run.code == 0, run
    assert run.output.count("autofit eager: trying") >= 3
    assert run.steps() == list(range(8))


def test_savers_climb_until_the_batch_fits(card, train):
    wide = ["--n_layer=2", "--n_embd=256", "--block_size=1024", "--batch_size=16"]
    run = train(*wide, "--savers=auto", "--memory_limit=700MiB", "--dtype=float16")
    assert run.code == 0, run
    [begun] = run.events("started")
    assert "recompute" in begun["savers"]
    assert begun["micro_batch"] == 16
    assert run.steps() == list(range(8))


def test_8_bit_moments_take_less_memory(card, train, tmp_path):
    # With numbers read back as 0 a scaler finds no overflow, so that updates are done.
    flags = ["--n_embd=256", "--compile=False", "--dtype=float16", "--max_iters=3"]
    wide = train(*flags, scalars="0:0", on=card(folder=tmp_path / "32"))
    narrow = train(*flags, "--optimizer_bits=8", scalars="0:0", on=card(folder=tmp_path / "8"))
    assert wide.code == 0, wide
    assert narrow.code == 0, narrow
    parameters = 50304 * 256
    assert wide.peak_bytes - narrow.peak_bytes > 0.8 * 6 * parameters


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_modern_muon_run_trains_compiles_saves_and_resumes(train, dtype):
    flags = ["--arch=modern", "--optimizer=muon", "--bias=True", f"--dtype={dtype}"]
    run = train(*flags, scalars="0:0")  # with numbers read back as 0 a scaler finds no overflow
    assert run.code == 0, run
    assert f", {dtype}\n" in run.output
    assert run.events("stage")[1]["now"] == "compiled"
    assert run.steps() == list(range(8))
    resumed = train(*flags, "--max_iters=10", scalars="0:0")
    assert resumed.code == 0, resumed
    assert len(resumed.events("resumed")) == 1
    assert resumed.steps()[-1] == 9


def test_samples_are_written_on_the_card(train):
    run = train("--sample_interval=4", "--sample_prompts=One day | The river", "--compile_after=6")
    assert run.code == 0, run
    told = [(record["step"], record["prompt"]) for record in run.records("sample")]
    assert told == [(step, prompt) for step in (4, 8) for prompt in ("One day", "The river")]


@pytest.mark.parametrize("on_spike", ["stop", "rollback"])
def test_divergence_is_met_as_asked(train, on_spike):
    launches = train("--compile=False", "--max_iters=4", scalars="0:2.0").launches
    flags = ["--compile=False", "--max_iters=12", f"--on_spike={on_spike}"]
    run = train(*flags, scalars=f"0:2.0,{launches}:nan,{launches * 3 // 2}:2.0")
    if on_spike == "stop":
        assert run.code == 2
        assert "the last good checkpoint is" in run.errors.splitlines()[-1]
        return
    assert run.code == 0, run
    assert run.events("rolled back")
    assert run.events("finished")


def test_skipped_updates_are_read_from_the_card_and_told(train):
    launches = train("--compile=False", "--max_iters=4").launches
    # How many were skipped in all is among the three numbers that the card keeps.
    flags = ["--compile=False", "--max_iters=12", "--on_spike=skip"]
    run = train(*flags, scalars=f"0:2.0,{launches}:5.0")
    assert run.code == 0, run
    assert [event["updates"] for event in run.events("spikes skipped")] == [2, 3]
    assert run.steps() == list(range(12))


def test_evaluation_alone_leaves_the_run_as_it_is(train):
    done = train("--compile=False", "--max_iters=4")
    before = {path: path.read_bytes() for path in done.out_dir.iterdir()}
    run = train("--compile=False", "--max_iters=4", "--eval_only=True")
    assert run.code == 0, run
    assert "validation loss" in run.output
    assert {path: path.read_bytes() for path in done.out_dir.iterdir()} == before


def test_weights_of_nanogpt_are_the_beginning(card, train, tmp_path):
    shape = dict(n_layer=1, n_head=2, n_embd=64, block_size=128, vocab_size=50304)
    model = GPT(GPTConfig(**shape))
    saved = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
    arguments = {**shape, "bias": False, "dropout": 0.0}
    torch.save({"model": saved, "model_args": arguments}, tmp_path / "nanogpt.pt")
    flags = [f"--init_from={tmp_path / 'nanogpt.pt'}", "--compile=False", "--max_iters=1"]
    run = train(*flags, "--learning_rate=0", "--min_lr=0")
    assert run.code == 0, run
    # Kernels do nothing, so that the weights saved are the weights sent to the card.
    checkpoint = torch.load(run.out_dir / "ckpt-00000001.pt", "cpu", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(checkpoint["model"][name], value), name


def test_nothing_fits_in_one_line_and_what_it_offers_does(card, train):
    on, flags = card(memory=2200), ["--n_layer=12", "--n_embd=768", "--compile=False"]
    run = train(*flags, on=on)
    assert run.code == 2
    [line] = run.errors.splitlines()
    assert "not even one sequence fits" in line
    offered = re.findall(r"--\w+=\d+(?= \()", line)
    assert offered[-1].startswith("--n_layer=")
    assert train(*flags, offered[-1], "--max_iters=1", on=on).code == 0


def test_cpu_is_used_on_request(train):
    flags = ["--dtype=bfloat16", "--compile=False", "--memory_limit=3GB", "--max_iters=2"]
    run = train("--device=cpu", *flags)
    assert run.code == 0, run
    assert len(run.processes) == 0
