"""What a report says of a run, against what is known of the run."""

import json
import random
from contextlib import suppress

import pytest

from nanofit.report.history import History, read_history
from nanofit.report.marks import MOST_MARKS, marks_of
from nanofit.report.outcome import outcome_of
from nanofit.report.page import as_data, page_of
from nanofit.report.report import MOST_SAMPLES, names_of, report_of
from nanofit.report.sheets import stages_of
from nanofit.terminal import InputError
from tests.report import stories
from tests.report.stories import event, launch, step, write


@pytest.fixture
def told(tmp_path):
    """The report of a run with such records."""

    def tell(*records: dict | str) -> dict:
        report = report_of([read_history(write(tmp_path / "run", records))], made=0.0)
        assert json.loads(as_data(report)) == json.loads(json.dumps(report))
        return report["runs"][0]

    return tell


def rows_by_name(sheet: dict) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in sheet["rows"]}


STEPS = [step(number, 3.0) for number in range(10)]


@pytest.mark.parametrize(
    ("records", "state", "verdict"),
    [
        ([launch()], "begun", "No step of 100 is done; about 2m40s to go"),
        (STEPS, "running", "Step 10: training loss 3.000"),
        (
            [launch(), *STEPS],
            "running",
            "Step 10 of 100: training loss 3.000; about 3m00s to go",  # 90 steps of 2 s
        ),
        (
            [launch(), *STEPS, stories.evaluation(10, 3.2, expected_low=3.0, expected_high=3.1)],
            "running",
            "Step 10 of 100: validation loss 3.200, above the expected 3.00 to 3.10; "
            "about 3m00s to go",
        ),
        (
            [launch(), *STEPS, event(10, "length fixed", max_iters=40, hours=1.0)],
            "running",
            "Step 10 of 40: training loss 3.000; about 1m00s to go",
        ),
        (
            [event(0, "length fixed", max_iters=40, hours=1.0), *STEPS, launch(10, steps=60)],
            "running",
            "Step 10 of 60: training loss 3.000; about 1m40s to go",
        ),
        (
            [launch(), *STEPS, event(10, "stopped")],
            "stopped",
            "Step 10 of 100: training loss 3.000; about 3m00s to go",
        ),
        (
            [launch(), *STEPS, event(10, "stopped"), launch(10)],
            "running",
            "Step 10 of 100: training loss 3.000; about 3m00s to go",
        ),
        (
            [launch(), *STEPS, event(10, "diverged", reason="the loss is nan")],
            "diverged",
            "Step 10 of 100: the loss is nan",
        ),
        (
            [
                *[launch(), *STEPS, event(10, "diverged", reason="the loss is nan")],
                event(5, "rolled back", left_out_steps=5),
            ],
            "running",
            "Step 5 of 100: training loss 3.000; about 3m10s to go",
        ),
        (
            [launch(steps=10), *STEPS, event(10, "finished")],
            "finished",
            "10 steps in 20s: training loss 3.000",
        ),
    ],
)
def test_the_verdict_says_where_the_run_is(told, records, state, verdict):
    run = told(*records)
    assert (run["state"], run["verdict"]) == (state, verdict)


def test_the_plan_is_told_with_its_errors(told):
    run = told(*stories.whole_run())
    plan = rows_by_name(run["plan"])
    assert plan["time"] == ["2m40s", "3m20s", "+25.0%"]  # 160 s and 200 s
    assert plan["tokens/s"] == ["400", "500", "+25.0%"]
    (loss,) = [row["val_loss"] for row in stories.whole_run() if row["kind"] == "eval"][-1:]
    low, high = stories.band(99).values()
    name = "validation loss at step 100"
    assert plan[name][:2] == [f"{low:.2f} to {high:.2f}", f"{loss:.3f}"]
    assert plan[name][2].startswith(f"{loss - (low + high) / 2:+.2f}")
    assert plan["memory, eager, 4 a pass"] == ["7,168 MiB", "7,680 MiB", "+7.1%"]
    assert plan["memory, compiled, 8 a pass"] == ["9,216 MiB", "–", "–"]  # never measured


def test_a_cpu_is_not_blamed_for_what_the_process_takes(told):
    records = stories.whole_run()
    for record in records:
        if record["kind"] == "run":
            record["machine"] = {"device": "CPU, 2 threads", "precision": "float32"}
    plan = rows_by_name(told(*records)["plan"])
    assert plan["memory, eager, 4 a pass, the whole process"][1:] == ["7,680 MiB", "–"]


