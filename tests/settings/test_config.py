"""Settings: nanoGPT's files load, everything wrong is told at once, and the shipped runs hold."""

import io
import math
import re
import tokenize
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanofit.settings.config import (
    PROJECT,
    RunConfig,
    TrainConfig,
    describe_knobs,
    flatten,
    given_values,
    load_config,
    parse_size,
)
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError

REPEATABLE = hypothesis.settings(derandomize=True, deadline=None)
CONFIGS = sorted((PROJECT / "config").glob("*.py"))
DEFAULTS = flatten(GPTConfig(), TrainConfig(), RunConfig())

# nanoGPT's own files: its names, its spelling, its spacing, without its comments.
NANOGPT_TRAIN_GPT2 = """\
# config for training GPT-2 (124M)
# $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

wandb_log = True
wandb_project = 'owt'
wandb_run_name='gpt2-124M'

# 12 batch size * 1024 block size * 5 gradaccum * 8 GPUs = 491,520
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

max_iters = 600000
lr_decay_iters = 600000

# eval stuff
eval_interval = 1000
eval_iters = 200
log_interval = 10

# weight decay
weight_decay = 1e-1
"""
NANOGPT_SHAKESPEARE_CHAR = """\
out_dir = 'out-shakespeare-char'
eval_interval = 250 # keep frequent
eval_iters = 200
log_interval = 10 # not too often

always_save_checkpoint = False

wandb_log = False # override via command line if you like
wandb_project = 'shakespeare-char'
wandb_run_name = 'mini-gpt'

dataset = 'shakespeare_char'
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256 # context of up to 256 previous characters

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3
max_iters = 5000
lr_decay_iters = 5000 # make equal to max_iters usually
min_lr = 1e-4 # learning_rate / 10 usually
beta2 = 0.99

warmup_iters = 100

# on macbook also add
# device = 'cpu'  # run on cpu only
# compile = False # do not torch compile the model
"""
NANOGPT_EVAL_GPT2 = """\
# evaluate the base gpt2
# n_layer=12, n_head=12, n_embd=768
batch_size = 8
eval_iters = 500 # use more iterations to get good estimate
eval_only = True
wandb_log = False
init_from = 'gpt2'
"""
NANOGPT_FINETUNE = """\
import time

out_dir = 'out-shakespeare'
eval_interval = 5
eval_iters = 40
wandb_log = False # feel free to turn on
wandb_project = 'shakespeare'
wandb_run_name = 'ft-' + str(time.time())

dataset = 'shakespeare'
init_from = 'gpt2-xl'

always_save_checkpoint = False

batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20

# finetune at constant LR
learning_rate = 3e-5
decay_lr = False
"""

