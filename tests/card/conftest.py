"""The fixture of the tests here: a CUDA card without a GPU. README.md says what it can show."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.card.harness import LEAVE, PROJECT, CardWithoutGpu, why_impossible
from tests.skipped import skip_all, tell_loudly

# As small as every line of a run allows: what is slow here is to compile.
SMALL = (
    "--n_layer=1 --n_head=2 --n_embd=64 --block_size=128 --batch_size=4 "
    "--gradient_accumulation_steps=4 --warmup_iters=2 --max_iters=8 --eval_interval=4 "
    "--eval_iters=2 --log_interval=1 --compile_after=2 --sample_interval=0"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := why_impossible():
        skip_all(items, Path(__file__).parent, reason)


def pytest_terminal_summary(terminalreporter) -> None:
    if reason := why_impossible():
        tell_loudly(terminalreporter, "CUDA", reason)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "covered: what it executes of the product is noted")


@pytest.fixture
def card(tmp_path, request) -> Callable[..., CardWithoutGpu]:
    """A card: card(name="RTX 4070", memory=12282, others=600, devices=2).run("train.py", ...)."""

    def make(
        name: str = "RTX 4070",
        *,
        memory: int | None = None,
        others: int = 0,
        devices: int = 1,
        capability: str | None = None,
        folder: Path = tmp_path,
    ) -> CardWithoutGpu:
        is_covered = request.node.get_closest_marker("covered") is not None
        return CardWithoutGpu(folder, name, memory, others, devices, capability, is_covered)

    return make


@pytest.fixture
def python(card):
    """Run a few lines of Python on a card; what they `say` comes back, and the run."""
    begin = "import json, torch; say = lambda **values: print(json.dumps(values), flush=True)\n"

    def run(code: str, on: CardWithoutGpu | None = None, **options):
        done = (on or card()).run("-c", begin + code + LEAVE, PYTHONPATH=str(PROJECT), **options)
        assert done.code == 0, done
        said = [line for line in done.output.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in said], done

    return run


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """Random tokens of GPT-2's vocabulary, as prepare_fineweb.py would leave them."""
    folder = tmp_path_factory.mktemp("tokens")
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 1_200_000), ("val", 200_000)):
        random.integers(0, 50257, count, dtype=np.uint16).tofile(folder / f"{split}.bin")
        splits[split] = {"bins": [{"file": f"{split}.bin", "tokens": count}]}
    meta = {"format": 1, "vocab_size": 50257, "splits": splits}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture
def train(card, tokens):
    """Run train.py in a small shape: train("--dtype=float16", on=card("RTX 2060"))."""

    def run(*words: str, on: CardWithoutGpu | None = None, **options):
        on = on or card()
        flags = [f"--dataset={tokens}", f"--out_dir={on.folder / 'out'}"]
        return on.run("train.py", *SMALL, *flags, *words, **options)

    return run
