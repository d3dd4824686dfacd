"""Whether torch.compile works, and what it lacks if not."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from nanofit.doctor.child import Answer, Child
from nanofit.doctor.finding import Finding, warning
from nanofit.doctor.system import System

TIMEOUT_S = 180.0  # a small function takes ten seconds or so where nothing else runs
_GET_COMPILER = {
    "Linux": "install one, as by `sudo apt install g++`",
    "WSL": "install one, as by `sudo apt install g++`",
    "macOS": "install one by `xcode-select --install`",
    "Windows": "install the Build Tools for Visual Studio, and start from their x64 prompt",
}
_GET_TRITON = {
    "Windows": "run under WSL, for which there is Triton; or try `pip install triton-windows`",
}


@contextmanager
def trying(device: str) -> Iterator[Child]:
    """Compile, in a child, what no cache knows."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": folder,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # workers take longer to start than this
            "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # pays from the second kernel on
        }
        with Child("try_compile", device, **environment) as child:
            yield child


def compiler() -> str | None:
    """The C++ compiler that torch would take."""
    names = ("cl",) if sys.platform == "win32" else ("g++", "clang++")
    chosen = os.environ.get("CXX")
    return next(filter(shutil.which, (chosen,) if chosen else names), None)


def triton() -> str | None:
    """The version of Triton, which makes kernels for cards."""
    for package in ("triton", "triton-windows"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def compile_findings(system: System, answer: Answer, *, on_card: bool) -> Iterator[Finding]:
    """What a child said that was to compile something for the device of a run."""
    has, tools = compiler(), triton()
    if answer.told.get("seconds"):
        by = [has or "", f"Triton {tools}" if on_card and tools else ""]
        known = f", by {' and '.join(filter(None, by))}" if any(by) else ""
        took = f"a small function took {answer.told['seconds']:.0f} s"
        yield Finding("compile", f"torch.compile works{known}; {took}")
    elif "seconds" not in answer.told:
        reason = answer.told.get("failed") or answer.reason
        lack = "as Triton is missing" if on_card and not tools else ""
        way_out = _GET_TRITON.get(system.kind, "pip install triton")
        if not lack and not has:
            lack, way_out = "as there is no C++ compiler", _GET_COMPILER[system.kind]
        if not lack:
            way_out = (
                "`python -m nanofit.doctor.try_compile auto` shows it alone; --compile=False "
                "leaves it out"
            )
        slower = ", at 1.5 to 1.85 times the time" if on_card else ""
        told = f"torch.compile does not work{f', {lack}' if lack else f': {reason}'}"
        yield warning("compile", f"{told}; runs stay eager{slower}", way_out)
