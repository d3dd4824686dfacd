"""The processes of a run: a world of one by default, several under torchrun."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from nanofit.machine.memory import is_out_of_memory
from nanofit.terminal import (
    InputError,
    discard_output,
    first_line,
    folded,
    is_disk_full,
    say_error,
)


class OtherProcessFailed(InputError):
    """This process could have gone on, but another could not."""

    is_known_elsewhere = True


class ProcessLost(InputError):
    """Another process has died or hangs: this one cannot go on, nor ask the others."""

    is_agreed = True  # as far as that is possible
    is_told = True
    is_known_elsewhere = True  # if the other one failed, it may say why


class PartMissing(InputError):
    """This process has failed, and what it holds a part of can do nothing without it."""

    is_agreed = True  # as nobody can be asked


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run. In a world of one every method is an identity."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    store: "dist.Store | None" = None  # which torchrun keeps, whatever becomes of the processes
    holds_part: bool = False  # of the model: all wait for each other within every pass

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print a line, once for all processes; nobody may be reading any more."""
        if self.is_main:
            try:
                print(folded(text), flush=True)
            except OSError as error:
                if not is_disk_full(error):  # but a pipe without a reader, a terminal that is gone
                    discard_output()

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Add up each tensor over all processes, in place."""
        if self.world > 1:
            with self.together():
                for tensor in tensors:
                    dist.all_reduce(tensor)

    def share_(self, tensor: Tensor, owner: int) -> None:
        """Give all processes what one of them has, in place."""
        if self.world > 1:
            with self.together():
                dist.broadcast(tensor, owner)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. Never touches the device."""
        if self.world == 1:
            return flag
        flags = torch.tensor([flag], dtype=torch.int32)
        with self.together():
            dist.all_reduce(flags)
        return bool(flags)

    def agree(self, number: int) -> bool:
        """Whether the number is the same in all processes."""
        if self.world == 1:
            return True
        ends = torch.tensor([number, -number])
        with self.together():
            dist.all_reduce(ends, dist.ReduceOp.MAX)
        return ends.sum().item() == 0

    def least(self, number: int) -> int:
        """The smallest of the processes' numbers."""
        if self.world == 1:
            return number
        numbers = torch.tensor([number])
        with self.together():
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
        if self.holds_part:
            self._end_all_on(failure)
            return
        if failure is not None and getattr(failure, "is_agreed", False):
            raise failure
        if self.any(failure is not None):
            failure = failure or OtherProcessFailed("it failed in another process")
            failure.is_agreed = True
            raise failure

    def wait(self) -> None:
        """Go on when all processes have come this far."""
        self.any(False)

    def _end_all_on(self, failure: Exception | None) -> None:
        """The others wait in the middle of a pass, where no question reaches them."""
        if failure is None:
            return
        if _is_of_the_connection(failure):
            raise self._lost(failure) from failure
        if not is_out_of_memory(failure):
            raise failure
        self._is_first_to_tell()  # so that they need not say that this one has died
        raise PartMissing(
            f"out of memory ({first_line(failure)}), and no process can go on without this one's "
            "part of the model; with half the batch_size and twice the "
            "gradient_accumulation_steps, or with --recompute=block, the run goes on from its "
            "newest checkpoint"
        ) from failure

    @contextmanager
    def together(self) -> Iterator[None]:
        """ProcessLost if the processes do not come together; one of them says so at once.

        torchrun ends them all as soon as it sees that one is dead, and whoever wants to say more
        than that has little time. Nor is a failure of this process's own a thing to try again: the
        others have got no answer, and would take its next one for it.
        """
        try:
            yield
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ProcessLost:
        lost = ProcessLost(
            f"another process of this run has died or hangs ({_reason(error)}); start it "
            "again, and it goes on from its newest checkpoint"
        )
        if self._is_first_to_tell():
            say_error(lost)
        return lost

    def _is_first_to_tell(self) -> bool:
        try:
            return self.store is None or self.store.add("lost", 1) == 1
        except RuntimeError:  # torchrun has died as well
            return True


@contextmanager
def start_ranks(backend: str = "auto", *, timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """Join the processes that torchrun started, if it did; none waits longer for another."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield Ranks()
        return
    if backend == "auto":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    # Flags travel as CPU tensors, over gloo, so that asking never waits for the device.
    backend = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    except (ValueError, RuntimeError) as error:
        raise InputError(
            f"the processes cannot meet ({first_line(error)}); start them by torchrun"
        ) from error
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # Before a restart on one machine torchrun keeps its store: with addresses of the dead.
        store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    ranks = Ranks(rank, world, int(os.environ.get("LOCAL_RANK", rank)), store)
    with ranks.together():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _is_of_the_connection(error: Exception) -> bool:
    """Whether it was not this process that failed; gloo has no class of errors."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _reason(error: Exception) -> str:
    """What a library says, without its source file before that and its advice behind."""
    return re.sub(r"^\[\S+\] |\. This is typically.*", "", first_line(error))
