"""What a run tells: exact records, honest speed, and no tracker or disk that stops it."""

import io
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanofit.machine.device import Peek
from nanofit.outlook.scaling import Band
from nanofit.run.metrics import Log

TOKENS_PER_STEP = 1000
UNREADABLE = SimpleNamespace()  # has no .item(): reading it from the device would be an error


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    clock = SimpleNamespace(now=5000.0)
    monkeypatch.setattr("nanofit.run.metrics.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def open_log(tmp_path):
    def open_with(**options):
        standard = dict(
            is_main=True,
            log_interval=1,
            first_step=0,
            last_step=100,
            tokens_per_step=TOKENS_PER_STEP,
            flops_per_token=2e6,
            peak_flops=None,
        )
        return Log(tmp_path, **(standard | options))

    return open_with


@pytest.fixture
def records(tmp_path):
    """Reads what metrics.jsonl holds by now."""

    def read():
        lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    return read


def tell_step(log, step, loss=2.5, grad_norm=1.0, lr=1e-3):
    log.stepped(step, torch.tensor(loss), torch.tensor(grad_norm), lr)


def tell_everything(log):
    """One record of each kind."""
    tell_step(log, 0)
    log.evaluated(1, 3.25)
    log.event(1, "fit chosen", micro_batch=12)


# records


def test_each_record_has_its_kind_step_tokens_and_seconds(open_log, records, clock):
    with open_log() as log:
        clock.now += 2
        tell_step(log, 7)
        clock.now += 3
        log.evaluated(8, 3.25)
        log.event(8, "fit chosen", micro_batch=12, reason="it fits")
    step, evaluation, event = records()
    assert step == {
        "kind": "step",
        "step": 7,
        "tokens": 8 * TOKENS_PER_STEP,  # the step is done
        "seconds": 2.0,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "tokens_per_s": 8 * TOKENS_PER_STEP / 2,
    }
    common = {"step": 8, "tokens": 8 * TOKENS_PER_STEP, "seconds": 5.0}
    assert evaluation == {"kind": "eval", "val_loss": 3.25, **common}
    assert event == {
        "kind": "event",
        "name": "fit chosen",
        "micro_batch": 12,
        "reason": "it fits",
        **common,
    }


def test_validation_is_told_in_bits_a_byte_where_bytes_were_counted(open_log, records, capsys):
    """A byte of which nothing is known has 8 bits: 256 kinds, as likely as each other."""
    with open_log(bytes_per_token=1.0) as log:
        log.evaluated(8, math.log(256))
    [evaluation] = records()
    assert evaluation["bits_per_byte"] == pytest.approx(8)
    assert "8.0000 bits a byte" in capsys.readouterr().out


def test_what_is_no_number_is_null_however_deep(open_log, records):
    with open_log() as log:
        log.began(0, {"settings": {"grad_clip": math.inf}, "plan": {"loss_low": math.nan}})
    [run] = records()
    assert (run["kind"], run["settings"], run["plan"]) == (
        "run",
        {"grad_clip": None},
        {"loss_low": None},
    )


def test_losses_are_written_in_full_precision(open_log, records):
    random = np.random.default_rng(0)
    losses = np.exp(random.uniform(-20, 20, 200)).astype(np.float32)
    with open_log() as log:
        for step, loss in enumerate(losses):
            log.stepped(step, torch.tensor(loss), torch.tensor(1 / loss), float(loss) / 3)
        log.evaluated(200, math.pi)
    *steps, evaluation = records()
    for record, loss in zip(steps, losses, strict=True):
        assert np.float32(record["loss"]).tobytes() == loss.tobytes()
        assert record["loss"] == float(loss)
        assert np.float32(record["grad_norm"]).tobytes() == (1 / loss).tobytes()
        assert record["lr"] == float(loss) / 3
    assert evaluation["val_loss"] == math.pi


def test_records_are_readable_while_the_run_goes_on(open_log, records):
    with open_log() as log:
        tell_everything(log)
        assert [record["kind"] for record in records()] == ["step", "eval", "event"]


def test_a_later_launch_appends_and_goes_on_counting_time(open_log, records, clock):
    with open_log() as log:
        clock.now += 10
        tell_step(log, 0)
        seconds = log.seconds
    clock.now += 1000  # nobody was running
    with open_log(first_step=1, seconds_before=seconds) as log:
        clock.now += 4
        tell_step(log, 1)
    assert [(record["step"], record["seconds"]) for record in records()] == [(0, 10.0), (1, 14.0)]


def test_a_record_cut_short_by_a_crash_spoils_no_other(open_log, records, tmp_path):
    with open_log() as log:
        tell_step(log, 0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "step", "st')
    with open_log(first_step=1) as log:
        tell_step(log, 1)
    assert [record["step"] for record in records()] == [0, 1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full")
def test_a_full_disk_is_told_and_the_run_goes_on(open_log, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with open_log() as log:
        tell_everything(log)
    told = capsys.readouterr().out
    assert "metrics.jsonl" in told and "No space left" in told
    assert "step 0    loss 2.5000" in told


@pytest.mark.skipif(sys.platform == "win32", reason="Windows limits no file's size")
def test_what_a_full_disk_did_not_take_is_written_in_order_when_it_does(
    open_log, records, tmp_path, capsys
):
    """More than any buffer holds: a run may go on for hours."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_log(last_step=300) as log:
        tell_step(log, 0)
        size_bytes = (tmp_path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 100, limits[1]))
        try:
            for step in range(1, 200):
                tell_step(log, step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        tell_step(log, 200)
    assert [record["step"] for record in records()] == list(range(201))
    assert capsys.readouterr().out.count("metrics.jsonl could not be written") == 1


# when numbers are read


def test_only_steps_on_the_interval_are_read_from_the_device(open_log, records):
    with open_log(log_interval=5) as log:
        for step in range(12):
            if step % 5:
                log.stepped(step, UNREADABLE, UNREADABLE, 1e-3)
            else:
                tell_step(log, step)
    assert [record["step"] for record in records()] == [0, 5, 10]


def test_other_processes_read_nothing_and_write_nothing(open_log, tmp_path, capfd):
    with open_log(is_main=False) as log:
        log.stepped(0, UNREADABLE, UNREADABLE, 1e-3)
        log.evaluated(1, 3.25)
        log.event(1, "fit chosen", micro_batch=12)
        log.say("hello")
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_line_shows_a_loss_once_it_has_arrived_and_waits_for_none(
    open_log, clock, monkeypatch
):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    sent, arrived, shown = [], [], []

    def peek(loss):
        sent.append(loss.item())
        number = len(sent)
        return Peek(loss, lambda: number <= len(arrived))

    with open_log(log_interval=100, peek=peek) as log:
        tell_step(log, 0, loss=9.0)
        for step in range(1, 31):
            clock.now += 0.25
            if step == 10:
                arrived.append("the loss of step 4")
            tell_step(log, step, loss=9.0 - step / 8)
            shown.append(log.live_note)
    # A second after the last one was seen the next is sent for, and seen when it is there.
    assert sent == [9.0 - step / 8 for step in (4, 14)]
    first, later = dict.fromkeys(shown)
    assert "loss 9.0000" in first and shown.index(later) == 10 - 1
    # The loss of step 4 was there 2.5 s after that of step 0.
    speed = 4 * TOKENS_PER_STEP / 2.5
    assert later == f"loss 8.5000  {speed / 1000:.3g}k tok/s"
    assert later in terminal.getvalue()


def test_nobody_looks_at_a_loss_between_lines_where_nobody_looks_at_the_line(open_log, clock):
    with open_log(log_interval=100, peek=UNREADABLE) as log:
        for step in range(1, 50):
            clock.now += 5
            log.stepped(step, UNREADABLE, UNREADABLE, 1e-3)
        assert log.live_note == ""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_warnings_and_changed_numbers_have_colour_on_a_terminal_alone(
    open_log, monkeypatch, is_terminal
):
    monkeypatch.setattr(sys, "stdout", output := Terminal() if is_terminal else io.StringIO())
    monkeypatch.setenv("TERM", "xterm")
    stage = {"now": "eager", "passes": 1, "peak_mib": 519}
    with open_log() as log:
        log.event(4, "stage measured", micro_batch=4, tokens_per_s=1579, **stage)
        log.event(8, "stage measured", micro_batch=8, tokens_per_s=1579, **stage)
        log.event(9, "save failed", reason="the disk is full")
    told = output.getvalue()
    assert ("\x1b[1m8\x1b[0m sequences" in told) == is_terminal
    assert ("\x1b[33mstep 9    NOT SAVED" in told) == is_terminal
    assert told.count("\x1b[1m") == is_terminal
    plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", told)
    assert "step 8    eager: 8 sequences a pass, 1.58k tokens/s, peak 519 MiB" in plain
    assert ("\x1b" in told) == is_terminal


# speed


def test_speed_is_tokens_over_time_since_the_last_line(open_log, records, clock):
    with open_log(log_interval=10) as log:
        for step in range(21):
            clock.now += 0.5 if step <= 10 else 2.0
            tell_step(log, step)
    speeds = [record["tokens_per_s"] for record in records()]
    assert speeds == [TOKENS_PER_STEP / 0.5, TOKENS_PER_STEP / 0.5, TOKENS_PER_STEP / 2]


@pytest.mark.parametrize("pause", ["evaluated", "event", "restart_clock"])
def test_speed_leaves_out_what_is_not_training(open_log, records, clock, pause):
    with open_log(log_interval=4) as log:
        for step in range(13):
            if step == 6:  # between two lines
                clock.now += 1000
                if pause == "evaluated":
                    log.evaluated(step, 3.25)
                elif pause == "event":
                    log.event(step, "compiled")
                else:
                    log.restart_clock(step)
            clock.now += 0.5
            tell_step(log, step)
    speeds = [record["tokens_per_s"] for record in records() if record["kind"] == "step"]
    assert speeds == [TOKENS_PER_STEP / 0.5] * 4


def test_a_continued_run_starts_its_speed_anew(open_log, records, clock):
    with open_log(first_step=50) as log:
        clock.now += 0.5
        tell_step(log, 50)
    assert records()[0]["tokens_per_s"] == TOKENS_PER_STEP / 0.5


def test_mfu_is_told_only_where_the_peak_is_known(open_log, records, clock, capsys):
    for peak in (None, 10e9):
        with open_log(peak_flops=peak) as log:
            clock.now += 0.5
            tell_step(log, 0)
    unknown, known = records()
    assert "mfu" not in unknown
    assert known["mfu"] == (TOKENS_PER_STEP / 0.5) * 2e6 / 10e9 == 0.4
    first, second = capsys.readouterr().out.splitlines()
    assert "mfu" not in first and "mfu 40.0%" in second


def test_console_lines_say_what_the_records_say(open_log, clock, capsys):
    with open_log(last_step=101) as log:
        clock.now += 0.5
        log.stepped(0, torch.tensor(1.23456), torch.tensor(0.5), 6e-4)
        log.evaluated(1, 3.25)
        log.event(1, "fit chosen", micro_batch=12)
    step, evaluation, event = capsys.readouterr().out.splitlines()
    assert step.startswith("step 0    loss 1.2346   lr 6.00e-04  norm 0.50  2k tok/s  eta ")
    assert evaluation == "step 1    validation loss 3.2500"
    assert event == "step 1    fit chosen  micro_batch 12"


# what is normal


def band_at(steps_done):
    return None if steps_done < 4 else Band(3.0, 3.0 + steps_done / 10)


def test_the_band_is_told_with_each_loss_where_there_is_one(open_log, records, capsys):
    with open_log() as log:
        log.expect(band_at)
        tell_step(log, 2)
        tell_step(log, 3)
        log.evaluated(4, 3.25)
    before, step, evaluation = records()
    assert "expected_low" not in before
    for record in (step, evaluation):
        assert (record["expected_low"], record["expected_high"]) == (3.0, 3.4)
    lines = capsys.readouterr().out.splitlines()
    assert "normal" not in lines[0]
    assert "loss 2.5000  (normal 3.00-3.40)  lr" in lines[1]
    assert lines[2] == "step 4    validation loss 3.2500 (normal 3.00-3.40)"


@pytest.mark.parametrize(("loss", "where"), [(9.0, "above"), (2.0, "below")])
def test_a_run_long_outside_its_band_says_so_once(open_log, records, loss, where):
    with open_log() as log:
        log.expect(band_at)
        for step, told in enumerate([loss, 3.2, loss, loss, 3.2, *[loss] * 7], start=4):
            log.evaluated(step, told)
    events = [record for record in records() if record["kind"] == "event"]
    assert [(event["step"], event["name"]) for event in events] == [
        (11, f"loss {where} what is normal")
    ]
    assert "FineWeb" in events[0]["causes"]


def test_jumping_from_side_to_side_is_not_long_outside(open_log, records):
    with open_log() as log:
        log.expect(band_at)
        for step in range(4, 20):
            log.evaluated(step, 9.0 if step % 2 else 2.0)
    assert all(record["kind"] == "eval" for record in records())


# divergence


def test_divergence_is_seen_when_a_line_is_due_or_when_asked(open_log):
    with open_log(log_interval=10) as log:
        tell_step(log, 0)
        tell_step(log, 1, loss=math.nan)
        assert not log.diverged(look=False)
        assert log.diverged(look=True) and log.divergence == "the loss is nan"
        log.went_back(())
        assert not log.diverged(look=True)
        tell_step(log, 10, grad_norm=math.inf)
        assert log.diverged(look=False)


def test_other_processes_are_not_asked_for_divergence(open_log):
    with open_log(is_main=False) as log:
        log.stepped(0, UNREADABLE, UNREADABLE, 1e-3)
        assert not log.diverged(look=True)


# the time of a step


def test_a_step_is_timed_over_ten_of_them_without_the_first_and_without_pauses(open_log, clock):
    with open_log(log_interval=4, last_step=None) as log:
        log.event(0, "compile")
        clock.now += 100  # the first step after an event is slow
        tell_step(log, 0)
        for step in range(1, 13):
            assert log.step_seconds is None
            if step == 6:
                clock.now += 1000
                log.evaluated(step, 3.25)
            clock.now += 0.5
            tell_step(log, step)
        assert log.step_seconds == 0.5
        log.event(13, "compile")
        assert log.step_seconds is None


def test_a_run_without_a_known_end_tells_no_eta(open_log, clock, capsys):
    with open_log(last_step=None) as log:
        clock.now += 0.5
        tell_step(log, 0)
        log.expect(band_at, last_step=11)
        clock.now += 0.5
        tell_step(log, 1)
    first, second = capsys.readouterr().out.splitlines()
    assert "eta" not in first
    assert "eta " in second
