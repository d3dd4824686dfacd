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
from nanofit.compiler import compile_in_place, disagreement, uncompile
from nanofit.device import Device, DeviceMemory, is_out_of_memory
from nanofit.dist import OtherProcessFailed, Ranks
from nanofit.loader import MicroBatch
from nanofit.step import UpdateInterrupted
from nanofit.terminal import InputError, first_line

OUT_OF_MEMORY = "out of memory"

TIMED_STEPS = 5  # before and after compiling, to tell which is faster
QUIET_STEPS = 200  # without trouble, after which a smaller micro-batch may grow again
WATCHED_STEPS = 20  # between looks at how memory and speed are
MOST_RETRIES = 3  # of the allocator between two looks
SLOWDOWN = 1.5  # over so many looks in a row: memory has spilled, or is fought for
SLOW_LOOKS = 3


@dataclass(frozen=True)
class StagePlan:
    """What was found to fit, before the run."""

    eager_size: int
    compiled_size: int
    compile_after: int | None  # None: never
    recompute: str = "off"
    activation_memory_budget: float = 1.0


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
        event: Callable[..., None],
    ):
        self.stage, self.size = "eager", plan.eager_size
        self.evaluation_size = plan.eager_size
        self._model, self._plan, self._sizes = model, plan, sizes
        self._device, self._ranks, self._event = device, ranks, event
        self._memory = device.memory()
        self._watch = _Watch(self._memory, is_timed=device.type == "cuda")
        self._eager_times: list[float] = []
        self._probation: list[float] | None = None  # times of compiled steps not yet trusted
        self._regrow_at: int | None = None
        self._regrown_size, self._patience = self.size, QUIET_STEPS

    def advance(self, step: int, micro_batches: Callable[[int], Iterator[MicroBatch]]) -> None:
        """Enter the stage that `step` belongs to, after a look at how the steps before went.

        A new stage is tried out first on a micro-batch of the step.
        """
        after = self._plan.compile_after
        if self._probation is not None and len(self._probation) > TIMED_STEPS:
            self._judge(step)
        elif self._watch.is_due():
            self._look_for_trouble(step)
        if self.stage == "eager" and after is not None and step >= after:
            self._compile(step, micro_batches)
        elif self._regrow_at is not None and step >= self._regrow_at:
            self.make_room()
            self._change(step, size=self._regrown_size, reason="memory was quiet for a while")

    def run(
        self, step: int, attempt: Callable[[int], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Do a step, again and in smaller micro-batches if memory runs out."""
        while True:
            try:
                return self._timed(step, attempt)
            except Exception as error:
                trouble = self._trouble(error)
                if trouble is None:
                    raise
            self.make_room()  # not before the error, and what it holds on to, is gone
            self._step_back(step, trouble)

    def interrupted(self, step: int, reason: str) -> None:
        """An update ran out of memory; once the run is put back, go on with more room."""
        self.make_room()
        if self.size == 1:
            raise InputError(f"memory ran out in the update of step {step}: {reason}")
        self._shrink(step, "out of memory in an update")

    def evaluate(self, step: int, attempt: Callable[[int], float]) -> float:
        """Evaluate, in smaller micro-batches if memory runs out; they have a size of their own."""
        while True:
            try:
                return attempt(self.evaluation_size)
            except Exception as error:
                if not _is_lack_of_memory(error) or self.evaluation_size == 1:
                    raise
            self.make_room()
            self.evaluation_size = self._smaller(self.evaluation_size)
            self._event(step, "evaluation shrunk", micro_batch=self.evaluation_size)

    def _compile(self, step: int, micro_batches: Callable[[int], Iterator[MicroBatch]]) -> None:
        """Compile for the size found for it; if that does not fit any more, for the eager one."""
        started = time.monotonic()
        for size in dict.fromkeys((self._plan.compiled_size, self._plan.eager_size)):
            self.make_room()
            failure = self._try_compiled(next(micro_batches(size)))
            if not self._ranks.any(failure == OUT_OF_MEMORY):
                break
        if self._ranks.any(failure is not None):
            self.make_room()
            self._give_up_compiling(step, failure or "it failed in another process")
            return
        self._probation = []
        reason = f"compiled in {time.monotonic() - started:.0f} s"
        self._change(step, stage="compiled", size=size, reason=reason)

    def _try_compiled(self, batch: MicroBatch) -> str | None:
        """Why the model cannot be compiled for such micro-batches, if it cannot."""
        try:
            with self._ranks.all_or_none():
                compile_in_place(self._model, self._plan.activation_memory_budget)
                return disagreement(self._model, batch, self._device, rows=self._plan.eager_size)
        except Exception as error:  # torch.compile fails in as many ways as there are machines
            return OUT_OF_MEMORY if is_out_of_memory(error) else _told(error)

    def _give_up_compiling(self, step: int, reason: str) -> None:
        uncompile(self._model, self._plan.recompute)
        self._probation = None
        self._change(step, stage="eager for good", size=self._plan.eager_size, reason=reason)

    def _timed(self, step: int, attempt: Callable) -> tuple[Tensor, Tensor]:
        """Do a step and note its time: exactly, where that decides about compiling."""
        after = self._plan.compile_after
        is_last_eager = self.stage == "eager" and after is not None and step >= after - TIMED_STEPS
        is_exact = is_last_eager or self._probation is not None
        started = self._now(is_exact)
        result = attempt(self.size)
        seconds = self._now(is_exact) - started
        if is_last_eager:
            self._eager_times.append(seconds)
        elif self._probation is not None:
            self._probation.append(seconds)
        else:
            self._watch.note(seconds)
        return result

    def _look_for_trouble(self, step: int) -> None:
        trouble = self._watch.trouble()
        if self._ranks.any(trouble is not None) and self.size > 1:
            self._shrink(step, trouble or "memory is scarce in another process")

    def _now(self, exactly: bool) -> float:
        if exactly:
            self._device.wait()
        return time.monotonic()

    def _judge(self, step: int) -> None:
        """Keep the compiled model only if it is faster; its first step does not count."""
        compiled = median(self._probation[1:])
        eager = median(self._eager_times) if self._eager_times else None
        self._probation = None
        if self._ranks.any(eager is not None and compiled > eager):
            reason = f"a compiled step took {compiled:.3g} s, an eager one {eager:.3g} s"
            self._give_up_compiling(step, reason)
        else:
            gain = {"times_faster": round(eager / compiled, 2)} if eager else {}
            self._event(step, "compiled stage kept", **self._state(), **gain)

    def _trouble(self, error: Exception) -> str | None:
        """Why a failed step is worth another try; None if it is not."""
        if _is_lack_of_memory(error):
            can_shrink = self.size > 1 or self.stage == "compiled"
            return OUT_OF_MEMORY if can_shrink else None
        is_first_compiled = self._probation == [] and not isinstance(error, UpdateInterrupted)
        return _told(error) if is_first_compiled else None

    def _step_back(self, step: int, trouble: str) -> None:
        if self.size == 1 or self._ranks.any(trouble != OUT_OF_MEMORY):
            self._give_up_compiling(step, trouble)
        else:
            self._shrink(step, trouble)

    def _shrink(self, step: int, reason: str) -> None:
        """Go on in smaller micro-batches; try the old size again later, each time much later."""
        if self._regrow_at is None:
            self._regrown_size = self.size
        self._change(step, size=self._smaller(self.size), reason=reason)
        self._regrow_at, self._patience = step + self._patience, 2 * self._patience

    def _smaller(self, size: int) -> int:
        return max((one for one in self._sizes if one < size), default=1)

    def make_room(self) -> None:
        """Give back the memory of a step that failed."""
        self._model.zero_grad(set_to_none=True)
        gc.collect()
        self._memory.release()

    def _change(self, step: int, *, size: int, reason: str, stage: str | None = None) -> None:
        self.stage, self.size = stage or self.stage, self._ranks.least(size)
        # What the trial of a stage evaluated fits; and another size would be compiled once more.
        self.evaluation_size = self.size if stage else min(self.evaluation_size, self.size)
        self._regrow_at = None
        self._watch = _Watch(self._memory, is_timed=self._device.type == "cuda")
        self._event(step, "stage", **self._state(), reason=reason)

    def _state(self) -> dict[str, Any]:
        return {
            "now": self.stage,
            "micro_batch": self.size,
            "passes": -(-self._sizes[-1] // self.size),
            "peak_mib": round(self._memory.peak_bytes() / 2**20),
        }


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
