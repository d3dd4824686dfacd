"""The report as a browser shows it, against the records it was made from."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from nanofit.report.history import History, read_history
from nanofit.report.page import page_of
from nanofit.report.report import report_of
from tests import processes
from tests.report import stories
from tests.report.page.conftest import DESKTOP, PHONE
from tests.report.stories import event, launch, step, write

# Of each line of a chart: what it is, how many points it has, and their values.
LINES = """host => host.chart.lines.map((line, index) => {
    const xs = host.chart.data[0], ys = host.chart.data[index + 1];
    const at = xs.map((_, place) => place).filter((place) => ys[place] !== undefined);
    return [line.kind, at.map((place) => xs[place]), at.map((place) => ys[place])];
})"""
# How far tables stick out of the boxes in which they would be scrolled.
OUT_OF_ITS_BOX = """tables =>
    tables.map((table) => table.scrollWidth - table.parentElement.clientWidth)"""
# Whether anything is drawn above the plot within some pixels of a place on its axis.
IS_MARKED = """([host, x]) => {
    const chart = host.chart, ratio = devicePixelRatio;
    const at = (chart.bbox.left / ratio + chart.valToPos(x, "x")) * ratio;
    const room = chart.ctx.getImageData(at - 3 * ratio, 0, 6 * ratio, chart.bbox.top);
    return room.data.some((value) => value > 0);
}"""


@pytest.fixture
def report(tmp_path):
    """Write the report of some runs, each a list of records."""

    def make(*runs: list, name: str = "run") -> Path:
        folders = [write(tmp_path / f"{name}-{number}", run) for number, run in enumerate(runs)]
        page = tmp_path / "report.html"
        histories = [read_history(folder) for folder in folders]
        page.write_text(page_of(report_of(histories, made=time.time())), encoding="utf-8")
        return page

    return make


def lines_of(page, host: str = "#loss-plot") -> dict[str, tuple[list[float], list[float]]]:
    found = page.locator(host).evaluate(LINES)
    assert len({kind for kind, *_ in found}) == len(found) or "band" in [one[0] for one in found]
    return {kind: (xs, ys) for kind, xs, ys in found}


def of_kind(records: list[dict], kind: str) -> list[dict]:
    return [record for record in records if record["kind"] == kind]


def column(records: list[dict], name: str):
    return pytest.approx([record[name] for record in records], rel=1e-5)


def test_the_chart_holds_every_loss_at_its_tokens_and_at_its_time(report, show):
    records = stories.whole_run()
    page = show(report(records))
    steps, evaluations = of_kind(records, "step"), of_kind(records, "eval")
    lines = lines_of(page)
    assert lines["step"] == (column(steps, "tokens"), column(steps, "loss"))
    assert lines["validation"] == (column(evaluations, "tokens"), column(evaluations, "val_loss"))
    assert lines["band"] == (column(steps, "tokens"), column(steps, "expected_low"))
    page.get_by_text("seconds", exact=True).click()
    xs, ys = lines_of(page)["step"]
    assert (xs, ys) == (column(steps, "seconds"), column(steps, "loss"))
    measures = page.locator("#measures .plot")
    assert measures.count() == 6
    names = ("val_loss", "bits_per_byte", "lr", "grad_norm", "tokens_per_s", "mfu")
    for number, name in enumerate(names):
        [(_, _, ys)] = measures.nth(number).evaluate(LINES)
        assert ys == column(evaluations if number < 2 else steps, name)


@pytest.mark.slow
def test_a_very_long_run_is_opened_with_half_a_second_of_computing(tmp_path, show):
    """Of the browser's process for it, from its beginning: so the machine may be busy."""
    story = [launch(steps=250_000), stories.stage(0, "eager", 4)]
    history = History(tmp_path, story=story)
    for number, loss in enumerate(stories.losses(250_000)):
        history.steps.add(step(number, loss, grad_norm=loss * 0.1, **stories.band(number)))
    place = tmp_path / "report.html"
    place.write_text(page_of(report_of([history], made=time.time())), encoding="utf-8")
    page = show(place)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
    counted = page.context.new_cdp_session(page)
    counted.send("Performance.enable")
    metrics = counted.send("Performance.getMetrics")["metrics"]
    [seconds] = [one["value"] for one in metrics if one["name"] == "ProcessTime"]
    assert len(lines_of(page)["step"][0]) > 1000
    assert 0 < seconds < 0.5


