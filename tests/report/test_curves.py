"""What is drawn of a long run, against its raw records."""

import math
from statistics import fmean

import numpy as np
import pytest

from nanofit.report.curves import SPIKY, curve_of, evaluations_of, recent_loss, typical
from nanofit.report.history import History, Steps
from tests.report import stories

COUNT, STRETCHES = 20_000, 100


@pytest.fixture(scope="module")
def records() -> list[dict]:
    random = np.random.default_rng(1)
    values = {
        "grad_norm": random.lognormal(size=COUNT),
        "tokens_per_s": random.normal(500, 9, COUNT),
    }
    columns = zip(*(column.tolist() for column in values.values()), strict=True)
    return [
        stories.step(number, loss, grad_norm=norm, tokens_per_s=speed)
        for number, (loss, (norm, speed)) in enumerate(
            zip(stories.losses(COUNT), columns, strict=True)
        )
    ]


def steps_of(records: list[dict]) -> Steps:
    steps = Steps()
    for record in records:
        steps.add(record)
    return steps


def test_lowest_and_highest_of_each_stretch_are_drawn(records):
    curve = curve_of(steps_of(records), STRETCHES)
    assert len(curve["loss"]) < COUNT / 10
    length = COUNT // STRETCHES
    for first in range(0, COUNT, length):
        stretch = records[first : first + length]
        drawn = [at for at, t in enumerate(curve["tokens"]) if first < t / 1000 <= first + length]
        for name in SPIKY:
            raw, shown = [one[name] for one in stretch], [curve[name][at] for at in drawn]
            assert min(shown) == pytest.approx(min(raw), rel=1e-5)
            assert max(shown) == pytest.approx(max(raw), rel=1e-5)


def test_every_point_drawn_is_a_step_of_the_run(records):
    curve, by_tokens = curve_of(steps_of(records), STRETCHES), {r["tokens"]: r for r in records}
    for name in ("seconds", "loss", "lr", "grad_norm", "tokens_per_s", "mfu"):
        raw = [by_tokens[tokens][name] for tokens in curve["tokens"]]
        assert curve[name] == pytest.approx(raw, rel=1e-5)
    assert curve["tokens"] == sorted(set(curve["tokens"]))
    assert curve["tokens"][-1] == records[-1]["tokens"]


def test_a_short_run_is_drawn_whole():
    records = stories.whole_run()
    curve = curve_of(steps_of([one for one in records if one["kind"] == "step"]))
    assert curve["loss"] == pytest.approx(stories.losses(100), rel=1e-5)


def test_a_loss_that_was_no_number_is_a_gap_however_long_the_run(records):
    lost = [one | {"loss": None} if 9000 <= one["step"] < 9003 else one for one in records]
    curve = curve_of(steps_of(lost), STRETCHES)
    gaps = [t for t, loss in zip(curve["tokens"], curve["loss"], strict=True) if loss is None]
    assert gaps
    assert {9_001_000, 9_002_000, 9_003_000}.issuperset(gaps)


def test_typical_loss_is_the_mean_of_the_middle_half():
    values, reach = np.array([*stories.losses(60), math.nan]), 4
    rows = list(range(61))
    for row, found in zip(rows, typical(values, rows, reach), strict=True):
        back = min(row, reach)
        around = sorted(v for v in values[row - back : row + back + 1].tolist() if v == v)
        quarter = len(around) // 4
        assert found == pytest.approx(fmean(around[quarter : len(around) - quarter]))


def test_a_spike_does_not_move_the_typical_loss():
    calm = [2.0] * 100
    spiky = [*calm[:50], 9.0, *calm[51:]]
    steps = steps_of([stories.step(number, loss) for number, loss in enumerate(spiky)])
    assert curve_of(steps)["typical"] == calm
    assert max(curve_of(steps)["loss"]) == 9.0


def test_what_is_unknown_has_no_column():
    steps = steps_of([stories.step(0, 3.0, mfu=None)])
    assert {"mfu", "expected_low", "expected_high"}.isdisjoint(curve_of(steps))
    assert curve_of(Steps()) == {}
    assert recent_loss(Steps()) is None


def test_many_evaluations_keep_the_best_and_the_worst(tmp_path):
    rows = [stories.evaluation(number, loss) for number, loss in enumerate(stories.losses(9000))]
    shown = evaluations_of(History(tmp_path, evaluations=rows), STRETCHES)
    raw = [row["val_loss"] for row in rows]
    assert len(shown["val_loss"]) < 500
    assert (min(shown["val_loss"]), max(shown["val_loss"])) == pytest.approx(
        (min(raw), max(raw)), rel=1e-5
    )
