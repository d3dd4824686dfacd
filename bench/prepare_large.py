"""Peak memory of prepare_fineweb.py on shards that are hard to hold: large, giant, long, ever new.

    python bench/prepare_large.py [--gigabytes 3] [--limit_mb 1000]

Each case is generated, prepared in a process of its own, and removed. Exit code 1 if one of them
needs more memory than the limit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from bench.figures import Figure, record  # noqa: E402

DOCUMENT_BYTES = 3000  # FineWeb's mean
LONG_BYTES = 50_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=3, help="of text in the large cases")
    parser.add_argument("--limit_mb", type=float, default=1000)
    parser.add_argument("--scratch", help="where the shards go (default: the temporary folder)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        CASES[arguments.case](Path(arguments.scratch), int(arguments.gigabytes * 1e9))
        return 0
    print("| shard | text MB | encoder | seconds | MB/s | peak MB |\n|---|--:|---|--:|--:|--:|")
    peaks = [peak for case in CASES for peak in measure(case, arguments)]
    name = "peak memory for any shard, a 50 MB document included"
    record(
        "prepare_large",
        [Figure(name, max(peaks) / 1000, arguments.limit_mb / 1000, "limit", "GB")],
        command="make bench-prepare-large",
        conditions=f"{len(CASES)} shards, the large ones of {arguments.gigabytes:g} GB of text",
    )
    return int(max(peaks) > arguments.limit_mb)


def measure(case: str, arguments: argparse.Namespace) -> Iterator[float]:
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        shard = Path(folder) / "shard.parquet"
        # Generated in a process of its own, so that its memory is not taken for ours.
        flags = ["--case", case, "--scratch", shard, "--gigabytes", arguments.gigabytes]
        subprocess.run([sys.executable, __file__, *map(str, flags)], check=True)
        file = pq.ParquetFile(shard).metadata
        groups = range(file.num_row_groups)
        text_mb = sum(file.row_group(g).column(0).total_uncompressed_size for g in groups) / 1e6
        for encoder in ("fastokens", "tiktoken") if text_mb < 200 else ("fastokens",):
            out = Path(folder) / encoder
            command = [sys.executable, ROOT / "prepare_fineweb.py", shard, "--out", out]
            seconds, peak_mb = run([*command, "--encoder", encoder])
            speed = text_mb / seconds
            row = [case, f"{text_mb:,.0f}", encoder, f"{seconds:.1f}", f"{speed:.0f}"]
            print(f"| {' | '.join(row)} | {peak_mb:.0f} |", flush=True)
            yield peak_mb


def run(command: list) -> tuple[float, float]:
    """Seconds and peak megabytes of a command; it has one process."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}")
    return time.perf_counter() - started, usage.ru_maxrss * 1024 / 1e6


def slices(size: int, seed: int = 0) -> Iterator[list[str]]:
    """Documents cut at random from a pool of text, a thousand at a time."""
    rng = np.random.default_rng(seed)
    pool = novel_words(20_000_000, vocabulary=20_000)
    done = 0
    while done < size:
        lengths = rng.exponential(DOCUMENT_BYTES, 1000).astype(int) + 1
        starts = rng.integers(len(pool) - lengths.max(), size=1000)
        yield [pool[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        done += lengths.sum()


def novel_words(size: int, vocabulary: int | None = None, seed: int = 1) -> str:
    """Random words of eight letters; ever new ones, or from a vocabulary."""
    rng = np.random.default_rng(seed)
    letters = rng.integers(97, 123, (vocabulary or size // 9, 9), dtype=np.uint8)
    letters[:, 8] = 32
    if vocabulary:
        letters = letters[rng.zipf(1.2, size // 9) % vocabulary]
    return letters.tobytes().decode()


def write(path: Path, batches: Iterator[list[str]], row_group_size: int) -> None:
    schema = pa.schema({"text": pa.string()})
    with pq.ParquetWriter(path, schema, compression="snappy") as writer:
        for texts in batches:
            writer.write_batch(pa.record_batch([pa.array(texts)], schema), row_group_size)


def large(path: Path, size: int) -> None:
    write(path, slices(size), 1000)


def giant_row_group(path: Path, size: int) -> None:
    write(path, slices(size), 2**40)


def long_document(make: Callable[[], str]) -> Callable[[Path, int], None]:
    """One long document among ordinary ones."""

    def case(path: Path, _size: int) -> None:
        documents = next(slices(1))
        documents.insert(500, make())
        write(path, iter([documents]), len(documents))

    return case


def new_words(path: Path, size: int) -> None:
    words = novel_words(size // 10)
    documents = [words[i : i + DOCUMENT_BYTES] for i in range(0, len(words), DOCUMENT_BYTES)]
    write(path, iter([documents]), 1000)


CASES = {
    "large, row groups of 1,000": large,
    "one giant row group": giant_row_group,
    "a document of 50 MB, words": long_document(lambda: novel_words(LONG_BYTES, 20_000)),
    "a document of 50 MB, one word": long_document(lambda: "x" * LONG_BYTES),
    "a document of 50 MB, spaces": long_document(lambda: " " * LONG_BYTES),
    "ever new words": new_words,
}

if __name__ == "__main__":
    sys.exit(main())
