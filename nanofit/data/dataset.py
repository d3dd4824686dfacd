"""A prepared dataset as its meta.json tells it: described, recognised as done, merged."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nanofit.data.bins import JOURNAL, SPLITS, BinWriter
from nanofit.data.digests import sha256_of
from nanofit.data.form import read_json
from nanofit.data.lines import LONGEST_BYTES, words_on_unsplit
from nanofit.data.source import Shard
from nanofit.data.tokenizer import END_OF_TEXT, VOCABULARY_SIZE
from nanofit.files import atomic_write
from nanofit.terminal import InputError

META = "meta.json"
TOLERATED_ROWS, TOLERATED_NET = 0.01, 0.005  # FineWeb counted tokens before it masked addresses
COMMON_BLOCK_SIZE = 1024
TOTALS = ("documents", "tokens", "text_bytes")  # of a split
COUNTS = (
    "skipped",  # null or empty documents, blank lines, objects without the field
    "not_utf8",  # documents skipped for what no text can hold, such as half a surrogate pair
    "not_json",  # lines that are no JSON object
    "not_text",  # objects that hold a number, a list or the like for a text
    "too_long",  # lines, or documents of a text file, longer than memory is given to
    "unsplit",  # text files that were read to their end without their separator
    "spelling_end_of_text",  # documents that hold <|endoftext|>, which is text to us
    "checked",  # documents encoded by both encoders, and how many of them differed
    "mismatched",
    "token_count_rows",  # rows with FineWeb's own count, and how it agrees with ours
    "token_count_rows_differing",
    "token_count_tokens",
    "token_count_tokens_here",
)
_FORM = {  # of meta.json, as far as it is used here
    "splits": {
        split: {**dict.fromkeys(TOTALS, int), "bins": [{"file": str, "tokens": int}]}
        for split in SPLITS
    },
    "sources": [{"file": str, "bytes": int, "sha256": (str, None)}],
    "options": {"val_fraction": float, "val_hash_below": int},
    "counts": {...: int},
}


@dataclass(frozen=True)
class Options:
    """What, besides the inputs, decides the bytes that come out."""

    val_fraction: float
    text_column: str
    separator: str | None  # of the documents in a text file
    limit_docs: int | None
    val_hash_below: int  # what the fraction came to


def identity(shards: list[Shard], options: Options) -> dict:
    """What must be the same for half-made output to be continued."""
    sources = [[shard.name, shard.bytes, shard.version] for shard in shards]
    return {"options": asdict(options), "sources": sources}


def describe(shards: list[Shard], options: Options, writer: BinWriter) -> dict:
    """The content of meta.json."""
    return {
        "format": 1,
        "dtype": "uint16",
        "tokenizer": "gpt2",
        "vocab_size": VOCABULARY_SIZE,
        "end_of_text": END_OF_TEXT,
        "splits": {split: writer.describe(split) for split in SPLITS},
        "sources": [
            {
                "file": shard.name,
                "bytes": shard.bytes,
                "rows": writer.rows.get(str(index), 0),
                "sha256": writer.digests[str(index)],
            }
            for index, shard in enumerate(shards)
        ],
        "options": asdict(options),
        "counts": {name: writer.tally[name] for name in COUNTS},
    }


def read_meta(folder: Path) -> dict | None:
    """The folder's meta.json; None where there is no dataset, or one whose bins are not whole."""
    try:
        meta = read_json(folder / META, _FORM)
        is_whole = all(_is_whole(folder, meta["splits"][split]) for split in SPLITS)
    except (OSError, ValueError):
        return None
    return meta if is_whole else None


def _is_whole(folder: Path, split: dict) -> bool:
    sizes = [bin["tokens"] for bin in split["bins"]]
    found = [(folder / bin["file"]).stat().st_size for bin in split["bins"]]
    return sum(sizes) == split["tokens"] and [2 * tokens for tokens in sizes] == found


def write_meta(folder: Path, meta: dict) -> None:
    with atomic_write(folder / META) as path:
        path.write_text(json.dumps(meta, indent=2) + "\n")


def is_done(folder: Path, shards: list[Shard], options: Options, *, overwrite: bool) -> bool:
    """Whether just this dataset is there; another one may only be passed over to overwrite it."""
    meta = read_meta(folder)
    if meta:
        changed = _difference(folder, meta, shards, options)
    else:
        has_bins = any((folder / f"{split}.bin").exists() for split in SPLITS)
        is_ours = (folder / JOURNAL).exists()
        changed = f"not described by a whole {META}" if has_bins and not is_ours else None
    if changed and not overwrite:
        raise InputError(
            f"{folder} holds a dataset {changed}; "
            "use another --out, or --overwrite to replace what is there"
        )
    return bool(meta) and not changed


