"""How the passes of a step give gradients that are whole, whatever processes share its sequences.

One process has whole gradients anyway. Several have torch's DistributedDataParallel add them up, in
buckets, each of which is on its way as soon as the last pass has filled it.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nanofit.data.loader import MicroBatch
from nanofit.machine.device import Device
from nanofit.machine.dist import Ranks

Forward = Callable[[Tensor, Tensor], Tensor]
NEVER = 2**31 - 1


class Engine:
    """One process: the model as it is, the micro-batches as they come."""

    @contextmanager
    def passes(
        self, model: nn.Module, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[Forward, Iterable[MicroBatch]]]:
        """What to call with each micro-batch of a step, and they themselves.

        After the last one's backward pass gradients are sums over all processes.
        """
        yield model, micro_batches

    def forget(self) -> None:
        """Give back all memory, in all processes alike; the next step begins anew."""

    def hold(self, model: nn.Module, device: Device) -> None:
        """Put on the device what this process has of a model."""
        model.to(device.torch_device)

    def follow(self, optimizer: Optimizer) -> None:
        """Let it load what belongs to a whole model."""

    def whole(self, number: Tensor) -> Tensor:
        """A number of all gradients, of which this process may have a part."""
        return number

    def gathered(self, content: dict[str, Any]) -> dict[str, Any]:
        """Whole tensors for parts, for the main process; all must ask."""
        return content

    def evenly(self, micro_batches: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """As many for each process, if none can do a pass without the others."""
        return micro_batches


def engine_for(ranks: Ranks) -> Engine:
    return Engine() if ranks.world == 1 else Replicas(ranks)


class Replicas(Engine):
    """Several processes, each of which has the whole model.

    Gradients are views of the buckets all the time, which so take no memory of their own.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._replica: DistributedDataParallel | None = None
        self._gradients: list[Tensor] = []
        self._sums: list[dist.Work | None] = []  # of the buckets that are full
        self._is_last = self._is_summing = False  # the present pass
        self._is_in_order = False  # the buckets, by when they are full

    @contextmanager
    def passes(
        self, model: nn.Module, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[Forward, Iterable[MicroBatch]]]:
        self._is_last = self._is_summing = False
        self._sums.clear()
        self._put_gradients_into_buckets(model)
        try:
            yield self._forward, self._until_last(micro_batches)
        except Exception:
            if self._is_summing:
                self._complete_sums()
            raise

    def forget(self) -> None:
        if self._replica is not None:
            self._replica._remove_autograd_hooks()
        self._replica = None
        self._gradients.clear()
        self._sums.clear()

    def _put_gradients_into_buckets(self, model: nn.Module) -> None:
        """Gradients of zero, to which all passes add."""
        if self._replica is None:
            with self._gradients_as_views(model):
                self._replica = _replicated(model, self._sums)
            self._is_in_order = False
        elif not self._is_in_order:
            # Until now there was a single bucket. From the first step it is known what fills first.
            gc.collect()  # a sum that is done is a cycle, and holds on to its bucket
            with self._gradients_as_views(model):  # it asks the others first, and memory then
                self._replica.reducer._rebuild_buckets()
            self._is_in_order = True
        for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        torch._foreach_zero_(self._gradients)

    @contextmanager
    def _gradients_as_views(self, model: nn.Module) -> Iterator[None]:
        """What is a gradient while buckets are made becomes a view of them: zeros without memory.

        With none at all they would stay apart, and take as much memory again. So would old buckets.
        """
        self._gradients.clear()
        parameters = list(model.parameters())
        zero = torch.zeros((), device=parameters[0].device)
        for parameter in parameters:
            parameter.grad = zero.expand_as(parameter)
        yield
        self._gradients.extend(parameter.grad for parameter in parameters)

    def _until_last(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches, one held back, so that the last is known."""
        following = iter(micro_batches)
        batch = next(following)
        for after in following:
            yield batch
            batch = after
        self._is_last = True
        yield batch

    def _forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """The loss; that of the last pass if no process has failed, as they will now wait."""
        if not self._is_last:
            with self._replica.no_sync():
                return self._replica(idx, targets)
        with self._ranks.all_or_none():
            loss = self._replica(idx, targets)
        self._is_summing = True
        return loss

    def _complete_sums(self) -> None:
        """Give the others what they wait for: of a failed pass nothing is used, here or there."""
        known = self._replica._get_ddp_logging_data()
        sizes_bytes = known.get("rebuilt_bucket_sizes", known["bucket_sizes"]).split(", ")
        largest = max(self._gradients, key=lambda gradient: gradient.untyped_storage().nbytes())
        with self._ranks.together():
            if None in self._sums:
                raise RuntimeError("gradients could not be sent")
            for begun in self._sums:
                begun.wait()
            for size_bytes in sizes_bytes[len(self._sums) :]:
                length = int(size_bytes) // largest.itemsize
                dist.all_reduce(largest.as_strided((length,), (1,), 0))


def _replicated(model: nn.Module, sums: list[dist.Work | None]) -> DistributedDataParallel:
    replica = DistributedDataParallel(
        model, init_sync=False, forward_sync_buffers=False, gradient_as_bucket_view=True
    )
    replica._set_ddp_runtime_logging_sample_rate(NEVER)  # it would wait for the device
    replica.register_comm_hook(sums, _sum)
    return replica


def _sum(sums: list[dist.Work | None], bucket: dist.GradBucket) -> Future[Tensor]:
    """Begin to add up a full bucket. A mean, as is usual, would be wrong: losses are shares."""
    sums.append(None)  # if it fails now, nobody knows what has reached the others
    sums[-1] = dist.all_reduce(bucket.buffer(), async_op=True)
    return sums[-1].get_future().then(lambda done: done.value()[0])
