"""What each of several processes holds, against the simulator and against processes themselves."""

import json
import sys
from dataclasses import replace
from math import prod

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT
from nanofit.memory.ledger import WrittenNeed, covers, write_down
from nanofit.memory.setup import Setup
from nanofit.memory.shards import groups_of, part_of
from nanofit.settings.shape import GPTConfig
from tests import processes
from tests.memory.living import setup_of
from tests.memory.simulations import GPT2_124M, TINY, simulate

SMALL = GPTConfig(n_layer=3, n_head=4, n_embd=256, block_size=256, vocab_size=2048)
WAYS = pytest.mark.parametrize("shard", [False, True], ids=["replicated", "sharded"])
ARCHS = pytest.mark.parametrize("arch", ["gpt2", "modern"])


@pytest.mark.skipif(sys.platform != "linux", reason="asks the GNU C library")
@pytest.mark.parametrize(("world", "arch"), [(2, "gpt2"), (4, "modern")])
def test_processes_take_what_is_written_down(world, arch, tmp_path):
    """Real ones over gloo, with torch's own engines: within 3 % of the C library's count."""
    done = processes.run_ranks(world, "tests/memory/living.py", tmp_path, arch, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    for way in ("replicated", "sharded"):
        written = write_down(setup_of(arch, world, way), 1).peak_bytes
        assert max(one[way] for one in told) == pytest.approx(written, rel=0.03), way


@WAYS
@pytest.mark.parametrize("recompute", ["off", "block"])
def test_two_cards_are_within_1_percent_of_the_simulator(recompute, shard):
    setup = Setup(SMALL, recompute=recompute, world=2, shard=shard)
    written, simulated = write_down(setup, 4), simulate(setup, 4)
    assert written.peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.01)
    ours, theirs = written.components_at_peak(), simulated.components_at_peak()
    for exact in ("weights", "optimiser state"):
        assert ours[exact] == pytest.approx(theirs[exact], rel=2e-3), exact


@pytest.mark.slow
@ARCHS
@WAYS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("recompute", ["off", "selective", "alternate", "block"])
def test_three_cards_are_within_2_percent_of_the_simulator(arch, shard, dtype, recompute):
    shape = replace(SMALL, arch=arch, bias=True)
    setup = Setup(shape, dtype=dtype, recompute=recompute, world=3, shard=shard)
    written, simulated = write_down(setup, 6), simulate(setup, 6)
    assert written.peak_bytes == pytest.approx(simulated.peak_bytes, rel=0.02)


@ARCHS
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_groups_hold_each_weight_once_and_their_parts_make_it_up(arch, world):
    shape = replace(TINY, arch=arch, bias=True)
    rest, blocks = groups_of(shape, world)
    assert len(blocks) == shape.n_layer
    names = [name for group in (rest, *blocks) for name in group.weights]
    with FakeTensorMode():
        assert sorted(names) == sorted(name for name, _ in GPT(shape).named_parameters())
    for group in (rest, *blocks):
        whole = sum(map(prod, group.weights.values()))
        rows_of_filling = (world - 1) * sum(prod(size[1:]) for size in group.weights.values())
        assert whole <= group.numbers <= whole + rows_of_filling
        assert group.numbers == world * group.part_numbers
    assert part_of((7, 5), 3) == (3, 5)


def test_parts_of_more_cards_are_smaller_and_replicas_are_not():
    def fixed_bytes(world: int, shard: bool) -> int:
        components = write_down(Setup(GPT2_124M, world=world, shard=shard), 1).components_at_peak()
        return sum(components[name] for name in ("weights", "gradients", "optimiser state"))

    whole = 16 * GPT2_124M.parameters
    for world in (2, 4, 8):
        assert fixed_bytes(world, shard=True) == pytest.approx(whole / world, rel=0.01)
        assert fixed_bytes(world, shard=False) == pytest.approx(whole, rel=0.01)


def test_between_steps_gradients_stay_in_buckets_but_not_in_parts():
    for shard, bytes_per_parameter in ((False, 16), (True, 12 / 2)):
        course = write_down(Setup(SMALL, world=2, shard=shard), 1)
        phases = zip(course.events, course.allocated(), strict=True)
        between = [held for event, held in phases if event.phase == "between steps"]
        last = between[-1] if between else list(course.allocated())[-1]
        assert last == pytest.approx(bytes_per_parameter * SMALL.parameters, rel=0.03)


def test_larger_models_fit_two_cards_in_parts_alone():
    shape = GPTConfig(n_layer=36, n_head=20, n_embd=1280)  # GPT-2 large
    limit_bytes = 11 * 2**30
    one, replicated, sharded = (
        WrittenNeed(Setup(shape, recompute="block", world=world, shard=world > 1 and shard))
        for world, shard in ((1, False), (2, False), (2, True))
    )
    assert one.largest(limit_bytes) == replicated.largest(limit_bytes) == 0
    assert sharded.largest(limit_bytes) > 0


@pytest.mark.parametrize(
    "changes", [{"compiled": True}, {"optimizer": "muon"}, {"optimizer_bits": 8}], ids=str
)
def test_nothing_is_claimed_of_parts_that_was_not_checked(changes):
    setup = Setup(replace(SMALL, arch="modern"), world=2, **changes)
    assert covers(setup)
    assert not covers(replace(setup, shard=True))
