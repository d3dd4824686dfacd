"""An update that runs out of memory half-way, undone."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanofit.machine.memory import DeviceMemory, is_out_of_memory


class UpdateUndo:
    """Copies what an update is about to change, and keeps it until all processes have done theirs.

    The copies take the place of the activations, which are gone by then, so that the peak of a step
    stays as it is. Where that place is too small, or memory cannot run out, nothing is copied.
    """

    def __init__(self, optimizer: Optimizer, memory: DeviceMemory):
        self._optimizer, self._memory = optimizer, memory
        self._has_begun = False
        self._copies: list[tuple[Tensor, Tensor]] | None = None
        self._known: set[Tensor] = set()  # parameters that had moments
        self._options: list[dict[str, Any]] = []
        hook = optimizer.register_step_pre_hook(self._remember)
        # Before those of others, which may change what is to be remembered.
        optimizer._optimizer_step_pre_hooks.move_to_end(hook.id, last=False)

    @torch.no_grad()
    def undo(self) -> bool:
        """Put everything back as it was before the update; False if that is not possible."""
        if not self._has_begun:
            return True
        copies = self._copies
        self.forget()
        if copies is None:
            return False
        for tensor, copy in copies:
            tensor.copy_(copy)
        for parameter in set(self._optimizer.state) - self._known:
            del self._optimizer.state[parameter]
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)
            for new in group.keys() - options.keys() - {"params"}:
                del group[new]
        return True

    def forget(self) -> None:
        """The update is done."""
        self._has_begun, self._copies = False, None

    @torch.no_grad()
    def _remember(self, *_: Any) -> None:
        self._has_begun = True
        changed = self._changed() if self._memory.can_run_out() else []
        size_bytes = sum(tensor.nbytes for tensor in changed)
        size_bytes += getattr(self._optimizer, "workspace_bytes", 0)  # 32-bit AdamW needs none
        if not changed or size_bytes > self._memory.vacated_bytes():
            return
        try:
            self._copies = [(tensor, tensor.clone()) for tensor in changed]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        self._known = set(self._optimizer.state)
        self._options = [_without_parameters(group) for group in self._optimizer.param_groups]

    def _changed(self) -> list[Tensor]:
        groups, states = self._optimizer.param_groups, self._optimizer.state.values()
        values = [value for state in states for value in state.values()]
        moments = [part for value in values if isinstance(value, Tensor) for part in _parts(value)]
        parameters = [parameter for group in groups for parameter in group["params"]]
        return [part for parameter in parameters for part in _parts(parameter)] + moments


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors of one that consists of others, as 8-bit moments and shards do."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return [part for part in parts if isinstance(part, Tensor)]