# Every setting of a shipped file that is not the default.
MODERN = {
    "arch": "modern",
    "optimizer": "muon",
    "bias": True,
    "batch_size": 16,
    "gradient_accumulation_steps": 32,
    "learning_rate": 0.025,
    "min_lr": 0.0,
    "lr_schedule": "wsd",
    "decay_fraction": 0.7,
    "warmup_iters": 0,
    "weight_decay": 0.05,
    "beta1": 0.8,
    "grad_clip": 0.0,
    "dtype": "bfloat16",
    "eval_interval": 125,
    "eval_iters": 100,
}
GOLDEN = {
    "demo": {
        "out_dir": "out-demo",
        "dataset": "sample",
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 96,
        "block_size": 128,
        "batch_size": 4,
        "gradient_accumulation_steps": 1,
        "arch": "modern",
        "bias": True,
        "optimizer": "muon",
        "muon_steps": 5,
        "max_iters": 500,
        "learning_rate": 0.05,
        "min_lr": 0.0,
        "lr_schedule": "wsd",
        "decay_fraction": 0.3,
        "warmup_iters": 0,
        "weight_decay": 0.05,
        "beta1": 0.8,
        "beta2": 0.99,
        "grad_clip": 0.0,
        "dtype": "float32",
        "eval_interval": 200,
        "eval_iters": 16,
        "log_interval": 20,
        "sample_prompts": "One morning",
    },
    "train_fineweb": {
        "out_dir": "out-fineweb",
        "batch_size": 16,
        "gradient_accumulation_steps": 32,
        "n_embd": 576,
        "max_iters": 9000,
        "lr_decay_iters": 9000,
        "warmup_iters": 700,
        "dtype": "bfloat16",
        "eval_interval": 500,
    },
    "train_fineweb_4070": {
        "out_dir": "out-fineweb-4070",
        "n_embd": 576,
        "max_iters": 5000,
        "lr_schedule": "wsd",
        "warmup_iters": 250,
        "dtype": "float16",
        "eval_interval": 250,
        "eval_iters": 100,
    },
    "train_fineweb_4070_evening": MODERN
    | {
        "out_dir": "out-fineweb-4070-evening",
        "n_layer": 10,
        "n_head": 8,
        "n_embd": 1024,
        "max_iters": 1450,
        "embedding_rate": 24.2,
        "head_rate": 0.139,
        "weight_decay": 0.118,
    },
    "train_fineweb_4070_fast": MODERN
    | {"out_dir": "out-fineweb-4070-fast", "n_head": 6, "max_iters": 3250},
    "train_fineweb_4070_one_shard": {
        "out_dir": "out-fineweb-110M-one-shard",
        "dataset": "fineweb_one_shard",
        "n_head": 8,
        "n_embd": 512,
        "max_iters": 250_000,
        "lr_decay_iters": 250_000,
        "beta2": 0.99,
        "eval_interval": 500,
        "log_interval": 50,
    },
    "train_gpt2_124m": {
        "out_dir": "out-gpt2-124m",
        "max_iters": 20_000,
        "lr_schedule": "wsd",
        "warmup_iters": 700,
        "dtype": "bfloat16",
        "eval_interval": 500,
    },
    "train_gpt2_medium_4070": {
        "out_dir": "out-gpt2-medium-4070",
        "batch_size": 4,
        "gradient_accumulation_steps": 120,
        "n_layer": 24,
        "n_head": 16,
        "n_embd": 1024,
        "max_iters": 20_000,
        "lr_schedule": "wsd",
        "warmup_iters": 700,
        "learning_rate": 3e-4,
        "min_lr": 3e-5,
        "dtype": "bfloat16",
        "savers": "auto",
        "eval_interval": 500,
    },
    "train_small_30m": {
        "out_dir": "out-small-30m",
        "batch_size": 16,
        "gradient_accumulation_steps": 4,
        "block_size": 512,
        "n_layer": 6,
        "n_head": 6,
        "n_embd": 384,
        "max_iters": 20_000,
        "warmup_iters": 500,
        "learning_rate": 1e-3,
        "min_lr": 1e-4,
        "dtype": "float16",
        "eval_interval": 1000,
        "eval_iters": 100,
    },
}

# What the issue asks of a file, whether or not it happens to be the default.
ASKED = {
    "train_fineweb": dict(
        batch_size=16,
        gradient_accumulation_steps=32,
        block_size=1024,
        n_layer=12,
        n_head=12,
        n_embd=576,
        dtype="bfloat16",
        compile=True,
    ),
    "train_fineweb_4070": dict(
        batch_size=12,
        gradient_accumulation_steps=40,
        block_size=1024,
        n_layer=12,
        n_head=12,
        n_embd=576,
        dtype="float16",
        compile=True,
        compile_after=100,
        autofit=True,
    ),
    "train_fineweb_4070_one_shard": dict(
        out_dir="out-fineweb-110M-one-shard",
        dataset="fineweb_one_shard",
        batch_size=12,
        gradient_accumulation_steps=40,
        block_size=1024,
        n_layer=12,
        n_head=8,
        n_embd=512,
        dropout=0.0,
        learning_rate=6e-4,
        min_lr=6e-5,
        warmup_iters=2000,
        max_iters=250_000,
        lr_decay_iters=250_000,
        beta2=0.99,
        bias=False,
        compile=True,
        eval_interval=500,
        eval_iters=200,
        log_interval=50,
        always_save_checkpoint=True,
        wandb_log=False,
    ),
    "train_fineweb_4070_fast": dict(  # modded-nanogpt's track 3
        n_layer=12,
        n_head=6,
        n_embd=768,
        block_size=1024,
        vocab_size=50304,
        learning_rate=0.025,
        weight_decay=0.05,
        beta1=0.8,
        beta2=0.95,
        embedding_rate=28.0,  # 0.7 / 0.025
        head_rate=0.16,
        vector_rate=0.6,
        muon_steps=12,
    ),
    "train_fineweb_4070_evening": dict(block_size=1024),
    "train_small_30m": dict(
        n_layer=6,
        n_head=6,
        n_embd=384,
        block_size=512,
        batch_size=16,
        gradient_accumulation_steps=4,
        dtype="float16",
        compile=True,
    ),
    "train_gpt2_124m": dict(n_layer=12, n_head=12, n_embd=768, block_size=1024),
    "train_gpt2_medium_4070": dict(n_layer=24, n_head=16, n_embd=1024),
    "demo": dict(dataset="sample"),
}


