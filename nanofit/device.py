"""What this machine is: its device, precision, memory and peak speed. All CUDA lines live here."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import deterministic

from nanofit.terminal import InputError

# (tensor cores, boost clock in MHz) of cards that do 128 half-precision operations with fp32
# accumulation per core and clock: GeForce 30 and 40.
_GEFORCE = {
    "3060": (112, 1777),
    "3060 Ti": (152, 1665),
    "3070": (184, 1725),
    "3080": (272, 1710),
    "3090": (328, 1695),
    "4060": (96, 2460),
    "4060 Ti": (136, 2535),
    "4070": (184, 2475),
    "4070 SUPER": (224, 2475),
    "4070 Ti": (240, 2610),
    "4070 Ti SUPER": (264, 2610),
    "4080": (304, 2505),
    "4080 SUPER": (320, 2550),
    "4090": (512, 2520),
}


@dataclass(frozen=True)
class Device:
    """Where the run computes and in which precision."""

    torch_device: torch.device
    name: str
    dtype: torch.dtype
    memory_bytes: int | None
    peak_flops: float | None

    @property
    def type(self) -> str:
        return self.torch_device.type

    @property
    def precision(self) -> str:
        """The dtype as the setting spells it."""
        return str(self.dtype).removeprefix("torch.")

    def autocast(self) -> AbstractContextManager:
        """Matrix products in `dtype`; with float32 nothing changes."""
        return torch.autocast(self.type, self.dtype, enabled=self.dtype != torch.float32)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """float16 needs a loss scale; for other types this does nothing."""
        return torch.amp.GradScaler(self.type, enabled=self.dtype == torch.float16)

    def enter_thread(self) -> None:
        """Make this device the current one of a new thread, which begins on the first card."""
        if self.type == "cuda":
            torch.cuda.set_device(self.torch_device)

    def stage(self, tensor: Tensor) -> Tensor:
        """Make a tensor ready to be sent without waiting."""
        return tensor.pin_memory() if self.type == "cuda" else tensor

    def send(self, tensor: Tensor) -> Tensor:
        """Start moving a staged tensor to the device."""
        return tensor.to(self.torch_device, non_blocking=True)


def describe_device(name: str = "auto", dtype: str = "auto", *, local_rank: int = 0) -> Device:
    """Choose and set up the device of this process."""
    kind, _, index = (_best_kind() if name == "auto" else name).partition(":")
    if kind == "cuda":
        return _set_up_cuda(int(index or local_rank), dtype)
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise InputError("device = 'mps' is not available here; use device = 'auto'")
        return Device(torch.device("mps"), "Apple GPU", _dtype(dtype, torch.float32), None, None)
    if kind != "cpu":
        raise InputError(f"device = {name!r} is none of auto, cpu, cuda and mps")
    # Compiled embedding gradients use atomic adds, in any order, unless told otherwise.
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = False
    threads = f"CPU, {torch.get_num_threads()} threads"
    return Device(torch.device("cpu"), threads, _dtype(dtype, torch.float32), None, None)


def peak_flops(card: str) -> float | None:
    """Dense half-precision peak of a card by the name its driver reports; None if unknown."""
    model = card.removeprefix("NVIDIA ").removeprefix("GeForce RTX ")
    if model not in _GEFORCE:
        return None
    cores, clock_mhz = _GEFORCE[model]
    return cores * clock_mhz * 1e6 * 128


def _best_kind() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    return default if name == "auto" else getattr(torch, name)


def _set_up_cuda(index: int, dtype: str) -> Device:
    if not torch.cuda.is_available():
        raise InputError("device = 'cuda', but torch sees no CUDA device; use device = 'auto'")
    if index >= torch.cuda.device_count():
        raise InputError(f"no device cuda:{index}: this machine has {torch.cuda.device_count()}")
    torch.cuda.set_device(index)
    torch.set_float32_matmul_precision("high")  # TF32 where float32 remains
    card = torch.cuda.get_device_properties(index)
    native_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    best = torch.bfloat16 if native_bfloat16 else torch.float16
    return Device(
        torch.device("cuda", index),
        card.name,
        _dtype(dtype, best),
        card.total_memory,
        peak_flops(card.name),
    )
