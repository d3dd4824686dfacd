"""Bins -> the micro-batches of step s.

The training data are cut into blocks. An epoch is a permutation of them that depends on (seed,
epoch) alone, so sequence number n of a run is known by arithmetic: no state, no files, the same
on every machine, for any micro-batch and any number of processes.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanofit.data.tokens import Bins
from nanofit.machine.device import Device
from nanofit.machine.dist import Ranks
from nanofit.terminal import InputError


class MicroBatch(NamedTuple):
    idx: Tensor  # (B, T)
    targets: Tensor  # (B, T), -1 in rows that only fill up the batch
    share: float  # of all sequences of the step, over all processes


def random_micro_batches(
    size: int, *, block_size: int, vocab_size: int, device: Device, passes: int = 2
) -> Iterator[MicroBatch]:
    """Such as a step gets, where only time and memory count."""
    for _ in range(passes):
        tokens = torch.randint(vocab_size, (size, block_size + 1))
        sent = device.send(device.stage(tokens))
        yield MicroBatch(sent[:, :-1].clamp(min=0), sent[:, 1:], 1 / passes)


class _Sequences:
    """Numbered sequences of a split, given out in micro-batches that are read ahead."""

    def __init__(self, bins: Bins, block_size: int, vocab_size: int, device: Device):
        self.bins, self.block_size = bins, block_size
        self.vocab_size, self.device = vocab_size, device
        self.blocks = _blocks(len(bins), block_size)
        self._reader = ThreadPoolExecutor(1, initializer=device.enter_thread)
        self._ahead: dict[tuple, Future] = {}

    def start_of(self, sequence: int) -> int:
        """Where in the bins a sequence begins."""
        raise NotImplementedError

    def _give_out(self, pieces: list[range], size: int, total: int) -> Iterator[MicroBatch]:
        """The pieces as micro-batches of `size` rows, but the last, which is only read ahead."""
        for piece, following in pairwise(pieces):
            future = self._ahead.pop((piece, size), None) or self._submit(piece, size)
            self._ahead = {(following, size): self._submit(following, size)}
            tokens = self.device.send(future.result())  # (B, T + 1)
            yield MicroBatch(tokens[:, :-1].clamp(min=0), tokens[:, 1:], len(piece) / total)

    def _submit(self, piece: range, size: int) -> Future:
        return self._reader.submit(self._read, piece, size)

    def _read(self, piece: range, size: int) -> Tensor:
        rows = np.full((size, self.block_size + 1), -1, dtype=np.int64)
        for row, sequence in zip(rows, piece, strict=False):
            row[:] = self.bins.read(self.start_of(sequence), self.block_size + 1)
        if rows.max() >= self.vocab_size:
            raise InputError(
                f"{self.bins.files[0]} holds token {rows.max()}, but vocab_size is "
                f"{self.vocab_size}; is it a uint16 bin of this tokenizer?"
            )
        return self.device.stage(torch.from_numpy(rows))


class TrainSequences(_Sequences):
    """Step s owns sequences [s·S, (s+1)·S), S per step; ranks and micro-batches only cut them."""

    def __init__(self, *args, sequences_per_step: int, seed: int):
        super().__init__(*args)
        self.sequences_per_step, self.seed = sequences_per_step, seed
        # Borders move by less than a block from epoch to epoch, so one block must be left over.
        self.blocks_per_epoch = max(self.blocks - 1, 1)

    def start_of(self, sequence: int) -> int:
        epoch, number = divmod(sequence, self.blocks_per_epoch)
        slack = len(self.bins) - 1 - self.blocks_per_epoch * self.block_size
        offset = mix(self.seed, epoch) % min(slack + 1, self.block_size)
        return (
            offset + permuted(number, self.blocks_per_epoch, (self.seed, epoch)) * self.block_size
        )

    def micro_batches(self, step: int, micro_batch_size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """This process's part of a step."""
        pieces = self._pieces(step, micro_batch_size, ranks)
        pieces.append(self._pieces(step + 1, micro_batch_size, ranks)[0])
        return self._give_out(pieces, micro_batch_size, self.sequences_per_step)

    def _pieces(self, step: int, micro_batch_size: int, ranks: Ranks) -> list[range]:
        share = self.sequences_per_step // ranks.world
        first = step * self.sequences_per_step + ranks.rank * share
        return _cut(range(first, first + share), micro_batch_size)


class ValSequences(_Sequences):
    """The same windows every time, spread evenly over the validation data."""

    def __init__(self, *args, sequences: int):
        super().__init__(*args)
        self._starts = val_starts(len(self.bins), self.block_size, sequences)
        self.sequences = len(self._starts)

    def start_of(self, sequence: int) -> int:
        return self._starts[sequence]

    def micro_batches(self, micro_batch_size: int, ranks: Ranks) -> Iterator[MicroBatch]:
        """This process's part of an evaluation."""
        first, last = (self.sequences * r // ranks.world for r in (ranks.rank, ranks.rank + 1))
        pieces = _cut(range(first, last), micro_batch_size)
        pieces += pieces[:1]
        return self._give_out(pieces, micro_batch_size, self.sequences)


def val_starts(tokens: int, block_size: int, sequences: int) -> list[int]:
    """Where the windows begin on which a run validates, of so many tokens."""
    blocks = _blocks(tokens, block_size)
    sequences = min(sequences, blocks)
    return [number * blocks // sequences * block_size for number in range(sequences)]


def _blocks(tokens: int, block_size: int) -> int:
    return (tokens - 1) // block_size  # the last token is only a target


def _cut(sequences: range, size: int) -> list[range]:
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def mix(*numbers: int) -> int:
    """A well-mixed 64-bit number from a few integers (splitmix64's finaliser)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def permuted(number: int, size: int, key: tuple[int, ...]) -> int:
    """Where `number` goes under a pseudo-random permutation of range(size).

    A Feistel network over the next even power of two, walked until it lands inside: any position
    of any epoch in constant memory, and numpy's generators, which may change, are not involved.
    """
    half = max((size - 1).bit_length() + 1 >> 1, 1)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for round_number in range(6):
            left, right = right, left ^ mix(*key, round_number, right) & mask
        number = left << half | right
        if number < size:
            return number
