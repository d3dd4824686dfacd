"""What owners of cards measured: read with care, kept once, and taken by the planner."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nanofit.machine import measured
from nanofit.machine.cards import find_card
from nanofit.machine.measured import (
    CardReport,
    MeasuredStep,
    keep_reports,
    kept_reports,
    read_report,
)
from nanofit.machine.overhead import ASSUMED, overhead_of
from nanofit.outlook.forecast import expected_share, measured_step, predicted_tokens_per_s
from nanofit.outlook.roofline import tokens_per_s
from tests import processes
from tests.conftest import PROJECT

CARD = find_card("RTX 3060")
BEST = dict(peak_flops=CARD.peak_flops, bytes_per_s=CARD.bytes_per_s)
STEP = MeasuredStep(
    n_layer=6,
    n_head=6,
    n_embd=384,
    block_size=512,
    vocab_size=50304,
    micro_batch_size=16,
    passes=2,
    compiled=True,
    survived=True,
    forecast_bytes=1000 * 2**20,
    allocated_bytes=1001 * 2**20,
    reserved_bytes=1010 * 2**20,
    spilled_bytes=0,
    tokens_per_s=50_000.0,
)
REPORT = CardReport(
    card=CARD.name,
    memory_mib=12288,
    capability="8.6",
    watts=170.0,
    dtype="bfloat16",
    system="Linux",
    driver="580.65.06",
    cuda="13.0",
    torch="2.13.0+cu130",
    context_bytes=300 * 2**20,
    library_bytes=50 * 2**20,
    steps=(STEP,),
)


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """A table of measured cards of its own, empty."""
    place = tmp_path / "measured.json"
    place.write_text("[]")
    monkeypatch.setattr(measured, "PLACE", place)
    kept_reports.cache_clear()
    yield place
    kept_reports.cache_clear()


def written(folder: Path, facts) -> Path:
    path = folder / "doctor.json"
    path.write_text(json.dumps(facts))
    return path


def test_report_is_read_as_it_was_written(tmp_path):
    assert read_report(written(tmp_path, asdict(REPORT))) == REPORT


@pytest.mark.parametrize(
    "change",
    [
        dict(card="<b>4070</b>"),
        dict(card="/home/me"),
        dict(card=4070),
        dict(memory_mib="12288"),
        dict(memory_mib=-1),
        dict(watts=math.nan),
        dict(watts=math.inf),
        dict(context_bytes=True),
        dict(steps=None),
        dict(steps=[None]),
        dict(steps=[{**asdict(STEP), "compiled": 1}]),
        dict(steps=[{**asdict(STEP), "more": 1}]),
        dict(serial="0123"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, change):
    with pytest.raises(ValueError):
        read_report(written(tmp_path, {**asdict(REPORT), **change}))
    with pytest.raises(ValueError):
        read_report(written(tmp_path, list(change)))


def test_planner_takes_what_was_measured_instead_of_what_is_assumed(kept):
    assumed, others = expected_share(CARD), expected_share(find_card("RTX 4070"))
    assert overhead_of(CARD.name) == ASSUMED
    best = tokens_per_s(measured_step(STEP), **BEST)
    steps = [replace(STEP, tokens_per_s=share * best) for share in (0.5, 0.72)]
    steps.append(replace(STEP, compiled=False, tokens_per_s=9.9))  # of another kind
    steps.append(replace(STEP, survived=False, tokens_per_s=0.0))
    keep_reports([replace(REPORT, steps=tuple(steps))])
    assert expected_share(CARD) == pytest.approx(0.6) != assumed  # the geometric mean
    predicted = predicted_tokens_per_s(CARD, measured_step(STEP))
    assert predicted == pytest.approx(0.6 * best)
    assert expected_share(find_card("RTX 4070")) == others
    assert overhead_of(CARD.name) == (300 * 2**20, 50 * 2**20, "measured on such a card")


def test_report_is_filed_under_the_card_that_its_memory_tells(kept, tmp_path):
    larger = find_card("RTX 3080 12GB")
    sent = replace(REPORT, card="GeForce RTX 3080", memory_mib=12053)
    report = read_report(written(tmp_path, asdict(sent)))
    assert report == replace(sent, card=larger.name)
    smaller_before = expected_share(find_card("RTX 3080 10GB"))
    keep_reports([report])
    best = tokens_per_s(
        measured_step(STEP), peak_flops=larger.peak_flops, bytes_per_s=larger.bytes_per_s
    )
    assert expected_share(larger) == pytest.approx(STEP.tokens_per_s / best)
    assert expected_share(find_card("RTX 3080 10GB")) == smaller_before
    for name in ("NVIDIA GeForce RTX 3080", larger.name):  # a process takes the same on both
        assert overhead_of(name) == (300 * 2**20, 50 * 2**20, "measured on such a card")


def test_report_is_kept_once(kept):
    keep_reports([REPORT])
    keep_reports([REPORT, replace(REPORT, watts=120.0)])
    assert kept_reports() == (REPORT, replace(REPORT, watts=120.0))


def test_reports_are_shown_beside_what_is_assumed(tmp_path):
    dead = replace(STEP, survived=False, allocated_bytes=0, reserved_bytes=0, tokens_per_s=0.0)
    path = written(tmp_path, asdict(replace(REPORT, steps=(STEP, dead), context_bytes=0)))
    done = processes.run([sys.executable, PROJECT / "bench/cards.py", "--doctor", path])
    assert done.returncode == 0, done
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    [card] = [row for row in rows if "580.65.06" in row]
    share = 50_000 / tokens_per_s(measured_step(STEP), **BEST)
    assert card[4:8] == ["- (420)", "50 (128)", f"{share:.2f}", f"{expected_share(CARD):.2f}"]
    alive, dead = (row for row in rows if any("30.1M" in cell for cell in row))
    assert alive[3:6] == ["1,000", "1,001", "1,010"] and alive[7] == "50,000"
    assert dead[2].endswith("did not survive") and dead[3:8] == ["1,000", "-", "-", "-", "-"]


def test_file_that_is_no_report_is_one_line(tmp_path):
    command = [sys.executable, PROJECT / "bench/cards.py", "--doctor", tmp_path / "doctor.json"]
    written(tmp_path, [])
    done = processes.run(command)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    written(tmp_path, asdict(replace(REPORT, card="GeForce GTX 1080")))
    assert "nanofit/machine/cards.py lacks; add it" in processes.run(command).stderr
