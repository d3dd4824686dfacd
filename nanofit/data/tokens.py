"""The tokens of a dataset's folder, as prepare_fineweb.py or nanoGPT left them."""

import hashlib
import json
import stat
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from nanofit.files import read_small
from nanofit.terminal import InputError

_MOST_BYTES = 2**63
_SAMPLES, _SAMPLE_TOKENS = 64, 2048  # of a split, by which it is known again


class Bins:
    """One split's tokens: one or several files read as one."""

    def __init__(
        self, files: list[Path], text_bytes: int | None = None, digests: list[str] | None = None
    ):
        self.files = files
        self.text_bytes = text_bytes  # that the tokens stand for; None where nobody counted them
        self.digests = digests  # of the files, where somebody made them
        self._arrays = [np.memmap(file, dtype=np.uint16, mode="r") for file in files]
        self._ends = list(accumulate(len(array) for array in self._arrays))

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def bytes_per_token(self) -> float | None:
        """Of text, on average."""
        return self.text_bytes and self.text_bytes / len(self)

    def identity(self) -> dict[str, Any]:
        """By what these tokens can be told from others: their number, and a sample of them.

        The sample tells what a digest does that was made when the bins were, unless a few tokens
        alone are other ones; but it is of what is there now.
        """
        sample = hashlib.sha256()
        last = max(len(self) - _SAMPLE_TOKENS, 0)
        for number in range(_SAMPLES):
            start = last * number // (_SAMPLES - 1)
            sample.update(self.read(start, min(_SAMPLE_TOKENS, len(self))).tobytes())
        return {"tokens": len(self), "sample": sample.hexdigest(), "digests": self.digests}

    def read(self, start: int, length: int) -> np.ndarray:
        """`length` tokens from position `start` on, across the borders of files."""
        number = bisect_right(self._ends, start)
        offset = start - (self._ends[number - 1] if number else 0)
        piece = self._arrays[number][offset : offset + length]
        if len(piece) < length:
            rest = self.read(self._ends[number], length - len(piece))
            piece = np.concatenate([piece, rest])
        return piece


def open_bins(folder: Path, *, block_size: int, vocab_size: int) -> tuple[Bins, Bins]:
    """The training and validation tokens of a dataset's folder, checked to suit the model."""
    meta = _read_meta(folder)
    if meta.vocab_size > vocab_size:
        raise InputError(
            f"{folder} uses a vocabulary of {meta.vocab_size}, more than the model's "
            f"vocab_size = {vocab_size}; use at least {meta.vocab_size}"
        )
    train, val = (_open_split(folder, meta, split) for split in ("train", "val"))
    for bins in (train, val):
        if len(bins) <= block_size:
            raise InputError(
                f"{bins.files[0]} has {len(bins)} tokens, too few for block_size = {block_size}; "
                "prepare more text or use a smaller block_size"
            )
    return train, val


def open_val(folder: Path) -> Bins:
    """The validation tokens of a dataset's folder, whatever model they are for."""
    return _open_split(folder, _read_meta(folder), "val")


class _Meta(NamedTuple):
    """What prepare_fineweb.py tells of its bins."""

    vocab_size: int
    tokens: dict[str, dict[str, int | None]]  # by split and file; None: whatever the file holds
    text_bytes: dict[str, int]  # by split, where it is told
    digests: dict[str, list[str]]  # of each split's files, where they are told


def _read_meta(folder: Path) -> _Meta:
    if not folder.is_dir():
        raise InputError(
            f"no dataset folder {folder}; make it with `python prepare_fineweb.py SHARD.parquet "
            f"--out {folder}`, or put the parquet file there"
        )
    path = folder / "meta.json"
    if not path.exists():  # nanoGPT prepared it
        return _Meta(0, {split: {f"{split}.bin": None} for split in ("train", "val")}, {}, {})
    try:
        meta = json.loads(read_small(path))
        tokens = {
            split: {_bin(one["file"]): int(one["tokens"]) for one in meta["splits"][split]["bins"]}
            for split in ("train", "val")
        }
        if not all(tokens.values()):
            raise ValueError("a split without bins")
        text_bytes = {
            split: min(int(told["text_bytes"]), _MOST_BYTES)
            for split, told in meta["splits"].items()
            if "text_bytes" in told
        }
        digests = {
            split: [str(one["sha256"]) for one in told["bins"]]
            for split, told in meta["splits"].items()
            if all("sha256" in one for one in told["bins"])
        }
        return _Meta(int(meta["vocab_size"]), tokens, text_bytes, digests)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        raise InputError(f"{path} is damaged; prepare the dataset again") from None


def _bin(told: Any) -> str:
    """The name of a bin: elsewhere if datasets were merged, but never another kind of file."""
    path = PurePosixPath(told)
    if path.is_absolute() or path.suffix != ".bin":
        raise ValueError(f"{path} is no bin")
    return str(path)


def _open_split(folder: Path, meta: _Meta, split: str) -> Bins:
    tokens = meta.tokens[split]
    for file, expected in tokens.items():
        _check_size(folder / file, expected)
    files = [folder / file for file in tokens]
    try:
        return Bins(files, meta.text_bytes.get(split), meta.digests.get(split))
    except (OSError, ValueError) as error:
        raise InputError(f"the {split} bins of {folder} cannot be read ({error})") from None


def _check_size(file: Path, tokens: int | None) -> None:
    try:
        status = file.stat()
    except (OSError, ValueError):
        raise InputError(
            f"{file} is missing; put a parquet file into {file.parent}, or run "
            f"`python prepare_fineweb.py SHARD.parquet --out {file.parent}`"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{file} is no file that holds tokens; prepare the dataset again")
    size_bytes = status.st_size
    if size_bytes == 0:
        raise InputError(f"{file} is empty; prepare the dataset again")
    expected_bytes = 2 * (size_bytes // 2 if tokens is None else tokens)
    if size_bytes != expected_bytes:
        raise InputError(
            f"{file} has {size_bytes} bytes, but should have {expected_bytes}: it was cut short "
            "or replaced; prepare the dataset again"
        )
