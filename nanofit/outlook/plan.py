"""A run, its data and its machine: what it costs, what it gives, what would be better."""

import math
import shlex
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nanofit.data.parquet import mean_token_count
from nanofit.data.shards import find_shards, open_shards
from nanofit.data.tokens import open_bins
from nanofit.machine.cards import Card, find_card
from nanofit.outlook.forecast import (
    COMPILE_GAIN,
    PUBLISHED_RUNS,
    Forecast,
    expected_share,
    measured_share,
    predicted_tokens_per_s,
    reached_share,
    step_of,
)
from nanofit.outlook.links import (
    Link,
    Traffic,
    find_link,
    link_of,
    replicated_traffic,
    sharded_traffic,
)
from nanofit.outlook.roofline import Step, seconds_by_part
from nanofit.outlook.scaling import (
    FADING_EPOCHS,
    FEWEST_TOKENS,
    LIKE_NEW_EPOCHS,
    model_for,
    muon_factors,
    optimal_tokens,
    recipe_of,
    weight_decay_for,
)
from nanofit.settings.config import WITH_MUON, RunConfig, Settings, TrainConfig, load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError, compact, duration

VAL_FRACTION = 0.01  # prepare_fineweb.py's default
BIN_BYTES_PER_TOKEN = 2
CHECKPOINT_BYTES_PER_PARAMETER = 4 + 8  # fp32 weight and AdamW's two moments
NO_MATTER = 0.02  # by which a rate or a decay may differ from what is advised


class Data(NamedTuple):
    """The tokens there are to learn from, as far as is known before training."""

    train_tokens: int | None
    all_tokens: int | None
    source: str


class Shards(NamedTuple):
    """Files of documents that are not yet prepared."""

    files: int
    size_bytes: int
    tokens: int | None  # None: they do not tell


class Spread(NamedTuple):
    """A step of a run that several cards share, as arithmetic has it."""

    world: int
    shard: bool
    link: Link
    traffic: Traffic
    computing_s: float
    waiting_s: float
    overlaps: bool

    @property
    def launcher(self) -> list[str]:
        """What starts such a run, on one machine."""
        return ["torchrun", "--standalone", f"--nproc_per_node={self.world}"]

    @property
    def waiting_share(self) -> float:
        return self.waiting_s / (self.computing_s + self.waiting_s)

    def as_json(self) -> dict[str, Any]:
        return {
            "gpus": self.world,
            "is_sharded": self.shard,
            "link": self.link.name,
            "link_bytes_per_s": self.link.bytes_per_s,
            "sent_bytes_per_step": round(self.traffic.step_bytes),
            "overlaps": self.overlaps,
            "computing_s": self.computing_s,
            "waiting_s": self.waiting_s,
            "waiting_share": self.waiting_share,
        }


class Speed(NamedTuple):
    tokens_per_s: float
    card: Card | None
    source: str
    spread: Spread | None = None  # over several cards
    update_s: float = 0.0  # of a step, whatever its batch, where it was measured

    @property
    def watts(self) -> float | None:
        """Of all cards."""
        return self.card and self.card.watts * (self.spread.world if self.spread else 1)


