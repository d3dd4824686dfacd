"""Stages of a run: what happens to its losses when memory runs out or compiling goes wrong."""

import mmap
import sys
from functools import partial

import numpy as np
import pytest
import torch

from model import GPT
from nanofit.data.loader import MicroBatch
from nanofit.fit.fit import StagePlan
from nanofit.learning.optim import build_optimizer
from nanofit.learning.step import UpdateInterrupted, evaluate, train_step
from nanofit.learning.undo import UpdateUndo
from nanofit.machine.device import Device, describe_device
from nanofit.machine.dist import Ranks
from nanofit.memory.trace import MemoryBudget
from nanofit.run import stages as module
from nanofit.run.stages import QUIET_STEPS, TIMED_STEPS, NoRoom, Stages
from nanofit.settings.config import TrainConfig
from nanofit.settings.shape import GPTConfig

if sys.platform == "linux":
    import resource

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=64)
SEQUENCES = 12
SIZES = [1, 2, 3, 4, 6, 12]
DEVICE = describe_device("cpu")


class Run:
    """A small training run whose steps go through Stages."""

    def __init__(self, plan: StagePlan, device: Device = DEVICE, **reached):
        torch.manual_seed(0)
        self.model, self.device = GPT(SHAPE), device
        self.optimizer = build_optimizer(self.model, TrainConfig())
        self.scaler = device.grad_scaler()
        self.events: list[dict] = []
        self.sizes: list[int] = []
        self.stages = Stages(
            self.model,
            plan,
            SIZES,
            device=device,
            ranks=Ranks(),
            tokens_per_step=SEQUENCES * SHAPE.block_size,
            undo=UpdateUndo(self.optimizer, device.memory()),
            event=self._event,
            **reached,
        )

    def _event(self, step, name, **details):
        self.events.append({"step": step, "name": name, **details})

    def changes(self) -> list[dict]:
        """The stages entered after the first."""
        return [event for event in self.events if event["name"] == "stage"][1:]

    def learn(self, step: int) -> float:
        if not self.stages.rows:
            self.stages.begin(step, partial(micro_batches, step))
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
    (event,) = run.changes()
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


def test_shortage_that_shrinks_often_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 3)
    run = Run(StagePlan(12, 12, None))
    run.learn(0)
    with MemoryBudget(memory_needed(2) + 1000) as budget:
        budget.adopt(everything(run))
        run.learn(1)
    for step in range(2, 6):
        run.learn(step)
    assert run.sizes == [12, 12, 6, 4, 3, 2, 2, 2, 12, 12]
    assert [event["next_try_step"] for event in run.changes()[:-1]] == [4] * 4


def test_shortage_after_a_long_quiet_time_is_waited_for_as_the_first(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 2)
    run = Run(StagePlan(12, 12, None))
    run.learn(0)
    for short, quiet in ((range(1, 4), range(4, 12)), (range(12, 13), range(13, 15))):
        with MemoryBudget(memory_needed(6) + 1000) as budget:
            budget.adopt(everything(run))
            for step in short:
                run.learn(step)
        for step in quiet:
            run.learn(step)
    shrunk = [event for event in run.changes() if event["micro_batch"] == 6]
    # In vain at 3, so twice as long; from 7 on it lasted.
    assert [(event["step"], event["next_try_step"]) for event in shrunk] == [
        (1, 3),
        (3, 7),
        (12, 14),
    ]


@pytest.fixture
def _memory_can_run_out():
    """As far as a run can tell: the limit is never met."""
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (2**46, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, limits)


