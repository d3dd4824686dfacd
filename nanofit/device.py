"""What this machine is: its device, precision, memory and peak speed. All CUDA lines live here."""

import difflib
import os
import re
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import deterministic

from nanofit.terminal import InputError


class Card(NamedTuple):
    """What a maker publishes about a card."""

    name: str  # as its driver reports it, without "NVIDIA"
    tensor_cores: int
    boost_mhz: int
    core_flops: int  # half precision with fp32 accumulation, per core and clock, dense
    memory_mib: int  # as the driver reports it where that is known, else the nominal size
    bandwidth_gb_s: int  # of its memory, in 10^9 bytes
    watts: int
    architecture: str

    @property
    def peak_flops(self) -> float:
        return self.tensor_cores * self.boost_mhz * 1e6 * self.core_flops

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * 1e9

    @property
    def has_bfloat16(self) -> bool:
        return self.architecture not in ("Volta", "Turing")

    @property
    def capability(self) -> tuple[int, int]:
        """What CUDA calls the features of its chip."""
        if self.architecture == "Ampere" and self.core_flops == 512:  # the A100's chip
            return 8, 0
        return _CAPABILITIES[self.architecture]


_CAPABILITIES = {
    "Volta": (7, 0),
    "Turing": (7, 5),
    "Ampere": (8, 6),
    "Ada": (8, 9),
    "Hopper": (9, 0),
    "Blackwell": (12, 0),
}


