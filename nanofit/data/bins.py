"""train.bin and val.bin while they are made: appended in order, resumable, named when whole."""

import hashlib
import json
import os
import zlib
from collections import Counter
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanofit.data.form import read_json
from nanofit.data.source import Position
from nanofit.files import atomic_write

SPLITS = ("train", "val")
JOURNAL = "progress.json"
_FORM = {
    "identity": {},
    "position": [int],
    "tally": {...: int},
    "digests": {...: (str, None)},
    "rows": {...: int},
    "bins": dict.fromkeys(SPLITS, str),
    "is_complete": bool,
    "crc32": int,
}


class BinWriter:
    """Appends tokens to `<split>.bin.partial` and remembers, at each commit, how far it came.

    What a kill leaves behind the last commit is cut off when the same work is opened again.
    """

    def __init__(self, folder: Path, identity: dict):
        self._folder, self._identity = folder, identity
        self._at = _Place(Position(), Counter(), {split: hashlib.sha256() for split in SPLITS})
        self.digests, self.rows = {}, {}  # of the sources, by their number; rows read so far
        self.restart_reason = self._go_on()
        if self.restart_reason:
            (folder / JOURNAL).unlink()  # it must not vouch for what is written from here on
        self._files = {split: _opened(self._partial(split)) for split in SPLITS}
        for split, file in self._files.items():
            file.truncate(2 * self.tally[f"{split}_tokens"])  # the rest was never committed

    @property
    def position(self) -> Position:
        """Where to go on."""
        return self._at.position

    @property
    def tally(self) -> Counter:
        return self._at.tally

    def __enter__(self) -> "BinWriter":
        return self

    def __exit__(self, *_) -> None:
        """Keep what was committed; leave nothing behind if there was nothing to keep."""
        for split, file in self._files.items():
            file.close()
            if not (self._folder / JOURNAL).exists():
                self._partial(split).unlink(missing_ok=True)

    def append(self, tokens: dict[str, np.ndarray], tally: Counter, position: Position) -> None:
        """Add the next tokens of each split; `position` is what comes after them."""
        hashes = {split: hash.copy() for split, hash in self._at.hashes.items()}
        for split, array in tokens.items():
            _write_all(self._files[split], memoryview(array).cast("B"))
            hashes[split].update(array)
        total = self.tally.copy()
        total.update(tally)
        self._at = _Place(position, total, hashes)  # at once: Ctrl-C commits what is here
        self.rows[str(position.shard)] = position.row

    def commit(self, *, is_complete: bool = False) -> None:
        """Make everything so far survive a kill or a power cut."""
        for file in self._files.values():
            os.fsync(file.fileno())
        journal = {
            "identity": self._identity,
            "position": self.position,
            "tally": self.tally,
            "digests": self.digests,
            "rows": self.rows,
            "bins": {split: hash.hexdigest() for split, hash in self._at.hashes.items()},
            "is_complete": is_complete,
        }
        with atomic_write(self._folder / JOURNAL) as path:
            path.write_text(json.dumps({**journal, "crc32": _crc32(journal)}))

    def name_bins(self) -> None:
        """Give the bins their final names, all or, after a kill and a rerun, the rest of them."""
        self.commit(is_complete=True)
        for file in self._files.values():
            file.close()  # Windows names no file anew that is open
        for split in SPLITS:
            self._partial(split).replace(self._folder / f"{split}.bin")

    def forget_progress(self) -> None:
        """The dataset is complete and described: nothing is left to be continued."""
        (self._folder / JOURNAL).unlink()

    def describe(self, split: str) -> dict:
        """What meta.json says about one split."""
        names = ("documents", "tokens", "text_bytes")
        counts = {name: self.tally[f"{split}_{name}"] for name in names}
        digest = self._at.hashes[split].hexdigest()
        bins = [{"file": f"{split}.bin", "tokens": counts["tokens"], "sha256": digest}]
        return {**counts, "bins": bins}

    def _go_on(self) -> str | None:
        """Take up this work where its last commit was; if that cannot be, the reason why."""
        try:
            journal = read_json(self._folder / JOURNAL, _FORM)
        except FileNotFoundError:
            return None
        except ValueError:
            return f"{JOURNAL} is damaged"
        if journal.pop("crc32") != _crc32(journal):
            return f"{JOURNAL} is damaged"
        if journal["identity"] != self._identity:
            return "the inputs or options have changed"
        hashes = {}
        for split in SPLITS:
            path, bytes = self._partial(split), 2 * journal["tally"].get(f"{split}_tokens", 0)
            if journal["is_complete"] and not path.exists():  # killed after it got its final name
                with suppress(FileNotFoundError):  # told below
                    (self._folder / f"{split}.bin").replace(path)
            if not path.exists() or path.stat().st_size < bytes:
                return f"{path.name} is shorter than recorded"
            hashes[split] = _hash_of(path, bytes)
            if hashes[split].hexdigest() != journal["bins"][split]:
                return f"{path.name} is damaged"
        self._at = _Place(Position(*journal["position"]), Counter(journal["tally"]), hashes)
        self.digests, self.rows = journal["digests"], journal["rows"]
        return None

    def _partial(self, split: str) -> Path:
        return self._folder / f"{split}.bin.partial"


class _Place(NamedTuple):
    """How far the work has come."""

    position: Position
    tally: Counter
    hashes: dict[str, Any]  # running digests of the bins


def _hash_of(path: Path, bytes: int) -> Any:
    """The running digest of a file's first bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while bytes and (block := file.read(min(bytes, 2**20))):
            digest.update(block)
            bytes -= len(block)
    return digest


def _write_all(file, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _opened(path: Path) -> FileIO:
    if path.is_symlink():
        path.unlink()  # to write through a link would be to write elsewhere
    return path.open("ab", buffering=0)


def _crc32(journal: dict) -> int:
    """A flipped bit in it would leave out documents, or repeat some."""
    return zlib.crc32(json.dumps(journal).encode())