@pytest.fixture
def load(tmp_path):
    """Settings of a config file with the given text, and flags, as one dictionary."""

    def load_text(text, *flags):
        path = tmp_path / "config.py"
        path.write_text(text, encoding="utf-8")
        return settings(str(path), *flags)

    return load_text


def settings(*argv):
    return flatten(*load_config(argv))


def changed(values):
    return {name: value for name, value in values.items() if value != DEFAULTS[name]}


def message(call, *args):
    with pytest.raises(InputError) as caught:
        call(*args)
    return str(caught.value)


# nanoGPT


@pytest.mark.parametrize("text", [NANOGPT_TRAIN_GPT2, NANOGPT_SHAKESPEARE_CHAR, NANOGPT_EVAL_GPT2])
def test_nanogpt_files_mean_to_us_what_python_makes_of_them(load, text):
    executed = {}
    exec(text, executed)
    del executed["__builtins__"]
    assert {name: load(text)[name] for name in executed} == executed
    assert changed(load(text)).keys() <= executed.keys()


def test_nanogpt_batch_of_half_a_million_tokens_is_understood(load):
    values = load(NANOGPT_TRAIN_GPT2)
    tokens = values["batch_size"] * values["gradient_accumulation_steps"] * values["block_size"]
    assert tokens == 491_520


def test_run_name_with_the_time_is_refused_with_the_reason_and_the_way_out(load):
    told = message(load, NANOGPT_FINETUNE)
    assert "config.py:8:" in told and "\n" not in told
    assert "time.time()" in told and "at every launch" in told and "write a fixed name" in told


def test_the_same_file_with_a_fixed_run_name_loads(load):
    values = load(NANOGPT_FINETUNE.replace("'ft-' + str(time.time())", "'ft-1'"))
    assert values["init_from"] == "gpt2-xl"
    assert values["wandb_run_name"] == "ft-1"
    assert values["decay_lr"] is False


# precedence and types


def test_flags_win_over_files_which_win_over_defaults(load):
    text = "max_iters = 7\nbatch_size = 3\n"
    values = load(text, "--max_iters=9")
    assert changed(values) == {"max_iters": 9, "batch_size": 3}
    assert settings() == DEFAULTS


