"""What is written down of a step's memory, against the simulator, which runs the step itself."""

from dataclasses import replace

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT
from nanofit.memory.course import Course
from nanofit.memory.ledger import WrittenNeed, covers, saved_by_8_bits, update_bytes, write_down
from nanofit.memory.need import evaluation_need
from nanofit.memory.setup import Setup
from nanofit.memory.simulate import as_on_cuda, model_of, simulated_device
from nanofit.memory.trace import MemoryTrace
from nanofit.settings.config import load_config
from nanofit.settings.shape import GPTConfig
from tests.conftest import PROJECT
from tests.memory.simulations import GPT2_77M, nanogpts_way, simulate, simulate_anew

CONFIGS = sorted(path.name for path in (PROJECT / "config").glob("*.py"))
SMALL = GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=512, vocab_size=4096)
SIZE = 8
ARCHS = pytest.mark.parametrize("arch", ["gpt2", "modern"])
BIASES = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
EAGER = [{"recompute": mode} for mode in ("off", "selective", "alternate", "block")]
COMPILED = [{"compiled": True, "activation_memory_budget": budget} for budget in (1.0, 0.7, 0.5)]
STAGES = pytest.mark.parametrize("stage", [{}, {"compiled": True}], ids=["eager", "compiled"])


def error_of(setup: Setup, size: int = SIZE) -> float:
    """Of what is written, as a share of what is simulated."""
    return write_down(setup, size).peak_bytes / simulate(setup, size).peak_bytes - 1


@STAGES
@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_within_a_thousandth_of_the_simulator(name, stage):
    shape, learn, run = load_config([str(PROJECT / "config" / name)])
    dtype = "bfloat16" if run.dtype == "auto" else run.dtype
    setup = Setup(shape, dtype=dtype, optimizer=learn.optimizer, **stage)
    assert error_of(setup, learn.batch_size) == pytest.approx(0, abs=1e-3)
    written = write_down(setup, learn.batch_size).components_at_peak()
    simulated = simulate(setup, learn.batch_size).components_at_peak()
    for exact in ("weights", "gradients", "optimiser state"):
        assert written[exact] == pytest.approx(simulated[exact], rel=2e-3), exact


@ARCHS
@BIASES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stage", EAGER, ids=str)
def test_eager_stage_is_within_3_percent_whatever_the_saver(arch, bias, dtype, stage):
    setup = Setup(replace(SMALL, arch=arch, bias=bias), dtype=dtype, **stage)
    assert error_of(setup) == pytest.approx(0, abs=0.03)


@ARCHS
@BIASES
@pytest.mark.parametrize("stage", COMPILED, ids=str)
def test_compiled_stage_is_within_3_percent_in_every_budget_that_is_covered(arch, bias, stage):
    setup = Setup(replace(SMALL, arch=arch, bias=bias), **stage)
    if covers(setup):
        assert error_of(setup) == pytest.approx(0, abs=0.03)
    else:
        assert (arch, stage["activation_memory_budget"]) == ("modern", 0.5)


@STAGES
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_and_heads_that_attention_pads_are_within_2_percent(stage, dropout):
    setup = Setup(replace(SMALL, n_embd=240, dropout=dropout), **stage)  # heads of 60
    assert error_of(setup) == pytest.approx(0, abs=0.02)


@ARCHS
@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("stage", [EAGER[0], EAGER[3], COMPILED[0], COMPILED[1]], ids=str)
def test_few_and_many_sequences_are_within_4_percent(arch, size, stage):
    setup = Setup(replace(SMALL, arch=arch), **stage)
    assert error_of(setup, size) == pytest.approx(0, abs=0.04)


@ARCHS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_evaluation_alone_is_within_2_percent_of_what_it_allocates(arch, dtype):
    setup = Setup(replace(SMALL, arch=arch), dtype=dtype)
    trace = MemoryTrace(setup.attention)
    with FakeTensorMode(), as_on_cuda(setup), trace, torch.no_grad():
        model = model_of(setup).eval()
        *_, weights_bytes = Course(trace.events).allocated()
        tokens = torch.randint(setup.shape.vocab_size, (32, setup.shape.block_size))
        with simulated_device(setup).autocast():
            losses = model.token_losses(tokens, tokens)
    assert losses.shape == tokens.shape
    allocated_bytes = Course(trace.events).peak_bytes - weights_bytes
    need = evaluation_need(setup)
    assert need.at(32) == pytest.approx(allocated_bytes, rel=0.02)
    assert need.largest(1.05 * allocated_bytes) in (31, 32, 33)


@pytest.mark.parametrize("is_watched", [False, True])
def test_muon_is_within_1_percent_where_its_update_is_the_peak(is_watched):
    """While torch watches what Python calls, a caller holds what it hands over until the end."""
    shape = replace(SMALL, arch="modern", n_embd=512, block_size=64, vocab_size=512, n_layer=8)
    setup = Setup(shape, optimizer="muon")
    before = set_eval_frame(False if is_watched else None)
    try:
        simulated_bytes = simulate_anew(setup, 1).peak_bytes
    finally:
        set_eval_frame(before)
    assert write_down(setup, 1).peak_bytes == pytest.approx(simulated_bytes, rel=0.01)


