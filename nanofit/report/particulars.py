"""What a run is: model, device, data, and the settings in which it differs from others."""

from collections.abc import Iterator, Sequence
from typing import Any

from nanofit.report.history import History, Record, number_in
from nanofit.report.marks import shortened
from nanofit.report.sheets import UNKNOWN, sheet_of
from nanofit.settings.config import RunConfig, TrainConfig, flatten
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import compact, redacted

PATHS = {"out_dir"}  # differ between runs whatever they do


def settings_sheets(histories: Sequence[History], names: Sequence[str]) -> dict[str, Any]:
    """All settings beside their defaults: those that differ, and those that do not.

    Of several runs count the differences between them, of one that from the defaults.
    """
    defaults = flatten(GPTConfig(), TrainConfig(), RunConfig())
    chosen = [history.run["settings"] if history.run else {} for history in histories]
    compared = chosen if len(chosen) > 1 else [defaults, *chosen]
    differing, alike = [], []
    for name in dict.fromkeys((*defaults, *(key for values in chosen for key in values))):
        told = [shortened(values.get(name, UNKNOWN)) for values in (defaults, *chosen)]
        values = {shortened(values[name]) for values in compared if name in values}
        differs = len(values) > 1 and name not in PATHS
        (differing if differs else alike).append((name, *told))
    columns = ("setting", "default", *names)
    return {"differing": sheet_of(columns, differing), "alike": sheet_of(columns, alike)}


def facts_of(history: History) -> list[tuple[str, str]]:
    """What a run is, in a few lines."""
    if history.run is None:
        return [("run", "older than records of what a run is: settings and plan are not known")]
    return list(_facts(history.run, launches=len(history.runs)))


def _facts(run: Record, *, launches: int) -> Iterator[tuple[str, str]]:
    machine, data, settings = run["machine"], run["data"], run["settings"]
    shape = ("n_layer", "layers"), ("n_head", "heads"), ("n_embd", "wide")
    told = ", ".join(f"{_told(settings, name)} {word}" for name, word in shape)
    yield "model", f"{_compact(run, 'parameters')} parameters: {told}"
    device = f"{_told(machine, 'device')}, {_told(machine, 'precision')}"
    if number_in(machine, "processes", 1) > 1:
        device += f", {machine['processes']} processes"
    if peak := number_in(machine, "peak_flops"):
        device += f", {peak / 1e12:.3g} TFLOP/s at its peak"
    yield "device", device
    yield "data", _told(data, "folder")
    train, val = (_compact(data, f"{split}_tokens") for split in ("train", "val"))
    yield "tokens", f"{train} to learn from, {val} to validate on"
    yield "torch", _told(machine, "torch")
    yield "launches", f"{launches}"
    yield "command", redacted(str(run.get("command", UNKNOWN)))


def _told(values: Record, name: str) -> str:
    return shortened(values.get(name, UNKNOWN))


def _compact(values: Record, name: str) -> str:
    number = number_in(values, name)
    return UNKNOWN if number is None else compact(number)
