"""A preparation that is killed, has no room, is not alone, or finds its own files damaged."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from nanofit.terminal import InputError
from tests.processes import is_stopped, wait_for
from tests.shards import (
    assert_same_dataset,
    damage,
    files_of,
    make_texts,
    prepare,
    read_meta,
    start,
    write_shard,
)

KILLS = 30


def undisturbed(shards: Path, folder: Path) -> dict[str, bytes]:
    """What becomes of shards when all is well."""
    prepare(shards, "--out", folder, "--encoder", "tiktoken")
    return files_of(folder)


def position_in(folder: Path) -> tuple[int, int]:
    """The shard and row of the last commit."""
    path = folder / "progress.json"
    return tuple(json.loads(path.read_text())["position"]) if path.exists() else (0, 0)


# Killed


def at_a_random_time(chance: random.Random, out: Path) -> Callable[[], bool]:
    due = time.monotonic() + chance.uniform(0, 1.5)
    return lambda: time.monotonic() > due


def in_a_commit(chance: random.Random, out: Path) -> Callable[[], bool]:
    return (out / "progress.json.tmp").exists


def after_some_commits(chance: random.Random, out: Path) -> Callable[[], bool]:
    """Each commit makes another file of progress.json."""
    seen, enough = set(), chance.randint(2, 12)

    def is_time() -> bool:
        if (out / "progress.json").exists():
            seen.add((out / "progress.json").stat().st_mtime_ns)
        return len(seen) > enough

    return is_time


def in_naming_the_bins(chance: random.Random, out: Path) -> Callable[[], bool]:
    return (out / "train.bin").exists


def in_describing_them(chance: random.Random, out: Path) -> Callable[[], bool]:
    return (out / "meta.json.tmp").exists


MOMENTS = (after_some_commits, at_a_random_time, in_a_commit)
LAST_MOMENTS = (in_naming_the_bins, in_describing_them)


@pytest.mark.slow
def test_killed_at_thirty_moments_it_ends_with_the_very_same_files(tmp_path):
    texts, chance = make_texts(30_000), random.Random("kills")
    for number in range(3):
        part = [*texts[number::3], None, "", "<|endoftext|>"]
        write_shard(tmp_path / f"in/{number}.parquet", part, group=700)
    whole = undisturbed(tmp_path / "in", tmp_path / "whole")
    out, killed, reached = tmp_path / "out", 0, set()
    for number in count():
        late = killed >= KILLS - 4
        moment = (LAST_MOMENTS if late else MOMENTS)[number % (2 if late else 3)]
        sent = signal.SIGINT if number % 5 == 4 and not late else signal.SIGKILL
        process = start(out, tmp_path / "in")
        is_left_alone = killed == KILLS or number > 3 * KILLS
        is_killed = not is_left_alone and kill(process, moment(chance, out), sent)
        process.communicate()
        killed += is_killed
        if (out / "progress.json").exists():
            reached.add(position_in(out))
        if is_left_alone:
            break
        if (out / "meta.json").exists():  # it was quicker than we: once more from the beginning
            for path in out.iterdir():
                path.unlink()
    assert killed >= KILLS - 4, "it was over too soon"
    assert len(reached) > KILLS / 3
    assert process.returncode == 0
    assert files_of(out) == whole


def kill(process, is_time: Callable[[], bool], sent: int) -> bool:
    """Kill it when it is time; False if it was over before."""
    while process.poll() is None:
        if is_time():
            process.send_signal(sent)
            return process.wait() != 0
        time.sleep(0.0005)
    return False


def test_what_a_kill_after_meta_json_left_is_tidied_up(tmp_path):
    shard = write_shard(tmp_path / "a.parquet", make_texts(60))
    prepare(shard, "--out", tmp_path / "out")
    whole = files_of(tmp_path / "out")
    (tmp_path / "out/progress.json").write_text("{}")
    prepare(shard, "--out", tmp_path / "out")
    assert files_of(tmp_path / "out") == whole


# No room


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", place]
    if os.name != "posix" or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.parametrize("left_bytes", [150_000, 60_000, 12_000, 0])
def test_a_full_disk_is_told_and_with_room_the_same_command_goes_on(
    tmp_path, small_disk, left_bytes
):
    """Wherever it ends: in the bins, in the middle of a commit, or before there is anything."""
    shard = write_shard(tmp_path / "a.parquet", make_texts(1500), group=60)
    whole = undisturbed(shard, tmp_path / "whole")
    assert len(whole["train.bin"]) > 150_000
    out, filler = small_disk / "out", small_disk / "filler"
    out.mkdir()
    filler.write_bytes(bytes(200 * 1024 - left_bytes // 4096 * 4096))
    process = start(out, shard)
    _, errors = process.communicate()
    [line] = errors.splitlines()
    assert process.returncode == 2
    assert "No space left on device" in line and "the same command continues" in line
    assert not (out / "meta.json").exists() and not (out / "train.bin").exists()
    before = {name for name in files_of(out) if name not in ("lock",)}
    assert before <= {"progress.json", "train.bin.partial", "val.bin.partial"}
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,size=2m", small_disk], check=True)
    output, errors = start(out, shard).communicate()
    assert not errors
    assert ("continuing after" in output) == ("progress.json" in before)
    assert files_of(out) == whole


def test_a_merge_without_room_changes_nothing(tmp_path, small_disk):
    prepare(write_shard(tmp_path / "a.parquet", make_texts(50)), "--out", tmp_path / "part")
    out = small_disk / "out"
    prepare("--merge", tmp_path / "part", "--out", out)
    before = files_of(out)
    (small_disk / "filler").write_bytes(bytes(196 * 1024))
    with pytest.raises(InputError, match=r"cannot write to .*No space left on device"):
        prepare("--merge", tmp_path / "part", "--out", out, "--overwrite")
    assert files_of(out) == before
    (small_disk / "filler").unlink()
    prepare("--merge", tmp_path / "part", "--out", out, "--overwrite")


# Not alone


STOPS_HALF_WAY = """
import os, signal
def commit_and_stop(writer, *, commit=bins.BinWriter.commit, **how):
    commit(writer, **how)
    if writer.position[1] > 1000:
        bins.BinWriter.commit = commit
        os.kill(os.getpid(), signal.SIGSTOP)
