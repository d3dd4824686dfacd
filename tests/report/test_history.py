"""What is read of a run's records, against a run whose every record is known."""

import json
import math
from pathlib import Path

import pytest

from nanofit.report.history import read_history
from nanofit.terminal import InputError
from tests.conftest import read_metrics, read_records

RUN = {"settings": {}, "data": {}, "machine": {}, "plan": {}, "memory": {}}


def record(kind: str, step: int, **values) -> dict:
    return {"kind": kind, "step": step, "tokens": 8 * step, "seconds": 1.0 * step, **values}


def step(number: int, loss: float | None) -> dict:
    return record("step", number, loss=loss, lr=1e-3, grad_norm=1.0, tokens_per_s=5.0)


def write(folder: Path, *records: dict | str) -> Path:
    lines = (one if isinstance(one, str) else json.dumps(one) for one in records)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_what_a_later_launch_repeats_counts_once(tmp_path):
    read = read_history(
        write(
            tmp_path,
            record("run", 0, **RUN),
            *(step(number, 9.0 - number) for number in range(4)),
            record("eval", 2, val_loss=7.0),
            record("sample", 2, prompt="One", text="1"),
            record("sample", 2, prompt="Two", text="2"),
            record("eval", 4, val_loss=6.0),
            record("run", 2, **RUN),
            record("eval", 2, val_loss=7.5),
            record("sample", 2, prompt="One", text="3"),
            step(2, 6.5),
            record("event", 2, name="rolled back"),
            step(2, 6.25),
            step(3, None),  # which was no number
        )
    )
    assert list(read.steps["step"]) == [0, 1, 2, 3]
    assert list(read.steps["loss"][:3]) == [9.0, 8.0, 6.25]
    assert math.isnan(read.steps["loss"][3])
    # What was measured before step 2 is of the state that both went on from.
    assert [one["val_loss"] for one in read.evaluations] == [7.5]
    assert [one["prompt"] + one["text"] for one in read.samples] == ["One3", "Two2"]
    assert [one["step"] for one in read.runs] == [0, 2]
    assert read.run is read.runs[-1]


def test_a_real_run_is_read_whole(tiny_run, tmp_path):
    assert tiny_run("--max_iters=6").returncode == 0
    assert tiny_run("--max_iters=12").returncode == 0
    read = read_history(tmp_path / "out")
    assert list(read.steps["step"]) == list(range(12))
    assert list(read.steps["loss"]) == list(read_metrics(tmp_path / "out", "step", "loss").values())
    assert [one["step"] for one in read.evaluations] == [6, 12]
    assert read.runs == read_records(tmp_path / "out", "run")
    assert read.events == read_records(tmp_path / "out", "event")
    assert read.damaged_lines == 0
    losses = [one["val_loss"] for one in read_records(tmp_path / "out", "eval")]
    assert read.best()["val_loss"] == min(losses)


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "step", "st',
        "[1, 2]",
        "{}",
        '{"kind": ["step"], "step": 1, "tokens": 1, "seconds": 1}',
        json.dumps(record("step", 1)),
        json.dumps(step(1, 2.0) | {"loss": "2.0"}),
        json.dumps(record("eval", 1)),
        json.dumps(step(1, 2.0) | {"step": True}),
        json.dumps(step(1, 2.0) | {"tokens_per_s": None}),
        json.dumps(step(1, 2.0) | {"tokens": 10**400}),
        json.dumps(step(1, float("nan"))),
        json.dumps(record("run", 1, **RUN) | {"plan": []}),
        "[" * 100_000,
        "\x00\x01",
    ],
)
def test_a_damaged_line_is_counted_and_spoils_no_other(tmp_path, line):
    read = read_history(write(tmp_path, step(0, 3.0), line, step(2, 1.0)))
    assert list(read.steps["loss"]) == [3.0, 1.0]
    assert read.damaged_lines == 1


def test_steps_done_again_without_a_word_of_it_count_once(tmp_path):
    """As of runs that are older than records of a launch."""
    read = read_history(write(tmp_path, *(step(number, 1.0) for number in (0, 1, 2, 3, 1, 2))))
    assert list(read.steps["step"]) == [0, 1, 2]


def test_what_a_step_may_lack_is_nan(tmp_path):
    read = read_history(write(tmp_path, step(0, 1.0) | {"mfu": "0.4"}, step(1, 1.0) | {"mfu": 0.4}))
    assert math.isnan(read.steps["mfu"][0])
    assert read.steps["mfu"][1] == 0.4


def test_kinds_of_a_newer_version_are_no_damage(tmp_path):
    read = read_history(write(tmp_path, step(0, 3.0), record("weather", 1, sky="blue")))
    assert (len(read.steps), read.damaged_lines) == (1, 0)


@pytest.mark.parametrize("content", [None, "", "hello\n"])
def test_a_folder_without_a_run_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(InputError, match="train"):
        read_history(tmp_path)
