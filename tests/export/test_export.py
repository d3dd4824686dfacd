"""Exported folders: what the real transformers and lm-eval make of them, against our own model."""

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from model import GPT
from nanofit.data.tokenizer import SELF_CHECK, gpt2
from nanofit.export import load_back
from nanofit.export.export import export
from nanofit.export.tokenizer_files import tokenizer_files
from nanofit.settings.config import flatten
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError
from nanofit.use.generate import choose_token, generate
from tests import processes
from tests.conftest import PROJECT, read_metrics

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=24, vocab_size=97)
WITH_TEXT = replace(TINY, n_embd=16, block_size=64, vocab_size=50304)  # GPT-2's, padded
GREEDY = partial(choose_token, temperature=0)
MODELS = pytest.mark.parametrize(
    "shape",
    [
        replace(TINY, arch=arch, bias=bias)
        for arch in ("gpt2", "gpt2-tanh", "modern")
        for bias in (False, True)
    ],
    ids=lambda shape: f"{shape.arch}{'-bias' * shape.bias}",
)
ARCHITECTURES = pytest.mark.parametrize("arch", ["gpt2", "modern"])


@pytest.fixture
def _unverified(monkeypatch):
    """As on a machine without transformers: written at once, and compared by the test itself."""

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(load_back, "version", missing)


# the model


@MODELS
@pytest.mark.usefixtures("_unverified")
def test_transformers_finds_the_logits_and_the_loss_of_the_checkpoint(shape, tmp_path):
    model = saved_model(tmp_path, shape)
    theirs = exported(tmp_path)
    idx = torch.randint(0, 97, (3, 24))
    torch.testing.assert_close(theirs(idx).logits, model(idx), atol=1e-4, rtol=0)
    loss = theirs(idx, labels=idx).loss
    torch.testing.assert_close(loss, model(idx[:, :-1].contiguous(), idx[:, 1:].contiguous()))
    assert type(theirs).__name__ == ("NanofitForCausalLM" if shape.is_modern else "GPT2LMHeadModel")


@MODELS
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.usefixtures("_unverified")
def test_transformers_generates_our_tokens(shape, use_cache, tmp_path):
    model = saved_model(tmp_path, shape)
    theirs = exported(tmp_path)
    prompt = torch.randint(0, 97, (3, 6))
    ours = torch.stack(list(generate(model, prompt, GREEDY, max_new_tokens=18)), dim=1)
    found = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=18,
        do_sample=False,
        use_cache=use_cache,
        pad_token_id=0,
    )
    assert torch.equal(found[:, 6:], ours)
    assert len(ours.unique()) > 5  # not one token for ever


