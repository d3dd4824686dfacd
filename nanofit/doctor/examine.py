"""Every question in turn; the slow ones are asked while others are answered."""

from collections.abc import Callable, Iterator

from nanofit.doctor.card import (
    Seen,
    card_findings,
    is_cut_off,
    memory_findings,
    torch_findings,
)
from nanofit.doctor.child import Child
from nanofit.doctor.compiler import TIMEOUT_S, compile_findings, trying
from nanofit.doctor.finding import Finding
from nanofit.doctor.storage import data_findings, disk_findings
from nanofit.doctor.system import has_nvidia_card, this_system
from nanofit.machine.nvml import look_at_driver
from nanofit.settings.config import Settings

LOOK_S = 120.0  # to load torch takes two seconds, or a minute from a cold disk


def examine(settings: Settings, note: Callable[[str], None]) -> Iterator[Finding]:
    """What is found, as it is found; `note` is told what takes a while."""
    run, system = settings.run, this_system()
    cores = f"{system.cores} core{'s' if system.cores > 1 else ''}"
    yield Finding("system", f"{system.kind}, Python {system.python}, {cores}")
    driver = look_at_driver()  # before our own children are on the card
    note("measuring the disk")
    yield from disk_findings(settings, system)
    with Child("look", run.device, run.dtype) as looking, trying(run.device) as compiling:
        note("reading the data")
        yield from data_findings(settings)
        note("loading torch")
        answer = looking.answer(LOOK_S)
        seen = Seen.told(answer.told)
        yield from card_findings(system, driver, seen, has_card=has_nvidia_card())
        yield from torch_findings(driver, seen, answer, run)
        if not seen or is_cut_off(driver, seen, run):
            return
        yield from memory_findings(system, driver, seen, settings)
        if run.compile:
            note("compiling a small function")
            on_card = seen.device.startswith("cuda")
            yield from compile_findings(system, compiling.answer(TIMEOUT_S), on_card=on_card)