@pytest.mark.parametrize("loss", [10.81, 0.0, 1e9])
def test_ticks_that_are_close_together_are_told_apart(report, show, loss):
    records = [launch(), *(step(number, loss * (1 + 1e-6 * number)) for number in range(50))]
    page = show(report(records))
    told = page.locator("#loss-plot").evaluate("host => host.chart.axes[1]._values")
    assert len(told) == len(set(told)) > 2


def test_band_and_marks_are_drawn_and_told(report, show):
    page = show(report(stories.whole_run()))
    plot = page.locator("#loss-plot")
    assert plot.evaluate("host => host.chart.bands.length") == 1
    marked = [
        number
        for number in range(0, 100, 5)
        if page.evaluate(IS_MARKED, [plot.element_handle(), number * stories.TOKENS_PER_STEP])
    ]
    assert marked == [10, 20, 50, 75]
    rows = page.locator("#happened tbody tr")
    assert rows.count() == 5
    assert "skipped 1 update" in rows.nth(2).inner_text()
    assert page.locator("#stages tbody tr").count() == 3


def test_several_runs_are_drawn_together(report, show):
    runs = [stories.whole_run(100, seed=0), stories.whole_run(60, seed=1)]
    for record in of_kind(runs[1], "run"):
        record["settings"]["learning_rate"] = 0.5
    page = show(report(*runs))
    found = page.locator("#loss-plot").evaluate(LINES)
    drawn = [ys for kind, _, ys in found if kind == "step"]
    assert drawn == [column(of_kind(run, "step"), "loss") for run in runs]
    assert page.locator("#settings tbody").first.inner_text().split() == [
        *("learning_rate", "0.0006", "0.001", "0.5")
    ]
    page.get_by_role("button", name="run-1").click()
    shown = page.locator("#loss-plot").evaluate(
        "host => host.chart.lines.map((line, n) => [line.run.name, host.chart.series[n + 1].show])"
    )
    assert {name for name, is_shown in shown if is_shown} == {"run-0"}
    assert {name for name, is_shown in shown if not is_shown} == {"run-1"}


def test_samples_of_all_prompts_at_the_newest_step_are_open(report, show):
    prompts, steps = ["Once", "One day", "The river"], (20, 40, 60)
    samples = [stories.sample(at, f" at {at}", prompt) for at in steps for prompt in prompts]
    page = show(report([launch(), *samples, step(60, 3.0)]))
    shown = page.locator("#samples article:visible p")
    assert sorted(shown.all_inner_texts()) == sorted(f"{prompt} at 60" for prompt in prompts)
    page.get_by_text("6 earlier").click()
    assert shown.count() == len(samples)


@pytest.mark.parametrize(
    "section",
    [
        "plan",
        "stages",
        "memory",
    ],
)
def test_no_table_of_two_runs_side_by_side_is_wider_than_its_box(report, show, section):
    runs = [stories.whole_run(100, seed=0), stories.whole_run(100, seed=1)]
    for record in of_kind(runs[0] + runs[1], "run"):
        record["machine"] = {"device": "CPU, 2 threads"}  # of whose memory more is to be told
    page = show(report(*runs))
    runs = page.locator(f"#{section} .per-run")
    one, other = (runs.nth(number).bounding_box() for number in range(2))
    assert one["y"] == other["y"] and one["x"] < other["x"]
    out = page.locator(f"#{section} table").evaluate_all(OUT_OF_ITS_BOX)
    assert len(out) == 2 and max(out) <= 0


NAN = [step(number, None, grad_norm=None) for number in range(50, 60)]
DIVERGED = [launch(), *(step(n, 3.0) for n in range(50)), *NAN]
STATES = {
    "begun": [launch()],
    "a step": [launch(), step(0, 11.0)],
    "running": [launch(), *stories.whole_run()[3:60]],
    "finished": stories.whole_run(),
    "stopped": [*stories.whole_run()[:-1], event(100, "stopped")],
    "diverged": [*DIVERGED, event(60, "diverged", reason="the loss is nan")],
    "damaged": [*stories.whole_run()[:50], '{"kind": "st', "\x00", *stories.whole_run()[50:]],
    "without a launch": of_kind(stories.whole_run(), "step"),
    "evaluated alone": [launch(), stories.evaluation(1, 3.0)],
}