@dataclass(frozen=True)
class Plan:
    """A run, its data and its machine; everything else follows."""

    words: tuple[str, ...]  # of the command line, that give the settings
    settings: Settings  # with the length that was asked for
    data: Data
    speed: Speed
    gpu: str | None  # the card asked for; None: the one that is here

    @property
    def shape(self) -> GPTConfig:
        return self.settings.shape

    @property
    def learn(self) -> TrainConfig:
        return self.settings.learn

    @property
    def run(self) -> RunConfig:
        return self.settings.run

    @property
    def forecast(self) -> Forecast:
        return Forecast(
            parameters=self.shape.law_parameters,
            steps=self.learn.max_iters,
            tokens_per_step=self.learn.sequences_per_step * self.shape.block_size,
            decay_end=self.learn.decay_end if self.learn.decay_lr else None,
            unique_tokens=self.data.train_tokens,
            tokens_per_s=self.speed.tokens_per_s,
            watts=self.speed.watts,
            recipe=recipe_of(self.shape.arch, self.learn.optimizer, self.shape.vocab_size),
        )

    @property
    def better(self) -> Forecast:
        """The same run no longer than its data last."""
        asked = self.forecast
        too_long = asked.epochs and asked.epochs > LIKE_NEW_EPOCHS
        return asked.with_epochs(LIKE_NEW_EPOCHS) if too_long else asked

    @property
    def weight_decay(self) -> float | None:
        """What suits a run of AdamW that sees its data more than once."""
        unique, epochs = self.data.train_tokens, self.better.epochs
        is_known = unique and unique >= FEWEST_TOKENS and self.learn.optimizer == "adamw"
        if not is_known or epochs <= 1:
            return None
        return round(weight_decay_for(self.shape.parameters, unique), 3)

    @property
    def plain(self) -> Forecast | None:
        """The plain recipe in the same hours with a model of the same size; None if it is asked."""
        asked = self.forecast
        if asked.recipe != "modern" or not asked.seconds:
            return None
        shape = replace(self.shape, arch="gpt2", bias=False)
        speed = asked.tokens_per_s * self.shape.flops_per_token / shape.flops_per_token
        steps = max(round(asked.seconds * speed / asked.tokens_per_step), 1)
        by_size = replace(asked, parameters=shape.law_parameters, tokens_per_s=speed)
        return replace(by_size.with_steps(steps), recipe="plain")

    @property
    def muon_settings(self) -> dict[str, float] | None:
        """Rates and decay for this width, batch and data by published rules.

        None for AdamW, and where so little is learned from that nothing published is near.
        """
        if self.learn.optimizer != "muon" or self.better.loss is None:
            return None
        published = TrainConfig()
        factors = muon_factors(
            n_embd=self.shape.n_embd,
            tokens_per_step=self.forecast.tokens_per_step,
            tokens=self.better.tokens,
            unique_tokens=self.data.train_tokens,
        )
        settings = {
            "learning_rate": WITH_MUON["learning_rate"] * factors.learning_rate,
            "embedding_rate": published.embedding_rate * factors.adamw_rates,
            "head_rate": published.head_rate * factors.adamw_rates,
            "weight_decay": WITH_MUON["weight_decay"] * factors.weight_decay,
        }
        return {name: float(f"{value:.3g}") for name, value in settings.items()}

    @property
    def advised(self) -> dict[str, float]:
        """Settings that would suit the run better than its own."""
        if self.weight_decay is not None:
            return {"weight_decay": self.weight_decay}
        return {
            name: value
            for name, value in (self.muon_settings or {}).items()
            if not math.isclose(value, getattr(self.learn, name), rel_tol=NO_MATTER)
        }

    def command(self, steps: int) -> str:
        """train.py's, for a run of so many steps with what is advised."""
        length = self.learn.of_length(steps)
        names = ("max_iters", "lr_decay_iters", "warmup_iters")
        values = {name: getattr(length, name) for name in names} | {"hours": None} | self.advised
        replaced = tuple(f"--{name}=" for name in values)
        words = [word for word in self.words if not word.startswith(replaced)]
        configured = load_config(words)
        words += [f"--{k}={v}" for k, v in values.items() if getattr(configured.learn, k) != v]
        spread = self.speed.spread
        launcher = spread.launcher if spread else ["python"]
        is_told = configured.run.shard or not (spread and spread.shard)
        shard = [] if is_told else ["--shard=True"]
        return shlex.join([*launcher, "train.py", *words, *shard])

    @property
    def checkpoints(self) -> int:
        return most_checkpoints(self.settings)

    @property
    def checkpoint_bytes(self) -> int:
        return checkpoint_bytes(self.settings)

    @property
    def optimal_tokens(self) -> float:
        return optimal_tokens_of(self.shape)

    @property
    def model_for_the_time(self) -> GPTConfig | None:
        """In GPT-2's proportions; None for the modern recipe, whose law was set to one shape."""
        shape = self.shape
        if self.forecast.recipe == "modern":
            return None
        found = model_for(
            self.forecast.tokens * self.shape.flops_per_token,
            block_size=shape.block_size,
            vocab_size=shape.vocab_size,
        )
        return found and replace(shape, n_layer=found[0], n_head=found[1], n_embd=found[2])

    def warnings(self) -> list[str]:
        found = list(self.forecast.warnings())
        card, dtype = self.speed.card, self.run.dtype
        if card and dtype == "bfloat16" and not card.has_bfloat16:
            found.append(f"{card.name} has no bfloat16: float16 will be used instead")
        if card and dtype == "float32":
            found.append("the speed is that of half precision; float32 takes twice as long or more")
        return found

    def milestones(self) -> list[Forecast]:
        """The run at the ends of what its data teach well, and as asked."""
        asked = self.forecast
        if not asked.epochs:
            return [asked]
        ends = [end for end in (1, LIKE_NEW_EPOCHS, FADING_EPOCHS) if end < 0.95 * asked.epochs]
        return [*(asked.with_epochs(end) for end in ends), asked]

    def as_json(self) -> dict[str, Any]:
        better, fitting, plain = self.better, self.model_for_the_time, self.plain
        return {
            "asked": _forecast_json(self.forecast)
            | {
                "parameters": self.shape.parameters,
                "non_embedding_parameters": self.shape.parameters - self.shape.embedding_parameters,
                "bin_bytes": self.data.all_tokens and BIN_BYTES_PER_TOKEN * self.data.all_tokens,
                "checkpoint_bytes_at_most": self.checkpoints * self.checkpoint_bytes,
                "data": self.data.source,
                "command": self.command(self.learn.max_iters),
            },
            "milestones": [_forecast_json(one) for one in self.milestones()],
            "instead": _forecast_json(better)
            | {
                "optimal_tokens": round(self.optimal_tokens),
                "model_for_the_time": fitting
                and {name: getattr(fitting, name) for name in ("n_layer", "n_head", "n_embd")},
                "weight_decay": self.weight_decay,
                "muon_settings": self.muon_settings,
                "command": self.command(better.steps),
            },
            "plain_recipe": plain and _forecast_json(plain),
            "speed": {"tokens_per_s": self.speed.tokens_per_s, "source": self.speed.source},
            "several_gpus": self.speed.spread and self.speed.spread.as_json(),
            "warnings": self.warnings(),
        }


