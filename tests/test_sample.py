"""sample.py as its user calls it, from a checkpoint alone."""

import os
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model import GPT
from nanofit.settings.config import flatten
from nanofit.settings.shape import GPTConfig
from tests import processes
from tests.conftest import PROJECT

if sys.platform != "win32":
    import fcntl
    import pty
    import termios

CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """An untrained model that has GPT-2's vocabulary."""
    torch.manual_seed(0)
    shape = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32)
    folder = tmp_path_factory.mktemp("run")
    content = {"model": GPT(shape).state_dict(), "model_args": flatten(shape), "iter_num": 5}
    torch.save(content, folder / "ckpt-00000005.pt")
    return folder


def test_same_seed_gives_the_same_text_and_the_prompt_comes_first(run_folder):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=12", "--start=Zwölf Boxkämpfer"]
    one, two = sample(*flags, "--seed=3"), sample(*flags, "--seed=3")
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("Zwölf Boxkämpfer")
    assert one.stdout == two.stdout != sample(*flags, "--seed=4").stdout


def test_samples_are_numbered_and_the_second_is_that_of_the_next_seed(run_folder):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=8", "--top_p=0.9"]
    both = sample(*flags, "--num_samples=2", "--seed=10").stdout
    second = both.partition("--- sample 2 of 2, seed 11\n")[2]
    assert second == sample(*flags, "--seed=11").stdout


def test_a_sample_is_that_of_its_seed_whatever_it_is_computed_with(run_folder):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=8", "--repetition_penalty=1.2"]
    several = sample(*flags, "--num_samples=18", "--seed=5").stdout  # more than fit at once
    pieces = re.split(r"--- sample \d+ of 18, seed (\d+)\n", several)
    texts = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    assert list(texts) == [str(seed) for seed in range(5, 23)]
    assert len(set(texts.values())) == 18
    for seed in ("5", "9", "22"):
        assert texts[seed] == sample(*flags, f"--seed={seed}").stdout


def test_chat_goes_on_line_by_line_through_a_pipe(run_folder):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=6", "--seed=3"]
    lines = "Once upon\n\n/retry\n/bogus\n/reset\nOnce upon\n/quit\nno more\n"
    done = sample(*flags, "--chat", stdin=lines)
    assert done.returncode == 0, done.stderr
    first, second, again, anew, nothing = done.stdout.split("\n")
    assert sample(*flags, "--start=Once upon").stdout == f"Once upon{first}\n"
    assert len({first, second, again, anew}) == 4 and nothing == ""
    opening, unknown, forgotten = done.stderr.splitlines()
    assert "you write, it goes on" in opening
    assert "no command /bogus" in unknown and "forgotten" in forgotten
    assert sample(*flags, "--chat", "--start=Once upon").stdout == f"Once upon{first}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such terminals")
def test_chat_on_a_terminal_is_stopped_by_ctrl_c_and_ended_by_ctrl_d(run_folder):
    # The likeliest tokens of this model end no document: it would go on for ever.
    flags = ["--chat", "--max_new_tokens=1000000", "--temperature=0"]
    words = [f"--out_dir={run_folder}", *flags]
    with Terminal([sys.executable, PROJECT / "sample.py", *words]) as terminal:
        assert "you write, it goes on" in terminal.read_until("> ")
        terminal.type("Once\n")
        terminal.read_some(2000)
        terminal.type(CTRL_C)
        terminal.read_until("\n> ")
        terminal.type("half a line" + CTRL_C)
        terminal.read_until("\n> ")
        terminal.type("/help\n")
        assert "32 tokens at most" in terminal.read_until("\n> ")
        terminal.type(UP)  # the line before: there is a history
        terminal.read_until("/help")
        terminal.type("\n")
        assert "32 tokens at most" in terminal.read_until("\n> ")
        terminal.type("\n")
        terminal.read_some(2000)
        terminal.type(CTRL_C)
        terminal.read_until("\n> ")
        terminal.type(CTRL_D)
        assert terminal.process.wait(60) == 0
    assert "Traceback" not in terminal.shown and "interrupted" not in terminal.shown


