"""What this machine is: its device, precision, memory and peak speed. All CUDA lines live here."""

import ctypes
import os
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import deterministic as uninitialized

from nanofit.machine.cards import peak_flops
from nanofit.machine.memory import CpuMemory, CudaMemory, DeviceMemory
from nanofit.terminal import InputError


@dataclass(frozen=True)
class Peek:
    """A number on its way from the device."""

    host: Tensor
    ready: Callable[[], bool]

    def value(self) -> float:
        """The number, once it is ready."""
        assert self.ready(), "to read it now would be to wait"
        return self.host.item()


@dataclass(frozen=True)
class Device:
    """Where the run computes and in which precision."""

    torch_device: torch.device
    name: str
    dtype: torch.dtype
    memory_bytes: int | None
    peak_flops: float | None
    note: str = ""  # what is not as it was asked for

    @property
    def type(self) -> str:
        return self.torch_device.type

    @property
    def memory_mib(self) -> int | None:
        """As the table of cards has it."""
        return self.memory_bytes and self.memory_bytes // 2**20

    @property
    def precision(self) -> str:
        """The dtype as the setting spells it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def driver(self) -> str:
        """The versions of CUDA and its driver; empty elsewhere."""
        if self.type != "cuda":
            return ""
        return f"CUDA {torch.version.cuda}, driver {_cuda_driver_version()}"

    @property
    def has_flash(self) -> bool:
        """Whether there is flash attention, which Ampere brought to CUDA."""
        return self.type != "cuda" or torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    @property
    def product_dtype(self) -> torch.dtype:
        """For products that bear rounding, as Muon's do: half precision where all can count on it.

        bfloat16 on CUDA since Ampere. Older cards only emulate it: float16, whose three more bits
        do no harm, while its smaller range does not matter to numbers that are at most about 1.
        CPUs differ: few multiply in bfloat16, and some announce it without granting it. So it is
        float32 on all of them, and the same run on each.
        """
        if self.type != "cuda":
            return torch.float32
        return torch.bfloat16 if self.has_flash else torch.float16  # Ampere brought both

    def autocast(self) -> AbstractContextManager:
        """Matrix products in `dtype`; with float32 nothing changes."""
        return torch.autocast(self.type, self.dtype, enabled=self.dtype != torch.float32)

    def grad_scaler(self, first_scale: float = 2.0**16) -> torch.amp.GradScaler:
        """float16 needs a loss scale; for other types this does nothing."""
        return torch.amp.GradScaler(self.type, first_scale, enabled=self.dtype == torch.float16)

    def seed(self, seed: int) -> None:
        """Let what is drawn here from now on follow from a seed.

        torch.manual_seed does that for every kind of device there is, and writes down the stack of
        calls for each that is not in use: some milliseconds.
        """
        torch.default_generator.manual_seed(seed)
        if self.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif self.type == "mps":
            torch.mps.manual_seed(seed)

    def enter_thread(self) -> None:
        """Make this device the current one of a thread, which begins on the first card.

        The first thread to do so gives the process its context on the card, some 0.4 GB.
        """
        if self.type == "cuda":
            torch.cuda.set_device(self.torch_device)

    def stage(self, tensor: Tensor) -> Tensor:
        """Make a tensor ready to be sent without waiting."""
        return tensor.pin_memory() if self.type == "cuda" else tensor

    def send(self, tensor: Tensor) -> Tensor:
        """Start moving a staged tensor to the device."""
        return tensor.to(self.torch_device, non_blocking=True)

    def peek(self, number: Tensor) -> "Peek":
        """Start reading a number, without waiting for what computes it."""
        if self.type == "cuda":
            host = torch.empty_like(number, device="cpu", pin_memory=True)
            host.copy_(number, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(self.torch_device))
            return Peek(host, copied.query)
        return Peek(number.clone(), lambda: self.type != "mps")  # to read from there is to wait

    def wait(self) -> None:
        """Go on when the device has done all that it was told."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def memory(self) -> DeviceMemory:
        """What this process uses of the device's memory from now on."""
        kinds = {"cuda": CudaMemory, "cpu": CpuMemory}
        return kinds.get(self.type, DeviceMemory)(self.torch_device)


def describe_device(
    name: str = "auto", dtype: str = "auto", *, local_rank: int = 0, deterministic: bool = False
) -> Device:
    """Choose and set up the device of this process.

    On CUDA kernels that add up in any order are used, unless `deterministic`; a CPU has none.
    """
    kind, _, index = (_best_kind() if name == "auto" else name).partition(":")
    if kind == "cuda":
        if deterministic:
            _choose_deterministic_kernels()
        return _set_up_cuda(int(index or local_rank), dtype)
    if kind == "mps":
        if not torch.backends.mps.is_available():
            raise InputError("device = 'mps' is not available here; use device = 'auto'")
        return Device(torch.device("mps"), "Apple GPU", _dtype(dtype, torch.float32), None, None)
    if kind != "cpu":
        raise InputError(f"device = {name!r} is none of auto, cpu, cuda and mps")
    _choose_deterministic_kernels()
    threads = torch.get_num_threads()
    name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    return Device(torch.device("cpu"), name, _dtype(dtype, torch.float32), None, None)


def _choose_deterministic_kernels() -> None:
    """Else compiled embedding gradients, for one, are sums by atomic adds, in any order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for it
    torch.use_deterministic_algorithms(True)
    uninitialized.fill_uninitialized_memory = False


def _best_kind() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    return default if name == "auto" else getattr(torch, name)


def _cuda_driver_version() -> int:
    """As in 13000 for CUDA 13.0; torch knows it, but does not tell."""
    library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _set_up_cuda(index: int, dtype: str) -> Device:
    if not torch.cuda.is_available():
        raise InputError("device = 'cuda', but torch sees no CUDA device; use device = 'auto'")
    if index >= torch.cuda.device_count():
        raise InputError(f"no device cuda:{index}: this machine has {torch.cuda.device_count()}")
    # Without it a tenth and more of the memory is lost to fragments. It must be set before use.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name, which it would override
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.set_float32_matmul_precision("high")  # TF32 where float32 remains
    # Hopper would prefer cuDNN's attention, of whose memory no forecast knows, to flash.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own page of text about a card it has no code for
        card = torch.cuda.get_device_properties(index)
    _check_supported(card.name, (card.major, card.minor))
    has_bfloat16 = card.major >= 8  # Ampere brought it
    chosen, note = _dtype(dtype, torch.bfloat16 if has_bfloat16 else torch.float16), ""
    if chosen == torch.bfloat16 and not has_bfloat16:
        chosen, note = torch.float16, f"{card.name} has no bfloat16: float16 is used instead"
    return Device(
        torch.device("cuda", index),
        card.name,
        chosen,
        card.total_memory,
        peak_flops(card.name, card.total_memory // 2**20),
        note,
    )


def _check_supported(card: str, capability: tuple[int, int]) -> None:
    """A kernel runs on cards of its own major version and no lower minor one."""
    built = re.findall(r"sm_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    major, minor = capability
    if any(major == int(has_major) and minor >= int(has_minor) for has_major, has_minor in built):
        return
    versions = ", ".join(".".join(version) for version in built)
    raise InputError(
        f"{card} has CUDA capability {major}.{minor}, but torch {torch.__version__} was built for "
        f"{versions}; install a torch built for another version of CUDA, or use --device=cpu"
    )
