"""What the machine runs on, and what is peculiar to that."""

import os
import platform
from pathlib import Path
from typing import Literal, NamedTuple

_NVIDIA, _DISPLAY = "0x10de", "0x03"  # of PCI: a maker, and the class of devices that draw
_BY_MESSAGES = ("9p", "drvfs", "v9fs")  # file systems by which WSL reaches Windows' disks


class System(NamedTuple):
    kind: Literal["Linux", "WSL", "Windows", "macOS"]
    python: str
    cores: int

    @property
    def may_spill(self) -> bool:
        """Whether a driver moves to the host's memory what does not fit on a card."""
        return self.kind in ("WSL", "Windows")


def this_system() -> System:
    kind = {"Darwin": "macOS"}.get(platform.system(), platform.system())
    if kind == "Linux" and "microsoft" in platform.release().lower():
        kind = "WSL"
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return System(kind, platform.python_version(), cores)


def has_nvidia_card(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether one is plugged in, with or without a driver; where nobody tells, False."""
    return any(
        _content(device / "vendor") == _NVIDIA and _content(device / "class").startswith(_DISPLAY)
        for device in devices.glob("*")
    )


def is_windows_disk(folder: Path, mounts: Path = Path("/proc/mounts")) -> bool:
    """Whether a folder of WSL's lies on a disk of Windows."""
    rows = [line.split() for line in _content(mounts).splitlines()]
    places = {row[1].replace("\\040", " "): row[2] for row in rows if len(row) > 2}
    own = [str(one) for one in (folder, *folder.parents) if str(one) in places]
    return bool(own) and places[own[0]] in _BY_MESSAGES


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
