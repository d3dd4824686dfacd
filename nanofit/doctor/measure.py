"""What a card does: three models trained for a few steps, by the trials that find a run's fit."""

from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from nanofit.doctor.finding import Finding
from nanofit.doctor.system import this_system
from nanofit.files import PROJECT
from nanofit.fit.search import sizes_for
from nanofit.fit.trial import TrialResult, run_trial, share_compile_cache
from nanofit.machine.cards import Card, known_card
from nanofit.machine.device import Device, describe_device
from nanofit.machine.measured import CardReport, MeasuredStep, in_words
from nanofit.machine.nvml import look_at_driver
from nanofit.memory.budget import usable_bytes
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.outlook.forecast import measured_step, predicted_tokens_per_s
from nanofit.settings.config import RunConfig, TrainConfig, load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, compact

MODELS = ("train_small_30m", "train_fineweb", "train_gpt2_124m")
PASSES = 2  # of a step of a trial
MIB = 2**20


def measure_card(
    run: RunConfig, note: Callable[[str], None], show: Callable[[Finding], None]
) -> CardReport | None:
    """Train each model that should fit for two steps, the largest of them compiled as well.

    None where a run would take no card.
    """
    device = describe_device(run.device, run.dtype)
    if device.type != "cuda":
        text = f"nothing: --measure is for a card, and a run would take {device.name}"
        show(Finding("measured", text, state="warning"))
        return None
    share_compile_cache()
    note("looking at what is free on the card")
    models = [load_config([str(PROJECT / f"config/{name}.py")]) for name in MODELS]
    setups = [_setup(settings.shape, device) for settings in models]
    look = _look(setups[0], device)
    limit_bytes = usable_bytes(look.free_bytes, run)
    sizes = [
        _largest(setup, settings.learn, limit_bytes - look.used_bytes)
        for setup, settings in zip(setups, models, strict=True)
    ]
    fitting = [pair for pair in zip(setups, sizes, strict=True) if pair[1]]
    fitting += [(replace(setup, compiled=True), size) for setup, size in fitting[-1:]]
    if not fitting:
        show(Finding("measured", "nothing: no model of the three fits into what is free"))
    known, steps = known_card(device.name, device.memory_mib), []
    for setup, size in fitting:
        long = ", compiled, which may take minutes" if setup.compiled else ""
        note(
            f"training {compact(setup.shape.parameters)} parameters, {size} sequences at once{long}"
        )
        trial = run_trial(setup, size, device=str(device.torch_device), limit_bytes=limit_bytes)
        steps.append(_step(setup, size, look, trial))
        show(_finding(steps[-1], known, trial.reason))
    return _report(device, look, steps)


def _look(setup: Setup, device: Device) -> TrialResult:
    """The card as it is before anything is trained on it."""
    look = run_trial(setup, 0, device=str(device.torch_device), limit_bytes=None)
    if look.reason:
        raise InputError(
            f"{device.torch_device} cannot be used ({look.reason}); end what else uses it, or "
            "restart the machine"
        )
    return look


def _setup(shape: GPTConfig, device: Device) -> Setup:
    return Setup(shape, dtype=device.precision, has_flash=device.has_flash)


def _largest(setup: Setup, learn: TrainConfig, room_bytes: int) -> int:
    """The largest micro-batch that should fit, eager and compiled, up to the config's; 0: none."""
    needs = [need_of(setup), need_of(replace(setup, compiled=True))]
    fits = min([learn.batch_size, *(need.largest(room_bytes) for need in needs)])
    return max((size for size in sizes_for(learn.sequences_per_step) if size <= fits), default=0)


def _step(setup: Setup, size: int, look: TrialResult, trial: TrialResult) -> MeasuredStep:
    shape = setup.shape
    return MeasuredStep(
        n_layer=shape.n_layer,
        n_head=shape.n_head,
        n_embd=shape.n_embd,
        block_size=shape.block_size,
        vocab_size=shape.vocab_size,
        micro_batch_size=size,
        passes=PASSES,
        compiled=setup.compiled,
        survived=trial.peak_bytes is not None,
        forecast_bytes=round(need_of(setup).at(size)) + look.held_bytes,
        allocated_bytes=trial.peak_allocated_bytes or 0,
        reserved_bytes=trial.peak_bytes or 0,
        spilled_bytes=trial.spilled_bytes,
        tokens_per_s=trial.tokens_per_s,
    )


def _report(device: Device, look: TrialResult, steps: list[MeasuredStep]) -> CardReport:
    card, driver = torch.cuda.get_device_properties(device.torch_device), look_at_driver()
    bus = (card.pci_domain_id, card.pci_bus_id, card.pci_device_id)
    own = [one for one in (driver.cards if driver else ()) if one.pci_bus == bus]
    report = CardReport(
        card=in_words(device.name.removeprefix("NVIDIA ")),
        memory_mib=device.memory_mib,
        capability=f"{card.major}.{card.minor}",
        watts=(own[0].watts if own else None) or 0.0,
        dtype=device.precision,
        system=this_system().kind,
        driver=in_words(driver and driver.version),
        cuda=in_words(torch.version.cuda),  # which ROCm has not
        torch=in_words(torch.__version__),
        context_bytes=look.context_bytes or 0,
        library_bytes=look.used_bytes + look.library_bytes,
        steps=tuple(steps),
    )
    try:
        return CardReport.told(asdict(report))  # as whoever it is sent to will read it
    except ValueError as error:
        raise InputError(
            f"what was measured cannot be true: {error}; measure again when nothing else uses the "
            "card"
        ) from error


def _finding(one: MeasuredStep, known: Card | None, reason: str) -> Finding:
    """Outcome beside forecast; what there is no forecast of is left out."""
    stage = "compiled" if one.compiled else "eager"
    step = measured_step(one)
    text = f"{compact(step.parameters)} parameters, {stage}, "
    text += f"{one.micro_batch_size} × {one.block_size}: "
    if not one.survived:
        forecast = f"{one.forecast_bytes / MIB:,.0f} MiB were forecast to fit"
        return Finding(
            "measured", f"{text}it did not survive ({reason}); {forecast}", "", "warning"
        )
    text += f"{one.allocated_bytes / MIB:,.0f} MiB "
    text += f"({one.allocated_bytes / one.forecast_bytes - 1:+.1%} to the forecast), "
    text += f"{compact(one.tokens_per_s)} tokens/s"
    if known:
        planned = predicted_tokens_per_s(known, step, compiled=one.compiled)
        text += f" ({one.tokens_per_s / planned - 1:+.0%} to the plan)"
    return Finding("measured", text)
