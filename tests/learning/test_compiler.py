"""Compiling in place: what the compiled model keeps, and the way back."""

import pytest
import torch

from model import GPT
from nanofit.learning.compiler import compile_in_place, uncompile
from nanofit.settings.shape import GPTConfig

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=512)


@pytest.fixture
def _whole_budget_again():
    yield
    compile_in_place(GPT(SHAPE))


@pytest.mark.slow
@pytest.mark.usefixtures("_whole_budget_again")
def test_loss_is_computed_once_however_small_the_memory_budget():
    torch._dynamo.reset()
    idx = torch.randint(0, 512, (4, 64))
    model = GPT(SHAPE)
    model(idx, idx).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    compile_in_place(model, 0.2)
    model.zero_grad(set_to_none=True)
    model(idx, idx).backward()  # compiles
    model.zero_grad(set_to_none=True)
    with torch.profiler.profile() as profile:
        model(idx, idx).backward()
    calls = [event for event in profile.events() if event.name == "nanofit::loss_sum"]
    assert len(calls) == 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_uncompiled_model_runs_as_it_is_written():
    idx = torch.randint(0, 512, (2, 64))
    model = GPT(SHAPE, recompute="block")
    expected = model(idx, idx)
    compile_in_place(model)
    assert model.recompute == "off"
    uncompile(model, "block")
    assert model.recompute == "block"
    assert torch.equal(model(idx, idx), expected)