def test_flags_win_wherever_they_stand(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("max_iters = 7")
    assert settings("--max_iters=9", str(path)) == settings(str(path), "--max_iters=9")


def test_later_files_win_over_earlier_ones(tmp_path):
    (tmp_path / "a.py").write_text("max_iters = 7\nseed = 1")
    (tmp_path / "b.py").write_text("max_iters = 8")
    values = settings(str(tmp_path / "a.py"), str(tmp_path / "b.py"))
    assert (values["max_iters"], values["seed"]) == (8, 1)


@REPEATABLE
@given(st.text().filter(lambda text: text != "None"))
def test_text_in_a_flag_is_kept_as_it_stands(text):
    values = settings(f"--out_dir={text}", f"--wandb_run_name={text}")
    assert values["out_dir"] == values["wandb_run_name"] == text


def test_values_may_contain_an_equals_sign(load):
    assert settings("--wandb_run_name=lr=3e-4")["wandb_run_name"] == "lr=3e-4"
    assert load("wandb_run_name = 'lr=3e-4'")["wandb_run_name"] == "lr=3e-4"


def test_an_integer_serves_as_a_float(load):
    for values in (load("weight_decay = 1"), settings("--weight_decay=1")):
        assert values["weight_decay"] == 1.0
        assert type(values["weight_decay"]) is float


def test_flags_take_arithmetic_and_other_settings():
    values = settings("--max_iters=3 * 10**3", "--lr_decay_iters=max_iters // 2")
    assert (values["max_iters"], values["lr_decay_iters"]) == (3000, 1500)


def test_optional_settings_take_none_and_their_type(load):
    assert load("lr_decay_iters = 5", "--lr_decay_iters=None")["lr_decay_iters"] is None
    assert load("wandb_run_name = 'a'", "--wandb_run_name=None")["wandb_run_name"] is None
    assert "lr_decay_iters = 0.5 must be int or None" in message(load, "lr_decay_iters = 0.5")
    assert "max_iters = None must be int" in message(load, "max_iters = None")


@pytest.mark.parametrize("value", ["1", "0", "'True'", "None"])
def test_only_true_and_false_are_bools(load, value):
    assert f"compile = {value} must be bool" in message(load, f"compile = {value}")
    assert f"compile = {value} must be bool" in message(settings, f"--compile={value}")


@pytest.mark.parametrize("value", ["True", "False"])
@pytest.mark.parametrize("name", ["max_iters", "learning_rate", "out_dir"])
def test_a_bool_is_not_a_number_or_a_text(load, name, value):
    assert f"{name} = {value} must be" in message(load, f"{name} = {value}")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("max_iters = 1.5", "max_iters = 1.5 must be int, not float"),
        ("max_iters = 'many'", "max_iters = 'many' must be int, not str"),
        ("learning_rate = '1e-3'", "learning_rate = '1e-3' must be float, not str"),
        ("dtype = 'float64'", "dtype = 'float64' must be one of auto, float32, bfloat16, float16"),
        ("dtype = 16", "dtype = 16 must be one of auto, float32, bfloat16, float16"),
        ("max_iter = 5", "unknown setting max_iter; did you mean max_iters?"),
        ("n_layers = 5", "unknown setting n_layers; did you mean n_layer?"),
        ("zzzzzz = 5", "unknown setting zzzzzz; --help lists all settings"),
    ],
)
def test_files_and_flags_refuse_the_same_things_for_the_same_reason(load, line, reason):
    assert message(load, f"seed = 1\n{line}").endswith(f"config.py:2: {reason}")
    name, value = line.split(" = ")
    flag = f"--{name}={value.strip(chr(39)) if name == 'dtype' else value}"
    expected = reason.replace("= 16 ", "= '16' ")  # a flag's text is a text
    assert message(settings, flag) == f"--{name}: {expected}"


def test_every_choice_of_a_choice_setting_is_taken():
    for name, choices in {
        "dtype": ("auto", "float32", "bfloat16", "float16"),
        "loss": ("chunked", "full"),
        "lr_schedule": ("cosine", "wsd"),
        "savers": ("off", "auto"),
        "autofit_goal": ("largest", "fastest"),
        "backend": ("auto", "nccl", "gloo"),
    }.items():
        for choice in choices:
            assert settings(f"--{name}={choice}")[name] == choice


@pytest.mark.parametrize("flag", ["--max_iters", "--out_dir", "--max_iters="])
def test_a_flag_without_a_value_is_refused(flag):
    assert "value" in message(settings, flag)


def test_a_missing_config_file_is_told_by_name(tmp_path):
    path = tmp_path / "none.py"
    assert str(path) in message(settings, str(path))
    assert "cannot read config file" in message(settings, str(tmp_path))


def test_all_problems_of_files_and_flags_come_in_one_message(load):
    text = "max_iter = 5\nbatch_size = 'x'\nimport os\nn_layer = 2\ndtype = 'int8'\n"
    told = message(load, text, "--seeed=1", "--compile=maybe", "--n_embd=1.5")
    first, *problems = told.splitlines()
    assert first == "7 problems in the settings:"
    clues = ("max_iters?", "batch_size", "imports", "int8", "seed?", "maybe", "n_embd = 1.5")
    for clue, problem in zip(clues, problems, strict=True):
        assert clue in problem


