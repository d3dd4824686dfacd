"""--model=auto: nothing that a search of its own kind finds would be better, and it fits."""

from dataclasses import replace
from itertools import pairwise, product

import pytest

from nanofit.machine.cards import CARDS
from nanofit.machine.overhead import LIBRARY_BYTES
from nanofit.memory.budget import budget_of, dtype_of, has_flash_on
from nanofit.memory.need import need_of
from nanofit.memory.setup import Setup
from nanofit.outlook.capacity import Capacity
from nanofit.outlook.choice import RECIPES, Choice, choose, read_asked, take_auto
from nanofit.outlook.forecast import predicted_tokens_per_s, step_of
from nanofit.outlook.plan import Data, Speed, speed_of_card
from nanofit.outlook.scaling import expected_loss, trend
from nanofit.run.here import capacity_of
from nanofit.settings.config import flatten, load_config
from nanofit.settings.shape import GPTConfig
from nanofit.terminal import InputError
from tests.conftest import PROJECT

NEAR = 0.02
HOURS, TOKENS = (1, 5, 24), (0.1e9, 0.73e9, 10e9)
QUICK = ("GeForce RTX 3050 Ti Laptop GPU", "GeForce RTX 4070")
EVENING = str(PROJECT / "config" / "train_fineweb_4070_evening.py")
MEASURED_ALONE = {"hours", "max_iters", "eval_interval", "compile_after", "out_dir", "dtype"}


def data_of(tokens: float) -> Data:
    return Data(round(tokens), round(1.01 * tokens), "as given")


def chosen(*words: str, gpu: str = "RTX 4070", tokens: float = 0.73e9) -> Choice:
    return choose(words, capacity_of(gpu, read_asked(words).run), data_of(tokens))


# the best there is


