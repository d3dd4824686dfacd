"""prepare_fineweb.py against the plain route: encode, add a separator, split by a hash."""

import functools
import http.server
import json
import os
import random
import resource
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import prepare_fineweb
from nanofit.data import digests, documents, parquet, shards
from nanofit.data.documents import ChunkEncoder
from nanofit.data.source import Chunk, Position
from nanofit.data.tokenizer import gpt2, reference_encoder
from nanofit.lock import only_one_in
from nanofit.terminal import InputError
from tests import processes
from tests.shards import (
    KILL_AFTER,
    assert_same_dataset,
    damage,
    decode,
    make_texts,
    plain_route,
    prepare,
    read_bins,
    read_meta,
    start,
    write_shard,
)

SCRIPT = Path(prepare_fineweb.__file__)
ODD = [
    None,
    "",
    " ",
    "\n",
    "<|endoftext|>",
    "before<|endoftext|>after",
    "naïve Русский العربية 中文 👩‍👩‍👧‍👦",
    "\x00\ufeff\u2028",
    "x" * 5000,
    " " * 3000,
    "same",
    "same",
]


# Right


@pytest.mark.parametrize("encoder", ["fastokens", "tiktoken"])
def test_bins_are_each_documents_tokens_and_one_separator(tmp_path, encoder):
    texts = ODD + make_texts(600)
    random.Random(1).shuffle(texts)
    shard = write_shard(tmp_path / "a.parquet", texts, group=37)
    prepare(shard, "--out", tmp_path / "out", "--val_fraction", 0.1, "--encoder", encoder)
    meta, bins = read_meta(tmp_path / "out"), read_bins(tmp_path / "out")
    expected = plain_route(texts, meta["options"]["val_hash_below"])
    assert {split: array.tolist() for split, array in bins.items()} == expected
    assert meta["counts"]["skipped"] == 2
    text_bytes = sum(about["text_bytes"] for about in meta["splits"].values())
    assert text_bytes == sum(len(text.encode()) for text in filter(None, texts))


def test_decoded_bins_give_the_texts_back(tmp_path):
    texts = make_texts(300) + [text for text in ODD if text]
    prepare(write_shard(tmp_path / "a.parquet", texts), "--out", tmp_path / "out")
    decoded = [text for array in read_bins(tmp_path / "out").values() for text in decode(array)]
    assert Counter(decoded) == Counter(texts)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_other_text_types_give_the_same_bins(tmp_path, kind):
    texts = make_texts(50) + ODD
    prepare(write_shard(tmp_path / "a.parquet", texts), "--out", tmp_path / "plain")
    other = write_shard(tmp_path / "b.parquet", pa.array(texts, pa.string()).cast(kind))
    prepare(other, "--out", tmp_path / "other")
    assert_same_dataset(tmp_path / "plain", tmp_path / "other")


def test_nanogpt_reads_the_bins_unchanged(tmp_path):
    """nanoGPT's get_batch, as its train.py has it."""
    prepare(write_shard(tmp_path / "a.parquet", make_texts(300)), "--out", tmp_path)
    data = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
    starts = np.random.default_rng(0).integers(len(data) - 64, size=8)
    batch = np.stack([data[start : start + 64].astype(np.int64) for start in starts])
    assert batch.max() <= 50256
    assert len(data) == read_meta(tmp_path)["splits"]["train"]["tokens"]


def test_token_count_is_compared_row_by_row(tmp_path, capsys):
    texts = [*make_texts(200), None, ""]
    counts = [len(gpt2().encode_ordinary(text)) if text else None for text in texts]
    prepare(write_shard(tmp_path / "a.parquet", texts, counts=counts), "--out", tmp_path / "a")
    agreement = read_meta(tmp_path / "a")["counts"]
    assert (agreement["token_count_rows"], agreement["token_count_rows_differing"]) == (200, 0)
    assert (
        agreement["token_count_tokens"] == agreement["token_count_tokens_here"] == sum(counts[:200])
    )
    assert "token_count differs" not in capsys.readouterr().out

    counts[:5] = [1_000_000] * 5
    prepare(write_shard(tmp_path / "b.parquet", texts, counts=counts), "--out", tmp_path / "b")
    assert read_meta(tmp_path / "b")["counts"]["token_count_rows_differing"] == 5
    assert "token_count differs in 2.50% of the rows" in capsys.readouterr().out
    assert_same_dataset(tmp_path / "a", tmp_path / "b")


