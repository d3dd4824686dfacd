"""Any text as tokens, against tiktoken and against what prepare_fineweb.py makes of it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanofit.data.text import read_text
from nanofit.data.tokenizer import END_OF_TEXT, gpt2
from nanofit.terminal import InputError
from tests import processes

SPLITS = ("train", "val")
TEXTS = [
    f"Document {number}: Zwölf Boxkämpfer\r\n  jagen {'Viktor ' * number}" for number in range(60)
]


@pytest.fixture
def shard(tmp_path) -> Path:
    texts = [*TEXTS[:30], None, "", *TEXTS[30:]]
    pq.write_table(pa.table({"content": texts}), tmp_path / "shard")  # which needs no such ending
    return tmp_path / "shard"


def test_a_file_is_one_document_of_all_its_bytes(tmp_path):
    content = "A\r\n<|endoftext|>\ufeff ü\n\n".encode()
    (tmp_path / "a.txt").write_bytes(content)
    text = read_text(tmp_path / "a.txt")
    assert text.bytes == len(content)
    assert gpt2().decode_bytes(text.tokens.tolist()) == content
    assert END_OF_TEXT not in text.tokens


def test_documents_of_a_parquet_file_are_joined_as_they_are_prepared(shard, tmp_path):
    out, flags = tmp_path / "out", ["--text_column=content", "--val_fraction=0.5"]
    done = processes.run_script(
        "prepare_fineweb.py", str(shard), f"--out={out}", *flags, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    text = read_text(shard, "content")
    train, val = (documents(np.fromfile(out / f"{split}.bin", np.uint16)) for split in SPLITS)
    assert train and val
    assert sorted(documents(text.tokens)) == sorted(train + val)
    assert [gpt2().decode(one) for one in documents(text.tokens)] == TEXTS
    assert text.bytes == sum(len(one.encode()) for one in TEXTS)


def documents(tokens: np.ndarray) -> list[list[int]]:
    ends = np.flatnonzero(tokens == END_OF_TEXT)
    assert ends[-1] == len(tokens) - 1
    return [one[:-1].tolist() for one in np.split(tokens, ends + 1)[:-1]]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no text"),
        (b"\xff\xfea", "cannot read the text of .*utf-8"),
        (b"PAR1 and no more", "truncated or damaged"),
        (None, "cannot read the text of .*No such file"),
    ],
)
def test_what_is_no_text_is_told_in_a_line(tmp_path, content, problem):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(InputError, match=problem):
        read_text(tmp_path / "file")


def test_a_parquet_file_without_such_a_column_or_text_is_refused(shard):
    with pytest.raises(InputError, match="has no column 'text'; it has content"):
        read_text(shard)
    pq.write_table(pa.table({"text": ["", None]}), shard)
    with pytest.raises(InputError, match="holds no text"):
        read_text(shard)
