"""The reader of metrics.jsonl, and the page made of it: any records are a report or bad input."""

import json
import time

from hypothesis import given

from nanofit.report.history import read_history
from nanofit.report.page import as_data
from nanofit.report.report import report_of
from nanofit.terminal import InputError
from tests.fuzz import fuzzed
from tests.hostile import bounded
from tests.mutations import changed, damaged
from tests.report.stories import launch, stage, whole_run

RECORDS = [
    *whole_run(10),
    launch(10, steps=20, data={"folder": "data/other"}),
    stage(10, "compiled", 4, "out of memory"),
    {"kind": "event", "step": 10, "tokens": 1, "seconds": 1.0, "name": "length fixed"}
    | {"max_iters": 30, "hours": 2.0},
    {"kind": "event", "step": 11, "tokens": 1, "seconds": 1.0, "name": "rolled back"}
    | {"left_out_steps": 4},
    {"kind": "event", "step": 11, "tokens": 1, "seconds": 1.0, "name": "diverged"}
    | {"reason": "the loss is nan"},
]
PIECES = [
    *(b"{", b"[", b'"', b"\n", b"null", b"NaN", b"-Infinity", b"1e999", b"\0", b"\xff", b"\\ud800"),
    *(b'{"kind": "event"}\n', b'"step": -5', b'"step": 1e30', b'"seconds": 1e300', b"</script>"),
]


def reported_or_refused(content: bytes, folder) -> None:
    (folder / "metrics.jsonl").write_bytes(content)
    with bounded():
        try:
            histories = [read_history(folder)]
        except InputError as refused:
            assert str(refused)
            return
        shown = as_data(report_of(histories, made=time.time()))
    assert "<" not in shown
    assert json.loads(shown)["runs"][0]["state"]


@fuzzed
@given(records=changed(RECORDS))
def test_any_records_are_a_report_or_bad_input(records, tmp_path_factory):
    records = records if isinstance(records, list) else [records]
    lines = "\n".join(map(json.dumps, records))
    reported_or_refused(lines.encode(), tmp_path_factory.getbasetemp())


VALID = "\n".join(map(json.dumps, RECORDS)).encode()


@fuzzed
@given(content=damaged(VALID, PIECES))
def test_any_bytes_are_a_report_or_bad_input(content, tmp_path_factory):
    reported_or_refused(content, tmp_path_factory.getbasetemp())


def test_what_is_changed_was_valid(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(VALID)
    history = read_history(tmp_path)
    assert (history.damaged_lines, len(history.runs), len(history.evaluations)) == (0, 2, 5)
