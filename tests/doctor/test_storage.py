"""Disks and data: what is missing, damaged or full is found, with a way out."""

import hashlib
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanofit.doctor import storage
from nanofit.doctor.storage import content_finding, data_findings, disk_findings, measure_disk
from nanofit.doctor.system import System, has_nvidia_card, is_windows_disk
from nanofit.outlook.plan import checkpoint_bytes
from nanofit.settings.config import load_config
from nanofit.terminal import compact
from tests.conftest import TINY_MODEL
from tests.disturb import full_disk, small_disk

MIB = 2**20
LINUX = System("Linux", "3.12.1", 8)


@pytest.fixture
def dataset(tiny_dataset, tmp_path) -> Path:
    """As prepare_fineweb.py leaves it: with a digest of each bin."""
    folder = tmp_path / "data"
    shutil.copytree(tiny_dataset, folder)
    meta = json.loads((folder / "meta.json").read_text())
    for split in meta["splits"].values():
        for one in split["bins"]:
            one["sha256"] = hashlib.sha256((folder / one["file"]).read_bytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def of_data(folder: Path):
    [found] = data_findings(load_config([*TINY_MODEL, f"--dataset={folder}"]))
    return found


def test_whole_dataset_is_told_with_its_tokens(dataset, tiny_dataset):
    found = of_data(dataset)
    assert (found.state, found.remedy) == ("ok", "")
    assert found.text.endswith(
        "4k tokens to learn from, 600 tokens to validate on; whole, as it was prepared"
    )
    assert of_data(tiny_dataset).text.endswith("sizes are right")  # nobody told a digest


def test_content_is_not_compared_for_longer_than_a_person_waits(dataset, monkeypatch):
    monkeypatch.setattr(storage, "DIGEST_S", 0.0)
    assert of_data(dataset).text.endswith("sizes are right, content was not compared")


def test_flipped_bit_of_the_data_is_found(dataset):
    content = bytearray((dataset / "val.bin").read_bytes())
    content[700] ^= 1
    (dataset / "val.bin").write_bytes(content)
    found = of_data(dataset)
    assert found.state == "problem"
    assert "val.bin has another content than was prepared" in found.text


@pytest.mark.skipif(sys.platform != "linux", reason="has no file that opens and cannot be read")
def test_content_that_a_disk_does_not_give_is_a_problem():
    found = content_finding("data: 4k tokens", [(Path("/proc/self/mem"), "digest")])
    assert (found.state, found.text) == (
        "problem",
        "/proc/self/mem cannot be read (Input/output error)",
    )
    assert found.remedy == "copy it from elsewhere, or prepare the dataset again"


@pytest.mark.parametrize(
    ("damage", "said", "remedy"),
    [
        (lambda folder: shutil.rmtree(folder), "no dataset folder", "prepare_fineweb.py"),
        (lambda folder: (folder / "train.bin").unlink(), "is missing", "put a parquet file"),
        (lambda folder: (folder / "train.bin").write_bytes(b"12"), "cut short", "prepare"),
        (lambda folder: (folder / "meta.json").write_text("{"), "is damaged", "prepare"),
    ],
)
def test_lost_or_damaged_data_are_a_problem_with_a_way_out(dataset, damage, said, remedy):
    damage(dataset)
    found = of_data(dataset)
    assert found.state == "problem"
    assert said in found.text
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("tokens", "state", "size"), [(999, "ok", "0.2 MB"), (10**13, "problem", "2,000,000 GB")]
)
def test_parquet_that_is_not_prepared_yet_is_no_problem_while_there_is_room(
    tmp_path, tokens, state, size
):
    rows = pa.table({"text": [""] * 100, "token_count": [tokens] * 100})
    pq.write_table(rows, tmp_path / "000.parquet")
    found = of_data(tmp_path)
    assert found.state == state
    assert f"about {compact(100 * (tokens + 1))} tokens, which train.py will prepare" in found.text
    assert f" in {size} of " in found.text


def test_disk_is_measured_by_a_file_that_is_gone_afterwards(tmp_path):
    speed = measure_disk(tmp_path)
    assert speed.write > 0
    assert (speed.read is None) == (sys.platform != "linux")
    assert not list(tmp_path.iterdir())


