"""A simulated model as one of several processes has it: replicated or sharded, by torch's own code.

The other processes are a group that torch pretends to have: who sends gets no answer, nor waits.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from model import GPT
from nanofit.memory.setup import Setup
from nanofit.memory.trace import MemoryTrace


@contextmanager
def pretended_processes(world: int) -> Iterator[DeviceMesh]:
    """A mesh of so many processes, of which this is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with warnings.catch_warnings():  # of what would be wrong to do with a layer's result
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            yield DeviceMesh("cpu", list(range(world)))
    finally:
        dist.destroy_process_group()


def shard_(model: GPT, setup: Setup, mesh: DeviceMesh) -> None:
    """Cut attention and MLP of each block, gathered in half precision, and all else, in float32."""
    dtype = None if setup.dtype == "float32" else getattr(torch, setup.dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in model.transformer.h:
        fully_shard([block.attn, block.mlp], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


@contextmanager
def followed_resizing(trace: MemoryTrace) -> Iterator[None]:
    """Have the trace know of storages that grow and shrink in place, which no op does."""
    own = {name: getattr(_fsdp_param, name) for name in ("alloc_storage", "free_storage")}

    def grow(tensor: Tensor) -> None:
        if tensor.untyped_storage().size() == 0:
            own["alloc_storage"](tensor)
            trace.resized(tensor, "gathered weights")

    def shrink(tensor: Tensor) -> None:
        if tensor.untyped_storage().size() > 0:
            own["free_storage"](tensor)
            trace.resized(tensor, "gathered weights")

    _fsdp_param.alloc_storage, _fsdp_param.free_storage = grow, shrink
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(_fsdp_param, name, function)


def know_shapes(model: GPT, optimizer_of: Callable[[GPT], Optimizer]) -> None:
    """Torch finds out once what an op makes of sharded tensors: by tensors as large as all parts.

    Those have no content, and no memory on a card.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer_of(model).step()
    model.zero_grad()


def put_gradients_into_buckets(model: GPT, optimizer: Optimizer, trace: MemoryTrace) -> None:
    """As DistributedDataParallel has them: views of buffers that stay, to which passes add."""
    with trace.making("gradients"):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda **_: zero_grad(set_to_none=False)
