"""How fast prepare_fineweb.py is beside the routes of nanoGPT and llm.c, and beside its own parts.

    python bench/prepare.py english.parquet [--million_tokens 100] [--rounds 3]

The shard is repeated until it holds that many tokens. Every route runs in a fresh process, all of
them in turn, round after round, from reading the parquet file to the last byte written; imports
and building an encoder are left out, for all alike. The table gives medians: of the time passed,
and of the time all cores spent, which other work on the machine changes less.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import prepare_fineweb
from bench.figures import Figure, record
from nanofit.data.tokenizer import END_OF_TEXT, fast_encoder, gpt2, reference_encoder

CORES = os.cpu_count()


def main() -> None:
    arguments = parse()
    if arguments.route:
        report_seconds(ROUTES[arguments.route](arguments.shard, arguments.out))
        return
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as folder:
        shard, tokens = repeat(arguments.shard, arguments.million_tokens * 1e6, Path(folder))
        print(f"tokens {tokens / 1e6:.1f}M  cores {CORES}  rounds {arguments.rounds}", flush=True)
        times = {route: [] for route in ROUTES}
        for _ in range(arguments.rounds):
            for route in ROUTES:
                with tempfile.TemporaryDirectory(dir=folder) as out:
                    times[route].append(measure(route, shard, out))
                print("{:50} {:8.2f} s {:8.2f} core-s".format(route, *times[route][-1]), flush=True)
    medians = {
        route: [statistics.median(column) for column in zip(*runs, strict=True)]
        for route, runs in times.items()
    }
    print_table(medians, tokens)
    name = f"{tokens / 1e6:.0f}M tokens of English to bins"
    record(
        "prepare",
        [Figure(f"{name}, {way}", medians[OURS][0], medians[way][0], way, "s") for way in PEERS],
        command="make bench-prepare SHARD=...",
        conditions=f"{CORES} cores, medians of {arguments.rounds} rounds in turns",
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shard")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--million_tokens", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", help="where the copies go (default: the temporary folder)")
    parser.add_argument("--route", help=argparse.SUPPRESS)
    return parser.parse_args()


def repeat(shard: str, tokens: float, folder: Path) -> tuple[str, int]:
    """Copies of a shard in one file, written as FineWeb's are; and the tokens in it."""
    table = pq.read_table(shard)
    shard_tokens = sum(table["token_count"].to_pylist()) + len(table)
    copies = int(-(-tokens // shard_tokens))
    path = folder / "repeated.parquet"
    with pq.ParquetWriter(path, table.schema, compression="snappy") as writer:
        for _ in range(copies):
            writer.write_table(table, row_group_size=1000)
    return str(path), copies * shard_tokens


def measure(route: str, shard: str, out: str) -> tuple[float, float]:
    """Seconds the route itself took, and core-seconds, in a process of its own."""
    command = [sys.executable, __file__, shard, out, "--route", route]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    passed, spent = done.stdout.split()[-2:]
    return float(passed), float(spent)


def report_seconds(work: Callable[[], object]) -> None:
    started, spent = time.perf_counter(), core_seconds()
    work()
    print(time.perf_counter() - started, core_seconds() - spent)


def core_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def print_table(medians: dict[str, list[float]], tokens: int) -> None:
    seconds = {route: passed for route, (passed, _) in medians.items()}
    rate = {route: tokens / passed / 1e6 for route, passed in seconds.items()}
    print("\n| route | seconds | core-seconds | Mtok/s | × nanoGPT | × llm.c |")
    print("|---|--:|--:|--:|--:|--:|")
    for route, (passed, spent) in medians.items():
        ratios = f"{rate[route] / rate[NANOGPT]:.1f} | {rate[route] / rate[LLMC]:.1f}"
        print(f"| {route} | {passed:.2f} | {spent:.2f} | {rate[route]:.2f} | {ratios} |")
    bare = tokens / (seconds[BARE_READ] + seconds[BARE_ENCODER]) / 1e6
    targets = [
        ("× nanoGPT's route", rate[OURS] / rate[NANOGPT], 40),
        ("× llm.c's route", rate[OURS] / rate[LLMC], 15),
        ("× bare read plus bare encoder", rate[OURS] / bare, 0.8),
        ("× llm.c's route, with tiktoken", rate[OURS_TIKTOKEN] / rate[LLMC], 1.5),
        (
            f"× one worker, with tiktoken on {CORES}",
            rate[OURS_TIKTOKEN] / rate[OURS_TIKTOKEN_ONE],
            0.8 * CORES,
        ),
    ]
    print("\n| target | measured | at least |\n|---|--:|--:|")
    for name, measured, least in targets:
        print(f"| {name} | {measured:.2f} | {least:g} |")


def ours(*flags: str) -> Callable[[str, str], Callable]:
    def route(shard: str, out: str) -> Callable:
        fast_encoder(), reference_encoder()
        return lambda: prepare_fineweb.main([shard, "--out", out, *flags])

    return route


def bare_read(shard: str, _out: str) -> Callable:
    file = pq.ParquetFile(shard)
    return lambda: [len(batch) for batch in file.iter_batches(1000, columns=["text"])]


def bare_encoder(shard: str, _out: str) -> Callable:
    """All cores on text that is already in memory, nothing kept."""
    encode, pool = fast_encoder(), ThreadPoolExecutor(CORES)
    texts = pq.read_table(shard, columns=["text"])["text"].to_pylist()
    batches = [texts[start : start + 1000] for start in range(0, len(texts), 1000)]
    return lambda: [None for _ in pool.map(lambda batch: len(encode(batch)), batches)]


def nanogpt(shard: str, out: str) -> Callable:
    """data/openwebtext/prepare.py of nanoGPT, on a parquet file, with one process per core."""
    from datasets import load_dataset

    encode = gpt2().encode_ordinary

    def process(example):
        ids = encode(example["text"])
        ids.append(END_OF_TEXT)
        return {"ids": ids, "len": len(ids)}

    def route() -> None:
        dataset = load_dataset("parquet", data_files=shard, cache_dir=out, num_proc=CORES)
        split = dataset["train"].train_test_split(test_size=0.0005, seed=2357, shuffle=True)
        split["val"] = split.pop("test")
        tokenized = split.map(process, remove_columns=["text"], num_proc=CORES)
        for name, part in tokenized.items():
            length = int(np.sum(part["len"], dtype=np.uint64))
            bin = np.memmap(f"{out}/{name}.bin", dtype=np.uint16, mode="w+", shape=(length,))
            position, batches = 0, min(1024, len(part))
            for index in range(batches):
                batch = part.shard(num_shards=batches, index=index, contiguous=True)
                ids = np.concatenate(batch.with_format("numpy")["ids"])
                bin[position : position + len(ids)] = ids
                position += len(ids)
            bin.flush()

    return route


def llmc(shard: str, out: str) -> Callable:
    """dev/data/fineweb.py of llm.c: rows pickled to a pool, tokens pickled back, bins filled."""
    import multiprocessing

    from datasets import load_dataset

    def route() -> None:
        rows = load_dataset("parquet", data_files=shard, cache_dir=out, split="train")
        filled, count, bins = np.empty(int(1e8), np.uint16), 0, 0
        with multiprocessing.Pool(CORES) as pool:
            for tokens in pool.imap(llmc_tokenize, rows, chunksize=16):
                if count + len(tokens) > len(filled):
                    fits = len(filled) - count
                    filled[count:] = tokens[:fits]
                    filled.tofile(f"{out}/{bins}.bin")
                    tokens, count, bins = tokens[fits:], 0, bins + 1
                filled[count : count + len(tokens)] = tokens
                count += len(tokens)
        filled[:count].tofile(f"{out}/{bins}.bin")

    return route


def llmc_tokenize(row: dict) -> np.ndarray:
    tokens = np.array([END_OF_TEXT, *gpt2().encode_ordinary(row["text"])])
    assert (tokens >= 0).all() and (tokens < 2**16).all()
    return tokens.astype(np.uint16)


NANOGPT, LLMC = PEERS = "nanoGPT: datasets.map", "llm.c: Pool.imap"
OURS, OURS_TIKTOKEN = "prepare_fineweb.py", "prepare_fineweb.py --encoder tiktoken"
OURS_TIKTOKEN_ONE = "prepare_fineweb.py --encoder tiktoken --workers 1"
BARE_READ, BARE_ENCODER = "bare parquet read, one core", "bare fastokens, all cores"
ROUTES = {
    OURS: ours(),
    BARE_READ: bare_read,
    BARE_ENCODER: bare_encoder,
    OURS_TIKTOKEN: ours("--encoder", "tiktoken"),
    OURS_TIKTOKEN_ONE: ours("--encoder", "tiktoken", "--workers", "1"),
    LLMC: llmc,
    NANOGPT: nanogpt,
}

if __name__ == "__main__":
    main()
