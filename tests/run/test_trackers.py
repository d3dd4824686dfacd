"""Who else gets records: all of them, and never at the cost of the run."""

import json
import os
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanofit.report.history import read_history
from nanofit.run import trackers
from nanofit.run.trackers import Background, open_sinks
from nanofit.settings.config import RunConfig
from tests import processes
from tests.conftest import PROJECT, TINY_MODEL, read_metrics, read_records
from tests.processes import TIMEOUT_S, children_running, wait_for

STEP = {"kind": "step", "step": 0, "tokens": 8, "seconds": 1.0, "loss": 2.5, "lr": 1e-3}
EVENT = {"kind": "event", "step": 3, "tokens": 24, "seconds": 2.0, "name": "stage", "passes": 4}
SAMPLE = {"kind": "sample", "step": 3, "tokens": 24, "seconds": 2.0, "prompt": "A", "text": " b"}


class Collector:
    """A tracker that fails, or waits, in the call named."""

    def __init__(self, failing: str = "", after: int = 0):
        self.failing, self.after, self.calls = failing, after, []
        self.may_go_on = threading.Event()

    def start(self) -> "Collector":
        self._call("start")
        return self

    def write(self, record: dict) -> None:
        self._call("write", record)

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, record: dict | None = None) -> None:
        self.calls.append((name, record))
        if self.failing == name and sum(call == name for call, _ in self.calls) > self.after:
            raise ConnectionError("the tracker is down")
        if self.failing == f"{name} hangs":
            self.may_go_on.wait()


def test_a_tracker_gets_every_record_in_order():
    collector = Collector()
    sink = Background("tracker", collector.start)
    records = [STEP | {"step": step} for step in range(500)]
    for record in records:
        sink.write(record)
    sink.close()
    calls = [("start", None), *(("write", record) for record in records), ("close", None)]
    assert collector.calls == calls
    assert sink.news() is None


@pytest.mark.parametrize(
    ("failing", "after"), [("start", 0), ("write", 0), ("write", 2), ("close", 0)]
)
def test_a_failing_tracker_is_told_of_once_and_left_alone(failing, after):
    collector = Collector(failing, after)
    sink = Background("tracker", collector.start)
    for _ in range(5):
        sink.write(STEP)
    sink.close()
    assert collector.calls[-1][0] == failing
    news = sink.news()
    assert news.text == (
        "tracker failed (ConnectionError: the tracker is down); going on without it"
    )
    assert news.is_warning and sink.news() is None


def test_a_missing_tracker_is_told_with_the_way_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = RunConfig(out_dir=str(tmp_path), report=False, wandb_log=True)
    [sink] = open_sinks(run, {}, 0)
    sink.write(STEP)
    assert "pip install wandb" in sink.news().text
    sink.close()


@pytest.mark.parametrize("hangs", ["write hangs", "close hangs"])
def test_a_tracker_that_hangs_is_left_behind(monkeypatch, hangs):
    monkeypatch.setattr(trackers, "CLOSE_S", 0.2)
    monkeypatch.setattr(trackers, "MOST_WAITING", 50)
    collector = Collector(hangs)
    sink = Background("tracker", collector.start)
    for _ in range(100):  # none of which waits
        sink.write(STEP)
    sink.close()
    assert sink.news().text.endswith("; going on without it")
    collector.may_go_on.set()


# Weights & Biases, the real one