@ARCHITECTURES
@pytest.mark.usefixtures("_unverified")
def test_prompts_padded_on_the_left_are_continued_as_if_alone(arch, tmp_path):
    model = saved_model(tmp_path, replace(TINY, arch=arch))
    theirs = exported(tmp_path)
    prompts = [torch.randint(0, 97, (1, length)) for length in (3, 9, 5)]
    padded = torch.cat([F.pad(prompt, (9 - prompt.size(1), 0)) for prompt in prompts])
    mask = torch.cat([F.pad(torch.ones_like(p), (9 - p.size(1), 0)) for p in prompts])
    found = theirs.generate(
        padded, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    for row, prompt in zip(found, prompts, strict=True):
        alone = torch.cat(list(generate(model, prompt, GREEDY, max_new_tokens=12)))
        assert torch.equal(row[9:], alone)


@pytest.mark.usefixtures("_unverified")
def test_modern_logits_do_not_depend_on_how_its_cache_was_filled(tmp_path):
    model = saved_model(tmp_path, replace(TINY, arch="modern"))
    theirs = exported(tmp_path)
    idx = torch.randint(0, 97, (2, 24))
    cache, pieces = None, []
    for piece in idx.split([7, 1, 10, 6], dim=1):
        out = theirs(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(idx), atol=1e-4, rtol=0)
    few = theirs(idx, logits_to_keep=2).logits
    torch.testing.assert_close(few, model(idx)[:, -2:], atol=1e-4, rtol=0)
    fixed = theirs.generate(
        idx[:, :6], max_new_tokens=8, do_sample=False, cache_implementation="static"
    )
    ours = torch.stack(list(generate(model, idx[:, :6], GREEDY, max_new_tokens=8)), dim=1)
    assert torch.equal(fixed[:, 6:], ours)


def test_no_token_of_a_modern_model_sees_nothing_not_even_padding():
    """Attention to nothing is nan in some versions of torch, and would spread."""
    from nanofit.export.modeling_nanofit import visible

    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert visible(mask, torch.empty(2, 5, 8), seen=0).any(-1).all()
    assert visible(mask, torch.empty(2, 2, 8), seen=3).any(-1).all()
    first = visible(mask, torch.empty(2, 5, 8), seen=0)[0, 0]
    assert first.tolist() == [
        [True, False, False, False, False],
        [False, True, False, False, False],
        [False, False, True, False, False],
        [False, False, True, True, False],
        [False, False, True, True, True],
    ]


@pytest.mark.usefixtures("_unverified")
def test_modern_norms_keep_their_precision_in_bfloat16(tmp_path):
    """Embeddings so small that bfloat16's own eps would drown them."""
    model = saved_model(tmp_path, replace(TINY, arch="modern"), embedding_std=0.02)
    theirs = exported(tmp_path, dtype="bfloat16")
    assert theirs.dtype == torch.bfloat16
    idx = torch.randint(0, 97, (3, 24))
    relative = (theirs(idx).logits - model(idx)).norm() / model(idx).norm()
    assert relative < 0.03


@pytest.mark.usefixtures("_unverified")
def test_modern_model_that_transformers_saves_again_is_whole(tmp_path):
    saved_model(tmp_path, replace(TINY, arch="modern"))
    theirs, idx = exported(tmp_path), torch.randint(0, 97, (3, 24))
    theirs.save_pretrained(tmp_path / "again")
    again = loaded(tmp_path / "again")
    assert torch.equal(again(idx).logits, theirs(idx).logits)
    assert GPT.from_checkpoint(tmp_path / "again").config.arch == "modern"


@pytest.mark.usefixtures("_unverified")
def test_dropout_of_the_run_goes_with_the_model(tmp_path):
    for arch in ("gpt2", "modern"):
        saved_model(tmp_path, replace(TINY, arch=arch, dropout=0.25))
        theirs, idx = exported(tmp_path, overwrite=True).train(), torch.randint(0, 97, (3, 24))
        rates = {one.p for one in theirs.modules() if isinstance(one, torch.nn.Dropout)}
        assert rates == {0.25}
        assert not torch.equal(theirs(idx).logits, theirs(idx).logits)


# tokens


@pytest.fixture(scope="module")
def their_tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files(1024).items():
        (folder / name).write_text(content, encoding="utf-8")
    return AutoTokenizer.from_pretrained(folder)


def assert_same_tokens(tokenizer, text):
    ids = gpt2().encode(text, allowed_special="all")
    assert tokenizer(text)["input_ids"] == ids
    assert tokenizer.decode(ids) == text


# Code points that are assigned: which class an unassigned one has depends on the library's age.
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn"])
PIECES = st.sampled_from(["<|endoftext|>", "<|endof", "'ll", "'S", " ", "  ", "\n", "1984", " the"])


@settings(max_examples=300, deadline=None)
@given(text=st.lists(PIECES | st.text(ASSIGNED, max_size=8), max_size=12).map("".join))
def test_tokenizer_reads_text_as_tiktoken_does(their_tokenizer, text):
    assert_same_tokens(their_tokenizer, text)


@pytest.mark.parametrize(
    "text", [*SELF_CHECK, "", "<|endoftext|>", " <|endoftext|> \n<|endoftext|>x"]
)
def test_tokenizer_reads_what_has_told_encoders_apart(their_tokenizer, text):
    assert_same_tokens(their_tokenizer, text)


def test_tokenizer_knows_the_end_of_text_and_pads_on_the_left(their_tokenizer):
    ends = [their_tokenizer.bos_token_id, their_tokenizer.eos_token_id]
    assert [*ends, their_tokenizer.pad_token_id] == [50256] * 3
    assert len(their_tokenizer) == 50257 and their_tokenizer.model_max_length == 1024
    padded = their_tokenizer(["the river", "the"], padding=True)
    assert padded["attention_mask"] == [[1, 1], [0, 1]]
    assert their_tokenizer.decode(padded["input_ids"][1], skip_special_tokens=True) == "the"


def test_vocabulary_and_merges_apart_make_the_same_tokenizer():
    """Older tools read them instead of tokenizer.json."""
    from transformers import GPT2Tokenizer

    files = tokenizer_files(1024)
    _, *merges = files["merges.txt"].splitlines()
    pairs = [tuple(line.split(" ")) for line in merges]
    vocabulary = json.loads(files["vocab.json"])
    assert sorted(vocabulary.values()) == list(range(50257))
    tokenizer = GPT2Tokenizer(vocab=vocabulary, merges=pairs)
    for text in SELF_CHECK:
        assert_same_tokens(tokenizer, text)


@ARCHITECTURES
@pytest.mark.usefixtures("_unverified")
def test_rows_that_pad_the_vocabulary_are_left_out(arch, tmp_path, capsys):
    model = saved_model(tmp_path, replace(WITH_TEXT, arch=arch, bias=True))
    theirs = exported(tmp_path)
    assert theirs.config.vocab_size == 50257
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 50256
    idx = torch.randint(0, 50257, (2, 24))
    torch.testing.assert_close(theirs(idx).logits, model(idx)[..., :50257], atol=1e-4, rtol=0)
    assert "47 rows of padding are left out" in capsys.readouterr().out


@pytest.mark.parametrize("vocab_size", [97, 60_000])
@pytest.mark.usefixtures("_unverified")
def test_another_vocabulary_is_kept_whole_and_has_no_tokenizer(vocab_size, tmp_path, capsys):
    saved_model(tmp_path, replace(TINY, vocab_size=vocab_size))
    theirs = exported(tmp_path)
    assert theirs.config.vocab_size == vocab_size
    assert theirs.config.eos_token_id is None is theirs.generation_config.eos_token_id
    assert not list((tmp_path / "hf").glob("*token*")) + list((tmp_path / "hf").glob("vocab*"))
    assert "are not GPT-2's: the folder has no tokenizer" in capsys.readouterr().out


# other tools


@pytest.mark.usefixtures("_unverified")
def test_gpt2_folder_has_what_llama_cpps_converter_asks_for(tmp_path):
    """Of config.json by name; any tensor more or less than GPT-2's own is an error there."""
    saved_model(tmp_path, TINY)
    theirs = exported(tmp_path)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    asked = ("n_ctx", "n_embd", "n_head", "n_layer", "layer_norm_epsilon", "vocab_size")
    assert [config[name] for name in asked] == [24, 32, 2, 2, 1e-5, 97]
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert stored.keys() == theirs.state_dict().keys() - {"lm_head.weight"}


@pytest.mark.slow
@ARCHITECTURES
@pytest.mark.usefixtures("_unverified")
def test_lm_eval_finds_the_likelihoods_that_our_model_gives(arch, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = saved_model(tmp_path, replace(WITH_TEXT, arch=arch))
    exported(tmp_path)
    asked = write_task(tmp_path / "task")
    found = lm_eval.simple_evaluate(
        model=HFLM(str(tmp_path / "hf"), trust_remote_code=True, device="cpu", batch_size=3),
        tasks=["choices"],
        task_manager=TaskManager(include_path=str(tmp_path / "task"), include_defaults=False),
        bootstrap_iters=0,
    )
    expected = [
        [log_likelihood(model, question, choice) for choice in choices]
        for question, choices, _ in asked
    ]
    answered = [
        [likelihood for ((likelihood, _),) in sample["resps"]]
        for sample in sorted(found["samples"]["choices"], key=lambda sample: sample["doc_id"])
    ]
    for ours, theirs in zip(expected, answered, strict=True):
        assert theirs == pytest.approx(ours, abs=1e-3)
    right = [
        ours.index(max(ours)) == gold for ours, (*_, gold) in zip(expected, asked, strict=True)
    ]
    assert found["results"]["choices"]["acc,none"] == pytest.approx(sum(right) / len(right))


# our own tools


@ARCHITECTURES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("_unverified")
def test_our_model_reads_the_folder_back(arch, dtype, tmp_path):
    model = saved_model(tmp_path, replace(TINY, arch=arch))
    exported(tmp_path, dtype=dtype)
    for parameter in model.parameters():
        parameter.data = parameter.to(getattr(torch, dtype)).float()
    again = GPT.from_checkpoint(tmp_path / "hf").eval()
    assert again.config.arch == arch
    idx = torch.randint(0, 97, (3, 24))
    torch.testing.assert_close(again(idx), model(idx), atol=1e-6, rtol=0)


@ARCHITECTURES
@pytest.mark.usefixtures("_unverified")
def test_sample_and_train_take_the_folder_for_the_checkpoint(arch, tmp_path, tiny_run):
    (tmp_path / "text").mkdir()
    saved_model(tmp_path / "text", replace(WITH_TEXT, arch=arch))
    exported(tmp_path / "text")
    places = [tmp_path / "text" / name for name in ("run/ckpt-00000005.pt", "hf")]
    flags = ["--start=The river", "--temperature=0", "--max_new_tokens=6"]
    one, two = (script("sample.py", f"--checkpoint={place}", *flags) for place in places)
    assert one.returncode == 0 and one.stdout == two.stdout

    saved_model(tmp_path, replace(TINY, arch=arch, n_embd=16, block_size=16, vocab_size=64))
    exported(tmp_path)
    places = [tmp_path / name for name in ("run/ckpt-00000005.pt", "hf")]
    flags = [f"--arch={arch}", "--max_iters=0", "--eval_only=True"]
    one, two = (tiny_run(*flags, f"--init_from={place}") for place in places)
    assert one.returncode == two.returncode == 0, two.stderr
    assert said_loss(one) == said_loss(two)


# the export


@pytest.mark.parametrize("arch", [pytest.param("gpt2-tanh", marks=pytest.mark.slow), "modern"])
def test_a_real_run_is_exported_verified_and_described(arch, tmp_path, tiny_run):
    assert tiny_run(f"--arch={arch}").returncode == 0
    done = script("export.py", "out", "hf", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    verified = re.search(
        r"transformers \S+ finds the same logits, to (\S+) in float32", done.stdout
    )
    assert float(verified[1]) < 1e-4
    assert {path.name for path in tmp_path.iterdir()} == {"out", "hf"}
    step, losses = best(tmp_path / "out")
    bits = read_metrics(tmp_path / "out", "eval", "bits_per_byte")[step]
    card = (tmp_path / "hf" / "README.md").read_text()
    parameters = GPT.from_checkpoint(tmp_path / "out" / "ckpt-best.pt").num_params()
    for figure in (
        f"{parameters:,}",
        f"{losses[step]:.4f}",
        f"{bits:.4f}",
        f"{8 * 16 * step:,} tokens in {step} steps",
        "4,000 tokens to train on",
        f"--arch={arch}",
    ):
        assert figure in card


@ARCHITECTURES
@pytest.mark.usefixtures("_unverified")
def test_what_the_card_says_to_run_runs(arch, tmp_path, monkeypatch, capsys):
    saved_model(tmp_path, replace(WITH_TEXT, arch=arch))
    exported(tmp_path)
    card = (tmp_path / "hf" / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], {})
    assert capsys.readouterr().out.startswith("The river")


@pytest.mark.usefixtures("_unverified")
def test_card_leaves_out_what_is_not_known(tmp_path):
    saved_model(tmp_path, TINY)
    (tmp_path / "run" / "metrics.jsonl").touch()
    exported(tmp_path)
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "parameters" in card
    for unknown in (
        "validation",
        "bits",
        "data",
        "seen",
        "None",
        "How it was trained",
        "license: ",
    ):
        assert unknown not in card


@pytest.mark.usefixtures("_unverified")
def test_without_transformers_the_folder_is_written_and_said_to_be_unverified(tmp_path, capsys):
    saved_model(tmp_path, TINY)
    exported(tmp_path)
    assert "not verified; pip install 'transformers>=5'" in capsys.readouterr().out


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> tuple[Path, GPT]:
    """A folder with a tokenizer, and the model that it holds."""
    folder = tmp_path_factory.mktemp("sound")
    model = saved_model(folder, WITH_TEXT)
    with pytest.MonkeyPatch.context() as patch:
        _unverified.__wrapped__(patch)
        export(folder / "run" / "ckpt-00000005.pt", folder / "hf", dtype="float32", overwrite=False)
    return folder / "hf", model


def change_weight(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["transformer.h.1.mlp.c_proj.weight"][3, 5] += 0.1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def add_tensor(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    stored["lm_head.bias"] = torch.zeros(50257)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, name: str, value) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))


def change_merges(folder: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    merges = whole["model"]["merges"]
    merges[:200] = reversed(merges[:200])
    (folder / "tokenizer.json").write_text(json.dumps(whole))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_weight, "logits differ from the checkpoint's by up to"),
        (add_tensor, "weights do not fit: .*lm_head.bias"),
        (partial(change_config, name="n_head", value=4), "logits differ"),
        (partial(change_config, name="activation_function", value="gelu_new"), "logits differ"),
        (change_merges, "tokenizer does not read"),
    ],
    ids=["weight", "tensor", "heads", "gelu", "merges"],
)
def test_a_folder_that_differs_is_found_out(change, message, sound, tmp_path):
    folder = shutil.copytree(sound[0], tmp_path / "hf")
    change(folder)
    with pytest.raises(InputError, match=message):
        load_back.difference(folder, sound[1], vocab_size=50257, has_tokenizer=True)