@needs_linux
@pytest.mark.usefixtures("_memory_can_run_out")
@pytest.mark.parametrize("interrupted_step", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_update_interrupted_half_way_is_undone_and_the_step_done_again(
    monkeypatch, dtype, interrupted_step
):
    device = describe_device("cpu", dtype)
    expected = undisturbed(4, device)
    run, update, calls = Run(StagePlan(12, 12, None), device), torch._fused_adamw_, []

    def fail_once(*arguments, **options):
        calls.append(None)
        if len(calls) == 2 * interrupted_step + 2:  # of a step's two groups one is updated
            raise torch.OutOfMemoryError("no room")
        return update(*arguments, **options)

    run.model.register_forward_hook(leave_room)
    monkeypatch.setattr(torch, "_fused_adamw_", fail_once)
    losses = [run.learn(step) for step in range(4)]
    assert run.sizes == [12] * (interrupted_step + 1) + [6] * (4 - interrupted_step)
    assert losses == pytest.approx(expected, abs=1e-6 if dtype == "float32" else 2e-3)


def leave_room(*_):
    """Take memory and give it back, as activations do; not from what earlier tests have left."""
    with mmap.mmap(-1, 2**26) as room:
        room.write(b"\1" * 2**26)


def test_interrupted_update_is_not_repeated_on_top_of_itself():
    run = Run(StagePlan(12, 12, None))
    with MemoryBudget() as budget:
        run.optimizer.register_step_pre_hook(
            lambda *_: setattr(budget, "limit_bytes", budget.allocated_bytes)
        )
        with pytest.raises(UpdateInterrupted):
            run.learn(0)
    assert run.sizes == [12]


def test_no_room_for_one_sequence_is_told_in_a_line_and_leaves_the_run_as_it_was():
    run = Run(StagePlan(2, 2, None))
    losses = [run.learn(0)]
    with MemoryBudget(1000), pytest.raises(NoRoom, match="out of memory at step 1") as raised:
        run.learn(1)
    assert raised.value.is_whole
    losses += [run.learn(1), run.learn(2)]
    assert run.sizes == [2, 2, 1, 1, 1]
    assert losses == pytest.approx(undisturbed(3), abs=1e-6)


def test_no_room_to_evaluate_one_sequence_is_told_in_a_line():
    run = Run(StagePlan(2, 2, None))

    def attempt(size):
        with MemoryBudget(1000):
            return evaluate(run.model, micro_batches(0, size), device=DEVICE, ranks=Ranks())

    with pytest.raises(NoRoom, match="in the evaluation at step 3") as raised:
        run.stages.evaluate(3, attempt)
    assert raised.value.is_whole
    assert run.model.training


def test_no_room_for_an_update_tells_that_the_weights_are_not_whole():
    run = Run(StagePlan(1, 1, None))
    with pytest.raises(NoRoom, match="in the update of step 4") as raised:
        run.stages.interrupted(4)
    assert not raised.value.is_whole


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


def test_evaluation_grows_again_after_a_quiet_while(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 3)
    run, tried = Run(StagePlan(12, 12, None)), []

    def attempt(size):
        tried.append(size)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return 0.0

    for step in range(1, 6):
        run.stages.evaluate(step, attempt)
    assert tried == [12, 6, 6, 6, 12, 12]


def test_every_stage_is_a_row_of_the_table_with_its_speed_and_peak(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 13)
    run, seconds = Run(StagePlan(12, 12, None)), 0.25
    time = [0.0]

    def now(_exactly):
        time[0] += seconds
        return time[0]

    monkeypatch.setattr(run.stages, "_now", now)
    memory = DEVICE.memory()
    run.learn(0)
    with MemoryBudget(memory_needed(6) + 1000) as budget:
        budget.adopt(everything(run))
        run.learn(1)
    for step in range(2, 27):
        run.learn(step)
    tokens_per_s = SEQUENCES * SHAPE.block_size / seconds
    assert [(row.step, row.micro_batch, row.passes) for row in run.stages.rows] == [
        (0, 12, 1),
        (1, 6, 2),
        (14, 12, 1),
    ]
    assert [row.tokens_per_s for row in run.stages.rows] == [None, tokens_per_s, tokens_per_s]
    assert run.stages.rows[2].peak_bytes == pytest.approx(memory.peak_bytes(), rel=0.1)
    title, *lines = run.stages.table()
    assert [line.split()[:3] for line in lines] == [
        ["0", "eager", "12"],
        ["1", "eager", "6"],
        ["14", "eager", "12"],
    ]
    assert [line.index("×") < title.index("tokens/s") for line in lines] == [True] * 3
    measured = [event for event in run.events if event["name"] == "stage measured"]
    assert [event["tokens_per_s"] for event in measured] == [tokens_per_s] * 2


def test_compiled_size_that_does_not_fit_at_first_is_tried_again_later(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 3)
    run, room = Run(StagePlan(eager_size=4, compiled_size=12, compile_after=1)), [4]

    def compile_greedily(**_):
        def forward(idx, targets):
            if len(idx) > room[0]:
                raise torch.OutOfMemoryError("no room")
            return GPT.forward(run.model, idx, targets)

        run.model._compiled_call_impl = forward

    monkeypatch.setattr(run.model, "compile", compile_greedily)
    losses = [run.learn(0), run.learn(1)]
    room[0] = 12
    losses += [run.learn(step) for step in range(2, 6)]
    assert run.sizes == [4, 4, 4, 4, 12, 12]
    assert run.stages.stage == "compiled"
    assert losses == pytest.approx(undisturbed(6), abs=1e-6)


@pytest.mark.slow
def test_compiled_stage_regrows_and_keeps_the_curve():
    torch._dynamo.reset()  # other tests may have used up what it allows of recompilations
    run = Run(StagePlan(eager_size=4, compiled_size=12, compile_after=2))
    losses = [run.learn(step) for step in range(5)]
    assert run.sizes == [4, 4, 12, 12, 12]
    assert run.stages.stage == "compiled"
    assert losses == pytest.approx(undisturbed(5), abs=1e-5)
    assert [event["now"] for event in run.changes()] == ["compiled"]
    assert not any(name.startswith("_orig_mod") for name in run.model.state_dict())


def test_failing_compiler_leaves_an_eager_run_with_its_curve(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    run = Run(StagePlan(eager_size=6, compiled_size=12, compile_after=1))
    # Not by monkeypatch, which would leave torch without this setting.
    with torch._inductor.config.patch("cpp.cxx", ("/nonexistent/compiler",)):
        losses = [run.learn(step) for step in range(3)]
    assert run.stages.stage == "eager for good"
    assert run.sizes == [6, 6, 6]
    assert losses == pytest.approx(undisturbed(3), abs=1e-6)
    assert len(run.changes()) == 1  # it is tried once


@pytest.mark.parametrize(
    ("wrong", "change"),
    [
        ("evaluation loss", lambda loss: loss * 1.5),
        ("training loss", lambda loss: loss * 1.5 if loss.requires_grad else loss),
        ("gradient norm", lambda loss: loss + 0.5 * (loss - loss.detach())),
        ("evaluation loss nan", lambda loss: loss * float("nan")),
    ],
)
def test_compiled_model_that_disagrees_is_not_kept(monkeypatch, wrong, change):
    run = Run(StagePlan(12, 12, compile_after=1))

    def compile_wrongly(**_):
        run.model._compiled_call_impl = lambda *args: change(GPT.forward(run.model, *args))

    monkeypatch.setattr(run.model, "compile", compile_wrongly)
    losses = [run.learn(step) for step in range(3)]
    assert run.stages.stage == "eager for good"
    assert wrong in run.changes()[0]["reason"]
    assert losses == pytest.approx(undisturbed(3), abs=1e-6)


class Clocked(Run):
    """A run whose steps take what is said of their stage, with noise in it."""

    def __init__(
        self, monkeypatch, plan: StagePlan, seconds: dict[str, float], *, noise=0.0, **options
    ):
        super().__init__(plan, **options)
        self.seconds, self.now, random = seconds, 0.0, np.random.default_rng(0)

        def tick(_exactly):
            spread = 1 + noise * random.standard_normal()
            self.now += self.seconds[self.stages.stage] * max(spread, 0.5) / 2
            return self.now

        monkeypatch.setattr(self.stages, "_now", tick)
        monkeypatch.setattr(self.model, "compile", self._compile)

    def _compile(self, **_):
        self.model._compiled_call_impl = lambda *args: GPT.forward(self.model, *args)

    def reasons(self) -> list[str]:
        return [change["reason"] for change in self.changes()]


def test_slower_compiled_model_is_given_up_for_a_while(monkeypatch):
    """What made it slow may be over by then."""
    run = Clocked(monkeypatch, StagePlan(12, 12, compile_after=13), {"eager": 1.0, "compiled": 1.5})
    losses = [run.learn(step) for step in range(30)]
    assert run.stages.stage == "eager"
    assert run.reasons()[-1] == "a compiled step took 0.75 s, an eager one 0.5 s"
    next_try = run.stages.reached["compile_at"]
    assert next_try - QUIET_STEPS in range(20, 30)
    assert losses == pytest.approx(undisturbed(30), abs=1e-6)
    run.seconds["compiled"] = 0.5
    for step in range(next_try - 12, next_try + 20):
        run.learn(step)
    assert run.stages.reached == {"stage": "compiled", "compile_at": next_try}


def test_where_the_same_run_gives_the_same_bits_no_clock_decides(monkeypatch):
    """A slower compiled model stays: it would be another one in a launch that was faster."""
    plan, seconds = StagePlan(12, 12, compile_after=13), {"eager": 1.0, "compiled": 1.5}
    run = Clocked(monkeypatch, plan, seconds, may_time=False)
    for step in range(30):
        run.learn(step)
    assert run.stages.reached == {"stage": "compiled", "compile_at": None}


@pytest.mark.parametrize("ratio", [1.0, 1.05])
def test_noise_of_a_busy_machine_does_not_end_the_compiled_stage(monkeypatch, ratio):
    plan, seconds = StagePlan(12, 12, compile_after=13), {"eager": 1.0, "compiled": ratio}
    run = Clocked(monkeypatch, plan, seconds, noise=0.05)
    for step in range(40):
        run.learn(step)
    assert run.stages.stage == "compiled"


@pytest.mark.parametrize(
    ("reached", "eager_steps"),
    [
        (dict(reached="compiled"), 0),
        (dict(reached="eager for good"), TIMED_STEPS + 1),
        (dict(reached="eager", compile_at=16), 6),
        (dict(reached="eager", compile_at=30), 20),
    ],
)
def test_continued_run_enters_the_stage_it_had_reached(monkeypatch, reached, eager_steps):
    run = Run(StagePlan(4, 12, compile_after=3), **reached)

    def compile_well(**_):
        run.model._compiled_call_impl = lambda *args: GPT.forward(run.model, *args)

    monkeypatch.setattr(run.model, "compile", compile_well)
    for step in range(10, 35):
        run.learn(step)
    assert run.sizes == [4] * eager_steps + [12] * (25 - eager_steps)


def test_what_is_evaluated_before_the_first_step_is_of_the_stage_before_it(monkeypatch):
    """So that an evaluation repeated by a continued run gives the same number."""
    run = Run(StagePlan(4, 12, compile_after=3), reached="compiled")
    monkeypatch.setattr(run.model, "compile", lambda **_: None)
    assert run.stages.reached["stage"] == "eager"
    run.stages.begin(10, partial(micro_batches, 10))
    assert run.stages.reached["stage"] == "compiled"


def test_compiling_where_memory_is_scarce_keeps_the_size_that_fits(monkeypatch):
    run = Run(StagePlan(12, 12, compile_after=3))

    def compile_well(**_):
        run.model._compiled_call_impl = lambda *args: GPT.forward(run.model, *args)

    monkeypatch.setattr(run.model, "compile", compile_well)
    losses = [run.learn(0), run.learn(1)]
    with MemoryBudget(memory_needed(6) + 1000) as budget:
        budget.adopt(everything(run))
        losses += [run.learn(step) for step in range(2, 6)]
    assert run.sizes == [12, 12, 12, 6, 6, 6, 6]
    assert run.stages.stage == "compiled"
    assert losses == pytest.approx(undisturbed(6), abs=1e-6)


def test_memory_lost_while_compiling_puts_it_off(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 3)
    run, limit_bytes = Run(StagePlan(12, 12, compile_after=2)), [0]

    def compile_greedily(**_):
        def forward(idx, targets):
            if limit_bytes:
                raise torch.OutOfMemoryError("no room")
            return GPT.forward(run.model, idx, targets)

        run.model._compiled_call_impl = forward

    monkeypatch.setattr(run.model, "compile", compile_greedily)
    losses = [run.learn(step) for step in range(3)]
    limit_bytes.clear()
    losses += [run.learn(step) for step in range(3, 7)]
    postponed = [event for event in run.events if event["name"] == "not compiled yet"]
    assert [(event["step"], event["next_try_step"]) for event in postponed] == [(2, 5)]
    assert [(event["step"], event["now"]) for event in run.changes()] == [(5, "compiled")]
    assert run.sizes == [12] * 7
    assert losses == pytest.approx(undisturbed(7), abs=1e-6)


def test_compiled_step_without_room_for_one_sequence_goes_on_in_eager_for_a_while(monkeypatch):
    monkeypatch.setattr(module, "QUIET_STEPS", 3)
    run, is_short = Run(StagePlan(2, 2, compile_after=1)), []

    def compile_greedily(**_):
        def forward(idx, targets):
            if is_short:
                raise torch.OutOfMemoryError("no room")
            return GPT.forward(run.model, idx, targets)

        run.model._compiled_call_impl = forward

    monkeypatch.setattr(run.model, "compile", compile_greedily)
    losses = [run.learn(0), run.learn(1)]
    is_short.append(True)
    losses.append(run.learn(2))
    is_short.clear()
    losses += [run.learn(step) for step in range(3, 7)]
    assert run.sizes == [2, 2, 2, 1, 1, 1, 1, 2, 2]
    assert [event["now"] for event in run.changes()] == [
        "compiled",
        "compiled",
        "eager",
        "compiled",
    ]
    assert losses == pytest.approx(undisturbed(7), abs=1e-6)


def test_compile_off_never_tries():
    run = Run(StagePlan(12, 12, compile_after=None))
    run.stages.begin(0, partial(micro_batches, 0))
    run.stages.advance(10**9, partial(micro_batches, 0))
    assert (run.stages.stage, run.changes()) == ("eager", [])