def most_checkpoints(settings: Settings) -> int:
    """How many there are at most: those kept, the best, the stable one, the one in writing."""
    stable = settings.learn.decay_lr and settings.learn.lr_schedule == "wsd"
    return settings.run.keep_checkpoints + 2 + stable


def checkpoint_bytes(settings: Settings) -> int:
    """The size of one: weights, and what the optimiser keeps of each."""
    shape = settings.shape
    matrices = 12 * shape.n_layer * shape.n_embd**2
    second_moments = 4 * matrices if settings.learn.optimizer == "muon" else 0  # which Muon has not
    return CHECKPOINT_BYTES_PER_PARAMETER * shape.parameters - second_moments


def find_data(settings: Settings, *, unique_tokens: int | None, shard: str | None) -> Data:
    """The data of a run: as given, of a parquet file, or what lies in its dataset's folder."""
    shape, folder = settings.shape, settings.run.data_dir
    if unique_tokens is not None:
        return Data(unique_tokens, unique_tokens, "as given by --unique_tokens")
    if shard:
        return _count_shards(shard)
    if (folder / "meta.json").exists() or (folder / "train.bin").exists():
        train, val = open_bins(folder, block_size=shape.block_size, vocab_size=shape.vocab_size)
        return Data(len(train), len(train) + len(val), f"prepared in {folder}")
    if any(folder.glob("*.parquet")):
        return _count_shards(str(folder))
    return Data(None, None, f"no data in {folder}; give --parquet FILE or --unique_tokens 0.65B")


def _count_shards(given: str) -> Data:
    """Tokens of parquet files before they are prepared."""
    shards = look_into_shards(given)
    if shards.tokens is None:
        raise InputError(f"{given} has no token_count column to plan with; give --unique_tokens")
    files = f"{shards.files} parquet file{'s' if shards.files > 1 else ''}"
    source = f"by the token_count column of {files}, not yet prepared"
    return Data(round(shards.tokens * (1 - VAL_FRACTION)), shards.tokens, source)


def look_into_shards(given: str) -> Shards:
    """What files tell of themselves before they are prepared, from one small column of theirs."""
    shards = open_shards(find_shards([given]), "text")
    means = [mean_token_count(shard) for shard in shards]
    tokens = None
    if None not in means:  # each document will be followed by one end-of-text token
        tokens = sum(shard.rows * (mean + 1) for shard, mean in zip(shards, means, strict=True))
    size_bytes = sum(shard.bytes for shard in shards)
    return Shards(len(shards), size_bytes, None if tokens is None else round(tokens))


def speed_of_card(name: str, settings: Settings) -> Speed:
    card, (_, learn, run) = find_card(name), settings
    step = _step_of(settings, learn.batch_size, learn.sequences_per_step)
    speed = tokens_per_s_of(card, settings)
    return Speed(speed, card, _source(card, step, is_compiled=run.compile))


def tokens_per_s_of(card: Card, settings: Settings) -> float:
    """Of a card that learns so, in micro-batches of batch_size."""
    _, learn, run = settings
    step = _step_of(settings, learn.batch_size, learn.sequences_per_step)
    return predicted_tokens_per_s(card, step, compiled=run.compile)


