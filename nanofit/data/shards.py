"""The shards that paths, folders and addresses mean: found, opened, and read by their kind.

A file's ending tells its kind: .jsonl, .ndjson and .json are JSON Lines, .txt is text, each of them
also .gz or .zst, and all else is parquet. Of a folder only the first kind of KINDS in it is read,
and never a plain .json: there it is a note on the data, ours among them.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from nanofit.data.bins import JOURNAL
from nanofit.data.dataset import META
from nanofit.data.digests import KNOWN_SHA256
from nanofit.data.lines import Block, check_lines, read_lines
from nanofit.data.parquet import read_footer, read_parquet
from nanofit.data.remote import find_remote, is_remote, stop_waiting
from nanofit.data.source import Chunk, Footer, Lines, Position, Shard, name_of, status_of
from nanofit.terminal import InputError, first_line

KINDS = {"parquet": ["parquet"], "JSON Lines": ["jsonl", "ndjson", "json"], "text": ["txt"]}
NOTE = ".json"  # how a file of a folder ends that is not read, unless it is named itself
BEGINNING = Position()
CODECS = {"gz": "gzip", "zst": "zstd"}
MOST_SHARDS = 200_000  # meta.json tells of each


def find_shards(inputs: Iterable[str]) -> list[str]:
    """The files meant by paths, folders and addresses."""
    locations = [location for given in inputs for location in _expand(given)]
    places = Counter(place if is_remote(place) else os.path.realpath(place) for place in locations)
    repeated = [place for place, count in places.items() if count > 1]
    if repeated:
        raise InputError(f"given more than once: {', '.join(repeated[:3])}")
    if len(locations) > MOST_SHARDS:
        raise InputError(
            f"{len(locations):,} files are more than {MOST_SHARDS:,}; join small ones first, "
            "such as text files with a line between them for --separator"
        )
    return locations


def open_shards(
    locations: list[str],
    text_column: str,
    sha256: Sequence[str] = (),
    separator: str | None = None,
) -> list[Shard]:
    """Look into and check every file; the shards in the order of their paths, however given.

    Several at a time, since a remote one is mostly waiting. Digests are given for all or none.
    """
    if sha256 and len(sha256) != len(locations):
        raise InputError(
            f"--sha256 got {len(sha256)} digests for {len(locations)} files; give one each"
        )
    expected = [digest.lower() for digest in sha256] or [None] * len(locations)
    order = sorted(range(len(locations)), key=lambda number: path_of(locations[number]))
    with ThreadPoolExecutor(8) as pool:
        opened = [
            pool.submit(open_shard, locations[number], text_column, expected[number], separator)
            for number in order
        ]
        try:
            return [shard.result() for shard in opened]
        except KeyboardInterrupt:
            stop_waiting()
            raise


def open_shard(
    location: str, text_column: str, expected_sha256: str | None, separator: str | None
) -> Shard:
    """The shard in a file; one that cannot be read, or lacks the text, is refused."""
    try:
        bytes, version, touched_ns = status_of(location)
    except OSError as error:
        raise InputError(f"cannot read {location}: {first_line(error)}") from error
    layout, rows = _layout_of(location, bytes, text_column, separator)
    shard = Shard(
        location=location,
        bytes=bytes,
        version=version,
        touched_ns=touched_ns,
        rows=rows,
        text_column=text_column,
        layout=layout,
        expected_sha256=expected_sha256 or KNOWN_SHA256.get((name_of(location), bytes)),
    )
    if isinstance(layout, Lines):
        check_lines(shard)
    return shard


def read_chunks(
    shard: Shard, index: int = 0, start: Position = BEGINNING
) -> Iterator[Chunk | Block]:
    """The shard's documents from `start` on, in order, a bounded number of bytes at once."""
    if isinstance(shard.layout, Footer):
        return read_parquet(shard, index, start.row)
    return read_lines(shard, index, start)


def count_rows(shard: Shard, most: int) -> int:
    """How many rows a shard has, where they are no more than `most`: if so, these."""
    if shard.rows is not None:
        return min(shard.rows, most)
    ends = [chunk.end.row for chunk in read_chunks(replace(shard, rows=most))]
    return ends[-1] if ends else 0


def path_of(location: str) -> str:
    """The same however it is spelled; a link keeps its name, whose ending tells the kind."""
    return location if is_remote(location) else os.path.abspath(location)  # noqa: PTH100


def _layout_of(
    location: str, bytes: int, text_column: str, separator: str | None
) -> tuple[Footer | Lines, int | None]:
    """How a file holds documents, and how many, if it tells."""
    kind, codec = _kind_of(name_of(location)) or ("parquet", None)
    if kind == "parquet":
        return read_footer(location, bytes, text_column)
    if kind == "JSON Lines":
        return Lines(is_json=True, separator=b"\n", codec=codec), None
    is_one = separator is None
    lines = Lines(is_json=False, separator=None if is_one else separator.encode(), codec=codec)
    return lines, min(bytes, 1) if is_one else None


def _kind_of(name: str) -> tuple[str, str | None] | None:
    """A file's kind and compression by its ending; None for one that tells nothing."""
    endings = re.search(r"\.(\w+?)(?:\.(gz|zst))?$", name.lower())
    for kind, known in KINDS.items():
        if endings and endings[1] in known and not (kind == "parquet" and endings[2]):
            return kind, CODECS.get(endings[2])
    return None


def _expand(given: str) -> list[str]:
    if is_remote(given):
        return [given] if _kind_of(name_of(given)) else _of_one_kind(given, find_remote(given))
    path = Path(given)
    if path.is_dir():
        # Links to folders are not followed, so that there is no loop. Spark names folders so, too.
        found = [
            str(p)
            for p in path.rglob("*.*")
            if not _is_hidden(p.relative_to(path)) and _kind_of(p.name) and not p.is_dir()
        ]
        return _of_one_kind(given, found)
    if not path.exists():
        raise InputError(f"{given} does not exist")
    return [given]


def _of_one_kind(folder: str, locations: list[str]) -> list[str]:
    """What of a folder is read: beside documents there may be notes on them, of another kind."""
    by_kind = {kind: [] for kind in (*KINDS, NOTE)}
    for location in locations:
        if kind := _kind_in_folder(name_of(location)):
            by_kind[kind].append(location)
    found = [kind for kind in by_kind if by_kind[kind]]
    if not found or found[0] == NOTE:
        endings = (f".{ending}" for known in KINDS.values() for ending in known)
        wanted = ", ".join(ending for ending in endings if ending != NOTE)
        hint = f"; its {NOTE} files are read if they are named themselves" if found else ""
        raise InputError(f"{folder} is a folder without {wanted} files{hint}")
    for kind in found[1:]:
        print(
            f"{folder}: its {found[0]} files are read, not the {len(by_kind[kind])} {kind} ones, "
            f"such as {name_of(by_kind[kind][0])}; to have these too, name them",
            file=sys.stderr,
        )
    return by_kind[found[0]]


def _kind_in_folder(name: str) -> str | None:
    """What a file is counted as in a folder, where a dataset of ours may lie beside its shards."""
    if name in (META, JOURNAL):
        return None
    if name.lower().endswith(NOTE):
        return NOTE
    known = _kind_of(name)
    return known[0] if known else None


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