bins.BinWriter.commit = commit_and_stop
"""


@pytest.fixture
def stopped(tmp_path):
    """A preparation that has come half-way and is held there."""
    shard = write_shard(tmp_path / "a.parquet", make_texts(6000), group=500)
    process = start(tmp_path / "out", shard, STOPS_HALF_WAY)
    wait_for(lambda: is_stopped(process.pid))
    assert 1000 < position_in(tmp_path / "out")[1] < 6000
    yield process, shard
    process.kill()


def test_a_second_writer_is_refused_by_the_name_of_the_first(tmp_path, stopped):
    process, shard = stopped
    before = files_of(tmp_path / "out")
    part = write_shard(tmp_path / "b.parquet", make_texts(50))
    prepare(part, "--out", tmp_path / "part")
    for words in ([shard], [part, "--overwrite"], ["--merge", tmp_path / "part"]):
        with pytest.raises(InputError) as told:
            prepare(*words, "--out", tmp_path / "out")
        assert f"is in use by process {process.pid} on " in str(told.value)
        assert str(told.value).endswith("; end that, or use another --out")
    assert files_of(tmp_path / "out") == before
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert files_of(tmp_path / "out") == undisturbed(shard, tmp_path / "whole")


def test_a_preparations_lock_ends_with_its_process(tmp_path, stopped):
    process, shard = stopped
    process.kill()
    process.wait()
    assert (tmp_path / "out/lock").exists()
    prepare(shard, "--out", tmp_path / "out")
    assert sorted(files_of(tmp_path / "out")) == ["meta.json", "train.bin", "val.bin"]


def test_a_shard_that_changes_while_it_is_read_is_not_described(tmp_path, stopped):
    process, shard = stopped
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2] + bytes(8) + content[len(content) // 2 + 8 :])
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert "changed while it was read" in errors or "is damaged" in errors
    assert not (tmp_path / "out/meta.json").exists()
    shard.write_bytes(content)
    prepare(shard, "--out", tmp_path / "out", "--encoder", "tiktoken")
    assert files_of(tmp_path / "out") == undisturbed(shard, tmp_path / "whole")


# Its own files damaged


@pytest.mark.parametrize("name", ["progress.json", "train.bin.partial", "val.bin.partial"])
def test_a_flipped_byte_of_what_is_half_made_starts_over(tmp_path, stopped, capsys, name):
    process, shard = stopped
    process.kill()
    process.wait()
    damage(tmp_path / "out" / name, 9)
    prepare(shard, "--out", tmp_path / "out")
    assert f"starting over: {name} is damaged" in capsys.readouterr().out
    prepare(shard, "--out", tmp_path / "whole")
    assert_same_dataset(tmp_path / "whole", tmp_path / "out")
    assert read_meta(tmp_path / "whole") == read_meta(tmp_path / "out")


DIES_BEFORE_IT_DESCRIBES = """
import os, signal
def name_and_die(writer, name_bins=bins.BinWriter.name_bins):
    name_bins(writer)
    os.kill(os.getpid(), signal.SIGKILL)
bins.BinWriter.name_bins = name_and_die
"""


@pytest.mark.parametrize("lost", ["train.bin", "val.bin"])
def test_a_named_bin_that_is_gone_starts_over(tmp_path, capsys, lost):
    shard = write_shard(tmp_path / "a.parquet", make_texts(2000))
    process = start(tmp_path / "out", shard, DIES_BEFORE_IT_DESCRIBES)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "out/progress.json").read_text())["is_complete"]
    (tmp_path / "out" / lost).unlink()
    prepare(shard, "--out", tmp_path / "out", "--encoder", "tiktoken")
    told = f"starting over: {lost}.partial is shorter than recorded"
    assert told in capsys.readouterr().out
    assert files_of(tmp_path / "out") == undisturbed(shard, tmp_path / "whole")


def test_a_digit_of_the_progress_that_still_makes_sense_starts_over(tmp_path, stopped, capsys):
    """Otherwise documents would be left out, and nothing would say so."""
    process, shard = stopped
    process.kill()
    process.wait()
    path = tmp_path / "out/progress.json"
    journal = json.loads(path.read_text())
    journal["position"][1] += 8
    path.write_text(json.dumps(journal))
    prepare(shard, "--out", tmp_path / "out")
    assert "starting over: progress.json is damaged" in capsys.readouterr().out
    prepare(shard, "--out", tmp_path / "whole")
    assert_same_dataset(tmp_path / "whole", tmp_path / "out")
