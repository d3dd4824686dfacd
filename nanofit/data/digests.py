"""The SHA-256 of shards: known, computed beside other work, and held to what it must be."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

from nanofit.data.remote import is_remote
from nanofit.data.source import Shard, binary_file, status_of
from nanofit.terminal import InputError

READ_BYTES = 2**20

# A flipped bit rarely breaks a page without checksums, so shards we know are held to their digest.
KNOWN_SHA256 = {  # by (name, bytes)
    ("000_00000.parquet", 2_147_531_358): (
        "c84e6941d787b50959521df6d6894a91397c8b2db13f8a9c8fe0f8782872e930"  # CC-MAIN-2013-20
    ),
}


def sha256_of(shard: Shard) -> str:
    """The digest of the whole file."""
    digest = hashlib.sha256()
    with binary_file(shard.location, shard.bytes) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


class SourceDigests:
    """The SHA-256 of each shard, computed beside the encoding and held to what it must be."""

    def __init__(self, shards: list[Shard], known: dict):
        self._shards, self._known = shards, known
        self._pool, self._running = ThreadPoolExecutor(1), {}

    def __enter__(self) -> "SourceDigests":
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(cancel_futures=True)

    def start(self, index: int) -> None:
        """Begin with a shard as it is read; with a remote one only if there is need to know."""
        if str(index) in self._known or index in self._running:
            return
        if is_remote(self._shards[index].location) and not self._shards[index].expected_sha256:
            self._known[str(index)] = None
        else:
            self._running[index] = self._pool.submit(sha256_of, self._shards[index])

    def finish(self) -> None:
        """Have the digests of all shards, also of those a killed run had read but not digested."""
        for index in range(len(self._shards)):
            self.start(index)
        self.check(wait=True)
        for shard in self._shards:
            _check_unchanged(shard)

    def check(self, *, wait: bool = False) -> None:
        """Record the digests that are ready, or with `wait` all; a wrong one is bad input."""
        for index, future in list(self._running.items()):  # a copy: the reader starts more
            if not wait and not future.done():
                continue
            shard = self._shards[index]
            digest = self._known[str(index)] = self._running.pop(index).result()
            if digest != (shard.expected_sha256 or digest):
                raise InputError(
                    f"{shard.location} is damaged: its SHA-256 is {digest}, "
                    f"not {shard.expected_sha256}; fetch it again"
                )


def _check_unchanged(shard: Shard) -> None:
    """What is at an address is told from what was there by its size alone, as it is read."""
    if is_remote(shard.location):
        return
    try:
        now = status_of(shard.location)[:2]
    except OSError:
        now = None
    if now != (shard.bytes, shard.version):
        raise InputError(f"{shard.location} changed while it was read; run the same command again")
