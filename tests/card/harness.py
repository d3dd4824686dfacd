"""Run our scripts on a CUDA card without a GPU, and see what they did there."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanofit.machine.cards import find_card
from tests.card.build import build, preload
from tests.processes import end as end_process
from tests.processes import start as start_process

PROJECT = Path(__file__).resolve().parents[2]
VENV = PROJECT / ".venv-cuda"
PYTHON = VENV / "bin/python"
KNOWN_CALLS = frozenset(Path(__file__).with_name("known_calls.txt").read_text().splitlines())
CONTEXT_MIB = 420  # of a process on an RTX 4070
MIB = 2**20
# The last words of a script in a few lines. torch may abort where the interpreter is taken apart
# right after a backward pass; coverage is saved before.
LEAVE = """
import atexit, os, sys
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(0)
"""

_COVERAGE = {  # which makes Python, and so the compiler, much slower
    "COVERAGE_PROCESS_START": PROJECT / "tests/card/coverage.ini",
    "COVERAGE_FILE": VENV / "coverage/data",
    "CARD_PROJECT": PROJECT,
}
_MOST_DEVICES = 8
_PROCESS = np.dtype(  # as in card.c
    [
        ("pid", "<i4"),
        ("is_gone", "<i4"),
        ("launches", "<i8"),
        ("used", "<u8", _MOST_DEVICES),
        ("peak", "<u8", _MOST_DEVICES),
    ]
)


class UnknownCall(AssertionError):
    """A run made a call of CUDA that nobody has looked at."""


@dataclass(frozen=True)
class Run:
    """What came of a script."""

    code: int
    output: str
    errors: str
    processes: np.ndarray  # those that used the card: pid, launches, used and peak bytes by device
    calls: frozenset[str]  # of CUDA that the card only pretends to know
    out_dir: Path
    pid: int

    @property
    def launches(self) -> int:
        """Of the script itself, without its trials'."""
        [row] = self.processes[self.processes["pid"] == self.pid]
        return int(row["launches"])

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind in the run's metrics."""
        lines = (self.out_dir / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in self.records("event") if record["name"] == name]

    def steps(self) -> list[int]:
        """The steps that were done, in order, repeated ones repeatedly."""
        return [record["step"] for record in self.records("step")]

    @property
    def peak_bytes(self) -> int:
        """The most that one process had on one device, its context included."""
        return int(self.processes["peak"].max(initial=0))

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output}\n{self.errors}"


@dataclass(frozen=True)
class CardWithoutGpu:
    """A card, by a name of nanofit's table, on which other programs use some memory."""

    folder: Path  # for what runs leave behind
    name: str = "RTX 4070"
    memory_mib: int | None = None  # None: as the table says
    others_mib: int = 0
    devices: int = 1
    capability: str | None = None
    is_covered: bool = False  # whether the lines that scripts execute are noted

    def run(self, *command: str | Path, timeout_s: float = 600, **options: Any) -> Run:
        """Run a script of the project to its end."""
        with self.start(*command, **options) as started:
            return started.result(timeout_s)

    @contextmanager
    def start(
        self,
        *command: str | Path,
        processes: int = 1,
        scalars: str = "0:2.0",
        others_after: str = "",
        trace: Path | None = None,
        **environment: str,
    ) -> Iterator["Started"]:
        """Start a script, which is killed with all its children when the context is left.

        `scalars` and `others_after` are "launches:value,...": what numbers read back are said to
        be, and how many MiB other programs come to use, once the script has launched so many
        kernels. "MIB*N" are used for a moment: until N allocations have been refused. "MIB@D" or
        "MIB*N@D" are used of device D, by the launches of the process that computes there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        state, calls = self.folder / "state", self.folder / "calls"
        np.full(_MOST_DEVICES, self.others_mib * MIB, "<u8").tofile(state)
        calls.write_text("")
        settings = {
            "CARD_STATE": state,
            "CARD_CALLS": calls,
            "CARD_SCALARS": scalars,
            "CARD_OTHERS_AFTER": others_after,
            "CARD_SCRIPT": Path(command[0]).name,
            **({"CARD_TRACE": trace} if trace else {}),
            **(_COVERAGE if self.is_covered else {}),
            **environment,
        }
        with (
            (self.folder / "stdout").open("w") as output,
            (self.folder / "stderr").open("w") as errors,
        ):
            process = start_process(
                _words(command, processes),
                cwd=self.folder,
                env=self._environment(settings),
                stdout=output,
                stderr=errors,
            )
        try:
            yield Started(process, self.folder)
        finally:
            end_process(process)

    def _environment(self, settings: dict[str, Any]) -> dict[str, str]:
        known = find_card(self.name)
        per_processor = 8 if known.architecture in ("Volta", "Turing") else 4
        described = {
            "CARD_NAME": f"NVIDIA {known.name}",
            "CARD_MEMORY_MIB": self.memory_mib or known.memory_mib,
            "CARD_DEVICES": self.devices,
            "CARD_CAPABILITY": self.capability or "{}.{}".format(*known.capability),
            "CARD_PROCESSORS": known.tensor_cores // per_processor,
            "CARD_CONTEXT_MIB": CONTEXT_MIB,
            "XDG_CACHE_HOME": _cache(self.folder),
            # Inductor keeps graphs by a card's name, for which a true card has one capability.
            "TORCHINDUCTOR_CACHE_DIR": VENV / f"cache/inductor{self.capability or ''}",
            "TRITON_CACHE_DIR": VENV / "cache/triton",
            "TORCHINDUCTOR_COMPILE_THREADS": 1,  # workers take longer to start than this
        }
        own = {name: str(value) for name, value in {**described, **settings}.items()}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return {**inherited, **preload(build(PYTHON, VENV / "card")), **own}


def _words(command: tuple[str | Path, ...], processes: int) -> list[str]:
    """What starts a script of the project, or Python's own flags, in so many processes."""
    script, *words = map(str, command)
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    place = str(PROJECT / script) if script.endswith(".py") else script
    return [PYTHON, *(launcher if processes > 1 else []), place, *words]


