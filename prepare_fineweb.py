"""Turn FineWeb shards, or any text, into GPT-2 tokens: train.bin, val.bin and meta.json.

    python prepare_fineweb.py 000_00000.parquet
    python prepare_fineweb.py shards/ --out data/mine --val_fraction 0.005
    python prepare_fineweb.py hf://datasets/HuggingFaceFW/fineweb/sample/10BT/000_00000.parquet
    python prepare_fineweb.py corpus.jsonl.gz --text_column content
    python prepare_fineweb.py stories.txt --separator '<|endoftext|>'

A file's ending tells what it is: .jsonl, .ndjson and .json hold a JSON object a line, .txt is one
document, or what stands between separators without the line breaks around it; each may be .gz or
.zst. Anything else is parquet. Of a folder one kind is read: parquet, if there is none JSON Lines,
if there is none text; what is left out is told. A plain .json is read only if it is named itself.

Every document becomes its tokens and one end-of-text token, as headerless uint16 that nanoGPT reads
too. Stop it at any time: the same command continues where it was. Shards are taken in the order of
their paths, so that the same ones give the same bins however they are given. Where an address is
silent for 30 seconds (NANOFIT_TIMEOUT_S in the environment) or fails, it is tried again.
"""

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from nanofit.data import engine
from nanofit.data.bins import SPLITS, BinWriter
from nanofit.data.dataset import (
    Options,
    describe,
    identity,
    is_done,
    merge,
    read_meta,
    tidy_up,
    warnings_about,
    write_meta,
)
from nanofit.data.digests import SourceDigests
from nanofit.data.documents import (
    ChunkEncoder,
    choose_val_hash_below,
    encode_in_order,
    words_on_skipped,
)
from nanofit.data.lines import Block
from nanofit.data.parquet import mean_token_count
from nanofit.data.remote import stop_waiting
from nanofit.data.shards import count_rows, find_shards, open_shards, path_of, read_chunks
from nanofit.data.source import Chunk, Position, Shard
from nanofit.data.tokenizer import fast_encoder, reference_encoder
from nanofit.lock import only_one_in
from nanofit.settings.config import load_config
from nanofit.terminal import InputError, Progress, compact, duration, run_script

ROOT = Path(__file__).resolve().parent
COMMIT_EVERY_S = 2.0  # what a kill can cost


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    plan = read_plan(arguments.config) if arguments.config else None
    folder = Path(arguments.out)
    try:
        if arguments.merge:
            if read_meta(folder) and not arguments.overwrite:
                raise InputError(f"{folder} holds a dataset; --overwrite replaces its meta.json")
            merge_into(folder, [Path(given) for given in arguments.inputs])
        else:
            make(folder, arguments)
    except KeyboardInterrupt:
        print("interrupted; the same command continues from here", file=sys.stderr)
        return 130
    meta = read_meta(folder)
    if meta:  # not yet where an engine only took the work over
        summarize(meta, plan)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="python prepare_fineweb.py SHARD [MORE ... | FOLDER] [options]  (see --help)",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("inputs", nargs="*", metavar="SHARD", help="files, folders of them, or addresses")
    add("--out", default=str(ROOT / "data/fineweb"), help="output folder (default: data/fineweb)")
    add("--val_fraction", type=float, default=0.01, help="share of documents held out (0.01)")
    add("--workers", type=int, default=os.cpu_count(), help="threads (default: one per core)")
    add("--text_column", default="text", help="the column or JSON field of the documents (text)")
    add("--separator", help=r"what stands between the documents of a text file, as '\n\n'")
    add("--limit_docs", type=int, help="use only this many rows, the first: for a trial")
    add("--encoder", choices=("fastokens", "tiktoken"), help="default: the fastest that works")
    add("--sha256", nargs="+", default=[], metavar="HEX", help="the digest each shard must have")
    add("--overwrite", action="store_true", help="replace finished output made from other inputs")
    add("--config", help="a training config: tell how many epochs it makes of the data")
    add("--engine", choices=engine.ENGINES, help="spread the shards with datatrove, then merge")
    add("--engine_options", nargs="+", default=[], metavar="NAME=VALUE", help="for its executor")
    add("--merge", action="store_true", help="SHARD are prepared folders: make --out of them all")
    add("--val_hash_below", type=int, help=argparse.SUPPRESS)  # an engine splits all shards alike
    arguments = parser.parse_args(argv)
    check(arguments)
    if not arguments.inputs:
        raise InputError(f"no file given; {parser.format_usage().strip()}")
    return arguments


