"""The time of a step by arithmetic: its FLOPs as torch counts them, its bytes as the compiler does.

The compiler's counts are Inductor's for an RTX 4070, of torch 2.13: what kernels read and write.
"""

import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import GPT
from nanofit.learning.optim import build_optimizer
from nanofit.outlook.forecast import step_of
from nanofit.outlook.roofline import LAUNCH_S, PARTS, Step, launches, seconds_by_part, tokens_per_s
from nanofit.settings.config import TrainConfig, load_config
from nanofit.settings.shape import GPTConfig
from tests import processes
from tests.conftest import PROJECT

SHAPE = GPTConfig(n_layer=3, n_head=2, n_embd=32, block_size=16, vocab_size=96)
NANOGPT = Step(
    n_layer=12,
    n_embd=768,
    block_size=1024,
    vocab_size=50304,
    lookup_parameters=1024 * 768,
    micro_batch_size=8,
    passes=64,
    returns_logits=True,
)
CARD = dict(peak_flops=58e12, bytes_per_s=504e9)


def moved_bytes(step: Step, *parts: str) -> float:
    return sum(one.count * one.moved_bytes for one in step.kernels() if one.part in parts)


def flops(step: Step, part: str) -> float:
    return sum(one.count * one.flops for one in step.kernels() if one.part == part)


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_products_compute_what_torch_counts(loss, arch):
    shape = replace(SHAPE, arch=arch)
    model, idx = GPT(shape, loss=loss), torch.zeros(5, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counted.items() if "attention" not in str(op))
    step = step_of(shape, loss, micro_batch_size=5, sequences_per_step=5)
    assert flops(step, "products") == products


@pytest.mark.parametrize("steps", [5, 12])
def test_newton_schulz_steps_compute_what_torch_counts(steps):
    shape = replace(SHAPE, arch="modern")
    model, learn = GPT(shape), TrainConfig(optimizer="muon", muon_steps=steps)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counter:
        build_optimizer(model, learn).step()
    step = step_of(shape, "chunked", micro_batch_size=5, sequences_per_step=5, muon_steps=steps)
    assert flops(step, "optimiser") == counter.get_total_flops()


def test_muon_is_a_hundredth_of_the_published_step():
    shape, learn, run = load_config([str(PROJECT / "config/train_fineweb_4070_fast.py")])
    sizes = dict(micro_batch_size=learn.batch_size, sequences_per_step=learn.sequences_per_step)
    step = step_of(shape, run.loss, muon_steps=learn.newton_schulz_steps, **sizes)
    total = sum(one.count * one.flops for one in step.kernels())
    assert 0.005 < flops(step, "optimiser") / total < 0.01
    assert flops(step_of(shape, run.loss, **sizes), "optimiser") == 0


def test_modern_step_moves_its_turned_queries_but_no_second_moments_of_matrices():
    shape = replace(SHAPE, arch="modern")
    sizes = dict(micro_batch_size=5, sequences_per_step=5)
    plain, turned = (step_of(one, "chunked", **sizes) for one in (SHAPE, shape))
    more = moved_bytes(turned, "elementwise") - moved_bytes(plain, "elementwise")
    assert more == 5 * 16 * 32 * 3 * (2 * (3 + 3) + 2 * (3 + 3 + 2))  # layers · tokens · numbers
    adamw_bytes, clip_bytes = 28, 12
    assert moved_bytes(plain, "optimiser") == (adamw_bytes + clip_bytes) * plain.parameters


def test_attention_computes_half_of_what_it_would_without_its_mask():
    # Of two products forward and five backward, each of 2 · N · T · C.
    N, T, C, L = NANOGPT.tokens, 1024, 768, 12
    assert flops(NANOGPT, "attention") == 7 * 2 * N * T * C * L / 2


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_parameters_are_those_of_the_model_but_for_its_norms(arch):
    shape = replace(SHAPE, arch=arch)
    step = step_of(shape, "chunked", micro_batch_size=1, sequences_per_step=1)
    matrices = [weight for weight in GPT(shape).parameters() if weight.dim() == 2]
    assert step.parameters == sum(weight.numel() for weight in matrices)


