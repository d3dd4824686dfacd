"""What is followed is what is allocated, and memory can be made to run out anywhere."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT
from nanofit.learning.optim import build_optimizer
from nanofit.memory.setup import Setup
from nanofit.memory.trace import MemoryBudget, MemoryTrace
from nanofit.settings.config import TrainConfig
from tests.conftest import PROJECT
from tests.memory.simulations import TINY, simulate

KIB = 1024


def test_each_storage_is_born_once_and_dies_once():
    with MemoryTrace() as trace:
        a = torch.ones(256)  # 1 KiB
        b = a.view(16, 16)[2:]  # the same storage
        c = a + 1
        del a
        assert [buffer.size_bytes for buffer in trace.alive] == [KIB, KIB]
        del b
        assert len(trace.alive) == 1
        c.mul_(2)
        del c
    assert [event.is_birth for event in trace.events] == [True, True, False, False]
    assert not trace.alive


def test_sizes_are_rounded_as_cuda_rounds_them():
    with MemoryTrace() as trace:
        tensors = [torch.ones(count, dtype=torch.uint8) for count in (1, 512, 513)]
        assert [buffer.size_bytes for buffer in trace.alive] == [512, 512, 1024]
    del tensors


def test_tensors_at_the_peak_name_the_line_that_made_them():
    simulation = simulate(Setup(TINY, loss="full"), 128)
    lines = (PROJECT / "model.py").read_text().splitlines()
    of_mlp = {
        (event.phase, event.buffer.line)
        for event in simulation.events
        if event.is_birth and event.buffer.shape == (128, TINY.block_size, 4 * TINY.n_embd)
    }
    assert {phase for phase, _ in of_mlp} == {"forward", "backward"}
    for _, line in of_mlp:
        file, _, number = line.partition(":")
        assert file == "model.py"
        assert "self.act(self.c_fc(x))" in lines[int(number) - 1]


# F.scaled_dot_product_attention on torch's allocator, causal, 4 × 4 heads of 1024 rows: the peak of
# its backward pass less its three results, by head and row. Capability 8.9, float16 also 7.5.
@pytest.mark.parametrize(
    ("kernels", "dtype", "width", "bytes_per_row"),
    [
        ("flash", "bfloat16", 32, 132),
        ("flash", "bfloat16", 48, 260),
        ("flash", "bfloat16", 96, 388),
        ("flash", "bfloat16", 128, 516),
        ("efficient", "float16", 32, 260.25),
        ("efficient", "float16", 64, 260.25),
        ("efficient", "float16", 96, 516.25),
        ("efficient", "float16", 256, 3076.5),
        ("efficient", "float32", 48, 260.25),
        ("efficient", "float32", 96, 516.5),
    ],
)
def test_attentions_backward_pass_takes_what_it_took_on_torchs_allocator(
    kernels, dtype, width, bytes_per_row
):
    trace = MemoryTrace(kernels)
    gradient = torch.empty(4, 4, 1024, width, dtype=getattr(torch, dtype), device="meta")
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    trace.workspace(backward, 3 * [gradient])
    taken = trace.events[0].buffer.size_bytes / (4 * 4 * 1024)
    assert taken == pytest.approx(bytes_per_row, rel=0.002)
    assert not trace.alive


@pytest.mark.parametrize("mode", [nullcontext, FakeTensorMode], ids=["real", "fake"])
@pytest.mark.parametrize("phase", ["forward", "backward", "optimiser"])
def test_memory_runs_out_in_the_phase_it_is_told_to(mode, phase):
    with mode(), MemoryBudget() as budget:
        model = GPT(TINY)
        budget.adopt(model.parameters())
        optimizer = build_optimizer(model, TrainConfig())
        reached = []

        def starve(now: str):
            def hook(*_):
                reached.append(now)
                if now == phase:
                    budget.limit_bytes = budget.allocated_bytes

            return hook

        hooks = [
            model.register_forward_pre_hook(starve("forward")),
            model.register_forward_hook(starve("backward")),
            optimizer.register_step_pre_hook(starve("optimiser")),
        ]
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            _step(model, optimizer)
        assert reached[-1] == phase

        for hook in hooks:
            hook.remove()
        budget.limit_bytes = float("inf")
        optimizer.zero_grad(set_to_none=True)
        _step(model, optimizer)  # as if nothing had happened


def test_what_a_failed_step_leaves_is_what_was_there_before():
    with MemoryBudget() as budget:
        model = GPT(TINY)
        optimizer = build_optimizer(model, TrainConfig())
        _step(model, optimizer)
        before, budget.limit_bytes = budget.allocated_bytes, budget.allocated_bytes + 200 * KIB
        with pytest.raises(torch.OutOfMemoryError):
            _step(model, optimizer)
        optimizer.zero_grad(set_to_none=True)
        assert budget.allocated_bytes == before


def test_budget_lets_exactly_its_bytes_live():
    with MemoryBudget(2 * KIB) as budget:
        first, second = torch.ones(256), torch.ones(256)
        with pytest.raises(torch.OutOfMemoryError, match="1024 bytes"):
            torch.ones(256)
        del first
        third = torch.ones(256)
        assert budget.allocated_bytes == 2 * KIB
        del second
        small = torch.ones(1)  # takes a whole block
        assert budget.allocated_bytes == KIB + 512
    del small, third


def _step(model, optimizer) -> None:
    tokens = torch.zeros(2, TINY.block_size + 1, dtype=torch.int64)
    for _ in range(2):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
