"""Disks and data: whether they are there, whole, and with room and speed enough for a run."""

import errno
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from nanofit.data.tokens import Bins, open_bins
from nanofit.doctor.finding import Finding, problem, refusal, warning
from nanofit.doctor.system import System, is_windows_disk
from nanofit.outlook.plan import (
    BIN_BYTES_PER_TOKEN,
    Shards,
    checkpoint_bytes,
    look_into_shards,
    most_checkpoints,
)
from nanofit.settings.config import Settings
from nanofit.terminal import InputError, compact, duration

MOST_BYTES, PIECE_BYTES = 256 * 2**20, 8 * 2**20
MOST_S = 1.5  # of writing, and of reading
DIGEST_S = 5.0  # of looking through the data
SLOW_SAVE_S = 120.0
_TOO_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskSpeed(NamedTuple):
    """In bytes a second; what could not be measured is None."""

    write: float | None
    read: float | None


def disk_findings(settings: Settings, system: System) -> Iterator[Finding]:
    """The disk that a run saves on, and the one it reads from if that is another."""
    out_dir = Path(settings.run.out_dir).absolute()
    folder = next(one for one in (out_dir, *out_dir.parents) if one.is_dir())
    try:
        speed = measure_disk(folder)
    except OSError as error:
        told = f"{settings.run.out_dir} cannot be written to ({error.strerror})"
        yield problem("disk", told, "give another place by --out_dir, or chmod it")
        return
    free = _free_bytes(folder)
    checkpoint = checkpoint_bytes(settings)
    room = most_checkpoints(settings) * checkpoint
    there = sum(file.stat().st_size for file in out_dir.glob("ckpt*.pt"))
    needed = max(room - there, 0)
    told = f"{settings.run.out_dir}: {_told_speed(speed)}{_size(free)} free; "
    told += f"a run's checkpoints take up to {_size(room)}"
    if free < needed:
        way_out = "free some, give another place by --out_dir, or keep fewer: --keep_checkpoints=1"
        yield problem("disk", told, way_out)
    elif speed.write and checkpoint / speed.write > SLOW_SAVE_S:
        slow = f"{told}, each written in {duration(checkpoint / speed.write)}"
        yield warning("disk", slow, "give a faster place by --out_dir, or save at longer intervals")
    else:
        yield Finding("disk", told)
    data_dir = settings.run.data_dir
    if data_dir.is_dir() and data_dir.stat().st_dev != folder.stat().st_dev:
        yield from _reading(data_dir)
    if system.kind == "WSL":
        yield from _windows_disks(folder, data_dir)


def _reading(data_dir: Path) -> Iterator[Finding]:
    """How fast data come that lie on another disk, where that can be measured."""
    bins = sorted(data_dir.glob("*.bin"), key=lambda file: file.stat().st_size)
    with suppress(OSError):  # of which the look at the data tells
        if bins and bins[-1].stat().st_size and hasattr(os, "posix_fadvise"):
            with bins[-1].open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                yield Finding("disk", f"{data_dir}: reads {_size(_read(file))}/s")


def _windows_disks(*folders: Path) -> Iterator[Finding]:
    for folder in folders:
        if is_windows_disk(folder.resolve()):
            yield warning(
                "disk",
                f"{folder} lies on a disk of Windows, which WSL reaches slowly",
                "move it to WSL's own disk, as into your home folder",
            )


def _told_speed(speed: DiskSpeed) -> str:
    parts = [("writes", speed.write), ("reads", speed.read)]
    told = " and ".join(f"{verb} {_size(one)}/s" for verb, one in parts if one)
    return f"{told}, " if told else ""