@STAGES
@ARCHS
def test_activations_are_made_by_the_lines_that_are_named(arch, stage):
    """So that the table of the largest tensors leads to the right place in the model."""
    setup = Setup(replace(SMALL, arch=arch), **stage)
    written, simulated = (
        {(buffer.line, buffer.size_bytes) for buffer in course.alive_at_peak if buffer.line}
        for course in (write_down(setup, SIZE), simulate(setup, SIZE))
    )
    large = 2 * SIZE * SMALL.block_size * 4 * SMALL.n_embd  # MLPs have the largest
    named = {line for line, size in written if size >= large}
    assert named
    assert named <= {line for line, size in simulated if size >= large} | {
        line for line, _ in written if line.startswith("loss.py")
    }


@ARCHS
def test_stream_is_made_by_the_lines_that_are_named_one_after_the_other(arch):
    """From the embedding, be it given positions or a norm, to the last block."""
    setup = Setup(replace(SMALL, arch=arch))
    stream_bytes = 4 * SIZE * SMALL.block_size * SMALL.n_embd
    written, simulated = (
        [
            buffer.line
            for buffer in course.alive_at_peak
            if (buffer.size_bytes, buffer.component) == (stream_bytes, "activations")
        ]
        for course in (write_down(setup, SIZE), simulate(setup, SIZE))
    )
    assert written == simulated
    assert len(written) > 2 * SMALL.n_layer


@pytest.mark.parametrize("size", [1, 4, 16])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_modern_recipe_needs_no_more_than_the_plain_one_but_for_its_head(dtype, compiled, size):
    """Of which there are weight, gradient and two moments, in float32."""
    plain = GPTConfig(n_layer=12, n_head=12, n_embd=768)
    modern = replace(plain, n_head=6, arch="modern", bias=True)
    stage = dict(dtype=dtype, compiled=compiled)
    need = WrittenNeed(Setup(modern, optimizer="muon", **stage)).at(size)
    head_bytes = 16 * plain.vocab_size * plain.n_embd
    assert need <= WrittenNeed(Setup(plain, **stage)).at(size) + head_bytes


@BIASES
@ARCHS
def test_weights_are_those_of_the_real_model(arch, bias):
    shape = replace(SMALL, arch=arch, bias=bias)
    with FakeTensorMode():
        real = {name: tuple(weight.shape) for name, weight in GPT(shape).named_parameters()}
    assert shape.weights() == real


def test_8_bit_moments_save_three_quarters_of_adamws_and_nothing_of_muons():
    adamw = saved_by_8_bits(Setup(SMALL))
    assert adamw == pytest.approx(2 * SMALL.parameters * (4 - 1 - 4 / 256), rel=0.02)
    modern = replace(SMALL, arch="modern")
    of_blocks = 12 * SMALL.n_layer * SMALL.n_embd**2
    muon = saved_by_8_bits(Setup(modern, optimizer="muon"))
    expected = 2 * (modern.parameters - of_blocks) * (4 - 1 - 4 / 256)
    assert muon == pytest.approx(expected, rel=0.02)
    wide, narrow = (Setup(SMALL, optimizer_bits=bits) for bits in (32, 8))
    assert WrittenNeed(wide).at(4) - WrittenNeed(narrow).at(4) == adamw


def test_8_bit_moments_of_one_weight_at_a_time_are_in_32_bits_during_an_update():
    setup = Setup(replace(SMALL, block_size=16), optimizer_bits=8)
    parameters, table = setup.shape.parameters, SMALL.vocab_size * SMALL.n_embd
    held = (4 + 4 + 2 * (1 + 4 / 256)) * parameters  # weights, gradients, moments and their scales
    assert update_bytes(setup) == pytest.approx(held + 2 * table * (4 + 4 / 256), rel=0.005)
    course = write_down(setup, 1)
    phases = [event.phase for event in course.events]
    of_update = (
        allocated
        for phase, allocated in zip(phases, course.allocated(), strict=True)
        if phase == "optimiser"
    )
    assert max(of_update) == pytest.approx(update_bytes(setup), rel=0.001)


def test_largest_micro_batch_is_the_last_one_under_the_limit():
    need = WrittenNeed(Setup(GPT2_77M))
    largest = need.largest(11.2 * 2**30)
    assert need.at(largest) <= 11.2 * 2**30 < need.at(largest + 1)
    assert need.largest(2**30) == 0


@pytest.mark.parametrize(
    "setup",
    [
        Setup(SMALL, loss="full"),
        nanogpts_way(SMALL),
        Setup(replace(SMALL, dropout=0.1), recompute="block"),
        Setup(replace(SMALL, n_embd=248), dtype="float16", has_flash=False),  # heads of 62
        Setup(SMALL, compiled=True, activation_memory_budget=0.3),
        Setup(SMALL, dtype="float32", compiled=True, activation_memory_budget=0.7),
    ],
    ids=str,
)
def test_nothing_is_claimed_of_what_was_not_checked(setup):
    assert not covers(setup)
