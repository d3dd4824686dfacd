"""report.py as its user calls it."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.conftest import PROJECT, read_records
from tests.report import stories

DATA = re.compile(r'<script type="application/json" id="data">(.*)</script>')


def report(*words: str | Path, cwd: Path = PROJECT, **environment: str):
    command = [sys.executable, PROJECT / "report.py", *words]
    return processes.run(command, cwd=cwd, env=os.environ | environment)


def data_in(page: Path) -> dict:
    (found,) = DATA.findall(page.read_text(encoding="utf-8"))
    return json.loads(found)


def test_a_real_run_is_told_as_it_was(tiny_run, tmp_path):
    assert tiny_run("--max_iters=6", "--eval_interval=3").returncode == 0
    assert tiny_run("--max_iters=12", "--eval_interval=3").returncode == 0
    done = report("out", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "wrote out/report.html\nwrote out/report.png\n"
    out = tmp_path / "out"
    (run,) = data_in(out / "report.html")["runs"]
    assert (run["state"], run["name"]) == ("finished", "out")
    losses = {record["step"]: record["loss"] for record in read_records(out, "step")}
    assert run["curve"]["loss"] == pytest.approx(list(losses.values()), rel=1e-5)
    evaluations = {record["step"]: record["val_loss"] for record in read_records(out, "eval")}
    assert run["evaluations"]["val_loss"] == pytest.approx(list(evaluations.values()), rel=1e-5)
    assert run["verdict"].startswith("12 steps in ")
    (change,) = [mark["text"] for mark in run["marks"] if mark["text"].startswith("launched")]
    assert "max_iters 12 (was 6)" in change
    assert run["memory"]["stages"][0]["components"]
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_needs_nothing_but_itself(tmp_path):
    assert report(stories.write(tmp_path, stories.whole_run())).returncode == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    written_by_us = page.replace(DATA.search(page)[0], "")
    assert "uPlot" in written_by_us
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!data:)\w""", written_by_us)


def test_without_matplotlib_a_line_says_so_and_the_page_is_there(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "matplotlib.py").write_text("raise ImportError('not here')")
    stories.write(tmp_path, stories.whole_run())
    done = report(tmp_path, PYTHONPATH=str(tmp_path / "none"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip install 'matplotlib" in done.stdout
    assert sorted(place.name for place in tmp_path.iterdir()) == [
        *("metrics.jsonl", "none", "report.html")
    ]


def test_quiet_says_nothing_and_out_goes_elsewhere(tmp_path):
    one = stories.write(tmp_path / "one", stories.whole_run())
    other = stories.write(tmp_path / "other", [stories.launch()])
    done = report("one", "other", "one", "--quiet", "--out", "both.html", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [run["name"] for run in data_in(tmp_path / "both.html")["runs"]] == ["one", "other"]
    assert (tmp_path / "both.png").exists()
    assert not (one / "report.html").exists()
    assert not (other / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "no metrics.jsonl in nowhere; give the out_dir of a run"),
        (["empty"], "has no record of a run; train first"),
        (["run", "nowhere"], "no metrics.jsonl in nowhere"),
        (["nowhere", "--watch"], "no metrics.jsonl in nowhere"),
        (["run", "--out", "gone/page.html"], "gone/page.html cannot be written"),
        (["page-alone"], "page-alone/report.png cannot be written (Is a directory)"),
        (["run", "--out", "page.png"], "name it with .html"),
        (["run", "--port", "8000"], "--port goes with --watch"),
        (["run", "--watch", "--port", "70000"], "port 70000 cannot be used"),
        (["run", "--watch", "--out", "page.html"], "leave --out or --watch out"),
        ([], "OUT_DIR; --help shows how"),
        (["run", "--color"], "unrecognized arguments: --color; --help shows how"),
    ],
)
def test_bad_input_is_told_in_a_line(tmp_path, words, message):
    stories.write(tmp_path / "run", stories.whole_run())
    stories.write(tmp_path / "empty", ["hello"])
    stories.write(tmp_path / "page-alone", stories.whole_run())
    (tmp_path / "page-alone/report.png").mkdir()
    done = report(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == "wrote page-alone/report.html\n" * (words == ["page-alone"])


@pytest.mark.parametrize("losses", [None, 3.0])
def test_a_long_run_is_drawn_whatever_its_losses_were(tmp_path, losses):
    """Even if no step has a finite one, and it was never evaluated."""
    lost = [stories.step(number, losses, grad_norm=None) for number in range(2001)]
    done = report(stories.write(tmp_path, [stories.launch(), *lost]), "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(sys.platform == "win32", reason="it ends processes in other ways")
def test_a_reader_who_leaves_or_asks_nonsense_is_no_news(tmp_path):
    words = ["report.py", stories.write(tmp_path, stories.whole_run()), "--watch"]
    served = processes.start([sys.executable, *words], cwd=PROJECT)
    port = int(re.search(r":(\d+)/", served.stdout.readline())[1])
    for _ in range(3):
        with connected(port, b"GET / HT") as leaving:  # and closes without waiting for an answer
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert asked(port, "[x") == b""
        assert asked(port, "localhost").startswith(b"HTTP/1.0 200 OK")
    served.send_signal(signal.SIGINT)
    assert served.wait(timeout=120) == 0
    assert served.stderr.read() == ""


def asked(port: int, host: str) -> bytes:
    with connected(port, f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode()) as reader:
        return b"".join(iter(lambda: reader.recv(2**16), b""))


def connected(port: int, words: bytes) -> socket.socket:
    reader = socket.create_connection(("127.0.0.1", port), timeout=30)
    reader.sendall(words)
    return reader


@pytest.mark.skipif(sys.platform != "linux", reason="takes a file that nobody can read")
def test_a_file_that_cannot_be_read_is_told_in_a_line(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/proc/self/mem")
    done = report(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot be read" in done.stderr


def test_reports_written_at_once_are_whole(tmp_path):
    stories.write(tmp_path, stories.whole_run(2000))
    command = [sys.executable, PROJECT / "report.py", tmp_path, "--quiet"]
    several = [processes.start(command, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [one.wait(timeout=300) for one in several] == [0, 0, 0]
    assert data_in(tmp_path / "report.html")["runs"][0]["steps"] == 2000
    assert not list(tmp_path.glob("*.tmp"))
