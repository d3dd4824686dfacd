"""Every event has a sentence, and the sentence has every number of its record."""

import ast
import re

import pytest

from nanofit.run.words import SENTENCES, changed_numbers, is_warning, sentence
from nanofit.settings.config import PROJECT

EVENTS = ("event", "_event", "note")
STAGE = {"now": "eager", "micro_batch": 4, "passes": 3}
CALM = [
    ("started", {"micro_batch": 4}),
    ("resumed", {"micro_batch": 4, "compiled_micro_batch": 6, "limit_mib": 763, "savers": "x"}),
    ("stage", {**STAGE, "reason": "compiled in 19 s"}),
    ("stage", {**STAGE, "reason": "memory was quiet for a while"}),
    ("stage measured", {**STAGE, "tokens_per_s": 950, "peak_mib": 519}),
    ("stage measured", {**STAGE, "tokens_per_s": 950, "peak_mib": 519, "times_faster": 1.58}),
    ("length fixed", {"max_iters": 9000, "hours": 24.0}),
    ("saved", {"path": "out/ckpt-00000006.pt", "mib": 1.5, "took": 0.25}),
    ("machine changed", {"torch": "2.13.0, before 2.12.0", "processes": "2, before 1"}),
    ("stopped", {}),
    ("finished", {}),
]
TROUBLE = [
    ("data changed", {"val": "as many tokens, but other ones"}),
    ("stage", {**STAGE, "reason": "out of memory", "next_try_step": 206}),
    ("stage", {**STAGE, "reason": "RuntimeError: no compiler"}),
    ("not compiled yet", {"reason": "out of memory", "next_try_step": 300}),
    ("evaluation shrunk", {"micro_batch": 2, "reason": "out of memory", "next_try_step": 300}),
    ("waiting for memory", {"pause_seconds": 5, "reason": "out of memory"}),
    ("spikes skipped", {"updates": 7}),
    ("loss above what is normal", {"causes": "a learning rate too high"}),
    ("loss below what is normal", {"causes": "text with repeats"}),
    ("save failed", {"reason": "the disk is full"}),
    ("diverged", {"reason": "the loss is nan"}),
    ("rolled back", {"left_out_steps": 12}),
    ("went back", {"reason": "an update ran out of memory"}),
]


def test_the_words_are_those_of_a_person():
    measured = {"now": "eager", "micro_batch": 4, "passes": 1, "tokens_per_s": 1579}
    told = sentence("stage measured", {**measured, "peak_mib": 519})
    assert told == "eager: 4 sequences a pass, 1.58k tokens/s, peak 519 MiB"


@pytest.mark.parametrize(("name", "details"), CALM + TROUBLE)
def test_a_sentence_tells_all_that_its_record_holds(name, details):
    told = sentence(name, details)
    assert not any("_" in word for word in told.split())  # no key
    for value in details.values():
        text = value if isinstance(value, str) else f"{value:g}"
        assert re.search(rf"(?<!\w){re.escape(text)}s?(?!\w)", told), (value, told)


@pytest.mark.parametrize(("name", "details"), CALM + TROUBLE)
def test_only_trouble_is_a_warning(name, details):
    assert is_warning(name, details) == ((name, details) in TROUBLE)


def test_every_event_that_the_code_knows_is_written_and_no_other():
    written = {"started", "resumed", "stopped", "finished"}  # named by a condition
    written |= {"data changed", "machine changed"}  # found at the launch
    for path in [PROJECT / "train.py", *PROJECT.glob("nanofit/run/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") not in EVENTS:
                continue
            for name in node.args[1:2]:
                if isinstance(name, ast.Constant):
                    written.add(name.value)
                elif isinstance(name, ast.JoinedStr):
                    written |= {f"loss {where} what is normal" for where in ("above", "below")}
    told = {name for name, _ in CALM + TROUBLE}
    assert written == told
    assert set(SENTENCES) == told - {"stopped", "finished"}  # which are words already


def test_an_event_nobody_wrote_words_for_is_told_in_keys_and_values():
    told = sentence("moon eclipsed", {"share": 0.5, "left_seconds": 190})
    assert told == "moon eclipsed  share 0.5  left_seconds 3m10s"


def test_the_first_stage_is_not_told_twice():
    for reason in ("the run begins", "resumed"):
        assert sentence("stage", {**STAGE, "reason": reason}) == ""
        assert not is_warning("stage", {**STAGE, "reason": reason})


def test_numbers_that_changed_are_found_as_they_stand():
    before = "eager: 4 sequences a pass, 1.58k tokens/s, peak 1,519 MiB"
    now = "compiled: 8 sequences a pass, 2.58k tokens/s (1.6 × eager), peak 1,519 MiB"
    assert changed_numbers(before, now) == ["8", "2.58k", "1.6"]
    assert changed_numbers(now, now) == []
    assert changed_numbers("", "at step 20, then 20") == ["20"]
