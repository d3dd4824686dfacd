"""Card, driver and torch: whether they are there, match, and leave room for a run."""

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from nanofit.doctor.child import Answer
from nanofit.doctor.finding import Finding, problem, refusal, warning
from nanofit.doctor.system import System
from nanofit.machine.cards import known_card
from nanofit.machine.nvml import Driver, DriverCard
from nanofit.machine.overhead import overhead_of
from nanofit.memory.budget import Budget
from nanofit.memory.need import components_of
from nanofit.memory.setup import Setup
from nanofit.settings.config import RunConfig, Settings

GIB, MIB = 2**30, 2**20
BUILDS = "https://pytorch.org/get-started/locally"
FIRST_DRIVERS = {11: 450, 12: 525, 13: 580}  # NVIDIA's, for Linux, by major version of CUDA
MUCH_USED = 0.1  # of a card, by others
MOST_PROGRAMS = 4  # told by name


class SeenCard(NamedTuple):
    """A card that torch sees."""

    name: str
    pci_bus: tuple[int, int, int]
    total_bytes: int
    capability: tuple[int, int]
    refusal: str = ""

    @classmethod
    def told(cls, facts: Mapping[str, Any]) -> "SeenCard":
        pairs = {name: tuple(facts[name]) for name in ("pci_bus", "capability")}
        return cls(**{**facts, **pairs})


class Seen(NamedTuple):
    """What torch is, and the devices it sees."""

    torch: str
    cuda: str | None = None  # the version it was built for
    warning: str = ""  # of its first look for cards
    available_bytes: int | None = None  # of the host's memory
    cards: tuple[SeenCard, ...] = ()
    refusal: str = ""  # of the device that a run would take
    device: str = ""  # that it would take
    name: str = ""
    note: str = ""
    multiplies: bool | None = None  # in bfloat16; None: not tried

    @classmethod
    def told(cls, facts: Mapping[str, Any]) -> "Seen | None":
        """As a child told it; None if it did not come so far."""
        if "torch" not in facts:
            return None
        return cls(**{**facts, "cards": tuple(map(SeenCard.told, facts["cards"]))})


def card_findings(
    system: System, driver: Driver | None, seen: Seen | None, *, has_card: bool
) -> Iterator[Finding]:
    """Which cards there are, whoever tells."""
    if driver and driver.refusal:
        yield problem(
            "card",
            f"the NVIDIA driver does not answer: {driver.refusal}",
            "restart the machine, as after an update of the driver; else install the driver again",
        )
    elif driver and driver.cards:
        for card in driver.cards:
            newest = ".".join(map(str, driver.cuda))
            told = f"{_described(card.name, card.total_bytes)}, driver {driver.version}"
            yield Finding("card", f"{told}, CUDA up to {newest}")
    elif seen and seen.cards:
        for card in seen.cards:
            yield Finding("card", _described(card.name, card.total_bytes))
        if not driver:
            yield warning(
                "card",
                "NVML does not answer, so nobody tells who else uses the card, or what spills from "
                "it",
                "pip install -r requirements.txt brings nvidia-ml-py, by which it is asked",
            )
    elif has_card:
        where = "on Windows, not in WSL" if system.kind == "WSL" else "then restart the machine"
        yield problem(
            "card",
            "there is an NVIDIA card, but no driver of NVIDIA's answers for it",
            f"install the driver from https://www.nvidia.com/drivers, {where}",
        )
    elif seen and seen.device == "mps":
        yield Finding("card", seen.name)
    else:
        yield Finding("card", "none: a run computes on the CPU")


def _described(name: str, total_bytes: int) -> str:
    unknown = "" if known_card(name) else " (not in the planner's table: no time is forecast)"
    return f"{name}{unknown}, {total_bytes / GIB:.1f} GiB"


def torch_findings(
    driver: Driver | None, seen: Seen | None, answer: Answer, run: RunConfig
) -> Iterator[Finding]:
    """Whether torch loads, and can use the device that a run would take."""
    if not seen:
        yield problem(
            "torch",
            f"it does not load: {answer.reason}",
            "pip install -r requirements.txt, in the environment that you start train.py in",
        )
        return
    if is_cut_off(driver, seen, run):
        yield _why_no_card(driver, seen)
        return
    refused = {card.refusal: None for card in seen.cards if card.refusal and _wants_card(run)}
    for told in refused:
        yield _refused(told, seen)
    if seen.refusal and seen.refusal not in refused:
        yield refusal("torch", seen.refusal)
    if seen.device:
        built = f", built for CUDA {seen.cuda}" if seen.cuda else ""
        note = f"; {seen.note}" if seen.note else ""
        yield Finding("torch", f"{seen.torch}{built}; a run would take {seen.name}{note}")
    elif not seen.refusal:
        told = f"{seen.torch} does not come to use a device: {answer.reason}"
        yield problem("torch", told, "restart the machine, as a card may hang; or --device=cpu")
    if seen.multiplies is False and answer.code == -signal.SIGILL:
        yield warning(
            "torch",
            "a product in bfloat16 ended its process (Illegal instruction): this machine announces "
            "AMX without granting it",
            "for --dtype=bfloat16 set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the environment",
        )