def test_a_failed_verification_leaves_what_was_there(tmp_path, monkeypatch):
    saved_model(tmp_path, TINY)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "README.md").write_text("before")

    def save_altered(tensors, *words, **options):
        del tensors["transformer.ln_f.weight"]
        save_file(tensors, *words, **options)

    monkeypatch.setattr("safetensors.torch.save_file", save_altered)
    with pytest.raises(InputError, match=r"weights do not fit: .*; nothing was written to"):
        exported(tmp_path, overwrite=True)
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["README.md"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hf"}


def test_an_interrupted_export_leaves_what_was_there(tmp_path):
    saved_model(tmp_path, TINY)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "README.md").write_text("before")
    words = [sys.executable, PROJECT / "export.py", "run", "hf", "--overwrite"]
    process = processes.start(words, cwd=tmp_path)
    processes.wait_for(lambda: list(tmp_path.glob("hf.*.tmp/README.md")), interval_s=0.005)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert (process.returncode, stderr) == (130, "interrupted\n")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["README.md"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "hf"}


@pytest.mark.usefixtures("_unverified")
def test_overwrite_replaces_an_export_and_all_that_belonged_to_it(tmp_path):
    saved_model(tmp_path, replace(WITH_TEXT, arch="modern"))
    exported(tmp_path)
    saved_model(tmp_path, TINY)
    exported(tmp_path, overwrite=True)
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {"README.md", "config.json", "generation_config.json", "model.safetensors"}