# NVIDIA's whitepapers and data sheets. Reference clocks: a factory-overclocked card runs a little
# faster. GeForce accumulates in fp32 at half the rate of the professional card with the same chip.
# Laptop clocks and watts are the highest allowed; most laptops stay below. A name that ends in a
# size tells cards apart whose drivers report the same name.
# fmt: off
CARDS = tuple(Card(*row) for row in (
    ("GeForce RTX 2060",                240, 1680,   64,   6144,  336,  160, "Turing"),
    ("GeForce RTX 2060 12GB",           272, 1650,   64,  12288,  336,  185, "Turing"),
    ("GeForce RTX 2060 SUPER",          272, 1650,   64,   8192,  448,  175, "Turing"),
    ("GeForce RTX 2070",                288, 1620,   64,   8192,  448,  175, "Turing"),
    ("GeForce RTX 2070 SUPER",          320, 1770,   64,   8192,  448,  215, "Turing"),
    ("GeForce RTX 2080",                368, 1710,   64,   8192,  448,  215, "Turing"),
    ("GeForce RTX 2080 SUPER",          384, 1815,   64,   8192,  496,  250, "Turing"),
    ("GeForce RTX 2080 Ti",             544, 1545,   64,  11264,  616,  250, "Turing"),
    ("GeForce RTX 3050",                 80, 1777,  128,   8192,  224,  130, "Ampere"),
    ("GeForce RTX 3050 6GB",             72, 1470,  128,   6144,  168,   70, "Ampere"),
    ("GeForce RTX 3060",                112, 1777,  128,  12288,  360,  170, "Ampere"),
    ("GeForce RTX 3060 8GB",            112, 1777,  128,   8192,  240,  170, "Ampere"),
    ("GeForce RTX 3060 Ti",             152, 1665,  128,   8192,  448,  200, "Ampere"),
    ("GeForce RTX 3070",                184, 1725,  128,   8192,  448,  220, "Ampere"),
    ("GeForce RTX 3070 Ti",             192, 1770,  128,   8192,  608,  290, "Ampere"),
    ("GeForce RTX 3080",                272, 1710,  128,  10240,  760,  320, "Ampere"),
    ("GeForce RTX 3080 12GB",           280, 1710,  128,  12288,  912,  350, "Ampere"),
    ("GeForce RTX 3080 Ti",             320, 1665,  128,  12288,  912,  350, "Ampere"),
    ("GeForce RTX 3090",                328, 1695,  128,  24576,  936,  350, "Ampere"),
    ("GeForce RTX 3090 Ti",             336, 1860,  128,  24564, 1008,  450, "Ampere"),
    ("GeForce RTX 4060",                 96, 2460,  128,   8188,  272,  115, "Ada"),
    ("GeForce RTX 4060 Ti",             136, 2535,  128,   8188,  288,  160, "Ada"),
    ("GeForce RTX 4060 Ti 16GB",        136, 2535,  128,  16380,  288,  165, "Ada"),
    ("GeForce RTX 4070",                184, 2475,  128,  12282,  504,  200, "Ada"),
    ("GeForce RTX 4070 SUPER",          224, 2475,  128,  12282,  504,  220, "Ada"),
    ("GeForce RTX 4070 Ti",             240, 2610,  128,  12282,  504,  285, "Ada"),
    ("GeForce RTX 4070 Ti SUPER",       264, 2610,  128,  16376,  672,  285, "Ada"),
    ("GeForce RTX 4080",                304, 2505,  128,  16376,  717,  320, "Ada"),
    ("GeForce RTX 4080 SUPER",          320, 2550,  128,  16376,  736,  320, "Ada"),
    ("GeForce RTX 4090 D",              456, 2520,  128,  24564, 1008,  425, "Ada"),
    ("GeForce RTX 4090",                512, 2520,  128,  24564, 1008,  450, "Ada"),
    ("GeForce RTX 5050",                 80, 2572,  128,   8192,  320,  130, "Blackwell"),
    ("GeForce RTX 5060",                120, 2497,  128,   8192,  448,  145, "Blackwell"),
    ("GeForce RTX 5060 Ti",             144, 2572,  128,   8192,  448,  180, "Blackwell"),
    ("GeForce RTX 5060 Ti 16GB",        144, 2572,  128,  16311,  448,  180, "Blackwell"),
    ("GeForce RTX 5070",                192, 2512,  128,  12227,  672,  250, "Blackwell"),
    ("GeForce RTX 5070 Ti",             280, 2452,  128,  16303,  896,  300, "Blackwell"),
    ("GeForce RTX 5080",                336, 2617,  128,  16303,  960,  360, "Blackwell"),
    ("GeForce RTX 5090",                680, 2407,  128,  32607, 1792,  575, "Blackwell"),

    ("GeForce RTX 3050 Laptop GPU",      64, 1740,  128,   4096,  192,   80, "Ampere"),
    ("GeForce RTX 3050 Ti Laptop GPU",   80, 1695,  128,   4096,  192,   80, "Ampere"),
    ("GeForce RTX 3060 Laptop GPU",     120, 1703,  128,   6144,  336,  115, "Ampere"),
    ("GeForce RTX 3070 Laptop GPU",     160, 1620,  128,   8192,  448,  125, "Ampere"),
    ("GeForce RTX 3070 Ti Laptop GPU",  184, 1485,  128,   8192,  448,  125, "Ampere"),
    ("GeForce RTX 3080 Laptop GPU",     192, 1710,  128,   8192,  448,  150, "Ampere"),
    ("GeForce RTX 3080 Ti Laptop GPU",  232, 1590,  128,  16384,  512,  150, "Ampere"),
    ("GeForce RTX 4050 Laptop GPU",      80, 2370,  128,   6141,  192,  115, "Ada"),
    ("GeForce RTX 4060 Laptop GPU",      96, 2370,  128,   8188,  256,  115, "Ada"),
    ("GeForce RTX 4070 Laptop GPU",     144, 2175,  128,   8188,  256,  115, "Ada"),
    ("GeForce RTX 4080 Laptop GPU",     232, 2280,  128,  12282,  432,  150, "Ada"),
    ("GeForce RTX 4090 Laptop GPU",     304, 2040,  128,  16376,  576,  150, "Ada"),

    ("TITAN RTX",                       576, 1770,  128,  24576,  672,  280, "Turing"),
    ("RTX A4000",                       192, 1560,  256,  16376,  448,  140, "Ampere"),
    ("RTX A5000",                       256, 1695,  256,  24564,  768,  230, "Ampere"),
    ("RTX A6000",                       336, 1800,  256,  49140,  768,  300, "Ampere"),
    ("RTX 4000 Ada Generation",         192, 2175,  256,  20475,  360,  130, "Ada"),
    ("RTX 5000 Ada Generation",         400, 2550,  256,  32760,  576,  250, "Ada"),
    ("RTX 6000 Ada Generation",         568, 2505,  256,  49140,  960,  300, "Ada"),

    ("Tesla T4",                        320, 1590,  128,  15360,  320,   70, "Turing"),
    ("Tesla V100-PCIE-16GB",            640, 1380,  128,  16384,  900,  250, "Volta"),
    ("Tesla V100-SXM2-16GB",            640, 1530,  128,  16384,  900,  300, "Volta"),
    ("Tesla V100-SXM2-32GB",            640, 1530,  128,  32768,  900,  300, "Volta"),
    ("A10",                             288, 1695,  256,  23028,  600,  150, "Ampere"),
    ("A30",                             224, 1440,  512,  24576,  933,  165, "Ampere"),
    ("A40",                             336, 1740,  256,  46068,  696,  300, "Ampere"),
    ("A100-PCIE-40GB",                  432, 1410,  512,  40960, 1555,  250, "Ampere"),
    ("A100-SXM4-40GB",                  432, 1410,  512,  40960, 1555,  400, "Ampere"),
    ("A100 80GB PCIe",                  432, 1410,  512,  81920, 1935,  300, "Ampere"),
    ("A100-SXM4-80GB",                  432, 1410,  512,  81920, 2039,  400, "Ampere"),
    ("L4",                              232, 2040,  256,  23034,  300,   72, "Ada"),
    ("L40",                             568, 2490,  128,  46068,  864,  300, "Ada"),
    ("L40S",                            568, 2520,  256,  46068,  864,  350, "Ada"),
    ("H100 PCIe",                       456, 1620, 1024,  81559, 2039,  350, "Hopper"),
    ("H100 80GB HBM3",                  528, 1830, 1024,  81559, 3352,  700, "Hopper"),
    ("H200",                            528, 1830, 1024, 143771, 4800,  700, "Hopper"),
))
# fmt: on


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

    def autocast(self) -> AbstractContextManager:
        """Matrix products in `dtype`; with float32 nothing changes."""
        return torch.autocast(self.type, self.dtype, enabled=self.dtype != torch.float32)

    def grad_scaler(self) -> torch.amp.GradScaler:
        """float16 needs a loss scale; for other types this does nothing."""
        return torch.amp.GradScaler(self.type, enabled=self.dtype == torch.float16)

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

    def wait(self) -> None:
        """Go on when the device has done all that it was told."""
        if self.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def memory(self) -> "DeviceMemory":
        """What this process uses of the device's memory from now on."""
        kinds = {"cuda": _CudaMemory, "cpu": _CpuMemory}
        return kinds.get(self.type, DeviceMemory)(self.torch_device)


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