# values that cannot be


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--batch_size=0", "batch_size = 0 must be at least 1"),
        ("--gradient_accumulation_steps=-1", "gradient_accumulation_steps = -1 must be at least 1"),
        (
            "--batch_size=10**9",
            "batch_size × gradient_accumulation_steps = 40000000000 must be at most 1000000",
        ),
        ("--max_iters=-1", "max_iters = -1 must be at least 0"),
        ("--seed=-1", "seed = -1 must be at least 0"),
        ("--learning_rate=-1e-4", "learning_rate = -0.0001 must be at least 0"),
        ("--beta2=1", "beta2 = 1.0 must be at least 0 and below 1"),
        ("--decay_fraction=0", "decay_fraction = 0.0 must be above 0 and at most 1"),
        ("--hours=0", "hours = 0.0 must be above 0 and at most 1000000"),
        ("--optimizer_bits=16", "optimizer_bits = 16 must be 8 or 32"),
        (
            "--activation_memory_budget=0.0",
            "activation_memory_budget = 0.0 must be from 0.1 to 1; near 0 so much is computed "
            "again that it takes more memory, not less",
        ),
        ("--eval_interval=0", "eval_interval = 0 must be at least 1"),
        ("--log_interval=0", "log_interval = 0 must be at least 1"),
        ("--save_interval=0", "save_interval = 0 must be at least 1"),
        ("--keep_checkpoints=0", "keep_checkpoints = 0 must be at least 1"),
        ("--compile_after=-1", "compile_after = -1 must be at least 0"),
        ("--device=gpu", "device = 'gpu' is not auto, cpu, mps, cuda or cuda:<number>"),
        ("--dropout=1", "dropout = 1.0 must be at least 0 and below 1"),
        ("--n_layer=0", "n_layer = 0 must be at least 1"),
        ("--n_layer=10**9", "n_layer = 1000000000 must be at most 10000"),
        ("--block_size=2**40", "block_size = 1099511627776 must be at most 1048576"),
        ("--n_head=0", "n_head = 0 must be at least 1"),
        ("--memory_limit=lots", "memory_limit: 'lots' is not a size such as 512MB or 1.5GiB"),
        ("--memory_reserve=", "memory_reserve: '' is not a size such as 512MB or 1.5GiB"),
    ],
)
def test_impossible_values_are_refused_with_the_bound(flag, reason):
    assert message(settings, flag) == reason


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--optimizer=muon", "Muon makes whole matrices orthogonal, and no process has one"),
        ("--optimizer_bits=8", "8-bit moments have scales in common"),
    ],
)
def test_what_needs_a_whole_model_is_refused_where_processes_hold_parts(flag, reason):
    settings(flag)
    assert message(settings, flag, "--shard=True").endswith(reason)


def test_two_lengths_are_refused_but_a_file_may_have_the_other(tmp_path):
    for name in ("max_iters", "lr_decay_iters"):
        told = message(settings, "--hours=2", f"--{name}=9")
        assert told == f"--hours and --{name} each set the run's length; give one of them"
    assert settings("--hours=2", "--lr_decay_iters=None")
    config = tmp_path / "long.py"
    config.write_text("max_iters = 9\nlr_decay_iters = 9\n")
    assert settings(str(config), "--hours=2")


@pytest.mark.parametrize("name", ["max_iters", "lr_decay_iters"])
def test_steps_asked_for_beside_the_hours_of_a_file_are_refused_with_the_way_out(tmp_path, name):
    config = tmp_path / "evening.py"
    config.write_text("hours = 5\n")
    words = [str(config), f"--{name}=9"]
    told = message(settings, *words)
    assert told == f"--{name} and a file's hours = 5 each set the run's length; add --hours=None"
    values = settings(*words, "--hours=None")
    assert (values["hours"], values[name]) == (None, 9)


def test_heads_that_do_not_divide_the_width_are_refused_with_a_width_that_would_do():
    told = message(settings, "--n_embd=500", "--n_head=12")
    assert "n_embd = 500 is not divisible by n_head = 12" in told
    width = int(told.split()[-3])
    assert width % 12 == 0 and abs(width - 500) < 12


def test_heads_that_half_rotary_cannot_split_are_refused_with_a_width_that_would_do():
    flags = ["--n_embd=60", "--n_head=6"]
    assert settings(*flags)["n_embd"] == 60  # gpt2 does not mind
    told = message(settings, *flags, "--arch=modern")
    assert "60 / 6 = 10 are no multiple of 4" in told and "\n" not in told
    assert told.endswith("n_embd = 72 would do")
    assert settings("--n_embd=72", "--n_head=6", "--arch=modern")


