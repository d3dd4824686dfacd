"""What can be traded for memory: the savers, and what they cost in time."""

from dataclasses import replace
from typing import NamedTuple

from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from nanofit.cache import keep, recall
from nanofit.memory import (
    AsOnCuda,
    Setup,
    graphs_of,
    micro_batches_of,
    model_of,
    simulated_device,
)

RECOMPUTES = ("selective", "alternate", "block")
BUDGETS = (0.7, 0.5, 0.1)  # never 0.0: that keeps more than 0.1 does

_SEQUENCES = 8  # with few of them a compiled model keeps more


class Saver(NamedTuple):
    name: str  # as it is set
    setup: Setup  # with this saver and no other


def savers_of(setup: Setup) -> list[Saver]:
    """Each saver there is for the stage of a setup, the cheapest first."""
    plain = without_savers(setup)
    found = [("optimizer_bits", 8)]
    if setup.compiled:
        found += [("activation_memory_budget", budget) for budget in BUDGETS]
    else:
        found += [("recompute", mode) for mode in RECOMPUTES]
    return [Saver(f"{name}={value}", replace(plain, **{name: value})) for name, value in found]


def without_savers(setup: Setup) -> Setup:
    return replace(setup, recompute="off", activation_memory_budget=1.0, optimizer_bits=32)


def extra_time(setup: Setup) -> float:
    """The FLOPs that the savers of a setup repeat, as a share of a step's without savers.

    Counted are matrix products and attention. What is limited by memory's speed, as norms and GELU
    are, comes on top of it.
    """
    return step_flops(setup) / step_flops(without_savers(setup)) - 1


def step_flops(setup: Setup) -> int:
    """FLOPs of products and attention for eight sequences, forward and backward."""
    setup = replace(setup, optimizer_bits=32)  # counts for nothing here
    kept = recall("flops", setup)
    if kept is None:
        kept = _compiled_flops(setup) if setup.compiled else _eager_flops(setup)
        keep("flops", setup, kept)
    return kept


def _eager_flops(setup: Setup) -> int:
    counter = FlopCounterMode(display=False)
    with FakeTensorMode(), AsOnCuda(setup):
        model, batch = model_of(setup), next(micro_batches_of(setup, _SEQUENCES))
        with counter:
            with simulated_device(setup).autocast():
                loss = model(batch.idx, batch.targets)
            loss.backward()
    return counter.get_total_flops()


def _compiled_flops(setup: Setup) -> int:
    forward, backward, _ = graphs_of(setup, _SEQUENCES)
    return sum(_flops(node) for graph in (forward, backward) for node in graph.nodes)


def _flops(node: fx.Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return formula(*args, **kwargs, out_val=node.meta["val"])