def measure_disk(folder: Path) -> DiskSpeed:
    """Write a file there as checkpoints are written, to the disk itself, and read it back.

    It is small where little is free, and gone whatever happens. OSError if none can be made.
    """
    with tempfile.TemporaryFile(dir=folder, prefix=".doctor-", buffering=0) as file:
        most_bytes = min(MOST_BYTES, _free_bytes(folder) // 4)
        write, size = _write(file, most_bytes)
        if not hasattr(os, "posix_fadvise"):  # what is read would come from memory
            return DiskSpeed(write, None)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return DiskSpeed(write, _read(file) if size else None)


def _write(file: IO[bytes], most_bytes: int) -> tuple[float | None, int]:
    piece = os.urandom(PIECE_BYTES)  # zeros some disks do not write
    written, started = 0, time.monotonic()
    try:
        while written + PIECE_BYTES <= most_bytes and time.monotonic() - started < MOST_S:
            written += file.write(piece)
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _TOO_FULL:
            raise
        return None, 0
    return (written / (time.monotonic() - started) if written else None), written


def _read(file: IO[bytes]) -> float:
    read, started = 0, time.monotonic()
    file.seek(0)
    while time.monotonic() - started < MOST_S and (piece := file.read(PIECE_BYTES)):
        read += len(piece)
    return read / (time.monotonic() - started)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _size(count: float) -> str:
    """As disks are sold: 1.5 GB, 320 MB."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:,.{0 if count >= 100 * unit else 1}f} {name}"


def data_findings(settings: Settings) -> Iterator[Finding]:
    """Whether the dataset is there and as it was prepared."""
    folder = settings.run.data_dir
    has_bins = (folder / "train.bin").exists() or (folder / "meta.json").exists()
    try:
        if not has_bins and any(folder.glob("*.parquet")):
            yield _unprepared(folder, look_into_shards(str(folder)))
            return
        shape = settings.shape
        splits = open_bins(folder, block_size=shape.block_size, vocab_size=shape.vocab_size)
    except InputError as error:
        yield refusal("data", error)
        return
    told = ", ".join(
        f"{compact(len(bins))} tokens to {what}"
        for bins, what in zip(splits, ("learn from", "validate on"), strict=True)
    )
    files = [pair for bins in splits for pair in _with_digests(bins)]
    yield content_finding(f"{folder}: {told}", files)


def content_finding(told: str, files: list[tuple[Path, str]]) -> Finding:
    """Whether files hold what their digests say; `told` is what else is known of them."""
    deadline = time.monotonic() + DIGEST_S
    for file, digest in files:
        try:
            found = _digest_of(file, deadline)
        except OSError as error:
            unread = f"{file} cannot be read ({error.strerror})"
            return problem("data", unread, "copy it from elsewhere, or prepare the dataset again")
        if found is None:
            return Finding("data", f"{told}; sizes are right, content was not compared")
        if found != digest:
            other = f"{file} has another content than was prepared"
            return problem("data", other, "prepare the dataset again, with --overwrite")
    how = "whole, as it was prepared" if files else "sizes are right"
    return Finding("data", f"{told}; {how}")


def _unprepared(folder: Path, shards: Shards) -> Finding:
    free = _free_bytes(folder)
    if shards.tokens is None:  # two bytes of each are seldom more than the text takes, compressed
        count, needed, about = "an unknown number of", shards.size_bytes, "about "
    else:
        count, needed = f"about {compact(shards.tokens)}", BIN_BYTES_PER_TOKEN * shards.tokens
        about = ""
    told = f"{folder}: parquet with {count} tokens, which train.py will prepare first, in "
    told += f"{about}{_size(needed)} of {_size(free)} free"
    if needed <= free:
        return Finding("data", told)
    return problem("data", told, "free some; or prepare elsewhere by --out, and name it --dataset")


def _with_digests(bins: Bins) -> list[tuple[Path, str]]:
    """The files whose digests somebody told."""
    return list(zip(bins.files, bins.digests or (), strict=False))


def _digest_of(file: Path, deadline: float) -> str | None:
    """None if that would take too long."""
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while time.monotonic() < deadline:
            piece = content.read(PIECE_BYTES)
            if not piece:
                return digest.hexdigest()
            digest.update(piece)
    return None
