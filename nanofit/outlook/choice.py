"""What --model=auto chooses for a machine, its data and some hours, and why.

Of all shapes in GPT's proportions that fit, those are good from which the scaling law expects the
least loss in that time; the smallest of them is taken. What was given stays as it was given.
"""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nanofit.outlook.capacity import TOKENS_OF_A_PASS, Capacity
from nanofit.outlook.plan import Data, Plan, find_data, within_budget
from nanofit.outlook.scaling import (
    BATCH_EXPONENT,
    FEWEST_TOKENS,
    PUBLISHED_TOKENS_PER_STEP,
    effective_tokens,
    recipe_of,
    suited_tokens_per_step,
    trend,
)
from nanofit.settings.config import Settings, given_values, load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, compact, duration

AUTO = "--model=auto"
GOOD = 0.003  # of expected loss: so much above the lowest is as good
OTHERS, OTHER_SIZE = 2, 1.1  # choices told beside the one taken; sizes that differ by so much

# Of width for each layer. The law knows the number of parameters alone, and would take two broad
# layers; so the limits are ours. GPT-2's family has 33 to 64, the law's runs have 64.
NARROWEST, BROADEST = 32, 110
DEEPER = 1.15  # from one depth to the next: finer steps differ by less than the law can tell
WIDTHS = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256))
WIDTHS += tuple(range(2048, 4097, 512))
HEAD_WIDTHS = (128, 64)

BLOCK_SIZES = (1024, 512, 256, 128)  # the law's, and others for runs too short for it
FEWEST_STEPS, FEWEST_SEQUENCES = 300, 4  # of a run, and of its steps
FEW_TOKENS = 2**15  # of a step, whose time twelve Newton-Schulz steps would add much to
PLAIN_RATE, PLAIN_WIDTH, HIGHEST_RATE = 6e-4, 768, 1e-3  # GPT-3's rates fall as 1/width
COMPILING_S = 600.0  # a run shorter than this does not get back what compiling takes
EVALUATIONS, EVALUATION_S = 12, 60.0  # of a run, no closer than that: each saves and samples
EVALUATED_SHARE = 0.006  # of a run's sequences, at each of them
FEWEST_EVALUATED, MOST_EVALUATED = 32, 1600


class Recipe(NamedTuple):
    """How a model is made and learns."""

    arch: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.arch} + {self.optimizer}"


RECIPES = (Recipe("modern", "muon"), Recipe("gpt2", "adamw"))


class Candidate(NamedTuple):
    """A run that could be chosen."""

    settings: Settings
    tokens: float  # that it learns from in the hours
    loss: float  # by the law or, where that says nothing, by its trend
    is_known: bool  # whether the law says anything

    @property
    def shape(self) -> GPTConfig:
        return self.settings.shape

    def told(self) -> str:
        shape = self.shape
        loss = f", loss {self.loss:.2f}" if self.is_known else ""
        return (
            f"{shape.n_layer} layers, {shape.n_embd} wide ({compact(shape.parameters)} parameters"
            f"{loss})"
        )


class Reason(NamedTuple):
    """Some settings of a run, and why they are so."""

    topic: str
    why: str
    values: dict[str, Any]

    def told(self) -> str:
        values = ", ".join(f"{name} {value}" for name, value in self.values.items())
        return f"{values}: {self.why}"


@dataclass(frozen=True)
class Choice:
    """A run that was chosen, in as many steps as the expected speed allows."""

    words: tuple[str, ...]  # of the command line, without --model=auto
    plan: Plan
    reasons: tuple[Reason, ...]
    taken: Candidate
    others: tuple[Candidate, ...]  # the next best

    @property
    def command(self) -> str:
        """That chooses the same."""
        return shlex.join(["python", "train.py", AUTO, *self.words])

    def config(self) -> str:
        """A config file of it, with the reasons."""
        parts = [f'"""Chosen by {AUTO}; a config file like any other from now on."""']
        for topic, why, values in self.reasons:
            lines = (f"{name} = {value!r}" for name, value in values.items())
            parts.append("\n".join((f"# {topic}: {why}", *lines)))
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> dict[str, Any]:
        return {
            "command": self.command,
            "settings": {name: v for one in self.reasons for name, v in one.values.items()},
            "reasons": {one.topic: one.why for one in self.reasons},
            "others": [
                {name: getattr(one.settings.shape, name) for name in ("n_layer", "n_embd")}
                | {"tokens": round(one.tokens), "loss": one.loss if one.is_known else None}
                for one in self.others
            ],
        }


