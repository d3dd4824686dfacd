"""The stand-in for a compiled model against what torch.compile really does."""

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch.autograd.graph import saved_tensors_hooks

from model import GPT
from nanofit.memory.setup import Setup
from tests.memory.simulations import TINY, nanogpts_way, simulate

MICRO_BATCH = 4
TOKENS_BYTES = 5 * 512  # ids of 4 × 65 tokens, rounded up


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_many_bytes_are_kept_for_the_backward_pass_as_torch_compile_keeps(dtype):
    """Fails when torch changes what `compiled_graphs` is built on, or how it splits a graph."""
    setup = Setup(TINY, dtype=dtype, compiled=True, loss="full")
    assert _bytes_simulated(setup) == pytest.approx(_bytes_really_kept(dtype), rel=0.01)


def _bytes_really_kept(dtype: str) -> int:
    """Of the tensors that a compiled model saves, parameters and tokens aside."""
    torch._dynamo.reset()
    model = GPT(TINY, loss="full")
    compiled = torch.compile(model, backend=_inductor_without_kernels, dynamic=False)
    tokens = torch.zeros(MICRO_BATCH, TINY.block_size, dtype=torch.int64)
    saved = []
    with (
        torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"),
        saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor),
    ):
        loss = compiled(tokens, tokens)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
    for known in (*model.parameters(), tokens, loss):
        storages.pop(known.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def _inductor_without_kernels(graph_module, inputs):
    """All of inductor but its code, which takes a C++ compiler and a while."""

    def run_as_it_is(part, _, **__):
        def call(arguments):
            return part.forward(*arguments)

        call._boxed_call = True
        return call

    return compile_fx(graph_module, inputs, inner_compile=run_as_it_is)


def _bytes_simulated(setup: Setup) -> int:
    """What a forward pass has added to memory when the backward pass begins."""
    events = simulate(setup, MICRO_BATCH).events
    begin = next(index for index, event in enumerate(events) if event.phase == "forward")
    end = next(index for index, event in enumerate(events) if event.phase == "backward")
    changes = ((1 if e.is_birth else -1) * e.buffer.size_bytes for e in events[begin:end])
    return sum(changes)


def test_compiled_step_needs_less_than_the_eager_one():
    for make in (Setup, nanogpts_way):
        eager, compiled = (simulate(make(TINY, compiled=one), 128) for one in (False, True))
        assert compiled.peak_bytes < eager.peak_bytes


def test_gradients_and_state_are_those_of_the_eager_step():
    eager, compiled = (
        simulate(Setup(TINY, compiled=one), 128).components_at_peak() for one in (False, True)
    )
    for component in ("weights", "gradients", "optimiser state"):
        assert compiled[component] == eager[component]


def test_only_the_returned_logits_are_left_of_a_step_beside_weights_and_state():
    events = simulate(nanogpts_way(TINY, compiled=True), MICRO_BATCH).events
    last_update = max(i for i, event in enumerate(events) if event.phase == "between steps")
    alive = {event.buffer: event.is_birth for event in events[: last_update + 1]}
    left = [
        buffer.size_bytes
        for buffer, is_alive in alive.items()
        if is_alive and buffer.component not in ("weights", "optimiser state")
    ]
    logits_bytes = MICRO_BATCH * TINY.block_size * TINY.vocab_size * 2
    assert [size for size in left if size > TOKENS_BYTES] == [logits_bytes]
