"""JSON Lines and text as they are found: each oddity has one outcome, counted or told in a line."""

import gzip
import json
import random
import resource
import signal
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from nanofit.data import documents, lines, shards
from nanofit.data.source import Position
from nanofit.terminal import InputError
from tests import processes
from tests.shards import (
    KILL_AFTER,
    assert_same_dataset,
    decode,
    files_of,
    make_texts,
    plain_route,
    prepare,
    read_bins,
    read_meta,
    start,
    write_shard,
)

ODD = [
    None,
    "",
    " ",
    "\n",
    "<|endoftext|>",
    "two\r\nlines",
    "中文 👩‍👩‍👧‍👦\u2028\x00",
    "same",
    "same",
]
CODECS = {"": bytes, ".gz": gzip.compress, ".zst": lambda content: zstd(content)}


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)


def as_lines(texts: list, *, is_ascii: bool = False) -> bytes:
    rows = ({"id": number, "text": text, "n": [{}]} for number, text in enumerate(texts))
    return b"".join(json.dumps(row, ensure_ascii=is_ascii).encode() + b"\n" for row in rows)


def write(path: Path, content: bytes) -> Path:
    """A file of this content, compressed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(CODECS[path.suffix if path.suffix in CODECS else ""](content))
    return path


def assert_bins_are(folder: Path, texts: list) -> None:
    """Those of the texts, by the plain route."""
    limit = read_meta(folder)["options"]["val_hash_below"]
    found = {split: tokens.tolist() for split, tokens in read_bins(folder).items()}
    assert found == plain_route(texts, limit)


# The same bytes


@pytest.mark.parametrize("is_ascii", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson.gz", "a.json", "A.JSON.zst"])
def test_json_lines_give_the_bins_of_the_same_texts_in_parquet(tmp_path, name, is_ascii):
    texts = make_texts(1200) + ODD
    random.Random(2).shuffle(texts)
    prepare(write(tmp_path / name, as_lines(texts, is_ascii=is_ascii)), "--out", tmp_path)
    parquet = write_shard(tmp_path / "a.parquet", texts, group=lines.GROUP_ROWS)
    prepare(parquet, "--out", tmp_path / "parquet")
    assert_same_dataset(tmp_path, tmp_path / "parquet")
    assert_bins_are(tmp_path, texts)
    assert read_meta(tmp_path)["counts"] == read_meta(tmp_path / "parquet")["counts"]
    assert read_meta(tmp_path)["sources"][0]["rows"] == len(texts)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("separator", ["<|endoftext|>", r"\n\n", r"\n", "==", "aa"])
def test_workers_and_pieces_of_any_size_do_not_change_a_byte(
    tmp_path, monkeypatch, separator, codec
):
    """Also where a separator could be found at two places, or is cut in two."""
    chance, content = random.Random(7), b""
    mark = separator.replace(r"\n", "\n").encode()
    for text in make_texts(150):
        content += text.replace("a", "e").encode() + mark + chance.choice([b"", b"\n", mark, b"a"])
    shard, results = write(tmp_path / f"a.txt{codec}", content), []
    for workers, size in ((1, 2**22), (3, 97), (2, 3000)):
        monkeypatch.setattr(lines, "CHUNK_BYTES", size)
        monkeypatch.setattr(documents, "CHUNK_BYTES", size)
        out = tmp_path / str(size)
        prepare(shard, "--out", out, "--workers", workers, "--separator", separator)
        results.append(files_of(out))
    assert results[0] == results[1] == results[2]
    pieces = content.removesuffix(mark).split(mark)
    assert_bins_are(out, [piece.strip(b"\r\n").decode() for piece in pieces])


def test_a_text_file_without_a_separator_is_one_document_as_it_is(tmp_path):
    texts = [*make_texts(30), "\n two lines\r\n\n", " "]
    for number, text in enumerate(texts):
        name = f"in/{number % 3}/{number:02}.txt{list(CODECS)[number % 3]}"
        write(tmp_path / name, text.encode())
    prepare(tmp_path / "in", "--out", tmp_path / "out")
    decoded = [text for tokens in read_bins(tmp_path / "out").values() for text in decode(tokens)]
    assert Counter(decoded) == Counter(texts)
    assert {source["rows"] for source in read_meta(tmp_path / "out")["sources"]} == {1}


def test_archives_of_several_members_and_marks_of_byte_order_are_read(tmp_path):
    texts = make_texts(90)
    parts = [b"\xef\xbb\xbf" + as_lines(texts[:30]), as_lines(texts[30:60]), as_lines(texts[60:])]
    for ending, compress in ((".gz", gzip.compress), (".zst", zstd), ("", bytes)):
        path = tmp_path / f"in{ending}/a.jsonl{ending}"
        path.parent.mkdir()
        path.write_bytes(b"".join(map(compress, parts)))
        prepare(path, "--out", tmp_path / f"out{ending}")
        assert_bins_are(tmp_path / f"out{ending}", texts)


def test_limit_docs_is_the_first_rows_of_lines_too(tmp_path):
    texts = make_texts(300)
    for number, name in enumerate(["0.jsonl", "1.parquet", "2.jsonl.gz"]):
        part = texts[number * 100 :][:100]
        write_shard(tmp_path / name, part) if number == 1 else write(
            tmp_path / name, as_lines(part)
        )
    inputs = sorted(tmp_path.glob("*.*"))
    for limit in (50, 145, 245, 999):
        prepare(*inputs, "--out", tmp_path / str(limit), "--limit_docs", limit)
        assert_bins_are(tmp_path / str(limit), texts[:limit])


def test_a_document_of_every_thousand_lines_is_checked(tmp_path):
    texts = [f"document {number}" for number in range(3 * lines.GROUP_ROWS + 5)]
    prepare(write(tmp_path / "a.jsonl", as_lines(texts)), "--out", tmp_path)
    counts = read_meta(tmp_path)["counts"]
    assert (counts["checked"], counts["mismatched"]) == (4, 0)


# Odd


LINES = {
    b"": "skipped",
    b"  \r": "skipped",
    b"{}": "skipped",
    b'{"text": null}': "skipped",
    b'{"text": ""}': "skipped",
    b'{"text": 5}': "not_text",
    b'{"text": ["a"]}': "not_text",
    b'{"text": {"text": "a"}}': "not_text",
    b'{"text": ' + b"9" * 9999 + b"}": "not_text",
    b'{"text": "a"': "not_json",
    b'{"text": "a"} {"text": "b"}': "not_json",
    b'["text"]': "not_json",
    b'"text"': "not_json",
    b"text": "not_json",
    b"[" * 200_000: "not_json",
    b'{"text":' * 50_000 + b"1" + b"}" * 50_000: "not_json",
    b'{"text": "\xff"}': "not_utf8",
    b'{"text": "a", "title": "Z\xfcrich"}': "not_utf8",
    rb'{"text": "half \ud83d"}': "not_utf8",
}


def test_each_odd_line_is_counted_as_what_it_is(tmp_path, capsys):
    texts, odd = make_texts(60), list(LINES) * 2
    random.Random(5).shuffle(odd)
    rows = as_lines(texts).splitlines()
    content = b"\n".join([*rows[:20], *odd[:20], *rows[20:40], *odd[20:], *rows[40:]])
    prepare(write(tmp_path / "a.jsonl", content), "--out", tmp_path)
    assert_bins_are(tmp_path, texts)
    counts = read_meta(tmp_path)["counts"]
    for outcome, number in Counter(LINES[line] for line in odd).items():
        assert counts[outcome] == number, outcome
    assert sum(counts[name] for name in documents.SKIPPED) == len(odd)
    assert read_meta(tmp_path)["sources"][0]["rows"] == len(texts) + len(odd)
    said = capsys.readouterr().out
    assert "lines are no JSON object" in said and "hold no text where it should be" in said


@pytest.mark.parametrize("codec", CODECS)
def test_what_is_too_long_is_left_out_and_counted(tmp_path, monkeypatch, capsys, codec):
    """Whatever its place, and wherever the pieces end in which it is read."""
    monkeypatch.setattr(lines, "LONGEST_BYTES", 5000)
    texts = [text[:900] for text in make_texts(40)]
    long = [b'{"text": "%s"}\n' % (b"x" * size) for size in (4988, 4989, 50_000, 50_001)]
    rows = as_lines(texts).splitlines(keepends=True)
    content = b"".join([long[2], *rows[:9], *long, *rows[9:], long[3][:-1]])
    shard = write(tmp_path / f"a.jsonl{codec}", content)
    for size in (2**22, 700):
        monkeypatch.setattr(lines, "CHUNK_BYTES", size)
        prepare(shard, "--out", tmp_path / str(size))
        assert_bins_are(tmp_path / str(size), [*texts[:9], "x" * 4988, *texts[9:]])
        assert read_meta(tmp_path / str(size))["counts"]["too_long"] == 5
    assert "5 documents of more than" in capsys.readouterr().out
    assert files_of(tmp_path / "700") == files_of(tmp_path / str(2**22))


def test_text_that_is_not_utf8_is_left_out_and_counted(tmp_path):
    texts = make_texts(40)
    parts = [text.encode() for text in texts]
    content = b"\n==\n".join([*parts[:9], "Zürich".encode("latin-1"), b"", *parts[9:]])
    prepare(write(tmp_path / "a.txt", content), "--out", tmp_path, "--separator", r"\n==\n")
    assert_bins_are(tmp_path, texts)
    counts = read_meta(tmp_path)["counts"]
    assert (counts["not_utf8"], counts["skipped"], counts["not_json"]) == (1, 1, 0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [2**22, 700])
def test_text_files_without_their_separator_are_counted_and_told_once(
    tmp_path, monkeypatch, capsys, codec, size
):
    """Windows writes a line break of its own; what lies behind the first separator is fine."""
    monkeypatch.setattr(lines, "CHUNK_BYTES", size)
    texts = [text.replace("\n", " ") for text in make_texts(30)]
    windows, both = "\r\n\r\n".join(texts[:10]), "\n\n".join(texts[10:20])
    for name, text in {"a": windows, "b": lines.BOM.decode() + windows, "c": both, "d": ""}.items():
        write(tmp_path / f"in/{name}.txt{codec}", text.encode())
    write(tmp_path / f"in/e.txt{codec}", f"{texts[20]}\n\n".encode())
    prepare(tmp_path / "in", "--out", tmp_path / "out", "--separator", r"\n\n")
    assert read_meta(tmp_path / "out")["counts"]["unsplit"] == 2
    told = r"2 text files without '\n\n' are one document each; with Windows line breaks it is "
    assert capsys.readouterr().out.count(told + r"--separator '\r\n\r\n'") == 1
    assert_bins_are(tmp_path / "out", [windows, windows, *texts[10:21]])
    (split,) = shards.open_shards([str(tmp_path / f"in/c.txt{codec}")], "text", separator="\n\n")
    places = [Position(), *(block.end for block in shards.read_chunks(split))]
    left = [block for place in places for block in shards.read_chunks(split, 0, place)]
    assert left and not any(block.is_unsplit for block in left)
    shard = tmp_path / f"in/a.txt{codec}"
    prepare(shard, "--out", tmp_path / "windows", "--separator", r"\r\n\r\n")
    assert_bins_are(tmp_path / "windows", texts[:10])
    assert "without" not in capsys.readouterr().out
    with pytest.raises(InputError, match=r"1 different .* 1 text files without .* with Windows"):
        prepare(shard, "--out", tmp_path / "one", "--separator", r"\n\n")
    monkeypatch.setattr(lines, "LONGEST_BYTES", 500)
    with pytest.raises(InputError, match=r"0 different .* 1 text files without .* 1 too long"):
        prepare(shard, "--out", tmp_path / "one", "--separator", r"\n\n")
    with pytest.raises(InputError, match=r"1 text files without '\|' are one document each \("):
        prepare(shard, "--out", tmp_path / "one", "--separator", "|")


# Refused


def cut(name: str, content: bytes):
    def make(folder: Path) -> None:
        whole = write(folder / name, content).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) * 2 // 3])

    return make


def flipped(folder: Path) -> None:
    path = write(folder / "a.jsonl.gz", as_lines(make_texts(9000)))
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # of the checksum, which is looked at last
    path.write_bytes(content)


def written(name: str, content: bytes):
    return lambda folder: write(folder / name, content)


ARRAY = json.dumps([{"text": text} for text in make_texts(9)], indent=2).encode()
REFUSED = {
    r"a.jsonl.gz is damaged \(Truncated": cut("a.jsonl.gz", as_lines(make_texts(9000))),
    r"a.jsonl.zst is damaged \(Truncated": cut("a.jsonl.zst", as_lines(make_texts(9000))),
    r"a.txt.gz is damaged \(Truncated": cut("a.txt.gz", b"text " * 9000),
    "is damaged .*incorrect data check": flipped,
    "is damaged .*incorrect header": lambda folder: (folder / "a.jsonl.gz").write_bytes(
        b"{}\n" * 9
    ),
    "is not JSON Lines, an object a line: it begins with b'version": written(
        "a.jsonl", b"version https://git-lfs"
    ),
    r"is not JSON Lines, an object a line: it begins with b'\['": written("a.jsonl", ARRAY),
    r"no text in a field 'text'; it has body \(str\), n \(int\)": written(
        "a.jsonl", b'{"body": "a", "n": 1}\n'
    ),
    r"no text in a field 'text'; it has text \(int\)": written("a.jsonl", b'{"text": 1}\n'),
    "0 different documents .*--separator splits text files .left out: 1 not UTF-8": written(
        "a.txt", b"\xff\xfea\0b\0"
    ),
    "1 different documents cannot be split .* give at least 2; --separator": written(
        "a.txt", b"once\n"
    ),
    "a line is longer than 64 MiB": lambda folder: long_file(folder / "a.jsonl"),
    "too long for one document; tell by --separator": lambda folder: long_file(folder / "a.txt"),
}


def long_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(80 * 2**20)  # takes no room on the disk


@pytest.mark.parametrize("message", REFUSED)
def test_lines_that_cannot_be_used_are_one_line_and_leave_nothing(tmp_path, message):
    (tmp_path / "in").mkdir()
    REFUSED[message](tmp_path / "in")
    with pytest.raises(InputError, match=message) as told:
        prepare(tmp_path / "in", "--out", tmp_path / "out")
    assert len(str(told.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_archive_of_too_long_a_document_is_refused_while_it_is_read(tmp_path):
    write(tmp_path / "in/a.txt.gz", bytes(70 * 2**20))
    write(tmp_path / "in/b.txt.gz", b"short")
    with pytest.raises(InputError, match=r"a.txt.gz is longer than 64 MiB"):
        prepare(tmp_path / "in", "--out", tmp_path / "out")


def test_an_empty_separator_is_refused(tmp_path):
    with pytest.raises(InputError, match="--separator is empty"):
        prepare(write(tmp_path / "a.txt", b"a"), "--out", tmp_path / "out", "--separator", "")


def test_empty_files_are_passed_over_and_listed(tmp_path):
    texts = make_texts(30)
    for number, content in enumerate([b"", as_lines(texts), b"\n"]):
        write(tmp_path / f"in/{number}.jsonl", content)
    prepare(tmp_path / "in", "--out", tmp_path)
    assert_bins_are(tmp_path, texts)
    assert [source["rows"] for source in read_meta(tmp_path)["sources"]] == [0, 30, 1]


# Little memory


HOSTILE = {
    "a line of 1 GB": lambda file: [file.write(b"x" * 2**20) for _ in range(1000)],
    "a bomb": lambda file: [file.write(bytes(2**20)) for _ in range(1000)],
    "60 MB of brackets": lambda file: [file.write(b'{"a":[' * 10**5) for _ in range(100)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_lines_are_left_out_in_bounded_memory(tmp_path, kind):
    texts = make_texts(300)
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(as_lines(texts[:150]))
        HOSTILE[kind](file)
        file.write(b"\n" + as_lines(texts[150:]))
    command = [sys.executable, "prepare_fineweb.py", tmp_path / "a.jsonl.gz", "--out", tmp_path]

    def limit_memory():
        resource.setrlimit(resource.RLIMIT_DATA, (900 * 2**20, 900 * 2**20))

    done = processes.run(command, cwd=processes.PROJECT, preexec_fn=limit_memory)
    assert done.returncode == 0, done.stderr
    assert_bins_are(tmp_path, texts)
    counts = read_meta(tmp_path)["counts"]
    assert (counts["too_long"], counts["not_json"]) == ((0, 1) if "brackets" in kind else (1, 0))


# Killed


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt.zst"])
def test_killed_among_lines_it_goes_on_at_the_byte_and_ends_with_the_same_files(tmp_path, name):
    texts = make_texts(1500)
    content = as_lines(texts) if "jsonl" in name else "\n==\n".join(texts).encode()
    shard, out = write(tmp_path / name, content), tmp_path / "out"
    words = ("--separator", r"\n==\n")
    kill = KILL_AFTER.replace("SIGNAL", "9").replace("COMMITS", "9")
    prepare(shard, "--out", tmp_path / "whole", "--encoder", "tiktoken", *words)
    reached = []
    for _ in range(3):
        process = start(out, shard, kill, flags=words)
        output, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        assert f"continuing after {reached[-1][1]:,} documents" in output if reached else True
        reached.append(json.loads((out / "progress.json").read_text())["position"])
    rows, places = ([position[part] for position in reached] for part in (1, 2))
    assert 0 < rows[0] < rows[1] < rows[2] < 1500 and 0 < places[0] < places[1] < places[2]
    assert content[: places[0]].count(b"\n==\n" if "txt" in name else b"\n") == rows[0]
    start(out, shard, flags=words).communicate()
    assert files_of(out) == files_of(tmp_path / "whole")


# Folders and kinds


def test_of_a_folder_one_kind_is_read_and_the_rest_is_told(tmp_path, capsys):
    texts = make_texts(60)
    write(tmp_path / "README.txt", b"how it was made")
    write(tmp_path / "state.json", b'{"version": 1}')
    write(tmp_path / "b/1.JSONL.gz".lower(), as_lines(texts[30:]))
    write(tmp_path / "b/2.json.gz", as_lines([]))
    write(tmp_path / "b/LICENSE", b"none")
    assert names(shards.find_shards([str(tmp_path / "b")])) == ["1.jsonl.gz", "2.json.gz"]
    assert not capsys.readouterr().err
    write_shard(tmp_path / "a/0.parquet", texts[:30])
    assert names(shards.find_shards([str(tmp_path)])) == ["0.parquet"]
    lines_told, text_told, json_told = capsys.readouterr().err.splitlines()
    assert "not the 2 JSON Lines ones" in lines_told
    assert "its parquet files are read, not the 1 text ones, such as README.txt" in text_told
    assert "not the 1 .json ones, such as state.json" in json_told
    prepare(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "out")
    assert_bins_are(tmp_path / "out", texts)


INTERRUPTED = """
prepare_fineweb.write_meta = lambda *_: __import__("os").kill(__import__("os").getpid(), 2)"""


@pytest.mark.parametrize("place", [".", "made/here"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_the_same_command_goes_on_where_the_output_is_in_the_folder_of_the_shards(
    tmp_path, capsys, name, place
):
    """Our own notes there are no shards, nor are those of others."""
    texts, folder = make_texts(60), tmp_path / "in"
    content = as_lines(texts) if "jsonl" in name else "\n==\n".join(texts).encode()
    shard, words = write(folder / name, content), ("--separator", r"\n==\n")
    prepare(shard, "--out", tmp_path / "plain", *words)
    capsys.readouterr()
    process = start(folder / place, folder, INTERRUPTED, flags=words)
    process.communicate()
    assert process.returncode == 130 and (folder / place / "progress.json").exists()
    prepare(folder, "--out", folder / place, *words)
    prepare(folder, "--out", folder / place, *words)
    told = capsys.readouterr()
    assert "continuing after 60" in told.out and "nothing to do" in told.out and not told.err
    made, plain = read_meta(folder / place), read_meta(tmp_path / "plain")
    assert made["sources"] == plain["sources"] and made["splits"] == plain["splits"]
    assert_bins_are(folder / place, texts)
    write(folder / "dataset_info.json", b"[]")
    assert names(shards.find_shards([str(folder)])) == [name]
    assert "not the 1 .json ones, such as dataset_info.json" in capsys.readouterr().err


def test_plain_json_is_read_only_if_it_is_named(tmp_path):
    for name in ("dataset_info.json", "meta.json"):
        write(tmp_path / "in" / name, as_lines(make_texts(9)))
    address = f"file://{tmp_path}/in"
    for folder in (str(tmp_path / "in"), address):
        with pytest.raises(InputError, match=r"without .parquet, .jsonl, .ndjson, .txt .* named"):
            shards.find_shards([folder])
    named = [str(tmp_path / "in/meta.json"), f"{address}/dataset_info.json"]
    assert shards.find_shards(named) == named
    write(tmp_path / "in/a.txt", b"text")
    assert names(shards.find_shards([address])) == ["a.txt"]


def names(locations: list[str]) -> list[str]:
    return sorted(Path(location).name for location in locations)


def test_a_line_of_json_is_known_by_its_files_ending_alone(tmp_path):
    path = write(tmp_path / "data.parquet", as_lines(make_texts(9)))
    with pytest.raises(InputError, match="is not a parquet file"):
        prepare(path, "--out", tmp_path / "out")


def test_more_files_than_can_be_told_of_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MOST_SHARDS", 3)
    for number in range(4):
        write(tmp_path / f"{number}.txt", b"text")
    with pytest.raises(InputError, match="4 files are more than 3; join small ones"):
        prepare(tmp_path, "--out", tmp_path / "out")


# Changed options


def test_another_separator_is_another_dataset(tmp_path):
    shard = write(tmp_path / "a.txt", "\n\n".join(make_texts(40)).encode())
    prepare(shard, "--out", tmp_path / "out", "--separator", r"\n\n")
    prepare(shard, "--out", tmp_path / "out", "--separator", "\n\n")
    with pytest.raises(InputError, match="made with separator"):
        prepare(shard, "--out", tmp_path / "out", "--separator", r"\n")


# Spread


@pytest.mark.slow
def test_an_engine_reads_links_by_their_own_names(tmp_path):
    """As in a Hugging Face cache, whose files have no endings."""
    pytest.importorskip("datatrove")
    texts, folder = make_texts(80), tmp_path / "snapshots/x"
    made = [
        write(tmp_path / "a.jsonl", as_lines(texts[:40])),
        write_shard(tmp_path / "b.parquet", texts[40:]),
    ]
    (tmp_path / "blobs").mkdir()
    folder.mkdir(parents=True)
    for shard in made:
        shard.rename(tmp_path / "blobs" / shard.stem)
        (folder / shard.name).symlink_to(f"../../blobs/{shard.stem}")
    inputs = [folder / shard.name for shard in made]
    prepare(*inputs, "--out", tmp_path / "plain")
    command = [sys.executable, "prepare_fineweb.py", *inputs, "--out", tmp_path / "spread"]
    command += ["--engine", "local", "--workers", "2"]
    processes.run(command, check=True, cwd=processes.PROJECT)
    assert read_meta(tmp_path / "spread")["sources"] == read_meta(tmp_path / "plain")["sources"]
    assert_bins_are(tmp_path / "spread", texts)


@pytest.mark.slow
def test_an_engine_gives_the_plain_datasets_of_many_shards_of_every_kind(tmp_path):
    pytest.importorskip("datatrove")
    texts = make_texts(240)
    for number in range(6):
        part, place = texts[number * 40 :][:40], tmp_path / f"in/{number}"
        if number % 3 == 0:
            write_shard(place.with_suffix(".parquet"), part)
        elif number % 3 == 1:
            write(place.with_suffix(".jsonl.gz"), as_lines(part))
        else:
            write(place.with_suffix(".txt"), "\n\\\n".join(part).encode())
    inputs = [*sorted((tmp_path / "in").iterdir()), "--separator", r"\n\\\n"]
    prepare(*inputs, "--out", tmp_path / "plain")
    command = [sys.executable, "prepare_fineweb.py", *inputs, "--out", tmp_path / "spread"]
    command += ["--engine", "local", "--workers", "2"]
    processes.run(command, check=True, cwd=processes.PROJECT)
    assert_same_dataset(tmp_path / "plain", tmp_path / "spread")
    plain, spread = read_meta(tmp_path / "plain"), read_meta(tmp_path / "spread")
    assert all(plain[part] == spread[part] for part in ("sources", "options", "counts"))
    assert len(spread["splits"]["train"]["bins"]) == 6