def check(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.val_fraction < 1:
        raise InputError(f"--val_fraction {arguments.val_fraction} is not between 0 and 1")
    for name in ("workers", "limit_docs"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} {value} is not a positive number")
    if arguments.separator is not None and not arguments.separator:
        raise InputError("--separator is empty; leave it out where each file is one document")
    for digest in arguments.sha256:
        if not re.fullmatch("[0-9a-fA-F]{64}", digest):
            raise InputError(f"--sha256 {digest} is not a SHA-256; name the shards before it")
    for setting in arguments.engine_options:
        if "=" not in setting:
            raise InputError(f"--engine_options {setting} is not NAME=VALUE")


def unescaped(separator: str) -> str:
    r"""With line breaks and tabs for \n, \r and \t, which no shell writes with ease."""
    characters = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nrt\\])", lambda found: characters[found[1]], separator)


def read_plan(config: str) -> tuple[int, int]:
    """The steps a training config makes and the tokens in each."""
    shape, learn, _ = load_config([config])
    sequences = learn.batch_size * learn.gradient_accumulation_steps
    return learn.max_iters, sequences * shape.block_size


def make(folder: Path, arguments: argparse.Namespace) -> None:
    """Make the dataset, unless it is there; refuse to replace one made from something else."""
    locations = find_shards(arguments.inputs)
    separator = arguments.separator and unescaped(arguments.separator)
    shards = open_shards(locations, arguments.text_column, arguments.sha256, separator)
    shards = first_rows(shards, arguments.limit_docs)
    options = Options(
        val_fraction=arguments.val_fraction,
        text_column=arguments.text_column,
        separator=separator,
        limit_docs=arguments.limit_docs,
        val_hash_below=arguments.val_hash_below
        or choose_val_hash_below(shards, arguments.val_fraction),
    )
    if is_done(folder, shards, options, overwrite=arguments.overwrite):
        tidy_up(folder)
        print(f"{folder} is already made from these inputs; nothing to do")
    elif arguments.engine:
        spread(shards, folder, options, arguments)
    else:
        prepare(shards, folder, options, arguments)


def first_rows(shards: list[Shard], limit: int | None) -> list[Shard]:
    """The shards that hold the first `limit` rows, each told how many of its rows to use."""
    if limit is None:
        return shards
    taken = []
    for shard in shards:
        if limit > 0:
            taken.append(replace(shard, rows=count_rows(shard, limit)))
            limit -= taken[-1].rows
    return taken


def prepare(
    shards: list[Shard], folder: Path, options: Options, arguments: argparse.Namespace
) -> None:
    """Make the bins and meta.json, or what is still missing of them."""
    pa.set_memory_pool(pa.system_memory_pool())  # the default one keeps what it has once held
    print(opening(shards), flush=True)
    encode = choose_encoder(arguments.encoder, options.val_hash_below)
    print(f"encoder {'fastokens' if encode.reference else 'tiktoken'}  workers {arguments.workers}")
    with (
        told_if_unwritable(folder),
        only_one_in(folder, "out"),
        BinWriter(folder, identity(shards, options)) as writer,
    ):
        with SourceDigests(shards, writer.digests) as digests:
            write_bins(shards, writer, digests, encode, arguments.workers)
        meta = describe(shards, options, writer)
        if arguments.val_hash_below is None:
            check_split(meta)
        writer.name_bins()
        write_meta(folder, meta)
        writer.forget_progress()


