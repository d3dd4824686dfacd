"""Shards as they are found: each oddity has one outcome, which meta.json counts or a line tells."""

import random
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanofit.data.shards import find_shards
from nanofit.terminal import InputError
from tests.shards import (
    assert_same_dataset,
    damage,
    decode,
    make_texts,
    prepare,
    read_bins,
    read_meta,
    write_shard,
)

SURROGATE = "half of a pair \ud83d".encode("utf-8", "surrogatepass")
LATIN = "Zürich".encode("latin-1")
CUT = "中文".encode()[:-1]


def as_strings(texts: list[bytes | None], kind=pa.string()) -> pa.Array:  # noqa: B008
    """Whatever bytes they are, in an array that claims to hold text."""
    return pa.array(texts, pa.binary() if kind == pa.string() else pa.large_binary()).view(kind)


KINDS = {
    "large_string": lambda texts: texts.cast(pa.large_string()),
    "string_view": lambda texts: texts.cast(pa.string_view()),
    "dictionary": lambda texts: texts.dictionary_encode(),
    "dictionary of large_string": lambda texts: texts.cast(pa.large_string()).dictionary_encode(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_text_column_gives_the_same_bins(tmp_path, kind):
    texts = [*make_texts(40), None, "", "<|endoftext|>"]
    prepare(write_shard(tmp_path / "a.parquet", texts), "--out", tmp_path / "plain")
    column = KINDS[kind](pa.array(texts, pa.string()))
    assert column.type != pa.string()
    prepare(write_shard(tmp_path / "b.parquet", column), "--out", tmp_path / "other")
    assert_same_dataset(tmp_path / "plain", tmp_path / "other")
    assert read_meta(tmp_path / "plain")["counts"] == read_meta(tmp_path / "other")["counts"]


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd", "lz4", "brotli"])
def test_every_compression_gives_the_same_bins(tmp_path, compression):
    texts = make_texts(60)
    for name in ("snappy", compression):
        shard = write_shard(tmp_path / f"{name}.parquet", texts, group=25, compression=name)
        prepare(shard, "--out", tmp_path / name)
    assert_same_dataset(tmp_path / "snappy", tmp_path / compression)


WRONG_COLUMNS = {
    "binary": pa.binary(),
    "int64": pa.int64(),
    "list<": pa.list_(pa.string()),
    "struct<": pa.struct({"text": pa.string()}),
    "null": pa.null(),
}


@pytest.mark.parametrize("told", WRONG_COLUMNS)
def test_a_column_that_is_not_text_is_refused_by_its_type(tmp_path, told):
    column = pa.nulls(9, WRONG_COLUMNS[told])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=f"column 'text' holds {told}.*, not text; the columns"):
        prepare(tmp_path / "a.parquet", "--out", tmp_path / "out")


def test_two_columns_of_the_name_are_refused(tmp_path):
    texts = pa.array(make_texts(9))
    table = pa.Table.from_arrays([texts, texts], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="more than one column 'text'"):
        prepare(tmp_path / "a.parquet", "--out", tmp_path / "out")


@pytest.mark.parametrize("broken", [SURROGATE, LATIN, CUT], ids=["surrogate", "latin-1", "cut"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), "dictionary"], ids=str)
def test_what_is_not_utf8_is_left_out_and_counted(tmp_path, capsys, broken, kind):
    good = [text.encode() for text in make_texts(50)]
    texts = [*good[:20], broken, None, broken, *good[20:]]
    column = as_strings(texts, pa.string() if kind == "dictionary" else kind)
    column = column.dictionary_encode() if kind == "dictionary" else column
    shard = write_shard(tmp_path / "a.parquet", column, counts=[1] * len(texts), group=30)
    prepare(shard, "--out", tmp_path / "odd")
    assert "2 documents are not UTF-8 and were skipped" in capsys.readouterr().out
    prepare(write_shard(tmp_path / "b.parquet", as_strings(good)), "--out", tmp_path / "good")
    assert_same_dataset(tmp_path / "good", tmp_path / "odd")
    counts = read_meta(tmp_path / "odd")["counts"]
    assert (counts["not_utf8"], counts["skipped"], counts["token_count_rows"]) == (2, 1, 50)


