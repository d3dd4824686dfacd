"""Windows of tokens -> the loss of each token, in the largest micro-batches that fit."""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from model import GPT
from nanofit.machine.device import Device
from nanofit.memory.budget import usable_bytes
from nanofit.memory.need import evaluation_need
from nanofit.memory.setup import Setup
from nanofit.settings.config import RunConfig
from nanofit.terminal import Progress
from nanofit.use.shortage import if_it_fits

TOKENS_ON_CPU = 2**12  # at once: they keep its cores busy, and are little to hold
MOST_TOKENS = 2**16  # at once: no card gets faster by more
RESERVED = 1.1  # times what is allocated: what torch's allocator takes of a card for it


@dataclass(frozen=True)
class Windows:
    """Pieces of two rows of tokens: what a model sees, and what it is to say next at each place.

    A target below 0 does not count.
    """

    inputs: np.ndarray  # (N)
    targets: np.ndarray  # (N)
    starts: np.ndarray  # of each window
    lengths: np.ndarray

    @cached_property
    def offsets(self) -> np.ndarray:
        """Where each begins if they are put one after the other."""
        return np.cumsum(self.lengths) - self.lengths

    def places(self) -> np.ndarray:
        """Where in the rows the windows' tokens are, one window after the other."""
        return np.repeat(self.starts - self.offsets, self.lengths) + np.arange(self.lengths.sum())


@torch.inference_mode()
def losses_of(model: GPT, windows: Windows, device: Device, progress: Progress) -> np.ndarray:
    """The loss of each token of the windows, one window after the other; 0 of what does not count.

    Out of memory, it goes on in smaller micro-batches.
    """
    model.eval()
    losses = np.empty(windows.lengths.sum(), np.float32)
    waiting = np.argsort(-windows.lengths, kind="stable")  # of one length are computed together
    tokens_at_once = _tokens_at_once(model, device)
    while len(waiting):
        longest = windows.lengths[waiting[0]]
        chosen = waiting[: max(tokens_at_once // longest, 1)]
        attempt = partial(_predict, model, windows, chosen, device)
        found = if_it_fits(attempt, device, is_smallest=len(chosen) == 1)
        if found is None:
            fewer = len(chosen) // 2
            progress.line(f"out of memory with {len(chosen)} sequences at once; on with {fewer}")
            tokens_at_once = fewer * longest
            continue
        places, values = found
        losses[places] = values
        waiting = waiting[len(chosen) :]
        progress.update(progress.done + len(values))
    return losses


def _predict(
    model: GPT, windows: Windows, chosen: np.ndarray, device: Device
) -> tuple[np.ndarray, np.ndarray]:
    """The losses of some windows, and their places among those of all."""
    lengths = windows.lengths[chosen][:, None]  # (B, 1)
    columns = np.arange(lengths.max())  # (T)
    is_there = columns < lengths  # (B, T)
    places = np.where(is_there, windows.starts[chosen][:, None] + columns, 0)
    idx = windows.inputs[places].astype(np.int64)
    targets = np.where(is_there, windows.targets[places].astype(np.int64), -1)
    sent = [device.send(device.stage(torch.from_numpy(one))) for one in (idx, targets)]
    with device.autocast():
        losses = model.token_losses(*sent).cpu().numpy()
    return (windows.offsets[chosen][:, None] + columns)[is_there], losses[is_there]


def _tokens_at_once(model: GPT, device: Device) -> int:
    """As many as fit by arithmetic, where the device tells what is free."""
    memory = device.memory()
    free_bytes = memory.free_bytes()
    if free_bytes is None:
        return TOKENS_ON_CPU
    room_bytes = usable_bytes(free_bytes - memory.held_bytes(), RunConfig()) / RESERVED
    setup = Setup(model.config, dtype=device.precision, has_flash=device.has_flash)
    sequences = evaluation_need(setup).largest(room_bytes)
    return min(sequences * model.config.block_size, MOST_TOKENS)
