"""A shard at an address whose server stalls, hangs up, refuses or sends less than it promised."""

import http.server
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
import zlib
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import prepare_fineweb
from nanofit.data.dataset import Options, identity
from nanofit.data.remote import TRIES
from nanofit.data.shards import open_shards
from nanofit.terminal import InputError
from tests import processes
from tests.shards import assert_same_dataset, make_texts, prepare, read_meta, write_shard

pytest.importorskip("aiohttp")


class FaultyServer(http.server.ThreadingHTTPServer):
    """Serves one shard by ranges; `fault(number)` tells what becomes of a GET, by its number."""

    daemon_threads = True

    def __init__(self, content: bytes, fault):
        super().__init__(("127.0.0.1", 0), FaultyHandler)
        self.content, self.fault = content, fault
        self.asked: list[range] = []
        self.lock, self.closing = threading.Lock(), threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/a.parquet"

    def handle_error(self, *_):
        """A client that has lost its patience is no news."""


class FaultyHandler(http.server.BaseHTTPRequestHandler):
    server: FaultyServer

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.content)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{zlib.crc32(self.server.content)}"')
        self.end_headers()

    def do_GET(self):
        content, wanted = self.server.content, self.headers.get("Range")
        first, last = re.findall(r"\d+", wanted) if wanted else (0, len(content))
        part = range(int(first), min(int(last) + 1, len(content)))
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(part)
        fault = self.server.fault(number)
        if isinstance(fault, int):
            return self.send_error(fault)
        if fault == "shorter file":  # and no word of it
            part = part[: len(part) // 2]
        self.send_response(206)
        end = f"{part.start}-{part.stop - 1}/{len(content)}"
        self.send_header("Content-Range", f"bytes {end}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        told = part[: len(part) // 2] if fault in ("stall", "reset") else part
        self.wfile.write(content[told.start : told.stop])
        if fault == "stall":
            self.wfile.flush()
            self.server.closing.wait()
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)  # close by RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.close()
        return None

    def log_message(self, *_):
        pass


@contextmanager
def serving(shard: Path, fault):
    server = FaultyServer(shard.read_bytes(), fault)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def shard(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOFIT_TIMEOUT_S", "0.3")
    return write_shard(tmp_path / "a.parquet", make_texts(3000), group=500)


FAULTS = ["stall", "reset", 403, 416, 500, "shorter file"]


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_now_and_then_is_resumed_by_range(shard, tmp_path, capsys, fault):
    """Each second answer is bad, so that no read but the smallest succeeds at once."""
    prepare(shard, "--out", tmp_path / "local")
    with serving(shard, lambda number: fault if number % 2 else None) as server:
        prepare(server.address, "--out", tmp_path / "remote")
    assert_same_dataset(tmp_path / "local", tmp_path / "remote")
    assert "trying again in" in capsys.readouterr().err or fault == "shorter file"
    assert sum(map(len, server.asked)) < 12 * shard.stat().st_size, "begun again, not resumed"


TOLD = {
    "stall": "Timeout on reading data",
    "reset": "Response payload is not completed|Connection reset",
    403: "403 Forbidden",
    416: "it ended after",
    500: "500 Internal Server Error",
    "shorter file": "it ended after",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_for_good_ends_in_a_line_after_some_tries(shard, tmp_path, capsys, fault):
    def sends_nothing_more(number):
        return fault if number > 1 else None

    with (
        serving(shard, sends_nothing_more) as server,
        pytest.raises(InputError, match=f"cannot read {server.address}: .*({TOLD[fault]})") as told,
    ):
        prepare(server.address, "--out", tmp_path / "out")
    assert len(str(told.value).splitlines()) == 1
    assert capsys.readouterr().err.count("trying again") >= TRIES - 1
    assert not (tmp_path / "out/meta.json").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt.zst"])
def test_lines_at_an_address_are_resumed_by_range_too(shard, tmp_path, name):
    texts = make_texts(3000)
    rows = [json.dumps({"text": text}) for text in texts]
    content = "\n".join(rows if "jsonl" in name else texts).encode()
    codec = {"gz": "gzip", "zst": "zstd"}.get(name.rpartition(".")[2])
    with (
        pa.CompressedOutputStream(str(tmp_path / name), codec)
        if codec
        else ((tmp_path / name).open("wb")) as file
    ):
        file.write(content)
    flags = ("--separator", r"\n")
    prepare(tmp_path / name, "--out", tmp_path / "local", *flags)
    with serving(tmp_path / name, lambda number: "reset" if number % 2 else None) as server:
        address = server.address.replace("a.parquet", name)
        prepare(address, "--out", tmp_path / "remote", *flags)
    assert_same_dataset(tmp_path / "local", tmp_path / "remote")
    local, remote = read_meta(tmp_path / "local"), read_meta(tmp_path / "remote")
    assert local["counts"] == remote["counts"]
    assert remote["sources"][0]["rows"] == len(texts)


def test_an_address_may_ask_for_more_and_its_key_is_not_kept(shard, tmp_path, capsys):
    with serving(shard, lambda number: 500 if number < 2 else None) as server:
        prepare(f"{server.address}?download=true&key=secret", "--out", tmp_path / "remote")
    assert "secret" not in (tmp_path / "remote/meta.json").read_text()
    said = "".join(capsys.readouterr())
    assert "trying again" in said and "secret" not in said
    prepare(shard, "--out", tmp_path / "local")
    assert_same_dataset(tmp_path / "local", tmp_path / "remote")


def test_what_is_not_there_is_not_asked_for_again(shard, tmp_path, capsys):
    with (
        serving(shard, lambda number: 404) as server,
        pytest.raises(InputError, match="cannot read"),
    ):
        server.RequestHandlerClass = OnlyGet
        prepare(server.address, "--out", tmp_path / "out")
    assert "trying again" not in capsys.readouterr().err
    with pytest.raises(InputError, match=r"cannot read .*Connect call failed"):
        prepare(server.address, "--out", tmp_path / "out")  # nobody listens any more


class OnlyGet(FaultyHandler):
    def do_HEAD(self):
        self.send_error(405)


def test_a_shard_of_another_size_at_the_same_address_is_not_mixed_in(shard, tmp_path):
    other = write_shard(tmp_path / "b.parquet", make_texts(2000, seed=1)).read_bytes()
    with serving(shard, lambda number: None) as server:

        def exchanged(number):
            if number >= 2:
                server.content = other
            return 500 if number == 2 else None

        server.fault = exchanged
        with pytest.raises(InputError, match=rf"it has {len(other):,} bytes now, not"):
            prepare(server.address, "--out", tmp_path / "out")


def test_half_made_output_is_not_gone_on_from_when_the_address_has_other_content(shard):
    with serving(shard, lambda number: None) as server:
        [before] = open_shards([server.address], "text")
        assert open_shards([server.address], "text") == [before]
        server.content = server.content[:50] + b"?" + server.content[51:]
        [after] = open_shards([server.address], "text")
    assert after.bytes == before.bytes
    options = Options(0.01, "text", None, None, 9)
    assert identity([after], options) != identity([before], options)


def test_as_a_script_it_ends_with_exit_code_2_and_then_goes_on(shard, tmp_path):
    prepare(shard, "--out", tmp_path / "local")
    command = [sys.executable, prepare_fineweb.__file__]
    with serving(shard, lambda number: 500 if number > 3 else None) as server:
        words = [server.address, "--out", tmp_path / "out"]
        failed = processes.run([*command, *words])
        assert failed.returncode == 2
        *tries, last = failed.stderr.splitlines()
        assert all("trying again in" in line for line in tries)
        assert last == f"error: cannot read {server.address}: 500 Internal Server Error"
        server.fault = lambda number: None
        processes.run([*command, *words], check=True)
    assert_same_dataset(tmp_path / "local", tmp_path / "out")
    [source] = read_meta(tmp_path / "out")["sources"]
    assert source["bytes"] == shard.stat().st_size


def test_ctrl_c_does_not_wait_for_an_address(shard, tmp_path):
    """It would be asked for minutes."""
    environment = {**os.environ, "NANOFIT_TIMEOUT_S": "3"}
    with serving(shard, lambda number: 500) as server:
        words = [prepare_fineweb.__file__, server.address, "--out", tmp_path / "out"]
        with (tmp_path / "said").open("w") as said:
            process = processes.start([sys.executable, *words], env=environment, stderr=said)
        processes.wait_for(lambda: text_of(tmp_path / "said").count("trying again") > 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    said = text_of(tmp_path / "said")
    assert said.endswith("continues from here\n")
    assert said.count("trying again") < TRIES - 1


def text_of(path: Path) -> str:
    return path.read_text()


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "inf"])
def test_a_senseless_timeout_is_refused(shard, tmp_path, monkeypatch, given):
    monkeypatch.setenv("NANOFIT_TIMEOUT_S", given)
    with pytest.raises(InputError, match=f"NANOFIT_TIMEOUT_S={given}"):
        prepare("http://127.0.0.1:9/a.parquet", "--out", tmp_path / "out")
