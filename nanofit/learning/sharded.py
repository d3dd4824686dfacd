"""A model in parts: each process holds its share of weights, gradients and moments (torch's FSDP2).

A block's weights are gathered when its turn comes, and are let go of after it. What every process
needs all the time, norms and embeddings, stays gathered from a forward pass to its backward pass.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from nanofit.data.loader import MicroBatch
from nanofit.learning.engine import Engine
from nanofit.machine.device import Device
from nanofit.machine.dist import Ranks


class Shards(Engine):
    """Every pass adds its gradients to the parts, so that no process ever has all of them."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def hold(self, model: nn.Module, device: Device) -> None:
        self._idle = torch.zeros(1, 1, dtype=torch.int64, device=device.torch_device)
        mesh, precision = init_device_mesh(device.type, (self._ranks.world,)), _precision(device)
        for block in model.transformer.h:
            # Matrices travel in the precision in which they are used. Norms are not among them.
            fully_shard([block.attn, block.mlp], mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # a mean would be wrong: losses are shares
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.register_load_state_dict_pre_hook(_cut_weights)

    def follow(self, optimizer: Optimizer) -> None:
        optimizer.register_load_state_dict_pre_hook(_cut_moments)

    def whole(self, number: Tensor) -> Tensor:
        return number.full_tensor() if isinstance(number, DTensor) else number

    def gathered(self, content: dict[str, Any]) -> dict[str, Any]:
        known: dict[int, Tensor | None] = {}  # what is one tensor stays one

        def gather(leaf: Any) -> Any:
            if not isinstance(leaf, DTensor):
                return leaf
            place = leaf.to_local().untyped_storage()._cdata
            if place not in known:
                tensor = leaf.full_tensor()
                known[place] = tensor.cpu() if self._ranks.is_main else None
            return known[place]

        with self._ranks.all_or_none():
            return tree_map(gather, content)

    def evenly(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        mine = iter(micro_batches)
        batch = next(mine, None)
        while self._ranks.any(batch is not None):
            yield batch or MicroBatch(self._idle, self._idle, 0.0)
            batch = next(mine, None)


def _precision(device: Device) -> MixedPrecisionPolicy:
    """That of the products; sums of gradients are in 32 bits, and so is what norms see."""
    half = None if device.dtype == torch.float32 else device.dtype
    return MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def _cut_weights(model: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    held = model.state_dict()
    for name, value in weights.items():
        if name in held:
            weights[name] = _cut(value, held[name])


def _cut_moments(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        number: {name: _cut(value, parameters[number]) for name, value in moments.items()}
        for number, moments in content["state"].items()
    }
    return {**content, "state": state}


def _cut(value: Any, like: Tensor) -> Any:
    """This process's part of a whole tensor, if it is one of that shape."""
    is_whole = isinstance(value, Tensor) and value.shape == like.shape
    if not (is_whole and isinstance(like, DTensor)):
        return value
    mesh: DeviceMesh = like.device_mesh
    return distribute_tensor(value, mesh, like.placements, src_data_rank=None)
