"""Settings: files of plain assignments and `--name=value` flags -> frozen, checked dataclasses.

Precedence: defaults < files < flags; some defaults depend on the optimiser or the architecture.
Files are parsed, never executed. Every problem in every file and flag is reported together, each
with the nearest known name or the way out.
"""

import difflib
import re
import sys
import types
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from nanofit.files import PROJECT
from nanofit.settings.assignments import evaluate, read_assignments
from nanofit.settings.shape import GPTConfig, Recompute
from nanofit.terminal import InputError, discard_output, parse_size, redacted

_TOO_MANY_LOGITS = 2**31  # for the kernels of a full loss, which count them in 32 bits
_MOST_SEQUENCES, _MOST_HOURS = 10**6, 10**6  # of a step, of a run: more is a slip
_MOST_PROBLEMS = 50  # told at once
ENDLESS = 10**9  # max_iters of a run in `hours` before its speed is known


@dataclass(frozen=True)
class TrainConfig:
    """What decides the result besides the model's shape; fixed for the life of a run."""

    batch_size: Annotated[int, "sequences in one forward and backward pass"] = 12
    gradient_accumulation_steps: Annotated[
        int, "passes per step; batch_size × this = sequences per step, over all processes"
    ] = 40
    max_iters: Annotated[int, "optimiser steps of the whole run"] = 600_000
    hours: Annotated[
        float | None, "end the decay in so many hours: the measured speed fixes max_iters"
    ] = None
    optimizer: Annotated[
        Literal["adamw", "muon"], "muon: for the blocks' matrices; AdamW for the rest"
    ] = "adamw"
    learning_rate: Annotated[float, "highest learning rate; with muon that of the matrices"] = 6e-4
    min_lr: Annotated[float, "learning rate at the end of the decay"] = 6e-5
    decay_lr: Annotated[bool, "follow lr_schedule; False keeps learning_rate throughout"] = True
    lr_schedule: Annotated[
        Literal["cosine", "wsd"], "cosine, or warm-up, stable, decay (a run that can be extended)"
    ] = "cosine"
    warmup_iters: Annotated[int, "steps of linear warm-up"] = 2000
    lr_decay_iters: Annotated[int | None, "step at which the decay ends; None: max_iters"] = None
    decay_fraction: Annotated[float, "last part of the schedule that decays, with wsd"] = 0.2
    weight_decay: Annotated[float, "decay of the matrices"] = 0.1
    beta1: Annotated[float, "AdamW's decay of the first moment"] = 0.9
    beta2: Annotated[float, "AdamW's decay of the second moment"] = 0.95
    grad_clip: Annotated[float, "largest gradient norm; 0 does not clip"] = 1.0
    embedding_rate: Annotated[float, "with muon: times learning_rate, for the embedding"] = 28.0
    head_rate: Annotated[float, "with muon: times learning_rate, for the head"] = 0.16
    vector_rate: Annotated[float, "with muon: times learning_rate, for gains and biases"] = 0.6
    muon_steps: Annotated[int, "Newton-Schulz steps of muon: 12, or 5 steeper ones"] = 12
    seed: Annotated[int, "decides initial weights, order of the data and dropout"] = 1337

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def newton_schulz_steps(self) -> int:
        """Of an update; none with AdamW alone."""
        return self.muon_steps if self.optimizer == "muon" else 0

    @property
    def decay_end(self) -> int:
        """The step at which the learning rate has reached min_lr."""
        return self.max_iters if self.lr_decay_iters is None else self.lr_decay_iters

    def adamw_rates(self, *, is_tied: bool) -> Iterator[tuple[str, float]]:
        """The highest learning rates of what Muon leaves to AdamW; a tied embedding is a head."""
        if not is_tied:
            yield "embedding", self.learning_rate * self.embedding_rate
        yield "head", self.learning_rate * self.head_rate
        yield "gains and biases", self.learning_rate * self.vector_rate

    def of_length(self, steps: int) -> "TrainConfig":
        """The same for a run of so many steps; the warm-up takes no more than a tenth of them."""
        ends = None if self.lr_decay_iters is None else steps
        warmup = min(self.warmup_iters, steps // 10)
        return replace(self, max_iters=steps, lr_decay_iters=ends, warmup_iters=warmup)

    def problems(self) -> Iterator[str]:
        yield from _below(self, 1, "batch_size", "gradient_accumulation_steps")
        yield from _below(self, 0, "max_iters", "warmup_iters", "lr_decay_iters", "seed")
        yield from _below(self, 0, "learning_rate", "min_lr", "weight_decay", "grad_clip")
        if self.sequences_per_step > _MOST_SEQUENCES:
            yield (
                f"batch_size × gradient_accumulation_steps = {self.sequences_per_step} must be at "
                f"most {_MOST_SEQUENCES}"
            )
        if self.hours is not None and not 0 < self.hours <= _MOST_HOURS:
            yield f"hours = {self.hours} must be above 0 and at most {_MOST_HOURS}"
        yield from _below(self, 0, "embedding_rate", "head_rate", "vector_rate")
        if self.muon_steps not in (5, 12):
            yield f"muon_steps = {self.muon_steps} must be 12 or 5"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name} = {getattr(self, name)} must be at least 0 and below 1"
        if not 0 < self.decay_fraction <= 1:
            yield f"decay_fraction = {self.decay_fraction} must be above 0 and at most 1"