class _CudaMemory(DeviceMemory):
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
        except Exception:  # nvidia-ml-py is not installed, or the driver has no such figure
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


class _CpuMemory(DeviceMemory):
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
        import ctypes

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
    threads = torch.get_num_threads()
    name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    return Device(torch.device("cpu"), name, _dtype(dtype, torch.float32), None, None)


def peak_flops(card: str) -> float | None:
    """Dense half-precision peak of a card by the name its driver reports; None if unknown."""
    known = known_card(card)
    return known and known.peak_flops


def known_card(name: str) -> Card | None:
    """The card whose driver reports this name, if it is in the table."""
    name = name.removeprefix("NVIDIA ")
    return next((card for card in CARDS if card.name == name), None)


def find_card(typed: str) -> Card:
    """The card a person means: `RTX 4070`, `4070 super`, `3080 laptop`, `A100 80GB`."""
    wanted = _words(typed)
    found = [card for card in CARDS if wanted and wanted <= _words(card.name) | _sizes(card)]
    if not found:
        names = {" ".join(sorted(_words(card.name))): card.name for card in CARDS}
        key = " ".join(sorted(wanted))
        nearest = difflib.get_close_matches(key, names, n=4, cutoff=0.4)
        like = ", ".join(names[one] for one in nearest) or "RTX 4070, A100 80GB and 3080 laptop"
        raise InputError(f"card {typed!r} is not in the table; names like it are {like}")
    return min(found, key=lambda card: len(_words(card.name) - wanted))


def _words(name: str) -> set[str]:
    """What tells a card's name from others: `GeForce RTX 4070Ti` is {4070, ti}."""
    spaced = re.sub(r"(?<=\d)(?=(ti|super|laptop|d)\b)", " ", name.lower())
    return set(re.findall(r"\w+", spaced)) - {"nvidia", "geforce", "rtx", "gpu"}


def _sizes(card: Card) -> set[str]:
    """The sizes its memory may go by: error correction takes a sixteenth of the nominal one."""
    reported_gib = card.memory_mib / 1024
    return {f"{size}gb" for size in range(round(reported_gib), round(reported_gib * 16 / 15) + 1)}


def _best_kind() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _dtype(name: str, default: torch.dtype) -> torch.dtype:
    return default if name == "auto" else getattr(torch, name)


def _cuda_driver_version() -> int:
    """As in 13000 for CUDA 13.0; torch knows it, but does not tell."""
    import ctypes

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
        peak_flops(card.name),
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
