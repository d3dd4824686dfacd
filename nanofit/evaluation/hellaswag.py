"""HellaSwag: which of four endings is the likeliest?  As lm-evaluation-harness's task scores it.

A local file as its authors publish it, a JSON object a line: `activity_label`, `ctx_a`, `ctx_b`,
four `endings`, and the `label` of the right one. Of acc the likeliest ending counts; of acc_norm
the likeliest for its length in characters.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanofit.data.tokenizer import VOCABULARY_SIZE, gpt2
from nanofit.evaluation.estimate import Estimate
from nanofit.evaluation.predict import Windows
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, first_line

ENDINGS = 4


class Question(NamedTuple):
    context: str
    endings: list[str]
    label: int


@dataclass(frozen=True)
class HellaSwag:
    """Questions of which a model is to tell the endings."""

    name: str
    questions: list[Question]

    @classmethod
    def read(cls, path: Path, limit: int | None = None) -> "HellaSwag":
        """The questions of a file, or the first of them."""
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read the questions of {path} ({error})") from None
        numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        questions = [_question(path, *one) for one in islice(numbered, limit)]
        if not questions:
            raise InputError(f"{path} holds no questions")
        return cls(str(path), questions)

    def windows(self, shape: GPTConfig, settings: dict[str, Any]) -> Windows:
        """Each context with each of its endings, of which alone the tokens count."""
        if shape.vocab_size < VOCABULARY_SIZE:
            raise InputError("the model's vocabulary is too small for GPT-2's tokens")
        inputs, targets = [], []
        for context, ending in self._encoded():
            tokens = np.array((context + ending)[-(shape.block_size + 1) :])
            inputs.append(tokens[:-1])
            targets.append(tokens[1:].copy())
            targets[-1][: -len(ending)] = -1
        lengths = np.array([len(one) for one in inputs])
        starts = np.cumsum(lengths) - lengths
        return Windows(np.concatenate(inputs), np.concatenate(targets), starts, lengths)

    def estimates(self, windows: Windows, losses: np.ndarray) -> dict[str, Estimate]:
        """The share of right answers, over questions."""
        nats = np.add.reduceat(losses, windows.offsets).reshape(-1, ENDINGS)
        characters = np.array([[len(one) for one in each.endings] for each in self.questions])
        labels = np.array([each.label for each in self.questions])
        answers = {"acc": nats, "acc_norm": nats / characters}
        ones = np.ones(len(labels))
        return {
            name: Estimate((of_each.argmin(1) == labels).astype(float), ones)
            for name, of_each in answers.items()
        }

    def figures(self, estimates: dict[str, Estimate]) -> dict[str, float]:
        return {}

    def described(self) -> dict[str, Any]:
        return {"data": self.name, "questions": len(self.questions)}

    def _encoded(self) -> Iterator[tuple[list[int], list[int]]]:
        """The tokens of each context and ending, cut where those of the context alone end.

        Spaces at a context's end belong to the words after it.
        """
        encode = gpt2().encode_ordinary
        for context, endings, _ in self.questions:
            without_spaces = context.rstrip()
            of_context = encode(without_spaces)
            for ending in endings:
                whole = encode(f"{context} {ending}")
                yield of_context, whole[len(of_context) :]


def _question(path: Path, number: int, line: str) -> Question:
    try:
        return _parsed(json.loads(line))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{path}, line {number}, is no question of HellaSwag "
            f"({type(error).__name__}: {first_line(error)})"
        ) from None


def _parsed(record: dict[str, Any]) -> Question:
    endings = [_cleaned(ending) for ending in record["endings"]]
    if len(endings) != ENDINGS or not all(endings):
        raise ValueError(f"it has not {ENDINGS} endings")
    label = int(record["label"])
    if not 0 <= label < ENDINGS:
        raise ValueError(f"label {label} is not from 0 to {ENDINGS - 1}")
    text = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return Question(_cleaned(text), endings, label)


def _cleaned(text: str) -> str:
    """Without the marks of WikiHow's headings."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")