@pytest.mark.parametrize("state", STATES)
def test_a_run_looks_right_in_every_state_on_a_desktop_and_on_a_phone(report, show, state):
    path = report(STATES[state])
    for size, scheme in ((DESKTOP, "light"), (PHONE, "dark")):
        page = show(path, size=size, scheme=scheme)
        told = json.loads(page.locator("#data").text_content())["runs"][0]
        assert page.locator("#verdict").inner_text() == told["verdict"]
        assert told["state"] in page.locator("#state").inner_text()
        has_losses = "loss" in told["curve"] or "val_loss" in told["evaluations"]
        assert page.locator("#loss-plot canvas").count() == has_losses
        assert page.locator("#loss-plot .empty").count() == (not has_losses)
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert page.locator("h2:visible").count() == page.locator("section:visible").count()
        assert ("left out: 2." in page.locator("footer").inner_text()) == (state == "damaged")


def test_light_and_dark_follow_the_system_until_one_is_chosen(report, show):
    path = report(stories.whole_run())
    light, dark = show(path), show(path, scheme="dark")
    assert brightness(light) > 200
    assert brightness(dark) < 60
    light.locator("#theme").click()
    assert brightness(light) < 60
    light.reload()
    assert brightness(light) < 60


def brightness(page) -> float:
    """Of the paper, and where it is told of the canvas's ink, of what is on it."""
    colours = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return max(map(float, colours.removeprefix("rgb(").removesuffix(")").split(",")))


def test_arrows_move_along_the_curve_and_its_values_are_told(report, show):
    records = stories.whole_run()
    page = show(report(records))
    page.locator("#loss-plot").focus()
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    loss = of_kind(records, "step")[9]["loss"]
    assert f"{loss:.3f}" in page.locator("#legend").inner_text()
    assert page.locator("#readout").inner_text().startswith("10k tokens")
    assert "compiled in 9 s" in page.locator("#readout").inner_text()


def test_what_a_metrics_file_says_is_shown_and_never_run(report, show):
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    poisoned = [poison(record, evil) for record in stories.whole_run()]
    path = report(poisoned, poisoned, name="<img src=x onerror=alert(3)>")
    page = show(path)
    assert page.locator("script").count() == 3
    assert page.locator("img").count() == 0
    assert evil in page.locator("#samples").inner_text()
    assert evil in page.locator("#settings").text_content()
    assert evil in page.locator("#facts").inner_text()
    # And should a page ever hold another script, the browser refuses to run it.
    opened = path.with_name("opened.html")
    opened.write_text(path.read_text().replace("<main>", "<main><script>alert(4)</script>"))
    assert show.complaints == []
    show(opened)
    (refused,) = show.complaints
    assert "Content Security Policy" in refused
    show.complaints.clear()


def test_a_served_page_follows_the_run_and_ends_with_ctrl_c(show, tmp_path):
    folder = write(tmp_path / "run", [launch(), *(step(number, 3.0) for number in range(5))])
    words = [sys.executable, "report.py", folder, "--watch"]
    served = processes.start(words, cwd=processes.PROJECT)
    page = show(served.stdout.readline().split()[0])
    assert page.locator("#verdict").inner_text().startswith("Step 5 of 100")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(5, 3.0)) + "\n" + '{"kind": "step", ')  # being written
    page.get_by_text("Step 6 of 100").wait_for()
    assert page.request.get(f"{page.url}report.html").status == 404
    assert page.request.get(page.url, headers={"Host": "elsewhere.example"}).status == 403
    served.send_signal(signal.SIGINT)
    assert served.wait(timeout=120) == 0
    assert served.stderr.read() == ""


def poison(value, evil: str):
    """The same with every text and every free name made evil; events stay what they are."""
    if isinstance(value, dict):
        return {
            name: one if name in ("kind", "name", "now") else poison(one, evil)
            for name, one in value.items()
        } | ({evil: evil} if "kind" not in value else {})
    return evil if isinstance(value, str) else value