def test_out_dir_need_not_be_there_and_is_not_made(tmp_path):
    [found] = disk_findings(load_config([*TINY_MODEL, f"--out_dir={tmp_path}/a/b"]), LINUX)
    assert found.state == "ok"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", mib=3) as is_mounted:
        if not is_mounted:
            pytest.skip("a small disk needs the right to mount one")
        yield tmp_path / "disk"


def test_disk_without_room_for_checkpoints_is_a_problem_and_no_speed_is_made_up(disk):
    for context in (nullcontext(), full_disk(disk)):
        with context:
            [found] = disk_findings(load_config([f"--out_dir={disk}"]), LINUX)
            assert found.state == "problem"
            assert "--keep_checkpoints=1" in found.remedy
            assert "/s" not in found.text  # too small to measure


def test_parquet_that_tells_no_tokens_is_no_problem_while_there_is_room(disk, tmp_path):
    rows = pa.table({"text": ["a" * 100_000] * 20})
    for folder, state in ((tmp_path, "ok"), (disk, "problem")):
        pq.write_table(rows, folder / "000.parquet", compression=None, use_dictionary=False)
        found = of_data(folder)
        assert (found.state, "--unique_tokens" in found.remedy) == (state, False)
        assert "an unknown number of tokens, which train.py will prepare first" in found.text
        assert " in about 2.0 MB of " in found.text


def test_disk_of_the_data_is_measured_by_reading_them_where_it_is_another(disk, tmp_path):
    (disk / "train.bin").write_bytes(bytes(2**20))
    settings = load_config([*TINY_MODEL, f"--out_dir={tmp_path}", f"--dataset={disk}"])
    _, reading = disk_findings(settings, LINUX)
    assert reading.text.startswith(f"{disk}: reads ") and reading.text.endswith("B/s")
    same = load_config([*TINY_MODEL, f"--out_dir={disk}", f"--dataset={disk}"])
    assert len(list(disk_findings(same, LINUX))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="has no folder that nobody can write to")
def test_folder_that_nobody_can_write_to_is_a_problem():
    [found] = disk_findings(load_config(["--out_dir=/proc/out"]), LINUX)
    assert found.state == "problem"
    assert "/proc/out cannot be written to" in found.text


def test_checkpoints_that_are_there_need_no_more_room(disk):
    words = [*TINY_MODEL, "--n_embd=64", f"--out_dir={disk}", "--keep_checkpoints=1"]
    settings = load_config(words)
    size = checkpoint_bytes(settings)
    assert size < 3 * MIB < 3 * size
    [found] = disk_findings(settings, LINUX)
    assert found.state == "problem"
    with (disk / "ckpt-00000001.pt").open("wb") as file:
        file.truncate(2 * size)  # which takes no room
    [found] = disk_findings(settings, LINUX)
    assert found.state == "ok"


def test_slow_disk_is_told_by_the_time_of_a_checkpoint(tmp_path, monkeypatch):
    settings = load_config([f"--out_dir={tmp_path}"])
    monkeypatch.setattr(storage, "SLOW_SAVE_S", 0.0)
    [found] = disk_findings(settings, LINUX)
    assert found.state == "warning"
    assert ", each written in " in found.text


def test_folders_on_a_disk_of_windows_are_known_by_its_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "none / ext4 rw 0 0\nC:\\134 /mnt/c 9p rw 0 0\nnone /mnt/c/inner ext4 rw 0 0\n"
        "D:\\134 /mnt/my\\040disk drvfs rw 0 0\n"
    )
    slow = ["/mnt/c", "/mnt/c/Users/me", "/mnt/my disk/out"]
    quick = ["/home/me", "/mnt/c/inner/data", "/mnt/cc"]
    for folder in slow + quick:
        assert is_windows_disk(Path(folder), mounts) == (folder in slow)


def test_card_is_found_on_the_bus_without_a_driver(tmp_path):
    for number, (vendor, kind) in enumerate([("0x8086", "0x030000"), ("0x10de", "0x040300")]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n")
        (tmp_path / str(number) / "class").write_text(f"{kind}\n")
    assert not has_nvidia_card(tmp_path)  # another maker's, and the sound of one
    (tmp_path / "1" / "class").write_text("0x030200\n")
    assert has_nvidia_card(tmp_path)
