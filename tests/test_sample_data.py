"""The sample shard: FineWeb's form, exact counts, repeatable, in English, in bounded memory."""

import calendar
import os
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest

from data.sample import grammar, make_shard
from nanofit.data.tokenizer import gpt2
from nanofit.terminal import InputError
from tests import processes

SCRIPT = Path(make_shard.__file__)
SIZE_BYTES = 3_000_000


def make(path, *options):
    make_shard.main(["--out", str(path), *options])
    return pyarrow.parquet.ParquetFile(path)


def texts_of(shard):
    return shard.read(["text"]).column("text").to_pylist()


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("sample") / "sample.parquet"
    return make(path, "--size", str(SIZE_BYTES), "--row_group_size", "300")


@pytest.fixture(scope="module")
def texts(shard):
    return texts_of(shard)


def test_schema_is_that_of_fineweb(shard):
    assert [f"{field.name} {field.type}" for field in shard.schema_arrow] == [
        "text string",
        "id string",
        "dump string",
        "url string",
        "date string",
        "file_path string",
        "language string",
        "language_score double",
        "token_count int64",
    ]
    assert all(column.null_count == 0 for column in shard.read().columns)


def test_token_count_equals_encoding_each_text(shard, texts):
    counts = shard.read(["token_count"]).column(0).to_pylist()
    assert counts == [len(gpt2().encode_ordinary(text)) for text in texts]


def test_size_is_the_bytes_of_text_within_two_percent(texts):
    assert sum(len(text.encode()) for text in texts) == pytest.approx(SIZE_BYTES, rel=0.02)


def test_row_groups_are_full_except_the_last(shard, texts):
    sizes = [shard.metadata.row_group(i).num_rows for i in range(shard.num_row_groups)]
    assert len(sizes) > 3
    assert set(sizes[:-1]) == {300}
    assert sum(sizes) == len(texts)


def test_rows_have_their_own_id_and_url(shard, texts):
    for name in ("id", "url"):
        assert len(set(shard.read([name]).column(0).to_pylist())) == len(texts)


def test_same_seed_gives_the_same_bytes_and_another_seed_other_texts(tmp_path):
    for name, seed in (("first", "5"), ("again", "5"), ("other", "6")):
        make(tmp_path / name, "--size", "200kB", "--seed", seed)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "again").read_bytes()
    first, other = (
        texts_of(pyarrow.parquet.ParquetFile(tmp_path / name)) for name in ("first", "other")
    )
    assert not set(first) & set(other)


def test_texts_do_not_depend_on_how_python_hashes():
    def first_text(hash_seed):
        code = "from data.sample import grammar; print(grammar.write(1, 2))"
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", code]
        return processes.run(command, cwd=SCRIPT.parents[2], env=environment, check=True).stdout

    assert first_text("1") == first_text("2")


def test_long_shard_begins_with_the_short_one(tmp_path, texts):
    short = texts_of(make(tmp_path / "short", "--size", "500kB", "--row_group_size", "77"))
    assert short == texts[: len(short)]