def is_cut_off(driver: Driver | None, seen: Seen, run: RunConfig) -> bool:
    """Whether a run would take a card that is there, and torch sees none."""
    return bool(_wants_card(run) and driver and driver.cards and not seen.cards)


def _wants_card(run: RunConfig) -> bool:
    return run.device.partition(":")[0] in ("auto", "cuda")


def _why_no_card(driver: Driver, seen: Seen) -> Finding:
    if seen.cuda is None:
        text = f"{seen.torch} is a build for CPUs, and cannot use the card"
        return problem("torch", text, f"pip uninstall torch, then take a CUDA build from {BUILDS}")
    built = int(seen.cuda.partition(".")[0])
    if driver.cuda[0] < built:
        at_least = FIRST_DRIVERS.get(built)
        newer = f"update the driver{f' to {at_least} or newer' if at_least else ''}"
        return problem(
            "torch",
            f"{seen.torch} was built for CUDA {seen.cuda}, but driver {driver.version} knows "
            f"CUDA only up to {driver.cuda[0]}.{driver.cuda[1]}",
            f"{newer}, or take a torch built for CUDA {driver.cuda[0]} from {BUILDS}",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        text = f"it sees no card: CUDA_VISIBLE_DEVICES={visible!r} hides what is there"
        return problem("torch", text, "unset CUDA_VISIBLE_DEVICES, or name a card in it, as in 0")
    told = seen.warning.partition(" (Triggered")[0].strip()
    return problem(
        "torch",
        f"{seen.torch} sees no card{f': {told}' if told else ''}",
        "restart the machine, as after an update of the driver; a container needs --gpus all",
    )


def _refused(told: str, seen: Seen) -> Finding:
    """Of a card for which torch was not built: it stops a run that would take it."""
    found = refusal("torch", told)
    if told != seen.refusal:
        return warning("torch", found.text, "none needed: a run would take another card")
    others = [index for index, one in enumerate(seen.cards) if not one.refusal]
    if not others:
        return found
    return problem(
        "torch", found.text, f"{found.remedy}; or the other card, --device=cuda:{others[0]}"
    )


def memory_findings(
    system: System, driver: Driver | None, seen: Seen, settings: Settings
) -> Iterator[Finding]:
    """What is free, and who uses the rest."""
    if not seen.cards:
        if seen.available_bytes is not None:
            free = f"{seen.available_bytes / GIB:.1f} GiB of the host's memory are available"
            yield Finding("memory", free)
        return
    by_bus = {card.pci_bus: card for card in driver.cards} if driver else {}
    for index, card in enumerate(seen.cards):
        if told := by_bus.get(card.pci_bus):
            which = f"card {index}: " if len(seen.cards) > 1 else ""
            yield _memory_of(told, which)
            if seen.device == f"cuda:{index}":
                yield from _lack(told, card, settings)
    if system.may_spill:
        yield warning(
            "memory",
            "on Windows the driver moves what does not fit into the host's memory, where a step "
            "takes ten times as long, instead of refusing it",
            "leave autofit on, which measures that; or let it refuse: NVIDIA Control Panel, Manage "
            "3D settings, CUDA - Sysmem Fallback Policy, Prefer No Sysmem Fallback",
        )


def _memory_of(card: DriverCard, which: str) -> Finding:
    used = card.total_bytes - card.free_bytes
    text = f"{which}{card.free_bytes / GIB:.1f} of {card.total_bytes / GIB:.1f} GiB free"
    if card.programs:
        names = [f"{one.name} {one.used_bytes / MIB:,.0f} MiB" for one in card.programs]
        more = f" and {len(names) - MOST_PROGRAMS} more" if len(names) > MOST_PROGRAMS else ""
        text += f"; used by {', '.join(names[:MOST_PROGRAMS])}{more}"
    elif used > MUCH_USED * card.total_bytes:
        text += "; the driver does not tell who uses the rest"
    if used <= MUCH_USED * card.total_bytes:
        return Finding("memory", text)
    return warning(
        "memory", text, "end what uses it, or have a smaller micro-batch: autofit sees to it"
    )


def _lack(card: DriverCard, seen: SeenCard, settings: Settings) -> Iterator[Finding]:
    """Said if not even one sequence of the run's model fits without savers."""
    shape, learn, run = settings
    setup = Setup(
        shape,
        dtype="float32" if run.dtype == "float32" else "bfloat16",
        loss=run.loss,
        optimizer=learn.optimizer,
        has_flash=seen.capability >= (8, 0),
        recompute=run.recompute,
        optimizer_bits=run.optimizer_bits,
    )
    components = components_of(setup, 1)
    overhead = overhead_of(card.name)
    used_bytes = card.total_bytes - card.free_bytes
    budget = Budget(card.name, card.total_bytes, used_bytes, run, overhead)
    if components and sum(components.values()) + overhead.library_bytes > budget.limit_bytes:
        needed = sum(components.values()) + overhead.library_bytes
        yield warning(
            "memory",
            f"one sequence of this model takes {needed / MIB:,.0f} MiB, "
            f"{max(budget.limit_bytes, 0) / MIB:,.0f} are usable",
            "autofit will save what it can; autofit.py --explain shows what each saver costs",
        )
