"""The readers of meta.json: any content describes a dataset or is bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanofit.data.bins import SPLITS
from nanofit.data.dataset import COUNTS, merge, read_meta, warnings_about
from nanofit.data.tokens import open_bins, open_val
from nanofit.terminal import InputError
from tests.fuzz import fuzzed
from tests.hostile import bounded
from tests.mutations import changed, damaged

META = {
    "format": 1,
    "dtype": "uint16",
    "tokenizer": "gpt2",
    "vocab_size": 64,
    "end_of_text": 50256,
    "splits": {
        split: {
            "documents": 3,
            "tokens": 100,
            "text_bytes": 432,
            "bins": [{"file": f"{split}.bin", "tokens": 100, "sha256": "0" * 64}],
        }
        for split in SPLITS
    },
    "sources": [{"file": "one.parquet", "bytes": 5000, "sha256": None}],
    "options": {
        "val_fraction": 0.01,
        "text_column": "text",
        "limit_docs": None,
        "val_hash_below": 5,
    },
    "counts": dict.fromkeys(COUNTS, 1),
}
PIECES = [
    b"{",
    b"[",
    b'"',
    b":",
    b",",
    b"\\ud800",
    b"1e999",
    b"NaN",
    b"-",
    b"9" * 50,
    b"\0",
    b"\xff",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("dataset")
    for split in SPLITS:
        np.arange(100, dtype=np.uint16).tofile(place / f"{split}.bin")
    return place


def described_or_refused(folder: Path, content: bytes) -> None:
    """As a run, an evaluation, a preparation and a merge read it."""
    (folder / "meta.json").write_bytes(content)
    with bounded():
        try:
            for bins in (*open_bins(folder, block_size=16, vocab_size=64), open_val(folder)):
                bins.identity()
                f"{bins.bytes_per_token or 0:.3f}"
        except InputError as refused:
            assert str(refused)
        if meta := read_meta(folder):
            list(warnings_about(meta))
            merge([folder, folder], folder.parent)


@fuzzed
@given(meta=changed(META))
def test_any_values_are_a_dataset_or_bad_input(meta, folder):
    described_or_refused(folder, json.dumps(meta).encode())


@fuzzed
@given(content=damaged(json.dumps(META).encode(), PIECES))
def test_any_bytes_are_a_dataset_or_bad_input(content, folder):
    described_or_refused(folder, content)


@fuzzed
@given(depth=st.integers(1, 200_000), opening=st.sampled_from(['{"splits":', "[", '{"":']))
def test_any_depth_is_a_dataset_or_bad_input(depth, opening, folder):
    described_or_refused(folder, (opening * depth).encode())


def test_what_is_changed_was_valid(folder):
    (folder / "meta.json").write_text(json.dumps(META))
    assert read_meta(folder) == META
    train, val = open_bins(folder, block_size=16, vocab_size=64)
    assert (len(train), val.text_bytes) == (100, 432)
