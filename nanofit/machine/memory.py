"""What a device tells of its memory, how it is bounded, and how errors say that it ran out."""

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import torch

from nanofit.terminal import InputError


class DeviceMemory:
    """The memory of a device that tells nothing about it, and does as it likes."""

    def __init__(self, torch_device: torch.device):
        self._device = torch_device

    def limit(self, limit_bytes: int) -> None:
        """Let allocations beyond a limit fail."""
        raise InputError(f"memory_limit is not possible on {self._device.type}; leave it out")

    def return_freed(self) -> None:
        """Give back what is freed, from now on, so that it does not count as used."""

    def used_bytes(self) -> int:
        """In the units of the limit: what is used when no tensor is there yet."""
        return 0

    def peak_bytes(self) -> int:
        """The most that was used."""
        return 0

    def can_run_out(self) -> bool:
        """Whether an allocation may fail, rather than the whole process be killed."""
        return False

    def peak_allocated_bytes(self) -> int:
        """The most that tensors took of it."""
        return self.peak_bytes()

    def held_bytes(self) -> int:
        """What tensors and libraries take of it now."""
        return 0

    def forget_peak(self) -> None:
        """Count peaks from now on."""

    def vacated_bytes(self) -> int:
        """What could be allocated now without a higher peak."""
        return 0

    def spilled_bytes(self) -> int:
        """What lies in the host's memory instead, where a driver does that without a word."""
        return 0

    def on_card_bytes(self) -> int | None:
        """What all programs use, asked without using any; None if nobody tells."""
        return None

    def free_bytes(self) -> int | None:
        """What this process could still use, with other programs as they are now."""
        return None

    def retries(self) -> int:
        """How often memory had to be given back before an allocation succeeded."""
        return 0

    def release(self) -> None:
        """Give back what is kept for later allocations."""


class CudaMemory(DeviceMemory):
    """What torch reserves on a card. The context, another 0.4 GB, is not part of it."""

    def limit(self, limit_bytes: int) -> None:
        total = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit_bytes / total, 1.0), self._device)

    def used_bytes(self) -> int:
        self.release()
        return torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def can_run_out(self) -> bool:
        return True

    def peak_allocated_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def held_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def vacated_bytes(self) -> int:
        return self.peak_allocated_bytes() - torch.cuda.memory_allocated(self._device)

    def spilled_bytes(self) -> int:
        on_card_bytes = self.on_card_bytes()
        if on_card_bytes is None:
            return 0
        return max(torch.cuda.memory_reserved(self._device) - on_card_bytes, 0)

    def on_card_bytes(self) -> int | None:
        try:
            return torch.cuda.device_memory_used(self._device)
        except Exception:  # the driver has no such figure, or nvidia-ml-py is missing
            return None

    def free_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        allowed = torch.cuda.get_per_process_memory_fraction(self._device) * total
        return min(free + torch.cuda.memory_reserved(self._device), int(allowed))

    def retries(self) -> int:
        return torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)

    def release(self) -> None:
        torch.cuda.empty_cache()


_M_MMAP_THRESHOLD = -3  # of malloc.h


class CpuMemory(DeviceMemory):
    """The data of this process, as Linux counts and limits them."""

    def __init__(self, torch_device: torch.device):
        super().__init__(torch_device)
        self._data_bytes = _own("VmData")

    def limit(self, limit_bytes: int) -> None:
        if not self._data_bytes:
            raise InputError("memory_limit on a CPU needs Linux; leave it out")
        import resource  # only Linux has it

        self.return_freed()
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard != resource.RLIM_INFINITY and limit_bytes > hard:
            raise InputError(f"memory_limit is {limit_bytes}, but `ulimit -Hd` allows {hard} bytes")
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))

    def return_freed(self) -> None:
        # Left alone, glibc keeps most of what is freed, in fragments.
        with suppress(AttributeError, OSError):  # not every C library has it
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)

    def can_run_out(self) -> bool:
        if not self._data_bytes:
            return False
        import resource

        return resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY

    def used_bytes(self) -> int:
        return self._data_bytes

    def peak_bytes(self) -> int:
        # Linux keeps the peak of what is resident, files included. Limited is also what was
        # allocated and never touched.
        untouched_bytes = _own("VmData") - _own("RssAnon")
        return untouched_bytes + _own("VmHWM") - _own("RssFile")

    def forget_peak(self) -> None:
        with suppress(OSError):  # not every sandbox lets a process do that
            Path("/proc/self/clear_refs").write_text("5")

    def vacated_bytes(self) -> int:
        return _own("VmHWM") - _own("VmRSS")


def _own(field: str) -> int:
    """A size of this process as Linux tells it, in bytes; 0 elsewhere."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{field}:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def available_bytes() -> int | None:
    """What the host could give to anybody without swapping; None where it does not tell."""
    try:
        told = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s*(\d+) kB", told)
    return int(found[1]) * 1024 if found else None


_OUT_OF_MEMORY_SIGNS = (
    "out of memory",
    "allocate memory",  # torch's CPU allocator
    "alloc_failed",  # cuBLAS
    "cublascreate",  # which says only that it is not initialised
    "bad_alloc",
    "could not create a primitive",  # oneDNN, which does not say why
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; libraries say it in many ways."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY_SIGNS)
