"""evaluate.py as its user calls it, held to what runs recorded of themselves."""

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from model import GPT
from nanofit.data.tokenizer import END_OF_TEXT
from nanofit.settings.config import flatten
from nanofit.settings.shape import GPTConfig
from tests import processes
from tests.conftest import read_records, run_tiny
from tests.disturb import flip_a_bit

SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32)


@pytest.fixture(scope="module")
def runs(tiny_dataset, tmp_path_factory) -> Path:
    """Two runs on one dataset, a and b."""
    folder = tmp_path_factory.mktemp("runs")
    for name in "ab":
        done = run_tiny(tiny_dataset, f"--seed={ord(name)}", out_dir=folder / name)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Path:
    """A dataset of documents in GPT-2's tokens, and an untrained model of its vocabulary."""
    folder = tmp_path_factory.mktemp("documents")
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 50257, 400).astype(np.uint16)
    tokens[[90, 200, 399]] = END_OF_TEXT
    tokens.tofile(folder / "val.bin")
    tokens.tofile(folder / "train.bin")
    content = {"model": GPT(SHAPE).state_dict(), "model_args": flatten(SHAPE)}
    torch.save(content, folder / "model.pt")
    shutil.copy(folder / "model.pt", folder / "damaged.pt")
    flip_a_bit(folder / "damaged.pt")
    (folder / "text.txt").write_text("Once upon a time there was a river. " * 20)
    return folder


