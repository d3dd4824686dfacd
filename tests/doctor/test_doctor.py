"""doctor.py as a person starts it: one screen, an exit code, and no harm done by what it asks."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import doctor
from nanofit.doctor.child import Child
from nanofit.doctor.finding import Finding, problem, refusal, warning
from nanofit.doctor.screen import lines_of, verdict
from tests import processes
from tests.conftest import PROJECT, TINY_MODEL
from tests.processes import children_of, wait_for


def examined(*words: str, cwd: Path, **options):
    return processes.run([sys.executable, PROJECT / "doctor.py", *words], cwd=cwd, **options)


def test_machine_that_is_well_is_told_so_from_any_folder(tiny_dataset, tmp_path):
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}"]
    done = examined(*words, cwd=tmp_path)
    assert done.returncode == 0, done
    *lines, last = done.stdout.splitlines()
    assert last == "All is well for a run."
    topics = [line[9:19].strip() for line in lines if line.startswith("ok")]
    assert topics == ["system", "disk", "data", "card", "torch", "memory"]
    assert not any(tmp_path.iterdir())


def test_problem_is_an_exit_code_and_a_remedy_for_programs_too(tmp_path):
    done = examined(*TINY_MODEL, "--dataset=./nothing", "--device=cuda", "--json", cwd=tmp_path)
    assert done.returncode == 1, done
    told = json.loads(done.stdout)
    assert not told["is_well"]
    problems = {one["topic"]: one for one in told["findings"] if one["state"] == "problem"}
    assert problems.keys() == {"data", "torch"}
    assert "prepare_fineweb.py" in problems["data"]["remedy"]
    assert problems["torch"]["remedy"] == "use device = 'auto'"
    assert told["measured"] is None


def test_only_a_card_is_measured_and_the_rest_told_all_the_same(tiny_dataset, tmp_path):
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", "--measure"]
    done = examined(*words, cwd=tmp_path)
    assert done.returncode == 0, done
    assert "warning  measured  nothing: --measure is for a card, and a run would" in done.stdout
    assert done.stdout.endswith("All is well for a run, 1 warning.\n")
    assert not any(tmp_path.iterdir())


def test_where_torch_does_not_load_nothing_is_measured(tiny_dataset, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", "--measure", "--json"]
    done = examined(*words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(broken)})
    assert done.returncode == 1, done
    told = json.loads(done.stdout)
    states = {one["topic"]: (one["state"], one["text"]) for one in told["findings"]}
    assert states["torch"] == (
        "problem",
        "it does not load: ImportError: libcudart.so.13: cannot open",
    )
    assert states["measured"] == ("warning", "nothing, for the problem above")
    assert told["measured"] is None
    assert not done.stderr


def test_report_that_cannot_be_written_is_a_problem_and_no_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = doctor._written({"card": "some"})
    assert (written.state, json.loads(Path("doctor.json").read_text())) == ("ok", {"card": "some"})
    Path("doctor.json").unlink()
    Path("doctor.json").mkdir()
    refused = doctor._written({"card": "some"})
    assert refused.state == "problem" and "doctor.json cannot be written (" in refused.text
    assert [path.name for path in tmp_path.iterdir()] == ["doctor.json"]


@pytest.mark.slow
@pytest.mark.parametrize("has_compiler", [True, False])
def test_compiling_is_tried_and_a_missing_compiler_told(tiny_dataset, tmp_path, has_compiler):
    if has_compiler and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    tools = tmp_path / "tools"  # what a path without a compiler has
    tools.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "CXX"}
    path = os.environ["PATH"] if has_compiler else str(tools)
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", "--compile=True"]
    done = examined(*words, cwd=tmp_path, env={**variables, "PATH": path})
    assert done.returncode == 0, done
    assert ("torch.compile works, by " in done.stdout) == has_compiler
    missing = (
        "warning  compile   torch.compile does not work, as there is no C++ compiler; runs stay"
    )
    assert (missing in done.stdout) != has_compiler
    assert done.stdout.endswith(f"for a run{'' if has_compiler else ', 1 warning'}.\n")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_child_that_hangs_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    room = tmp_path / "nanofit" / "doctor"
    room.mkdir(parents=True)
    (room / "hang.py").write_text(
        "import os, pathlib, subprocess, sys\n"
        f"pathlib.Path({str(tmp_path / 'begun')!r}).write_text(str(os.getpid()))\n"
        "print('doctor: {\"begun\": true}', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    )
    monkeypatch.setattr("nanofit.doctor.child.PROJECT", tmp_path)
    with Child("hang") as child:
        begun = tmp_path / "begun"
        wait_for(begun.exists)
        wait_for(lambda: children_of(int(begun.read_text() or 0)))
        [grandchild] = children_of(int(begun.read_text()))
        wait_for(lambda: "sleep" in command_of(grandchild))
        answer = child.answer(timeout_s=2)
    assert answer.told == {"begun": True}
    assert answer.reason.startswith("no answer within ")
    wait_for(lambda: "sleep" not in command_of(grandchild))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getpid(), 4)", "killed by signal 4 (SIGILL)"),
        ("raise SystemExit('no such thing')", "no such thing"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_why_a_child_told_nothing_is_told(tmp_path, monkeypatch, code, reason):
    room = tmp_path / "nanofit" / "doctor"
    room.mkdir(parents=True)
    (room / "fail.py").write_text(code)
    monkeypatch.setattr("nanofit.doctor.child.PROJECT", tmp_path)
    with Child("fail") as child:
        answer = child.answer(timeout_s=60)
    assert (answer.told, answer.reason) == ({}, reason)


def test_a_line_of_an_error_is_split_into_what_is_wrong_and_what_to_do():
    found = refusal("data", "one; two; do this")
    assert (found.text, found.remedy) == ("one; two", "do this")
    assert refusal("data", "no way out").text == "no way out"


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_screen_is_no_wider_than_the_terminal_and_says_all(columns):
    words = " ".join(f"word{number}" for number in range(40))
    lines = list(lines_of(warning("disk", words, words.upper()), columns))
    assert max(map(len, lines)) <= columns
    told = " ".join(" ".join(lines).split())
    assert told == f"warning disk {words} do {words.upper()}"
    assert all(line.startswith(" " * 19) for line in lines[1:] if "  do" not in line)


def test_what_others_named_does_nothing_to_the_terminal():
    [line] = lines_of(Finding("memory", "used by \x1b[31mprogram"), 80)
    assert "\x1b" not in line


def test_verdict_counts():
    fine, trap, wrong = Finding("a", "b"), warning("a", "b", "c"), problem("a", "b", "c")
    assert verdict([fine]) == "All is well for a run."
    assert verdict([fine, trap, trap]) == "All is well for a run, 2 warnings."
    assert verdict([trap, wrong]) == "1 problem would stop a run or spoil it."