def speed_of_cards(
    name: str, settings: Settings, *, world: int, shard: bool, link: str | None
) -> Speed:
    """Several cards that share each step's sequences; sharded ones are taken to run eagerly."""
    card, (shape, learn, run) = find_card(name), settings
    share, left = divmod(learn.sequences_per_step, world)
    if left:
        raise InputError(
            f"{learn.sequences_per_step} sequences per step cannot be shared by {world} cards; "
            "use a multiple of that"
        )
    is_compiled = run.compile and not shard
    step = _step_of(settings, min(learn.batch_size, share), share)
    computing_s = step.tokens / predicted_tokens_per_s(card, step, compiled=is_compiled)
    if shard:
        is_half = run.dtype != "float32"
        traffic = sharded_traffic(shape, world, step.passes, is_half=is_half)
    else:
        traffic = replicated_traffic(shape, world, step.passes)
    carrier = find_link(link) if link else link_of(card)
    overlaps = not is_compiled  # a compiled graph gives all gradients at its end
    pass_s = computing_s / step.passes
    waiting_s = traffic.exposed_s(carrier, pass_s, overlaps=overlaps)
    tokens = learn.sequences_per_step * shape.block_size
    return Speed(
        tokens / (computing_s + waiting_s),
        card,
        _source(card, step, is_compiled=is_compiled),
        Spread(world, shard, carrier, traffic, computing_s, waiting_s, overlaps),
    )


def _step_of(settings: Settings, micro_batch_size: int, sequences: int) -> Step:
    return step_of(
        settings.shape,
        settings.run.loss,
        micro_batch_size=micro_batch_size,
        sequences_per_step=sequences,
        muon_steps=settings.learn.newton_schulz_steps,
    )


def _source(card: Card, step: Step, *, is_compiled: bool) -> str:
    """Where the speed of a card comes from, in words."""
    parts = seconds_by_part(step, peak_flops=card.peak_flops, bytes_per_s=card.bytes_per_s)
    shares = ", ".join(
        f"{part} {seconds / sum(parts.values()):.0%}" for part, seconds in parts.items()
    )
    reached = " and ".join(f"{reached_share(one):.0%} on a {one.card}" for one in PUBLISHED_RUNS)
    source = (
        f"{card.name}: {card.tensor_cores} tensor cores × {card.boost_mhz} MHz × {card.core_flops} "
        f"= {card.peak_flops / 1e12:.1f} TFLOPS (dense, fp32 accumulation) and "
        f"{card.bandwidth_gb_s} GB/s. By its FLOPs and bytes a step takes "
        f"{sum(parts.values()):.3g} s ({shares}). Of such a speed "
    )
    if share := measured_share(card):
        source += f"{share:.0%} was measured on such a card"
    else:
        source += f"GPT-2 124M reached {reached}; {expected_share(card):.0%} is expected here"
    if not is_compiled:
        source += f"; without torch.compile {COMPILE_GAIN} × slower (published: 1.5 to 1.85)"
    return source


def within_budget(
    settings: Settings,
    data: Data,
    speed: Speed,
    *,
    hours: float | None,
    tokens: int | None,
    epochs: float | None,
) -> Settings:
    """The settings with the length that --hours, --tokens or --epochs ask for."""
    tokens_per_step = settings.learn.sequences_per_step * settings.shape.block_size
    if hours is not None:
        name, tokens = f"--hours {hours:g}", hours * 3600 * speed.tokens_per_s
    elif tokens is not None:
        name = f"--tokens {compact(tokens)}"
    elif epochs is not None:
        if data.train_tokens is None:
            raise InputError(f"--epochs {epochs:g} needs data: {data.source}")
        name, tokens = f"--epochs {epochs:g}", epochs * data.train_tokens
    else:
        return settings
    steps = int(tokens / tokens_per_step)
    if steps < 1:
        raise InputError(
            f"{name} is less than one step: {compact(tokens)} tokens, while a step has "
            f"{compact(tokens_per_step)} and takes "
            f"{duration(tokens_per_step / speed.tokens_per_s)}; give more, or a smaller batch"
        )
    return settings._replace(learn=settings.learn.of_length(steps))


def optimal_tokens_of(shape: GPTConfig) -> float:
    return optimal_tokens(n_layer=shape.n_layer, n_embd=shape.n_embd, vocab_size=shape.vocab_size)


def _forecast_json(forecast: Forecast) -> dict[str, Any]:
    return {
        "steps": forecast.steps,
        "tokens_per_step": forecast.tokens_per_step,
        "tokens": forecast.tokens,
        "unique_tokens": forecast.unique_tokens,
        "epochs": forecast.epochs,
        "seconds": forecast.seconds,
        "kwh": forecast.kwh,
        "loss": forecast.loss,
        "loss_band": forecast.band,
    }
