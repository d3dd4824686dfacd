"""Steps of real processes, each of which tells how much memory they take: as the C library knows.

Run by `processes.run_ranks`: `living.py FOLDER ARCH`.
"""

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from nanofit.machine.dist import Ranks, start_ranks
from nanofit.memory.setup import Setup
from nanofit.memory.simulate import micro_batches_of, model_of, optimizer_of
from nanofit.memory.spread import shard_
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import run_script

SIZES = dict(n_layer=3, n_head=3, n_embd=252, block_size=8, vocab_size=510)  # 4 do not divide all
STEPS = 4  # gloo lets a buffer go when it likes: only some begin without one


class _Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks "
        "keepcost".split()
    ]


def setup_of(arch: str, world: int, way: str) -> Setup:
    shape = GPTConfig(**SIZES, arch=arch)
    return Setup(shape, dtype="float32", world=world, shard=way == "sharded")


class Living(TorchDispatchMode):
    """The most that is allocated after any operation but the collectives, of which gloo has copies.

    These it lets go when it likes, so that what there is right after them is not always the same.
    """

    def __init__(self):
        super().__init__()
        self._library = ctypes.CDLL("libc.so.6")
        self._library.mallinfo2.restype = _Info
        self.most = 0

    def now(self) -> int:
        info = self._library.mallinfo2()
        return info.uordblks + info.hblkhd

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.namespace != "c10d":
            self.most = max(self.most, self.now())
        return result


def replicated(model: nn.Module, _: Ranks) -> nn.Module:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: nn.Module, ranks: Ranks) -> nn.Module:
    setup = setup_of(model.config.arch, ranks.world, "sharded")
    shard_(model, setup, init_device_mesh("cpu", (ranks.world,)))
    return model


def peak_bytes(arch: str, ranks: Ranks, spread: Callable[..., nn.Module]) -> int:
    """The most that tensors take in a step."""
    living, setup = Living(), setup_of(arch, ranks.world, spread.__name__)
    model = model_of(setup)
    forward, optimizer = spread(model, ranks), optimizer_of(setup, model)
    before = []
    for step in range(1 + STEPS):
        before.append(living.now())
        with living:
            for batch in micro_batches_of(setup, 1):
                forward(batch.idx, batch.targets).backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=setup.shard)
        if step == 0:  # the moments came with it
            before.clear()
            living.most = 0
    return living.most - min(before) + held_bytes(model, optimizer)


def held_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    """Between two steps."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    tensors = [getattr(t, "_local_tensor", t) for t in (*model.parameters(), *states, *gradients)]
    storages = [tensor.untyped_storage() for tensor in (*tensors, *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main(argv: list[str]) -> None:
    folder, arch = argv
    with start_ranks("gloo") as ranks:
        told = {way.__name__: peak_bytes(arch, ranks, way) for way in (replicated, sharded)}
        Path(folder, f"{ranks.rank}.json").write_text(json.dumps(told))
        ranks.wait()


if __name__ == "__main__":
    run_script(main)