def test_a_document_the_fast_encoder_gets_wrong_is_replaced_and_counted():
    texts = ["one", "two words", "three"]
    wrong = ChunkEncoder(lambda batch: [np.array([7])] * len(batch), reference_encoder(), 0)
    chunk = Chunk(pa.array(texts), None, is_first_of_group=True, end=Position(0, 3))
    tokens, tally = wrong(chunk)
    expected = gpt2().encode_ordinary("two words")
    assert tokens["train"].tolist() == [7, 50256, *expected, 50256, 7, 50256]
    assert (tally["checked"], tally["mismatched"]) == (1, 1)


def test_a_document_of_every_row_group_is_checked(tmp_path):
    prepare(write_shard(tmp_path / "a.parquet", make_texts(95), group=10), "--out", tmp_path)
    counts = read_meta(tmp_path)["counts"]
    assert (counts["checked"], counts["mismatched"]) == (10, 0)


# Deterministic


def test_workers_row_groups_chunks_and_encoder_do_not_change_a_byte(tmp_path, monkeypatch):
    texts = make_texts(700) + ODD
    variants = [
        (100, 1, "fastokens"),
        (100, 7, "fastokens"),
        (3, 2, "tiktoken"),
        (9999, 3, "tiktoken"),
    ]
    for number, (group, workers, encoder) in enumerate(variants):
        for module in (parquet, documents):
            monkeypatch.setattr(module, "CHUNK_BYTES", 20_000 >> number)
        shard = write_shard(tmp_path / f"{number}.parquet", texts, group=group)
        out = ("--out", tmp_path / str(number))
        prepare(shard, *out, "--workers", workers, "--encoder", encoder)
    contents = {
        tuple((tmp_path / str(number) / f"{split}.bin").read_bytes() for split in ("train", "val"))
        for number in range(len(variants))
    }
    assert len(contents) == 1


def test_a_duplicate_never_straddles_the_split_whatever_its_place(tmp_path):
    texts = make_texts(400)
    repeated = texts + random.Random(3).sample(texts, len(texts))
    shards = [write_shard(tmp_path / f"{i}.parquet", repeated[i::3]) for i in range(3)]
    prepare(*shards, "--out", tmp_path / "out", "--val_fraction", 0.3)
    train, val = (set(decode(array)) for array in read_bins(tmp_path / "out").values())
    assert train | val == set(texts)
    assert not train & val


def test_the_hash_holds_out_the_asked_fraction():
    texts = pa.array([f"document {number}" for number in range(20_000)])
    hashes = np.array(documents.hashes_of(texts))
    for fraction in (0.01, 0.1, 0.5):
        share = (hashes < fraction * documents.HASH_RANGE).mean()
        assert abs(share - fraction) < 4 * (fraction / len(hashes)) ** 0.5


