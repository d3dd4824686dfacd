"""The learning-rate curve against nanoGPT's and against its description; the decay groups."""

import math
from dataclasses import replace

import pytest
import torch

from model import GPT
from nanofit.learning.optim import (
    build_optimizer,
    decay_start,
    end_in,
    lr_at,
    same_lr_until,
    undecayed_share,
)
from nanofit.settings.config import TrainConfig, load_config
from nanofit.settings.shape import GPTConfig

COSINE = TrainConfig(
    max_iters=1000, lr_decay_iters=800, warmup_iters=100, learning_rate=6e-4, min_lr=6e-5
)
WSD = replace(COSINE, lr_schedule="wsd", lr_decay_iters=None, decay_fraction=0.25)
SMALL = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=512)


def nanogpt_lr(it, learning_rate, warmup_iters, lr_decay_iters, min_lr):
    """nanoGPT's get_lr, its borders included."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


def wsd_lr(step, learn):
    """Straight lines through the corners of the curve."""
    corners = {0: 1 / (learn.warmup_iters + 1) * learn.learning_rate}
    corners[learn.warmup_iters] = learn.learning_rate
    corners[learn.max_iters * (1 - learn.decay_fraction)] = learn.learning_rate
    corners[learn.max_iters] = learn.min_lr
    corners[math.inf] = learn.min_lr
    for (left, low), (right, high) in zip(corners.items(), list(corners.items())[1:], strict=False):
        if left <= step < right:
            share = 0.0 if right == math.inf else (step - left) / (right - left)
            return low + (high - low) * share
    raise AssertionError(step)


@pytest.mark.parametrize("warmup", [0, 1, 100, 799])
def test_cosine_is_nanogpts_at_every_step(warmup):
    learn = replace(COSINE, warmup_iters=warmup)
    for step in range(1001):
        expected = nanogpt_lr(step, 6e-4, warmup, 800, 6e-5)
        assert lr_at(step, learn) == pytest.approx(expected, rel=1e-12)


def test_cosine_ends_with_the_run_unless_told_otherwise():
    told = replace(COSINE, lr_decay_iters=1000)
    untold = replace(COSINE, lr_decay_iters=None)
    assert [lr_at(s, told) for s in range(1100)] == [lr_at(s, untold) for s in range(1100)]


def test_a_warm_up_as_long_as_the_decay_or_longer_divides_by_nothing():
    for warmup in (800, 900):
        rates = [lr_at(s, replace(COSINE, warmup_iters=warmup)) for s in range(1000)]
        assert rates[:warmup] == sorted(rates[:warmup])
        assert set(rates[warmup:]) == {6e-5}


@pytest.mark.parametrize("fraction", [0.01, 0.25, 0.9])
def test_wsd_is_three_straight_lines(fraction):
    learn = replace(WSD, decay_fraction=fraction)
    for step in range(1100):
        assert lr_at(step, learn) == pytest.approx(wsd_lr(step, learn), rel=1e-9)


def test_wsd_stays_level_between_warm_up_and_decay():
    assert decay_start(WSD) == 750
    assert {lr_at(step, WSD) for step in range(100, 751)} == {6e-4}
    assert lr_at(99, WSD) < 6e-4 > lr_at(751, WSD)


def test_wsd_that_only_decays_starts_after_the_warm_up():
    learn = replace(WSD, decay_fraction=1.0)
    assert decay_start(learn) == 100
    assert lr_at(550, learn) == pytest.approx((6e-4 + 6e-5) / 2)


@pytest.mark.parametrize("learn", [COSINE, WSD])
def test_without_decay_the_rate_is_constant_from_the_first_step(learn):
    assert {lr_at(step, replace(learn, decay_lr=False)) for step in range(1100)} == {6e-4}


def test_a_wsd_run_can_be_extended_from_before_its_decay():
    longer = replace(WSD, max_iters=2000)
    assert same_lr_until(decay_start(WSD), WSD, longer)
    assert same_lr_until(decay_start(WSD) + 1, WSD, longer)  # the decay begins at the full rate
    assert not same_lr_until(decay_start(WSD) + 2, WSD, longer)


def test_an_extended_cosine_run_would_have_had_other_rates():
    one = replace(COSINE, lr_decay_iters=None)
    longer = replace(one, max_iters=2000)
    assert same_lr_until(101, one, longer)
    assert not same_lr_until(102, one, longer)
    fixed = replace(COSINE, lr_decay_iters=800)
    assert same_lr_until(5000, fixed, replace(fixed, max_iters=2000))


def test_same_rates_means_the_same_at_each_step_done():
    for other in (COSINE, replace(COSINE, min_lr=1e-5), replace(WSD, warmup_iters=50), WSD):
        for step in (0, 1, 50, 101, 300, 1000):
            pairs = [(lr_at(s, COSINE), lr_at(s, other)) for s in range(step)]
            assert same_lr_until(step, COSINE, other) == all(a == b for a, b in pairs)


def test_undecayed_share_falls_from_one_to_nothing():
    assert undecayed_share(100, COSINE) == 1.0
    assert undecayed_share(450, COSINE) == pytest.approx(0.5)  # half-way from 100 to 800
    assert undecayed_share(800, COSINE) == undecayed_share(999, COSINE) == 0.0
    assert undecayed_share(749, WSD) == 1.0
    assert undecayed_share(875, WSD) == pytest.approx(0.5)
    assert undecayed_share(999, replace(COSINE, decay_lr=False)) == 1.0
    assert undecayed_share(500, replace(COSINE, min_lr=6e-4)) == 1.0  # nothing ever decays


def test_a_schedule_can_be_made_to_end_in_so_many_steps():
    ended = end_in(400, 100, COSINE)
    assert (ended.max_iters, ended.decay_end) == (500, 500)
    ended = end_in(700, 300, WSD)
    assert (ended.max_iters, decay_start(ended)) == (1000, 750)


def test_a_wsd_run_with_no_time_left_to_decay_takes_the_time_of_a_whole_decay():
    ended = end_in(10, 300, WSD)
    assert ended.max_iters == 400  # a quarter of which is the decay
    assert same_lr_until(300, ended, WSD)


@pytest.mark.parametrize(
    ("steps_left", "step", "warmup"),
    [
        (9960, 40, 100),  # a tenth of the run would be more
        (360, 40, 40),  # a tenth of the run, and just done
        (60, 40, 40),  # what is done cannot be undone
        (760, 40, 80),
        (60, 200, 100),  # over: it stays as it was
    ],
)
def test_warm_up_of_a_run_in_hours_is_no_more_than_a_tenth(steps_left, step, warmup):
    ended = end_in(steps_left, step, COSINE)
    assert ended.warmup_iters == warmup
    if step < COSINE.warmup_iters:  # then the full rate is still to come
        assert lr_at(warmup, ended) == COSINE.learning_rate


def test_with_muon_the_rate_is_constant_and_then_linear_to_zero_over_the_last_seven_tenths():
    _, learn, _ = load_config(["--optimizer=muon", "--max_iters=3250"])
    for step in (0, 1, 500, 974, 975):
        assert lr_at(step, learn) == 0.025
    for step in (976, 1500, 3000, 3249, 3250):
        assert lr_at(step, learn) == pytest.approx(0.025 * (3250 - step) / (0.7 * 3250))
    assert lr_at(3250, learn) == 0.0


# the optimiser


@pytest.fixture(scope="module")
def small_model():
    with torch.device("meta"):
        return GPT(SMALL)


def test_decay_groups_are_nanogpts(small_model):
    decayed, rest = build_optimizer(small_model, TrainConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.3, 0.0)
    assert len(decayed["params"]) == 26
    assert sum(p.numel() for p in decayed["params"]) == 30_130_176
    assert len(rest["params"]) == 13
    assert sum(p.numel() for p in rest["params"]) == 13 * 384


def test_parameters_are_counted_as_nanogpt_counts_them(small_model):
    groups = build_optimizer(small_model, TrainConfig()).param_groups
    counted = sum(p.numel() for group in groups for p in group["params"])
    assert counted == small_model.num_params()
    assert f"{(counted - 512 * 384) / 1e6:.2f}M" == "29.94M"
    assert small_model.num_params(positions=False) == counted - 512 * 384


def test_biases_and_norms_are_never_decayed():
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=16, bias=True))
    decayed, rest = build_optimizer(model, TrainConfig()).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in rest["params"]} == {
        name for name in names.values() if ".ln_" in name or name.endswith(".bias")
    }
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


def test_frozen_parameters_are_left_out():
    model = torch.nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    groups = build_optimizer(model, TrainConfig()).param_groups
    assert [len(group["params"]) for group in groups] == [1, 0]


def test_a_fused_step_is_the_adamw_of_the_paper():
    learn = TrainConfig(learning_rate=0.1, beta1=0.8, beta2=0.9, weight_decay=0.5)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    optimizer = build_optimizer(model, learn)
    assert optimizer.defaults["fused"]
    expected = [p.detach().clone() for p in model.parameters()]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in expected]
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        for number, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient
            mean, square = moments[number]
            mean.mul_(0.8).add_(0.2 * gradient)
            square.mul_(0.9).add_(0.1 * gradient**2)
            decay = 0.5 if parameter.dim() == 2 else 0.0
            corrected = (square / (1 - 0.9**step)).sqrt() + 1e-8
            expected[number] *= 1 - 0.1 * decay
            expected[number] -= 0.1 * mean / (1 - 0.8**step) / corrected
        optimizer.step()
    for parameter, value in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-10, atol=1e-12)
