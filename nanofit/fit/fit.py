"""The fit of a run: micro-batch sizes that survive on this machine, forecast and then proven."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from nanofit.cache import keep, recall
from nanofit.fit.search import find_largest, sizes_for
from nanofit.fit.trial import TrialResult, run_trial
from nanofit.machine.device import Device
from nanofit.machine.dist import Ranks
from nanofit.machine.overhead import overhead_of, remember_overhead
from nanofit.memory.budget import smallest_card, usable_bytes
from nanofit.memory.course import Curve
from nanofit.memory.need import need_of
from nanofit.memory.savers import budgets_for
from nanofit.memory.setup import Setup
from nanofit.settings.config import RunConfig, Settings
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, parse_size

MIB = 2**20
FREE_CLASS = 0.01  # of a card: free memory that differs by less does not change a fit
MOST_LOGITS = 2**31  # more in one tensor is an illegal access rather than an out-of-memory
MOST_RETRIES = 3  # of the allocator: in a trial, or between two looks of a run
HOPELESS = 1.12  # times what is usable: of one short sequence a forecast is up to 10 % too high
GOOD_AS_FASTEST = 0.98  # of the best measured speed
CLIFF = 0.5  # of the speed of a smaller micro-batch: memory has spilled to the host
AMPLE = 0.5  # of what is usable: what needs no more than that is not tried again once compiled
MOST_SPILLED_BYTES = 64 * MIB  # what drivers count differently is no spill


@dataclass(frozen=True)
class StagePlan:
    """What was found to fit, before the run."""

    eager_size: int
    compiled_size: int
    compile_after: int | None  # None: never
    recompute: str = "off"
    activation_memory_budget: float = 1.0


@dataclass(frozen=True)
class Savers:
    """What trades time for memory: in the eager stage, in the compiled one, in the optimiser."""

    recompute: str = "off"
    activation_memory_budget: float = 1.0
    optimizer_bits: int = 32


def ladder(setup: Setup) -> tuple[Savers, ...]:
    """Savers from cheap to dear."""
    least = budgets_for(setup)[-1]
    return (
        Savers(),
        Savers("selective", 0.7),
        Savers("alternate", least),
        Savers("block", least),
        Savers("block", least, optimizer_bits=8),
    )


@dataclass(frozen=True)
class StageFit:
    """The micro-batch of one stage; what was not measured is None."""

    size: int
    peak_bytes: int | None = None
    peak_allocated_bytes: int | None = None  # of that by tensors
    tokens_per_s: float | None = None
    trials: int = 0
    why: str = ""


@dataclass(frozen=True)
class Fit:
    """What was found to fit, before the run."""

    eager: StageFit
    compiled: StageFit | None
    savers: Savers = Savers()
    limit_bytes: int | None = None
    seconds: float = 0.0
    is_remembered: bool = False

    def plan(self, compile_after: int | None) -> StagePlan:
        """The stages of a run that fits like this."""
        return StagePlan(
            self.eager.size,
            (self.compiled or self.eager).size,
            compile_after,
            self.savers.recompute,
            self.savers.activation_memory_budget,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def told(self) -> dict[str, Any]:
        """For the log: what was chosen."""
        sizes = {"micro_batch": self.eager.size}
        if self.compiled:
            sizes["compiled_micro_batch"] = self.compiled.size
        if self.limit_bytes is not None:
            sizes["limit_mib"] = round(self.limit_bytes / MIB)
        return sizes if self.savers == Savers() else {**sizes, "savers": _told(self.savers)}

    def lines(self, sequences: int) -> Iterator[str]:
        """What, why, how sure; nothing about a micro-batch that was simply given."""
        if not self.eager.trials:
            return
        stages = [("eager", self.eager)] + [("compiled", self.compiled)] * bool(self.compiled)
        yield "fit     " + ", then ".join(
            f"{stage.size} × {-(-sequences // stage.size)} {name}" for name, stage in stages
        )
        yield f"why     {self._savers_text()}" + "; ".join(
            f"{name} {self._need_text(stage)}{stage.why}" for name, stage in stages
        )
        trials = sum(stage.trials for _, stage in stages)
        source = "remembered from" if self.is_remembered else "proven by"
        many = "s" if trials > 1 else ""
        yield f"sure    {source} {trials} trial{many} of two real steps, {self.seconds:.0f} s"

    def _need_text(self, stage: StageFit) -> str:
        if stage.peak_bytes is None:
            return ""
        return f"needs {stage.peak_bytes / MIB:,.0f} of {self.limit_bytes / MIB:,.0f} MiB, "

    def _savers_text(self) -> str:
        return "" if self.savers == Savers() else f"with {_told(self.savers)}: "


def find_fit(
    settings: Settings,
    device: Device,
    ranks: Ranks,
    trial: Callable[..., TrialResult] = run_trial,
) -> Fit:
    """The micro-batches of a run; all processes get the smallest that any of them found."""
    _, learn, run = settings
    share = learn.sequences_per_step // ranks.world
    given = Savers(run.recompute, run.activation_memory_budget, run.optimizer_bits)
    if run.eval_only or not (run.autofit and _is_bounded(device, run)):
        size = StageFit(min(learn.batch_size, share))
        limit_bytes = run.memory_limit and parse_size(run.memory_limit)
        return Fit(size, size if run.compile else None, given, limit_bytes)
    fitter = _Fitter(settings, device, share, ranks.say, trial)
    with ranks.all_or_none():
        fit = fitter.fit(given)
    return replace(
        fit,
        # 8 bits take less than 32: who has room for these has room for those.
        savers=replace(fit.savers, optimizer_bits=ranks.least(fit.savers.optimizer_bits)),
        eager=replace(fit.eager, size=ranks.least(fit.eager.size)),
        compiled=_least_of_all(fit.compiled, ranks),
    )


def _is_bounded(device: Device, run: RunConfig) -> bool:
    """Whether there is a limit to fit."""
    if device.type == "cuda":
        return True
    return run.memory_limit is not None


def _least_of_all(stage: StageFit | None, ranks: Ranks) -> StageFit | None:
    """The smallest size of a stage; None if any process has none."""
    size = ranks.least(stage.size if stage else 0)
    return replace(stage, size=size) if size else None


class _Fitter:
    """Finds the fit of one process."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        share: int,
        say: Callable[[str], None],
        trial: Callable[..., TrialResult] = run_trial,
    ):
        self._shape, self._learn, self._run = settings
        self._device, self._share, self._say = device, share, say
        self._trial = trial
        self._setup = Setup(
            self._shape,
            dtype=device.precision,
            loss=self._run.loss,
            optimizer=self._learn.optimizer,
            has_flash=device.has_flash,
            deterministic=self._run.deterministic,
        )
        self._name = str(device.torch_device)
        self._look = TrialResult()  # until somebody has looked

    def fit(self, given: Savers) -> Fit:
        started = time.monotonic()
        if self._device.memory_bytes is None:  # what is given bounds it alone: no need to look
            known = recall("fit", self._key(given, parse_size(self._run.memory_limit)))
            if known:
                return _fit_from(known)
        self._say("autofit: looking at the memory that is there")
        limit_bytes, base_bytes = self._room()
        key = self._key(given, limit_bytes)
        if known := recall("fit", key):
            return _fit_from(known)
        self._say("autofit: forecasting the memory of a step")
        fit = self._climb(given, limit_bytes, base_bytes)
        fit = replace(fit, seconds=time.monotonic() - started)
        keep("fit", key, asdict(fit))
        return fit

    def _room(self) -> tuple[int, int]:
        """How much may be used, and what is used of it by no tensor of ours."""
        look = self._trial(self._setup, 0, device=self._name, limit_bytes=None)
        if look.reason:
            raise InputError(f"autofit cannot use {self._name}: {look.reason}")
        self._look = look
        limits = [usable_bytes(look.free_bytes, self._run)] if look.free_bytes else []
        if self._run.memory_limit is not None:
            limits.append(parse_size(self._run.memory_limit))
        if not limits:
            raise InputError(f"{self._name} has no free memory; end what uses it, or wait")
        if look.context_bytes:
            library_bytes = look.used_bytes + look.library_bytes  # in torch's memory and outside
            remember_overhead(self._device.name, look.context_bytes, library_bytes)
        return self._in_classes(min(limits)), look.used_bytes

    def _in_classes(self, limit_bytes: int) -> int:
        """A fit is for a class of free memory, which changes all the time: so it is remembered."""
        is_given = self._run.memory_limit is not None
        step = 1 if is_given else int(FREE_CLASS * self._device.memory_bytes)
        return limit_bytes // step * step

    def _key(self, given: Savers, limit_bytes: int) -> tuple:
        run = self._run
        return (
            self._setup,
            given,
            self._share,
            self._learn.batch_size if run.savers == "auto" else None,
            run.compile,
            run.autofit_goal,
            self._device.name,
            self._device.driver,
            torch.get_num_threads(),
            limit_bytes,
        )

    def _climb(self, given: Savers, limit_bytes: int, base_bytes: int) -> Fit:
        """The cheapest savers that suffice, or else those with which most fits."""
        wanted = min(self._learn.batch_size, self._share) if self._run.savers == "auto" else 1
        rungs, fitting = self._rungs(given), {}
        for rung in rungs:
            fitting[rung] = self._forecast_largest(rung, limit_bytes - base_bytes)
            if fitting[rung] is not None and fitting[rung] >= wanted:
                break
        hopeful = [rung for rung in rungs if fitting.get(rung, 0) is not None]
        for rung in sorted(hopeful, key=lambda rung: -min(fitting.get(rung, -1), wanted)):
            eager, *compiled = self._stages(rung)
            eager_fit = self._prove(eager, base_bytes, limit_bytes)
            if eager_fit.size:
                compiled_fit = compiled and (
                    self._ample(*compiled, eager_fit, base_bytes, limit_bytes)
                    or self._prove_compiled(*compiled, base_bytes, limit_bytes)
                )
                return Fit(eager_fit, compiled_fit or None, rung, limit_bytes)
        raise InputError(self._what_would_fit(rungs[-1], base_bytes, limit_bytes))

    def _forecast_largest(self, savers: Savers, room_bytes: int) -> int | None:
        """What should fit in all stages; None where no error of the forecast makes one sequence."""
        eager, *compiled = self._stages(savers)
        need = need_of(eager)
        if need.at(1) > HOPELESS * room_bytes:
            return None
        return min(one.largest(room_bytes) for one in (need, *map(need_of, compiled)))

    def _rungs(self, given: Savers) -> list[Savers]:
        """What is given, and what saves more than that and is possible here."""
        rungs = ladder(self._setup)
        position = rungs.index(given) if given in rungs else 0
        can_quantize = find_spec("torchao") is not None and self._run.on_spike != "skip"
        higher = rungs[position + 1 :]
        return [given, *(rung for rung in higher if rung.optimizer_bits == 32 or can_quantize)]

    def _ample(
        self, setup: Setup, eager: StageFit, base_bytes: int, limit_bytes: int
    ) -> StageFit | None:
        """The whole step at once, where that is so far from the limit that nothing is to be proven.

        A trial would compile, for which one would wait. The run tries what it has compiled anyway.
        """
        whole, most_bytes = self._sizes()[-1], AMPLE * limit_bytes
        needs_bytes = max(need_of(setup).at(whole) + base_bytes, eager.peak_bytes)
        is_whole = eager.size == whole and self._run.autofit_goal != "fastest"
        if not is_whole or needs_bytes > most_bytes:
            return None
        return StageFit(whole, why="is the whole step too, and needs no trial")

    def _prove_compiled(self, setup: Setup, base_bytes: int, limit_bytes: int) -> StageFit | None:
        """None where it does not work out: the run will find that out for itself, and go on."""
        try:
            found = self._prove(setup, base_bytes, limit_bytes)
        except InputError as error:
            self._say(f"autofit: no size for the compiled stage: {error}")
            return None
        return found if found.size else None

    def _stages(self, savers: Savers) -> list[Setup]:
        eager = replace(self._setup, **asdict(savers))
        return [eager, replace(eager, compiled=True)] if self._run.compile else [eager]

    def _prove(self, setup: Setup, base_bytes: int, limit_bytes: int) -> StageFit:
        """Search by trials, from the forecast on."""
        name = "compiled" if setup.compiled else "eager"
        survived: dict[int, TrialResult] = {}
        tried: list[int] = []
        peaks_key = setup, self._device.name, self._device.driver, torch.get_num_threads()
        peaks = {int(size): peak for size, peak in (recall("peaks", peaks_key) or {}).items()}

        def attempt(size: int) -> TrialResult:
            long = "; to compile may take minutes, once" if setup.compiled else ""
            self._say(f"autofit {name}: trying {size} sequences at once{long}")
            tried.append(size)
            trial = self._trial(setup, size, device=self._name, limit_bytes=limit_bytes)
            if trial.peak_bytes is None and not trial.is_too_large:
                raise InputError(f"a trial failed: {trial.reason}")
            smaller = [other for one, other in survived.items() if one < size]
            trial = judged(trial, [other.tokens_per_s for other in smaller])
            if trial.peak_bytes:
                survived[size], peaks[size] = trial, trial.peak_bytes
            return trial

        need, measured = need_of(setup), _measured_curve(peaks)
        forecast = measured.at if measured else lambda size: need.at(size) + base_bytes
        found = find_largest(self._sizes(), forecast, limit_bytes, attempt)
        keep("peaks", peaks_key, peaks)
        if not found.size:
            return StageFit(0, trials=len(tried))
        size = found.size
        if self._run.autofit_goal == "fastest":
            size = self._fastest(size, attempt, survived)
        best = survived[size]
        return StageFit(
            size,
            best.peak_bytes,
            best.peak_allocated_bytes,
            best.tokens_per_s,
            trials=len(tried),
            why=found.why,
        )

    def _sizes(self) -> list[int]:
        sizes = sizes_for(self._share)
        if self._run.loss == "full":
            logits = self._shape.block_size * self._shape.vocab_size
            sizes = [size for size in sizes if size * logits < MOST_LOGITS]
        return sizes

    def _fastest(self, largest: int, attempt: Callable, survived: dict[int, TrialResult]) -> int:
        """The smallest micro-batch as fast as any: others of half and a quarter are tried."""
        for part in (2, 4):
            smaller = [size for size in self._sizes() if size <= largest // part]
            if smaller and smaller[-1] not in survived:
                attempt(smaller[-1])
        good = GOOD_AS_FASTEST * max(trial.tokens_per_s for trial in survived.values())
        return min(size for size, trial in survived.items() if trial.tokens_per_s >= good)

    def _what_would_fit(self, savers: Savers, base_bytes: int, limit_bytes: int) -> str:
        """For who has tried everything: what one sequence needs, and what would fit here."""
        eager, *_ = self._stages(savers)
        # What is offered must fit: forecasts of 8-bit moments have been too low where the embedding
        # is most of the model.
        surer = replace(eager, optimizer_bits=32)

        def needed(shape: GPTConfig) -> int:
            return need_of(replace(surer, shape=shape)).at(1) + base_bytes

        least = need_of(eager).at(1) + base_bytes
        told = (
            f"not even one sequence fits: with all savers it needs about {least / MIB:,.0f} MiB, "
            f"{limit_bytes / MIB:,.0f} are usable. "
        )
        smaller = [
            f"--{name}={size} ({needed(shape) / MIB:,.0f} MiB)"
            for name in ("block_size", "n_embd", "n_layer")
            for size, shape in _halved(self._shape, name, lambda one: needed(one) <= limit_bytes)
        ]
        if smaller:
            told += f"What would fit: {' or '.join(smaller)}. "
        return f"{told}For this one: {self._larger(least, limit_bytes)}"

    def _larger(self, needed_bytes: int, limit_bytes: int) -> str:
        """Where so much would be usable, which here is not."""
        if self._run.memory_limit is not None:
            return f"--memory_limit={-(-needed_bytes // MIB)}MiB"
        context_bytes = overhead_of(self._device.name).context_bytes
        own_bytes = self._device.memory_bytes - context_bytes - self._look.library_bytes
        at_best_bytes = self._in_classes(usable_bytes(own_bytes, self._run))
        if at_best_bytes > limit_bytes and at_best_bytes >= needed_bytes:
            others_bytes = own_bytes - self._look.free_bytes
            return f"end what else uses this card, {others_bytes / MIB:,.0f} MiB"
        if card := smallest_card(max(needed_bytes, self._device.memory_bytes), self._run):
            return f"a card like the {card.name}"
        return "more than any known card has"


def _halved(
    shape: GPTConfig, name: str, fits: Callable[[GPTConfig], bool]
) -> Iterator[tuple[int, GPTConfig]]:
    """The largest of a half, a quarter and so on of one size that fits; nothing if none does."""
    size = getattr(shape, name)
    while size := size // 2:
        whole = size // shape.n_head * shape.n_head if name == "n_embd" else size
        smaller = replace(shape, **{name: whole})
        if any(smaller.problems()):
            return
        if fits(smaller):
            yield whole, smaller
            return


def judged(trial: TrialResult, smaller_speeds: list[float]) -> TrialResult:
    """A trial, as one that did not survive if it only seemed to."""
    if trial.peak_bytes is None:
        return trial
    if trial.spilled_bytes > MOST_SPILLED_BYTES:
        reason = f"{trial.spilled_bytes / MIB:,.0f} MiB spilled into the host's memory"
    elif smaller_speeds and trial.tokens_per_s < CLIFF * max(smaller_speeds):
        reason = "memory spilled: it was far slower"
    elif trial.retries > MOST_RETRIES:
        reason = f"{trial.retries} allocations had to be repeated"
    else:
        return trial
    return replace(trial, peak_bytes=None, is_too_large=True, reason=reason)


def _measured_curve(peaks: dict[int, int]) -> Curve | None:
    """What earlier trials tell: they are a better forecast than any simulation."""
    if len(peaks) < 2:
        return None
    curve = Curve.through(peaks)
    return curve if curve.bytes_per_sequence > 0 else None


def _told(savers: Savers) -> str:
    parts = []
    if savers.recompute != "off":
        parts.append(f"recompute {savers.recompute}")
    if savers.activation_memory_budget < 1:
        parts.append(f"activation budget {savers.activation_memory_budget} once compiled")
    if savers.optimizer_bits < 32:
        parts.append(f"{savers.optimizer_bits}-bit AdamW")
    return ", ".join(parts)


def _fit_from(kept: dict) -> Fit:
    compiled = kept["compiled"]
    return Fit(
        **{
            **kept,
            "eager": StageFit(**kept["eager"]),
            "compiled": StageFit(**compiled) if compiled else None,
            "savers": Savers(**kept["savers"]),
            "is_remembered": True,
        }
    )
