"""The run as its user starts it: same curve however it is cut, interrupted, or continued."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

import train
from model import GPT
from nanofit.data.loader import TrainSequences
from nanofit.data.tokens import open_bins
from nanofit.learning.optim import build_optimizer
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.run.signals import watch_for_requests
from nanofit.settings.config import load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError
from nanofit.use.samples import take_samples
from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_events, read_metrics, read_records, run_tiny
from tests.disturb import flip_a_bit
from tests.processes import wait_for

HALF_WAY = 7


def test_loss_falls_and_the_run_tells_what_it_derives(tiny_run, tmp_path):
    done = tiny_run()
    assert done.returncode == 0, done.stderr
    assert "4 × 2 = 8 sequences, 128 tokens" in done.stdout
    saved = read_events(tmp_path / "out", "saved")
    assert [Path(one["path"]).name for one in saved if one["step"] == 6] == [
        "ckpt-00000006.pt",  # before the evaluation: what that could lose, out of memory, is safe
        "ckpt-best.pt",
    ]
    losses = read_metrics(tmp_path / "out", "step", "loss")
    assert sorted(losses) == list(range(12))
    assert losses[11] < losses[0] - 0.5
    assert sorted(read_metrics(tmp_path / "out", "eval", "val_loss")) == [6, 12]


def test_each_launch_begins_with_a_record_of_what_it_is(tiny_run, tiny_dataset, tmp_path):
    """So that a report needs no other file."""
    assert tiny_run("--max_iters=6").returncode == 0
    assert tiny_run("--max_iters=12", "--log_interval=2").returncode == 0
    first, second = read_records(tmp_path / "out", "run")
    assert (first["step"], second["step"]) == (0, 6)
    assert (first["settings"]["log_interval"], second["settings"]["log_interval"]) == (1, 2)
    settings, saved = second["settings"], torch.load(tmp_path / "out/ckpt-00000012.pt")
    assert {name: settings[name] for name in saved["config"]} == saved["config"]
    assert second["parameters"] == GPT(GPTConfig(**saved["model_args"])).num_params()
    meta = json.loads((tiny_dataset / "meta.json").read_text())["splits"]["val"]
    assert second["data"]["val_tokens"] == meta["tokens"]
    per_token = meta["text_bytes"] / meta["tokens"]
    assert second["data"]["val_bytes_per_token"] == pytest.approx(per_token)
    evaluation = read_records(tmp_path / "out", "eval")[-1]
    bits = evaluation["val_loss"] / np.log(2) / per_token
    assert evaluation["bits_per_byte"] == pytest.approx(bits)
    weights_bytes = second["memory"]["stages"]["eager"]["components"]["weights"]
    assert weights_bytes == pytest.approx(4 * second["parameters"], rel=0.2)  # in blocks of 512
    assert second["plan"]["steps"] == 12
    assert second["command"].startswith("python train.py --")


def test_samples_are_told_on_the_way_and_change_nothing(tiny_run, tmp_path):
    flags = ["--vocab_size=50304", "--dropout=0.2", "--sample_prompts=One day | The river"]
    plain, sampled = tmp_path / "plain", tmp_path / "sampled"
    assert tiny_run(*flags, "--sample_interval=0", out_dir=plain).returncode == 0
    done = tiny_run(*flags, "--sample_interval=4", out_dir=sampled)
    assert done.returncode == 0, done.stderr
    for kind, value in (("step", "loss"), ("step", "grad_norm"), ("eval", "val_loss")):
        assert read_metrics(sampled, kind, value) == read_metrics(plain, kind, value)
    assert weights(sampled) == weights(plain)
    assert not read_records(plain, "sample")
    told = [(one["step"], one["prompt"]) for one in read_records(sampled, "sample")]
    assert told == [(step, prompt) for step in (4, 8, 12) for prompt in ("One day", "The river")]
    first, second = (one["text"] for one in read_records(sampled, "sample")[-2:])
    assert first and second and f"sample  One day{first}"[:20] in done.stdout
    model = GPT.from_checkpoint(sampled / "ckpt-00000012.pt")
    again = dict(take_samples(model, ["The river"], describe_device("cpu"), seed=1337))
    assert again == {"The river": second}


@pytest.mark.parametrize(
    "flags",
    [
        ["--dropout=0.2"],
        ["--dtype=bfloat16"],
        ["--arch=modern", "--optimizer=muon", "--bias=True", "--dtype=bfloat16"],
        ["--dtype=float16", "--dropout=0.2", "--loss=full"],
        pytest.param(
            # Compiled from the start, so that no timing decides whether it stays so.
            ["--compile=True", "--compile_after=0", "--dropout=0.2", "--dtype=float16"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["dropout", "bfloat16", "muon", "float16", "compiled"],
)
def test_resumed_run_repeats_the_uninterrupted_losses(tiny_run, tmp_path, flags):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert tiny_run(*flags, out_dir=whole).returncode == 0
    crash_after(HALF_WAY, tiny_run, flags, cut)
    resumed = tiny_run(*flags, out_dir=cut)
    assert resumed.returncode == 0, resumed.stderr
    assert f"step {HALF_WAY}   resumed" in resumed.stdout
    assert ("now compiled" in resumed.stdout) == ("--compile=True" in flags)
    for kind, value in (("step", "loss"), ("step", "grad_norm"), ("eval", "val_loss")):
        assert read_metrics(cut, kind, value) == read_metrics(whole, kind, value)
    assert weights(cut) == weights(whole)


def test_float16_resumes_with_its_loss_scale(tiny_run, tmp_path):
    assert tiny_run("--dtype=float16").returncode == 0
    path = tmp_path / "out" / "ckpt-00000012.pt"
    saved = torch.load(path, weights_only=True)
    assert saved["scaler"]["_growth_tracker"] == 12  # steps since the scale last changed
    saved["scaler"]["scale"] = 8.0
    torch.save(saved, path)
    assert tiny_run("--dtype=float16", "--max_iters=13").returncode == 0
    later = torch.load(tmp_path / "out" / "ckpt-00000013.pt", weights_only=True)
    assert (later["scaler"]["scale"], later["scaler"]["_growth_tracker"]) == (8.0, 13)


def test_micro_batch_does_not_change_the_curve(tiny_run, tmp_path):
    curves = []
    for name, cut in (("a", (8, 1)), ("b", (4, 2)), ("c", (1, 8))):
        flags = [f"--batch_size={cut[0]}", f"--gradient_accumulation_steps={cut[1]}"]
        flags.append(f"--eval_iters={8 // cut[0]}")
        assert tiny_run(*flags, out_dir=tmp_path / name).returncode == 0
        curves.append(curve(tmp_path / name))
    assert curves[1] == pytest.approx(curves[0], abs=2e-6)
    assert curves[2] == pytest.approx(curves[0], abs=2e-6)


@pytest.mark.parametrize(
    "flags", [[], ["--arch=modern", "--optimizer=muon", "--bias=True"]], ids=["adamw", "muon"]
)
def test_two_processes_give_the_curve_of_one_and_either_continues_the_other(
    tiny_run, tmp_path, flags
):
    one, two, mixed = tmp_path / "one", tmp_path / "two", tmp_path / "mixed"
    assert tiny_run(*flags, out_dir=one).returncode == 0
    done = tiny_run(*flags, out_dir=two, ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 5   loss") == 1  # the main process alone speaks
    assert curve(two) == pytest.approx(curve(one), abs=2e-6)
    for first, second in ((1, 2), (2, 1)):
        shutil.rmtree(mixed, ignore_errors=True)
        crash_after(HALF_WAY, tiny_run, flags, mixed, ranks=first)
        assert tiny_run(*flags, out_dir=mixed, ranks=second).returncode == 0
        assert curve(mixed) == pytest.approx(curve(one), abs=2e-6)


def test_sequences_that_cannot_be_shared_are_refused(tiny_run):
    done = tiny_run("--batch_size=3", "--gradient_accumulation_steps=1", ranks=2)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("error: 3 sequences per step cannot be shared by 2 processes")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_command_continues(tiny_run, tiny_dataset, tmp_path, number):
    out = tmp_path / "out"
    process = start(tiny_dataset, out, "--max_iters=100000", "--eval_interval=100000")
    wait_for(lambda: '"step": 3,' in text_of(out / "metrics.jsonl") or process.poll() is not None)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    assert "the same command continues" in stdout
    saved = sorted(out.glob("ckpt-*.pt"))
    assert len(saved) == 1
    step = int(saved[0].stem.removeprefix("ckpt-"))
    assert max(read_metrics(out, "step", "loss")) == step - 1  # not one finished step is lost
    resumed = tiny_run(f"--max_iters={step + 1}", "--eval_interval=100000")
    assert re.search(rf"step {step} +resumed", resumed.stdout), resumed.stderr


def test_second_interrupt_ends_at_once(tiny_dataset, tmp_path):
    out = tmp_path / "out"
    # Steps of many minutes: the first interrupt waits for the step, the second does not.
    process = start(tiny_dataset, out, "--gradient_accumulation_steps=250000")
    wait_for(lambda: '"stage"' in text_of(out / "metrics.jsonl") or process.poll() is not None)
    # Which is told before the step begins: an interrupt until then would need no second one.
    begun = cpu_seconds(process.pid)
    wait_for(lambda: cpu_seconds(process.pid) > begun + 0.5)
    process.send_signal(signal.SIGINT)
    # What comes within half a second of the first, as it is noticed, counts as the same.
    asked = cpu_seconds(process.pid)
    wait_for(lambda: process.poll() is not None or cpu_seconds(process.pid) > asked + 1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=180)
    assert process.returncode == 130


@pytest.mark.slow
def test_run_killed_at_any_moment_goes_on_from_a_whole_checkpoint(tiny_run, tiny_dataset, tmp_path):
    out = tmp_path / "out"
    flags = ["--max_iters=400", "--save_interval=1", "--eval_interval=400"]
    for kill_at in (20, 40):
        process = start(tiny_dataset, out, *flags)
        wait_for(lambda at=kill_at: f'"step": {at},' in text_of(out / "metrics.jsonl"))
        process.kill()  # most of the time it is saving
        process.communicate()
    done = tiny_run(*flags, "--max_iters=60", "--lr_decay_iters=400", out_dir=out)
    assert done.returncode == 0, done.stderr
    assert "damaged" not in done.stdout
    assert tiny_run(*flags, out_dir=tmp_path / "whole").returncode == 0
    whole = read_metrics(tmp_path / "whole", "step", "loss")
    losses = read_metrics(out, "step", "loss")
    assert losses == {step: whole[step] for step in losses}


def test_run_outlives_the_reader_of_its_output(tiny_dataset, tmp_path):
    process = start(tiny_dataset, tmp_path / "out")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=180) == 0
    assert (tmp_path / "out" / "ckpt-00000012.pt").exists()


def test_damaged_checkpoint_falls_back_to_the_one_before(tiny_run, tmp_path):
    out, whole = tmp_path / "out", tmp_path / "whole"
    flags = ["--save_interval=3"]
    assert tiny_run(*flags, out_dir=whole).returncode == 0
    crash_after(6, tiny_run, flags, out)
    for damage in (flip_a_bit, cut_in_half):
        shutil.rmtree(tmp_path / "trial", ignore_errors=True)
        shutil.copytree(out, tmp_path / "trial")
        damage(tmp_path / "trial" / "ckpt-00000006.pt")
        done = tiny_run(*flags, out_dir=tmp_path / "trial")
        assert done.returncode == 0, done.stderr
        assert "ckpt-00000006.pt is damaged" in done.stdout
        assert "step 3   resumed" in done.stdout
        assert curve(tmp_path / "trial") == curve(whole)
    for path in out.glob("ckpt-*.pt"):
        cut_in_half(path)
    assert_refused(tiny_run(*flags, out_dir=out), "no readable checkpoint")


def test_newest_checkpoints_and_the_best_are_kept(tiny_run, tmp_path):
    # The learning rate explodes after step 4, so the best is an early one.
    flags = ["--save_interval=2", "--eval_interval=2", "--keep_checkpoints=2"]
    done = tiny_run(*flags, "--learning_rate=3", "--min_lr=3", "--warmup_iters=11")
    assert done.returncode == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"ckpt-00000010.pt", "ckpt-00000012.pt", "ckpt-best.pt", "metrics.jsonl"}
    losses = read_metrics(tmp_path / "out", "eval", "val_loss")
    best = torch.load(tmp_path / "out" / "ckpt-best.pt", weights_only=True)
    assert best["iter_num"] == min(losses, key=losses.get) < 12
    assert best["best_val_loss"] == min(losses.values())


def test_without_always_save_only_improvements_and_the_end_are_saved(tiny_run, tmp_path):
    flags = ["--always_save_checkpoint=False", "--save_interval=2", "--eval_interval=4"]
    assert tiny_run(*flags).returncode == 0
    names = {path.name for path in (tmp_path / "out").glob("*.pt")}
    assert names == {f"ckpt-{step:08d}.pt" for step in (4, 8, 12)} | {"ckpt-best.pt"}
    # What a kill before the first numbered save leaves is continued, not overwritten.
    for step in (4, 8, 12):
        (tmp_path / "out" / f"ckpt-{step:08d}.pt").unlink()
    assert "the run is complete at step 12" in tiny_run(*flags).stdout
    assert_refused(tiny_run(*flags, "--init_from=scratch"), "already holds a run")


@pytest.mark.parametrize(
    "flags",
    [
        ["--lr_schedule=wsd", "--decay_fraction=0.5"],
        ["--arch=modern", "--optimizer=muon", "--min_lr=0"],  # wsd, 0.7
    ],
    ids=["adamw", "muon"],
)
def test_wsd_run_is_extended_as_if_it_had_been_longer_from_the_start(tiny_run, tmp_path, flags):
    long, extended = tmp_path / "long", tmp_path / "extended"
    assert tiny_run(*flags, "--max_iters=20", out_dir=long).returncode == 0
    assert tiny_run(*flags, "--max_iters=12", out_dir=extended).returncode == 0
    done = tiny_run(*flags, "--max_iters=20", out_dir=extended)
    assert done.returncode == 0, done.stderr
    assert "the schedule was extended" in done.stdout
    assert curve(extended) == curve(long)
    aside = torch.load(extended / "aside-ckpt-best.pt", weights_only=True)
    assert aside["iter_num"] == 12  # the end of the first decay is kept
    # Killed after that, it goes on with the new schedule, not with the old decayed end.
    (extended / "ckpt-00000020.pt").unlink()
    again = tiny_run(*flags, "--max_iters=20", out_dir=extended)
    assert "step 18  resumed" in again.stdout


def test_extending_a_cosine_run_warns_of_the_jump_but_loses_nothing(tiny_run):
    assert tiny_run().returncode == 0
    done = tiny_run("--max_iters=20")
    assert "the learning rate goes from 0.00122 to" in done.stdout
    assert "step 12  resumed" in done.stdout


def test_init_from_decides_between_new_and_old_runs(tiny_run, tmp_path):
    assert_refused(tiny_run("--init_from=resume"), "no checkpoint in")
    assert tiny_run("--init_from=scratch", "--max_iters=2").returncode == 0
    assert_refused(tiny_run("--init_from=scratch"), "already holds a run")
    weights_of_first = str(tmp_path / "out" / "ckpt-00000002.pt")
    assert_refused(tiny_run(f"--init_from={weights_of_first}"), "already holds a run")
    second = tmp_path / "second"
    flags = [f"--init_from={weights_of_first}", "--max_iters=0", "--n_layer=7"]
    assert (
        tiny_run("--eval_only=True").stdout.splitlines()[-1]
        == (tiny_run(*flags, "--eval_only=True", out_dir=second).stdout.splitlines()[-1])
    )  # the weights bring their own shape
    assert tiny_run("--init_from=resume", "--max_iters=3").returncode == 0


def test_finished_run_says_so_and_changes_nothing(tiny_run, tmp_path):
    tiny_run()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    done = tiny_run()
    assert done.returncode == 0
    assert "the run is complete at step 12" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_run_that_is_beyond_its_end_ends_at_once(tiny_dataset, tmp_path):
    """Stopped at step 8, and continued by somebody whom 5 are enough."""
    out = tmp_path / "out"
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}"]
    updates = []

    def ask_to_stop(*_):
        updates.append(None)
        if len(updates) == 8:
            signal.raise_signal(signal.SIGINT)

    hook = register_optimizer_step_post_hook(ask_to_stop)
    try:
        with watch_for_requests() as requests:
            train.train(load_config(words), Ranks(), requests)
    finally:
        hook.remove()
    before = (out / "ckpt-00000008.pt").read_bytes()
    words += ["--max_iters=5", "--lr_decay_iters=12"]
    done = processes.run_script("train.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [event["step"] for event in read_events(out, "stopped")] == [8]
    assert [event["step"] for event in read_events(out, "finished")] == [8]
    assert sorted(read_metrics(out, "step", "loss")) == list(range(8))
    assert (out / "ckpt-00000008.pt").read_bytes() == before


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--n_embd=18", "n_embd = 16 (now 18)"),
        ("--learning_rate=0.5", "learning_rate = 0.01 (now 0.5)"),
        ("--batch_size=16", "8 sequences per step (now 32)"),
        ("--seed=2", "seed = 1337 (now 2)"),
        # Not what it brings along, such as a rate and a schedule of its own.
        ("--optimizer=muon", "holds a run with optimizer = adamw (now muon); use the same"),
        ("--arch=modern", "holds a run with arch = gpt2 (now modern); use the same"),
    ],
)
def test_another_run_is_not_continued_by_mistake(finished_run, tiny_run, flag, message):
    assert_refused(tiny_run(flag, "--max_iters=20", out_dir=finished_run), message)


def test_checkpoint_older_than_a_setting_was_made_with_its_default(
    finished_run, tiny_run, tmp_path
):
    old = tmp_path / "old"
    old.mkdir()
    content = torch.load(finished_run / "ckpt-00000002.pt", weights_only=True)
    for name in ("arch", "optimizer", "muon_steps", "embedding_rate", "head_rate", "vector_rate"):
        del content["config"][name]
    torch.save(content, old / "ckpt-00000002.pt")
    refused = tiny_run("--optimizer=muon", "--max_iters=3", out_dir=old)
    assert_refused(refused, "optimizer = adamw (now muon)")
    refused = tiny_run("--arch=modern", "--max_iters=3", out_dir=old)
    assert_refused(refused, "arch = gpt2 (now modern)")
    continued = tiny_run("--max_iters=3", out_dir=old)
    assert continued.returncode == 0, continued.stderr
    assert re.search("step 2 +resumed", continued.stdout)


@pytest.mark.parametrize(("begun", "now"), [("gpt2", "modern"), ("modern", "gpt2")])
def test_weights_of_one_architecture_do_not_begin_a_run_of_the_other(
    tiny_run, tmp_path, begun, now
):
    first = tmp_path / "first"
    assert tiny_run(f"--arch={begun}", "--max_iters=1", out_dir=first).returncode == 0
    flags = [f"--init_from={first / 'ckpt-00000001.pt'}", "--max_iters=1"]
    refused = tiny_run(*flags, f"--arch={now}")
    assert_refused(refused, f"arch = '{begun}', which cannot become '{now}'; use --arch={begun}")
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert tiny_run(*flags, f"--arch={begun}").returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arch=modern", "--n_embd=12"], "12 / 2 = 6 are no multiple of 4"),
        (["--dataset=/nonexistent/place"], "no dataset folder"),
        (["--n_embd=17"], "n_embd = 17 is not divisible by n_head = 2"),
        (["--vocab_size=10"], "vocabulary of 64"),
        (["--block_size=5000"], "too few for block_size = 5000"),
        (["--learning_rat=1"], "did you mean learning_rate?"),
        (["--max_iters=many", "--dtype=float61"], "2 problems"),
        (["missing.py"], "cannot read config file missing.py"),
        (["--device=cuda"], "torch sees no CUDA device"),
        (["--init_from=missing"], "no weights at missing"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing_behind(tiny_run, tmp_path, flags, message):
    if "--device=cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert_refused(tiny_run(*flags), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="/dev/full and /proc are Linux's")
def test_unwritable_out_dir_is_refused(tiny_run):
    assert_refused(tiny_run(out_dir=Path("/proc/nowhere")), "cannot write to out_dir")


def test_full_disk_in_mid_run_is_told_and_the_run_goes_on(tiny_dataset, tmp_path):
    """RLIMIT_FSIZE makes every checkpoint too large to write, as a full disk does."""
    out = tmp_path / "out"
    process = start(tiny_dataset, out, limit_file_bytes=50_000)
    stdout, stderr = process.communicate(timeout=120)
    assert "step 6   NOT SAVED, going on and trying again: " in stdout
    assert "step 11  loss" in stdout
    assert process.returncode == 2
    assert stderr.startswith("error: step 12 could not be saved")
    assert not list(out.glob("*.pt*"))


def test_run_that_cannot_save_where_it_begins_says_so_in_the_end(tiny_dataset, tmp_path):
    process = start(tiny_dataset, tmp_path / "out", "--max_iters=0", limit_file_bytes=20_000)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert stderr.startswith("error: step 0 could not be saved")


def test_parquet_without_bins_is_prepared_first(tiny_run, tmp_path):
    folder = tmp_path / "data"
    make_shard = [sys.executable, PROJECT / "data" / "sample" / "make_shard.py", "--size=1MB"]
    processes.run([*make_shard, "--out", folder / "shard.parquet"], check=True)
    done = tiny_run(f"--dataset={folder}", "--vocab_size=50304", "--max_iters=1")
    assert done.returncode == 0, done.stderr
    assert "holds parquet files but no bins" in done.stdout
    assert (folder / "train.bin").exists()


def test_help_lists_the_settings():
    done = processes.run([sys.executable, PROJECT / "train.py", "--help"])
    assert done.returncode == 0
    assert "--learning_rate=0.0006\n" in done.stdout


# what the run says about itself before it starts


@pytest.mark.parametrize("arch", ["modern", "gpt2"])
def test_run_with_muon_opens_with_the_rates_that_its_optimizer_has(tiny_run, arch):
    """Published for the modern recipe; a tied embedding learns as the head."""
    words = [f"--arch={arch}", "--optimizer=muon", "--learning_rate=0.025"]
    told = tiny_run(*words, "--max_iters=1").stdout
    said = re.search("rates +matrices (.+) by Muon; by AdamW (.+)", told)
    names = {"embedding": "wte.weight", "head": "lm_head.weight", "gains and biases": "ln_f.weight"}
    if arch == "gpt2":
        del names["embedding"]
    shape, learn, _ = load_config([*TINY_MODEL, *words])
    model = GPT(shape)
    groups = build_optimizer(model, learn).param_groups
    rates = {id(p): 0.025 * group.get("rate", 1.0) for group in groups for p in group["params"]}
    matrix = model.transformer.h[0].mlp.c_fc.weight
    assert float(said[1]) == pytest.approx(rates[id(matrix)])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    expected = [
        f"{kind} {rates[id(parameter)]:.3g}"
        for kind, ending in names.items()
        for name, parameter in parameters.items()
        if name.endswith(ending)
    ]
    assert said[2] == ", ".join(expected)


def test_the_planner_warns_at_launch_and_holds_nothing_up(tiny_run):
    done = tiny_run("--max_iters=700", "--lr_decay_iters=900", "--eval_only=True")
    assert done.returncode == 0, done.stderr
    assert "warning 22.4 epochs over 4k tokens: past 16 they are waste" in done.stdout
    assert "warning the learning rate decays until step 900, but the run ends at 700" in done.stdout
    assert "final loss" not in done.stdout  # no law for a vocabulary of 64


# divergence


# Weights grow by more with each step, so that every machine has both sound and unsound ones.
DIVERGING = ["--learning_rate=600", "--warmup_iters=59", "--max_iters=60"]
DIVERGING += ["--save_interval=2", "--eval_interval=60"]


def test_a_run_that_diverges_stops_and_keeps_its_last_good_checkpoint(tiny_run, tmp_path):
    done = tiny_run(*DIVERGING)
    assert_refused(done, "the last good checkpoint is")
    assert "--on_spike=rollback" in done.stderr
    newest = max((tmp_path / "out").glob("ckpt-*.pt"))
    assert str(newest.name) in done.stderr
    assert_sound(newest)
    assert max(read_metrics(tmp_path / "out", "step", "loss")) < 59


def test_all_processes_stop_when_a_run_diverges(tiny_run, tmp_path):
    done = tiny_run(*DIVERGING, ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("the last good checkpoint is") == 1
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("shard", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_processes_roll_back_when_a_run_diverges(tiny_run, tmp_path, shard):
    done = tiny_run(*DIVERGING, "--on_spike=rollback", f"--shard={shard}", ranks=2)
    assert done.returncode != 0
    assert "failed 3 times" in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    saved = {event["step"] for event in read_events(tmp_path / "out", "saved")}
    back = [event["step"] for event in read_events(tmp_path / "out", "rolled back")]
    assert len(back) == 3 and set(back) <= saved
    assert_sound(max((tmp_path / "out").glob("ckpt-0*.pt")))


def test_rolling_back_in_vain_ends(tiny_run, tmp_path):
    done = tiny_run(*DIVERGING, "--on_spike=rollback")
    assert_refused(done, "failed 3 times")
    assert done.stdout.count("rolled back") == 3


def test_skipping_in_vain_ends_with_sound_weights(tiny_run, tmp_path):
    done = tiny_run(*DIVERGING, "--on_spike=skip")
    assert_refused(done, "updates in a row had to be skipped")
    assert_sound(max((tmp_path / "out").glob("ckpt-*.pt")))


def test_divergence_that_no_line_has_told_is_not_saved_either(tiny_run, tmp_path):
    quiet = ["--log_interval=1000", "--save_interval=1000"]
    assert_refused(tiny_run(*DIVERGING, *quiet), "there is no checkpoint yet")
    assert not list((tmp_path / "out").glob("*.pt"))


POISONED = range(300, 310)  # sequences, and with one to a step steps as well
POISON = ["--batch_size=1", "--gradient_accumulation_steps=1", "--max_iters=340"]
POISON += ["--save_interval=32", "--eval_interval=340", "--eval_iters=8"]


@pytest.fixture(scope="module")
def poisoned_dataset(tmp_path_factory) -> Path:
    """Tokens that count, easy to learn, but for some sequences of noise that come in a row."""
    folder = tmp_path_factory.mktemp("poisoned")
    for split, count in (("train", 8000), ("val", 600)):
        (np.arange(count) % 64).astype(np.uint16).tofile(folder / f"{split}.bin")
    bins, _ = open_bins(folder, block_size=16, vocab_size=64)
    device = describe_device("cpu")
    sequences = TrainSequences(bins, 16, 64, device, sequences_per_step=1, seed=1337)
    tokens = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r+")
    random = np.random.default_rng(5)
    for sequence in POISONED:
        start = sequences.start_of(sequence)
        tokens[start : start + 16] = random.integers(0, 64, 16)
    tokens.flush()
    return folder


def test_a_resumed_run_knows_what_loss_was_usual(tiny_run, tmp_path):
    """As it begins its fifth epoch this loss jumps: not too far for what it was in 64 steps."""
    flags = ["--dropout=0.1", "--lr_decay_iters=600", "--eval_interval=20", "--save_interval=10"]
    assert tiny_run(*flags, "--max_iters=100").returncode == 0
    resumed = tiny_run(*flags, "--max_iters=135")
    assert resumed.returncode == 0, resumed.stderr
    assert tiny_run(*flags, "--max_iters=135", out_dir=tmp_path / "whole").returncode == 0
    losses = read_metrics(tmp_path / "out", "step", "loss")
    assert losses == read_metrics(tmp_path / "whole", "step", "loss")
    assert losses[124] > 5 * losses[123]


def test_a_run_rolls_back_and_goes_on_past_the_data_that_led_astray(
    tiny_run, poisoned_dataset, tmp_path
):
    flags = [f"--dataset={poisoned_dataset}", *POISON]
    rolled, by_hand = tmp_path / "rolled", tmp_path / "by_hand"
    done = tiny_run(*flags, "--on_spike=rollback", out_dir=rolled)
    assert done.returncode == 0, done.stderr
    saved = torch.load(rolled / "ckpt-00000340.pt", weights_only=True)
    left_out = sum(steps for _, steps in saved["rollbacks"])
    assert {step for step, _ in saved["rollbacks"]} == {288}
    assert 288 + left_out == POISONED.stop

    # The same by hand: stop, tell the checkpoint where to go on, resume.
    assert_refused(tiny_run(*flags, out_dir=by_hand), "ckpt-00000288.pt")
    good = torch.load(by_hand / "ckpt-00000288.pt", weights_only=True)
    good["rollbacks"] = [(288, left_out)]
    torch.save(good, by_hand / "ckpt-00000288.pt")
    assert tiny_run(*flags, out_dir=by_hand).returncode == 0
    losses = read_metrics(rolled, "step", "loss")
    assert losses == read_metrics(by_hand, "step", "loss")
    assert max(losses[step] for step in range(288, 340)) < 1


def test_spikes_are_skipped_on_the_way(tiny_run, poisoned_dataset, tmp_path):
    flags = [f"--dataset={poisoned_dataset}", *POISON, "--on_spike=skip"]
    done = tiny_run(*flags)
    assert done.returncode == 0, done.stderr
    skipped = read_metrics(tmp_path / "out", "event", "name")
    assert set(POISONED) & {step - 1 for step, name in skipped.items() if name == "spikes skipped"}
    losses = read_metrics(tmp_path / "out", "step", "loss")
    assert max(losses[step] for step in POISONED) > 3
    assert losses[339] < 1


# a run in hours


HOURS = ["--hours=0.002", "--warmup_iters=20", "--save_interval=1", "--keep_checkpoints=100000"]
HOURS += ["--eval_interval=100000"]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_run_in_hours_is_the_run_of_the_steps_it_fixes(tiny_run, tmp_path, schedule):
    timed, counted = tmp_path / "timed", tmp_path / "counted"
    flags = ["--warmup_iters=20", "--eval_interval=100000", f"--lr_schedule={schedule}"]
    # The length is fixed in the warm-up, which then stays as it is if it is no more than a tenth of
    # the run. For 200 steps seven seconds are plenty, unless the machine is very busy.
    for hours in (0.002, 0.01, 0.05):
        shutil.rmtree(timed, ignore_errors=True)
        done = tiny_run(*flags, f"--hours={hours}", out_dir=timed)
        assert done.returncode == 0, done.stderr
        steps = fixed_length(timed)
        if steps >= 200:
            break
    assert max(read_metrics(timed, "step", "loss")) == steps - 1
    assert tiny_run(*flags, f"--max_iters={steps}", out_dir=counted).returncode == 0
    for value in ("loss", "lr"):
        assert read_metrics(timed, "step", value) == read_metrics(counted, "step", value)


@pytest.mark.slow
def test_a_run_in_hours_keeps_its_length_when_resumed(tiny_run, tmp_path):
    out = tmp_path / "out"
    assert tiny_run(*HOURS).returncode == 0
    steps, losses = fixed_length(out), read_metrics(out, "step", "loss")
    for path in (out / f"ckpt-{steps:08d}.pt", out / "ckpt-best.pt"):
        path.unlink()
    resumed = tiny_run(*HOURS)
    assert resumed.returncode == 0, resumed.stderr
    assert f"run     {steps} steps" in resumed.stdout
    assert "schedule was changed" not in resumed.stdout
    assert read_metrics(out, "step", "loss") == losses
    assert f"the run is complete at step {steps}" in tiny_run(*HOURS).stdout
    assert_refused(tiny_run(*HOURS, "--hours=7"), "hours = 0.002 (now 7.0)")
    # Killed before its speed was known, it measures again.
    for path in out.glob("ckpt-*.pt"):
        if path.name > "ckpt-00000005.pt":
            path.unlink()
    again = tiny_run(*HOURS)
    assert re.search("step 5 +resumed", again.stdout) and "length fixed" in again.stdout, (
        again.stderr
    )


@pytest.mark.slow
def test_all_processes_agree_on_the_length_of_a_run_in_hours(tiny_run, tmp_path):
    done = tiny_run(*HOURS, ranks=2)
    assert done.returncode == 0, done.stderr
    assert max(read_metrics(tmp_path / "out", "step", "loss")) == fixed_length(tmp_path / "out") - 1


@pytest.fixture(scope="module")
def finished_run(tiny_dataset, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "out"
    assert run_tiny(tiny_dataset, "--max_iters=2", out_dir=out).returncode == 0
    return out


def start(
    dataset: Path,
    out: Path,
    *flags: str,
    limit_file_bytes: int | None = None,
    ranks: int = 1,
):
    def limit():
        if limit_file_bytes:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_file_bytes, limit_file_bytes))

    places = [f"--dataset={dataset}", f"--out_dir={out}"]
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    launcher = launcher if ranks > 1 else []
    command = [sys.executable, *launcher, PROJECT / "train.py", *TINY_MODEL, *places, *flags]
    return processes.start(command, preexec_fn=limit)


LARGE_STEP = (  # some 400 MB of activations in one micro-batch
    "--n_layer=4 --n_embd=128 --block_size=256 --batch_size=48 --gradient_accumulation_steps=1 "
    "--max_iters=9 --eval_interval=100 --eval_iters=1 --autofit=False --memory_limit=4GB"
).split()


@pytest.fixture(scope="module")
def large_run(tiny_dataset, tmp_path_factory) -> Path:
    """What large steps come to when nothing disturbs them."""
    out = tmp_path_factory.mktemp("large") / "whole"
    done = run_tiny(tiny_dataset, *LARGE_STEP, out_dir=out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.slow
def test_memory_taken_away_in_mid_run_shrinks_the_micro_batch_and_keeps_the_curve(
    large_run, tiny_dataset, tmp_path
):
    disturbed = tmp_path / "disturbed"
    process = start(tiny_dataset, disturbed, *LARGE_STEP)
    wait_for(lambda: '"step": 1,' in text_of(disturbed / "metrics.jsonl"))
    lower_limit = least_data_bytes(process.pid, disturbed) + 200 * 10**6
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (lower_limit, lower_limit))
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert re.search("out of memory.*: now eager", stdout)
    assert curve(disturbed) == pytest.approx(curve(large_run), abs=2e-6)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_process_that_runs_out_of_memory_takes_the_others_along(large_run, tiny_dataset, tmp_path):
    disturbed = tmp_path / "disturbed"
    process = start(tiny_dataset, disturbed, *LARGE_STEP, ranks=2)
    wait_for(lambda: '"step": 1,' in text_of(disturbed / "metrics.jsonl"))
    pids = processes.children_of(process.pid)
    second = next(pid for pid in pids if environment_of(pid).get("RANK") == "1")
    lower_limit = least_data_bytes(second, disturbed) + 100 * 10**6
    resource.prlimit(second, resource.RLIMIT_DATA, (lower_limit, lower_limit))
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr
    assert re.search("out of memory.*: now eager", stdout)
    assert curve(disturbed) == pytest.approx(curve(large_run), abs=2e-6)


INTERRUPT_SECOND_PROCESS = """
import os, resource, torch, train
from nanofit.learning import muon
from nanofit.terminal import run_script
def failing(update, fail):
    calls = []
    def update_or_fail(*arguments, **options):
        calls.append(None)
        fails = os.environ["RANK"] == "1" and len(calls) == int(os.environ["AT_CALL"])
        return (fail if fails else update)(*arguments, **options)
    return update_or_fail
