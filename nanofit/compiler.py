"""Eager -> compiled, in place, and back if it does not work out."""

import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from nanofit.device import Device
from nanofit.dist import Ranks
from nanofit.loader import MicroBatch

AGREEMENT = 0.02  # relative; half-precision kernels fused differently stay well within


class CompileStages:
    """The stages of a run: eager from the start, compiled from step `compile_after` on."""

    def __init__(
        self,
        model: nn.Module,
        compile_after: int | None,
        device: Device,
        ranks: Ranks,
        event: Callable[..., None],
    ):
        self.stage = "eager"
        self._model, self._compile_after = model, compile_after
        self._device, self._ranks, self._event = device, ranks, event

    def advance(self, step: int, micro_batches: Callable[[], Iterator[MicroBatch]]) -> None:
        """Enter the stage that `step` belongs to, tried out first on a micro-batch of the step.

        The trial leaves weights and optimiser untouched, so a failure costs nothing but its time.
        """
        if self.stage != "eager" or self._compile_after is None or step < self._compile_after:
            return
        started = time.monotonic()
        failure = self._try(next(micro_batches()))
        if self._ranks.any(failure is not None):
            _uncompile(self._model)
            failure = failure or "it failed in another process"
        self.stage = "eager for good" if failure else "compiled"
        details = (
            {"reason": failure} if failure else {"compile_seconds": time.monotonic() - started}
        )
        self._event(step, "compile", stage=self.stage, **details)

    def _try(self, batch: MicroBatch) -> str | None:
        """Compile, and run what training and evaluation will; the reason if that fails."""
        try:
            eager_loss = self._evaluation_loss(batch)
            self._model.compile(dynamic=False)
            compiled_loss = self._evaluation_loss(batch)
            with self._device.autocast():
                loss = self._model(batch.idx, batch.targets)
            loss.backward()
        except Exception as error:  # torch.compile fails in as many ways as there are machines
            return _reason(error)
        finally:
            self._model.zero_grad(set_to_none=True)
            self._model.train()  # a failure within an evaluation leaves it otherwise
        if not abs(compiled_loss - eager_loss) <= AGREEMENT * abs(eager_loss):
            return f"the compiled loss {compiled_loss:.4f} differs from the eager {eager_loss:.4f}"
        return None

    @torch.no_grad()
    def _evaluation_loss(self, batch: MicroBatch) -> float:
        self._model.eval()
        with self._device.autocast():
            loss = self._model(batch.idx, batch.targets).item()
        self._model.train()
        return loss


def _uncompile(model: nn.Module) -> None:
    model._compiled_call_impl = None  # torch has no public way back from Module.compile()


def _reason(error: Exception) -> str:
    """The kind of an error and the first line it has to say."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
