"""The scaling law against published runs, and every formula against a number worked out by hand."""

import math

import pytest

from nanofit.outlook.scaling import (
    PUBLISHED_TOKENS,
    effective_tokens,
    expected_band,
    expected_loss,
    model_for,
    muon_factors,
    optimal_tokens,
    recipe_of,
    weight_decay_for,
)

GPT2 = 124.4e6
SMALL = 77.4e6

# (parameters, tokens, recipe, loss): FineWeb validation, blocks of 1024, annealed.
PUBLISHED = [
    (GPT2, 10.26e9, "plain", 3.272),
    (GPT2, 1.70e9, "modern", 3.279),
]
ESTIMATED = [  # ± 0.05 themselves
    (GPT2, 0.65e9, "plain", 3.99),
    (GPT2, 0.65e9, "modern", 3.45),
    (GPT2, 2.6e9, "plain", 3.53),
    (GPT2, 2.6e9, "modern", 3.23),
    (SMALL, 10e9, "plain", 3.39),
    (SMALL, 10e9, "modern", 3.22),
]
TUNED_LEARNING_RATE = [(GPT2, 6.44e9, 3.280), (GPT2, 10e9, 3.227)]


@pytest.mark.parametrize(("parameters", "tokens", "recipe", "loss"), PUBLISHED + ESTIMATED)
def test_the_curves_pass_the_known_points(parameters, tokens, recipe, loss):
    assert expected_loss(parameters, tokens, recipe=recipe) == pytest.approx(loss, abs=0.05)


@pytest.mark.parametrize(("parameters", "tokens", "recipe", "loss"), PUBLISHED)
def test_measured_points_are_met_closely(parameters, tokens, recipe, loss):
    assert expected_loss(parameters, tokens, recipe=recipe) == pytest.approx(loss, abs=0.002)


@pytest.mark.parametrize(("parameters", "tokens", "loss"), TUNED_LEARNING_RATE)
def test_a_tuned_learning_rate_ends_at_the_low_edge_of_the_band(parameters, tokens, loss):
    band = expected_band(parameters, tokens)
    assert band.low <= loss < expected_loss(parameters, tokens) - 0.04


def test_plain_loss_is_the_formula():
    # 520.8 / (1e8)^.35266 = 520.8 / 662.7 = .7859; 1487.7 / (1e9)^.35266 = 1487.7 / 1492.8 = .9966
    assert expected_loss(1e8, 1e9) == pytest.approx(2.105 + 0.7859 + 0.9966, abs=5e-4)


def test_modern_loss_is_the_formula():
    assert expected_loss(124e6, 1e9, recipe="modern") == pytest.approx(2.997 + 0.367)
    # (4)^-.497 = e^(-.497 × 1.386294) = e^-.688988 = .50208
    assert expected_loss(124e6, 4e9, recipe="modern") == pytest.approx(
        2.997 + 0.367 * 0.50208, 1e-5
    )
    # A smaller model loses what it loses on the plain curve.
    lost = expected_loss(62e6, 4e9) - expected_loss(124e6, 4e9)
    assert expected_loss(62e6, 4e9, recipe="modern") - expected_loss(
        124e6, 4e9, recipe="modern"
    ) == pytest.approx(lost)


@pytest.mark.parametrize(
    ("epochs", "worth"), [(1, 1), (4, 0.93), (8, 0.83), (16, 0.66), (32, 0.45), (180, 0.09)]
)
def test_repeated_tokens_are_worth_what_the_paper_says(epochs, worth):
    assert effective_tokens(epochs * 1e9, 1e9) / (epochs * 1e9) == pytest.approx(worth, abs=0.006)


def test_effective_tokens_by_hand():
    assert effective_tokens(5e8, 1e9) == 5e8  # half an epoch: nothing is repeated
    assert effective_tokens(5e8, None) == 5e8  # unknown data are taken for endless
    # 15.388 repeats: one epoch and 15.388 × (1 - 1/e) = 15.388 × .632121 = 9.72707 more
    assert effective_tokens(16.388e9, 1e9) == pytest.approx(10.72707e9, rel=1e-6)
    assert effective_tokens(1e15, 1e9) == pytest.approx(16.388e9)  # all that repeats can give


def test_repeats_help_less_than_new_tokens_but_never_hurt():
    new, repeated, once = (
        expected_loss(GPT2, 10e9),
        expected_loss(GPT2, 10e9, 1e9),
        expected_loss(GPT2, 1e9),
    )
    assert new < repeated < once