def refused(*_, **__):
    raise torch.OutOfMemoryError("no room")
def without_room(matrices, steps):
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1, limits[1]))
    hoard, size_bytes = [], 2**26  # what malloc has at hand is used up as well
    try:
        while size_bytes >= 2**16:
            try:
                hoard.append(torch.empty(size_bytes, dtype=torch.uint8))
            except RuntimeError:
                size_bytes //= 2
        return orthogonalized(matrices, steps)
    finally:
        hoard.clear()
        resource.setrlimit(resource.RLIMIT_DATA, limits)
orthogonalized = muon.orthogonalized
if os.environ["HALF"] == "muon":
    muon.orthogonalized = failing(orthogonalized, without_room)
else:  # which steps in place, so that on a CPU it never lacks room
    torch._fused_adamw_ = failing(torch._fused_adamw_, refused)
run_script(train.main)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize(
    ("optimizer", "half", "at_call"),
    [
        ("adamw", "adamw", 6),  # of the third step's two groups one is done
        ("muon", "adamw", 5),  # of two groups as well, before Muon's half
        ("muon", "muon", 5),  # of the third step's two batches none is done by either
    ],
)
def test_update_interrupted_in_one_process_is_undone_in_all(
    large_run, tiny_dataset, tmp_path, optimizer, half, at_call
):
    expected, disturbed, script = large_run, tmp_path / "disturbed", tmp_path / "script.py"
    flags = [*LARGE_STEP, f"--optimizer={optimizer}"]
    if optimizer != "adamw":
        expected = tmp_path / "whole"
        assert run_tiny(tiny_dataset, *flags, out_dir=expected).returncode == 0
    script.write_text(INTERRUPT_SECOND_PROCESS)
    places = [f"--dataset={tiny_dataset}", f"--out_dir={disturbed}"]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2"]
    failing = {"HALF": half, "AT_CALL": str(at_call)}
    done = processes.run(
        [sys.executable, *launcher, script, *TINY_MODEL, *places, *flags],
        env={**os.environ, "PYTHONPATH": str(PROJECT), **failing},
    )
    assert done.returncode == 0, done.stderr
    assert re.search("out of memory.*: now eager", done.stdout)
    assert "went back" not in done.stdout
    assert curve(disturbed) == pytest.approx(curve(expected), abs=2e-6)


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)