def test_prompt_may_come_from_a_file_or_from_standard_input(run_folder, tmp_path):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=4"]
    (tmp_path / "prompt.txt").write_text("Once upon a time\n")
    from_text = sample(*flags, "--start=Once upon a time").stdout
    assert sample(*flags, f"--start=FILE:{tmp_path}/prompt.txt").stdout == from_text
    assert sample(*flags, "--start=-", stdin="Once upon a time\n").stdout == from_text


@pytest.mark.skipif(sys.platform == "win32", reason="it closes no streams")
@pytest.mark.parametrize("reader", ["--start=-", "--chat"])
def test_standard_input_that_is_closed_is_an_empty_one(run_folder, reader):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=4", reader]
    shell = ["sh", "-c", 'exec "$@" <&-', "sh"]
    closed = processes.run([*shell, sys.executable, PROJECT / "sample.py", *flags])
    empty = sample(*flags)
    assert closed.returncode == empty.returncode == 0, closed.stderr
    assert (closed.stdout, closed.stderr) == (empty.stdout, empty.stderr)


def test_bytes_that_are_no_utf_8_are_read_even_where_python_would_refuse_them(run_folder):
    flags = [f"--out_dir={run_folder}", "--max_new_tokens=4"]
    expected = sample(*flags, "--start=Once \ufffd upon").stdout
    assert expected.startswith("Once \ufffd upon")
    for reader, begins in (("--start=-", ""), ("--chat", "Once \ufffd upon")):
        done = processes.run(
            [sys.executable, PROJECT / "sample.py", *flags, reader],
            stdin="Once \udcff upon\n",
            encoding="utf-8",
            errors="surrogateescape",
            variables={"PYTHONIOENCODING": "utf-8:strict"},  # as a forked one's is anyway
        )
        assert done.returncode == 0, done.stderr
        assert begins + done.stdout == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out_dir=nowhere"], "no checkpoint in nowhere"),
        (["--out_dir=LICENSE"], "is a file, no run's folder; give it as --checkpoint=LICENSE"),
        (["--checkpoint=nowhere.pt"], "no weights at nowhere.pt"),
        (["--temperature=-1"], "-1 is less than 0"),
        (["--temperature=nan"], "nan is less than 0"),
        (["--device=foo"], "device = 'foo' is none of"),
        (["--start=FILE:nowhere.txt"], "cannot read the prompt"),
        (["--repetition_penalty=0"], "0 is less than 0.01"),
        (["--chat", "--start=-"], "--chat reads standard input itself"),
        (["--chat", "--num_samples=2"], "--chat writes one text"),
        (["--top_p=1.5"], "1.5 is more than 1, which is all of them; --help shows how"),
        (["--max_new=5"], "unrecognized arguments: --max_new=5; --help shows how"),
    ],
)
def test_bad_input_is_told_in_a_line(run_folder, flags, message):
    done = sample(f"--out_dir={run_folder}", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


class Terminal:
    """A process on a terminal of its own, whose keys it gets as a person's."""

    def __init__(self, command):
        self._ours, theirs = pty.openpty()
        self.shown = ""
        self.process = processes.start(
            command,
            env={**os.environ, "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C reaches it
        )
        os.close(theirs)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_) -> None:
        processes.end(self.process)
        os.close(self._ours)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read_until(self, ending: str) -> str:
        """What is shown until it ends like this and then waits."""
        return self._read(lambda new: new.endswith(ending) and not self._is_ready(0.2))

    def read_some(self, characters: int) -> str:
        return self._read(lambda new: len(new) >= characters)

    def _read(self, is_enough: Callable[[str], bool]) -> str:
        content, new = b"", ""
        while not is_enough(new):
            assert self._is_ready(120), f"nothing more after\n{self.shown}"
            content += os.read(self._ours, 65536)
            new = re.sub(r"\x1b\[\??\w+|\r", "", content.decode(errors="replace"))
        self.shown += new
        return new

    def _is_ready(self, within_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], within_s)
        return bool(ready)


def sample(*flags: str, stdin: str = "") -> subprocess.CompletedProcess:
    return processes.run_script("sample.py", *flags, cwd=PROJECT, stdin=stdin)
