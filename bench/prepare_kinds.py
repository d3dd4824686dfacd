"""How fast prepare_fineweb.py is on JSON Lines and text, beside parquet of the same texts.

    python bench/prepare_kinds.py english.parquet [--million_tokens 50] [--rounds 3]

The shard is repeated until it holds that many tokens, and written in each kind with all its
columns, text with a line between documents. Every kind is prepared in a fresh process, all of them
in turn, round after round; imports and building an encoder are left out. The table gives medians.
"""

import argparse
import gzip
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bench.figures import Figure, record
from bench.prepare import CORES, ours, repeat, report_seconds

SEPARATOR = b"\n<|endoftext|>\n"
CODECS = {
    ".gz": lambda content: gzip.compress(content, 6),
    ".zst": lambda c: pa.compress(c, "zstd"),
}
KINDS = {
    "repeated.parquet": "parquet, snappy",
    "a.jsonl": "JSON Lines",
    "ascii.jsonl": "JSON Lines, other letters than ASCII as \\u....",
    "a.jsonl.gz": "JSON Lines, gzip",
    "a.jsonl.zst": "JSON Lines, zstd",
    "a.txt": "text",
    "a.txt.zst": "text, zstd",
}


def main() -> None:
    arguments = parse()
    if arguments.out:
        report_seconds(ours("--separator", SEPARATOR.decode())(arguments.shard, arguments.out))
        return
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as scratch:
        folder = Path(scratch)
        shard, tokens = repeat(arguments.shard, arguments.million_tokens * 1e6, folder)
        write_kinds(Path(shard), folder)
        print(f"tokens {tokens / 1e6:.1f}M  cores {CORES}  rounds {arguments.rounds}", flush=True)
        times, made = {name: [] for name in KINDS}, {True: set(), False: set()}
        for number in range(arguments.rounds):
            for name in KINDS:
                out = folder / f"{name}-{number}"
                times[name].append(measure(folder / name, out))
                bins = made[".txt" in name]  # without the line breaks around a document
                bins.add(hashlib.sha256((out / "train.bin").read_bytes()).hexdigest())
                assert len(bins) == 1, f"{name} gives other bins"
        print_table(times, tokens, folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shard")
    parser.add_argument("--million_tokens", type=float, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", help="where the copies go (default: the temporary folder)")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args()


def write_kinds(shard: Path, folder: Path) -> None:
    """The same documents in each kind, with all columns where there are such."""
    for batch in pq.ParquetFile(shard).iter_batches(1000):
        rows = batch.to_pylist()
        append(folder / "a.jsonl", rows, is_ascii=False)
        append(folder / "ascii.jsonl", rows, is_ascii=True)
        with (folder / "a.txt").open("ab") as file:
            file.writelines(row["text"].strip("\r\n").encode() + SEPARATOR for row in rows)
    for path in (folder / "a.jsonl", folder / "a.txt"):
        for ending, compress in CODECS.items():
            (folder / f"{path.name}{ending}").write_bytes(compress(path.read_bytes()))


def append(path: Path, rows: list[dict], *, is_ascii: bool) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=is_ascii, default=str) + "\n" for row in rows)


def measure(shard: Path, out: Path) -> list[float]:
    """Seconds passed, and core-seconds, in a process of its own."""
    command = [sys.executable, __file__, shard, "--out", out]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    print(f"{shard.name:20} {' '.join(done.stdout.split()[-2:])}", flush=True)
    return [float(word) for word in done.stdout.split()[-2:]]


def print_table(times: dict[str, list[list[float]]], tokens: int, folder: Path) -> None:
    medians = {
        name: [statistics.median(column) for column in zip(*runs, strict=True)]
        for name, runs in times.items()
    }
    first = medians["repeated.parquet"]
    print("\n| kind | MB | seconds | core-seconds | Mtok/s | speed × parquet | core-seconds × |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name, (passed, spent) in medians.items():
        megabytes = (folder / name).stat().st_size / 1e6
        print(
            f"| {KINDS[name]} | {megabytes:,.0f} | {passed:.2f} | {spent:.2f} "
            f"| {tokens / passed / 1e6:.1f} | {first[0] / passed:.2f} | {spent / first[1]:.2f} |"
        )
    figures = [
        Figure(f"preparing {KINDS[name]}, core-seconds", spent, first[1], "parquet", "s")
        for name, (_, spent) in medians.items()
        if name != "repeated.parquet"
    ]
    record(
        "prepare_kinds",
        figures,
        command="make bench-prepare-kinds SHARD=...",
        conditions=f"{tokens / 1e6:.0f}M tokens, interleaved, medians",
    )


if __name__ == "__main__":
    main()