def test_null_empty_and_end_of_text_as_text_are_counted(tmp_path):
    texts = [*make_texts(20), None, "", "", "<|endoftext|>", "so <|endoftext|> is spelt"]
    prepare(write_shard(tmp_path / "a.parquet", texts), "--out", tmp_path)
    counts, bins = read_meta(tmp_path)["counts"], read_bins(tmp_path)
    assert (counts["skipped"], counts["spelling_end_of_text"], counts["not_utf8"]) == (3, 2, 0)
    assert sum((tokens == 50256).sum() for tokens in bins.values()) == len(texts) - 3


def test_counts_that_no_document_can_have_are_no_claim(tmp_path):
    counts = [-1, 2**63 - 1, 2**40, None, *[7] * 16]
    shard = write_shard(tmp_path / "a.parquet", make_texts(20), counts=counts)
    prepare(shard, "--out", tmp_path)
    assert read_meta(tmp_path)["counts"]["token_count_rows"] == 16
    assert read_meta(tmp_path)["counts"]["token_count_tokens"] == 7 * 16


def test_shards_without_rows_are_passed_over_and_listed(tmp_path):
    texts = make_texts(60)
    for number, part in enumerate(([], texts[:30], [], texts[30:])):
        write_shard(tmp_path / f"in/{number}.parquet", part)
    prepare(tmp_path / "in", "--out", tmp_path / "out")
    prepare(write_shard(tmp_path / "all.parquet", texts), "--out", tmp_path / "one")
    assert_same_dataset(tmp_path / "one", tmp_path / "out")
    assert [source["rows"] for source in read_meta(tmp_path / "out")["sources"]] == [0, 30, 0, 30]


