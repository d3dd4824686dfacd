"""What savers cost, counted from the work itself, against arithmetic."""

import pytest
from simulations import TINY

from model import GPT
from nanofit.memory import Setup
from nanofit.savers import extra_time, savers_of, step_flops, without_savers

SEQUENCES = 8


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_step_costs_what_the_model_says_per_token(compiled):
    L, C, T = TINY.n_layer, TINY.n_embd, TINY.block_size
    # The model counts two products of attention's backward pass per one forward; flash attention
    # computes the scores again.
    scores_again = 2 * L * C * T
    expected = SEQUENCES * T * (GPT(TINY).flops_per_token() - _vectors() * 6 + scores_again)
    assert step_flops(Setup(TINY, compiled=compiled)) == expected


def _vectors() -> int:
    """Weights that are in no product: the norms'."""
    return (2 * TINY.n_layer + 1) * TINY.n_embd


@pytest.mark.parametrize(("mode", "blocks"), [("selective", 0), ("alternate", 2), ("block", 3)])
def test_recompute_repeats_its_blocks_but_for_the_last_product(mode, blocks):
    C, T = TINY.n_embd, TINY.block_size
    again = blocks * (2 * (3 + 1 + 4) * C**2 + 4 * C * T)  # qkv, out, up; attention
    expected = SEQUENCES * T * again / step_flops(Setup(TINY))
    assert extra_time(Setup(TINY, recompute=mode)) == pytest.approx(expected)


def test_loss_is_not_computed_again_under_half_a_budget():
    setup = Setup(TINY, compiled=True, activation_memory_budget=0.5)
    C, V, T = TINY.n_embd, TINY.vocab_size, TINY.block_size
    of_the_loss = SEQUENCES * T * 6 * C * V / step_flops(without_savers(setup))
    assert extra_time(setup) < of_the_loss


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_saver_is_on_alone(compiled):
    plain = Setup(TINY, compiled=compiled)
    assert len(savers_of(plain)) == 4
    for name, setup in savers_of(plain):
        knob, _, value = name.partition("=")
        assert str(getattr(setup, knob)) == value
        assert setup != plain == without_savers(setup)