def evaluate(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    return processes.run_script("evaluate.py", *map(str, words), cwd=cwd)


def told(*words: str | Path, cwd: Path) -> dict:
    done = evaluate(*words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_as_in_run_is_the_loss_that_the_run_recorded(runs):
    recorded = {record["step"]: record for record in read_records(runs / "a", "eval")}
    models = ["a/ckpt-00000006.pt", "a/ckpt-00000012.pt", "a"]
    answer = told(*models, "--as_in_run", cwd=runs)
    assert [one["step"] for one in answer["models"][:2]] == [6, 12]
    for one in answer["models"]:
        record = recorded[one["step"]]
        assert one["loss"] == pytest.approx(record["val_loss"], rel=1e-6)
        assert one["bits_per_byte"] == pytest.approx(record["bits_per_byte"], rel=1e-6)
        assert one["tokens"] == 2 * 4 * 16
        assert one["precision"] == "float32"
    best = min(recorded.values(), key=lambda record: record["val_loss"])
    assert answer["models"][2]["step"] == best["step"]


def test_the_whole_split_is_all_but_the_first_token_where_no_document_ends(runs, tiny_dataset):
    one, other = told("a", "b", cwd=runs)["models"]
    tokens = np.fromfile(tiny_dataset / "val.bin", np.uint16).astype(np.int64)
    model = GPT.from_checkpoint(runs / one["checkpoint"]).double().eval()
    nats = 0.0
    for start in range(0, len(tokens) - 1, 16):
        piece = torch.from_numpy(tokens[start : start + 17])[None]
        log_probs = model(piece[:, :-1]).double().log_softmax(-1)
        nats -= log_probs.gather(2, piece[:, 1:, None]).sum().item()
    assert one["tokens"] == other["tokens"] == 599
    assert one["loss"] == pytest.approx(nats / 599, rel=1e-5)
    assert one["bits_per_byte"] == pytest.approx(nats / 599 / np.log(2) / 3, rel=1e-5)
    assert other["loss_difference"] == pytest.approx(other["loss"] - one["loss"], abs=1e-9)
    assert one["loss_stderr"] is None  # of a single document


def test_a_table_has_what_json_has(documents):
    words = ["model.pt", "model.pt", "--dataset=./"]
    answer, done = told(*words, cwd=documents), evaluate(*words, cwd=documents)
    assert (answer["tokens"], answer["documents"], answer["text_bytes"]) == (400, 3, None)
    first, second = answer["models"]
    assert second["loss_difference"] == second["loss_difference_stderr"] == 0
    assert "loss_difference" not in first and "bits_per_byte" not in first
    about, _, titles, *rows = done.stdout.splitlines()
    assert about.endswith("400 tokens, 3 documents; how many bytes of text is not told")
    assert titles.split() == "model step precision loss perplexity difference".split()
    for row, one in zip(rows, answer["models"], strict=True):
        cells = row.split()
        assert cells[:3] == ["model.pt", "-", "float32"]
        assert cells[3:5] == [f"{one['loss']:.4f}", f"±{one['loss_stderr']:.4f}"]
        assert cells[5] == f"{one['perplexity']:,.2f}"
    assert rows[1].split()[6:] == ["0.0000", "±0.0000"]


@pytest.mark.parametrize("scale", [300, 1e14])
def test_huge_figures_are_short_in_a_table_and_no_number_is_null_in_json(documents, scale):
    """Of models that are the more certain, and wrong, the larger their logits are."""
    content = torch.load(documents / "model.pt", weights_only=True)
    content["model"]["lm_head.weight"] *= scale
    torch.save(content, documents / "certain.pt")
    words = ["certain.pt", "--text=text.txt"]
    (one,) = told(*words, cwd=documents)["models"]
    assert (one["perplexity"] is None) == (one["loss"] > 710) == (scale > 300)
    *_, row = evaluate(*words, cwd=documents).stdout.splitlines()
    shown = row.split()[3:]
    assert max(map(len, shown)) <= len("999,999,999.9999")
    figures = [one["loss"], one["perplexity"] or math.inf, one["bits_per_byte"]]
    assert [float(cell.replace(",", "")) for cell in shown] == pytest.approx(figures, rel=5e-3)


def test_text_is_one_document_with_known_bytes(documents):
    answer = told("model.pt", "--text=text.txt", cwd=documents)
    assert (answer["documents"], answer["text_bytes"]) == (1, 36 * 20)
    (one,) = answer["models"]
    bits = one["loss"] / np.log(2) * answer["tokens"]
    assert one["bits_per_byte"] == pytest.approx(bits / 720, rel=1e-9)
    assert one["tokens"] == answer["tokens"]


def test_hellaswag_answers_are_told_with_their_errors(documents):
    record = {"activity_label": "Rowing", "ctx_a": "A man sits.", "ctx_b": "he", "label": 2}
    record["endings"] = ["sleeps.", "throws a line.", "is a fish.", "sings."]
    lines = [json.dumps({**record, "label": number % 4}) for number in range(8)]
    (documents / "questions.jsonl").write_text("\n".join(lines))
    answer = told("model.pt", "--hellaswag=questions.jsonl", cwd=documents)
    (one,) = answer["models"]
    assert answer["questions"] == 8
    assert one["acc"] == one["acc_norm"] == 0.25  # the same one is chosen each time
    assert one["acc_stderr"] == pytest.approx((0.25 * 0.75 / 7) ** 0.5)
    words = ["--hellaswag=questions.jsonl", "--limit=4"]
    assert "4 questions" in evaluate("model.pt", *words, cwd=documents).stdout


def test_a_dataset_that_was_moved_is_named_anew(tiny_dataset, runs, tmp_path):
    content = torch.load(runs / "a" / "ckpt-best.pt", weights_only=True)
    content["config"]["dataset"] = str(tmp_path / "gone")
    torch.save(content, tmp_path / "moved.pt")
    done = evaluate("moved.pt", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(r"was trained on .*gone, which is not there; .*--dataset=\.\.\.", done.stderr)
    told("moved.pt", f"--dataset={tiny_dataset}", cwd=tmp_path)
    done = evaluate("moved.pt", runs / "a", cwd=tmp_path)
    assert "trained on different datasets" in done.stderr


def test_models_that_were_evaluated_are_told_if_a_later_one_cannot_be(runs, documents):
    text = documents / "text.txt"
    done = evaluate(documents / "model.pt", runs / "a", f"--text={text}", cwd=documents)
    assert done.returncode == 2
    assert "vocabulary ends at 63" in done.stderr
    assert "model.pt" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "arguments are required: MODEL"),
        (["nowhere"], "no model at nowhere; give the out_dir of a run"),
        (["."], "no checkpoint in ."),
        (["text.txt"], "text.txt is not a readable checkpoint"),
        (["damaged.pt", "--dataset=./"], "not a readable checkpoint (it is damaged"),
        (["model.pt", "--data=./"], "unrecognized arguments: --data=./; --help shows how"),
        (["model.pt"], "model.pt: no dataset is told there; name one with --dataset="),
        (["model.pt", "--dataset=./none"], "no dataset folder none"),
        (["model.pt", "--text=none.txt"], "cannot read the text of none.txt"),
        (["model.pt", "--hellaswag=text.txt"], "text.txt, line 1, is no question of HellaSwag"),
        (["model.pt", "--text=text.txt", "--dataset=x"], "--text and --dataset do not go together"),
        (["model.pt", "--dataset=./", "--limit=3"], "--limit is for --hellaswag"),
        (["model.pt", "--dataset=./", "--as_in_run"], "leave it out"),
        (["model.pt", "--dataset=./", "--device=foo"], "device = 'foo' is none of"),
        (["model.pt", "--bogus"], "unrecognized arguments: --bogus"),
    ],
)
def test_bad_input_is_told_in_a_line(documents, words, message):
    done = evaluate(*words, cwd=documents)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
