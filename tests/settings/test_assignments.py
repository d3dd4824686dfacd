"""Assignments are read as Python would read them, and nothing is ever executed."""

import time
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanofit.settings.assignments import evaluate, read_assignments

ARITHMETIC = st.recursive(
    st.integers(0, 9).map(str) | st.floats(0.1, 9).map(repr),
    lambda parts: st.one_of(
        st.tuples(parts, st.sampled_from("+ - * / // %".split()), parts).map(
            lambda three: f"({' '.join(three)})"
        ),
        parts.map(lambda part: f"-{part}"),
    ),
    max_leaves=8,
)

# Each would run code, reach beyond plain values, or take for ever.
REFUSED = [
    "__import__('os').system('true')",
    "open('/etc/passwd')",
    "print('x')",
    "exec('1')",
    "(1).__class__",
    "'a'.upper()",
    "max_iters.real",
    "[n for n in range(9)]",
    "(n := 5)",
    "lambda: 5",
    "5 if True else 6",
    "1 < 2",
    "not True",
    "True and 5",
    "[1, 2][0]",
    "[1, 2]",
    "(1, 2)",
    "{1: 2}",
    "b'x'",
    "...",
    "1j",
    "~5",
    "1 << 9999999999",
    "1 | 2",
    "f'{max_iters!r}'",
    "f'{open(1)}'",
    "unknown_name",
    "time.time()",
    "'a' * 10**9",
    "10**9 * 'a'",
    "'a' % 5",
    "'%999999999d' % 5",
    "'a' - 'b'",
    "'a' + 5",
    "True + 1",
    "-True",
    "-'a'",
    "1 / 0",
    "1 % 0",
    "0 ** -1",
    "(-1) ** 0.5",
    "10 ** 10 ** 10",
    "(((10 ** 64) ** 64) ** 64) ** 64",
    "10.0 ** 60 ** 60",
    "1e200 * 1e200",
    "1e999",
    "9" * 5000,
    "f'{5:999999999}'",
    "f'{5:{10**9}}'",
    "f'{5.0:.999999999f}'",
    "f'{None:>5}'",
    "f'{5:nonsense}'",
    "+".join("1" * 2_000),  # parsed, but too deep to walk
    "+".join("1" * 20_000),
    "-" * 20_000 + "1",
    "(" * 20_000,
    "",
    "1 +",
    "\0",
]


@contextmanager
def at_once():
    """CPU seconds, so that a busy machine does not matter; what is refused would take minutes."""
    started = time.process_time()
    yield
    assert time.process_time() - started < 2


def read(path, text, names=None):
    """What a file of this text assigns, and its problems."""
    assigned = {}
    path.write_text(text, encoding="utf-8")
    problems = list(read_assignments(path, names or {}, assigned.__setitem__))
    return assigned, problems


@pytest.fixture
def file(tmp_path):
    return tmp_path / "some.py"


@settings(derandomize=True, deadline=None)
@given(ARITHMETIC)
def test_arithmetic_gives_what_python_gives(text):
    try:
        expected = eval(text)
    except ZeroDivisionError:
        with pytest.raises(ValueError):
            evaluate(text, {})
    else:
        assert evaluate(text, {}) == expected
        assert type(evaluate(text, {})) is type(expected)


@pytest.mark.parametrize(
    "text",
    [
        "5 * 8",
        "2**10",
        "2**-1",
        "1_000_000",
        "0x10",
        "-3",
        "+3",
        "'a' 'b'",
        "'a' + 'b'",
        "True",
        "None",
        "'x=y'",
        "f'L{n_layer}-lr{learning_rate}'",
        "f'{learning_rate:.0e}-{n_layer:03d}-{n_layer * 1000:,}'",
        "f'{n_layer + 1}'",
        "f'{{}}'",
        "f'{name}{flag}{nothing}'",
        "n_layer * 2 + 1",
        "name + '-x'",
    ],
)
def test_expressions_give_what_python_gives(text):
    names = {"n_layer": 6, "learning_rate": 3e-4, "name": "run", "flag": True, "nothing": None}
    expected = eval(text, dict(names))
    assert evaluate(text, names) == expected
    assert type(evaluate(text, names)) is type(expected)


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:24])
def test_anything_else_is_refused_at_once(text):
    with at_once(), pytest.raises(ValueError):
        evaluate(text, {"max_iters": 5})


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:24])
def test_a_file_with_it_has_one_problem_told_at_once(file, text):
    with at_once():
        assigned, problems = read(file, f"before = 1\nbad = {text}\nafter = 2", {"max_iters": 5})
    assert [problem.startswith(f"{file}:") for problem in problems] == [True]
    assert assigned in ({"before": 1, "after": 2}, {})  # nothing where the parser itself gives up