@contextmanager
def told_if_unwritable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write to {folder}: {error.strerror or error}; "
            "what is done is kept, and the same command continues"
        ) from error


def choose_encoder(wanted: str | None, val_hash_below: int) -> ChunkEncoder:
    """The fast encoder held to the reference; the reference alone if that is wanted or must be."""
    reference = reference_encoder()
    fast = fast_encoder() if wanted != "tiktoken" else None
    if fast:
        return ChunkEncoder(fast, reference, val_hash_below)
    if wanted == "fastokens":
        raise InputError("fastokens is not installed or fails its check; use --encoder tiktoken")
    if wanted is None:
        print("fastokens is not installed or fails its check: using tiktoken, which is slower")
    return ChunkEncoder(reference, None, val_hash_below)


def opening(shards: list[Shard]) -> str:
    """What is known before a text is read."""
    bytes, rows = sum(shard.bytes for shard in shards), rows_in(shards)
    known = [f"shards {len(shards)}", f"size {bytes / 1e6:,.1f} MB"]
    if rows is not None:
        known.append(f"documents {rows:,}")
        mean_tokens = mean_token_count(shards[0])
        known += [f"tokens about {compact(rows * mean_tokens)}"] if mean_tokens else []
    return "  ".join(known)


def rows_in(shards: list[Shard]) -> int | None:
    """How many there are, unless a file does not tell."""
    rows = [shard.rows for shard in shards]
    return None if None in rows else sum(rows)


def write_bins(
    shards: list[Shard],
    writer: BinWriter,
    digests: SourceDigests,
    encode: ChunkEncoder,
    workers: int,
) -> None:
    """Encode what is left and append it in order, committing now and then."""
    begins = np.cumsum([0, *(shard.bytes for shard in shards)]).tolist()
    done, of_all = sum(writer.rows.values()), rows_in(shards)
    if writer.restart_reason:
        print(f"starting over: {writer.restart_reason}")
    if done:
        of = f" of {of_all:,}" if of_all is not None else ""
        print(f"continuing after {done:,}{of} documents")
    done_bytes = begins[writer.position.shard] + writer.position.file_bytes
    rate, commit_at_s = Rate(writer.tally), time.monotonic() + COMMIT_EVERY_S
    chunks = chunks_from(shards, writer.position, digests)
    with (
        Progress("tokenizing", begins[-1], done=done_bytes) as progress,
        closing(encode_in_order(chunks, encode, workers)) as encoded,
    ):
        try:
            for end, tokens, tally in encoded:
                writer.append(tokens, tally, end)
                del tokens  # before the next are waited for
                digests.check()
                progress.update(begins[end.shard] + end.file_bytes, rate.note(writer.tally))
                if (started_s := time.monotonic()) >= commit_at_s:
                    writer.commit()
                    took_s = time.monotonic() - started_s  # long where there are many shards
                    commit_at_s = time.monotonic() + COMMIT_EVERY_S * max(1, 10 * took_s)
        except KeyboardInterrupt:
            stop_waiting()
            writer.commit()
            raise
    digests.finish()
    print(f"tokenized in {duration(rate.elapsed_s)}  {rate.note(writer.tally)}")


def chunks_from(
    shards: list[Shard], position: Position, digests: SourceDigests
) -> Iterator[Chunk | Block]:
    """Everything from `position` on; the digest of each shard is begun as it is first read."""
    first = position.shard
    for index, shard in enumerate(shards[first:], first):
        digests.start(index)
        yield from read_chunks(shard, index, position if index == first else Position())


