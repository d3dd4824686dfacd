"""The search for the largest micro-batch against trying every size."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanofit.fit.search import find_largest, sizes_for
from nanofit.memory.course import Curve


@dataclass
class Outcome:
    peak_bytes: int | None


def test_sizes_of_480_are_its_divisors_as_far_as_they_lie_close():
    sizes = sizes_for(480)
    assert [size for size in sizes if size <= 120] == [
        size for size in range(1, 121) if 480 % size == 0
    ]
    assert max(size for size in sizes if size <= 14) == 12
    assert max(size for size in sizes if size <= 16) == 16


@pytest.mark.parametrize("sequences", [7, 30, 97, 480, 509])
def test_every_size_wastes_at_most_two_percent_and_only_beyond_small_divisors(sequences):
    divisors = [size for size in range(1, sequences + 1) if sequences % size == 0]
    for size in sizes_for(sequences):
        passes = -(-sequences // size)
        assert passes * size <= 1.02 * sequences
        if size not in divisors:
            assert max(d for d in divisors if d <= size) < 0.75 * size
    assert set(divisors) <= set(sizes_for(sequences))


machines = st.tuples(
    st.integers(0, 2000),  # fixed
    st.integers(1, 100),  # per sequence
    st.integers(50, 20_000),  # limit
)


@given(machine=machines, sequences=st.integers(1, 600), fixed_error=st.floats(-0.5, 0.5))
def test_search_finds_what_trying_all_sizes_finds(machine, sequences, fixed_error):
    fixed, slope, limit = machine
    found = find_largest(
        sizes_for(sequences),
        Curve(fixed * (1 + fixed_error), slope * (1 + fixed_error / 2)).at,
        limit,
        lambda size: Outcome(peak if (peak := fixed + slope * size) <= limit else None),
    )
    surviving = [size for size in sizes_for(sequences) if fixed + slope * size <= limit]
    assert found.size == max(surviving, default=0)


@given(machine=machines)
def test_good_forecast_needs_one_trial_and_its_checks_near_the_limit(machine):
    fixed, slope, limit = machine
    sizes = sizes_for(480)

    def attempt(size):
        peak = fixed + slope * size
        return Outcome(peak if peak <= limit else None)

    found = find_largest(sizes, Curve(fixed, slope).at, limit, attempt)
    assert len(found.trials) == 1
    is_near = fixed + slope * found.size > limit - 0.03 * max(limit - fixed, 0)
    assert found.trial_count == (3 if found.size and is_near else 1)


@given(machine=machines, error=st.floats(0.95, 1.05))
def test_forecast_within_five_percent_needs_at_most_three_sizes(machine, error):
    fixed, slope, limit = machine

    def attempt(size):
        peak = fixed + slope * size
        return Outcome(peak if peak <= limit else None)

    forecast = Curve(fixed * error, slope * error)
    assert len(find_largest(sizes_for(480), forecast.at, limit, attempt).trials) <= 3


def test_size_that_survives_only_by_luck_near_the_limit_is_given_up():
    answers = {16: iter([990, None]), 15: iter([940])}
    found = find_largest(
        [15, 16], Curve(190, 50).at, 1000, lambda size: Outcome(next(answers[size]))
    )
    assert found.size == 15
    assert "16 died" in found.why


def test_hopeless_forecast_costs_a_logarithmic_number_of_trials():
    sizes = list(range(1, 1025))
    found = find_largest(
        sizes, Curve(0, 1).at, 10_000, lambda size: Outcome(100 * size if size <= 100 else None)
    )
    assert found.size == 100
    assert found.trial_count <= 2 + 10 + 4


def test_nothing_survives():
    found = find_largest(sizes_for(8), Curve(0, 1).at, 10, lambda _: Outcome(None))
    assert found.size == 0
    assert found.trial_count <= 4