@dataclass(frozen=True)
class RunConfig:
    """Where a run lives and how this machine carries it out; may change at every launch."""

    out_dir: Annotated[str, "folder of checkpoints and metrics.jsonl"] = "out"
    dataset: Annotated[str, "name of a folder in data/, or the path of one"] = "fineweb"
    init_from: Annotated[
        str, "auto: continue if out_dir holds a run | resume | scratch | a checkpoint or HF folder"
    ] = "auto"
    accept_new_data: Annotated[bool, "let a run go on with other data than it was begun with"] = (
        False
    )
    device: Annotated[str, "auto | cpu | cuda | cuda:1 | mps"] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], "precision of the matrix products"
    ] = "auto"
    deterministic: Annotated[
        bool, "the same run gives the same bits, on CUDA and on busy machines too"
    ] = False
    backend: Annotated[Literal["auto", "nccl", "gloo"], "how processes talk under torchrun"] = (
        "auto"
    )
    rank_timeout_s: Annotated[float, "seconds that such processes wait for one of them"] = 1800.0
    shard: Annotated[
        bool, "each of them keeps its part alone of weights, gradients and moments (FSDP2)"
    ] = False
    compile: Annotated[bool, "use torch.compile, falling back to eager if it fails"] = True
    compile_after: Annotated[int, "steps to run eagerly before compiling"] = 100
    loss: Annotated[
        Literal["chunked", "full"], "chunked never holds all logits; full is the plain way"
    ] = "chunked"
    autofit: Annotated[
        bool, "find the largest micro-batch that survives; False: batch_size as it is"
    ] = True
    autofit_goal: Annotated[
        Literal["largest", "fastest"], "or the smallest that is within 2 % of the fastest"
    ] = "largest"
    memory_limit: Annotated[
        str | None, "use no more than this, as in 10GB; on a CPU autofit needs it"
    ] = None
    memory_reserve: Annotated[
        str | None, "leave this much free, as in 512MB; None: 5 % and 128 MiB"
    ] = None
    savers: Annotated[
        Literal["off", "auto"], "auto trades as little time as makes batch_size fit"
    ] = "off"
    recompute: Annotated[
        Recompute, "what eager backward passes compute again instead of keeping it"
    ] = "off"
    activation_memory_budget: Annotated[
        float, "part of the activations that compiled passes may keep, from 0.1 to 1"
    ] = 1.0
    optimizer_bits: Annotated[int, "of AdamW's moments: 32, or 8 with torchao"] = 32
    on_spike: Annotated[
        Literal["stop", "skip", "rollback"],
        "when the loss diverges: stop | skip such updates | go back and past the data",
    ] = "stop"
    eval_interval: Annotated[int, "steps between evaluations"] = 2000
    eval_iters: Annotated[int, "validation sequences, in units of batch_size"] = 200
    eval_only: Annotated[bool, "evaluate once and stop"] = False
    log_interval: Annotated[int, "steps between log lines"] = 10
    save_interval: Annotated[int | None, "steps between checkpoints; None: eval_interval"] = None
    always_save_checkpoint: Annotated[
        bool, "save at every interval; False: when the validation loss improved, and at the end"
    ] = True
    keep_checkpoints: Annotated[int, "newest checkpoints to keep, besides the best"] = 3
    sample_interval: Annotated[
        int | None, "steps between samples of what it writes; None: eval_interval, 0: none"
    ] = None
    sample_prompts: Annotated[
        str, "what samples go on from, as in 'One day | The river'; empty: a document's beginning"
    ] = ""
    report: Annotated[bool, "write report.html into out_dir at every evaluation"] = True
    wandb_log: Annotated[bool, "log to Weights & Biases as well"] = False
    wandb_project: Annotated[str, "its project"] = "nanofit"
    wandb_run_name: Annotated[str | None, "its run name; None: the name of out_dir"] = None
    tensorboard_log: Annotated[bool, "write for TensorBoard as well, into out_dir"] = False

    @property
    def data_dir(self) -> Path:
        """The dataset's folder: in the project's data/ unless `dataset` is a path."""
        path = Path(self.dataset)
        is_path = len(path.parts) > 1 or "/" in self.dataset  # Path forgets the dot of ./name
        return path if is_path else PROJECT / "data" / path

    @property
    def save_every(self) -> int:
        return self.eval_interval if self.save_interval is None else self.save_interval

    @property
    def sample_every(self) -> int:
        """0: never."""
        return self.eval_interval if self.sample_interval is None else self.sample_interval

    @property
    def prompts(self) -> list[str]:
        return [prompt.strip() for prompt in self.sample_prompts.split("|")]

    def problems(self) -> Iterator[str]:
        yield from _below(self, 1, "eval_interval", "eval_iters", "log_interval")
        yield from _below(self, 1, "save_interval", "keep_checkpoints")
        yield from _below(self, 0, "compile_after", "sample_interval")
        yield from _below(self, 1, "rank_timeout_s")
        if not 0.1 <= self.activation_memory_budget <= 1:
            yield (
                f"activation_memory_budget = {self.activation_memory_budget} must be from 0.1 to "
                "1; near 0 so much is computed again that it takes more memory, not less"
            )
        if self.optimizer_bits not in (8, 32):
            yield f"optimizer_bits = {self.optimizer_bits} must be 8 or 32"
        if self.optimizer_bits == 8 and self.shard:
            yield "shard = True needs optimizer_bits = 32: 8-bit moments have scales in common"
        if self.optimizer_bits == 8 and self.on_spike == "skip":
            yield "on_spike = 'skip' needs optimizer_bits = 32: torchao's AdamW cannot skip a step"
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            yield f"device = {self.device!r} is not auto, cpu, mps, cuda or cuda:<number>"
        for name, value in vars(self).items():
            if isinstance(value, str) and redacted(value) != value:
                yield (
                    f"{name} holds a password or token, which checkpoints and reports would tell; "
                    "leave it to the environment"
                )
        for name in ("memory_limit", "memory_reserve"):
            value = getattr(self, name)
            try:
                parse_size("0" if value is None else value)
            except ValueError as error:
                yield f"{name}: {error}"