def grid() -> list[GPTConfig]:
    """All proportions from 32 to 110 of width a layer, by other steps than the choice takes."""
    shapes = []
    for n_embd in (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 4097, 256)):
        depths = range(max(-(-n_embd // 110), 2), max(n_embd // 32, 2) + 1)
        for n_layer, (arch, _) in product(depths[:: 1 + len(depths) // 8], RECIPES):
            n_head = n_embd // (64 if n_embd % 128 else 128)
            is_modern = arch == "modern"
            shapes.append(
                GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, arch=arch, bias=is_modern)
            )
    return shapes


class OnCard:
    """What the grid's shapes reach on a card."""

    def __init__(self, card):
        self.card = card
        run = load_config([]).run
        self.room = budget_of(card.name, None, run).limit_bytes - LIBRARY_BYTES
        self.kind = {
            "dtype": dtype_of(card.name, run),
            "has_flash": has_flash_on(card.name, run),
        }
        self.speeds = {shape: self.speed(shape, 16) for shape in grid()}

    def speed(self, shape: GPTConfig, micro_batch_size: int) -> float:
        steps = 12 * shape.is_modern
        sizes = dict(micro_batch_size=micro_batch_size, sequences_per_step=512)
        step = step_of(shape, "chunked", **sizes, muon_steps=steps)
        return predicted_tokens_per_s(self.card, step)

    def fits(self, shape: GPTConfig, micro_batch_size: int) -> bool:
        setup = Setup(shape, optimizer="muon" if shape.is_modern else "adamw", **self.kind)
        needs = (need_of(replace(setup, compiled=compiled)) for compiled in (False, True))
        return all(need.at(micro_batch_size) <= self.room for need in needs)

    def better(self, limit: float, hours: float, unique: float) -> list[GPTConfig]:
        """The shapes that fit and end below a loss."""

        def loss(shape: GPTConfig, speed: float) -> float:
            recipe = "modern" if shape.is_modern else "plain"
            return trend(shape.law_parameters, 3600 * hours * speed, unique, recipe)

        found = []
        for shape, speed in self.speeds.items():
            if loss(shape, speed) >= limit:
                continue  # no smaller micro-batch makes it better
            size = next((size for size in (16, 8, 4, 2, 1) if self.fits(shape, size)), None)
            if size and loss(shape, self.speed(shape, size)) < limit:
                found.append(shape)
        return found


def with_speeds_kept(capacity: Capacity) -> Capacity:
    """The same, asked once for runs that differ in hours or data alone."""
    speeds = {}

    def tokens_per_s(settings):
        shape, learn, _ = settings
        key = shape, learn.batch_size, learn.gradient_accumulation_steps, learn.optimizer
        if key not in speeds:
            speeds[key] = capacity.tokens_per_s(settings)
        return speeds[key]

    return replace(capacity, tokens_per_s=tokens_per_s)


@pytest.mark.parametrize(
    "card",
    [
        pytest.param(card, id=card.name, marks=[] if card.name in QUICK else pytest.mark.slow)
        for card in CARDS
    ],
)
def test_no_shape_of_a_grid_that_fits_ends_more_than_002_below_the_choice(card):
    there = OnCard(card)
    capacity = with_speeds_kept(capacity_of(card.name, load_config([]).run))
    for hours, tokens in product(HOURS, TOKENS):
        choice = choose([f"--hours={hours}"], capacity, data_of(tokens))
        shape, learn, _ = choice.plan.settings
        assert there.fits(shape, learn.batch_size), (hours, tokens)
        parameters, length = shape.law_parameters, choice.plan.forecast.tokens
        reached = trend(parameters, length, tokens, choice.plan.forecast.recipe)
        known = expected_loss(parameters, length, tokens, choice.plan.forecast.recipe)
        assert choice.plan.forecast.loss == known in (reached, None)
        assert not there.better(reached - NEAR, hours, tokens), (hours, tokens)
        assert 3600 * hours * 0.99 < choice.plan.forecast.seconds <= 3600 * hours


def test_the_evening_config_is_what_is_chosen_for_its_card_data_and_hours():
    of_file, of_choice = (flatten(*one) for one in (load_config([EVENING]), the_evening_choice()))
    differing = {name for name in of_file if of_file[name] != of_choice[name]}
    assert differing <= MEASURED_ALONE


def the_evening_choice():
    return chosen("--hours=5", tokens=0.72e9).plan.settings


def test_the_next_best_are_told_with_their_losses_and_differ_in_size():
    choice = chosen("--hours=5")
    sizes = [one.shape.parameters for one in (choice.taken, *choice.others)]
    assert len(sizes) == 3
    assert all(max(a, b) / min(a, b) >= 1.1 for a, b in pairwise(sizes))
    assert choice.taken.loss < min(one.loss for one in choice.others) + 0.003
    shape_reason = next(one.why for one in choice.reasons if one.topic == "shape")
    for one in choice.others:
        assert f"{one.shape.n_layer} layers, {one.shape.n_embd} wide" in shape_reason
        assert f"loss {one.loss:.2f}" in shape_reason


def test_of_shapes_as_good_as_the_best_the_smallest_is_taken():
    choice = chosen("--hours=12", tokens=10e9)
    forced = [
        chosen("--hours=12", f"--n_layer={n_layer}", f"--n_embd={n_embd}", tokens=10e9).taken
        for n_embd in (1024, 1280, 1536)
        for n_layer in (12, 14, 16)
        if n_embd <= 110 * n_layer
    ]
    best = min(one.loss for one in forced)
    good = {one.shape for one in forced if one.loss <= best + 0.003}
    assert len(good) > 1
    assert min(good, key=lambda shape: shape.parameters) == choice.plan.shape
    recipe = next(one.why for one in choice.reasons if one.topic == "recipe")
    assert recipe.startswith(f"expected loss at best {best:.2f} by modern + muon, ")


# what was given


@pytest.mark.parametrize(
    "given",
    [
        ["--n_layer=8"],
        ["--arch=gpt2"],
        ["--optimizer=adamw"],
        ["--arch=modern", "--optimizer=adamw"],
        ["--arch=gpt2-tanh"],
        ["--n_embd=640"],
        ["--n_embd=1000"],
        ["--n_head=5"],
        ["--n_layer=30", "--n_embd=512", "--n_head=8"],
        ["--block_size=512"],
        ["--batch_size=7"],
        ["--gradient_accumulation_steps=24"],
        ["--batch_size=4", "--gradient_accumulation_steps=9"],
        ["--learning_rate=0.01", "--weight_decay=0"],
        ["--compile=False", "--eval_interval=7"],
        ["--vocab_size=512"],
    ],
    ids=" ".join,
)
def test_what_is_given_is_kept_and_the_rest_chosen_around_it(given, tmp_path):
    words = ["--hours=1", f"--out_dir={tmp_path}", *given]
    choice = chosen(*words)
    kept, settings = flatten(*load_config(given_with_shape(given))), choice.plan.settings
    for name in (word[2:].partition("=")[0] for word in given):
        assert flatten(*settings)[name] == kept[name]
    written = tmp_path / "auto.py"
    written.write_text(choice.config())
    alone, beside = load_config([str(written)]), load_config([str(written), *words])
    assert alone == beside
    steps = settings.learn.max_iters, settings.learn.warmup_iters
    length = dict(zip(("max_iters", "warmup_iters"), steps, strict=True))
    assert alone._replace(learn=replace(alone.learn, **length)) == settings
    assert there_is_a_reason_for_everything(choice)


def given_with_shape(given: list[str]) -> list[str]:
    """With a head count and a width that suit each other, as the rest of it is not at issue."""
    names = [word.partition("=")[0] for word in given]
    if "--n_embd" in names and "--n_head" not in names:
        return [*given, "--n_head=1"]
    return [*given, "--n_embd=640"] if names == ["--n_head"] else given


def there_is_a_reason_for_everything(choice: Choice) -> bool:
    names = [name for one in choice.reasons for name in one.values]
    return len(names) == len(set(names)) and all(one.why for one in choice.reasons)


def test_a_file_is_kept_as_flags_are(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("arch = 'gpt2'\nhours = 2\nn_layer = 9\n")
    shape, learn, _ = chosen(str(mine)).plan.settings
    assert (shape.arch, shape.n_layer, learn.optimizer, learn.hours) == ("gpt2", 9, "adamw", 2)
    assert 32 <= shape.n_embd / 9 <= 110


def test_a_step_is_shared_evenly_by_all_processes():
    words = ["--hours=5"]
    capacity = capacity_of("RTX 4070", load_config(words).run)
    one, three = (choose(words, replace(capacity, processes=n), data_of(10e9)).plan for n in (1, 3))
    assert three.learn.sequences_per_step % (3 * three.learn.batch_size) == 0
    assert three.forecast.loss < one.forecast.loss
    of_one = speed_of_card("RTX 4070", three.settings).tokens_per_s
    assert three.speed.tokens_per_s == pytest.approx(3 * of_one)


# little time, and speeds that were measured


def test_a_run_too_short_for_the_law_is_small_and_has_steps_enough():
    timed = load_config(["--n_layer=2", "--n_embd=64", "--n_head=1", "--block_size=128"])
    measured = Speed(2000.0, None, "measured here: a slow machine")
    machine = Capacity("slow", None, None, need_of, None, "float32")
    words = ["--hours=0.02"]
    choice = choose(words, machine.with_speed_of(timed, measured), data_of(1.5e6))
    shape, learn, run = choice.plan.settings
    assert choice.plan.forecast.loss is None and not choice.taken.is_known
    assert shape.parameters < 10e6 and shape.block_size == 128
    assert learn.max_iters >= 100 and learn.sequences_per_step >= 4
    assert not run.compile and run.eval_interval >= learn.max_iters / 2
    assert (learn.optimizer, learn.learning_rate, learn.muon_steps) == ("muon", 0.025, 5)
    assert "measured here: a slow machine" in choice.config()


def test_a_measured_speed_is_that_of_what_was_timed_and_of_its_flops_elsewhere():
    timed = load_config(["--batch_size=2", "--gradient_accumulation_steps=3"])
    tokens = 6 * timed.shape.block_size
    measured = Speed(tokens / (10.0 + 2.0), None, "measured", update_s=2.0)
    machine = Capacity("a machine", None, None, need_of, None, "float32")
    machine = machine.with_speed_of(timed, measured)
    assert machine.tokens_per_s(timed) == pytest.approx(tokens / 12)
    larger = timed._replace(learn=replace(timed.learn, gradient_accumulation_steps=30))
    assert machine.tokens_per_s(larger) == pytest.approx(10 * tokens / (100 + 2))
    deeper = timed._replace(shape=replace(timed.shape, n_layer=24))
    flops, weights = (
        getattr(deeper.shape, name) / getattr(timed.shape, name)
        for name in ("flops_per_token", "parameters")
    )
    assert machine.tokens_per_s(deeper) == pytest.approx(tokens / (10 * flops + 2 * weights))
    assert "as many FLOP/s are assumed" in machine.speed(deeper).source
    assert machine.speed(timed).source == "measured"


def test_blocks_are_no_longer_than_the_validation_text():
    words = ["--hours=5"]
    capacity = capacity_of("RTX 4070", load_config(words).run)
    choice = choose(words, capacity, Data(10**9, 10**9 + 700, "little to validate on"))
    assert choice.plan.shape.block_size == 512


# refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --hours"),
        (["--hours=0"], "hours = 0.0 must be above 0"),
        (["--hours=1", "--max_iters=9"], "each set the run's length"),
        (["--hours=1", "--init_from=gpt2"], "--init_from=gpt2 brings its own"),
        (["--hours=1", "--loss=full"], "leave out --loss=full"),
        (["--hours=1", "--shard=True"], "leave out --shard"),
        (["--hours=1", "--n_layer=200"], "knows no width for n_layer = 200"),
        (["--hours=1", "--n_layer=64", "--n_embd=8192"], "nothing that --model=auto could choose"),
        (["--hours=1", "--n_embd=7"], "heads of 7 / 1 = 7 are no multiple of 4"),
        (["--hours=1e-7"], "is less than one step"),
        (["--hours=1", "--n_lair=3"], "did you mean n_layer?"),
    ],
)
def test_what_leaves_nothing_to_choose_is_told_in_a_line(words, message):
    with pytest.raises(InputError, match=r".") as refused:
        chosen(*words)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_auto_is_the_only_model_there_is():
    assert take_auto(["a.py", "--model=auto", "--hours=1"]) == (True, ["a.py", "--hours=1"])
    assert take_auto(["--hours=1"]) == (False, ["--hours=1"])
    for word in ("--model=gpt2", "--model", "--model="):
        with pytest.raises(InputError, match="--model=auto is all there is"):
            take_auto([word])