def cpu_seconds(pid: int) -> float:
    """What a process has computed, however busy the machine is."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def least_data_bytes(pid: int, out: Path) -> int:
    """What a process holds between two steps, in data as Linux limits them.

    However long they take: it is looked at from the end of step 1 to that of step 3, of nine.
    """
    sizes = []

    def look() -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        sizes.append(int(re.search(r"VmData:\s*(\d+)", status)[1]) * 1024)
        return '"step": 3,' in text_of(out / "metrics.jsonl")

    wait_for(look, interval_s=0)
    return min(sizes)


@pytest.mark.parametrize("interval", [2, 100])
def test_update_that_runs_out_of_memory_goes_back_and_repeats_the_curve(
    tiny_run, tiny_dataset, tmp_path, interval
):
    """With a checkpoint to go back to, and without one."""
    expected, out = tmp_path / "expected", tmp_path / "out"
    flags = [f"--eval_interval={interval}", "--max_iters=6"]
    assert tiny_run(*flags, out_dir=expected).returncode == 0
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}", *flags]
    updates = []

    def fail_once(*_):
        updates.append(None)
        if len(updates) == 4:
            raise torch.OutOfMemoryError("after the weights were changed")

    hook = register_optimizer_step_post_hook(fail_once)
    try:
        with watch_for_requests() as stop:
            train.train(load_config(words), Ranks(), stop)
    finally:
        hook.remove()
    assert curve(out) == pytest.approx(curve(expected), abs=2e-6)
    assert "out of memory in an update" in text_of(out / "metrics.jsonl")


@pytest.mark.parametrize("lost_in", ["step", "evaluation"])
def test_run_without_room_is_saved_and_goes_on_with_the_same_curve(
    tiny_run, tiny_dataset, tmp_path, lost_in
):
    expected, out = tmp_path / "expected", tmp_path / "out"
    flags = ["--eval_interval=3", "--save_interval=100", "--max_iters=6"]
    assert tiny_run(*flags, out_dir=expected).returncode == 0
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}", *flags]

    def fail_from_step_3_on(module, _):
        is_meant = module.training == (lost_in == "step")
        if is_meant and '"step": 2,' in text_of(out / "metrics.jsonl"):
            raise torch.OutOfMemoryError("no room")

    hook = register_module_forward_pre_hook(fail_from_step_3_on)
    where = "at step 3" if lost_in == "step" else "in the evaluation at step 3"
    told = f"out of memory {where}, with one sequence .* goes on from {out}/ckpt-00000003.pt"
    try:
        with pytest.raises(InputError, match=told), watch_for_requests() as stop:
            train.train(load_config(words), Ranks(), stop)
    finally:
        hook.remove()
    assert tiny_run(*flags, out_dir=out).returncode == 0
    assert curve(out) == pytest.approx(curve(expected), abs=2e-6)


def crash_after(step: int, tiny_run, flags: list[str], out: Path, ranks: int = 1) -> None:
    """Leave a run as a power cut after the checkpoint of `step` would."""
    flags = [*flags, f"--max_iters={step}", "--lr_decay_iters=12"]
    done = tiny_run(*flags, out_dir=out, ranks=ranks)
    assert done.returncode == 0, done.stderr
    (out / "ckpt-best.pt").unlink(missing_ok=True)
    evaluations_at_the_end = f'"kind": "eval", "step": {step},'
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if evaluations_at_the_end not in line]
    (out / "metrics.jsonl").write_text("".join(kept))


def curve(out: Path) -> list[float]:
    steps, evaluations = read_metrics(out, "step", "loss"), read_metrics(out, "eval", "val_loss")
    return [value for _, value in sorted(steps.items()) + sorted(evaluations.items())]


def fixed_length(out: Path) -> int:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    fixed = [json.loads(line) for line in lines if '"length fixed"' in line]
    assert len(fixed) == 1
    return fixed[0]["max_iters"]


def assert_sound(path: Path) -> None:
    model = torch.load(path, weights_only=True)["model"]
    assert all(tensor.isfinite().all() for tensor in model.values())


def weights(out: Path) -> dict[str, list[float]]:
    model = torch.load(out / "ckpt-00000012.pt", weights_only=True)["model"]
    return {name: tensor.tolist() for name, tensor in model.items()}


def assert_refused(done: subprocess.CompletedProcess, message: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def cut_in_half(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""
