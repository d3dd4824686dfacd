"""Stages of a run: what happens to its losses when memory runs out or compiling goes wrong."""

from functools import partial

import pytest
import torch

from model import GPT, GPTConfig
from nanofit import stages as module
from nanofit.config import TrainConfig
from nanofit.device import Device, describe_device
from nanofit.dist import Ranks
from nanofit.loader import MicroBatch
from nanofit.optim import build_optimizer
from nanofit.stages import StagePlan, Stages
from nanofit.step import UpdateInterrupted, evaluate, train_step
from nanofit.trace import MemoryBudget

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64)
SEQUENCES = 12
SIZES = [1, 2, 3, 4, 6, 12]
DEVICE = describe_device("cpu")


class Run:
    """A small training run whose steps go through Stages."""

    def __init__(self, plan: StagePlan, device: Device = DEVICE):
        torch.manual_seed(0)
        self.model, self.device = GPT(SHAPE), device
        self.optimizer = build_optimizer(self.model, TrainConfig())
        self.scaler = device.grad_scaler()
        self.events: list[dict] = []
        self.sizes: list[int] = []
        self.stages = Stages(
            self.model, plan, SIZES, device=device, ranks=Ranks(), event=self._event
        )

    def _event(self, step, name, **details):
        self.events.append({"step": step, "name": name, **details})

    def learn(self, step: int) -> float:
        self.stages.advance(step, partial(micro_batches, step))
        loss, _ = self.stages.run(step, partial(self.attempt, step))
        return loss.item()

    def attempt(self, step: int, size: int):
        self.sizes.append(size)
        return train_step(
            self.model,
            self.optimizer,
            self.scaler,
            micro_batches(step, size),
            device=self.device,
            ranks=Ranks(),
            lr=1e-2,
            grad_clip=1.0,
            seed=step,
        )

    def state_bytes(self) -> int:
        return 4 * 4 * sum(p.numel() for p in self.model.parameters())


def micro_batches(step: int, size: int):
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(SHAPE.vocab_size, (SEQUENCES, SHAPE.block_size + 1), generator=random)
    for rows in tokens.split(size):
        yield MicroBatch(rows[:, :-1], rows[:, 1:], len(rows) / SEQUENCES)


def undisturbed(steps: int, device: Device = DEVICE) -> list[float]:
    run = Run(StagePlan(12, 12, None), device)
    return [run.learn(step) for step in range(steps)]


def memory_needed(size: int) -> int:
    """Peak of a second step of this micro-batch, counted on the real model."""
    run = Run(StagePlan(size, size, None))
    run.learn(0)
    peak = 0

    class Peak(MemoryBudget):
        def born(self, tensor, size_bytes, op):
            nonlocal peak
            token = super().born(tensor, size_bytes, op)
            peak = max(peak, self.allocated_bytes)
            return token

    with Peak() as counter:
        counter.adopt(everything(run))
        run.learn(1)
    return peak


def everything(run: Run) -> list[torch.Tensor]:
    moments = [t for state in run.optimizer.state.values() for t in state.values()]
    return [*run.model.parameters(), *moments]


def test_step_that_runs_out_of_memory_is_done_again_in_smaller_micro_batches():
    run = Run(StagePlan(12, 12, None))
    losses = [run.learn(0), run.learn(1)]
    with MemoryBudget(memory_needed(6) + 1000) as budget:
        budget.adopt(everything(run))
        losses += [run.learn(2), run.learn(3)]
    assert run.sizes == [12, 12, 12, 6, 6]
    assert losses == pytest.approx(undisturbed(4), abs=1e-6)
    (event,) = run.events
    assert (event["step"], event["micro_batch"], event["passes"]) == (2, 6, 2)
    assert event["reason"] == "out of memory"