def test_too_little_text_gives_no_forecast():
    assert expected_loss(GPT2, 0.19e9) is None
    assert expected_loss(GPT2, 100e9, 1e6) is None  # many epochs of next to nothing
    assert expected_band(GPT2, 0.19e9) is None
    assert expected_loss(GPT2, 0.2e9) is not None


def test_before_the_decay_only_the_upper_edge_is_higher():
    middle = expected_loss(GPT2, 5e9)
    assert expected_band(GPT2, 5e9) == pytest.approx((middle - 0.07, middle + 0.07))
    half, full = (expected_band(GPT2, 5e9, lr_share=share) for share in (0.5, 1.0))
    assert half == pytest.approx((middle - 0.07, middle + 0.07 + 0.125))
    assert full == pytest.approx((middle - 0.07, middle + 0.07 + 0.25))


def test_optimal_tokens_by_hand():
    # 10.5 × (12 × 12 × 768² + 50304 × 768) = 10.5 × (84,934,656 + 38,633,472)
    found = optimal_tokens(n_layer=12, n_embd=768, vocab_size=50304)
    assert found == pytest.approx(1_297_465_344)


def test_model_for_a_budget_spends_it():
    # GPT-2's smallest: 1,297,465,344 tokens × (6 × 123,568,128 + 12 × 12 × 768 × 1024) FLOPs
    budget = 1_297_465_344 * (741_408_768 + 113_246_208)
    assert model_for(budget, block_size=1024, vocab_size=50304) == (12, 12, 768)
    depths = [
        model_for(budget * factor, block_size=1024, vocab_size=50304)[0]
        for factor in (0.1, 0.5, 1.0, 2.0, 10.0)
    ]
    assert depths == sorted(set(depths))
    assert model_for(1e12, block_size=1024, vocab_size=50304) is None
    # Longer sequences cost more attention, so the same budget trains less of a model.
    assert model_for(budget, block_size=16384, vocab_size=50304)[0] < 12


@pytest.mark.parametrize(("parameters", "decay"), [(77e6, 0.07), (124e6, 0.11)])
def test_weight_decay_for_one_shard(parameters, decay):
    assert weight_decay_for(parameters, 0.65e9) == pytest.approx(decay, abs=0.003)


def test_weight_decay_by_hand():
    assert weight_decay_for(1e8, 5e8) == pytest.approx(0.114)  # .57 / 5


def test_settings_of_the_published_run_stay_as_they_are():
    published = muon_factors(n_embd=768, tokens_per_step=524_288, tokens=PUBLISHED_TOKENS)
    assert published == pytest.approx((1, 1, 1))


def test_muon_settings_follow_batch_width_and_length():
    quarter_batch = muon_factors(n_embd=768, tokens_per_step=131_072, tokens=PUBLISHED_TOKENS)
    assert quarter_batch == pytest.approx((0.5, 1, 0.5))
    wide = muon_factors(n_embd=4 * 768, tokens_per_step=524_288, tokens=PUBLISHED_TOKENS)
    assert wide == pytest.approx((1, 0.5, 1))
    long = muon_factors(n_embd=768, tokens_per_step=524_288, tokens=2 * PUBLISHED_TOKENS)
    assert long == pytest.approx((1, 1, 0.5))


def test_data_seen_again_do_not_lessen_muons_decay():
    """As they do not change that of AdamW, which goes by the unique tokens too."""
    run = dict(n_embd=768, tokens_per_step=524_288)
    once = muon_factors(**run, tokens=0.7e9)
    for epochs in (1, 2, 4):
        assert muon_factors(**run, tokens=epochs * 0.7e9, unique_tokens=0.7e9) == once
    assert muon_factors(**run, tokens=0.7e9, unique_tokens=9e9) == once


def test_the_curve_depends_on_architecture_optimiser_and_vocabulary():
    assert recipe_of("gpt2", "adamw", 50304) == recipe_of("gpt2-tanh", "adamw", 50257) == "plain"
    assert recipe_of("modern", "muon", 50304) == "modern"
    assert recipe_of("modern", "adamw", 50304) == recipe_of("gpt2", "muon", 50304) == "plain"
    assert recipe_of("gpt2", "adamw", 64) is recipe_of("modern", "muon", 64) is None


def test_the_exponent_halves_the_reducible_loss_as_it_should():
    by_tokens = [
        expected_loss(GPT2, tokens) - 2.105 - 520.8 / GPT2**0.35266 for tokens in (1e9, 8e9)
    ]
    assert math.log(by_tokens[0] / by_tokens[1], 8) == pytest.approx(0.35266)
