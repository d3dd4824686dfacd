"""Errors are one line and an exit code; progress is plain text in a pipe and live on a terminal."""

import os
import pty
import re
import sys
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from nanofit.settings.config import PROJECT
from nanofit.terminal import Progress, compact, duration
from tests import processes
from tests.disturb import obey_modes

PLAIN_ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), "TERM": "xterm"}
SCRIPT = """
from nanofit.terminal import InputError, run_script

def main(argv):
    {body}

run_script(main)
"""
REPORTING = """
from nanofit.terminal import Progress

with Progress("counting", 4, every_s={every_s}) as progress:
    for done in range(1, 5):
        progress.update(done, f"seen {{done}}")
    progress.line("done [bold]all[/bold] \u00d7 4 " + "long " * 60, style="yellow", bold=["4"])
"""


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("nanofit.terminal.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def run(code, *args, **environment):
    command = [sys.executable, "-c", code, *args]
    return processes.run(command, env=PLAIN_ENVIRONMENT | environment, encoding="utf-8")


def run_on_terminal(code, **environment):
    main_end, terminal = pty.openpty()
    with processes.start(
        [sys.executable, "-c", code],
        env=PLAIN_ENVIRONMENT | environment,
        stdout=terminal,
        stderr=terminal,
    ) as child:
        os.close(terminal)
        shown = read_all(main_end)
    assert child.returncode == 0, shown
    return shown


def run_main(body, *args, **environment):
    done = run(SCRIPT.format(body=body), *args, **environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("body", "code", "stdout", "stderr"),
    [
        ("print(argv)", 0, "['a', '--b=c']\n", ""),
        ("return 3", 3, "", ""),
        ("raise InputError('no x; use y')", 2, "", "error: no x; use y\n"),
        ("raise KeyboardInterrupt", 130, "", "interrupted\n"),
    ],
)
def test_a_script_ends_with_one_line_and_its_exit_code(body, code, stdout, stderr):
    assert run_main(body, "a", "--b=c") == (code, stdout, stderr)


@pytest.mark.skipif(sys.platform != "linux", reason="takes root's privileges as Linux does")
@pytest.mark.parametrize(
    "words",
    [
        ["report.py", "locked"],
        ["evaluate.py", "locked"],
        ["export.py", "locked", "hf"],
        ["sample.py", "--out_dir=locked"],
    ],
    ids=" ".join,
)
def test_a_folder_that_one_may_not_enter_is_told_in_a_line(words, tmp_path):
    (tmp_path / "locked").mkdir(mode=0)
    options = {"cwd": tmp_path, "preexec_fn": obey_modes}
    if processes.run(["ls", "locked"], **options).returncode == 0:
        pytest.skip("root may enter all folders here")
    done = processes.run([sys.executable, PROJECT / words[0], *words[1:]], **options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert re.match(r"error: locked/\S+: no permission; give another place", done.stderr)


def test_our_own_mistakes_keep_their_traceback():
    code, _, stderr = run_main("assert False, 'our mistake'")
    assert code == 1
    assert "Traceback" in stderr and "our mistake" in stderr


def test_an_error_of_another_process_names_it():
    body = "raise InputError('no x')"
    results = [run_main(body, RANK=str(rank), WORLD_SIZE="2") for rank in range(2)]
    assert [code for code, _, _ in results] == [2, 2]
    assert [stderr for _, _, stderr in results] == ["error: no x\n", "[rank 1] error: no x\n"]


def test_progress_in_a_pipe_is_plain_lines_with_the_time_left():
    *lines, last = run(REPORTING.format(every_s=0)).stdout.splitlines()
    assert [re.sub(r"\d+s$", "_s", line) for line in lines] == [
        "counting 25%  seen 1  eta _s",
        "counting 50%  seen 2  eta _s",
        "counting 75%  seen 3  eta _s",
    ]
    assert last.rstrip() == ("done [bold]all[/bold] × 4 " + "long " * 60).rstrip()


def test_without_a_note_there_is_no_gap_for_it():
    line, *_ = run(
        REPORTING.replace('f"seen {{done}}"', '""').format(every_s=0)
    ).stdout.splitlines()
    assert re.sub(r"\d+s$", "_s", line) == "counting 25%  eta _s"


def test_progress_leaves_standard_output_to_a_result():
    to_errors = REPORTING.replace("4, every_s", "4, stream=sys.stderr, every_s")
    done = run("import sys\n" + to_errors.format(every_s=0))
    assert done.stdout == ""
    assert "counting 25%  seen 1" in done.stderr


@pytest.mark.parametrize("demand", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_no_escape_code_reaches_a_pipe(demand):
    done = run(REPORTING.format(every_s=0), **demand)
    assert done.returncode == 0 and done.stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", done.stdout + done.stderr)


def test_lines_in_a_pipe_come_no_more_often_than_asked(clock, capsys):
    with Progress("counting", 100, every_s=10) as progress:
        for done in range(1, 101):
            clock.now += 3
            progress.update(done)
    percents = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert percents == [f"{done}%" for done in range(4, 100, 4)]  # every 12 seconds


def test_a_terminal_gets_one_live_line():
    shown = run_on_terminal(REPORTING.format(every_s=0))
    assert "\x1b[" in shown and "eta" in shown
    assert "counting 25%  seen 1" not in shown


def test_only_a_terminal_gets_colour():
    shown = run_on_terminal(REPORTING.format(every_s=0))
    assert "\x1b[33mdone" in shown and "\x1b[1;33m4\x1b[0m" in shown
    assert "\x1b" not in run(REPORTING.format(every_s=0)).stdout


LONG = (
    "step 6    out of memory: now eager, 2 sequences a pass; " + "more is tried again " * 8 + "end"
)


@pytest.mark.parametrize(
    ("text", "column"),
    [(LONG, 10), (f"warning {LONG[10:]}", 8), (LONG[10:], 0), ("   0  eager  4 × 1  " + LONG, 30)],
)
def test_a_long_line_goes_on_under_its_last_column_on_a_terminal(text, column):
    code = f"from nanofit.terminal import folded; print(folded({text!r}))"
    first, *more = run_on_terminal(code, COLUMNS="80").splitlines()
    assert len(more) >= 2
    assert all(len(line) <= 80 for line in (first, *more))
    assert {len(line) - len(line.lstrip()) for line in more} == {column}
    assert " ".join([first, *(line.strip() for line in more)]) == text
    assert run(code, COLUMNS="80").stdout == f"{text}\n"


def test_an_error_goes_on_under_itself_on_a_terminal_and_keeps_paths_whole():
    path = "/" + "folder/" * 20 + "ckpt.pt"
    lines = ["two problems:", f"  {'no such thing ' * 10}here", f"  {path} is {'old ' * 12}"]
    error = "\n".join(line.rstrip() for line in lines)
    code = f"from nanofit.terminal import InputError, say_error; say_error(InputError({error!r}))"
    shown = run_on_terminal(code, COLUMNS="80").splitlines()
    assert " ".join(" ".join(shown).split()) == f"error: {' '.join(error.split())}"
    assert [line for line in shown if len(line) > 80] == [f"  {path}"]
    assert run(code, COLUMNS="80").stderr == f"error: {error}\n"


def test_a_number_is_not_parted_from_its_unit_on_a_terminal():
    text = "step 6    " + "peak 512 MiB of " * 20 + "1.2 GB"
    shown = run_on_terminal(f"from nanofit.terminal import folded; print(folded({text!r}))")
    assert "\n" in shown.strip() and not re.search(r"\d\s*$", shown, re.MULTILINE)
    assert " ".join(shown.split()) == " ".join(text.split())


FLOWING = """
from nanofit.terminal import FlowingText
shown = FlowingText()
for start in range(0, len(text), 3):  # tokens know nothing of words
    shown.add(text[start : start + 3])
shown.end()
"""


@pytest.mark.parametrize(
    "text",
    [
        "One morning the baker walked to the harbour. " * 9 + "\n\n  The end, which is long. " * 4,
        "東京都 渋谷区 " * 30,  # each character takes two columns
    ],
)
def test_text_in_pieces_is_broken_between_words_on_a_terminal_alone(text):
    code = f"text = {text!r}\n{FLOWING}"
    lines = run_on_terminal(code, COLUMNS="40").replace("\r", "").split("\n")
    assert max(map(cell_len, lines)) <= 40 < max(map(len, text.splitlines()))
    assert " ".join("\n".join(lines).split()) == " ".join(text.split())
    assert run(code, COLUMNS="40").stdout == f"{text}\n"


def test_text_without_gaps_is_shown_as_it_comes():
    code = f"text = {'x' * 100!r}\n{FLOWING.replace('shown.end()', 'print(flush=True)')}"
    assert len(run_on_terminal(code, COLUMNS="40").strip()) > 60


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_live_line_fits_the_terminal(columns):
    code = (
        "from nanofit.terminal import Progress\n"
        "with Progress('training', 10**5) as progress:\n"
        "    progress.update(10**4, 'loss 3.1234  56.1k tok/s  mfu 40.0%')\n"
    )
    shown = run_on_terminal(code, COLUMNS=str(columns))
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown))
    [line] = {re.sub(r"eta .*", "eta", line) for line in lines if "mfu" in line}
    assert line.startswith("training ") and " 10% loss 3.1234  56.1k tok/s  mfu 40.0% eta" in line
    assert max(map(len, lines)) <= columns


def test_a_quiet_progress_says_nothing(capfd):
    with Progress("counting", 2, every_s=0, quiet=True) as progress:
        progress.update(1)
        progress.line("hello")
    assert capfd.readouterr() == ("", "")


def test_time_left_counts_only_what_this_launch_has_done(clock):
    progress = Progress("training", 1000, done=400)
    assert progress.eta() == "-"
    clock.now, progress.done = clock.now + 60, 500
    assert progress.eta() == "5m00s"  # 100 a minute, 500 to go


def test_time_left_counts_anew_from_where_a_job_has_gone_back_to(clock):
    progress = Progress("training", 1000, done=400, every_s=10**6)
    clock.now += 60
    progress.update(500)
    progress.update(300)
    assert progress.eta() == "-"
    clock.now += 60
    progress.update(350)
    assert progress.eta() == "13m00s"  # 50 a minute, 650 to go


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (42.4, "42s"),
        (59.6, "1m00s"),
        (190, "3m10s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (86399, "23h59m"),
        (6 * 86400 + 4 * 3600, "6d04h"),
        (400 * 86400, "400d00h"),
    ],
)
def test_durations_read_as_people_say_them(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (12.34, "12.3"),
        (950, "950"),
        (999.7, "1k"),
        (1000, "1k"),
        (56_123, "56.1k"),
        (491_520, "492k"),
        (524_288, "0.524M"),
        (1_250_000, "1.25M"),
        (730_000_000, "0.73B"),
        (122_880_000_000, "123B"),
    ],
)
def test_counts_take_at_most_four_digits(number, text):
    assert compact(number) == text


def read_all(descriptor):
    pieces = []
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # Linux says so when the other end is closed
            piece = b""
        if not piece:
            os.close(descriptor)
            return b"".join(pieces).decode()
        pieces.append(piece)