def test_each_step_counts_for_the_stage_it_was_last_done_in(tmp_path):
    """Of runs that go back, are launched again and shrink at random; replayed step by step."""
    chance = random.Random(7)
    for _ in range(30):
        records, done_in, now = [launch()], {}, ("eager", 4)
        number = 0
        records.append(stories.stage(0, *now))
        for _ in range(60):
            what = chance.choice(["step"] * 6 + ["stage", "back", "launch"])
            if what == "step":
                records.append(step(number, 3.0))
                done_in[number] = now
                number += 1
            elif what == "stage":
                now = chance.choice(["eager", "compiled"]), chance.choice([1, 2, 4, 8])
                records.append(stories.stage(number, *now, "out of memory"))
            else:
                number = chance.randint(0, number)
                if what == "back":
                    records.append(event(number, "rolled back", left_out_steps=1))
                else:
                    now = "eager", 4
                    records += [launch(number), stories.stage(number, *now, "resumed")]
        kept = {at: stage for at, stage in done_in.items() if at < number}
        stages = stages_of(read_history(write(tmp_path, records)))
        found = {
            at: (stage.name, int(stage.micro_batch))
            for stage in stages
            for first, after in stage.spans
            for at in kept
            if first <= at < after
        }
        assert found == kept


def test_speed_and_peak_are_told_by_stage(told):
    rows = [
        step(0, 3.0, tokens_per_s=100, mfu=0.1),
        step(1, 3.0, tokens_per_s=300, mfu=0.3),
        step(2, 3.0, tokens_per_s=900, mfu=0.9),
        step(3, 3.0, tokens_per_s=500, mfu=0.5),
    ]
    eager, compiled = ("eager", 4), ("compiled", 8, "compiled in 1 s")
    peaks = stories.measured(1, "eager", 4, 700), stories.measured(1, "eager", 4, 650)
    before = [launch(), stories.stage(0, *eager), *rows[:2], *peaks]
    run = told(*before, stories.stage(2, *compiled), rows[2], stories.stage(3, *eager), rows[3])
    assert run["stages"]["rows"] == [
        ["eager", "4 × 4", "300", "30.0%", "700", "0", "3"],
        ["compiled", "8 × 2", "900", "90.0%", "–", "2", "1"],
    ]


def test_what_happened_is_marked_where_it_did(told):
    marks = told(*stories.whole_run())["marks"]
    assert [(mark["step"], mark["kind"]) for mark in marks] == [
        (10, "stage"),
        (20, "batch"),
        (50, "spike"),
        (75, "data"),
        (75, "launch"),
    ]
    assert marks[0]["text"] == "compiled in 9 s: now compiled, 8 sequences a pass, 2 passes a step"
    assert marks[3]["text"] == "launched with folder data/other (was data/some)"
    assert [mark["is_warning"] for mark in marks] == [False, True, True, True, False]
    assert marks[2]["tokens"] == 50 * stories.TOKENS_PER_STEP


def test_very_many_events_are_told_together_and_none_is_lost(tmp_path):
    records = [event(number, "spikes skipped", updates=1) for number in range(5000)]
    marks = marks_of(read_history(write(tmp_path, records)))
    assert len(marks) <= MOST_MARKS + 1
    more = [int(mark.text.partition("; and ")[2].partition(" more")[0]) for mark in marks[:-1]]
    assert sum(more) + len(marks) in (4999, 5000)  # the last one may stand alone


def test_details_of_another_version_do_no_harm(told):
    odd = [
        event(0, "stage", reason=None, now=["x"]),
        event(1, "rolled back"),
        event(2, "started", limit_mib="much"),
        event(3, "stage measured", peak_mib="much", now={"a": 1}),
        event(4, "diverged", reason=7),
    ]
    parts = {"plan": {"steps": "many", "seconds": [1]}, "memory": {"stages": {"eager": [1]}}}
    settings = {"n_layer": [[1]], "learning_rate": {"a": "b"}}
    run = told(launch(settings=settings, machine={"device": None}, **parts), *odd, step(4, 3.0))
    assert run["verdict"] == "Step 5: 7"


