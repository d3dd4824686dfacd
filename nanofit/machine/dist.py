"""The processes of a run: a world of one by default, several under torchrun."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from nanofit.terminal import InputError, discard_output, folded


class OtherProcessFailed(InputError):
    """This process could have gone on, but another could not."""

    is_known_elsewhere = True


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run. In a world of one every method is an identity."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line, once for all processes; nobody may be reading any more."""
        if self.is_main:
            try:
                print(folded(text), flush=True)
            except BrokenPipeError:
                discard_output()

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Add up each tensor over all processes, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def share_(self, tensor: Tensor, owner: int) -> None:
        """Give all processes what one of them has, in place."""
        if self.world > 1:
            dist.broadcast(tensor, owner)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. Never touches the device."""
        if self.world == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(flags)
        return bool(flags)

    def agree(self, number: int) -> bool:
        """Whether the number is the same in all processes."""
        if self.world == 1:
            return True
        ends = torch.tensor([number, -number])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        return ends.sum().item() == 0

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers."""
        if self.world == 1:
            return number
        numbers = torch.tensor([number])
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return numbers.item()

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Work that counts only if all processes do theirs: who fails, fails all.

        Otherwise they would wait for ever for the one that failed. It may be nested: of a failure
        all learn once, where each of them next agrees with the others, and leave the outer ones
        without another word.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        if failure is not None and getattr(failure, "is_agreed", False):
            raise failure
        if self.any(failure is not None):
            failure = failure or OtherProcessFailed("it failed in another process")
            failure.is_agreed = True
            raise failure

    def wait(self) -> None:
        """Go on when all processes have come this far."""
        self.any(False)


@contextmanager
def start_ranks(backend: str = "auto") -> Iterator[Ranks]:
    """Join the processes that torchrun started, if it did."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    # Flags travel as CPU tensors, over gloo, so that asking never waits for the device.
    dist.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else backend)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]))
    finally:
        dist.destroy_process_group()
