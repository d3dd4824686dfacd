"""A run's figures against sums done by hand, and its speed against published runs."""

import re
from dataclasses import replace

import pytest

from nanofit.machine.cards import CARDS, find_card, known_card
from nanofit.outlook.forecast import (
    PUBLISHED_RUNS,
    Forecast,
    PublishedRun,
    expected_share,
    predicted_tokens_per_s,
    reached_share,
    step_of,
)
from nanofit.outlook.roofline import Step
from nanofit.outlook.scaling import expected_band, expected_loss
from nanofit.settings.shape import GPTConfig

GPT2 = GPTConfig(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50304)
# nanochat's d12: compiled, AdamW and Muon; value embeddings make up most of its parameters.
NANOCHAT = PublishedRun(
    "GeForce RTX 4070",
    55_700,
    Step(
        n_layer=12,
        n_embd=768,
        block_size=2048,
        vocab_size=32768,
        lookup_parameters=7 * 32768 * 768,
        head_is_embedding=False,
        micro_batch_size=8,
        passes=32,
    ),
)
# Karpathy's "Let's reproduce GPT-2 (124M)": 90 ms for a step of 16 × 1024 tokens.
A100 = PublishedRun(
    "A100-SXM4-80GB", 16_384 / 0.090, replace(PUBLISHED_RUNS[0].step, micro_batch_size=16, passes=1)
)

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


def test_parameters_of_the_published_run_of_nanochat_are_its_own():
    assert NANOCHAT.step.parameters == pytest.approx(286_261_730, rel=1e-5)


@pytest.mark.parametrize("run", PUBLISHED_RUNS, ids=lambda run: run.card)
def test_speed_of_the_published_runs_is_predicted_for_our_step_which_moves_less(run):
    """For each logit nanoGPT's step moves 12 bytes, ours 4: 4 % of the time on one, 6 on the other.

    What our chunks move beside their logits is hidden by the arithmetic of their products.
    """
    card, size = known_card(run.card), run.step.micro_batch_size
    sequences = size * run.step.passes
    step = step_of(GPT2, "chunked", micro_batch_size=size, sequences_per_step=sequences)
    spared_s = 8 * 50304 / card.bytes_per_s / reached_share(run)  # for a token
    expected = 1 / (1 / run.tokens_per_s - spared_s)
    assert predicted_tokens_per_s(card, step) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("run", [NANOCHAT, A100], ids=lambda run: run.card)
def test_published_runs_that_nothing_was_taken_from_are_predicted_within_15_percent(run):
    predicted = predicted_tokens_per_s(known_card(run.card), run.step)
    assert predicted == pytest.approx(run.tokens_per_s, rel=0.15)


def test_a_roofline_predicts_published_runs_better_than_one_efficiency_does():
    runs = [(PUBLISHED_RUNS[0], 855e6), (PUBLISHED_RUNS[1], 855e6), (NANOCHAT, 887e6)]
    efficiencies = [
        run.tokens_per_s * flops_per_token / known_card(run.card).peak_flops
        for run, flops_per_token in runs
    ]
    shares = [reached_share(run) for run, _ in runs]
    assert max(shares) / min(shares) < 0.92 * max(efficiencies) / min(efficiencies)


def test_what_a_card_reaches_lies_between_the_published_ones():
    slow, fast = (reached_share(run) for run in PUBLISHED_RUNS)
    assert expected_share(find_card("4070")) == expected_share(find_card("3060")) == slow
    assert expected_share(find_card("4090")) == expected_share(find_card("H100")) == fast
    assert slow > expected_share(find_card("4080")) > fast


@pytest.mark.parametrize("generation", ["20", "30", "40", "50"])
def test_a_dearer_card_of_a_generation_is_predicted_to_be_the_faster_one(generation):
    desktop = rf"GeForce RTX {generation}\d\d( D)?( Ti)?( SUPER)?"
    cards = [card for card in CARDS if re.fullmatch(desktop, card.name)]
    step = step_of(GPT2, "chunked", micro_batch_size=12, sequences_per_step=480)
    speeds = [predicted_tokens_per_s(card, step) for card in cards]
    assert speeds == sorted(speeds)


def test_without_compiling_it_is_slower():
    card, step = find_card("4070"), PUBLISHED_RUNS[0].step
    ratio = predicted_tokens_per_s(card, step) / predicted_tokens_per_s(card, step, compiled=False)
    assert 1.5 <= ratio <= 1.85
