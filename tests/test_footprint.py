"""The closed form against the simulator and, where it promises to be exact, the real model."""

import pytest
from conftest import PROJECT
from simulations import nanogpts_way, simulate
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT, GPTConfig
from nanofit.allocator import rounded
from nanofit.config import load_config
from nanofit.footprint import footprint, parameter_sizes, total
from nanofit.memory import Setup

CONFIGS = sorted(path.name for path in (PROJECT / "config").glob("*.py"))
SMALL = dict(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=2000)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_within_3_percent_of_the_simulator(name, compiled):
    shape, learn, run = load_config([str(PROJECT / "config" / name)])
    dtype = "bfloat16" if run.dtype == "auto" else run.dtype
    setup = Setup(shape, dtype=dtype, compiled=compiled, loss=run.loss)
    simulation = simulate(setup, learn.batch_size)
    lines = footprint(setup, learn.batch_size)
    assert total(lines) == pytest.approx(simulation.peak_bytes, rel=0.03)
    by_component = {line.component: line.size_bytes for line in lines}
    simulated = simulation.components_at_peak()
    for exact in ("weights", "gradients", "optimiser state"):
        assert by_component[exact] == simulated[exact], exact


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("make", [Setup, nanogpts_way], ids=["chunked", "nanoGPT's way"])
def test_a_small_shape_is_within_3_percent_with_either_loss(compiled, make):
    setup = make(GPTConfig(**SMALL), compiled=compiled)
    simulated = simulate(setup, 16).peak_bytes
    assert total(footprint(setup, 16)) == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_those_of_the_real_model(bias):
    shape = GPTConfig(**SMALL, bias=bias)
    with FakeTensorMode():
        sizes = [parameter.numel() for parameter in GPT(shape).parameters()]
    assert sorted(parameter_sizes(shape)) == sorted(sizes)
    weights = footprint(Setup(shape), 1)[0]
    assert weights.size_bytes == sum(rounded(4 * size) for size in sizes)