def test_a_checkpoint_of_a_diverged_run_is_refused(tmp_path):
    saved_model(tmp_path, TINY, embedding_std=3e38)
    with pytest.raises(InputError, match="is not finite: its run has diverged"):
        exported(tmp_path)


def test_weights_beyond_float16_are_refused_for_it(tmp_path):
    saved_model(tmp_path, TINY, embedding_std=1e5)
    with pytest.raises(InputError, match=r"too large for float16; use --dtype=bfloat16"):
        exported(tmp_path, dtype="float16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "hf"], "no checkpoint in nowhere; train first"),
        (["foreign", "hf"], "no checkpoint in foreign"),
        (["run", "hf", "--checkpoint=nowhere.pt"], "cannot read nowhere.pt (No such file"),
        (["run", "hf", "--checkpoint=foreign"], "cannot read foreign (Is a directory)"),
        (["run", "hf", "--checkpoint=damaged.pt"], "not a readable checkpoint (it is damaged"),
        (["run", "hf", "--checkpoint=other.pt"], "other.pt is not a checkpoint: it has no model"),
        (["run", "full"], "full is not empty; use --overwrite"),
        (["run", "foreign", "--overwrite"], "foreign holds thesis.tex, which no export"),
        (["run", "run", "--overwrite"], "run holds ckpt-00000005.pt, which no export"),
        (["run", "damaged.pt"], "damaged.pt is a file"),
        (["run", "damaged.pt/hf"], "hf (Not a directory)"),
        (["damaged.pt", "hf"], "is a file, no run's folder; give it as --checkpoint=damaged.pt"),
        (["run"], "hf_dir; --help shows how"),
        (["run", "full", "--over"], "unrecognized arguments: --over; --help shows how"),
        (["run", "hf", "--dtype=int8"], "invalid choice: 'int8'"),
    ],
)
def test_what_cannot_be_exported_is_told_in_a_line(words, message, tmp_path):
    saved_model(tmp_path, TINY)
    whole = bytearray((tmp_path / "run" / "ckpt-00000005.pt").read_bytes())
    whole[len(whole) // 2] ^= 1
    (tmp_path / "damaged.pt").write_bytes(whole)
    torch.save({"weights": {}}, tmp_path / "other.pt")
    for folder, file in (("full", "README.md"), ("foreign", "thesis.tex")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).touch()
    before = sorted(tmp_path.rglob("*"))
    done = script("export.py", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def saved_model(folder: Path, shape: GPTConfig, *, embedding_std: float = 0.3) -> GPT:
    """A run's only checkpoint in `folder`/run, in which every weight matters; returns its model."""
    model = GPT(shape).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        mean = float(".ln_" in name and name.endswith("weight"))
        std = embedding_std if name.endswith("wte.weight") else 0.3
        torch.nn.init.normal_(parameter, mean=mean, std=std)
    (folder / "run").mkdir(exist_ok=True)
    content = {"model": model.state_dict(), "model_args": flatten(shape), "iter_num": 5}
    torch.save(content, folder / "run" / "ckpt-00000005.pt")
    return model


def exported(folder: Path, *, dtype: str = "float32", overwrite: bool = False):
    """The checkpoint in `folder`/run as transformers loads it from `folder`/hf."""
    checkpoint = folder / "run" / "ckpt-00000005.pt"
    export(checkpoint, folder / "hf", dtype=dtype, overwrite=overwrite)
    return loaded(folder / "hf")


def loaded(folder: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    return model.eval().requires_grad_(False)


def script(name: str, *words: str, cwd: Path = PROJECT) -> subprocess.CompletedProcess:
    return processes.run_script(name, *words, cwd=cwd)


def best(out_dir: Path) -> tuple[int, dict[int, float]]:
    losses = read_metrics(out_dir, "eval", "val_loss")
    return min(losses, key=losses.get), losses


def said_loss(done: subprocess.CompletedProcess) -> str:
    return re.search(r"validation loss \S+", done.stdout)[0]


def write_task(folder: Path) -> list[tuple[str, list[str], int]]:
    """A task of lm-eval's with questions in a file beside it."""
    asked = [
        ("The river runs", [" to the sea", " blue quickly of"], 0),
        ("Once upon a", [" table", " time there was a king", " x"], 1),
        ("Two and two are", [" four", " five"], 0),
        ("I can't", [" see", " seeing", " sea!", " 1984"], 0),
    ]
    folder.mkdir()
    lines = [
        json.dumps(dict(zip(("question", "choices", "gold"), one, strict=True))) for one in asked
    ]
    (folder / "asked.jsonl").write_text("\n".join(lines))
    task = {
        "task": "choices",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "asked.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "choices.yaml").write_text(json.dumps(task))  # which is YAML as well
    return asked


def log_likelihood(model: GPT, question: str, choice: str) -> float:
    start, rest = gpt2().encode(question), gpt2().encode(choice)
    idx = torch.tensor([start + rest])
    logs = model(idx)[0, :, :50257].log_softmax(-1)
    return sum(logs[len(start) - 1 + place, token].item() for place, token in enumerate(rest))