@pytest.mark.parametrize("failing_op", ["forward", "backward"])
def test_memory_lost_in_any_phase_leaves_the_losses_as_they_were(failing_op):
    run = Run(StagePlan(12, 12, None))
    losses = [run.learn(0)]
    budget = MemoryBudget()
    hook = lambda *_: setattr(budget, "limit_bytes", budget.allocated_bytes + 100)  # noqa: E731
    if failing_op == "forward":
        handle = run.model.register_forward_pre_hook(hook)
    else:
        handle = run.model.lm_head.weight.register_hook(hook)
    with budget:
        run.stages.make_room = partial(_forgive, run.stages.make_room, handle, budget)
        losses += [run.learn(1), run.learn(2)]
    assert run.sizes == [12, 12, 6, 6]
    assert losses == pytest.approx(undisturbed(3), abs=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_lost_between_backward_pass_and_update_leaves_the_losses(monkeypatch, dtype):
    device = describe_device("cpu", dtype)
    expected = undisturbed(3, device)
    run, clip, calls = Run(StagePlan(12, 12, None), device), torch.nn.utils.clip_grad_norm_, []

    def fail_once(*arguments):
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room for a norm")
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", fail_once)
    losses = [run.learn(step) for step in range(3)]
    assert run.sizes == [12, 12, 6, 6]
    assert losses == pytest.approx(expected, abs=1e-6 if dtype == "float32" else 2e-3)


def _forgive(make_room, handle, budget):
    handle.remove()
    budget.limit_bytes = float("inf")
    make_room()


def test_smaller_micro_batch_grows_again_after_a_quiet_while(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 3)
    run = Run(StagePlan(12, 12, None))
    losses = [run.learn(0), run.learn(1)]
    with MemoryBudget(memory_needed(6) + 1000) as budget:
        budget.adopt(everything(run))
        losses.append(run.learn(2))
    losses += [run.learn(step) for step in range(3, 7)]
    assert run.sizes == [12, 12, 12, 6, 6, 6, 12, 12]
    assert losses == pytest.approx(undisturbed(7), abs=1e-6)


def test_growing_again_too_early_costs_one_attempt_and_then_waits_longer(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 2)
    run = Run(StagePlan(12, 12, None))
    run.learn(0)
    with MemoryBudget(memory_needed(6) + 1000) as budget:
        budget.adopt(everything(run))
        for step in range(1, 8):
            run.learn(step)
    assert run.sizes == [12, 12, 6, 6, 12, 6, 6, 6, 6, 12, 6]


def test_interrupted_update_is_not_repeated_on_top_of_itself():
    run = Run(StagePlan(12, 12, None))
    with MemoryBudget() as budget:
        run.optimizer.register_step_pre_hook(
            lambda *_: setattr(budget, "limit_bytes", budget.allocated_bytes)
        )
        with pytest.raises(UpdateInterrupted):
            run.learn(0)
    assert run.sizes == [12]


def test_no_room_for_one_sequence_is_an_error():
    run = Run(StagePlan(1, 1, None))
    run.learn(0)
    with MemoryBudget(1000) as budget, pytest.raises(torch.OutOfMemoryError):
        budget.limit_bytes = 1000
        run.learn(1)


def test_errors_that_are_not_about_memory_are_not_swallowed():
    run = Run(StagePlan(12, 12, None))

    def fail(_size):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        run.stages.run(0, fail)


def test_evaluation_shrinks_on_its_own():
    run = Run(StagePlan(12, 12, None))
    whole = evaluate(run.model, micro_batches(0, 12), device=DEVICE, ranks=Ranks())

    def attempt(size):
        with MemoryBudget(200_000 * size if size < 4 else 100):
            return evaluate(run.model, micro_batches(0, size), device=DEVICE, ranks=Ranks())

    assert run.stages.evaluate(0, attempt) == pytest.approx(whole, abs=1e-6)
    assert (run.stages.evaluation_size, run.stages.size) == (3, 12)
    assert run.model.training


def test_compiled_stage_regrows_and_keeps_the_curve():
    torch._dynamo.reset()  # other tests may have used up what it allows of recompilations
    run = Run(StagePlan(eager_size=4, compiled_size=12, compile_after=2))
    losses = [run.learn(step) for step in range(5)]
    assert run.sizes == [4, 4, 12, 12, 12]
    assert run.stages.stage == "compiled"
    assert losses == pytest.approx(undisturbed(5), abs=1e-5)
    assert [event["now"] for event in run.events] == ["compiled"]
    assert not any(name.startswith("_orig_mod") for name in run.model.state_dict())


def test_failing_compiler_leaves_an_eager_run_with_its_curve(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nonexistent/compiler",))
    torch._dynamo.reset()
    run = Run(StagePlan(eager_size=6, compiled_size=12, compile_after=1))
    losses = [run.learn(step) for step in range(3)]
    assert run.stages.stage == "eager for good"
    assert run.sizes == [6, 6, 6]
    assert losses == pytest.approx(undisturbed(3), abs=1e-6)
    assert len(run.events) == 1  # it is tried once


def test_compiled_model_that_disagrees_is_not_kept(monkeypatch):
    run = Run(StagePlan(12, 12, compile_after=1))

    def compile_wrongly(**_):
        run.model._compiled_call_impl = lambda *args: GPT.forward(run.model, *args) * 1.5

    monkeypatch.setattr(run.model, "compile", compile_wrongly)
    losses = [run.learn(step) for step in range(3)]
    assert run.stages.stage == "eager for good"
    assert "differs" in run.events[0]["reason"]
    assert losses == pytest.approx(undisturbed(3), abs=1e-6)


def test_slower_compiled_model_is_given_up(monkeypatch):
    run = Run(StagePlan(12, 12, compile_after=3))
    seconds = {"eager": 1.0, "compiled": 1.5}
    time = [0.0]

    def now(_exactly):
        time[0] += seconds.get(run.stages.stage, 1.0) / 2
        return time[0]

    def compile_slowly(**_):
        run.model._compiled_call_impl = lambda *args: GPT.forward(run.model, *args)

    monkeypatch.setattr(run.model, "compile", compile_slowly)
    monkeypatch.setattr(run.stages, "_now", now)
    losses = [run.learn(step) for step in range(12)]
    assert run.stages.stage == "eager for good"
    assert "a compiled step took 0.75 s, an eager one 0.5 s" in run.events[-1]["reason"]
    assert losses == pytest.approx(undisturbed(12), abs=1e-6)


def test_compile_off_never_tries():
    run = Run(StagePlan(12, 12, compile_after=None))
    run.stages.advance(10**9, partial(micro_batches, 0))
    assert (run.stages.stage, run.events) == ("eager", [])