@pytest.fixture
def tracked_run(tiny_run, tmp_path, monkeypatch):
    """Run train.py with real trackers, none of which reaches a server."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")

    def run(*flags: str):
        done = tiny_run("--wandb_log=True", *flags)
        assert done.returncode == 0, done.stderr
        return done

    return run


def test_wandb_gets_every_number_event_and_setting_and_a_continued_run_continues(
    tracked_run, tmp_path
):
    tracked_run("--max_iters=6")
    tracked_run("--max_iters=12")
    first, second = sorted((tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb"))
    assert first.name == second.name  # by which wandb knows that it is one run
    for file, steps in ((first, range(6)), (second, range(6, 12))):
        sent, config = history(file), settings(file)
        losses = {one["step"]: one["loss"] for one in sent if "loss" in one}
        recorded = read_metrics(tmp_path / "out", "step", "loss")
        assert losses == {step: recorded[step] for step in steps}
        assert config["n_embd"] == 16
    assert config["max_iters"] == 12
    assert config["machine.precision"] == "float32"
    events = [one["event"] for one in sent if "event" in one]
    assert any("resumed in eager" in event for event in events)
    [evaluation] = [one for one in sent if one["step"] == 12 and "val_loss" in one]
    assert evaluation["val_loss"] == read_metrics(tmp_path / "out", "eval", "val_loss")[12]


@pytest.mark.slow
def test_wandb_that_hangs_does_not_hold_up_the_run(tiny_dataset, tmp_path):
    """Its own process is stopped, as good as one that waits for a dead network."""
    out = tmp_path / "out"
    words = [*TINY_MODEL, f"--dataset={tiny_dataset}", f"--out_dir={out}", "--wandb_log=True"]
    environment = os.environ | {"HOME": str(tmp_path), "WANDB_SILENT": "true"}
    command = [sys.executable, PROJECT / "train.py", *words, "--max_iters=1000"]
    said = (tmp_path / "said").open("w")  # a pipe would be held open by what is stopped
    run = processes.start(command, env=environment, cwd=tmp_path, stdout=said, stderr=said)
    written = out / "metrics.jsonl"
    wait_for(lambda: written.exists() and read_records(out, "step"), interval_s=0.001)
    [core] = children_running(run.pid, b"wandb-core")
    os.kill(core, signal.SIGSTOP)
    assert run.wait(TIMEOUT_S) == 0, (tmp_path / "said").read_text()
    told = (tmp_path / "said").read_text()
    assert "wandb did not finish within 60 s; going on without it" in told
    assert [record["step"] for record in read_records(out, "step")] == list(range(1000))


# TensorBoard, by its own reader


def test_tensorboard_shows_the_curve_and_what_was_repeated_once(tracked_run, tmp_path):
    tracked_run("--wandb_log=False", "--tensorboard_log=True", "--max_iters=9")
    for newer in ("out/ckpt-00000009.pt", "out/ckpt-best.pt"):  # as after a crash
        (tmp_path / newer).unlink(missing_ok=True)
    tracked_run("--wandb_log=False", "--tensorboard_log=True", "--max_iters=12")
    shown, run = shown_by_tensorboard(tmp_path / "out"), read_history(tmp_path / "out")
    curves = {
        name: list(zip(run.steps["step"], run.steps[name], strict=True)) for name in ("loss", "lr")
    }
    curves["val_loss"] = [(one["step"], one["val_loss"]) for one in run.evaluations]
    for name, curve in curves.items():
        assert shown[name] == [(step, pytest.approx(value)) for step, value in curve]
    assert any("resumed in eager" in text for _, text in shown["event/resumed"])


@pytest.mark.parametrize("ends", [(9, 12), (6, 12), (7, 8, 9)])
def test_tensorboard_shows_what_was_measured_where_a_run_was_extended_once(
    tracked_run, tmp_path, ends
):
    """Whether or not it is measured again there: each sixth step is evaluated."""
    flags = [
        "--wandb_log=False",
        "--tensorboard_log=True",
        "--log_interval=5",
        "--vocab_size=50304",
    ]
    for end in ends:
        tracked_run(*flags, "--sample_prompts=One day | The river", f"--max_iters={end}")
    shown, run = shown_by_tensorboard(tmp_path / "out"), read_history(tmp_path / "out")
    assert [one["step"] for one in run.evaluations] == sorted({6, *ends})
    for name in ("val_loss", "bits_per_byte"):
        assert shown[name] == [(one["step"], pytest.approx(one[name])) for one in run.evaluations]
    assert len(run.samples) == 2 * len({6, *ends})
    for prompt in ("One day", "The river"):
        told = [
            (one["step"], prompt + one["text"]) for one in run.samples if one["prompt"] == prompt
        ]
        assert shown[f"sample/{prompt}"] == told


def test_tensorboard_shows_nothing_again_of_what_was_gone_back_from(tmp_path):
    run = RunConfig(out_dir=str(tmp_path), report=False, tensorboard_log=True)
    place = {"tokens": 8, "seconds": 1.0}
    records = [
        {"kind": "eval", "step": 9, "val_loss": 3.0, **place},
        {"kind": "event", "step": 6, "name": "rolled back", "left_out_steps": 3, **place},
        {"kind": "sample", "step": 9, "prompt": "One", "text": " day", **place},
        {"kind": "event", "step": 8, "name": "saved", **place},
    ]
    lines = [*map(json.dumps, records), "[1]", '{"kind": "eval", "step": 9, "val']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    [sink] = open_sinks(run, {}, 9)
    sink.close()
    assert sink.news() is None
    shown = shown_by_tensorboard(tmp_path)
    assert "val_loss" not in shown
    assert shown["sample/One"] == [(9, "One day")]


def shown_by_tensorboard(out_dir: Path) -> dict[str, list[tuple[int, float | str]]]:
    """Each curve's values and each kind of text, by step."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(out_dir / "tensorboard"), {"tensors": 0}).Reload()
    shown = {}
    for name in read.Tags()["tensors"]:
        values = [(one.step, make_ndarray(one.tensor_proto)) for one in read.Tensors(name)]
        if name.endswith("/text_summary"):
            values = [(step, texts.item().decode()) for step, texts in values]
        shown[name.removesuffix("/text_summary")] = values
    return shown


def history(file: Path) -> list[dict]:
    """What was logged, as wandb's own file for a later upload has it."""
    return [
        {
            item.key or item.nested_key[0]: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records_of(file)
        if record.HasField("history")
    ]


def settings(file: Path) -> dict:
    found = {}
    for record in records_of(file):
        updates = list(record.config.update) + list(record.run.config.update)
        for item in updates:
            found[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    return found


def records_of(file: Path) -> Iterator:
    """Its records: a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    whole, piece, position = file.read_bytes(), b"", 7
    while position + 7 <= len(whole):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", whole[position : position + 7])
        piece += whole[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield Record.FromString(piece)
            piece = b""


# The report


def test_a_run_writes_its_report_and_says_where_once(tiny_run, tmp_path):
    done = tiny_run("--report=True", "--eval_interval=3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report.html") == 1
    page = (tmp_path / "out/report.html").read_text()
    last = read_metrics(tmp_path / "out", "eval", "val_loss")[12]
    assert f"{last:.3f}" in page and "finished" in page


def test_a_report_that_cannot_be_written_is_no_matter(tiny_run, tmp_path):
    (tmp_path / "out/report.html").mkdir(parents=True)
    done = tiny_run("--report=True")
    assert done.returncode == 0, done.stderr


def test_wandb_gets_the_report_as_an_artifact(tracked_run, tmp_path):
    tracked_run("--report=True", "--max_iters=6")
    [file] = (tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb")
    artifacts = [one.artifact for one in records_of(file) if one.HasField("artifact")] + [
        one.request.log_artifact.artifact
        for one in records_of(file)
        if one.HasField("request") and one.request.HasField("log_artifact")
    ]
    [artifact] = artifacts
    assert artifact.type == "report" and artifact.name.startswith("report-")
    [content] = artifact.manifest.contents
    assert content.path == "report.html"
