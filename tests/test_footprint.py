"""The closed form against the simulator and, where it promises to be exact, the real model."""

import inspect
import re
from collections import Counter
from functools import partial

import pytest
from conftest import PROJECT
from simulations import nanogpts_way, simulate
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT, MLP, Block, CausalSelfAttention, GPTConfig
from nanofit.allocator import rounded
from nanofit.config import load_config
from nanofit.footprint import footprint, parameter_sizes, total
from nanofit.memory import Setup
from nanofit.trace import Buffer

CONFIGS = sorted(path.name for path in (PROJECT / "config").glob("*.py"))
SMALL = dict(n_layer=2, n_head=2, n_embd=128, block_size=128, vocab_size=2000)
STAGES = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
BIASES = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
DROPOUTS = pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no dropout", "dropout"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
LOSSES = pytest.mark.parametrize(
    "make",
    [Setup, partial(Setup, loss="full"), nanogpts_way],
    ids=["chunked", "full", "nanoGPT's way"],
)
MAKERS = {
    "activations: norms": Block,
    "activations: attention": CausalSelfAttention,
    "activations: MLP": MLP,
    "activations: embedding": GPT,
}


@STAGES
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


@STAGES
@LOSSES
def test_a_small_shape_is_within_3_percent_with_any_loss(compiled, make):
    setup = make(GPTConfig(**SMALL), compiled=compiled)
    simulated = simulate(setup, 16).peak_bytes
    assert total(footprint(setup, 16)) == pytest.approx(simulated, rel=0.03)


@STAGES
@DTYPES
@DROPOUTS
@BIASES
def test_a_small_shape_is_within_3_percent_with_bias_and_dropout(bias, dropout, dtype, compiled):
    shape = GPTConfig(**SMALL, bias=bias, dropout=dropout)
    setup = Setup(shape, dtype=dtype, compiled=compiled)
    simulated = simulate(setup, 16).peak_bytes
    assert total(footprint(setup, 16)) == pytest.approx(simulated, rel=0.03)


@STAGES
def test_heads_that_attention_pads_are_within_1_percent(compiled):
    setup = Setup(GPTConfig(**{**SMALL, "n_embd": 100}), compiled=compiled)
    simulated = simulate(setup, 16).peak_bytes
    assert total(footprint(setup, 16)) == pytest.approx(simulated, rel=0.01)


@STAGES
@DROPOUTS
def test_activations_of_each_kind_are_those_its_code_made(compiled, dropout):
    shape = GPTConfig(
        n_layer=2, n_head=2, n_embd=64, block_size=1024, vocab_size=512, dropout=dropout
    )
    setup = Setup(shape, compiled=compiled, loss="full")
    size = 256  # so that even four bytes a token are enough for the trace to note their line
    simulated = Counter()
    for buffer in simulate(setup, size).alive_at_peak:
        if buffer.component == "activations":
            simulated[_kind(buffer)] += buffer.size_bytes
    sizes = {line.component: line.size_bytes for line in footprint(setup, size)}
    assert {kind: sizes[kind] for kind in MAKERS} == pytest.approx(simulated, rel=0.01)


def _kind(buffer: Buffer) -> str:
    """By the class whose code made a buffer; the ids of tokens come from elsewhere."""
    line = int(buffer.line.removeprefix("model.py:") or 0)
    for kind, maker in MAKERS.items():
        source, first = inspect.getsourcelines(maker)
        if first <= line < first + len(source):
            return kind
    return "activations: embedding"


@STAGES
@BIASES
def test_workspace_is_what_the_simulator_calls_temporaries(compiled, bias):
    setup = Setup(GPTConfig(**SMALL, bias=bias), compiled=compiled)
    name = "compile workspace" if compiled else "temporaries"
    workspace = [line for line in footprint(setup, 16) if line.component == name]
    simulated = simulate(setup, 16).components_at_peak()["temporaries"]
    assert total(workspace) == pytest.approx(simulated, rel=0.07)


@STAGES
def test_loss_scale_is_all_that_float16_takes_more_than_bfloat16(compiled):
    setups = [
        Setup(GPTConfig(**SMALL), dtype=dtype, compiled=compiled)
        for dtype in ("bfloat16", "float16")
    ]
    without, scaled = (simulate(setup, 16).peak_bytes for setup in setups)
    told = [
        [line.size_bytes for line in footprint(setup, 16) if line.component == "loss scale"]
        for setup in setups
    ]
    assert told == [[], [scaled - without]]


@STAGES
@DTYPES
@LOSSES
@pytest.mark.parametrize("micro_batch_size", [1, 1000])
@pytest.mark.parametrize("changes", [{}, {"bias": True, "dropout": 0.1}], ids=["", "with more"])
def test_formulas_come_to_the_sizes_beside_them(compiled, dtype, make, micro_batch_size, changes):
    setup = make(GPTConfig(**SMALL, **changes), dtype=dtype, compiled=compiled)
    for line in footprint(setup, micro_batch_size):
        arithmetic = re.sub("[A-Za-z, ]", "", line.formula.partition(":")[0])
        value = eval(re.sub("[×·]", "*", arithmetic))
        assert line.size_bytes == pytest.approx(value, rel=0.01), line


@BIASES
def test_parameters_are_those_of_the_real_model(bias):
    shape = GPTConfig(**SMALL, bias=bias)
    with FakeTensorMode():
        sizes = [parameter.numel() for parameter in GPT(shape).parameters()]
    assert sorted(parameter_sizes(shape)) == sorted(sizes)
    weights = footprint(Setup(shape), 1)[0]
    assert weights.size_bytes == sum(rounded(4 * size) for size in sizes)
