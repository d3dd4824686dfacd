"""Divergence: told from noise, and kept from the weights, by plain numbers and real steps."""

import copy
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from model import GPT
from nanofit.data.loader import MicroBatch
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import train_step
from nanofit.machine.device import describe_device
from nanofit.machine.dist import Ranks
from nanofit.run.spikes import HOPELESS_SKIPS, PATIENCE, LossWatch, SkipWatch
from nanofit.settings.config import TrainConfig
from nanofit.settings.shape import GPTConfig

SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=4, vocab_size=16)


def show(watch, losses, norm=1.0):
    """What is seen at the last of some losses."""
    for loss in losses:
        sight = watch.look(torch.tensor(float(loss)), torch.tensor(norm))
    return sight


def noisy_descent(steps):
    random = np.random.default_rng(3)
    return 3 + 6 * np.exp(-np.arange(steps) / 100) + 0.1 * random.standard_normal(steps)


def test_a_normal_run_is_never_suspect():
    watch = LossWatch()
    for loss in noisy_descent(3000):
        assert show(watch, [loss]) == (None, False, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_no_number_is_divergence_at_once(bad):
    assert show(LossWatch(), [5, bad]).divergence == f"the loss is {bad}"
    assert show(LossWatch(), [5], norm=bad).divergence == f"the gradient norm is {bad}"


def test_a_gradient_that_overflows_float16_is_left_to_its_scaler():
    watch = LossWatch(norms_may_overflow=True)
    assert show(watch, [5], norm=math.inf).divergence is None
    assert show(watch, [math.nan]).divergence


def test_a_jump_that_lasts_is_divergence_and_a_short_one_is_not():
    watch = LossWatch()
    show(watch, noisy_descent(500))
    assert show(watch, [9.0] * (PATIENCE - 1)) == (None, True, 0)
    assert show(watch, [3.0]) == (None, False, 0)
    lasting = show(watch, [9.0] * PATIENCE)
    assert "the loss jumped from 3." in lasting.divergence and "to 9.00" in lasting.divergence
    assert show(watch, [9.0] * (PATIENCE - 1)) == (None, True, 0)  # after going back, as before


def test_a_jump_of_nine_deviations_is_let_pass_and_of_eleven_is_not():
    usual = [1.0, 3.0] * 32  # mean 2, standard deviation 1
    for sigmas, is_suspect in ((9, False), (11, True)):
        watch = LossWatch()
        show(watch, usual)
        assert show(watch, [2 + sigmas]).is_suspect == is_suspect


def test_first_losses_are_not_judged():
    assert not show(LossWatch(), [1.0] * 15 + [1000.0]).is_suspect


def learn(optimizer, weight, gradients):
    """An update with each gradient, all of whose elements are the same."""
    for gradient in gradients:
        weight.grad = torch.full((3,), gradient)
        optimizer.grad_norm = weight.grad.norm()
        optimizer.step()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 100.0])
def test_an_update_from_a_spike_leaves_weights_and_moments_alone(bad):
    """Against a run that never saw the spike."""
    parameters = []
    for gradients in ([1.0, 2.0, bad, 1.5, 0.5], [1.0, 2.0, 1.5, 0.5]):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        watch = SkipWatch(optimizer)
        learn(optimizer, weight, gradients)
        parameters.append(weight.detach())
    assert torch.equal(*parameters)
    assert watch.look(None, None).skipped == 0


def test_skips_are_told_once_and_too_many_in_a_row_are_divergence():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    watch = SkipWatch(optimizer)

    def step(*gradients):
        learn(optimizer, weight, gradients)
        return watch.look(None, None)

    assert step(1.0, math.nan, 1.0, math.nan) == (None, False, 2)
    assert step(1.0) == (None, False, 0)
    state = optimizer.state_dict()
    assert step(*[math.nan] * (HOPELESS_SKIPS - 1)).divergence is None
    assert "20 updates in a row" in step(math.nan).divergence
    # What it knows goes with the optimiser's state.
    again = torch.optim.AdamW([weight], fused=True)
    again.load_state_dict(state)
    assert SkipWatch(again).look(None, None).skipped == 0
    assert again.param_groups[0]["spike_memory"].tolist() == pytest.approx([math.sqrt(3), 2, 0])


def test_skips_of_a_state_that_was_gone_back_to_are_told_neither_again_nor_as_fewer_than_none():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    watch = SkipWatch(optimizer)

    def step(*gradients):
        learn(optimizer, weight, gradients)
        return watch.look(None, None).skipped

    assert step(1.0, math.nan, 1.0) == 1
    state = copy.deepcopy(optimizer.state_dict())
    assert step(math.nan, 1.0, math.nan) == 2
    optimizer.load_state_dict(state)
    assert step(1.0) == 0
    assert step(math.nan) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_real_steps_skip_without_waiting_for_the_device(dtype):
    device = describe_device("cpu", dtype)
    with FakeTensorMode():
        model = GPT(SHAPE)
        optimizer, scaler = build_optimizer(model, TrainConfig()), device.grad_scaler()
        SkipWatch(optimizer, is_scaled=scaler.is_enabled())
        for _ in range(2):
            take_step(model, optimizer, scaler, device)
        with pytest.raises(DataDependentOutputException):  # there is no value to wait for
            optimizer.param_groups[0]["spike_memory"].tolist()


def test_a_float16_overflow_is_the_scalers_and_no_spike():
    device = describe_device("cpu", "float16")
    model = GPT(SHAPE)
    optimizer, scaler = build_optimizer(model, TrainConfig()), device.grad_scaler()
    watch = SkipWatch(optimizer, is_scaled=True)
    before = model.lm_head.weight.detach().clone()
    scaler._init_scale = 2.0**40
    take_step(model, optimizer, scaler, device)
    assert watch.look(None, None).skipped == 0
    assert torch.equal(model.lm_head.weight, before)
    scaler.update(2.0**10)
    take_step(model, optimizer, scaler, device)
    assert not torch.equal(model.lm_head.weight, before)


def take_step(model, optimizer, scaler, device):
    tokens = torch.randint(0, 16, (2, 5))
    batches = [MicroBatch(tokens[:, :-1], tokens[:, 1:], 1.0)]
    arguments = dict(device=device, ranks=Ranks(), lr=1e-2, grad_clip=1.0, seed=0)
    return train_step(model, optimizer, scaler, batches, **arguments)