def take_auto(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the model is to be chosen, and the other words of a command line."""
    asked = [word for word in argv if word.partition("=")[0] == "--model"]
    for word in asked:
        if word != AUTO:
            raise InputError(
                f"{word}: {AUTO} is all there is; give a model by --n_layer, --n_head and --n_embd"
            )
    return bool(asked), [word for word in argv if word not in asked]


def read_asked(words: Sequence[str]) -> Settings:
    """What is asked for, with any shape; InputError if there is nothing to choose, or to go by."""
    settings = load_config([*words, *_any_shape(words)])
    if settings.learn.hours is None:
        raise InputError(f"{AUTO} chooses for a time: give --hours, as in --hours=5")
    if settings.run.init_from not in ("auto", "resume", "scratch"):
        raise InputError(
            f"{AUTO} chooses a new model, but --init_from={settings.run.init_from} brings its own; "
            "give one of them"
        )
    if settings.run.shard:
        raise InputError(f"{AUTO} chooses a model that each card holds whole; leave out --shard")
    if settings.run.loss == "full":
        raise InputError(
            f"{AUTO} weighs hundreds of models, whose memory is written down for loss = 'chunked' "
            "alone; leave out --loss=full, or name the model"
        )
    return settings


def _any_shape(words: Sequence[str]) -> Iterator[str]:
    """Flags for what must suit a width or a number of heads that was given alone."""
    given = given_values(words)
    n_embd, n_head = given.get("n_embd"), given.get("n_head")
    if n_head is None and n_embd is not None and n_embd > 0:
        yield f"--n_head={_heads(n_embd)}"
    elif n_embd is None and n_head is not None:
        yield f"--n_embd={HEAD_WIDTHS[0] * n_head}"


def data_for(words: Sequence[str], *, unique_tokens: int | None, shard: str | None) -> Data:
    """The data of a run to be chosen, which may have shorter blocks than any other."""
    settings = read_asked(words)
    if "block_size" not in given_values(words):
        settings = settings._replace(shape=replace(settings.shape, block_size=BLOCK_SIZES[-1]))
    return find_data(settings, unique_tokens=unique_tokens, shard=shard)


def choose(words: Sequence[str], capacity: Capacity, data: Data) -> Choice:
    """The best run that these words of a command line allow."""
    return _Question(words, capacity, data).answer()


def smallest(words: Sequence[str], capacity: Capacity, data: Data) -> Settings:
    """Of the runs that these words allow the one that takes the least time to try."""
    return _Question(words, capacity, data).smallest()


class _Question:
    """What was asked for, of which machine and data."""

    def __init__(self, words: Sequence[str], capacity: Capacity, data: Data):
        self.words, self.capacity, self.data = tuple(words), capacity, data
        self.asked, self.given = read_asked(words), given_values(words)
        self.hours = self.asked.learn.hours

    def answer(self) -> Choice:
        for block_size in self._block_sizes():
            rough = {one: self._rough(self._base(one, block_size)) for one in self._recipes()}
            recipe = _best_recipe(rough)
            good = self._fitting(rough[recipe])
            best = min(good, key=lambda one: one.loss)
            if best.tokens >= FEWEST_STEPS * FEWEST_SEQUENCES * block_size:
                break
        near = (one for one in good if one.loss <= best.loss + GOOD)
        taken = min(near, key=lambda one: one.shape.parameters)
        others = tuple(_others(good, taken))
        return Choice(self.words, *self._told(taken, others, rough), taken, others)

    def smallest(self) -> Settings:
        base = self._base(self._recipes()[0], self._block_sizes()[-1])
        shape = min(self._shapes(base.shape), key=lambda shape: shape.parameters)
        return _cut(base, shape, FEWEST_SEQUENCES, 2 * FEWEST_SEQUENCES)

    def _recipes(self) -> list[Recipe]:
        """Those that may be chosen; what was given may leave but one."""
        asked = Recipe(self.asked.shape.arch, self.asked.learn.optimizer)
        fixed = {name: value for name, value in asked._asdict().items() if name in self.given}
        allowed = [one for one in RECIPES if fixed.items() <= one._asdict().items()]
        return allowed or [asked]

    def _block_sizes(self) -> list[int]:
        if "block_size" in self.given:
            return [self.asked.shape.block_size]
        if self.data.all_tokens is None:
            return list(BLOCK_SIZES)
        least = min(self.data.train_tokens, self.data.all_tokens - self.data.train_tokens or 1e18)
        return [size for size in BLOCK_SIZES if size < least] or [BLOCK_SIZES[-1]]

    def _base(self, recipe: Recipe, block_size: int) -> Settings:
        """The settings that all candidates of a recipe have."""
        values = {**recipe._asdict(), "block_size": block_size, **self._compiling()}
        return load_config([*self.words, *_any_shape(self.words), *self._flags(values)])

    def _compiling(self) -> dict[str, Any]:
        is_short = 3600 * self.hours < COMPILING_S
        return {"compile": False} if is_short and "compile" not in self.given else {}

    def _flags(self, values: dict[str, Any]) -> list[str]:
        """For what was not given."""
        return [f"--{name}={value}" for name, value in values.items() if name not in self.given]

    def _shapes(self, shape: GPTConfig) -> Iterator[GPTConfig]:
        for n_embd in self._widths(shape):
            for n_layer in self._depths(shape, n_embd):
                n_head = shape.n_head if "n_head" in self.given else _heads(n_embd)
                yield replace(shape, n_layer=n_layer, n_head=n_head, n_embd=n_embd)

    def _widths(self, shape: GPTConfig) -> Sequence[int]:
        if "n_embd" in self.given:
            return [shape.n_embd]
        if "n_head" in self.given:
            return [width * shape.n_head for width in HEAD_WIDTHS]
        return WIDTHS

    def _depths(self, shape: GPTConfig, n_embd: int) -> Iterator[int]:
        fewest = max(-(-n_embd // BROADEST), 2)
        most = max(n_embd // NARROWEST, fewest)
        if "n_layer" in self.given:
            if "n_embd" in self.given or fewest <= shape.n_layer <= most:
                yield shape.n_layer
            return
        depth = fewest
        while depth <= most:
            yield depth
            depth = max(depth + 1, round(DEEPER * depth))

    def _rough(self, base: Settings) -> list[Candidate]:
        """All shapes, as if any micro-batch fitted; the best come first."""
        micro_batch_size = max(TOKENS_OF_A_PASS // base.shape.block_size, 1)
        sequences = max(PUBLISHED_TOKENS_PER_STEP // base.shape.block_size, micro_batch_size)
        found = [
            self._candidate(_cut(base, shape, micro_batch_size, sequences))
            for shape in self._shapes(base.shape)
        ]
        if not found:
            raise InputError(
                f"{AUTO} knows no width for n_layer = {base.shape.n_layer}: it takes "
                f"{NARROWEST} to {BROADEST} for each layer, at most {WIDTHS[-1]}; give --n_embd"
            )
        return sorted(found, key=lambda one: one.loss)

    def _fitting(self, rough: Sequence[Candidate]) -> list[Candidate]:
        """Of those that fit the best, and as many others, with the micro-batch that fits."""
        found: list[Candidate] = []
        for one in rough:
            lowest = min((other.loss for other in found), default=math.inf)
            if one.loss > lowest + GOOD and len(list(_others(found, found[0]))) >= OTHERS:
                break
            sequences = self._sequences(one)
            share = sequences // self.capacity.processes
            if micro_batch_size := self.capacity.largest_micro_batch(one.settings, share):
                cut = _cut(one.settings, one.shape, micro_batch_size, sequences)
                found.append(self._candidate(cut))
        if not found:
            smallest = min(rough, key=lambda one: one.shape.parameters)
            needed = self.capacity.needed_bytes(smallest.settings, 1)
            raise InputError(
                f"nothing that {AUTO} could choose fits {self.capacity.name}: "
                f"{smallest.told()}, needs {needed / 2**20:,.0f} MiB for one sequence, "
                f"{self.capacity.room_bytes / 2**20:,.0f} are usable; allow a smaller one"
            )
        return found

    def _sequences(self, one: Candidate) -> int:
        """Of a step: a power of two that suits the tokens of the run and leaves it enough steps."""
        learn, block_size = self.asked.learn, one.shape.block_size
        if {"batch_size", "gradient_accumulation_steps"} <= self.given.keys():
            if learn.sequences_per_step % self.capacity.processes:
                raise InputError(
                    f"{learn.sequences_per_step} sequences per step cannot be shared by "
                    f"{self.capacity.processes} processes; leave out batch_size, and {AUTO} takes "
                    "a multiple"
                )
            return learn.sequences_per_step
        tokens = min(suited_tokens_per_step(one.tokens), one.tokens / FEWEST_STEPS)
        suited = max(2 ** round(math.log2(tokens / block_size)), FEWEST_SEQUENCES)
        parts = [
            name for name in ("batch_size", "gradient_accumulation_steps") if name in self.given
        ]
        unit = math.prod(getattr(learn, name) for name in parts)
        unit = math.lcm(unit, self.capacity.processes)
        return max(round(suited / unit), 1) * unit

    def _candidate(self, settings: Settings) -> Candidate:
        """What such a run comes to in the hours."""
        processes, (shape, learn, _) = self.capacity.processes, settings
        share = max(learn.sequences_per_step // processes, learn.batch_size)
        of_process = _cut(settings, shape, learn.batch_size, share)
        tokens = 3600 * self.hours * processes * self.capacity.tokens_per_s(of_process)
        unique, is_modern = self.data.train_tokens, (shape.arch, learn.optimizer) == RECIPES[0]
        recipe = "modern" if is_modern else "plain"
        loss = trend(shape.law_parameters, tokens, unique, recipe)
        has_law = recipe_of(shape.arch, learn.optimizer, shape.vocab_size) is not None
        is_known = has_law and effective_tokens(tokens, unique) >= FEWEST_TOKENS
        return Candidate(settings, tokens, loss, is_known)

    def _told(
        self,
        taken: Candidate,
        others: Sequence[Candidate],
        rough: dict[Recipe, list[Candidate]],
    ) -> tuple[Plan, tuple[Reason, ...]]:
        """The plan of what was taken, and the reasons."""
        reasons = [self._given(), _recipe(taken, rough), self._shape(taken, others)]
        reasons.append(self._step(taken))
        plan = self._plan(reasons)
        reasons.append(_rates(plan))
        reasons.append(self._course(plan))
        plan = self._plan(reasons)
        reasons = [
            one._replace(values={k: v for k, v in one.values.items() if k not in self.given})
            for one in reasons[1:]
        ]
        return plan, (self._given(), *(one for one in reasons if one.values))

    def _plan(self, reasons: Sequence[Reason]) -> Plan:
        values = {name: value for one in reasons for name, value in one.values.items()}
        words = (*self.words, *self._flags(values))
        settings = load_config(words)
        speed = self.capacity.speed(settings)
        speed = speed._replace(tokens_per_s=speed.tokens_per_s * self.capacity.processes)
        length = dict(hours=self.hours, tokens=None, epochs=None)
        settings = within_budget(settings, self.data, speed, **length)
        return Plan(words, settings, self.data, speed, self.capacity.gpu)

    def _given(self) -> Reason:
        return Reason("given", "by files or flags", self.given)

    def _shape(self, taken: Candidate, others: Sequence[Candidate]) -> Reason:
        shape = taken.shape
        values = {name: getattr(shape, name) for name in ("n_layer", "n_head", "n_embd")}
        values["block_size"] = shape.block_size
        why = f"{taken.told()} sees {compact(taken.tokens)} tokens in {duration(3600 * self.hours)}"
        if taken.is_known:
            why += f"; of those within {GOOD} of the least loss the smallest"
        else:
            why += ", too few for the law, whose trend is for small models then"
        if others:
            why += f"; next best: {'; '.join(one.told() for one in others)}"
        return Reason("shape", why, values)

    def _step(self, taken: Candidate) -> Reason:
        learn, capacity = taken.settings.learn, self.capacity
        sequences = learn.sequences_per_step
        size = self.asked.learn.batch_size if "batch_size" in self.given else learn.batch_size
        if "gradient_accumulation_steps" in self.given:
            size = sequences // self.asked.learn.gradient_accumulation_steps
        why = (
            f"{compact(sequences * taken.shape.block_size)} tokens suit so many in all (as "
            f"tokens^{BATCH_EXPONENT}, arXiv:2505.13738) and leave enough steps"
        )
        if capacity.room_bytes:
            needed = capacity.needed_bytes(taken.settings, learn.batch_size)
            why += (
                f"; {learn.batch_size} sequences at a time need {needed / 2**20:,.0f} of "
                f"{capacity.room_bytes / 2**20:,.0f} MiB"
            )
        return Reason("step", why, _batch(size, sequences))

    def _course(self, plan: Plan) -> Reason:
        learn, steps = plan.learn, plan.learn.max_iters
        evaluations = min(max(3600 * self.hours / EVALUATION_S, 1), EVALUATIONS)
        evaluated = EVALUATED_SHARE * steps * learn.sequences_per_step
        evaluated = min(max(evaluated, FEWEST_EVALUATED), MOST_EVALUATED)
        values = {
            "eval_interval": max(int(float(f"{steps / evaluations:.1g}")), 1),
            "eval_iters": max(round(evaluated / learn.batch_size), 1),
            "log_interval": min(max(steps // 100, 1), 10),
            **(self._compiling() or {"compile_after": min(max(steps // 50, 10), 100)}),
        }
        where = (
            plan.speed.source if plan.speed.card is None else f"expected of {plan.speed.card.name}"
        )
        why = (
            f"about {steps:,} steps in {duration(3600 * self.hours)} at "
            f"{compact(plan.speed.tokens_per_s)} tokens/s, {where}; "
            "the speed that the run measures decides"
        )
        if self._compiling():
            why += "; compiling would not pay"
        return Reason("course", why, values)


def _batch(batch_size: int, sequences: int) -> dict[str, int]:
    passes = -(-sequences // batch_size)
    return {"batch_size": batch_size, "gradient_accumulation_steps": passes}


def _cut(settings: Settings, shape: GPTConfig, micro_batch_size: int, sequences: int) -> Settings:
    """The settings with a shape and a step's sequences in such passes."""
    learn = replace(settings.learn, **_batch(micro_batch_size, sequences))
    return settings._replace(shape=shape, learn=learn)


def _heads(n_embd: int) -> int:
    widths = (*HEAD_WIDTHS, *range(HEAD_WIDTHS[0], 0, -4))
    return next((n_embd // width for width in widths if n_embd % width == 0), 1)


def _best_recipe(rough: dict[Recipe, list[Candidate]]) -> Recipe:
    """By the expected loss; where the law says nothing the first, which small runs speak for."""
    if all(found[0].is_known for found in rough.values()):
        return min(rough, key=lambda recipe: rough[recipe][0].loss)
    return next(iter(rough))


def _others(found: Sequence[Candidate], taken: Candidate) -> Iterator[Candidate]:
    """The next best that are not of nearly the same size as one told already."""
    told = [taken]
    for one in sorted(found, key=lambda one: one.loss):
        sizes = (one.shape.parameters / other.shape.parameters for other in told)
        if len(told) <= OTHERS and all(max(size, 1 / size) >= OTHER_SIZE for size in sizes):
            told.append(one)
            yield one


def _recipe(taken: Candidate, rough: dict[Recipe, list[Candidate]]) -> Reason:
    shape, learn, _ = taken.settings
    recipe = Recipe(shape.arch, learn.optimizer)
    if len(rough) == 1:
        why = "left by what was given"
    elif taken.is_known and all(found[0].is_known for found in rough.values()):
        ends = sorted((found[0].loss, str(one)) for one, found in rough.items())
        why = "expected loss at best " + ", ".join(f"{loss:.2f} by {name}" for loss, name in ends)
    else:
        why = "too few tokens for the law; small runs speak for it (bench/results/recipe.md)"
    return Reason("recipe", why, recipe._asdict())


def _rates(plan: Plan) -> Reason:
    learn, steps = plan.learn, plan.learn.max_iters
    tokens_per_step = plan.forecast.tokens_per_step
    if learn.optimizer == "adamw":
        by_batch = math.sqrt(tokens_per_step / PUBLISHED_TOKENS_PER_STEP)
        rate = min(PLAIN_RATE * PLAIN_WIDTH / plan.shape.n_embd * by_batch, HIGHEST_RATE)
        rate = float(f"{rate:.2g}")
        decay = learn.weight_decay if plan.weight_decay is None else plan.weight_decay
        values = {"learning_rate": rate, "min_lr": float(f"{rate / 10:.2g}"), "weight_decay": decay}
        values |= {"lr_schedule": "wsd", "warmup_iters": min(steps // 20, learn.warmup_iters)}
        return Reason(
            "rates", "GPT-3's by width, with √batch; decay by parameters for tokens", values
        )
    names = ("learning_rate", "embedding_rate", "head_rate", "weight_decay")
    values = plan.muon_settings or {name: getattr(learn, name) for name in names}
    why = "modded-nanogpt's track 3, by nanochat's rules for this width, batch and data"
    if plan.muon_settings is None:
        why = "modded-nanogpt's track 3 as published: no rule is known for so few tokens"
    if tokens_per_step < FEW_TOKENS:
        values["muon_steps"] = 5
    return Reason("rates", why, values)
