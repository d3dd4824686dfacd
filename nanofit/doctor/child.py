"""Questions to torch, each in a process of its own: it may crash, hang, or not even load."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, Any, NamedTuple

from nanofit.files import PROJECT

PREFIX = "doctor: "


class Answer(NamedTuple):
    """What a child told of itself before its end, and how that came."""

    told: dict[str, Any]
    code: int | None  # None: it took too long
    said: str  # its last words on standard error
    seconds: float

    @property
    def reason(self) -> str:
        """Why it did not tell more."""
        if self.code is None:
            return f"no answer within {self.seconds:.0f} s"
        if self.code < 0:
            return f"killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        return self.said or f"exit code {self.code}"


class Child:
    """A question on its way; it and all that it started end with the context."""

    def __init__(self, module: str, *words: str, **environment: str):
        self._command = [sys.executable, "-m", f"nanofit.doctor.{module}", *words]
        self._environment = {**os.environ, **environment}

    def __enter__(self) -> "Child":
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            cwd=PROJECT,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: Any) -> None:
        if os.name == "posix":
            with suppress(ProcessLookupError, PermissionError):  # nobody is left
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._output.close()
        self._errors.close()

    def answer(self, timeout_s: float) -> Answer:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        lines = [line for line in _text(self._output).splitlines() if line.startswith(PREFIX)]
        told = {}
        for line in lines:
            told |= json.loads(line.removeprefix(PREFIX))
        said = [line.strip() for line in _text(self._errors).splitlines() if line.strip()]
        seconds = time.monotonic() - self._started
        return Answer(told, code, said[-1] if said else "", seconds)


def tell(**facts: Any) -> None:
    """In a child: tell what is known by now, as the next thing may be its end."""
    print(f"{PREFIX}{json.dumps(facts)}", flush=True)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")
