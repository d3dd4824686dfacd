"""HellaSwag's scores against a scorer by hand and against lm-evaluation-harness's own task."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from model import GPT
from nanofit.data.tokenizer import gpt2, tokenizer_json
from nanofit.evaluation.hellaswag import HellaSwag
from nanofit.evaluation.predict import losses_of
from nanofit.machine.device import describe_device
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, Progress

WORDS = (
    "the a river boat man [title] runs slowly water, [step] into [header] blue. sky\u2028 Ärger 12 "
)
RECORD = {
    "activity_label": "Fishing",
    "ctx_a": "A man sits in a boat.",
    "ctx_b": "the MAN [wave]",
    "endings": ["sleeps.", " [title] throws  a line.", "is a fish.", "[step]sings."],
    "label": 1,
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Such as a random writer would ask."""
    random, words = np.random.default_rng(0), WORDS.split(" ")

    def some(least: int, most: int) -> str:
        return " ".join(random.choice(words, random.integers(least, most)))

    path = tmp_path_factory.mktemp("hellaswag") / "questions.jsonl"
    records = [
        {
            "ind": number,
            "activity_label": some(1, 3),
            "ctx_a": some(3, 20),
            "ctx_b": some(0, 4),
            "ctx": "",
            "endings": [f"ends {some(1, 14)}" for _ in range(4)],
            "label": number % 4,
        }
        for number in range(60)
    ]
    lines = (json.dumps(record, ensure_ascii=False) for record in records)
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """A GPT-2 as transformers keeps it; questions are longer than it sees."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    reference = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32))
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("reference")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(reference) -> GPT:
    return GPT.from_checkpoint(reference).eval()


def scores(model: GPT, task: HellaSwag):
    windows = task.windows(model.config, {})
    progress = Progress("answering", 1, quiet=True)
    losses = losses_of(model, windows, describe_device("cpu"), progress)
    return task.estimates(windows, losses)


def test_questions_are_read_as_the_harness_cleans_them(tmp_path):
    (tmp_path / "q.jsonl").write_text(json.dumps({**RECORD, "label": "1"}))
    ((context, endings, label),) = HellaSwag.read(tmp_path / "q.jsonl").questions
    assert context == "Fishing: A man sits in a boat. The man "
    assert endings == ["sleeps.", " throws a line.", "is a fish.", "sings."]
    assert label == 1


@torch.no_grad()
def test_scores_are_those_of_each_ending_by_itself(model, questions):
    task = HellaSwag.read(questions)
    assert len(task.questions) == 60
    right = {"acc": [], "acc_norm": []}
    for context, endings, label in task.questions:
        of_context, likelihoods = gpt2().encode_ordinary(context.rstrip()), []
        for ending in endings:
            whole = gpt2().encode_ordinary(context + " " + ending)
            assert whole[: len(of_context)] == of_context
            seen = torch.tensor([whole[-33:]])
            log_probs = model(seen[:, :-1]).double().log_softmax(-1)
            of_tokens = log_probs.gather(2, seen[:, 1:, None]).flatten()
            likelihoods.append(of_tokens[-(len(whole) - len(of_context)) :].sum().item())
        right["acc"].append(np.argmax(likelihoods) == label)
        by_length = [one / len(ending) for one, ending in zip(likelihoods, endings, strict=True)]
        right["acc_norm"].append(np.argmax(by_length) == label)
    estimates = scores(model, task)
    for name, answers in right.items():
        assert estimates[name].amounts.tolist() == answers
    assert right["acc"] != right["acc_norm"]  # or the lengths would not matter here


@pytest.mark.slow
def test_scores_are_those_of_lm_evaluation_harness(
    reference, model, questions, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

    published = Path(lm_eval.__file__).parent / "tasks/hellaswag/hellaswag.yaml"
    local = {
        "include": str(published),
        "task": "hellaswag_of_a_file",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"validation": str(questions)}},
        "training_split": None,
    }
    (tmp_path / "local.yaml").write_text(json.dumps(local))  # which is YAML as well
    described = json.loads(tokenizer_json())
    for part in ("pre_tokenizer", "decoder"):
        described[part]["trim_offsets"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    harness = HFLM(GPT2LMHeadModel.from_pretrained(reference), tokenizer=tokenizer, device="cpu")
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    done = lm_eval.simple_evaluate(harness, tasks=["hellaswag_of_a_file"], task_manager=tasks)
    told = done["results"]["hellaswag_of_a_file"]
    for name, estimate in scores(model, HellaSwag.read(questions)).items():
        assert estimate.value == pytest.approx(told[f"{name},none"], abs=1e-9)
        assert estimate.error == pytest.approx(told[f"{name}_stderr,none"], rel=1e-6)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ("7", "TypeError"),
        (json.dumps({**RECORD, "endings": ["a"] * 3}), "it has not 4 endings"),
        (json.dumps({**RECORD, "endings": ["a", "b", "c", "[step]"]}), "it has not 4 endings"),
        (json.dumps({**RECORD, "endings": [1, 2, 3, 4]}), "AttributeError"),
        (json.dumps({**RECORD, "label": 4}), "label 4 is not from 0 to 3"),
        (json.dumps({**RECORD, "label": ""}), "invalid literal"),  # as in the test split
        (json.dumps({**RECORD, "ctx_b": None}), "AttributeError"),
        (json.dumps({name: RECORD[name] for name in ("endings", "label")}), "activity_label"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, problem):
    (tmp_path / "q.jsonl").write_text(f"{json.dumps(RECORD)}\n\n{line}\n")
    with pytest.raises(InputError, match=f"line 3, is no question of HellaSwag .*{problem}"):
        HellaSwag.read(tmp_path / "q.jsonl")
    assert len(HellaSwag.read(tmp_path / "q.jsonl", limit=1).questions) == 1


def test_a_file_without_questions_or_a_model_without_the_words_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot read the questions"):
        HellaSwag.read(tmp_path / "nowhere.jsonl")
    (tmp_path / "q.jsonl").write_text("\n\n")
    with pytest.raises(InputError, match="holds no questions"):
        HellaSwag.read(tmp_path / "q.jsonl")
    with pytest.raises(InputError, match="vocabulary is too small"):
        HellaSwag("none", []).windows(GPTConfig(vocab_size=64), {})
