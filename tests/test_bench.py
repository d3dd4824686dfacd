"""What benchmarks have found, and that the README says no more than that."""

import json
import re

import pytest

from bench import figures
from bench.all import COMMANDS
from bench.figures import QUICK, Figure, all_figures, read, record, table, told
from tests.processes import PROJECT

README = (PROJECT / "README.md").read_text(encoding="utf-8")
SUFFIXES = {"": 1, "k": 1e3, "M": 1e6}


def rows() -> list[list[str]]:
    """The README's results: what, the other's, ours, command."""
    results = README.partition("\n## Results\n")[2].partition("\n\n##")[0]
    lines = [line for line in results.splitlines() if line.startswith("| ") and "`make " in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def is_told(cell: str, values: list[float | None]) -> bool:
    """Whether each number of a cell is one of the values, rounded as the cell has it."""
    for digits, suffix in re.findall(r"(\d[\d,]*(?:\.\d+)?)([kM]\b|)", cell):
        number, places = digits.replace(",", ""), len(digits.partition(".")[2])
        known = [value / SUFFIXES[suffix] for value in values if value is not None]
        rounded = {f"{value:.{places}f}" for value in known}
        is_bound = cell.strip("* ").startswith("<")
        if number not in rounded and not (is_bound and any(map(_below(float(number)), known))):
            return False
    return True


def _below(bound: float):
    """For `< 0.75`: a value that is under it, and not by much."""
    return lambda value: 0.9 * bound <= value <= bound


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:40])
def test_each_result_of_the_readme_is_a_figure_that_was_found(row):
    _, other, ours, command = row
    found = [one for one in all_figures() if one["command"] == command.strip("`")]
    assert found, f"no figure is of {command}"
    counted = [one["out_of"] for one in found]
    assert re.search(r"\d", ours)
    assert is_told(ours, [one["ours"] for one in found] + counted), ours
    assert is_told(other, [one["other"] for one in found] + counted), other


def test_a_number_that_was_not_found_is_noticed():
    assert is_told("**16.1 s**", [16.14])
    assert is_told("2.8M", [2_805_000.0])
    assert is_told("< 0.75 GB", [0.747])
    assert not is_told("**16.2 s**", [16.14])
    assert not is_told("16 to 17", [16.14])
    assert not is_told("< 0.75 GB", [0.76])


def test_the_table_is_that_of_the_files():
    assert (figures.RESULTS / "README.md").read_text(encoding="utf-8") == table()
    assert len(rows()) > 5


def test_figures_take_the_place_of_those_of_their_names(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    how = {"command": "make bench-x", "conditions": "idle"}
    record("x", [Figure("time", 4.0, 8.0, "peer", "s"), Figure("kept", 1.0)], **how)
    record("x", [Figure("time", 2.0, 8.0, "peer", "s")], **how)
    kept = {one["name"]: one["ours"] for one in json.loads((tmp_path / "x.json").read_text())}
    assert kept == {"time": 2.0, "kept": 1.0}
    assert "| time | 2 s | 8 s | peer | 4.00 | `make bench-x` |" in table()


def test_quick_figures_stand_beside_those_in_full(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    how = {"command": "make bench-x", "conditions": "idle"}
    record("x", [Figure("time", 8.0)], **how)
    monkeypatch.setenv(QUICK, "1")
    record("x", [Figure("time", 1.0)], **how)
    kept = {one["name"]: (one["ours"], one["command"]) for one in read(tmp_path / "x.json")}
    assert kept == {"time": (8.0, "make bench-x"), "time, quick": (1.0, "python bench/all.py x")}


def test_ratios_say_how_many_times_better_ours_is():
    assert Figure("time", 2.0, 8.0).ratio == 4
    assert Figure("speed", 8.0, 2.0, is_less_better=False).ratio == 4
    assert Figure("alone", 8.0).ratio is None
    assert told(1234.5, "s") == "1,234 s"
    assert told(0.12345, "") == "0.123"
    assert told(1, "", 286) == "1 of 286"


def test_every_benchmark_is_there_and_in_the_makefile():
    named = set(re.findall(r"python bench/(\w+)\.py", (PROJECT / "Makefile").read_text()))
    assert set(COMMANDS) == named - {"all"}
    assert all((PROJECT / f"bench/{name}.py").exists() for name in named)
