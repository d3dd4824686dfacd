"""What savers cost, by arithmetic, against the work that is really done."""

from dataclasses import replace

import pytest
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from nanofit.memory.savers import repeated_flops, savers_of, step_flops, without_savers
from nanofit.memory.setup import Setup
from nanofit.memory.simulate import (
    as_on_cuda,
    graphs_of,
    micro_batches_of,
    model_of,
    simulated_device,
)
from tests.memory.simulations import TINY

SEQUENCES = 8
ARCHS = pytest.mark.parametrize("arch", ["gpt2", "modern"])


@ARCHS
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_step_costs_what_its_products_and_attention_do(arch, compiled):
    setup = Setup(replace(TINY, arch=arch), compiled=compiled)
    assert step_flops(setup) == counted_flops(setup)


@ARCHS
@pytest.mark.parametrize("mode", ["selective", "alternate", "block"])
def test_recompute_repeats_what_is_counted_again(arch, mode):
    setup = Setup(replace(TINY, arch=arch), recompute=mode)
    assert repeated_flops(setup) == counted_flops(setup) - step_flops(setup)


@pytest.mark.parametrize(("arch", "budget"), [("gpt2", 0.7), ("gpt2", 0.5), ("modern", 0.7)])
def test_compiler_repeats_what_is_counted_again(arch, budget):
    shape = replace(TINY, arch=arch, n_embd=256, n_head=4, block_size=256, vocab_size=8192)
    setup = Setup(shape, compiled=True, activation_memory_budget=budget)
    assert repeated_flops(setup) == counted_flops(setup) - step_flops(setup)


def counted_flops(setup: Setup) -> float:
    """Of a token, by torch's own formulas: op by op as they run, or as the compiler was given."""
    counted = compiled_flops(setup) if setup.compiled else eager_flops(setup)
    return counted / (SEQUENCES * setup.shape.block_size)


def eager_flops(setup: Setup) -> int:
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(), as_on_cuda(setup):
        model, batch = model_of(setup), next(micro_batches_of(setup, SEQUENCES))
        with counter:
            with simulated_device(setup).autocast():
                loss = model(batch.idx, batch.targets)
            loss.backward()
    return counter.get_total_flops()


def compiled_flops(setup: Setup) -> int:
    forward, backward, _ = graphs_of(setup, SEQUENCES)
    return sum(node_flops(node) for graph in (forward, backward) for node in graph.nodes)


def node_flops(node: fx.Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return formula(*args, **kwargs, out_val=node.meta["val"])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_saver_is_on_alone(compiled):
    plain = Setup(TINY, compiled=compiled)
    assert len(savers_of(plain)) == (3 if compiled else 4)
    for name, setup in savers_of(plain):
        knob, _, value = name.partition("=")
        assert str(getattr(setup, knob)) == value
        assert setup != plain == without_savers(setup)