@pytest.mark.parametrize(
    ("step", "bytes_per_logit"),
    [
        (NANOGPT, 4 + 6 + 2),  # the last is torch's, who writes the zeros
        (replace(NANOGPT, returns_logits=False), 4 + 4),
    ],
)
def test_a_loss_moves_what_the_compiler_counts(step, bytes_per_logit):
    assert moved_bytes(step, "loss") == bytes_per_logit * step.tokens * step.vocab_size


def test_smaller_chunks_of_the_loss_pass_more_often_over_its_weight_and_gradient():
    many, few = (
        moved_bytes(replace(NANOGPT, passes=1, chunk_rows=rows), "loss", "products")
        for rows in (512, 1024)
    )
    weight_bytes = 2 * 2 + 4 + 4  # for two products; its gradient, read and written
    assert many - few == 8 * weight_bytes * 50304 * 768


@pytest.mark.parametrize(
    ("layers", "width", "sequences", "ours", "nanogpts"),
    [
        (12, 576, 16, (544, 41.21), (516, 45.25)),  # bench/results/kernels.md
        (5, 768, 8, (240, 15.96), (228, 17.71)),
        (6, 768, 8, (281, 17.72), (269, 19.47)),
    ],
)
def test_a_pass_launches_and_moves_what_was_counted(layers, width, sequences, ours, nanogpts):
    """One more pass, by bench/kernels.py on a card without a GPU: launches and GB."""
    shape = GPTConfig(n_layer=layers, n_head=12, n_embd=width)
    our_step = step_of(shape, "chunked", micro_batch_size=sequences, sequences_per_step=sequences)
    nanogpts_step = replace(our_step, chunk_rows=None, returns_logits=True)
    for step, (counted, counted_gb) in ((our_step, ours), (nanogpts_step, nanogpts)):
        two, three = (replace(step, passes=passes) for passes in (2, 3))
        assert launches(three) - launches(two) == pytest.approx(counted, rel=0.04)
        more_bytes = moved_bytes(three, *PARTS) - moved_bytes(two, *PARTS)
        assert more_bytes == pytest.approx(counted_gb * 1e9, rel=0.01)


def test_each_part_of_our_pass_moves_what_was_counted():
    """The same run's kernels of 77M, summed by part."""
    shape = GPTConfig(n_layer=12, n_head=12, n_embd=576)
    step = step_of(shape, "chunked", micro_batch_size=16, sequences_per_step=16)
    assert moved_bytes(step, "products") == pytest.approx(18.83e9, rel=0.001)
    assert moved_bytes(step, "attention") == pytest.approx(2.74e9, rel=0.01)
    assert moved_bytes(step, "elementwise") == pytest.approx(14.30e9, rel=0.002)
    assert moved_bytes(step, "loss") == pytest.approx(3.297e9, rel=0.001)


def test_the_optimiser_works_once_a_step():
    once, often = (replace(NANOGPT, passes=passes) for passes in (1, 64))
    assert moved_bytes(once, "optimiser") == moved_bytes(often, "optimiser")
    assert moved_bytes(often, "loss") == 64 * moved_bytes(once, "loss")


def test_faster_memory_helps_what_memory_limits():
    before = seconds_by_part(NANOGPT, **CARD)
    after = seconds_by_part(NANOGPT, **CARD | {"bytes_per_s": 1008e9})
    assert before["elementwise"] == 2 * after["elementwise"]
    assert before["products"] == after["products"]


def test_the_host_limits_a_very_small_step():
    tiny = replace(NANOGPT, n_embd=64, block_size=32, vocab_size=64, micro_batch_size=1)
    assert tokens_per_s(tiny, **CARD) == pytest.approx(tiny.tokens / (LAUNCH_S * launches(tiny)))
    busy_s = sum(seconds_by_part(NANOGPT, **CARD).values())
    assert tokens_per_s(NANOGPT, **CARD) == NANOGPT.tokens / busy_s


def test_it_needs_no_torch():
    script = "import sys, nanofit.outlook.roofline; sys.exit('torch' in sys.modules)"
    assert processes.run([sys.executable, "-c", script], cwd=PROJECT).returncode == 0