def test_whatever_values_a_file_has_there_is_a_report(tmp_path):
    """Every value of a record may be another, missing, or of another kind."""
    chance = random.Random(3)
    odd = [
        None,
        "",
        "x",
        -1,
        0,
        10**18,
        1e300,
        1e-300,
        True,
        [],
        {},
        [1],
        {"a": 1},
        "\ud800",
        2**63,
    ]

    def spoiled(record: dict, share: float) -> dict:
        kept = {name: one for name, one in record.items() if chance.random() > share / 4}
        for name, value in kept.items():
            if chance.random() < share:
                kept[name] = chance.choice(odd)
            elif isinstance(value, dict):
                kept[name] = spoiled(value, share)
        return kept

    made = 0
    for _ in range(200):
        records = [spoiled(one, chance.choice([0.01, 0.1])) for one in stories.whole_run(20)]
        with suppress(InputError):  # nothing is left that would be a record
            page_of(report_of([read_history(write(tmp_path, records))], made=0.0))
            made += 1
    assert made > 150


def test_settings_that_differ_between_runs_stand_apart(tmp_path):
    one, other = (
        read_history(write(tmp_path / name, [launch(settings={"learning_rate": rate})]))
        for name, rate in (("one", 1e-3), ("other", 2e-3))
    )
    together = report_of([one, other], made=0.0)["settings"]
    assert together["differing"]["rows"] == [["learning_rate", "0.0006", "0.001", "0.002"]]
    assert ["n_layer", "12", "2", "2"] in together["alike"]["rows"]
    alone = report_of([one], made=0.0)["settings"]["differing"]["rows"]
    assert alone == [["n_layer", "12", "2"], ["learning_rate", "0.0006", "0.001"]]


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path):
    folders = [tmp_path / "a" / "out", tmp_path / "b" / "out"]
    assert names_of(folders) == ["a/out", "b/out"]
    assert names_of([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]


def test_of_very_many_samples_the_first_and_the_last_are_shown(told):
    texts = [f"text {number}" for number in range(500)]
    run = told(launch(), *(stories.sample(number, text) for number, text in enumerate(texts)))
    shown = [one["text"] for one in run["samples"]]
    assert len(shown) == 30
    assert (shown[0], shown[-1]) == (texts[0], texts[-1])


@pytest.mark.parametrize("prompts", [2, 3, 7, 30, 40])
def test_of_very_many_samples_a_step_that_is_shown_has_those_of_all_prompts(told, prompts):
    names = [f"prompt {number}" for number in range(prompts)]
    steps = range(0, 5000, 10)
    run = told(launch(), *(stories.sample(at, "text", name) for at in steps for name in names))
    shown = [(one["told"][0], one["prompt"]) for one in run["samples"]]
    told_steps = list(dict.fromkeys(step for step, _ in shown))
    assert shown == [(step, name) for step in told_steps for name in names]
    assert (told_steps[0], told_steps[-1]) == ("0", "4,990")
    assert MOST_SAMPLES - prompts < len(shown) <= max(MOST_SAMPLES, 2 * prompts)


def test_time_left_is_that_of_the_newest_stage(tmp_path):
    fast = [step(number, 3.0) | {"seconds": 20 + 0.5 * (number - 9)} for number in range(10, 20)]
    stages = stories.stage(0, "eager", 4), stories.stage(10, "compiled", 8, "compiled in 1 s")
    records = [launch(), stages[0], *STEPS, stages[1], *fast]
    outcome = outcome_of(read_history(write(tmp_path, records)))
    assert outcome.seconds_left == pytest.approx(80 * 0.5)


def test_nothing_that_a_file_says_ends_the_script_it_stands_in():
    evil = "</script><script>alert(1)</script><!--\u2028\u2029\ud800"
    data = as_data({evil: [evil]})
    assert "<" not in data
    assert data.isascii()
    assert json.loads(data) == {evil: [evil]}


def test_a_very_long_run_makes_a_page_that_is_no_larger_than_3_mb(tmp_path):
    history = History(tmp_path, story=[launch(steps=250_000)])
    values = stories.losses(250_000)
    for number, loss in enumerate(values):
        history.steps.add(step(number, loss, grad_norm=loss * 0.1, **stories.band(number)))
    for runs in ([history], 3 * [history]):
        report = report_of(runs, made=0.0)
        assert len(page_of(report)) < 3e6
        assert float(f"{values[125_000]:.6g}") in report["runs"][0]["curve"]["loss"]  # the spike
