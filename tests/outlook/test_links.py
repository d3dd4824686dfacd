"""Bytes between cards against rings that are walked and torch's own calls; times against runs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from nanofit.machine.cards import CARDS, find_card
from nanofit.memory.setup import Setup
from nanofit.memory.simulate import micro_batches_of, model_of
from nanofit.memory.spread import pretended_processes, shard_
from nanofit.outlook.forecast import PUBLISHED_RUNS, predicted_tokens_per_s
from nanofit.outlook.links import (
    BACKWARD_SHARE,
    LINKS,
    Link,
    Traffic,
    find_link,
    link_of,
    replicated_traffic,
    sharded_traffic,
)
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError
from tests.memory.simulations import GPT2_124M, TINY

SLOW = Link("slow", 1, 0.5)  # half a gigabyte a second


def walked_ring_bytes(numbers: int, world: int) -> list[int]:
    """What each card sends of float32 numbers: first sums go round, then what they have become."""
    parts = [numbers // world] * world
    sent = [0] * world
    for lap in range(2):
        for step in range(world - 1):
            for card in range(world):
                sent[card] += 4 * parts[(card - step + lap) % world]
    return sent


@pytest.mark.parametrize("world", [2, 3, 8])
def test_replicas_send_what_a_walk_round_the_ring_does(world):
    traffic = replicated_traffic(GPT2_124M, world, passes=7)
    walked = walked_ring_bytes(GPT2_124M.parameters, world)
    assert walked == [pytest.approx(traffic.step_bytes, rel=1e-6)] * world


def counting(kind: type, world: int, sent: list[int]) -> object:
    """A collective of torch's that counts what a card sends: all of it but one part."""

    def call(own, output_tensor, input_tensor, *args, **options):
        whole = max(output_tensor, input_tensor, key=torch.Tensor.numel)
        sent.append(whole.numel() * whole.element_size() * (world - 1) // world)
        return kind.__call__(own, output_tensor, input_tensor, *args, **options)

    return type("Counting", (kind,), {"__call__": call})()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("world", "arch"), [(2, "gpt2"), (3, "modern")])
def test_parts_send_what_torch_asks_for(world, arch, dtype):
    """Its own fully_shard in a pass, forward and backward."""
    setup, sent = Setup(replace(TINY, arch=arch), dtype=dtype, world=world, shard=True), []
    with pretended_processes(world) as mesh, FakeTensorMode():
        model = model_of(setup)
        shard_(model, setup, mesh)
        for part in (one for one in model.modules() if isinstance(one, FSDPModule)):
            part.set_custom_all_gather(counting(DefaultAllGather, world, sent))
            part.set_custom_reduce_scatter(counting(DefaultReduceScatter, world, sent))
        for batch in micro_batches_of(setup, 1):
            model(batch.idx, batch.targets).backward()
    is_half = dtype != "float32"
    traffic = sharded_traffic(setup.shape, world, passes=2, is_half=is_half)
    assert sum(sent) == traffic.step_bytes


def test_sharded_cards_send_in_every_pass_and_replicas_once_a_step():
    for world in (2, 8):
        once, often = (replicated_traffic(GPT2_124M, world, passes) for passes in (1, 20))
        assert once.step_bytes == often.step_bytes
        one, twenty = (sharded_traffic(GPT2_124M, world, passes) for passes in (1, 20))
        assert twenty.step_bytes == 20 * one.step_bytes > often.step_bytes


@pytest.mark.parametrize("overlaps", [True, False])
def test_waiting_is_what_does_not_hide_behind_computing(overlaps):
    """Sums by hand: 2 GB take 4 s at half a gigabyte a second."""
    exposed = partial(SLOW_TRAFFIC.exposed_s, SLOW, overlaps=overlaps)
    pass_s = 3.0
    hidden = (BACKWARD_SHARE * pass_s, pass_s) if overlaps else (0, 0)
    assert exposed(pass_s) == pytest.approx((4 - hidden[0]) + 5 * ((8 - hidden[1]) + 1))
    assert exposed(1000.0) == pytest.approx(5 * 1 if overlaps else 4 + 5 * (8 + 1))


SLOW_TRAFFIC = Traffic(once=2e9, each_pass=4e9, around_pass=0.5e9, passes=5)


@pytest.mark.parametrize(
    ("card", "link"),
    [
        ("RTX 4070", "pcie4-x8"),
        ("RTX 2080 Ti", "pcie3-x16"),
        ("RTX 5090", "pcie5-x8"),
        ("RTX A6000", "pcie4-x16"),
        ("A100-SXM4-80GB", "nvlink3"),
        ("A100 80GB PCIe", "pcie4-x16"),
        ("H100 80GB HBM3", "nvlink4"),
        ("V100-SXM2-16GB", "nvlink2"),
    ],
)
def test_cards_have_the_links_they_come_with(card, link):
    assert link_of(find_card(card)) == LINKS[link]


def test_every_card_has_a_link_and_an_unknown_link_is_refused():
    for card in CARDS:
        assert link_of(card).bytes_per_s > 1e9
    with pytest.raises(InputError, match="'pcie6' is not known; there are pcie3-x16"):
        find_link("pcie6")


@pytest.mark.parametrize(
    ("card", "published", "error"),
    [
        # llm.c: GPT-2 124M, 10B tokens of FineWeb in about 90 minutes (discussion 481).
        ("A100-SXM4-80GB", 10e9 / 5400, -0.08),
        # The same in 45 minutes, as modded-nanogpt's README tells.
        ("H100 80GB HBM3", 10e9 / 2700, 0.17),
        # nanoGPT's README: 600,000 steps of 491,520 tokens in about 4 days, in 2022, without what
        # torch has learned since; 135 ms for 12 × 1024 tokens on one card come to 0.73M.
        ("A100-SXM4-40GB", 600_000 * 491_520 / (4 * 86400), 0.78),
    ],
)
def test_published_runs_on_eight_cards(card, published, error):
    found, world = find_card(card), 8
    step = replace(PUBLISHED_RUNS[0].step, micro_batch_size=64, passes=1)
    computing_s = step.tokens / predicted_tokens_per_s(found, step)
    traffic = replicated_traffic(GPT2_124M, world, passes=1)
    waiting_s = traffic.exposed_s(link_of(found), computing_s, overlaps=True)
    tokens_per_s = world * step.tokens / (computing_s + waiting_s)
    assert tokens_per_s / published - 1 == pytest.approx(error, abs=0.08)
    assert waiting_s < 0.01 * computing_s  # by NVLink; llm.c tells of 10 to 20 ms in early days


def test_larger_models_are_the_same_to_a_link_but_for_their_size():
    double = GPTConfig(n_layer=24, n_head=12, n_embd=768)
    blocks = [sharded_traffic(shape, 4, 1).each_pass for shape in (GPT2_124M, double)]
    assert blocks[1] == 2 * blocks[0]
