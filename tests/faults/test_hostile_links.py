"""Links planted in a folder: what is written there does not go through them, to somewhere else."""

import os
from pathlib import Path

import pytest

from nanofit.data.bins import BinWriter
from nanofit.files import atomic_write
from tests.conftest import run_tiny

pytestmark = pytest.mark.skipif(os.name != "posix", reason="whoever may make links there may all")
PRECIOUS = "a line\nand one without an end"


@pytest.fixture
def precious(tmp_path) -> Path:
    """A file that is somewhere else, and somebody's."""
    path = tmp_path / "precious"
    path.write_text(PRECIOUS)
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def test_a_file_written_anew_takes_the_place_of_a_link(folder, precious):
    for name in ("file", "file.tmp"):
        (folder / name).symlink_to(precious)
    with atomic_write(folder / "file") as temporary:
        temporary.write_text("new")
    assert (folder / "file").read_text() == "new"
    assert not (folder / "file").is_symlink()
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize("name", ["metrics.jsonl", "lock"])
def test_a_run_does_not_write_through_a_link(name, folder, precious, tiny_dataset):
    (folder / name).symlink_to(precious)
    done = run_tiny(tiny_dataset, out_dir=folder)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"cannot write to out_dir {folder} (Too many levels of symbolic links)" in done.stderr
    assert precious.read_text() == PRECIOUS


def test_a_run_saves_in_place_of_links(folder, precious, tiny_dataset):
    for name in ("ckpt-00000006.pt.tmp", "ckpt-best.pt.tmp", "report.html", "report.png"):
        (folder / name).symlink_to(precious)
    done = run_tiny(tiny_dataset, "--report=True", out_dir=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "ckpt-00000006.pt").stat().st_size > 1000
    assert not (folder / "report.html").is_symlink()
    assert precious.read_text() == PRECIOUS


def test_tokens_are_not_written_through_a_link(folder, precious):
    (folder / "train.bin.partial").symlink_to(precious)
    (folder / "progress.json.tmp").symlink_to(precious)
    with BinWriter(folder, {"options": {}, "sources": []}) as writer:
        writer.name_bins()
    assert (folder / "train.bin").read_bytes() == b""
    assert precious.read_text() == PRECIOUS