class Settings(NamedTuple):
    """All that was asked for: what learns, how it learns, where and how it runs."""

    shape: GPTConfig
    learn: TrainConfig
    run: RunConfig


SECTIONS = (GPTConfig, TrainConfig, RunConfig)

# With Muon other values suit, where none are given: those of modded-nanogpt's track 3, published
# for 124M parameters and 524,288 tokens a step.
WITH_MUON = dict(
    learning_rate=0.025,
    min_lr=0.0,
    lr_schedule="wsd",
    decay_fraction=0.7,
    warmup_iters=0,
    weight_decay=0.05,
    beta1=0.8,
    beta2=0.95,
    grad_clip=0.0,
)


WITH_MODERN = dict(bias=True)  # as published
_SUITED = {"optimizer": {"muon": WITH_MUON}, "arch": {"modern": WITH_MODERN}}


def load_config(argv: Sequence[str]) -> Settings:
    """Read settings from the words of a command line: config files and `--name=value` flags."""
    chosen, _ = _read(argv, _defaults())
    # Once more, so that expressions see the defaults which suit what was chosen.
    values, problems = _read(argv, _defaults(chosen))
    flags = {word.partition("=")[0] for word in argv}
    problems += _second_lengths(values, flags)
    settings = Settings(*(section(**_only(values, section)) for section in SECTIONS))
    problems += [problem for section in settings for problem in section.problems()]
    problems += _problems_between(*settings)
    if problems:
        many = f"{len(problems)} problems in the settings:\n  " if len(problems) > 1 else ""
        if len(problems) > _MOST_PROBLEMS:
            problems[_MOST_PROBLEMS:] = ["..."]
        raise InputError(many + "\n  ".join(problems))
    return settings


