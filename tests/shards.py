"""Shards for tests of prepare_fineweb.py, and what is made of them."""

import json
import random
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import prepare_fineweb
from nanofit.data.tokenizer import gpt2
from tests import processes

# For `start`: stops it after some commits, with some more written.
KILL_AFTER = """
commit = bins.BinWriter.commit
def commit_then_stop(self, **kwargs):
    commit(self, **kwargs)
    commit_then_stop.left -= 1
    if not commit_then_stop.left:
        self.append({"train": __import__("numpy").zeros(99, "<u2")}, {}, self.position)  # half done
        __import__("os").kill(__import__("os").getpid(), SIGNAL)
bins.BinWriter.commit = commit_then_stop
commit_then_stop.left = COMMITS"""


def make_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = [gpt2().decode([rng.randrange(256, 50256)]) for _ in range(2000)]
    return [" ".join(rng.choices(words, k=rng.randint(1, 80))) for _ in range(count)]


def write_shard(path: Path, texts: list, *, group: int = 100, counts=None, **settings) -> Path:
    columns = {"text": texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())}
    columns["id"] = pa.array([f"<{index}>" for index in range(len(texts))])
    if counts is not None:
        columns["token_count"] = pa.array(counts, pa.int64())
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=group, **settings)
    return path


def prepare(*arguments) -> int:
    return prepare_fineweb.main([str(argument) for argument in arguments])


def plain_route(texts: list, limit: int) -> dict[str, list[int]]:
    bins = {"train": [], "val": []}
    for text in filter(None, texts):
        split = "val" if zlib.crc32(text.encode()) < limit else "train"
        bins[split] += [*gpt2().encode_ordinary(text), 50256]
    return bins


def read_bins(folder: Path) -> dict[str, np.ndarray]:
    """Every bin as meta.json lists it, with what it says about them checked."""
    meta = read_meta(folder)
    bins = {}
    for split, about in meta["splits"].items():
        parts = [np.fromfile(folder / bin["file"], "<u2") for bin in about["bins"]]
        assert [len(part) for part in parts] == [bin["tokens"] for bin in about["bins"]]
        bins[split] = np.concatenate(parts)
        assert about["tokens"] == len(bins[split])
        assert about["documents"] == np.count_nonzero(bins[split] == 50256)
    return bins


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_meta(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


def decode(bin: np.ndarray) -> list[str]:
    ends = np.flatnonzero(bin == 50256) + 1
    return [gpt2().decode(ids[:-1].tolist()) for ids in np.split(bin, ends)[:-1]]


def assert_same_dataset(one: Path, other: Path) -> None:
    first, second = read_bins(one), read_bins(other)
    assert all(np.array_equal(first[split], second[split]) for split in first)


def damage(path: Path, at: int) -> None:
    """Turn all bits of one byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def start(
    folder: Path, shard: Path, before: str = "pass", *, flags: tuple = (), **settings
) -> subprocess.Popen:
    """The script in a process of its own that commits after every few rows."""
    code = f"""
import sys; sys.path.insert(0, {str(processes.PROJECT)!r})
import prepare_fineweb; from nanofit.data import bins, dataset, digests, lines, parquet
prepare_fineweb.COMMIT_EVERY_S = 0; parquet.CHUNK_ROWS = 20; lines.CHUNK_BYTES = 4000
{before}
prepare_fineweb.run_script(prepare_fineweb.main)"""
    arguments = [
        str(shard),
        "--out",
        str(folder),
        "--encoder",
        "tiktoken",
        "--workers",
        "2",
        *flags,
    ]
    return processes.start([sys.executable, "-c", code, *arguments], **settings)