def tidy_up(folder: Path) -> None:
    """Remove the progress of a finished dataset, left by a kill just before its end."""
    with suppress(OSError):
        (folder / JOURNAL).unlink()


def _difference(folder: Path, meta: dict, shards: list[Shard], options: Options) -> str | None:
    """What a finished dataset was made from, where that differs from what is asked; else None."""
    recorded = [(source["file"], source["bytes"]) for source in meta["sources"]]
    if recorded != [(shard.name, shard.bytes) for shard in shards]:
        return f"made from other inputs ({', '.join(repr(name) for name, _ in recorded[:3])} ...)"
    made_ns = (folder / META).stat().st_mtime_ns
    for shard, source in zip(shards, meta["sources"], strict=True):
        is_newer = shard.touched_ns and shard.touched_ns >= made_ns
        if is_newer and sha256_of(shard) != source["sha256"]:
            return f"made before {shard.name} changed"
    for name, value in asdict(options).items():
        if meta["options"].get(name) != value:
            return f"made with {name} {meta['options'].get(name)!r}, not {value!r}"
    return None


def merge(folders: list[Path], out: Path, options: Options | None = None) -> dict:
    """One dataset of several: a meta.json that lists their bins, which stay where they are."""
    metas = [_meta_to_merge(folder) for folder in folders]
    rules = {meta["options"]["val_hash_below"] for meta in metas}
    if len(rules) > 1:
        raise InputError(
            "these were split into train and val by different rules, so a duplicate could be in "
            "both; prepare them with the same --val_fraction, all at once if they are small"
        )
    splits = {split: _merge_split(split, folders, metas, out) for split in SPLITS}
    merged = {
        **metas[0],
        "splits": splits,
        "sources": [source for meta in metas for source in meta["sources"]],
        "counts": {name: sum(meta["counts"].get(name, 0) for meta in metas) for name in COUNTS},
    }
    if options:
        merged["options"] = asdict(options)
    return merged


def _meta_to_merge(folder: Path) -> dict:
    meta = read_meta(folder)
    if not meta:
        raise InputError(f"{folder} holds no finished dataset to merge")
    return meta


def _merge_split(split: str, folders: list[Path], metas: list[dict], out: Path) -> dict:
    parts = [meta["splits"][split] for meta in metas]
    merged = {name: sum(part[name] for part in parts) for name in TOTALS}
    merged["bins"] = [
        {**bin, "file": Path(os.path.relpath(folder / bin["file"], out)).as_posix()}
        for folder, part in zip(folders, parts, strict=True)
        for bin in part["bins"]
        if bin["tokens"]  # an empty file cannot be mapped
    ]
    return merged


def warnings_about(meta: dict) -> Iterator[str]:
    """What a person should know before training on it."""
    counts = Counter(meta["counts"])
    if counts["skipped"]:
        yield f"{counts['skipped']:,} null or empty documents were skipped"
    if counts["not_utf8"]:
        yield (
            f"{counts['not_utf8']:,} documents are not UTF-8 and were skipped: badly written, or "
            "damaged since; compare the SHA-256 in meta.json with the publisher's"
        )
    if counts["not_json"]:
        yield f"{counts['not_json']:,} lines are no JSON object and were skipped"
    if counts["not_text"]:
        yield f"{counts['not_text']:,} objects hold no text where it should be and were skipped"
    if counts["too_long"]:
        yield (
            f"{counts['too_long']:,} documents of more than {LONGEST_BYTES // 2**20} MiB were "
            "skipped; are they in the form that the file's ending tells?"
        )
    if counts["unsplit"]:
        yield words_on_unsplit(counts["unsplit"], str(meta["options"].get("separator")))
    if counts["mismatched"]:
        yield (
            f"fastokens differed from tiktoken on {counts['mismatched']} of {counts['checked']} "
            "documents checked, which were encoded again; --encoder tiktoken is safe for all"
        )
    rows = counts["token_count_rows_differing"] / max(counts["token_count_rows"], 1)
    net = counts["token_count_tokens_here"] / max(counts["token_count_tokens"], 1) - 1
    if counts["token_count_rows"] and (rows > TOLERATED_ROWS or abs(net) > TOLERATED_NET):
        yield f"token_count differs in {rows:.2%} of the rows, by {net:+.2%} tokens in all"
    for split in SPLITS:
        tokens = meta["splits"][split]["tokens"]
        if tokens <= COMMON_BLOCK_SIZE:
            yield (
                f"{split} has {tokens} tokens, less than one block of {COMMON_BLOCK_SIZE}; "
                "give more text, or train with a smaller block_size"
            )
