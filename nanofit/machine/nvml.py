"""What NVIDIA's driver tells of its cards and of who uses them, without using any of them."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import PureWindowsPath
from typing import Any, NamedTuple


class Program(NamedTuple):
    """Another process on a card."""

    name: str
    used_bytes: int


class DriverCard(NamedTuple):
    """A card as its driver sees it, whatever CUDA lets a process see."""

    name: str
    pci_bus: tuple[int, int, int]  # domain, bus and device, by which CUDA knows it as well
    total_bytes: int
    free_bytes: int
    watts: float | None  # that it may draw; None if nobody tells
    programs: tuple[Program, ...]  # those of which it tells what they use


class Driver(NamedTuple):
    """NVIDIA's driver; with a refusal there is one that does not work."""

    version: str = ""
    cuda: tuple[int, int] = (0, 0)  # the newest it knows
    cards: tuple[DriverCard, ...] = ()  # those with memory of their own
    refusal: str = ""


def look_at_driver() -> Driver | None:
    """The driver and its cards; None where there is none, or nvidia-ml-py is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return _driver(pynvml)
    except pynvml.NVMLError_LibraryNotFound:
        return None
    except pynvml.NVMLError as error:  # a card may be lost at any time
        return Driver(refusal=str(error).rstrip("."))


def _driver(nvml: Any) -> Driver:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    cards = [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    return Driver(
        nvml.nvmlSystemGetDriverVersion(),
        (version // 1000, version % 1000 // 10),
        tuple(filter(None, cards)),
    )


def _card(nvml: Any, index: int) -> DriverCard | None:
    """None if it has no memory of its own, but shares the host's."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return None
    place = nvml.nvmlDeviceGetPciInfo(handle)
    milliwatts = _asked(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return DriverCard(
        name=nvml.nvmlDeviceGetName(handle),
        pci_bus=(place.domain, place.bus, place.device),
        total_bytes=memory.total,
        free_bytes=memory.free,
        watts=milliwatts and milliwatts / 1000,
        programs=tuple(_programs(nvml, handle)),
    )


def _programs(nvml: Any, handle: Any) -> Iterator[Program]:
    """Those that compute or draw, the largest first; Windows tells of no program what it uses."""
    lists = (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses)
    used = {
        process.pid: process.usedGpuMemory
        for one in lists
        for process in _asked(nvml, one, handle) or ()
        if process.usedGpuMemory
    }
    for pid in sorted(used, key=used.get, reverse=True):
        path = _asked(nvml, nvml.nvmlSystemGetProcessName, pid)
        yield Program(PureWindowsPath(path).name if path else f"process {pid}", used[pid])


def _asked(nvml: Any, question: Callable, about: Any) -> Any:
    """An answer that not every driver has: WSL's, a container's and old cards' lack some."""
    with suppress(nvml.NVMLError):
        return question(about)
    return None