def test_compressions_hold_the_same_rows(tmp_path):
    zstd, snappy = (
        make(tmp_path / name, "--size", "200kB", "--compression", name)
        for name in ("zstd", "snappy")
    )
    assert zstd.read() == snappy.read()
    codecs = [file.metadata.row_group(0).column(0).compression for file in (zstd, snappy)]
    assert codecs == ["ZSTD", "SNAPPY"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow_with_the_size(tmp_path):
    # Not by getrusage: its peak includes loading the vocabulary, more than a leak would show here.
    code = """if True:
        import re, sys
        from pathlib import Path
        from data.sample.make_shard import main

        def kilobytes(name):
            return int(re.search(name + r":\\s+([0-9]+)", Path("/proc/self/status").read_text())[1])

        options = ["--out", sys.argv[1], "--row_group_size", "100", "--size"]
        main([*options, "10MB"])
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = kilobytes("VmRSS")
        main([*options, "40MB"])
        print(before, kilobytes("VmHWM"))
    """
    command = [sys.executable, "-c", code, str(tmp_path / "shard")]
    # Arrow's own allocators give memory back when they find the time.
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = processes.run(command, cwd=SCRIPT.parents[2], env=environment, check=True)
    before, peak = map(int, done.stdout.split()[-2:])
    assert peak < before + 12_000
    assert peak < 400_000


def test_lengths_spread_as_those_of_web_pages(shard):
    counts = sorted(shard.read(["token_count"]).column(0).to_pylist())
    hundredth = len(counts) // 100
    assert 300 < statistics.median(counts) < 500
    assert counts[hundredth] < 100
    assert counts[-hundredth] > 2000


def test_documents_are_distinct_and_their_words_many(texts):
    assert len(set(texts)) == len(texts)
    words = Counter(re.findall(r"[a-z]+", " ".join(texts).lower()))
    assert 2000 < len(words) < 4000
    ordered = [count for _, count in words.most_common()]
    assert ordered[0] > 20 * ordered[100] > 100 * ordered[1500]


def test_no_field_is_left_and_blanks_are_single(texts):
    for text in texts:
        assert text.isascii()
        assert not re.search(r"[{}%/]|  | \n|\n |\n\n\n|^\s|\s$|\.\.|,,", text), text


def test_articles_agree_with_the_next_word(texts):
    text = "\n".join(texts)
    after_a = set(re.findall(r"\b[Aa] ([A-Za-z-]+)", text))
    after_an = set(re.findall(r"\b[Aa]n ([A-Za-z-]+)", text))
    vowels = "aeiouAEIOU"
    assert {word for word in after_a if word[0] in vowels} <= {"useful", "useless"}
    assert {word for word in after_an if word[0] not in vowels} <= {"hour", "hourglass", "honest"}
    assert len(after_a) > 200
    assert len(after_an) > 30


def test_pronouns_agree_with_the_person(texts):
    introductions = re.findall(
        r"Once there was an? \S+ (\w+) called (\w+)\. (\w+) lived with (\w+) ", "\n".join(texts)
    )
    assert len(introductions) > 20
    forms = {(child, he, his) for child, _, he, his in introductions}
    assert forms == {("girl", "She", "her"), ("boy", "He", "his")}
    children = {}
    for child, name, *_ in introductions:
        assert children.setdefault(name, child) == child


def test_arithmetic_and_dates_are_right(texts):
    text = "\n".join(texts)
    checks = {
        r"(\d+) \+ (\d+) = (\d+)": lambda a, b: a + b,
        r"(\d+) - (\d+) = (\d+)": lambda a, b: a - b,
        r"(\d+) x (\d+) = (\d+)": lambda a, b: a * b,
        r"(\d+) : (\d+) = (\d+)": lambda a, b: a / b,
        r"\((\d+) to (\d+)\) .* age of (\d+)\.": lambda born, died: died - born,
    }
    for pattern, rule in checks.items():
        found = re.findall(pattern, text)
        assert len(found) > 10, pattern
        assert all(rule(int(a), int(b)) == int(c) for a, b, c in found), pattern
    days = list(calendar.day_name)
    pairs = re.findall(r"Today is (\w+), so tomorrow is (\w+)\.", text)
    assert len(pairs) > 10
    assert all(days[(days.index(today) + 1) % 7] == tomorrow for today, tomorrow in pairs)


def test_every_line_of_every_genre_can_be_used(monkeypatch):
    unused = {
        id(line): line.pattern
        for genre in grammar.genres()
        for group in genre.lines.values()
        for line in group
    }
    original = grammar.fill

    def watched(line, cast, chance):
        unused.pop(id(line), None)
        return original(line, cast, chance)

    monkeypatch.setattr(grammar, "fill", watched)
    for number in range(1500):
        grammar.write(0, number)
    assert not unused


@pytest.mark.parametrize(
    "options",
    [
        ["--size", "0"],
        ["--size", "-3MB"],
        ["--size", "many"],
        ["--compression", "gzip"],
        ["--row_group_size", "0"],
        ["--seed", "x"],
        ["--out", "."],
        ["--out", f"{SCRIPT}/sample.parquet"],
    ],
)
def test_bad_input_is_one_clear_line(options, tmp_path):
    with pytest.raises(InputError) as caught:
        make_shard.main(["--out", str(tmp_path / "never"), "--size", "10kB", *options])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_script_runs_in_any_folder_and_exits_with_2_on_bad_input(tmp_path):
    def run(*options):
        command = [sys.executable, str(SCRIPT), "--out", "made/here.parquet", *options]
        return processes.run(command, cwd=tmp_path)

    good, bad = run("--size", "20kB"), run("--size", "0")
    assert good.returncode == 0, good.stderr
    assert (tmp_path / "made/here.parquet").exists()
    assert len(good.stdout.splitlines()) == 1
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 1
