"""The time of a step by arithmetic: its FLOPs as torch counts them, its bytes as the compiler does.

The compiler's counts are Inductor's for an RTX 4070, of torch 2.13: what kernels read and write.
"""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import PROJECT
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, GPTConfig
from nanofit.forecast import step_of
from nanofit.roofline import LAUNCH_S, Step, launches, seconds_by_part, tokens_per_s

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


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_products_compute_what_torch_counts(loss):
    model, idx = GPT(SHAPE, loss=loss), torch.zeros(5, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(idx, idx).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in counted.items() if "attention" not in str(op))
    step = step_of(SHAPE, loss, micro_batch_size=5, sequences_per_step=5)
    assert flops(step, "products") == products


def test_attention_computes_half_of_what_it_would_without_its_mask():
    # Of two products forward and five backward, each of 2 · N · T · C.
    N, T, C, L = NANOGPT.tokens, 1024, 768, 12
    assert flops(NANOGPT, "attention") == 7 * 2 * N * T * C * L / 2


def test_parameters_are_those_of_the_model_but_for_its_norms():
    step = step_of(SHAPE, "chunked", micro_batch_size=1, sequences_per_step=1)
    matrices = [weight for weight in GPT(SHAPE).parameters() if weight.dim() == 2]
    assert step.parameters == sum(weight.numel() for weight in matrices)


def test_a_block_moves_what_the_compiler_counts():
    deeper = replace(NANOGPT, n_layer=13)
    more = moved_bytes(deeper, "elementwise") - moved_bytes(NANOGPT, "elementwise")
    assert more / (NANOGPT.tokens * 768) == pytest.approx(127.5, rel=0.01)


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


def test_our_step_moves_what_was_counted_on_a_card_without_a_gpu():
    """One pass of bench/results/kernels.md; there the first chunk does not read the gradient."""
    shape = GPTConfig(n_layer=12, n_head=12, n_embd=576, block_size=1024, vocab_size=50304)
    step = step_of(shape, "chunked", micro_batch_size=16, sequences_per_step=16)
    assert moved_bytes(step, "products") == pytest.approx(18.83e9, rel=0.01)
    assert moved_bytes(step, "loss") == pytest.approx(3.297e9, rel=0.001)


def test_kernels_are_as_many_as_were_counted():
    step = replace(NANOGPT, n_layer=5)
    counted = 109 + 63 + 3 * 10  # the compiler's, products, attention
    added = 6 * 5 + 3  # gradients
    assert launches(step) / step.passes == pytest.approx(counted + added, rel=0.1)


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
    script = "import sys, nanofit.roofline; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=PROJECT).returncode == 0