@pytest.mark.slow
def test_a_document_of_50_mb_is_one_document(tmp_path):
    part = " ".join(make_texts(400, seed=3))
    long = part * (50 * 10**6 // len(part.encode()) + 1)
    texts = [*make_texts(30), long, *make_texts(30, seed=1)]
    prepare(write_shard(tmp_path / "a.parquet", texts), "--out", tmp_path)
    decoded = [text for tokens in read_bins(tmp_path).values() for text in decode(tokens)]
    assert Counter(decoded) == Counter(texts)


# Files and their order


def test_the_same_files_give_the_same_bytes_in_whatever_order_they_are_given(tmp_path):
    names = ["b/2.parquet", "a/1.parquet", "a/x/0.parquet", "c.parquet"]
    random.Random(4).shuffle(names)
    shards = [
        write_shard(tmp_path / "in" / name, make_texts(30, seed=number))
        for number, name in enumerate(names)
    ]
    prepare(tmp_path / "in", "--out", tmp_path / "folder")
    prepare(*shards, "--out", tmp_path / "given")
    prepare(*shards[::-1], "--out", tmp_path / "reversed")
    for name in ("train.bin", "val.bin", "meta.json"):
        contents = {(tmp_path / out / name).read_bytes() for out in ("folder", "given", "reversed")}
        assert len(contents) == 1
    recorded = [source["file"] for source in read_meta(tmp_path / "folder")["sources"]]
    assert recorded == ["1.parquet", "0.parquet", "2.parquet", "c.parquet"]


def test_digests_belong_to_the_files_beside_which_they_are_given(tmp_path):
    for number in range(2):
        write_shard(tmp_path / f"in/{number}.parquet", make_texts(20, seed=number))
    prepare(tmp_path / "in", "--out", tmp_path / "out")
    first, second = (source["sha256"] for source in read_meta(tmp_path / "out")["sources"])
    backwards = [tmp_path / f"in/{number}.parquet" for number in (1, 0)]
    prepare(*backwards, "--out", tmp_path / "again", "--sha256", second, first)
    with pytest.raises(InputError, match="its SHA-256 is"):
        prepare(*backwards, "--out", tmp_path / "wrong", "--sha256", first, second)


def test_nested_folders_are_searched_and_links_in_a_loop_end(tmp_path):
    (tmp_path / "in/a/b").mkdir(parents=True)
    shard = write_shard(tmp_path / "in/a/b/0.parquet", make_texts(30))
    spark = write_shard(tmp_path / "in/table.parquet/part-0.parquet", make_texts(30, seed=1))
    write_shard(tmp_path / "in/.hidden/1.parquet", ["a"])
    (tmp_path / "in/a/b/up").symlink_to(tmp_path / "in")
    (tmp_path / "in/self").symlink_to("self")
    assert sorted(find_shards([str(tmp_path / "in")])) == [str(shard), str(spark)]
    (tmp_path / "in/round.parquet").symlink_to("round.parquet")
    with pytest.raises(InputError, match=r"cannot read .*round.parquet"):
        prepare(tmp_path / "in", "--out", tmp_path / "out")


def test_a_file_under_two_names_is_not_read_twice(tmp_path, monkeypatch):
    shard = write_shard(tmp_path / "a.parquet", make_texts(30))
    (tmp_path / "b.parquet").symlink_to(shard)
    monkeypatch.chdir(tmp_path)
    for inputs in ([shard, "a.parquet"], [tmp_path], [shard, "./b.parquet"]):
        with pytest.raises(InputError, match=r"given more than once: .*a\.parquet"):
            prepare(*inputs, "--out", tmp_path / "out")


# Damage


def contents_after(path, out) -> bytes | None:
    """The bins made of a shard; None if it was refused, in a line."""
    try:
        prepare(path, "--out", out, "--overwrite", "--val_hash_below", 2**28)
    except InputError as error:
        assert len(str(error).splitlines()) == 1
        return None
    return b"".join((out / f"{split}.bin").read_bytes() for split in ("train", "val"))


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_a_flipped_byte_of_a_page_is_noticed_by_its_checksum(tmp_path, compression):
    path = tmp_path / "a.parquet"
    settings = {"compression": compression, "write_page_checksum": True, "use_dictionary": False}
    write_shard(path, make_texts(60), **settings)
    whole = contents_after(path, tmp_path / "out")
    page = pq.ParquetFile(path).metadata.row_group(0).column(0)
    inside = range(page.data_page_offset + 60, page.data_page_offset + page.total_compressed_size)
    for at in random.Random(1).sample(inside, 12):
        damage(path, at)
        assert contents_after(path, tmp_path / "out") is None
        damage(path, at)
    assert contents_after(path, tmp_path / "out") == whole


@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_a_flipped_bit_that_no_checksum_covers_is_noticed_by_the_digest(tmp_path, compression):
    """Without either it is other text: nothing in the file says what it was."""
    path = write_shard(tmp_path / "a.parquet", make_texts(60), compression=compression)
    whole = contents_after(path, tmp_path / "out")
    [digest] = (source["sha256"] for source in read_meta(tmp_path / "out")["sources"])
    content, changed = path.read_bytes(), 0
    for at in random.Random(2).sample(range(100, 3000), 12):
        flipped = bytearray(content)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        changed += contents_after(path, tmp_path / "out") not in (None, whole)
        with pytest.raises(InputError, match=r"damaged|truncated"):
            prepare(path, "--out", tmp_path / "held", "--sha256", digest)
    assert changed, "none of these went unnoticed: say so in the reliability table"


def test_a_shard_cut_anywhere_is_refused(tmp_path):
    path = write_shard(tmp_path / "a.parquet", make_texts(60))
    content = path.read_bytes()
    for kept in [0, 1, 4, 11, 12, *random.Random(3).sample(range(len(content)), 12)]:
        path.write_bytes(content[:kept])
        assert contents_after(path, tmp_path / "out") is None


def test_a_footer_that_miscounts_the_rows_is_damage(tmp_path):
    """Otherwise the last documents would be left out without a word."""
    path = write_shard(tmp_path / "a.parquet", make_texts(100), group=50)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    # In thrift's compact protocol: field of type i64, then 100 as a zigzag varint.
    place = content.index(b"\x16\xc8\x01\x19", footer) + 1
    path.write_bytes(content[:place] + b"\xb8" + content[place + 1 :])
    assert pq.ParquetFile(path).metadata.num_rows == 92
    with pytest.raises(InputError, match="tells of 92 rows in all, but of 100 in the row groups"):
        prepare(path, "--out", tmp_path / "out")
