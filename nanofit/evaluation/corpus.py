"""A text to predict, token by token, and the loss on it.

Each token is predicted once, from what is before it in its block. Blocks are as long as the model's
longest sequence and do not overlap, so that the first token of one is predicted from a single one.
The first of all follows an end-of-text token, as every other document's does; where the vocabulary
has none, the text is one document, whose first token is seen and not predicted.

That a document ends is predicted as well: it costs nats, and stands for no bytes.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanofit.data.loader import val_starts
from nanofit.data.text import read_text
from nanofit.data.tokenizer import END_OF_TEXT
from nanofit.data.tokens import Bins
from nanofit.evaluation.estimate import Estimate
from nanofit.evaluation.predict import Windows
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError


@dataclass(frozen=True)
class Corpus:
    """A text as tokens; of it a model predicts all or, as in its run, what that validates on."""

    name: str
    tokens: np.ndarray
    text_bytes: int | None  # that they stand for; None where nobody counted them
    has_ends: bool  # whether an end-of-text token is one of its vocabulary
    as_in_run: bool = False

    @classmethod
    def of_bins(cls, bins: Bins, *, as_in_run: bool) -> "Corpus":
        tokens = bins.read(0, len(bins))
        has_ends = bool((tokens == END_OF_TEXT).any())
        return cls(str(bins.files[0]), tokens, bins.text_bytes, has_ends, as_in_run)

    @classmethod
    def of_text(cls, path: Path, text_column: str) -> "Corpus":
        text = read_text(path, text_column)
        return cls(str(path), text.tokens, text.bytes, has_ends=True)

    def windows(self, shape: GPTConfig, settings: dict[str, Any]) -> Windows:
        """What a model of such a shape, and of a run with such settings, is to predict."""
        before = np.array([END_OF_TEXT if self.has_ends else 0], self.tokens.dtype)
        row = np.concatenate([before, self.tokens])
        if row.max() >= shape.vocab_size:
            raise InputError(
                f"{self.name} has token {row.max()}, but the model's vocabulary ends at "
                f"{shape.vocab_size - 1}: they have different tokenizers"
            )
        starts = self._starts(shape.block_size, settings)
        if not len(starts):
            raise InputError(f"{self.name} has too few tokens to predict any")
        lengths = np.minimum(shape.block_size, len(self.tokens) - starts)
        return Windows(row[:-1], row[1:], starts, lengths)

    def _starts(self, block_size: int, settings: dict[str, Any]) -> np.ndarray:
        """Where blocks begin, in a row that has one token more before the first."""
        if not self.as_in_run:
            return np.arange(0 if self.has_ends else 1, len(self.tokens), block_size)
        if not {"eval_iters", "batch_size"} <= settings.keys():
            raise InputError("of a model without a run there is no --as_in_run; leave it out")
        sequences = settings["eval_iters"] * settings["batch_size"]
        return 1 + np.array(val_starts(len(self.tokens), block_size, sequences), np.int64)

    def estimates(self, windows: Windows, losses: np.ndarray) -> dict[str, Estimate]:
        """The loss, over documents."""
        is_end = windows.targets == END_OF_TEXT
        document = (np.cumsum(is_end) - is_end)[windows.places()]
        tokens = np.bincount(document)
        is_seen = tokens > 0
        nats = np.bincount(document, losses.astype(np.float64))
        return {"loss": Estimate(nats[is_seen], tokens[is_seen])}

    def figures(self, estimates: dict[str, Estimate]) -> dict[str, float]:
        """What follows from the loss; bits per byte where the text's bytes are known."""
        loss = estimates["loss"].value
        figures = {"tokens": int(estimates["loss"].weights.sum())}
        figures["perplexity"] = math.exp(loss) if loss < 700 else math.inf
        if self.text_bytes:
            figures["bits_per_byte"] = loss / math.log(2) * len(self.tokens) / self.text_bytes
        return figures

    def described(self) -> dict[str, Any]:
        ends = int((self.tokens == END_OF_TEXT).sum())
        is_unfinished = self.tokens[-1] != END_OF_TEXT
        return {
            "data": self.name,
            "tokens": len(self.tokens),
            "documents": ends + int(is_unfinished),
            "text_bytes": self.text_bytes,
            "as_in_run": self.as_in_run,
        }