class Rate:
    """What is done so far, and how fast this run has been doing it."""

    def __init__(self, tally: Counter):
        self._before, self._started_s = self._totals(tally), time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return max(time.monotonic() - self._started_s, 1e-9)

    def note(self, tally: Counter) -> str:
        documents, tokens, text_bytes = self._totals(tally)
        _, tokens_before, text_bytes_before = self._before
        return (
            f"documents {documents:,}  tokens {compact(tokens)}  "
            f"{(text_bytes - text_bytes_before) / self.elapsed_s / 1e6:.1f} MB/s  "
            f"{compact((tokens - tokens_before) / self.elapsed_s)} tokens/s"
        )

    @staticmethod
    def _totals(tally: Counter) -> tuple[int, ...]:
        names = ("documents", "tokens", "text_bytes")
        return tuple(sum(tally[f"{split}_{name}"] for split in SPLITS) for name in names)


def check_split(meta: dict) -> None:
    for split in SPLITS:
        if not meta["splits"][split]["documents"]:
            raise InputError(
                f"no document fell to {split} with --val_fraction "
                f"{meta['options']['val_fraction']}{words_on_skipped(meta['counts'])}"
            )


def spread(
    shards: list[Shard], folder: Path, options: Options, arguments: argparse.Namespace
) -> None:
    """Prepare each shard as a task of an engine, then make one dataset of them."""
    parts = engine.prepare_each(
        shards,
        [shard_command(shard, options, arguments) for shard in shards],
        folder,
        options,
        engine=arguments.engine,
        settings=engine_settings(arguments),
        overwrite=arguments.overwrite,
    )
    if parts:
        merge_into(folder, parts, options)


def shard_command(shard: Shard, options: Options, arguments: argparse.Namespace) -> list[str]:
    """The plain command for one shard of many, but where its output goes."""
    threads = 1 if arguments.engine == "local" else arguments.workers
    command = [sys.executable, str(ROOT / "prepare_fineweb.py"), path_of(shard.location)]
    command += ["--val_fraction", str(options.val_fraction)]
    command += ["--val_hash_below", str(options.val_hash_below)]
    command += ["--text_column", options.text_column, "--workers", str(threads)]
    escaped = (options.separator or "").replace("\\", r"\\")
    command += [f"--separator={escaped}"] if escaped else []
    command += ["--limit_docs", str(shard.rows)] if options.limit_docs else []
    command += ["--encoder", arguments.encoder] if arguments.encoder else []
    command += ["--sha256", shard.expected_sha256] if shard.expected_sha256 else []
    return command + (["--overwrite"] if arguments.overwrite else [])


def engine_settings(arguments: argparse.Namespace) -> dict[str, str]:
    """What its executor is told: locally a process per core, elsewhere a task with the cores."""
    per_core = "workers" if arguments.engine == "local" else "cpus_per_task"
    given = dict(setting.split("=", 1) for setting in arguments.engine_options)
    return {per_core: str(arguments.workers), **given}


def merge_into(folder: Path, parts: list[Path], options: Options | None = None) -> None:
    meta = merge(parts, folder, options)
    check_split(meta)
    with told_if_unwritable(folder), only_one_in(folder, "out"):
        write_meta(folder, meta)
    print(f"merged {len(parts)} datasets into {folder}")


def summarize(meta: dict, plan: tuple[int, int] | None) -> None:
    """Print what was made, what is odd about it, and how often a config would repeat it."""
    for split in SPLITS:
        counts = meta["splits"][split]
        tokens, text_bytes = counts["tokens"], counts["text_bytes"]
        print(
            f"{split:5}  documents {counts['documents']:,}  tokens {tokens:,}  "
            f"bytes/token {text_bytes / max(tokens, 1):.2f}  size {2 * tokens / 1e6:,.1f} MB"
        )
    for warning in warnings_about(meta):
        print(f"warning: {warning}")
    if plan:
        steps, step_tokens = plan
        epochs = steps * step_tokens / max(meta["splits"]["train"]["tokens"], 1)
        print(f"steps {steps:,}  tokens/step {step_tokens:,}  epochs {epochs:.2f}")


if __name__ == "__main__":
    run_script(main)
