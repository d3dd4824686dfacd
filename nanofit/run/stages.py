"""How a run computes, from step to step: eager, then compiled, in micro-batches that fit.

A stage changes how fast a step is, never what is learned: the sequences of a step stay the same,
whatever they are cut into. A step that fails has changed nothing and is done again.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor

from model import GPT
from nanofit.data.loader import MicroBatch
from nanofit.fit.fit import MOST_RETRIES, StagePlan
from nanofit.learning.compiler import compile_in_place, disagreement, measure, uncompile
from nanofit.learning.engine import Engine
from nanofit.learning.step import UpdateInterrupted
from nanofit.learning.undo import UpdateUndo
from nanofit.machine.device import Device
from nanofit.machine.dist import OtherProcessFailed, ProcessLost, Ranks
from nanofit.machine.memory import DeviceMemory, is_out_of_memory
from nanofit.terminal import InputError, compact, first_line

OUT_OF_MEMORY = "out of memory"
OUT_IN_UPDATE = "out of memory in an update"
MIB = 2**20

TIMED_STEPS = 10  # that tell the speed of a stage; the first of a stage does not count
SLOWER = 1.1  # times an eager step's time: more than busy machines make of the same
PAUSES_S = (1, 5, 20)  # before one sequence is tried again: other programs may give memory back
QUIET_STEPS = 200  # without trouble, after which a smaller micro-batch may grow again
WATCHED_STEPS = 20  # between looks at how memory and speed are
SLOWDOWN = 1.5  # over so many looks in a row: memory has spilled, or is fought for
SLOW_LOOKS = 3


class NoRoom(InputError):
    """Not even one sequence at a time fits any more."""

    def __init__(self, message: str, *, is_whole: bool = True):
        super().__init__(message)
        self.is_whole = is_whole  # what the run has learned; else an update was left half-way


@dataclass
class StageRow:
    """How a run computed from a step on, and what came of it as soon as that is measured."""

    step: int
    stage: str
    micro_batch: int
    passes: int
    reason: str
    tokens_per_s: float | None = None
    peak_bytes: int | None = None


class Stages:
    """The stage of a run, its micro-batch size, and what happens when it does not work out."""

    def __init__(
        self,
        model: GPT,
        plan: StagePlan,
        sizes: Sequence[int],
        *,
        device: Device,
        ranks: Ranks,
        tokens_per_step: int,
        undo: UpdateUndo,
        event: Callable[..., None],
        engine: Engine = Engine(),  # noqa: B008
        reached: str = "eager",
        compile_at: int | None = None,
        may_time: bool = True,
    ):
        self.stage, self.size = "eager", plan.eager_size
        self.evaluation_size = plan.eager_size
        self.rows: list[StageRow] = []
        self._model, self._plan, self._sizes = model, plan, sizes
        self._device, self._ranks, self._tokens_per_step = device, ranks, tokens_per_step
        self._event, self._undo, self._reached = event, undo, reached
        self._engine = engine
        self._memory = device.memory()
        self._watch = self._new_watch()
        self._times: list[float] = []  # of steps of this stage that were timed exactly
        self._eager_seconds: float | None = None  # of a step
        self._may_time = may_time  # else no clock decides: the same run does the same again
        self._is_on_probation = False  # compiled, and not yet known to be faster
        self._compile_after = plan.compile_after
        if compile_at is not None and plan.compile_after is not None:
            self._compile_after = compile_at  # it was put off
        self._patience = _Patience()
        self._pauses = 0  # since something succeeded
        self._regrow_at = self._regrow_evaluation_at = None
        self._regrown_size = self.size

    @property
    def reached(self) -> dict[str, Any]:
        """What another launch must know to compute as this one does."""
        was_put_off = self._compile_after != self._plan.compile_after
        return {"stage": self.stage, "compile_at": self._compile_after if was_put_off else None}

    def begin(self, step: int, micro_batches: Callable[[int], Iterator[MicroBatch]]) -> None:
        """Compute as the run did before `step`: its evaluation belongs to that stage still."""
        self._change(step, size=self.size, reason="the run begins" if step == 0 else "resumed")
        if self._reached == "compiled" and self._is_time_to_compile(step):
            self._compile(step, micro_batches)

    def advance(self, step: int, micro_batches: Callable[[int], Iterator[MicroBatch]]) -> None:
        """Enter the stage that `step` belongs to, after a look at how the steps before went.

        A new stage is tried out first on a micro-batch of the step.
        """
        if self.rows[-1].tokens_per_s is None and len(self._times) > TIMED_STEPS:
            self._measured(step)
        elif self._watch.is_due():
            self._look_for_trouble(step)
        if self._is_time_to_compile(step):
            self._compile(step, micro_batches)
        elif self._regrow_at is not None and step >= self._regrow_at:
            self.make_room()
            self._change(step, size=self._regrown_size, reason="memory was quiet for a while")

    def run(
        self, step: int, attempt: Callable[[int], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Do a step, again and in smaller micro-batches if memory runs out.

        NoRoom if they cannot be smaller.
        """
        while True:
            try:
                return self._timed(step, attempt)
            except Exception as error:
                trouble = self._trouble(error)
                if trouble is None:
                    raise
            self.make_room()  # not before the error, and what it holds on to, is gone
            self._step_back(step, trouble)

    def interrupted(self, step: int) -> None:
        """An update ran out of memory; once the run is put back, go on with more room."""
        self.make_room()
        if self.size > 1:
            self._shrink(step, OUT_IN_UPDATE)
        elif not self._pause(step):
            raise self._no_room(f"in the update of step {step}", is_whole=False)

    def evaluate(self, step: int, attempt: Callable[[int], float]) -> float:
        """Evaluate, in smaller micro-batches if memory runs out; they have a size of their own."""
        if self._regrow_evaluation_at is not None and step >= self._regrow_evaluation_at:
            self.evaluation_size, self._regrow_evaluation_at = self.size, None
        while True:
            try:
                loss = attempt(self.evaluation_size)
                self._pauses = 0
                return loss
            except Exception as error:
                if not _is_lack_of_memory(error):
                    raise
            self.make_room()
            if self.evaluation_size > 1:
                self._shrink_evaluation(step)
            elif not self._pause(step):
                raise self._no_room(f"in the evaluation at step {step}")

    def table(self) -> Iterator[str]:
        """What the run went through, a line for each stage."""
        layout = "{:>6}  {:14}  {:>8}  {:>8}  {:>8}  {}"
        yield layout.format("step", "stage", "batch", "tokens/s", "peak MiB", "why")
        for row in self.rows:
            batch = f"{row.micro_batch} × {row.passes}"
            speed = compact(row.tokens_per_s) if row.tokens_per_s else "-"
            peak = f"{row.peak_bytes / MIB:,.0f}" if row.peak_bytes else "-"
            yield layout.format(row.step, row.stage, batch, speed, peak, row.reason)

    def _compile(self, step: int, micro_batches: Callable[[int], Iterator[MicroBatch]]) -> None:
        """Compile for the size found for it; if that does not fit any more, for the present one."""
        started = time.monotonic()
        largest = self._plan.compiled_size
        for size in dict.fromkeys((largest, min(largest, self._plan.eager_size, self.size))):
            self.make_room()
            failure = self._try_compiled(micro_batches(size))
            if not self._ranks.any(failure == OUT_OF_MEMORY):
                break
        else:
            self.make_room()
            self._compile_after = self._patience.until(step)
            later = {"reason": OUT_OF_MEMORY, "next_try_step": self._compile_after}
            self._event(step, "not compiled yet", **later)
            return
        if self._ranks.any(failure is not None):
            self.make_room()
            self._give_up_compiling(step, failure or "it failed in another process")
            return
        self._eager_seconds = self._step_seconds()
        self._is_on_probation = True
        reason = f"compiled in {time.monotonic() - started:.0f} s"
        self._change(step, stage="compiled", size=size, reason=reason, regrow_to=largest)

    def _try_compiled(self, micro_batches: Iterator[MicroBatch]) -> str | None:
        """Why the model cannot be compiled for such micro-batches, if it cannot."""
        model, plan, device = self._model, self._plan, self._device
        try:
            with self._ranks.all_or_none():
                batch = next(micro_batches)
                eager = measure(model, batch, device, rows=min(plan.eager_size, self.size))
                compile_in_place(model, plan.activation_memory_budget)
                compiled = measure(model, batch, device, rows=len(batch.idx))
                return disagreement(eager, compiled, dropout=model.config.dropout)
        except ProcessLost:
            raise
        except Exception as error:  # torch.compile fails in as many ways as there are machines
            uncompile(model, plan.recompute)
            return OUT_OF_MEMORY if is_out_of_memory(error) else _told(error)

    def _give_up_compiling(self, step: int, reason: str) -> None:
        uncompile(self._model, self._plan.recompute)
        self._is_on_probation = False
        planned = self._plan.eager_size
        size = planned if self.stage == "compiled" else self.size
        self._change(step, stage="eager for good", size=size, reason=reason, regrow_to=planned)

    def _compile_again_later(self, step: int, reason: str) -> None:
        """Go on in eager, which may compute again what a compiled model has to keep."""
        uncompile(self._model, self._plan.recompute)
        self._is_on_probation = False
        self._compile_after = self._patience.until(step)
        planned = self._plan.eager_size
        self._change(step, stage="eager", size=self.size, reason=reason, regrow_to=planned)

    def _timed(self, step: int, attempt: Callable) -> tuple[Tensor, Tensor]:
        """Do a step and note its time: exactly, where that tells the speed of a stage."""
        is_exact = len(self._times) <= TIMED_STEPS or self._is_last_eager(step)
        started = self._now(is_exact)
        result = attempt(self.size)
        self._undo.forget()
        self._pauses = 0
        seconds = self._now(is_exact) - started
        if is_exact:
            self._times.append(seconds)
        else:
            self._watch.note(seconds)
        return result

    def _is_time_to_compile(self, step: int) -> bool:
        """Whether the eager stage has lasted long enough.

        A run that is continued without having been compiled takes a few eager steps first, that it
        can be compared with.
        """
        after = self._compile_after
        if self.stage != "eager" or after is None or step < after:
            return False
        begun = self.rows[0].step
        return begun <= after or self._reached == "compiled" or step > begun + TIMED_STEPS

    def _is_last_eager(self, step: int) -> bool:
        """Whether compiled steps will be compared with this one."""
        after = self._compile_after
        return self.stage == "eager" and after is not None and step >= after - TIMED_STEPS

    def _step_seconds(self) -> float | None:
        counted = self._times[1:][-TIMED_STEPS:]
        return median(counted) if counted else None

    def _look_for_trouble(self, step: int) -> None:
        trouble = self._watch.trouble()
        if self._ranks.any(trouble is not None) and self.size > 1:
            self._shrink(step, trouble or "memory is scarce in another process")

    def _now(self, exactly: bool) -> float:
        if exactly:
            self._device.wait()
        return time.monotonic()

    def _measured(self, step: int) -> None:
        """Tell how fast the stage is; keep a newly compiled model only if it is faster."""
        seconds, eager, row = self._step_seconds(), self._eager_seconds, self.rows[-1]
        row.tokens_per_s = self._tokens_per_step / seconds
        row.peak_bytes = self._memory.peak_bytes()
        is_compared = self._is_on_probation and eager is not None
        gain = {"times_faster": round(eager / seconds, 2)} if is_compared else {}
        measures = {
            "tokens_per_s": round(row.tokens_per_s),
            "peak_mib": round(row.peak_bytes / MIB),
        }
        self._event(step, "stage measured", **self._state(), **measures, **gain)
        is_slower = is_compared and seconds > SLOWER * eager
        if self._ranks.any(is_slower and self._may_time):
            # Other programs may have been busy just then: it is tried again.
            reason = f"a compiled step took {seconds:.3g} s, an eager one {eager:.3g} s"
            self._compile_again_later(step, reason)
        self._is_on_probation = False

    def _trouble(self, error: Exception) -> str | None:
        """Why a failed step is worth another try; None if it is not."""
        if isinstance(error, UpdateInterrupted):
            return None if self._ranks.any(not self._undo.undo()) else OUT_IN_UPDATE
        if _is_lack_of_memory(error):
            return OUT_OF_MEMORY
        is_first_compiled = self.stage == "compiled" and not self._times
        is_of_compiling = is_first_compiled and not isinstance(error, InputError)
        return _told(error) if is_of_compiling else None

    def _step_back(self, step: int, trouble: str) -> None:
        if self._ranks.any(trouble not in (OUT_OF_MEMORY, OUT_IN_UPDATE)):
            self._give_up_compiling(step, trouble)
        elif self.size > 1:
            self._shrink(step, trouble)
        elif self.stage == "compiled":
            self._compile_again_later(step, trouble)
        elif not self._pause(step):
            raise self._no_room(f"at step {step}")

    def _shrink(self, step: int, reason: str) -> None:
        """Go on in smaller micro-batches; try the old size again later."""
        largest = self.size if self._regrow_at is None else self._regrown_size
        self._change(step, size=self._smaller(self.size), reason=reason, regrow_to=largest)

    def _shrink_evaluation(self, step: int) -> None:
        self.evaluation_size = self._smaller(self.evaluation_size)
        self._regrow_evaluation_at = step + QUIET_STEPS
        later = {"reason": OUT_OF_MEMORY, "next_try_step": self._regrow_evaluation_at}
        self._event(step, "evaluation shrunk", micro_batch=self.evaluation_size, **later)

    def _pause(self, step: int) -> bool:
        """Wait for other programs, where there are any; False if that was done often enough."""
        if self._memory.free_bytes() is None or self._pauses == len(PAUSES_S):
            return False
        pause_s = PAUSES_S[self._pauses]
        self._pauses += 1
        if self._regrow_at is not None:
            self._regrow_at = self._patience.until(step)
        self._event(step, "waiting for memory", pause_seconds=pause_s, reason=OUT_OF_MEMORY)
        time.sleep(pause_s)
        return True

    def _no_room(self, where: str, *, is_whole: bool = True) -> NoRoom:
        said, free_bytes = f"out of memory {where}, with one sequence at a time", self._free_bytes()
        if free_bytes is not None:
            said += f", which takes more than the {free_bytes / MIB:,.0f} MiB to be had"
        return NoRoom(said, is_whole=is_whole)

    def _free_bytes(self) -> int | None:
        """What the process with the least memory could use."""
        free_bytes = self._memory.free_bytes()
        least = self._ranks.least(-1 if free_bytes is None else free_bytes)
        return least if least >= 0 else None

    def _smaller(self, size: int) -> int:
        return max((one for one in self._sizes if one < size), default=1)

    def make_room(self) -> None:
        """Give back the memory of a step that failed."""
        self._model.zero_grad(set_to_none=True)
        self._engine.forget()
        gc.collect()
        self._memory.release()

    def _change(
        self,
        step: int,
        *,
        size: int,
        reason: str,
        stage: str | None = None,
        regrow_to: int | None = None,
    ) -> None:
        self.stage, self.size = stage or self.stage, self._ranks.least(size)
        # What the trial of a stage evaluated fits; and another size would be compiled once more.
        is_as_large = stage or self._regrow_evaluation_at is None
        self.evaluation_size = self.size if is_as_large else min(self.evaluation_size, self.size)
        self._regrow_at = None
        if regrow_to is not None and regrow_to > self.size:
            self._regrown_size, self._regrow_at = regrow_to, self._patience.until(step)
        self._times = []
        self._watch = self._new_watch()
        self._memory.release()  # else what is kept of a larger stage would be this one's peak
        self._memory.forget_peak()
        passes = -(-self._sizes[-1] // self.size)
        self.rows.append(StageRow(step, self.stage, self.size, passes, reason))
        later = {"next_try_step": self._regrow_at} if self._regrow_at is not None else {}
        self._event(step, "stage", **self._state(), reason=reason, **later)

    def _new_watch(self) -> "_Watch":
        """Where memory may spill to the host, slow steps are a sign of it."""
        if self._device.type == "cuda":
            return _Watch(self._memory, is_timed=True)
        return _Watch(self._memory, is_timed=False)

    def _state(self) -> dict[str, Any]:
        row = self.rows[-1]
        return {"now": row.stage, "micro_batch": row.micro_batch, "passes": row.passes}


class _Patience:
    """How long to wait, after memory ran out, before as much as before is asked for again.

    Twice as long as the last time if that was in vain.
    """

    def __init__(self):
        self._steps, self._until = QUIET_STEPS, None

    def until(self, step: int) -> int:
        """The step to wait for now that memory has run out at `step`."""
        if self._until is not None and step >= self._until:  # else it is the same shortage still
            was_in_vain = step - self._until < self._steps  # for what it got did not last as long
            self._steps = 2 * self._steps if was_in_vain else QUIET_STEPS
        self._until = step + self._steps
        return self._until


class _Watch:
    """Looks now and then for signs that a micro-batch does not really fit."""

    def __init__(self, memory: DeviceMemory, *, is_timed: bool):
        self._memory, self._is_timed = memory, is_timed
        self._retries = memory.retries()
        self._steps, self._seconds, self._best, self._slow_looks = 0, 0.0, float("inf"), 0

    def note(self, seconds: float) -> None:
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds

    def is_due(self) -> bool:
        return self._steps >= WATCHED_STEPS

    def trouble(self) -> str | None:
        """What was wrong since the last look, if anything was."""
        retries, seconds = self._memory.retries() - self._retries, self._seconds
        self._retries += retries
        self._steps, self._seconds, self._best = 0, 0.0, min(self._best, seconds)
        is_slow = self._is_timed and seconds > SLOWDOWN * self._best
        self._slow_looks = self._slow_looks + 1 if is_slow else 0
        if retries > MOST_RETRIES:
            return f"{retries} allocations had to be repeated"
        if self._slow_looks >= SLOW_LOOKS:
            return f"steps have become {seconds / self._best:.1f} times slower"
        return None


def _is_lack_of_memory(error: Exception) -> bool:
    return is_out_of_memory(error) or isinstance(error, OtherProcessFailed)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
