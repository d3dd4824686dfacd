"""AdamW with 8-bit moments by torchao, and moments in a checkpoint, whatever their bits.

A checkpoint holds 8-bit moments as plain tensors. So it can be read without torchao, and a run can
be continued with moments of either kind.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanofit.terminal import InputError

_MOMENTS = ("exp_avg", "exp_avg_sq")
_VALUES_PER_SCALE = 256
_FEWEST_VALUES = 4096  # torchao keeps smaller tensors in 32 bits


def adamw_8bit(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """AdamW with a byte for each moment and a scale for each 256 of them.

    torchao compiles its step; fake tensors need `torch.compiler.set_stance("force_eager")`.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it misses kernels of no use here
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        from torchao.optim import AdamW8bit
    except ImportError:
        raise InputError(
            "8-bit AdamW needs torchao: pip install 'torchao>=0.18,<0.19', or use 32 bits"
        ) from None
    with unset_fake_temporarily():  # its tables, made at their first use, are numbers
        for is_signed in (True, False):
            _zeros_8bit((_VALUES_PER_SCALE,), is_signed)
    optimizer = AdamW8bit(groups, block_size=_VALUES_PER_SCALE, **settings)
    optimizer._subclass_zeros = lambda p, is_signed, _: _zeros_8bit(p.shape, is_signed, p.device)
    optimizer.register_step_pre_hook(_lr_as_tensor)
    # One parameter's moments at a time are in 32 bits.
    numbers = (p.numel() for group in optimizer.param_groups for p in group["params"])
    optimizer.workspace_bytes = 2 * 4 * max(numbers, default=0)
    return optimizer


def adamw_32bit(groups: list[dict[str, Any]], **settings: Any) -> Optimizer:
    """torch's fused AdamW."""
    optimizer = torch.optim.AdamW(groups, fused=True, **settings)
    # No step is captured in a graph. To ask costs a context, some 0.4 GB, on the first card there
    # is, be it the run's or not.
    optimizer._accelerator_graph_capture_health_check = lambda: None
    return optimizer


def convert_moments(optimizer: Optimizer, bits: Literal[8, 32]) -> None:
    """Let its checkpoints hold plain tensors, and those of either kind be loaded."""
    if bits == 8:
        optimizer.register_state_dict_post_hook(_save_as_plain_tensors)
        optimizer.register_load_state_dict_pre_hook(_load_as_8bit)
    else:
        optimizer.register_load_state_dict_pre_hook(_load_as_32bit)


def _lr_as_tensor(optimizer: Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"])


def _save_as_plain_tensors(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    def plain(_: str, moment: Tensor) -> Tensor | dict[str, Tensor]:
        if not hasattr(moment, "codes"):
            return moment
        return {"codes": moment.codes, "scale": moment.scale, "qmap": moment.qmap}

    return {**content, "state": _convert(content["state"], plain)}


def _load_as_8bit(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    from torchao.optim.subclass_8bit import OptimState8bit

    def quantized(name: str, moment: Tensor | dict[str, Tensor]) -> Tensor:
        is_signed = name == "exp_avg"
        if isinstance(moment, dict):
            return OptimState8bit(**moment, signed=is_signed, dtype=torch.float32)
        if (
            name not in _MOMENTS
            or moment.numel() < _FEWEST_VALUES
            or moment.numel() % _VALUES_PER_SCALE
        ):
            return moment
        return _zeros_8bit(moment.shape, is_signed).copy_(moment)

    return _loaded(optimizer, content, quantized)


def _load_as_32bit(optimizer: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
    def dense(_: str, moment: Tensor | dict[str, Tensor]) -> Tensor:
        if not isinstance(moment, dict):
            return moment
        codes, scale = moment["codes"], moment["scale"]
        values = moment["qmap"][codes.int()].view(len(scale), -1) * scale[:, None]
        return values.view(codes.shape)

    return _loaded(optimizer, content, dense)


def _loaded(optimizer: Optimizer, content: dict[str, Any], convert: Callable) -> dict[str, Any]:
    """A checkpoint's content with moments, and all the settings, as this optimiser has them."""
    groups = zip(optimizer.param_groups, content["param_groups"], strict=True)
    return {
        "state": _convert(content["state"], convert),
        "param_groups": [{**now, **then} for now, then in groups],
    }


def _convert(state: dict[int, dict[str, Any]], convert: Callable) -> dict[int, dict[str, Any]]:
    return {
        number: {name: convert(name, moment) for name, moment in moments.items()}
        for number, moments in state.items()
    }


def _zeros_8bit(
    shape: tuple[int, ...], is_signed: bool, device: torch.device | None = None
) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    zeros = OptimState8bit.zeros(shape, is_signed, _VALUES_PER_SCALE, device, torch.float32)
    if not is_signed:
        # A square that is rounded to 0, when the mean it divides is not, makes an update of
        # mean / eps. As small as eps is beside Muon, that is millions.
        zeros.qmap[0] = zeros.qmap[1] / 2
    return zeros
