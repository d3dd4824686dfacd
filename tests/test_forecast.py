"""A run's figures against sums done by hand, and its speed against published runs."""

import pytest

from model import GPT, GPTConfig
from nanofit.device import find_card
from nanofit.forecast import Forecast, efficiency_of, predicted_tokens_per_s
from nanofit.scaling import expected_band, expected_loss

RUN = Forecast(
    parameters=100_000_000,
    steps=2000,
    tokens_per_step=500_000,
    decay_end=2000,
    unique_tokens=400_000_000,
    tokens_per_s=50_000.0,
    watts=200,
    recipe="plain",
)


def test_figures_by_hand():
    assert RUN.tokens == 1_000_000_000
    assert RUN.epochs == 2.5
    assert RUN.seconds == 20_000
    assert RUN.kwh == pytest.approx(200 * 20_000 / 3600 / 1000)
    assert RUN.loss == expected_loss(1e8, 1e9, 4e8)
    assert RUN.band == expected_band(1e8, 1e9, 4e8)


def test_what_is_not_known_is_none():
    bare = Forecast(parameters=10, steps=20, tokens_per_step=30)
    assert bare.tokens == 600
    assert [bare.epochs, bare.seconds, bare.kwh, bare.loss, bare.band] == [None] * 5
    assert list(bare.warnings()) == []


def test_a_run_of_other_epochs_moves_its_decay_along():
    longer = RUN.with_epochs(4)
    assert (longer.steps, longer.decay_end) == (3200, 3200)
    assert longer.epochs == 4


def test_a_sound_run_has_no_warnings():
    assert list(RUN.warnings()) == []


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (RUN.with_epochs(5), ["5 epochs over 400M tokens: past 4 repeats fade", "3200 steps"]),
        (RUN.with_epochs(170), ["170 epochs", "past 16 they are waste", "15d", "--hours=24"]),
        (
            Forecast(parameters=1, steps=10, tokens_per_step=1, decay_end=600),
            ["decays until step 600, but the run ends at 10", "--lr_decay_iters=10"],
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_way_out(run, said):
    told = "\n".join(run.warnings())
    for words in said:
        assert words in told


def test_a_run_opens_with_its_time_its_loss_and_its_warnings():
    time_and_loss, warning = RUN.with_epochs(5).outlook()
    low, high = expected_band(1e8, 2e9, 4e8)
    assert time_and_loss == (
        f"plan    about 11h06m on this card, final loss {low:.2f} to {high:.2f} "
        "if the text is like FineWeb's"
    )
    assert warning.startswith("warning 5 epochs")
    assert list(Forecast(parameters=10, steps=20, tokens_per_step=30).outlook()) == []


def test_before_the_decay_the_band_reaches_higher():
    assert RUN.band_before_decay(0.0) == RUN.band
    assert RUN.band_before_decay(1.0).high > RUN.band.high


def test_speed_of_the_published_4070_runs_is_predicted_within_15_percent():
    card = find_card("RTX 4070")
    shape = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)
    nanogpt = predicted_tokens_per_s(card, GPT(shape).flops_per_token())
    assert nanogpt == pytest.approx(56_100, rel=0.15)
    nanochat = predicted_tokens_per_s(card, 887e6)
    assert nanochat == pytest.approx(55_700, rel=0.15)


def test_speed_of_the_published_4090_runs_is_predicted():
    # GPT-2 124M: 6 × 123.6M + 12 × 12 × 768 × 1024 = 855M
    assert 106_000 <= predicted_tokens_per_s(find_card("4090"), 855e6) <= 110_000


def test_a_card_borrows_the_efficiency_of_the_measured_one_nearest_in_speed():
    assert efficiency_of(find_card("3060")) == (0.82, "GeForce RTX 4070")
    assert efficiency_of(find_card("H100")) == (0.56, "GeForce RTX 4090")


def test_without_compiling_it_is_slower():
    card = find_card("4070")
    ratio = predicted_tokens_per_s(card, 1e9) / predicted_tokens_per_s(card, 1e9, compiled=False)
    assert 1.5 <= ratio <= 1.85
