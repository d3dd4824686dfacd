"""The picture shows the simulation's own numbers, in lines that fit a terminal."""

import sys

import pytest
from rich.console import Console

from nanofit.memory.picture import draw, save_png, second_step
from nanofit.memory.setup import Setup
from nanofit.terminal import InputError
from tests.memory.simulations import TINY, simulate

PHASES = ["forward 1", "backward 1", "forward 2", "backward 2", "update", "evaluation"]


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def simulation(request):
    return simulate(Setup(TINY, compiled=request.param), 32)


def test_second_step_reaches_the_peak_and_ends_with_weights_and_state(simulation):
    moments = second_step(simulation)
    assert list(dict.fromkeys(moment.phase for moment in moments)) == PHASES
    assert max(moment.total for moment in moments) == simulation.peak_bytes
    highest = max(moments, key=lambda moment: moment.total)
    at_peak = simulation.components_at_peak()
    assert {name: size for name, size in highest.sizes.items() if size} == dict(at_peak)
    assert moments[-1].sizes["weights"] == at_peak["weights"]
    assert moments[-1].sizes["optimiser state"] == at_peak["optimiser state"]


def test_piped_picture_fits_100_columns_and_names_phases_and_components(simulation):
    lines = _drawn(simulation, None)
    assert max(map(len, lines)) <= 100
    for name in (*PHASES, "weights", "optimiser state", "activations", "logits and loss"):
        assert any(name in line for line in lines), name


def test_height_of_the_drawn_column_is_the_memory_it_stands_for(simulation):
    rows = [line for line in _drawn(simulation, None) if "┤" in line]
    heights = [sum(row[8:].ljust(100)[x] != " " for row in rows) for x in range(80)]
    highest = heights.index(max(heights))
    assert max(heights) == len(rows)
    moments = second_step(simulation)
    weights_and_state = min(moment.total for moment in moments) / simulation.peak_bytes
    assert min(heights) == pytest.approx(weights_and_state * len(rows), abs=1)
    phases = next(line for line in _drawn(simulation, None) if "forward 2" in line)
    assert phases.index("forward 2") - 8 <= highest < phases.index("update") - 8


def test_limit_near_the_peak_is_a_line_and_a_far_one_is_named(simulation):
    peak = simulation.peak_bytes
    (line,) = (line for line in _drawn(simulation, 1.2 * peak) if "limit" in line)
    assert set(line.split("┤")[1].strip()) == {"─"}
    (line,) = (line for line in _drawn(simulation, 0.8 * peak) if "limit" in line)
    assert {"─"} < set(line.split("┤")[1].strip())  # something is above it
    (line,) = (line for line in _drawn(simulation, 50 * peak) if "limit" in line)
    assert f"{50 * peak / 2**30:.2f} GiB" in line


def test_png_is_a_picture(simulation, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "memory.png"
    save_png(simulation, simulation.peak_bytes * 1.1, title="a step", path=path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="cannot be written"):
        save_png(simulation, None, title="a step", path=tmp_path / "nowhere" / "memory.png")


def test_missing_matplotlib_is_told_with_the_way_out(simulation, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="pip install 'matplotlib"):
        save_png(simulation, None, title="a step", path=tmp_path / "memory.png")


def _drawn(simulation, limit_bytes) -> list[str]:
    console = Console(width=100, highlight=False, force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(draw(simulation, limit_bytes))
    return captured.get().splitlines()