def test_a_full_loss_of_too_many_capped_logits_is_refused():
    """2^31 are too many: 32 × 1024 × 65536."""
    flags = ["--arch=modern", "--loss=full", "--autofit=False", "--vocab_size=65536"]
    told = message(settings, *flags, "--batch_size=32")
    assert "2,147,483,648 logits" in told and "--loss=chunked" in told and "\n" not in told
    for allowed in (["--batch_size=31"], ["--batch_size=32", "--loss=chunked"]):
        assert settings(*flags, *allowed)
    assert settings(*flags, "--batch_size=32", "--autofit=True")  # which finds what fits


# with Muon


MUON_AS_PUBLISHED = dict(
    optimizer="muon",
    learning_rate=0.025,
    min_lr=0.0,
    lr_schedule="wsd",
    decay_fraction=0.7,
    warmup_iters=0,
    weight_decay=0.05,
    beta1=0.8,
    grad_clip=0.0,
)


def test_with_muon_the_published_values_are_the_defaults(load):
    for values in (settings("--optimizer=muon"), load("optimizer = 'muon'")):
        assert changed(values) == MUON_AS_PUBLISHED
        assert values["beta2"] == 0.95
        rates = ("embedding_rate", "head_rate", "vector_rate")
        assert [0.025 * values[r] for r in rates] == pytest.approx([0.7, 0.004, 0.015])


@pytest.mark.parametrize("name", [name for name in MUON_AS_PUBLISHED if name != "optimizer"])
def test_with_muon_what_is_given_counts_even_if_it_is_another_default(load, name):
    line = f"{name} = {DEFAULTS[name]!r}"
    expected = {n: v for n, v in MUON_AS_PUBLISHED.items() if n != name}
    assert changed(load(f"optimizer = 'muon'\n{line}")) == expected
    assert changed(load(f"{line}\noptimizer = 'muon'")) == expected
    assert changed(load("optimizer = 'muon'", f"--{name}={DEFAULTS[name]}")) == expected
    assert changed(load(line, "--optimizer=muon")) == expected


@pytest.mark.parametrize("order", ["optimizer = 'muon'\n{}", "{}\noptimizer = 'muon'"])
def test_expressions_see_muons_defaults(load, order):
    """Whether the optimiser is told before, after or by a flag."""
    line = "min_lr = learning_rate / 10\nlr_decay_iters = 100 + warmup_iters"
    for values in (load(order.format(line)), load(line, "--optimizer=muon")):
        assert values["min_lr"] == 0.0025
        assert values["lr_decay_iters"] == 100
    assert load(line)["min_lr"] == pytest.approx(6e-5)
    assert settings("--min_lr=learning_rate/10", "--optimizer=muon")["min_lr"] == 0.0025
    assert load(line, "--optimizer=muon", "--learning_rate=0.5")["min_lr"] == 0.0025


def test_modern_has_biases_unless_they_are_refused(load):
    assert settings("--arch=modern")["bias"] and load("arch = 'modern'")["bias"]
    assert not settings("--arch=modern", "--bias=False")["bias"]
    assert not load("bias = False\narch = 'modern'")["bias"]
    assert not load("arch = 'modern'", "--arch=gpt2")["bias"]


def test_a_file_for_muon_run_with_adamw_has_adamws_defaults(load):
    assert changed(load("optimizer = 'muon'", "--optimizer=adamw")) == {}


@pytest.mark.parametrize("value", ["1e999", "-1e999", "1e300 * 1e300", "1e999 - 1e999", "10**400"])
def test_no_setting_is_infinite_or_nan(value):
    assert "--learning_rate: " in message(settings, f"--learning_rate={value}")


def test_settings_cannot_be_changed_afterwards():
    for section in load_config([]):
        with pytest.raises(FrozenInstanceError):
            setattr(section, fields(section)[0].name, 1)


# derived


def test_derived_settings_follow_what_they_derive_from():
    _, learn, run = load_config(["--batch_size=3", "--gradient_accumulation_steps=5"])
    assert learn.sequences_per_step == 15
    assert learn.decay_end == learn.max_iters
    assert run.save_every == run.eval_interval
    _, learn, run = load_config(["--lr_decay_iters=7", "--save_interval=11"])
    assert (learn.decay_end, run.save_every) == (7, 11)