@pytest.mark.parametrize("text", ["x = 5", "1; 2", "1\n2", "pass"])
def test_a_value_is_one_expression(text):
    with pytest.raises(ValueError, match="is not a value"):
        evaluate(text, {"x": 1})


@pytest.mark.parametrize(
    "statement",
    [
        "import os",
        "from os import path",
        "import time, os",
        "exec(open('configurator.py').read())",
        "if True:\n    x = 1",
        "for i in range(3): pass",
        "def f():\n    pass",
        "class A: pass",
        "x: int = 5",
        "x += 1",
        "a, b = 1, 2",
        "a = b = 1",
        "a.b = 1",
        "a[0] = 1",
        "del x",
        "assert False",
        "5",
    ],
)
def test_only_plain_assignments_are_statements(file, statement):
    assigned, problems = read(file, f"x = 3\n{statement}\ny = 4", {})
    assert assigned == {"x": 3, "y": 4}
    assert [problem.split(": ")[0] for problem in problems] == [f"{file}:2"]


def test_nothing_in_a_file_is_executed(file, tmp_path):
    trace = tmp_path / "trace"
    calls = (
        f"open({str(trace)!r}, 'w')",
        f"__import__('os').mkdir({str(trace)!r})",
        f"[open({str(trace)!r}, 'w') for _ in (1,)]",
        f"f'{{open(\"{trace}\", chr(119))}}'",
    )
    text = "".join(f"a = {call}\n{call}\n" for call in calls)
    assigned, problems = read(file, text)
    assert (assigned, len(problems)) == ({}, 2 * len(calls))
    assert not trace.exists()
    exec(calls[0])  # and it would have been seen
    assert trace.exists()


def test_a_file_reads_as_python_would_execute_it(file):
    text = (
        '"""What this is."""\n'
        "# a comment\n"
        "_width = 64\n"
        "n_head = 4\n"
        "n_embd = _width * n_head  # a comment\n"
        "n_head = n_head + 1\n"
        "name = (\n    f'{n_embd}-'\n    'x'\n)\n"
        "ratio = n_embd / max_iters\n"
    )
    executed = {"max_iters": 8}
    exec(text, executed)
    assigned, problems = read(file, text, {"max_iters": 8})
    assert problems == []
    assert assigned == {key: executed[key] for key in ("n_head", "n_embd", "name", "ratio")}


def test_helper_names_with_an_underscore_are_not_passed_on(file):
    assigned, problems = read(file, "_tokens = 100\nmax_iters = _tokens // 3")
    assert (assigned, problems) == ({"max_iters": 33}, [])


def test_names_have_no_value_before_they_are_assigned(file):
    _, problems = read(file, "a = b\nb = 1")
    assert problems == [f"{file}:1: b has no value here"]


def test_the_given_names_are_left_alone(file):
    names = {"a": 1}
    read(file, "a = 2\nb = a", names)
    assert names == {"a": 1}


def test_every_problem_is_told_with_its_line(file):
    _, problems = read(file, "a = f()\nb = 1\n\nc = g()\nimport os\n")
    assert [problem.split(":")[1] for problem in problems] == ["1", "4", "5"]


def test_what_is_wrong_with_a_value_is_told_with_its_line(file):
    def refuse(name, value):
        raise ValueError(f"no {name}")

    file.write_text("\n\nx = 1\n")
    assert list(read_assignments(file, {}, refuse)) == [f"{file}:3: no x"]


def test_texts_cannot_grow_without_end(file):
    doubling = "_a = 'xxxxxxxx'\n" + "_a = _a + _a\n_a = f'{_a}{_a}'\n" * 12
    _, problems = read(file, doubling)
    assert problems and "too long" in problems[-1]


@pytest.mark.parametrize(
    "content", [b"a = 'open\n", b"\xff\xfe", b"a = 1\0", b"<html>", b"a == 1 =", b"PK\x03\x04"]
)
def test_a_file_that_is_not_python_is_one_problem(file, content):
    file.write_bytes(content)
    problems = list(read_assignments(file, {}, dict().__setitem__))
    assert len(problems) == 1
    assert "not a file of plain assignments" in problems[0]


def test_a_byte_order_mark_is_no_obstacle(file):
    file.write_bytes(b"\xef\xbb\xbfmax_iters = 5\r\n")
    assigned = {}
    assert list(read_assignments(file, {}, assigned.__setitem__)) == []
    assert assigned == {"max_iters": 5}