@pytest.mark.parametrize("count", [2, 3, 10, 40, 300])
def test_few_documents_still_fill_both_bins(tmp_path, count):
    texts = make_texts(count, seed=count)
    prepare(write_shard(tmp_path / "a.parquet", texts * 2), "--out", tmp_path)
    splits = read_meta(tmp_path)["splits"]
    assert splits["val"]["documents"] >= 2 * min(-(-count // 10), 16)
    assert splits["train"]["documents"] >= count
    assert splits["train"]["documents"] + splits["val"]["documents"] == 2 * count


def test_limit_docs_is_the_first_rows_over_all_shards(tmp_path):
    texts = make_texts(300)
    for number in range(3):
        write_shard(tmp_path / "in" / f"{number}.parquet", texts[number * 100 :][:100], group=30)
    prepare(tmp_path / "in", "--out", tmp_path / "limited", "--limit_docs", 145)
    prepare(write_shard(tmp_path / "first.parquet", texts[:145]), "--out", tmp_path / "first")
    assert_same_dataset(tmp_path / "limited", tmp_path / "first")
    assert len(read_meta(tmp_path / "limited")["sources"]) == 2


# Resumable


def test_killed_runs_continue_and_end_with_the_same_bytes(tmp_path):
    shard = write_shard(tmp_path / "a.parquet", make_texts(1000), group=60)
    prepare(shard, "--out", tmp_path / "whole")
    out, reached = tmp_path / "killed", []
    for _ in range(3):
        process = start(out, shard, KILL_AFTER.replace("SIGNAL", "9").replace("COMMITS", "12"))
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert not list(out.glob("*.bin")) and not (out / "meta.json").exists()
        reached.append(json.loads((out / "progress.json").read_text())["position"][1])
        if len(reached) > 1:
            assert f"continuing after {reached[-2]:,} of 1,000 documents" in output
    assert 0 < reached[0] < reached[1] < reached[2] < 1000
    prepare(shard, "--out", out)
    assert_same_dataset(tmp_path / "whole", out)
    assert read_meta(out)["splits"] == read_meta(tmp_path / "whole")["splits"]  # digests too
    assert sorted(path.name for path in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]


DIE_AFTER_FIRST_RENAME = """
rename = bins.Path.replace
def rename_then_die(self, target):
    rename(self, target)
    if target.name == "train.bin":
        __import__("os").kill(__import__("os").getpid(), 9)
bins.Path.replace = rename_then_die"""
DIE_BEFORE_META = """
prepare_fineweb.write_meta = lambda *_: __import__("os").kill(__import__("os").getpid(), 9)"""


@pytest.mark.parametrize(
    "moment", [DIE_AFTER_FIRST_RENAME, DIE_BEFORE_META], ids=["first rename", "before meta.json"]
)
def test_a_kill_while_the_bins_get_their_names_redoes_nothing(tmp_path, moment):
    shard = write_shard(tmp_path / "a.parquet", make_texts(200))
    prepare(shard, "--out", tmp_path / "whole")
    process = start(tmp_path / "out", shard, moment)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "out/train.bin").exists() and not (tmp_path / "out/meta.json").exists()
    output, _ = start(tmp_path / "out", shard).communicate()
    assert "continuing after 200 of 200 documents" in output
    assert_same_dataset(tmp_path / "whole", tmp_path / "out")


CTRL_C_BEFORE_A_COMMIT = """
prepare_fineweb.COMMIT_EVERY_S = 999
append = bins.BinWriter.append
def append_then_interrupt(self, *args):
    append(self, *args)
    if self.position[1] > 300:
        __import__("os").kill(__import__("os").getpid(), 2)
bins.BinWriter.append = append_then_interrupt"""


def test_ctrl_c_keeps_the_work_and_says_how_to_go_on(tmp_path):
    shard = write_shard(tmp_path / "a.parquet", make_texts(1000), group=60)
    process = start(tmp_path, shard, CTRL_C_BEFORE_A_COMMIT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == "interrupted; the same command continues from here\n"
    assert 300 < json.loads((tmp_path / "progress.json").read_text())["position"][1] < 1000


def test_a_kill_in_the_second_of_two_shards_still_knows_the_digest_of_the_first(tmp_path):
    for number in range(2):
        write_shard(tmp_path / f"in/{number}.parquet", make_texts(100, seed=number))
    forget_digests = "digests.SourceDigests.check = lambda self, wait=False: None"
    kill = KILL_AFTER.replace("SIGNAL", "9").replace("COMMITS", "8")
    start(tmp_path / "out", tmp_path / "in", f"{kill}\n{forget_digests}").communicate()
    journal = json.loads((tmp_path / "out/progress.json").read_text())
    assert journal["position"][0] == 1 and not journal["digests"]
    prepare(tmp_path / "in", "--out", tmp_path / "out")
    prepare(tmp_path / "in", "--out", tmp_path / "whole")
    assert read_meta(tmp_path / "out")["sources"] == read_meta(tmp_path / "whole")["sources"]


def test_a_full_disk_is_one_line_and_the_same_command_continues(tmp_path):
    shard = write_shard(tmp_path / "a.parquet", make_texts(1000), group=60)
    prepare(shard, "--out", tmp_path / "whole")

    def limit_file_size():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    process = start(tmp_path / "out", shard, preexec_fn=limit_file_size)
    _, errors = process.communicate()
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1 and "cannot write" in errors and "continues" in errors
    assert not list((tmp_path / "out").glob("*.bin"))
    output, _ = start(tmp_path / "out", shard).communicate()
    assert "continuing after" in output
    assert_same_dataset(tmp_path / "whole", tmp_path / "out")


def test_two_runs_never_write_to_one_folder(tmp_path):
    shard = write_shard(tmp_path / "a.parquet", make_texts(200))
    with only_one_in(tmp_path, "out"):
        _, errors = start(tmp_path, shard).communicate()
    assert f"{tmp_path} is in use by process {os.getpid()}" in errors


def test_a_rerun_says_so_and_changes_are_detected(tmp_path, capsys):
    texts = make_texts(200)
    plain = {"compression": "none", "use_dictionary": False}
    shard, out = write_shard(tmp_path / "a.parquet", texts, **plain), tmp_path / "out"
    prepare(shard, "--out", out)
    made = (out / "train.bin").stat().st_mtime_ns
    capsys.readouterr()
    prepare(shard, "--out", out)
    assert "nothing to do" in capsys.readouterr().out
    os.utime(shard)  # touched, not changed
    prepare(shard, "--out", out)
    assert (out / "train.bin").stat().st_mtime_ns == made

    with pytest.raises(InputError, match=r"val_fraction 0.01, not 0.2"):
        prepare(shard, "--out", out, "--val_fraction", 0.2)
    size = shard.stat().st_size
    write_shard(shard, [texts[1], texts[0], *texts[2:]], **plain)
    assert shard.stat().st_size == size  # only the digest tells
    with pytest.raises(InputError, match=r"before a.parquet changed"):
        prepare(shard, "--out", out)
    prepare(shard, "--out", out, "--overwrite")
    write_shard(shard, texts[1:])
    with pytest.raises(InputError, match="other inputs"):
        prepare(shard, "--out", out)


def test_bins_of_unknown_origin_are_not_replaced_unasked(tmp_path):
    shard = write_shard(tmp_path / "a.parquet", make_texts(50))
    (tmp_path / "train.bin").write_bytes(b"made elsewhere")
    with pytest.raises(InputError, match=r"not described by a whole meta.json"):
        prepare(shard, "--out", tmp_path)
    assert (tmp_path / "train.bin").read_bytes() == b"made elsewhere"
    prepare(shard, "--out", tmp_path, "--overwrite")
    assert len(read_bins(tmp_path)["train"])


def test_half_made_output_of_other_inputs_is_started_over(tmp_path, capsys):
    shard = write_shard(tmp_path / "a.parquet", make_texts(1000), group=60)
    process = start(
        tmp_path / "out", shard, KILL_AFTER.replace("SIGNAL", "9").replace("COMMITS", "5")
    )
    process.communicate()
    texts = make_texts(900, seed=5)
    prepare(write_shard(shard, texts), "--out", tmp_path / "out")
    assert "starting over: the inputs or options have changed" in capsys.readouterr().out
    meta, bins = read_meta(tmp_path / "out"), read_bins(tmp_path / "out")
    expected = plain_route(texts, meta["options"]["val_hash_below"])
    assert {split: array.tolist() for split, array in bins.items()} == expected


def test_the_summary_tells_how_many_epochs_a_config_makes(tmp_path, capsys):
    config = tmp_path / "config.py"
    config.write_text(
        "batch_size = 4\ngradient_accumulation_steps = 2\nblock_size = 32\nmax_iters = 90"
    )
    prepare(
        write_shard(tmp_path / "a.parquet", make_texts(200)), "--out", tmp_path, "--config", config
    )
    epochs = 90 * 4 * 2 * 32 / len(read_bins(tmp_path)["train"])
    assert f"steps 90  tokens/step 256  epochs {epochs:.2f}" in capsys.readouterr().out


def test_progress_of_one_run_never_vouches_for_the_tokens_of_another(tmp_path):
    one = write_shard(tmp_path / "one.parquet", make_texts(1000), group=60)
    other = write_shard(tmp_path / "other.parquet", make_texts(1000, seed=9), group=60)
    start(tmp_path / "out", one, KILL_AFTER.replace("SIGNAL", "9").replace("COMMITS", "9")).wait()
    start(tmp_path / "out", other, CTRL_C_BEFORE_A_COMMIT.replace("(), 2)", "(), 9)")).wait()
    prepare(one, "--out", tmp_path / "out")
    prepare(one, "--out", tmp_path / "whole")
    assert_same_dataset(tmp_path / "whole", tmp_path / "out")


# Scales out


def test_an_engine_gives_the_plain_runs_dataset(tmp_path):
    pytest.importorskip("datatrove")
    for number in range(2):
        write_shard(tmp_path / "in" / f"{number}.parquet", make_texts(60, seed=number))
    prepare(tmp_path / "in", "--out", tmp_path / "plain", "--limit_docs", 100)
    command = [sys.executable, SCRIPT, tmp_path / "in", "--out", tmp_path / "spread"]
    command += ["--engine", "local", "--workers", "2", "--limit_docs", "100"]
    processes.run(command, check=True)
    assert_same_dataset(tmp_path / "plain", tmp_path / "spread")
    plain, spread = read_meta(tmp_path / "plain"), read_meta(tmp_path / "spread")
    assert all(plain[part] == spread[part] for part in ("sources", "options", "counts"))
    again = processes.run(command, check=True)
    assert "nothing to do" in again.stdout


def test_an_engine_tells_which_shard_failed_and_why(tmp_path):
    pytest.importorskip("datatrove")
    texts = [f"document {number}" for number in range(5000)]
    for name in ("good", "harmed"):
        write_shard(tmp_path / f"in/{name}.parquet", texts, group=5000, write_page_checksum=True)
    damage(tmp_path / "in/harmed.parquet", 2000)
    command = [sys.executable, SCRIPT, tmp_path / "in", "--out", tmp_path / "out"]
    done = processes.run([*command, "--engine", "local"])
    assert done.returncode == 2
    assert "1 of 2 shards failed; 00001-harmed:" in done.stderr.splitlines()[-1]
    assert "damaged in row group 0" in done.stderr.splitlines()[-1]
    assert (tmp_path / "out/shards/00000-good/meta.json").exists()
    assert not (tmp_path / "out/meta.json").exists()
    with pytest.raises(InputError, match="folder without"):  # nothing there is a shard
        shards.find_shards([str(tmp_path / "out")])


def test_merged_folders_are_one_dataset_in_order(tmp_path):
    texts = make_texts(300)
    for name, part in {"a": texts[:150], "b": texts[150:], "both": texts}.items():
        shard = write_shard(tmp_path / f"{name}.parquet", part)
        prepare(shard, "--out", tmp_path / name, "--val_hash_below", 2**30)
    prepare("--merge", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "merged")
    assert_same_dataset(tmp_path / "both", tmp_path / "merged")
    prepare(tmp_path / "a.parquet", "--out", tmp_path / "other", "--val_hash_below", 2**29)
    with pytest.raises(InputError, match="different rules"):
        prepare("--merge", tmp_path / "b", tmp_path / "other", "--out", tmp_path / "mixed")


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_shard_over_http_gives_the_local_dataset(tmp_path, has_ranges):
    pytest.importorskip("aiohttp")
    shard = write_shard(tmp_path / "a.parquet", make_texts(300))
    handler = functools.partial(RangeHandler if has_ranges else QuietHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        prepare(f"{address}/a.parquet", "--out", tmp_path / "remote")
        with pytest.raises(InputError, match="cannot read"):
            prepare(f"{address}/missing.parquet", "--out", tmp_path / "missing")
        server.shutdown()
    prepare(shard, "--out", tmp_path / "local")
    assert_same_dataset(tmp_path / "local", tmp_path / "remote")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Python's own file server, which only sends whole files."""

    def log_message(self, *_):
        pass


class RangeHandler(QuietHandler):
    """A file server that answers Range requests, as those that hold datasets do."""

    def do_GET(self):
        path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
        if not path.is_file() or not wanted:
            return super().do_GET()
        first, last = wanted.removeprefix("bytes=").split("-")
        content = path.read_bytes()[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        return self.wfile.write(content)


# Bad input


def no_columns(path):
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), path)


def invalid_utf8(path):
    binary = pa.array([b"fine", b"\xff\xfe not UTF-8"] * 50)
    write_shard(path, pa.Array.from_buffers(pa.string(), 100, binary.buffers()))


def flipped_bit(path):
    write_shard(path, make_texts(100), write_page_checksum=True, compression="none")
    damage(path, 1000)


BAD_FILES = {
    "not a parquet file": lambda path: path.write_text("version https://git-lfs.github.com/spec"),
    "is empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(write_shard(path, ["a"] * 9).read_bytes()[:-20]),
    "does not exist": lambda path: None,
    "is a folder without .parquet, .jsonl": lambda path: path.mkdir(),
    r"no column 'text'; it has body \(string\), n \(int64\)": no_columns,
    "holds int64, not text": lambda path: pq.write_table(pa.table({"text": [1, 2]}), path),
    "0 different documents": lambda path: write_shard(path, [None, ""]),
    "1 different documents": lambda path: write_shard(path, ["same", "same"]),
    "1 different documents cannot be split": invalid_utf8,
    "damaged in row group 0 .*checksum|CRC": flipped_bit,
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_bad_files_are_one_clear_line_and_leave_nothing(tmp_path, message):
    BAD_FILES[message](tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message) as caught:
        prepare(tmp_path / "a.parquet", "--out", tmp_path / "out")
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_damage_found_late_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "FEW_ROWS", 0)
    shard = write_shard(tmp_path / "a.parquet", make_texts(500), write_page_checksum=True)
    damage(shard, pq.ParquetFile(shard).metadata.row_group(3).column(0).data_page_offset - 200)
    with pytest.raises(InputError, match="damaged in row group"):
        prepare(shard, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("known", [True, False])
def test_a_wrong_digest_is_damage(tmp_path, monkeypatch, known):
    shard = write_shard(tmp_path / "a.parquet", make_texts(50))
    digest = digests.sha256_of(shards.open_shards([str(shard)], "text")[0])
    prepare(shard, "--out", tmp_path / "right", "--sha256", digest.upper())
    given = () if known else ("--sha256", "0" * 64)
    if known:
        monkeypatch.setitem(digests.KNOWN_SHA256, ("a.parquet", shard.stat().st_size), "0" * 64)
    with pytest.raises(InputError, match=f"its SHA-256 is {digest}"):
        prepare(shard, "--out", tmp_path / "wrong", *given)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--val_fraction", "0"], "not between 0 and 1"),
        (["--val_fraction", "1.5"], "not between 0 and 1"),
        (["--workers", "0"], "not a positive number"),
        (["--limit_docs", "-3"], "not a positive number"),
        (["--sha256", "0" * 64, "1" * 64], "2 digests for 1 files"),
        (["--sha256", "b.parquet"], "not a SHA-256; name the shards before it"),
        (["--engine", "local", "--engine_options", "2"], "not NAME=VALUE"),
        (["--out", "{file}"], "cannot write to"),
        (["--out", "{file}/below"], "cannot write to"),
    ],
)
def test_bad_flags_are_one_clear_line(tmp_path, flags, message):
    shard = write_shard(tmp_path / "a.parquet", make_texts(20))
    flags = [flag.replace("{file}", str(shard)) for flag in flags]
    with pytest.raises(InputError, match=message):
        prepare(shard, "--out", tmp_path / "out", *flags)


def test_as_a_script_bad_input_is_exit_code_2_and_no_traceback(tmp_path):
    for arguments in ([], [str(tmp_path / "missing.parquet")]):
        done = processes.run([sys.executable, SCRIPT, *arguments])
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr
    assert "usage: python prepare_fineweb.py" in processes.run([sys.executable, SCRIPT]).stderr