def given_values(argv: Sequence[str]) -> dict[str, Any]:
    """The settings that files and flags give a value, as far as they can be read."""
    given, _ = _read(argv, ChainMap({}, _defaults()))
    return given.maps[0]


def _read(
    argv: Sequence[str], values: MutableMapping[str, Any]
) -> tuple[MutableMapping[str, Any], list[str]]:
    """`values` with what files and flags make of them, and every problem met."""
    problems = []

    def assign(name: str, value: Any) -> None:
        values[name] = _checked(name, value)

    for path in (word for word in argv if not word.startswith("--")):
        problems += read_assignments(Path(path), values, assign)
    for flag in (word for word in argv if word.startswith("--")):
        problems += _read_flag(flag, values)
    return values, problems


def describe_knobs() -> str:
    """Every knob with its default and one line of meaning, for --help."""
    lines = []
    for section in SECTIONS:
        lines.append(f"\n{section.__doc__.splitlines()[0]}")
        for name, (kind, meaning) in _knobs(section).items():
            default = _defaults()[name]
            choices = f" [{' | '.join(map(str, get_args(kind)))}]" if _is_choice(kind) else ""
            suited = "".join(f" ({told})" for told in _suited_values(name))
            lines.append(f"  --{name}={default}\n        {meaning}{choices}{suited}")
    return "\n".join(lines)


def answer_help(argv: Sequence[str], purpose: str) -> None:
    """End the script with its purpose and all settings, if its command line asks for help."""
    if "--help" in argv or "-h" in argv:
        try:
            print(purpose + describe_knobs(), flush=True)
        except BrokenPipeError:  # `head` has seen enough
            discard_output()
        sys.exit()


def flatten(*sections: Any) -> dict[str, Any]:
    """All settings of some sections as one dictionary of plain values, for a checkpoint."""
    return {field.name: getattr(part, field.name) for part in sections for field in fields(part)}