@dataclass(frozen=True)
class Started:
    """A script that runs, and writes what it says into files: it never waits for a reader."""

    process: subprocess.Popen
    folder: Path

    def wait_for(self, word: str, timeout_s: float = 1200) -> None:
        """Go on when it has said a word."""
        deadline = time.monotonic() + timeout_s
        while word not in self._said("stdout"):
            has_ended = self.process.poll() is not None
            if (has_ended and word not in self._said("stdout")) or time.monotonic() > deadline:
                told = f"{self._said('stdout')}\n{self._said('stderr')}"
                raise AssertionError(f"no {word!r} within {timeout_s} s in\n{told}")
            time.sleep(0.01)

    def result(self, timeout_s: float = 600) -> Run:
        """What came of it, when it has ended; UnknownCall if it made one."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            told = f"{self._said('stdout')}\n{self._said('stderr')}"
            raise AssertionError(f"it took longer than {timeout_s} s:\n{told}") from error
        calls = frozenset((self.folder / "calls").read_text().splitlines())
        if calls - KNOWN_CALLS:
            raise UnknownCall(", ".join(sorted(calls - KNOWN_CALLS)))
        return Run(
            code=self.process.returncode,
            output=self._said("stdout"),
            errors=self._said("stderr"),
            processes=_read_state(self.folder / "state"),
            calls=calls,
            out_dir=self.folder / "out",
            pid=self.process.pid,
        )

    def _said(self, stream: str) -> str:
        return (self.folder / stream).read_text(encoding="utf-8", errors="replace")


def set_others(folder: Path, mib: int, device: int = 0) -> None:
    """Let other programs use so much of a card from now on.

    A negative number is memory of ours that the driver has moved to the host, as WSL's does.
    """
    with (folder / "state").open("r+b") as file:
        file.seek(8 * device)
        file.write(np.array(mib * MIB, "<i8").tobytes())


def why_impossible() -> str | None:
    """Why there can be no such card here, if so."""
    import platform
    import shutil

    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"a card without a GPU needs Linux on x86-64, not {platform.platform()}"
    if not shutil.which("gcc"):
        return "a card without a GPU needs gcc"
    if not PYTHON.exists():
        return "the CUDA build of torch is not installed; make test-card does it"
    return None


def _read_state(path: Path) -> np.ndarray:
    raw = path.read_bytes()
    header = 8 * _MOST_DEVICES
    if len(raw) <= header:
        return np.empty(0, _PROCESS)
    count = int.from_bytes(raw[header : header + 8], "little")
    return np.frombuffer(raw, _PROCESS, count, header + 8)


def _cache(folder: Path) -> Path:
    """A cache of its own for each card, but for simulations, which are the same for all."""
    shared, own = VENV / "cache/memory", folder / "cache/nanofit"
    shared.mkdir(parents=True, exist_ok=True)
    own.mkdir(parents=True, exist_ok=True)
    if not (own / "memory").exists():
        (own / "memory").symlink_to(shared)
    return folder / "cache"
