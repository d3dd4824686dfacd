"""train.bin and val.bin while they are made: appended in order, resumable, named when whole."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nanofit.files import atomic_write
from nanofit.terminal import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

SPLITS = ("train", "val")
JOURNAL = "progress.json"


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Refuse to share the folder with another process; a kill ends the claim as well."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise InputError(f"another process is writing to {folder}; wait for it to end") from None
    finally:
        os.close(descriptor)


class BinWriter:
    """Appends tokens to `<split>.bin.partial` and remembers, at each commit, how far it came.

    What a kill leaves behind the last commit is cut off when the same work is opened again.
    """

    def __init__(self, folder: Path, identity: dict):
        self._folder, self._identity = folder, identity
        journal, self.restart_reason = self._read_journal()
        if self.restart_reason:
            (folder / JOURNAL).unlink()  # it must not vouch for what is written from here on
        self.position = tuple(journal.get("position", (0, 0)))  # (shard, row) to go on from
        self.tally = Counter(journal.get("tally", {}))
        self.digests = journal.get("digests", {})  # of the sources, by their number
        self._hashes = {split: self._cut(split) for split in SPLITS}
        self._files = {split: self._partial(split).open("ab", buffering=0) for split in SPLITS}

    def __enter__(self) -> "BinWriter":
        return self

    def __exit__(self, *_) -> None:
        """Keep what was committed; leave nothing behind if there was nothing to keep."""
        for split, file in self._files.items():
            file.close()
            if not (self._folder / JOURNAL).exists():
                self._partial(split).unlink(missing_ok=True)

    def append(self, tokens: dict[str, np.ndarray], tally: Counter, position: tuple) -> None:
        """Add the next tokens of each split; `position` is what comes after them."""
        for split, array in tokens.items():
            _write_all(self._files[split], memoryview(array).cast("B"))
            self._hashes[split].update(array)
        self.tally.update(tally)
        self.position = position

    def commit(self, *, is_complete: bool = False) -> None:
        """Make everything so far survive a kill or a power cut."""
        for file in self._files.values():
            os.fsync(file.fileno())
        journal = {
            "identity": self._identity,
            "position": self.position,
            "tally": self.tally,
            "digests": self.digests,
            "is_complete": is_complete,
        }
        with atomic_write(self._folder / JOURNAL) as path:
            path.write_text(json.dumps(journal))

    def name_bins(self) -> None:
        """Give the bins their final names, all or, after a kill and a rerun, the rest of them."""
        self.commit(is_complete=True)
        for split in SPLITS:
            self._partial(split).replace(self._folder / f"{split}.bin")

    def forget_progress(self) -> None:
        """The dataset is complete and described: nothing is left to be continued."""
        (self._folder / JOURNAL).unlink()

    def describe(self, split: str) -> dict:
        """What meta.json says about one split."""
        names = ("documents", "tokens", "text_bytes")
        counts = {name: self.tally[f"{split}_{name}"] for name in names}
        digest = self._hashes[split].hexdigest()
        bins = [{"file": f"{split}.bin", "tokens": counts["tokens"], "sha256": digest}]
        return {**counts, "bins": bins}

    def _read_journal(self) -> tuple[dict, str | None]:
        """What the last commit of this work recorded, or nothing and the reason why."""
        try:
            journal = json.loads((self._folder / JOURNAL).read_text())
        except FileNotFoundError:
            return {}, None
        except ValueError:
            return {}, f"{JOURNAL} is damaged"
        if journal["identity"] != self._identity:
            return {}, "the inputs or options have changed"
        for split in SPLITS:
            path, bytes = self._partial(split), 2 * journal["tally"].get(f"{split}_tokens", 0)
            if journal["is_complete"] and not path.exists():  # killed after it got its final name
                (self._folder / f"{split}.bin").replace(path)
            if not path.exists() or path.stat().st_size < bytes:
                return {}, f"{path.name} is shorter than recorded"
        return journal, None

    def _cut(self, split: str):
        """Cut off what was never committed; return the running digest of the rest."""
        path = self._partial(split)
        if path.is_symlink():
            path.unlink()  # to write through a link would be to write elsewhere
        path.touch()
        os.truncate(path, 2 * self.tally[f"{split}_tokens"])
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256")

    def _partial(self, split: str) -> Path:
        return self._folder / f"{split}.bin.partial"


def _write_all(file, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]