def sound(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a file tells of a run, the settings that have a value they can have."""
    found = {}
    for name, value in values.items():
        with suppress(ValueError, TypeError, RecursionError):  # the last in telling of it
            found[name] = _checked(name, value)
    return found


def _second_lengths(values: Mapping[str, Any], flags: set[str]) -> Iterator[str]:
    """Flags that give a run in `hours` a length in steps; what files say of steps gives way."""
    if values["hours"] is None:
        return
    for name in ("max_iters", "lr_decay_iters"):
        if f"--{name}" not in flags or values[name] is None:
            continue
        if "--hours" in flags:
            yield f"--hours and --{name} each set the run's length; give one of them"
        else:
            yield (
                f"--{name} and a file's hours = {values['hours']:g} each set the run's length; "
                "add --hours=None"
            )


def _problems_between(shape: GPTConfig, learn: TrainConfig, run: RunConfig) -> Iterator[str]:
    """What no section can see alone."""
    if run.shard and learn.optimizer == "muon":
        yield (
            "shard = True needs optimizer = 'adamw': Muon makes whole matrices orthogonal, and no "
            "process has one"
        )
    logits = learn.batch_size * shape.block_size * shape.vocab_size
    is_full = run.loss == "full" and not run.autofit
    if is_full and shape.is_modern and logits >= _TOO_MANY_LOGITS:
        yield (
            f"loss = 'full' would cap batch_size × block_size × vocab_size = {logits:,} logits at "
            f"once, of which there must be less than {_TOO_MANY_LOGITS:,}; use --loss=chunked or a "
            "smaller batch_size"
        )


def _below(settings: Any, least: int, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            yield f"{name} = {value} must be at least {least}"


def _knobs(section: type) -> dict[str, tuple[Any, str]]:
    """Type and meaning of each setting of a section."""
    hints = get_type_hints(section, include_extras=True)
    return {name: get_args(hint) for name, hint in hints.items()}


@cache
def _all_knobs() -> dict[str, tuple[Any, str]]:
    return {name: knob for section in SECTIONS for name, knob in _knobs(section).items()}


def _defaults(chosen: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What holds where nothing is given; of some settings it depends on what was chosen."""
    values = {field.name: field.default for section in SECTIONS for field in fields(section)}
    for setting, by_choice in _SUITED.items():
        values |= by_choice.get((chosen or values)[setting], {})
    return values


def _suited_values(name: str) -> Iterator[str]:
    """The other defaults that a setting has with some choices."""
    for by_choice in _SUITED.values():
        for choice, values in by_choice.items():
            if values.get(name, _defaults()[name]) != _defaults()[name]:
                yield f"with {choice}: {values[name]}"


def _only(values: Mapping[str, Any], section: type) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(section)}


def _read_flag(flag: str, values: MutableMapping[str, Any]) -> Iterator[str]:
    """Take one `--name=value` into `values`; yield what is wrong with it."""
    name, has_value, text = flag.removeprefix("--").partition("=")
    try:
        kind, _ = _knob(name)
        if not has_value:
            raise ValueError(f"needs a value: --{name}=...")
        value = text if _takes_text(kind, text) else evaluate(text, values)
        values[name] = _checked(name, value)
    except ValueError as error:
        yield f"--{name}: {error}"


def _takes_text(kind: Any, text: str) -> bool:
    """Whether a flag's value is the text itself rather than an expression."""
    if _is_choice(kind):
        return True
    return str in (kind, *get_args(kind)) and not (text == "None" and _is_optional(kind))


def _knob(name: str) -> tuple[Any, str]:
    knobs = _all_knobs()
    if name not in knobs:
        nearest = difflib.get_close_matches(name, knobs, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "--help lists all settings"
        raise ValueError(f"unknown setting {name}; {hint}")
    return knobs[name]


def _checked(name: str, value: Any) -> Any:
    """`value` as the type that the setting `name` has, or ValueError."""
    kind, _ = _knob(name)
    if _is_choice(kind):
        if isinstance(value, str) and value in get_args(kind):
            return value
        raise ValueError(f"{name} = {value!r} must be one of {', '.join(get_args(kind))}")
    allowed = get_args(kind) if _is_optional(kind) else (kind,)
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) in allowed:  # not isinstance: True is an int, but not as a setting
        return value
    wanted = " or ".join("None" if one is types.NoneType else one.__name__ for one in allowed)
    raise ValueError(f"{name} = {value!r} must be {wanted}, not {type(value).__name__}")


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal


def _is_optional(kind: Any) -> bool:
    return isinstance(kind, types.UnionType)