def test_a_dataset_is_a_name_in_the_data_folder_or_a_path(tmp_path):
    assert RunConfig(dataset="sample").data_dir == PROJECT / "data" / "sample"
    assert RunConfig(dataset=str(tmp_path)).data_dir == tmp_path
    assert RunConfig(dataset="some/where").data_dir == Path("some/where")
    assert RunConfig(dataset="./here").data_dir == Path("here")


def test_flatten_and_load_are_inverse():
    values = settings("--n_layer=3", "--n_head=2", "--n_embd=64", "--seed=5", "--memory_limit=1GB")
    flags = [f"--{name}={value}" for name, value in values.items()]
    assert settings(*flags) == values


def test_help_tells_the_defaults_that_depend_on_others():
    told = describe_knobs()
    assert "highest learning rate; with muon that of the matrices (with muon: 0.025)\n" in told
    assert "biases in linear layers, and in gpt2's norms (with modern: True)\n" in told
    assert "AdamW's decay of the second moment\n" in told  # the same with both


def test_help_lists_every_knob_with_its_default_and_a_meaning():
    lines = describe_knobs().splitlines()
    for section in (GPTConfig, TrainConfig, RunConfig):
        for field in fields(section):
            place = lines.index(f"  --{field.name}={field.default}")
            assert len(lines[place + 1].split()) >= 2, f"{field.name} has no meaning"
    assert sum(line.startswith("  --") for line in lines) == len(DEFAULTS)


# sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000", 1000),
        ("512MB", 512 * 10**6),
        ("512mb", 512 * 10**6),
        ("512 MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("10g", 10**10),
        ("10Gi", 10 * 2**30),
        (" 2 TB ", 2 * 10**12),
        ("3kb", 3000),
        ("7b", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text, expected):
    assert parse_size(text) == expected


@REPEATABLE
@given(st.integers(0, 2**50), st.sampled_from(["", "b", "B"]))
def test_a_plain_number_is_that_many_bytes(number, unit):
    assert math.isclose(parse_size(f"{number}{unit}"), number, rel_tol=1e-15)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.GB", "1e3", "5 %", "10 GBs", "1,5GB", "10i"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size such as"):
        parse_size(text)


# the files in config/


def test_every_shipped_config_is_pinned():
    assert {path.stem for path in CONFIGS} == GOLDEN.keys() == ASKED.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_shipped_configs_keep_their_values(name):
    values = settings(str(PROJECT / "config" / f"{name}.py"))
    assert changed(values) == GOLDEN[name]
    assert {knob: values[knob] for knob in ASKED[name]} == ASKED[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_no_derived_figure_is_typed_in_a_shipped_config(name):
    text = (PROJECT / "config" / f"{name}.py").read_text(encoding="utf-8")
    shape, learn, _ = load_config([str(PROJECT / "config" / f"{name}.py")])
    sequences = learn.sequences_per_step
    parameters = 12 * shape.n_layer * shape.n_embd**2 + shape.vocab_size * shape.n_embd
    tokens_per_step = sequences * shape.block_size
    derived = {sequences, tokens_per_step, tokens_per_step * learn.max_iters, learn.max_iters}
    derived |= {round(parameters / 1e6), round(tokens_per_step / 1e3)}
    derived |= {round(tokens_per_step * learn.max_iters / 1e9)} - {0}
    words = set(re.findall(r"\d+", re.sub(r"(?<=\d)[,_](?=\d)", "", said(text))))
    assert not words & {str(number) for number in derived}
    units = r"tokens|epochs|hours|days|parameters|params|steps|sequences per step"
    assert not re.search(rf"\d\s*[kMB]?\s*({units})\b", said(text))


def said(text):
    """What a file says to its reader: comments, and texts that stand alone."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return " ".join([text.split('"""')[1], *comments])


def test_what_was_given_is_told_with_its_values(tmp_path):
    config = tmp_path / "mine.py"
    config.write_text("_half = 6\nn_layer = 2 * _half\nbatch_size = 4\n")
    words = [str(config), "--batch_size=batch_size * 2", "--dataset=12"]
    assert given_values(words) == {"n_layer": 12, "batch_size": 8, "dataset": "12"}
    assert given_values([]) == {}
